"""Code that changes weights, and copies of them that are under way: one waits for the other."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import nn


class LiveReader(Protocol):
    """Reads live tensors while training goes on.

    Attributes:
        reads_live: whether the tensors may not be changed yet, without `wait`.
    """

    reads_live: bool

    def shares_modules(self, model: nn.Module) -> bool:
        """Whether what it reads belongs to ``model``, to a part of it, or to a model that it is a part of."""
        ...

    def wait(self) -> None:
        """Return when the live tensors may be changed."""
        ...


_READERS: weakref.WeakSet[LiveReader] = weakref.WeakSet()
_CHANGING: list[nn.Module] = []


def register_reader(reader: LiveReader) -> None:
    """Have `changing_weights` wait for ``reader``, for as long as it exists."""
    _READERS.add(reader)


@contextmanager
def changing_weights(model: nn.Module) -> Iterator[None]:
    """For code that changes parameters or optimizer state other than by ``optimizer.step``: swaps in an average, merges
    LoRA weights, copies from another model.

    Waits until snapshots that are being copied have read what they hold; one that is begun inside of the block is
    copied at once. Without it such code makes the snapshot fail (`TornSnapshotError`).

    Args:
        model: that is changed; a part of the one that is saved, or one that it is a part of, will do.
    """
    wait_for_readers(model)
    _CHANGING.append(model)
    try:
        yield
    finally:
        _CHANGING.remove(model)


def wait_for_readers(model: nn.Module) -> None:
    """Return when whatever has parameters of ``model`` in it may be changed."""
    for reader in [reader for reader in _READERS if reader.reads_live]:
        if reader.shares_modules(model):
            reader.wait()


def is_changing(model: nn.Module) -> bool:
    """Whether this is called inside of a `changing_weights` block of ``model``, a part of it, or a larger one."""
    return any(share_modules(other, model) for other in _CHANGING)


def share_modules(one: nn.Module, other: nn.Module) -> bool:
    """Whether one of two models is the other, a part of it, or has a part in common with it."""
    return one is other or not set(one.modules()).isdisjoint(other.modules())
