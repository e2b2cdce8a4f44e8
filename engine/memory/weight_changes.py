"""Code that changes weights waits for copies of these weights that are under way."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import nn


class LiveReader(Protocol):
    """Reads live tensors while training goes on."""

    reads_live: bool  # whether the tensors may not be changed yet, without `wait`

    def shares_modules(self, model: nn.Module) -> bool:
        """Whether the reader reads ``model``, a part, or a model that contains it."""
        ...

    def wait(self) -> None:
        """Return when the live tensors may be changed."""
        ...


_READERS: weakref.WeakSet[LiveReader] = weakref.WeakSet()
_CHANGING: list[nn.Module] = []


def register_reader(reader: LiveReader) -> None:
    """Let `changing_weights` wait for ``reader`` as long as it exists."""
    _READERS.add(reader)


@contextmanager
def changing_weights(model: nn.Module) -> Iterator[None]:
    """Wrap code that changes parameters or optimizer state other than by ``optimizer.step``.

        with changing_weights(model), torch.no_grad():
            for param, average in zip(model.parameters(), averages):
                param.copy_(average)

    Waits until snapshots that are being copied have read the weights. A snapshot that begins inside the block is copied
    at once. Without the block, such code makes the snapshot fail (`TornSnapshotError`). ``model`` may also be a part of
    the saved model, or contain it.
    """
    wait_for_readers(model)
    _CHANGING.append(model)
    try:
        yield
    finally:
        _CHANGING.remove(model)


def wait_for_readers(model: nn.Module) -> None:
    """Return when all parameters of ``model`` may be changed."""
    for reader in [reader for reader in _READERS if reader.reads_live]:
        if reader.shares_modules(model):
            reader.wait()


def is_changing(model: nn.Module) -> bool:
    """Whether the caller is inside a `changing_weights` block for ``model``, for a part, or for a larger one."""
    return any(share_modules(other, model) for other in _CHANGING)


def share_modules(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models are the same or have a module in common."""
    return one is other or not set(one.modules()).isdisjoint(other.modules())
