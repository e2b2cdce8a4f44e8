"""A language-model head that returns log-probabilities and entropies instead of logits.

Under FSDP2 the weight of the head is complete only inside the model's forward, so the loss cannot
apply the head later. Inside `scoring` the head itself computes the scores, chunk by chunk
(`score_tokens`), and ``[tokens, vocab]`` logits never exist. The model then applies its own code
after the head to two numbers per token. `find_scoring_head` excludes models for which this changes
the result: those that scale, cap or edit logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ...utils.compat.torch_private import count_forward_hooks
from ...utils.distributed import RankGroup, all_agree
from ...utils.errors import ConfigError
from ...utils.logging import get_logger
from .context_parallel import own_targets
from .logprobs import Uses, score_tokens, token_logprobs
from .packed_batch import MicroBatch, pack_rows
from .probe_model import (
    NOT_UNDERSTOOD,
    Twins,
    probe_tokens,
    reason_of,
    twin_dtype,
    with_few_layers,
)
from .rank_parts import Group
from .tensor_parallel import has_own_forward, plain_head, words_of
from .unsharded import unsharded_class

logger = get_logger(__name__)

_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference (nats) that counts as rounding, by compute dtype."""
_TOKENS = 24


@dataclass(frozen=True)
class ScoringHead:
    """A head (layer ``linear``) that may return scores instead of logits, and the number of forward
    hooks (without pre-hooks) on its model.
    """

    linear: nn.Linear
    n_model_hooks: int

    def is_seen(self, model: PreTrainedModel) -> bool:
        """Whether something now sees the logits: a hook, an adapter, another head."""
        has_other_head = _linear_head(model) is not self.linear
        return has_other_head or count_forward_hooks(model) != self.n_model_hooks


@contextmanager
def scoring(
    head: nn.Linear,
    mb: MicroBatch,
    temperature: float,
    packed: bool,
    chunk_size: int | None = None,
    sequence: Group = None,
    uses: Uses | None = None,
    compiled: bool = False,
) -> Iterator[None]:
    """Let ``head`` return ``[..., 2]`` float32 instead of logits: log p of the next token, and the
    entropy.

    The model is called once inside, on the tokens of ``mb``: in one row if ``packed``, else padded
    by `MicroBatch.padded` (scores are 0 at padding). Logits exist for ``chunk_size`` tokens at a
    time (None: by their size). The ranks of ``sequence`` share the row: each scores its part of it.
    ``uses`` is for `columns`. With ``compiled`` scores are computed by torch.compile.
    """
    targets = own_targets(mb, sequence)
    places = (mb.rows, mb.position_ids)

    def forward(hidden: Tensor) -> Tensor:
        rows = hidden[0, : len(targets)] if packed else hidden[places]
        # The whole weight, or with tensor parallelism the words of this rank.
        weight, bias, first_word, group = words_of(head)
        scores = score_tokens(
            rows,
            weight,
            bias,
            targets,
            temperature,
            chunk_size,
            first_word,
            group,
            uses,
            compiled,
        )
        # Not a view of the scores, about which FSDP warns.
        if packed:
            return torch.stack([score[None] for score in scores], dim=-1)
        padded = hidden.new_zeros(*hidden.shape[:-1], 2, dtype=torch.float32)
        return padded.index_put(places, torch.stack(scores, -1))

    # The module's own attribute hides the method of its class.
    before = vars(head).get("forward")
    head.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


def find_scoring_head(
    twins: Twins,
    group: RankGroup = None,
) -> ScoringHead | None:
    """Find the head of the twins' model if its output is the logits and the model does not change
    them. Else log why and return None.

    Collective over the ranks of the model's mesh. Call it before the model has memory: a twin needs
    the float32 shard of a model with a few layers (all layers, if that does not work) for two short
    forwards. The model and torch's generators are not changed.
    """
    model = twins.model
    head = _linear_head(model)
    problem: str | None = "its head is no plain linear layer"
    if head is not None:
        # A few layers show as much as all, if the model can be built with them.
        for config in (with_few_layers(model.config), model.config):
            problem = _difference(twins, config, group)
            if problem is None:
                return ScoringHead(head, count_forward_hooks(model))
    name = unsharded_class(model).__name__
    logger.info(
        "losses of %s are computed from whole [tokens, vocabulary] logits: %s", name, problem
    )
    return None


def _linear_head(model: PreTrainedModel) -> nn.Linear | None:
    head = plain_head(model)
    if head is None or has_own_forward(head) or count_forward_hooks(head):
        return None
    return head


@torch.no_grad()
def _difference(
    twins: Twins,
    config: PretrainedConfig,
    group: RankGroup,
) -> str | None:
    """Describe how a twin's scores differ from those of its logits. None if they agree on every
    rank.
    """
    ids = probe_tokens(config, _TOKENS)[None]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    mb = pack_rows(batch, [0], [_TOKENS]).to(twins.device)
    ids = mb.data["input_ids"]
    dtype = twin_dtype(config)
    problem = None
    try:
        with twins.of(config, dtype) as twin:
            logits = twin(input_ids=ids[None], use_cache=False).logits[0]
            from_logits = token_logprobs(logits.float(), ids, mb.cu_seqlens)
            with scoring(_linear_head(twin), mb, 1.0, packed=True):  # type: ignore[arg-type]
                scores = twin(input_ids=ids[None], use_cache=False).logits[0]

        # Scores are at the position before the token. NaN is a difference, too.
        expected = torch.stack(from_logits, dim=-1)
        is_same = scores.shape == expected.shape
        if is_same:
            difference = (scores[:-1] - expected[1:]).abs().max()
            is_same = float(difference) <= _LIMITS[dtype]
        if not is_same:
            problem = "the model changes what its head returns"
    except (*NOT_UNDERSTOOD, ConfigError) as error:
        problem = f"it cannot do without ({reason_of(error)})"
    if all_agree(problem is None, group):
        return None
    return problem or "other ranks say so"
