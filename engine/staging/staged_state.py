"""A copy of a training state in host memory, in buffers that are reused by every snapshot.

Snapshots in the background are written from such a copy, so that training may change the parameters
meanwhile. Buffers are reused because a first copy into fresh memory takes 6-10 times as long (page
faults). For CUDA they are pinned and filled on a separate stream (see `memory.pinned`). Cost: host
memory of one shard. Tensors that are offloaded already have a copy in such buffers, which is taken
as it is.

Usually only ``optimizer.step`` changes parameters and moments. A state that promises this
(`DCPState.changes_only_in_step`) is copied during the next forward and backward, and the step waits
for the rest. Other code that changes them must use `changing_weights`, which also waits. Without it
the copy fails.
"""

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...utils.compat.torch_private import storage_id
from ...utils.errors import TornSnapshotError
from ..dcp.format import Tensors
from ..dcp.state import DCPState
from ..memory.offloaded import host_copies
from ..memory.tensors import flatten, local_tensor, normal_tensors
from ..memory.weight_changes import (
    LiveReader,
    WriteWatch,
    changed_since,
    is_changing,
    readers_of,
    wait_for_readers,
)
from .host_buffers import HostBuffers


class Staging(LiveReader):
    """The buffers of a training state, and the copy into them that is under way.

    One copy at a time: readers of the last copy must be done before `stage` is called again. Call
    `done` when they are, so that an offload can use the buffers. While `reads_live` is true, the
    copy may still read live tensors: call `wait` before you change them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._buffers: HostBuffers | None = None  # with what was staged last
        self._kept = set[HostBuffers]()
        # storages of tensors that only a step changes, which the copies keep
        self._following: dict[str, int] = {}
        self._copies: list[_Copy] = []
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._hook: RemovableHandle | None = None

    @normal_tensors()
    def prepare(
        self,
        state: DCPState,
        *,
        model_only: bool = False,
    ) -> None:
        """Allocate the buffers for `stage`, because pinning memory takes seconds per shard. Raises
        as `stage` does.
        """
        # `stage` takes the same set, if nothing else has taken it meanwhile.
        assert self._buffers is None, "prepare comes first"
        buffers = HostBuffers.take(self.model, self)
        self.done()
        self._kept.add(buffers)
        staged = state.model_only() if model_only else state
        buffers.fit(_not_offloaded(state, staged.state_dict()))

    @normal_tensors()
    def stage(
        self,
        state: DCPState,
        *,
        model_only: bool = False,
    ) -> dict[str, Any]:
        """Start a copy of ``state``. Return the nested dict of `DCPState.state_dict` with buffers
        in place of tensors.

        On return, everything is copied except tensors that only ``optimizer.step`` changes:
        `finish` waits for these. Raises ConfigError (see `DCPState.state_dict`), and OSError or
        RuntimeError if there is no memory for the buffers, or if the device failed.
        """
        self.wait()
        self.done()
        staged = state.model_only() if model_only else state
        live = staged.state_dict()
        tensors = _not_offloaded(state, live)

        # A buffer for each tensor, whose set this staging reads until `done`.
        self._buffers = HostBuffers.take(self.model, self)
        self._kept.add(self._buffers)
        HostBuffers.read_offloaded(self.model, self)
        buffers = self._buffers.fit(tensors)

        # Tensors that other code may change are copied before this returns.
        later = {}
        if not is_changing(state.model):
            later = state.changed_in_step(tensors)
        now = {name: tensor for name, tensor in tensors.items() if name not in later}
        for copy in copy_to_host(now, buffers):
            copy.finish()

        # The rest is copied until the next step.
        if later and state.optimizer is not None:
            self._wait_before_steps_of(state.optimizer)
        self._copies = copy_to_host(later, buffers, overlapped=True)
        self.reads_live = bool(self._copies)
        self._following = _storages(later)
        return _nest(live, buffers)

    def finish(self) -> None:
        """Wait until everything that was staged last is in its buffers. Raises the error of the
        copy.

        `TornSnapshotError` says that other code than the step changed a tensor before it was
        copied. Call this before reading the buffers, and again before the commit of files made from
        them: torch counts an in-place operation when it ends, so that one during the copy may show
        in the second call only.
        """
        for copy in self._copies:
            copy.finish()

    def wait(self) -> None:
        """Block until the live tensors may be changed. On CUDA only the stream waits. Raises no
        error of the copy.
        """
        for copy in self._copies:
            copy.release_live()
        self.reads_live = False
        self._following = {}

    def done(self) -> None:
        """Tell that nothing reads any more what was staged last. Any thread may call this."""
        HostBuffers.release(self.model, self)

    def lend(
        self,
        live: Tensors,
        reader: object,
        kept: set[HostBuffers],
    ) -> dict[str, Tensor]:
        """Return the buffers that equal ``live`` tensors, by name, after the copy, for one more
        ``reader``.

        Their set is added to those that the reader has ``kept``.
        """
        buffers = self._buffers
        storages = _storages(live)
        following = {}
        for name, storage in self._following.items():
            if storages.get(name) == storage:
                following[name] = live[name]
        if not following or buffers is None:
            return {}
        try:
            self.finish()
        except Exception:  # the save reports it
            return {}

        # Other code than the step may have changed some since.
        same = following.keys() - changed_since(following, buffers.tensors)
        if same:
            buffers.read(reader)
            kept.add(buffers)
        return {name: buffers.tensors[name] for name in same}

    def release(self) -> None:
        """Give up the buffers. Nothing may read them any more."""
        self.wait()
        for copy in self._copies:
            copy.drop()
        self.done()
        self._copies = []
        self._buffers = None
        self._kept.clear()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._optimizer = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Wait for copies from a device if `release` was not called, because the buffers may be
        unpinned next.
        """
        for copy in self._copies:
            if isinstance(copy, _DeviceCopy) and not is_finalizing():
                with suppress(RuntimeError):  # of a device that failed, or in a fork of the process
                    copy.drop()

    def _wait_before_steps_of(self, optimizer: torch.optim.Optimizer) -> None:
        if self._optimizer is not None and self._optimizer() is optimizer:
            return
        if self._hook is not None:
            self._hook.remove()
        self._hook = optimizer.register_step_pre_hook(lambda *_: wait_for_readers(self.model))
        self._optimizer = weakref.ref(optimizer)


def _storages(tensors: Tensors) -> dict[str, int]:
    return {name: storage_id(local_tensor(tensor)) for name, tensor in tensors.items()}


class _Transfer(NamedTuple):
    """A live tensor, and the local tensor of the buffer for its copy."""

    name: str
    live: Tensor
    buffer: Tensor


class _HostCopy:
    """A copy of CPU tensors to the buffers, in a thread or at once.

    `release_live` waits until the live tensors have been read, `finish` until the buffers are
    filled, with the error of the copy, and `drop` until nothing writes to the buffers, without it.
    """

    def __init__(
        self,
        transfers: Sequence[_Transfer],
        *,
        overlapped: bool,
    ) -> None:
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
    """A copy of tensors on a CUDA device to the buffers, on a separate stream. Methods as in
    `_HostCopy`.

    But `release_live` makes later work on the device wait, not the thread.
    """

    def __init__(
        self,
        device: torch.device,
        transfers: Sequence[_Transfer],
        *,
        overlapped: bool,
    ) -> None:
        # The watch keeps the live tensors until `release_live`. Without ``overlapped`` the caller
        # does, until `finish`.
        self._device = device
        self._watch = WriteWatch(transfers) if overlapped else None

        # Copy when all work before is done.
        stream = torch.cuda.Stream(device)
        self._event = torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            if self._watch is not None:
                self._watch.fetch_samples()  # first: nothing waits for copies if it raises
            for _, live, buffer in transfers:
                buffer.copy_(local_tensor(live), non_blocking=True)
            self._event.record(stream)

    def release_live(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))
        if self._watch is not None:
            self._watch.stop()

    def finish(self) -> None:
        self.drop()
        if self._watch is not None:
            _refuse_torn(self._watch.written())

    def drop(self) -> None:
        # Without this, the current device of a new thread would get a context.
        with torch.cuda.device(self._device):
            self._event.synchronize()


_Copy = _HostCopy | _DeviceCopy


def stagings_of(model: nn.Module) -> list[Staging]:
    """The stagings of ``model``."""
    return [reader for reader in readers_of(model) if isinstance(reader, Staging)]


def copy_to_host(
    live: Tensors,
    buffers: Tensors,
    *,
    overlapped: bool = False,
) -> list[_Copy]:
    """Start a copy of each live tensor to the buffer with its name, per device and on the host."""
    on_host = []
    on_device = defaultdict[torch.device, list[_Transfer]](list)
    for name, tensor in live.items():
        transfer = _Transfer(name, tensor, local_tensor(buffers[name]))
        if tensor.is_cuda:
            on_device[tensor.device].append(transfer)
        else:
            on_host.append(transfer)

    # Copies on devices begin first, because they do not hold up this thread.
    copies: list[_Copy] = []
    for device, transfers in on_device.items():
        copies.append(_DeviceCopy(device, transfers, overlapped=overlapped))
    if on_host:
        copies.append(_HostCopy(on_host, overlapped=overlapped))
    return copies


def _copy_all(transfers: Iterable[_Transfer]) -> None:
    for _, live, buffer in transfers:
        buffer.copy_(local_tensor(live))


@torch.no_grad()  # grad mode is per thread
def _copy_in_thread(
    transfers: Iterable[_Transfer],
    threads: int,
) -> None:
    torch.set_num_threads(threads)  # else a new thread takes all cores
    _copy_all(transfers)


def _refuse_torn(written: Sequence[str]) -> None:
    if written:
        raise TornSnapshotError(
            f"{written[0]} ({len(written)} such) changed outside of optimizer.step while a "
            "snapshot was copying it; the snapshot is not made. Change weights in `with "
            "holdfast.engine.changing_weights(model):`"
        )


def _nest(
    live: Mapping[str, Any],
    buffers: Tensors,
    prefix: str = "",
) -> dict[str, Any]:
    nested = {}
    for key, value in live.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            nested[key] = _nest(value, buffers, f"{name}.")
        else:
            nested[key] = buffers.get(name, value)
    return nested


def _not_offloaded(
    state: DCPState,
    values: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Dotted name -> tensor, for the `DCPState.state_dict` of ``state``, without copies in host
    memory.
    """
    copies = host_copies(state.model)
    return {name: tensor for name, tensor in flatten(values) if copies.get(name) is not tensor}
