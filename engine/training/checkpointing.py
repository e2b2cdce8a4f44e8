"""Activation checkpointing: blocks that compute their activations again in the backward, or some of
them.

Blocks are not wrapped, so names of parameters stay as they are.
"""

from collections import Counter, defaultdict
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...utils.compat.torch_private import (
    TorchDispatchMode,
    counting_alias,
    makes_uncounted_view,
    n_writes,
    storage_id,
    tree_leaves,
    tree_map,
)
from ...utils.errors import ConfigError

_PRODUCTS = {"mm", "addmm", "_grouped_mm"}
"""Operators of linear layers and experts. Scores of an attention are a ``bmm``, and would take
tokens x tokens.
"""


def checkpoint_activations(model: PreTrainedModel, choice: bool | str) -> None:
    """Set up what ``gradient_checkpointing`` of `TrainEngineConfig` says.

    Raises:
        ConfigError: single blocks of this model cannot be chosen (``every_N``).
    """
    if choice is False:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if choice == "selective":
        options["context_fn"] = _contexts
    model.gradient_checkpointing_enable(options)
    if choice is True or choice == "selective":
        return

    # The rest is `every_N`, and transformers has just switched on every block.
    blocks = []
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            blocks.append(module)
    if not blocks:
        raise ConfigError(
            f"config key 'gradient_checkpointing' is {choice!r}, but {type(model).__name__} "
            "has no blocks that can be checkpointed one by one; set it to true or false"
        )
    every = int(choice.removeprefix("every_"))
    for number, block in enumerate(blocks):
        block.gradient_checkpointing = number % every == 0


def keeps_result(operator: Any) -> bool:
    """Whether ``gradient_checkpointing: selective`` keeps the result of an operator."""
    # "mm" of "aten::mm.default"
    _, _, overload = operator.name().partition("::")
    name, _, _ = overload.partition(".")
    return name in _PRODUCTS or "attention" in name or "attn" in name


class KeptResult:
    """What an operator has returned, without its graph, until an operator of torch writes to it.
    Writes through ``.data`` are not seen.

    The experts of gpt-oss add a bias to their products in place. That operator runs again in the
    recomputation, and would add the bias to a kept product once more.
    """

    def __init__(self, result: Any) -> None:
        self._result = tree_map(_alias, result)
        self._counted: list[tuple[Tensor, int]] = []
        for tensor in tensors_of(self._result):
            self.watch(tensor)

    def watch(self, view: Tensor) -> None:
        """Count writes to a tensor in the memory of the result, too."""
        alias = counting_alias(view)
        self._counted.append((alias, n_writes(alias)))

    def get(self) -> Any:
        """The result, or None if it was written to. Then its memory is given up, too."""
        if any(n_writes(tensor) != count for tensor, count in self._counted):
            self._result = None
            self._counted.clear()
        return self._result


def _alias(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return counting_alias(leaf)
    return leaf


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors in what an operator has returned."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


class KeptMemory:
    """Finds the kept result in whose memory a tensor is."""

    def __init__(self) -> None:
        self._results: dict[int, KeptResult] = {}

    def note(self, operator: Any, result: Any) -> KeptResult | None:
        """Note what an operator has returned. Return it if it is to be kept."""
        if keeps_result(operator):
            kept = KeptResult(result)
            for tensor in tensors_of(result):
                self._results[storage_id(tensor)] = kept
            return kept

        if makes_uncounted_view(operator):
            owner = self._results.get(storage_id(result))
            if owner is not None:
                owner.watch(result)
        return None

    def clear(self) -> None:
        """Forget all results."""
        self._results.clear()


_Kept = defaultdict[Any, list[KeptResult | None]]
"""Results of a block's forward by operator, in the order of its calls. None: used already."""


def _contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Make the contexts of the forward of a block and of its recomputation.

    Those of torch refuse a backward if a kept result was written to.
    """
    kept = _Kept(list)
    return _Forward(kept), _Recomputation(kept)


class _Context(TorchDispatchMode):
    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let a compiled function in the block stay compiled."""
        return True


class _Forward(_Context):
    def __init__(self, kept: _Kept) -> None:
        super().__init__(kept)
        self._memory = KeptMemory()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kept = self._memory.note(func, result)
        if kept is not None:
            self._kept[func].append(kept)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._memory.clear()
        # Results that the block has written to give up their memory now.
        for results in self._kept.values():
            for result in results:
                if result is not None:
                    result.get()


class _Recomputation(_Context):
    def __enter__(self) -> Any:
        self._n_calls = Counter[Any]()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = None
        if func in self._kept:
            result = self._take(func)
        if result is None:
            return func(*args, **(kwargs or {}))
        return result

    def _take(self, func: Any) -> Any:
        """The kept result of the next call of an operator. None: the operator has to run."""
        number = self._n_calls[func]
        self._n_calls[func] += 1
        results = self._kept[func]
        if number >= len(results):
            raise ConfigError(
                f"a block calls {func} more often in its recomputation than in its forward, so "
                "kept results cannot be told apart; set config key 'gradient_checkpointing' to true"
            )
        kept = results[number]
        # Each result lives until its first use.
        results[number] = None
        if kept is None:
            return None
        return kept.get()
