"""Output of a model for one micro-batch, computed when the loss function asks for it."""

from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ...utils.compat.torch_private import tree_map
from ...utils.errors import BatchError
from ..config import TrainEngineConfig
from .attention import packed_row
from .context_parallel import own_targets
from .head import ScoringHead, scoring
from .logprobs import Uses, align_with_tokens, columns, score_logits
from .packed_batch import MicroBatch
from .rank_parts import gather_parts, own_part


class ModelOutput:
    """Log-probabilities and entropies of a micro-batch's tokens, or its logits. The first access
    runs the model.

    - `logprobs`, `entropy` and `at` are computed by the ``head`` (of `find_scoring_head`) chunk by
      chunk, so ``[tokens, vocab]`` logits and their gradient never exist.
    - `logits` holds them whole. A loss that needs both must take the logits first. Ranks that share
      the row (``sequence``) have no whole logits.

    All are differentiable. Used as a tensor (``output / 2``, ``torch.softmax(output, -1)``,
    ``output.shape``) it behaves like its logits, so loss functions written for logits work
    unchanged.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mb: MicroBatch,
        config: TrainEngineConfig,
        head: ScoringHead | None,
        sequence: dist.ProcessGroup | None = None,
    ) -> None:
        self._model, self._mb, self._config, self._sequence = model, mb, config, sequence
        self._head = None if head is None or head.is_seen(model) else head.linear
        self._logits: torch.Tensor | None = None
        self._scores: dict[float, tuple[torch.Tensor, torch.Tensor]] = {}
        self._computed: torch.Tensor | None = None  # what the model returned

    def from_model(self) -> torch.Tensor:
        """What the model returned on this rank. Runs it, if the loss function did not."""
        if self._computed is None:
            self.at(self._config.temperature)
        assert self._computed is not None
        return self._computed

    @property
    def logprobs(self) -> torch.Tensor:
        """``[T]`` float32: log-probability of each token at the engine's temperature, 0 at the
        first token of a sequence.
        """
        return self.at(self._config.temperature)[0]

    @property
    def entropy(self) -> torch.Tensor:
        """``[T]`` float32, nats: entropy of each token's choice at the engine's temperature, 0 at
        the first of a sequence.
        """
        return self.at(self._config.temperature)[1]

    @property
    def logits(self) -> torch.Tensor:
        """``[T, V]`` in the compute dtype. Row t predicts token t + 1.

        Raises:
            BatchError: log-probabilities were computed before, or ranks share the row.
        """
        if self._sequence is not None:
            raise BatchError(
                "the loss function asked for logits, but ranks share each row "
                f"(context_parallel_size is {dist.get_world_size(self._sequence)}), so that none "
                "has the logits of all tokens; take output.logprobs, output.entropy or "
                "output.at(temperature)"
            )
        return self._own_logits()

    def _own_logits(self) -> torch.Tensor:
        if self._logits is None:
            self._refuse_second("logits")
            self._logits = own_output(
                self._model, self._mb, self._config.pack_sequences, self._sequence
            )
            self._computed = self._logits
        return self._logits

    def at(self, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """`logprobs` and `entropy` with logits divided by ``temperature``.

        Raises:
            BatchError: they were computed before at another temperature, without taking the logits
                first.
        """
        if temperature not in self._scores:
            self._scores[temperature] = self._score(temperature)
        return self._scores[temperature]

    def _score(self, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        mb, packed, chunk_size = (
            self._mb,
            self._config.pack_sequences,
            self._config.logprobs_chunk_size,
        )
        uses, compiled = Uses(), self._config.compile
        if self._head is not None and self._logits is None:
            self._refuse_second(f"log-probabilities at temperature {temperature}")
            with scoring(
                self._head, mb, temperature, packed, chunk_size, self._sequence, uses, compiled
            ):
                scores = own_output(self._model, mb, packed, self._sequence)
            self._computed = scores
        else:
            targets = own_targets(mb, self._sequence)
            of_logits = score_logits(
                self._own_logits(), targets, temperature, chunk_size, uses, compiled
            )
            scores = torch.stack(of_logits, dim=-1)
        logprobs, entropy = columns(gather_parts(scores, self._sequence)[: mb.n_tokens], uses)
        return align_with_tokens(logprobs, mb.cu_seqlens), align_with_tokens(entropy, mb.cu_seqlens)

    def _refuse_second(self, what: str) -> None:
        # A second forward would be a collective in which ranks without a loss token do not take
        # part.
        if self._scores:
            raise BatchError(
                f"the loss function asked for {what} after log-probabilities at temperature "
                f"{next(iter(self._scores))}; take output.logits first, of which everything else "
                "can be computed"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.logits, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(
            lambda value: value.logits if isinstance(value, cls) else value, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _of_logits(name: str) -> Any:
    def operator(self: ModelOutput, *others: Any) -> Any:
        return getattr(self.logits, name)(*others)

    return operator


for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "matmul",
    "neg",
    "getitem",
    "len",
):
    setattr(ModelOutput, f"__{_name}__", _of_logits(f"__{_name}__"))


def through_model(
    loss: torch.Tensor, output: "ModelOutput | torch.Tensor"
) -> tuple[torch.Tensor, bool]:
    """``loss`` with a gradient of zeros if it does not depend on the ``output`` of the model, and
    whether it does.

    So its backward runs through the model in any case, because those of the other ranks wait for
    it.

    Raises:
        BatchError: the loss function ran the model without gradients.
    """
    computed = output.from_model() if isinstance(output, ModelOutput) else output
    if computed.grad_fn is None:
        raise BatchError(
            "the loss function took the model's output without gradients; call it outside of "
            "torch.no_grad"
        )
    waiting = [loss.grad_fn]
    seen = set[Any]()
    while waiting:
        node = waiting.pop()
        if node is computed.grad_fn:
            return loss, True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return loss + nothing_of(computed), False


def nothing_of(output: torch.Tensor) -> torch.Tensor:
    """A scalar zero with a gradient of zeros, also where ``output`` is not finite."""
    return output.masked_fill(
        torch.ones_like(output, dtype=torch.bool), 0.0
    ).sum()  # 0 * inf would be NaN


def model_output(
    model: PreTrainedModel, mb: MicroBatch, packed: bool, sequence: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Run the model: ``[tokens, vocab]`` logits (actor) or ``[tokens]`` float32 values (critic), in
    packed order.
    """
    return gather_parts(own_output(model, mb, packed, sequence), sequence)[: mb.n_tokens]


def own_output(
    model: PreTrainedModel, mb: MicroBatch, packed: bool, sequence: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """`model_output`. With a ``sequence``, whose ranks share the row: of this rank's part of the
    filled row.
    """
    if packed:
        row = mb.row(1 if sequence is None else dist.get_world_size(sequence))
        ids, positions = (
            own_part(each, sequence)[None] for each in (row.data["input_ids"], row.position_ids)
        )
        images = {} if row.vision is None else row.vision.inputs(row)
        with packed_row(row.lengths, row.cu_seqlens, sequence):
            logits = model(
                **{"input_ids": ids, "position_ids": positions} | images, use_cache=False
            ).logits[0]
        logits = logits[: mb.n_tokens] if sequence is None else logits
    else:
        logits = model(**mb.padded(), use_cache=False).logits[mb.rows, mb.position_ids]
    return logits[:, 0].float() if logits.shape[-1] == 1 else logits
