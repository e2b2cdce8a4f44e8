"""A copy of a training state in host memory, in buffers that are reused by every snapshot.

Snapshots in the background are written from such a copy, so that training may change the parameters meanwhile. Buffers
are reused because a first copy into fresh memory takes 6-10 times as long (page faults). For CUDA they are pinned and
filled on a separate stream. Cost: host memory of one shard.

Usually only ``optimizer.step`` changes parameters and moments. A state that promises this
(`DCPState.changes_only_in_step`) is copied during the next forward and backward, and the step waits for the rest. Other
code that changes them must use `changing_weights`, which also waits. Without it the copy fails.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ...utils.compat.torch_private import like_sharded, same_layout
from ...utils.errors import TornSnapshotError
from ..dcp.state import DCPState
from ..memory.tensors import flatten, local_tensor, normal_tensors
from ..memory.weight_changes import LiveReader, is_changing, wait_for_readers
from .host_buffers import host_copies_of
from .write_watch import WriteWatch


class Staging(LiveReader):
    """The buffers of a training state, and the copy into them that is under way.

    One copy at a time: readers of the last copy must be done before `stage` is called again. While `reads_live` is
    true, the copy may still read live tensors: call `wait` before you change them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._buffers: dict[str, torch.Tensor] = {}
        self._copies: list[_Copy] = []
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._hook: RemovableHandle | None = None

    @normal_tensors()
    def prepare(self, state: DCPState, *, model_only: bool = False) -> None:
        """Allocate the buffers for `stage`, because pinning memory takes seconds per shard. Raises as `stage` does."""
        live = (state.model_only() if model_only else state).state_dict()
        self._buffers |= _buffers_for(dict(flatten(live)), self._buffers)

    @normal_tensors()
    def stage(self, state: DCPState, *, model_only: bool = False) -> dict[str, Any]:
        """Start a copy of ``state``. Return the nested dict of `DCPState.state_dict` with buffers in place of tensors.

        On return, everything is copied except tensors that only ``optimizer.step`` changes: `finish` waits for these.
        With ``model_only`` only the model is copied, and the other buffers are kept for the next time. Raises
        ConfigError (see `DCPState.state_dict`), and OSError or RuntimeError if there is no memory for the buffers, or
        if the device failed.
        """
        self.wait()
        live = (state.model_only() if model_only else state).state_dict()
        tensors = dict(flatten(live))
        kept, self._buffers = self._buffers, _buffers_for(tensors, self._buffers)
        later = {} if is_changing(state.model) else state.changed_in_step(tensors)
        for copy in _copies({name: tensor for name, tensor in tensors.items() if name not in later}, self._buffers):
            copy.finish()
        if later and state.optimizer is not None:
            self._wait_before_steps_of(state.optimizer)
        self._copies = _copies(later, self._buffers, overlapped=True)
        self.reads_live = bool(self._copies)
        values = _nest(live, self._buffers)
        if model_only:
            self._buffers = kept | self._buffers
        return values

    def finish(self) -> None:
        """Wait until everything that was staged last is in its buffers. Raises the error of the copy.

        `TornSnapshotError` says that other code than the step changed a tensor before it was copied. Call this before
        reading the buffers, and again before the commit of files made from them: torch counts an in-place operation
        when it ends, so that one during the copy may show in the second call only.
        """
        for copy in self._copies:
            copy.finish()

    def wait(self) -> None:
        """Block until the live tensors may be changed. On CUDA only the stream waits. Raises no error of the copy."""
        for copy in self._copies:
            copy.release_live()
        self.reads_live = False

    def release(self) -> None:
        """Give up the buffers. Nothing may read them any more."""
        self.wait()
        for copy in self._copies:
            copy.drop()
        self._copies, self._buffers = [], {}
        if self._hook is not None:
            self._hook.remove()
            self._hook = self._optimizer = None

    def _wait_before_steps_of(self, optimizer: torch.optim.Optimizer) -> None:
        if self._optimizer is None or self._optimizer() is not optimizer:
            if self._hook is not None:
                self._hook.remove()
            self._hook = optimizer.register_step_pre_hook(lambda *_: wait_for_readers(self.model))
            self._optimizer = weakref.ref(optimizer)


class _Transfer(NamedTuple):
    """A live tensor and the buffer for its copy. Both are DTensors or both are plain."""

    name: str
    live: torch.Tensor
    buffer: torch.Tensor


class _HostCopy:
    """A copy of CPU tensors to the buffers, in a thread or at once.

    `release_live` waits until the live tensors have been read, `finish` until the buffers are filled, with the error of
    the copy, and `drop` until nothing writes to the buffers, without it.
    """

    def __init__(self, transfers: Sequence[_Transfer], *, overlapped: bool) -> None:
        self._future: Future[None] | None = None
        if not overlapped:
            _copy_all(transfers)
            return
        self._watch, self._copied = _watch(transfers), [local_tensor(transfer.buffer) for transfer in transfers]
        pool = ThreadPoolExecutor(1, thread_name_prefix="staging")
        self._future = pool.submit(_copy_in_thread, transfers, torch.get_num_threads())
        pool.shutdown(wait=False)  # the thread ends with its task

    def release_live(self) -> None:
        self.drop()
        if self._future is not None:
            self._watch.stop()

    def finish(self) -> None:
        if self._future is not None:
            self._future.result()
            _refuse_torn(self._watch.written(self._copied))

    def drop(self) -> None:
        if self._future is not None:
            self._future.exception()


class _DeviceCopy:
    """A copy of tensors on a CUDA device to the buffers, on a separate stream. Methods as in `_HostCopy`.

    But `release_live` makes later work on the device wait, not the thread.
    """

    def __init__(self, device: torch.device, transfers: Sequence[_Transfer], *, overlapped: bool) -> None:
        self._copied = [local_tensor(transfer.buffer) for transfer in transfers]
        # Keeps the live tensors until `release_live`. Without `overlapped` the caller does, until `finish`.
        self._watch = _watch(transfers) if overlapped else None
        stream, self._event = torch.cuda.Stream(device), torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            if self._watch is not None:
                self._watch.fetch_samples()  # first: nothing waits for copies if it raises
            for transfer, copied in zip(transfers, self._copied, strict=True):
                copied.copy_(local_tensor(transfer.live), non_blocking=True)
            self._event.record(stream)
        self._device = device

    def release_live(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))
        if self._watch is not None:
            self._watch.stop()

    def finish(self) -> None:
        self.drop()
        if self._watch is not None:
            _refuse_torn(self._watch.written(self._copied))

    def drop(self) -> None:
        with torch.cuda.device(self._device):  # else the current device of a new thread gets a context
            self._event.synchronize()


_Copy = _HostCopy | _DeviceCopy


def _copies(
    live: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], *, overlapped: bool = False
) -> list[_Copy]:
    """Start a copy of each live tensor to the buffer with its name, per device and on the host."""
    on_host, on_device = [], defaultdict[torch.device, list[_Transfer]](list)
    for name, tensor in live.items():
        (on_device[tensor.device] if tensor.is_cuda else on_host).append(_Transfer(name, tensor, buffers[name]))
    copies: list[_Copy] = [_DeviceCopy(device, some, overlapped=overlapped) for device, some in on_device.items()]
    return [*copies, _HostCopy(on_host, overlapped=overlapped)] if on_host else copies


def _copy_all(transfers: Iterable[_Transfer]) -> None:
    for _, live, buffer in transfers:
        local_tensor(buffer).copy_(local_tensor(live))


@torch.no_grad()  # grad mode is per thread
def _copy_in_thread(transfers: Iterable[_Transfer], threads: int) -> None:
    torch.set_num_threads(threads)  # else a new thread takes all cores
    _copy_all(transfers)


def _watch(transfers: Iterable[_Transfer]) -> WriteWatch:
    return WriteWatch([(transfer.name, transfer.live) for transfer in transfers])


def _refuse_torn(written: Sequence[str]) -> None:
    if written:
        raise TornSnapshotError(
            f"{written[0]} ({len(written)} such) changed outside of optimizer.step while a snapshot was copying it; "
            "the snapshot is not made. Change weights in `with holdfast.engine.changing_weights(model):`"
        )


def _nest(live: Mapping[str, Any], buffers: Mapping[str, torch.Tensor], prefix: str = "") -> dict[str, Any]:
    """``live`` with each tensor replaced by the buffer of its dotted name."""
    return {
        key: _nest(value, buffers, f"{prefix}{key}.") if isinstance(value, Mapping) else buffers[f"{prefix}{key}"]
        for key, value in live.items()
    }


def _buffers_for(live: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A buffer for each live tensor: the one with its name in ``kept`` if it fits, else a new one."""
    fitting = {name: kept[name] for name, tensor in live.items() if _fits(kept.get(name), tensor)}
    new = host_copies_of({name: local_tensor(tensor) for name, tensor in live.items() if name not in fitting})
    for name, buffer in new.items():
        fitting[name] = like_sharded(buffer, tensor) if isinstance(tensor := live[name], DTensor) else buffer
    return fitting


def _fits(buffer: torch.Tensor | None, live: torch.Tensor) -> bool:
    if isinstance(buffer, DTensor) and isinstance(live, DTensor):
        return same_layout(buffer, live)
    if buffer is None or isinstance(buffer, DTensor) or isinstance(live, DTensor):
        return False
    return buffer.shape == live.shape and buffer.dtype == live.dtype
