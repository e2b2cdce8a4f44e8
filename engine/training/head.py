"""A language-model head that answers with log-probabilities and entropies instead of logits.

Under FSDP2 the head's weight is whole only inside the forward of the model, so the loss cannot apply the head later:
while `scoring` is in force the head itself does, chunk by chunk (`score_tokens`), and the ``[tokens, vocab]`` logits
never exist. What the model does with its head's output is then done to two numbers a token. Most models do nothing;
those that scale or cap logits, or write into some of them, are found by `find_scoring_head`, which asks a twin.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ...utils.collective_errors import collective_broke
from ...utils.compat.torch_private import count_forward_hooks
from ...utils.distributed import all_agree
from ...utils.errors import ConfigError
from ...utils.logging import get_logger
from .logprobs import next_tokens, score_tokens, token_logprobs
from .microbatch import MicroBatch
from .twin import NOT_UNDERSTOOD, probe_tokens, twin_dtype, twin_of, with_few_layers
from .unsharded import unsharded_class

logger = get_logger(__name__)

_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference (nats) that is put down to rounding, by the dtype that is computed in."""
_TOKENS = 24


@dataclass(frozen=True)
class ScoringHead:
    """A head that can do with less than logits.

    Attributes:
        linear: the layer itself.
        n_model_hooks: on the forward of the model that it is of.
    """

    linear: nn.Linear
    n_model_hooks: int

    def is_seen(self, model: PreTrainedModel) -> bool:
        """Whether something has come between the head and the logits since: a hook, an adapter, another head."""
        return _linear_head(model) is not self.linear or count_forward_hooks(model) != self.n_model_hooks


@contextmanager
def scoring(
    head: nn.Linear, mb: MicroBatch, temperature: float, packed: bool, chunk_size: int | None = None
) -> Iterator[None]:
    """Let ``head`` return ``[..., 2]`` float32, log p of the next token and the entropy, in place of logits.

    Args:
        head: of the model, which is called once meanwhile, on the tokens of ``mb``.
        mb: the tokens; one row of them when ``packed``, else padded as `MicroBatch.padded` does, with 0 at padding.
        temperature: what logits are divided by.
        packed: how the model is called.
        chunk_size: tokens whose logits exist at a time; None: by their size.
    """
    targets, places = next_tokens(mb.data["input_ids"]), (mb.rows, mb.position_ids)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden[0, : len(targets)] if packed else hidden[places]
        scores = score_tokens(rows, head.weight, head.bias, targets, temperature, chunk_size)
        if packed:
            return torch.stack([score[None] for score in scores], dim=-1)  # no view, which FSDP warns about
        return hidden.new_zeros(*hidden.shape[:-1], 2, dtype=torch.float32).index_put(places, torch.stack(scores, -1))

    head.forward = forward  # type: ignore[method-assign]  # hides that of the class
    try:
        yield
    finally:
        del head.forward


def find_scoring_head(
    model: PreTrainedModel, device: torch.device, group: dist.ProcessGroup | None = None
) -> ScoringHead | None:
    """Find the model's head, if its output is the logits and nothing is done with them; else None, and a line says so.

    All ranks of the model's mesh call it, best before the model has memory. A twin takes the float32 shard of a model
    with a few layers, or, if such a one does not work, with all of them, for two short forwards. The model and torch's
    generators are not touched.
    """
    problem = "its head is no plain linear layer"
    if (head := _linear_head(model)) is not None:
        for config in (with_few_layers(model.config), model.config):
            if (problem := _difference(model, config, device, group)) is None:
                return ScoringHead(head, count_forward_hooks(model))
    name = unsharded_class(model).__name__
    logger.info("losses of %s are computed from whole [tokens, vocabulary] logits: %s", name, problem)
    return None


def _linear_head(model: PreTrainedModel) -> nn.Linear | None:
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return None
    return None if "forward" in vars(head) or count_forward_hooks(head) else head


@torch.no_grad()
def _difference(
    model: PreTrainedModel, config: PretrainedConfig, device: torch.device, group: dist.ProcessGroup | None
) -> str | None:
    """The difference between the scores of a twin and those of its logits; None if there is none on any rank."""
    mb = _one_sequence(probe_tokens(config, _TOKENS), device)
    ids, dtype, problem = mb.data["input_ids"], twin_dtype(config), None
    try:
        with twin_of(model, config, dtype, device) as twin:
            logits = twin(input_ids=ids[None], use_cache=False).logits[0]
            expected = torch.stack(token_logprobs(logits.float(), ids, mb.cu_seqlens), dim=-1)
            with scoring(_linear_head(twin), mb, 1.0, packed=True):  # type: ignore[arg-type]
                scores = twin(input_ids=ids[None], use_cache=False).logits[0]
        if scores.shape != expected.shape or not float((scores[:-1] - expected[1:]).abs().max()) <= _LIMITS[dtype]:
            problem = "the model changes what its head returns"
    except (*NOT_UNDERSTOOD, ConfigError) as error:
        if isinstance(error, torch.OutOfMemoryError) or collective_broke(error):
            raise
        problem = f"it cannot do without ({type(error).__name__}: {' '.join(str(error).split())})"
    return None if all_agree(problem is None, group) else problem or "other ranks say so"


def _one_sequence(ids: torch.Tensor, device: torch.device) -> MicroBatch:
    cu_seqlens = torch.tensor([0, len(ids)], dtype=torch.int32)
    data = {"input_ids": ids, "position_ids": torch.arange(len(ids)), "cu_seqlens": cu_seqlens}
    return MicroBatch(data, torch.zeros(1, dtype=torch.int64), lengths=(len(ids),)).to(device)
