"""A copy of a training state in host memory, in buffers that are reused by every snapshot.

Snapshots in the background are written from such a copy, so that training may change the parameters meanwhile. Buffers
are reused because a first copy into fresh memory takes 6-10 times as long (page faults). For CUDA they are pinned and
filled on a separate stream. The pinned memory of torch is rounded up to a power of two for every tensor, to as much as
twice the need, and torch never returns it. So the buffers are one anonymous mapping per device, which is registered
with CUDA and freed with the last tensor in it. Cost: host memory of one shard.

Usually only ``optimizer.step`` changes parameters and moments. A state that promises this
(`DCPState.changes_only_in_step`) is copied during the next forward and backward, and the step waits for the rest. Other
code that changes them must use `changing_weights`, which also waits. Without it the copy fails.
"""

import mmap
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ...utils.compat.torch_private import like_sharded, same_layout
from ...utils.errors import TornSnapshotError
from ..dcp.state import DCPState
from ..memory.tensors import flatten, local_tensor, normal_tensors
from ..memory.weight_changes import LiveReader, WriteWatch, is_changing, wait_for_readers


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
        With ``model_only`` the other buffers are kept for the next time. Raises ConfigError (see
        `DCPState.state_dict`), and OSError or RuntimeError if there is no memory for the buffers, or if the device
        failed.
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

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Wait for copies from a device if `release` was not called, because the buffers may be unpinned next."""
        for copy in self._copies:
            if isinstance(copy, _DeviceCopy) and not is_finalizing():
                with suppress(RuntimeError):  # of a device that failed, or in a fork of the process
                    copy.drop()

    def _wait_before_steps_of(self, optimizer: torch.optim.Optimizer) -> None:
        if self._optimizer is None or self._optimizer() is not optimizer:
            if self._hook is not None:
                self._hook.remove()
            self._hook = optimizer.register_step_pre_hook(lambda *_: wait_for_readers(self.model))
            self._optimizer = weakref.ref(optimizer)


class _Transfer(NamedTuple):
    """A live tensor, and the local tensor of the buffer for its copy."""

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
        self._watch = WriteWatch(transfers)
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
            _refuse_torn(self._watch.written())

    def drop(self) -> None:
        if self._future is not None:
            self._future.exception()


class _DeviceCopy:
    """A copy of tensors on a CUDA device to the buffers, on a separate stream. Methods as in `_HostCopy`.

    But `release_live` makes later work on the device wait, not the thread.
    """

    def __init__(self, device: torch.device, transfers: Sequence[_Transfer], *, overlapped: bool) -> None:
        # The watch keeps the live tensors until `release_live`. Without ``overlapped`` the caller does, until `finish`.
        self._watch = WriteWatch(transfers) if overlapped else None
        stream, self._event = torch.cuda.Stream(device), torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            if self._watch is not None:
                self._watch.fetch_samples()  # first: nothing waits for copies if it raises
            for _, live, copy in transfers:
                copy.copy_(local_tensor(live), non_blocking=True)
            self._event.record(stream)
        self._device = device

    def release_live(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))
        if self._watch is not None:
            self._watch.stop()

    def finish(self) -> None:
        self.drop()
        if self._watch is not None:
            _refuse_torn(self._watch.written())

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
        transfer = _Transfer(name, tensor, local_tensor(buffers[name]))
        (on_device[tensor.device] if tensor.is_cuda else on_host).append(transfer)
    copies: list[_Copy] = [_DeviceCopy(device, some, overlapped=overlapped) for device, some in on_device.items()]
    return [*copies, _HostCopy(on_host, overlapped=overlapped)] if on_host else copies


def _copy_all(transfers: Iterable[_Transfer]) -> None:
    for _, live, buffer in transfers:
        buffer.copy_(local_tensor(live))


@torch.no_grad()  # grad mode is per thread
def _copy_in_thread(transfers: Iterable[_Transfer], threads: int) -> None:
    torch.set_num_threads(threads)  # else a new thread takes all cores
    _copy_all(transfers)


def _refuse_torn(written: Sequence[str]) -> None:
    if written:
        raise TornSnapshotError(
            f"{written[0]} ({len(written)} such) changed outside of optimizer.step while a snapshot was copying it; "
            "the snapshot is not made. Change weights in `with holdfast.engine.changing_weights(model):`"
        )


def _nest(live: Mapping[str, Any], buffers: Mapping[str, torch.Tensor], prefix: str = "") -> dict[str, Any]:
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


_ALIGNMENT_BYTES = 512  # as torch aligns on a GPU. No dtype and no cache line needs more
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process
_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK of Linux >= 4.14 (``include/uapi/asm-generic/mman-common.h``), which Python does not define."""


class _Mapping(mmap.mmap):
    """Anonymous memory that can be pinned."""

    _pinned: tuple[int, torch.device, int] | None = None

    def pin(self, address: int, device: torch.device) -> None:
        """Lock the mapping into memory and register it with CUDA, so that copies to it are asynchronous."""
        with torch.cuda.device(device):  # any other device would get a useless context
            cudart: Any = torch.cuda.cudart()
            result = int(cudart.cudaHostRegister(address, len(self), _PORTABLE))
        if result:
            with suppress(RuntimeError):  # the refusal stays CUDA's last error, which the next kernel would raise
                torch.ones(1, device=device)
            raise RuntimeError(
                f"CUDA cannot pin {len(self)} bytes of host memory to stage snapshots in (cudaError {result}); make "
                "room, or have nothing written in the background (recover.async_save: false, save(blocking=True))"
            )
        self._pinned = address, device, os.getpid()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Unpin before the unmap, but not in a fork of the process that pinned it, nor at the end of the process."""
        if self._pinned is not None and not is_finalizing() and self._pinned[2] == os.getpid():
            address, device, _ = self._pinned
            with torch.cuda.device(device):
                cudart: Any = torch.cuda.cudart()
                cudart.cudaHostUnregister(address)


def host_copies_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors with the names, shapes and dtypes of ``tensors``, without their values.

    Copies of tensors on one device share a mapping, which lives as long as any of them. Raises OSError if there is no
    memory, and RuntimeError if CUDA cannot pin it.
    """
    of_device = defaultdict[torch.device, dict[str, torch.Tensor]](dict)
    for name, tensor in tensors.items():
        of_device[tensor.device][name] = tensor
    return {name: copy for device, some in of_device.items() for name, copy in _in_one_mapping(some, device).items()}


def _in_one_mapping(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    places, total = dict[str, int](), 0
    for name, tensor in tensors.items():
        places[name] = total
        total += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    mapping = _Mapping(-1, max(total, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # an older kernel
        # Without this a fork copies pinned pages. With MADV_DONTFORK a child that reads them would die.
        mapping.madvise(_WIPE_ON_FORK)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    if device.type == "cuda":
        mapping.pin(memory.data_ptr(), device)
    return {
        name: memory[places[name] : places[name] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for name, tensor in tensors.items()
    }
