"""Output of a model for one micro-batch, computed when the loss function asks for it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ...utils.compat.torch_private import tree_map
from ...utils.errors import BatchError, ConfigError
from ..config import TrainEngineConfig
from .attention import packed_row
from .context_parallel import own_targets
from .head import ScoringHead, scoring
from .logprobs import Scores, Uses, align_with_tokens, columns, score_logits
from .packed_batch import MicroBatch
from .rank_parts import Group, gather_parts, own_part


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
        sequence: Group = None,
    ) -> None:
        self._model = model
        self._mb = mb
        self._config = config
        self._sequence = sequence
        # A head whose logits something sees must return them.
        self._head = None if head is None or head.is_seen(model) else head.linear
        self._logits: Tensor | None = None  # of the row, and of whole sequences
        self._whole_logits: Tensor | None = None
        self._scores: dict[float, Scores] = {}
        self._computed: Tensor | None = None  # what the model returned

    def from_model(self) -> Tensor:
        """What the model returned on this rank. Runs it, if the loss function did not."""
        if self._computed is None:
            self.at(self._config.temperature)
        assert self._computed is not None
        return self._computed

    @property
    def logprobs(self) -> Tensor:
        """``[T]`` float32: log-probability of each token at the engine's temperature, 0 at the
        first token of a sequence.
        """
        return self.at(self._config.temperature)[0]

    @property
    def entropy(self) -> Tensor:
        """``[T]`` float32, nats: entropy of each token's choice at the engine's temperature, 0 at
        the first of a sequence.
        """
        return self.at(self._config.temperature)[1]

    @property
    def logits(self) -> Tensor:
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
        if self._whole_logits is None:
            self._whole_logits = self._mb.of_sequences(self._own_logits())
        return self._whole_logits

    def _own_logits(self) -> Tensor:
        if self._logits is None:
            self._refuse_second("logits")
            self._logits = self._run()
        return self._logits

    def _run(self) -> Tensor:
        packed = self._config.pack_sequences
        try:
            self._computed = own_output(self._model, self._mb, packed, self._sequence)
        except AttributeError as error:
            # Python would take it for a missing property, and run the model again in __getattr__.
            raise RuntimeError(f"the forward of the model failed: {error}") from error
        return self._computed

    def at(self, temperature: float) -> Scores:
        """`logprobs` and `entropy` with logits divided by ``temperature``.

        Raises:
            BatchError: they were computed before at another temperature, without taking the logits
                first.
        """
        if temperature not in self._scores:
            self._scores[temperature] = self._score(temperature)
        return self._scores[temperature]

    def _score(self, temperature: float) -> Scores:
        mb = self._mb
        config = self._config
        uses = Uses()
        if self._head is not None and self._logits is None:
            self._refuse_second(f"log-probabilities at temperature {temperature}")
            with scoring(
                self._head,
                mb,
                temperature,
                config.pack_sequences,
                config.logprobs_chunk_size,
                self._sequence,
                uses,
                config.compile,
            ):
                scores = self._run()
        else:
            of_logits = score_logits(
                self._own_logits(),
                own_targets(mb, self._sequence),
                temperature,
                config.logprobs_chunk_size,
                uses,
                config.compile,
            )
            scores = torch.stack(of_logits, dim=-1)

        # Whole rows, without their filling. Of shared prompts, one copy for each sequence.
        scores = gather_parts(scores, self._sequence)[: mb.n_row_tokens]
        scores = mb.of_sequences(scores)
        logprobs, entropy = columns(scores, uses)
        logprobs = align_with_tokens(logprobs, mb.cu_seqlens)
        entropy = align_with_tokens(entropy, mb.cu_seqlens)
        return logprobs, entropy

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
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        def logits_of(value: Any) -> Any:
            return value.logits if isinstance(value, cls) else value

        args, kwargs = tree_map(logits_of, (args, kwargs or {}))
        return func(*args, **kwargs)


def _of_logits(name: str) -> Any:
    def operator(self: ModelOutput, *others: Any) -> Any:
        return getattr(self.logits, name)(*others)

    return operator


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OTHERS = (
    "lt",
    "le",
    "eq",
    "ne",
    "gt",
    "ge",
    "neg",
    "pos",
    "abs",
    "getitem",
    "setitem",
    "len",
    "bool",
)

# Python looks these up in the class, where `ModelOutput.__getattr__` does not find them. Without
# its own `==`, an object would be compared by its identity, without an error.
for _name in (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), *_OTHERS):
    setattr(ModelOutput, f"__{_name}__", _of_logits(f"__{_name}__"))


def scalar_loss(loss: object) -> Tensor:
    """Return what a loss function returned as ``[]``. `ConfigError` if it is no single value."""
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"the loss function returned {loss!r}, a {type(loss).__name__}; expected a tensor "
            "with one value, from which gradients can be computed (do not call .item() on it)"
        )
    if loss.numel() != 1:
        raise ConfigError(
            f"the loss function returned a tensor of shape {list(loss.shape)}; expected one value, "
            "the mean over the loss tokens of the micro-batch say"
        )
    return loss.reshape(())


def through_model(
    loss: Tensor,
    output: "ModelOutput | torch.Tensor",
) -> tuple[Tensor, bool]:
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

    # Search the graph of the loss for the output.
    waiting = [loss.grad_fn]
    seen = set[Any]()
    while waiting:
        node = waiting.pop()
        if node is computed.grad_fn:
            return loss, True
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return loss + nothing_of(computed), False


def nothing_of(output: Tensor) -> Tensor:
    """A scalar zero with a gradient of zeros, also where ``output`` is not finite."""
    # Not a product with 0: 0 * inf would be NaN.
    everywhere = torch.ones_like(output, dtype=torch.bool)
    return output.masked_fill(everywhere, 0.0).sum()


def model_output(
    model: PreTrainedModel,
    mb: MicroBatch,
    packed: bool,
    sequence: Group = None,
) -> Tensor:
    """Run the model: ``[tokens, vocab]`` logits (actor) or ``[tokens]`` float32 values (critic), in
    packed order.
    """
    own = own_output(model, mb, packed, sequence)
    return mb.of_sequences(gather_parts(own, sequence)[: mb.n_row_tokens])


def own_output(
    model: PreTrainedModel,
    mb: MicroBatch,
    packed: bool,
    sequence: Group,
) -> Tensor:
    """`model_output` of the row, in which a shared prompt is once. With a ``sequence``, whose
    ranks share the row: of this rank's part of the filled row.
    """
    if packed:
        row = mb.row(1 if sequence is None else dist.get_world_size(sequence))
        inputs: dict[str, Any] = {
            "input_ids": own_part(row.data["input_ids"], sequence)[None],
            "position_ids": own_part(row.position_ids, sequence)[None],
        }
        if row.vision is not None:
            inputs |= row.vision.inputs(row)
        with packed_row(row.lengths, row.cu_seqlens, sequence, row.seen):
            logits = model(**inputs, use_cache=False).logits[0]
        if sequence is None:
            logits = logits[: mb.n_row_tokens]
    else:
        logits = model(**mb.padded(), use_cache=False).logits[mb.rows, mb.position_ids]
    # A value head has one column.
    if logits.shape[-1] == 1:
        return logits[:, 0].float()
    return logits
