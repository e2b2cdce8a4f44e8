"""Changes of weights while they are copied: code that changes them waits for the copy, or the
change is detected.

`changing_weights` waits. `WriteWatch` detects other writes. Torch counts in-place operations on a
tensor (``_version``), but not those through ``.data``, nor ``torch._foreach_*`` on DTensors. So a
few elements of every tensor are also compared with the copy. A write that torch does not count and
that changes none of these elements remains undetected. Torch counts an operation when it ends,
which may be after the copy that it disturbed. So writes between the copy and the call of
`WriteWatch.stop` by the training thread are also reported.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...utils.compat.torch_private import n_writes
from .tensors import local_tensor

SAMPLES = 8
"""Elements of each tensor that `WriteWatch` compares, evenly spread."""


class LiveReader:
    """Reads tensors of ``model`` while training goes on. `changing_weights` waits for it as long as
    it exists. So do steps, unless it ``reads_frozen`` parameters alone.
    """

    reads_frozen = False

    def __init__(
        self,
        model: nn.Module,
    ) -> None:
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

    Waits until snapshots that are being copied have read the weights, and until an export in the
    background has read a frozen base. If the export has not begun, the base is copied to host
    memory for it. A snapshot that begins inside the block is copied at once. Without the block,
    such code makes the snapshot fail (`TornSnapshotError`), and an export of a frozen base wrong.
    ``model`` may also be a part of the saved model, or contain it.
    """
    wait_for_readers(model, of_frozen=True)
    _CHANGING.append(model)
    try:
        yield
    finally:
        _CHANGING.remove(model)


def wait_for_readers(
    model: nn.Module,
    *,
    of_frozen: bool = False,
) -> None:
    """Return when a step may change the parameters of ``model``, or also the frozen ones."""
    # A list, because readers come and go meanwhile.
    reading = [reader for reader in _READERS if reader.reads_live]
    for reader in reading:
        if reader.reads_frozen and not of_frozen:
            continue
        if share_modules(reader.model, model):
            reader.wait()


def readers_of(model: nn.Module) -> list[LiveReader]:
    """The readers that were made for ``model``."""
    return [reader for reader in _READERS if reader.model is model]


def is_changing(model: nn.Module) -> bool:
    """Whether the caller is inside a `changing_weights` block for ``model``, for a part, or for a
    larger one.
    """
    return any(share_modules(other, model) for other in _CHANGING)


def share_modules(
    one: nn.Module,
    other: nn.Module,
) -> bool:
    """Whether two models are the same or have a module in common."""
    if one is other:
        return True
    modules = set(one.modules())
    return not modules.isdisjoint(other.modules())


class _Live(NamedTuple):
    """A watched tensor while it is watched."""

    name: str
    tensor: Tensor
    local: Tensor
    version: int  # when the watch began


class WriteWatch:
    """Watches tensors of one device, from the constructor to `stop`, while they are copied.

    Takes the name, the live tensor (a DTensor or plain) and the copy of its local part on the CPU.
    """

    def __init__(
        self,
        watched: Sequence[tuple[str, Tensor, Tensor]],
    ) -> None:
        self._live: list[_Live] = []
        self._sampled_copies: dict[str, Tensor] = {}
        sampled: list[Tensor] = []
        for name, tensor, copy in watched:
            local = local_tensor(tensor)
            version = _version(tensor, local)
            self._live.append(_Live(name, tensor, local, version))
            # Elements with strides would need a copy of the whole tensor.
            if local.numel() > 1 and local.is_contiguous():
                self._sampled_copies[name] = copy
                sampled.append(local)
        self._samples = _sample(sampled)
        self._written: set[str] = set()
        self._lock = Lock()

    def fetch_samples(self) -> None:
        """Start to copy the samples from the device to pinned memory, in its current stream."""
        for dtype, sample in self._samples.items():
            # Its memory must not be used again before the copy.
            sample.record_stream(torch.cuda.current_stream(sample.device))
            self._samples[dtype] = sample.to("cpu", non_blocking=True)

    def stop(self) -> None:
        """Stop watching: the copies are complete. Called by the training thread. Later calls do
        nothing.
        """
        with self._lock:
            self._look()
            self._live = []

    def _look(self) -> None:
        for name, tensor, local, version in self._live:
            if _version(tensor, local) != version:
                self._written.add(name)

    def written(self) -> list[str]:
        """Names of the tensors that were written to before `stop` (or now), or that differ from
        their copies.

        The copies and the fetched samples must be complete.
        """
        with self._lock:
            self._look()

        # All samples of a dtype are compared at once. Only if some differ, their tensors are named.
        copied = _sample(list(self._sampled_copies.values()))
        for dtype, sample in self._samples.items():
            before = _bits(sample)
            after = _bits(copied[dtype])
            differs = (before != after).any(1)
            if not differs.any():
                continue
            begin = 0
            for name, copy in self._sampled_copies.items():
                if copy.dtype == dtype:
                    end = begin + _count(copy)
                    if differs[begin:end].any():
                        self._written.add(name)
                    begin = end
        return sorted(self._written)


def changed_since(
    live: Mapping[str, Tensor],
    copies: Mapping[str, Tensor],
) -> set[str]:
    """Names of the live tensors of which a few elements differ from their copy on the CPU."""
    # A watch is for tensors of one device.
    of_device = defaultdict[torch.device, list[tuple[str, Tensor, Tensor]]](list)
    for name, tensor in live.items():
        copy = local_tensor(copies[name])
        of_device[tensor.device].append((name, tensor, copy))

    # Only the samples count here: each watch ends where it began.
    changed: set[str] = set()
    for device, watched in of_device.items():
        watch = WriteWatch(watched)
        if device.type == "cuda":
            watch.fetch_samples()
            torch.cuda.current_stream(device).synchronize()
        changed |= set(watch.written())
    return changed


def _version(
    tensor: Tensor,
    local: Tensor,
) -> int:
    """Number of operations that torch has counted on a DTensor and on its local tensor."""
    if tensor is local:
        return n_writes(local)
    return n_writes(local) + n_writes(tensor)


def _count(tensor: Tensor) -> int:
    return min(tensor.numel(), SAMPLES)


def _sample(tensors: Sequence[Tensor]) -> dict[torch.dtype, Tensor]:
    """Dtype -> samples of all tensors of this dtype. All tensors are contiguous and have two or
    more elements.
    """
    views = defaultdict[torch.dtype, list[Tensor]](list)
    for tensor in tensors:
        # Evenly spread from the first element on.
        count = _count(tensor)
        step = (tensor.numel() - 1) // (count - 1)
        view = tensor.as_strided((count,), (step,))
        views[tensor.dtype].append(view)

    # One tensor per dtype, so that a device sends its samples in one copy.
    samples = {}
    for dtype, some in views.items():
        samples[dtype] = torch.cat(some)
    return samples


def _bits(sample: Tensor) -> Tensor:
    # [elements, bytes of one], because NaN differs from itself.
    data = sample.view(torch.uint8)
    return data.view(len(sample), -1)
