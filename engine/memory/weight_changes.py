"""Code that changes weights waits for copies of these weights that are under way."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class LiveReader:
    """Reads tensors of ``model`` while training goes on. `changing_weights` waits for it as long as it exists."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.reads_live = False
        _READERS.add(self)

    def wait(self) -> None:
        """Return when the live tensors may be changed. Until then `reads_live` is true."""
        raise NotImplementedError


_READERS: weakref.WeakSet[LiveReader] = weakref.WeakSet()
_CHANGING: list[nn.Module] = []


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
        if share_modules(reader.model, model):
            reader.wait()


def is_changing(model: nn.Module) -> bool:
    """Whether the caller is inside a `changing_weights` block for ``model``, for a part, or for a larger one."""
    return any(share_modules(other, model) for other in _CHANGING)


def share_modules(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models are the same or have a module in common."""
    return one is other or not set(one.modules()).isdisjoint(other.modules())
