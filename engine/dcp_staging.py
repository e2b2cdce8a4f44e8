"""A copy of a training state in host memory, in buffers that are kept from one snapshot to the next.

A snapshot that is written in the background is written from such a copy: what was staged is what is written, however
the parameters change meanwhile. Buffers are kept because a first copy into fresh memory costs 6-10 times a warm one
(page faults); on CUDA they are pinned, and copied to on a stream of their own. Cost: host memory of one shard.

Parameters and moments change in ``optimizer.step`` and nowhere else, as a rule. A state that says so
(`DCPState.changes_only_in_step`) is copied while the next forward and backward run, and the step waits for the rest.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from .dcp_state import DCPState
from .tensors import local_tensor

Pair = tuple[torch.Tensor, torch.Tensor]
"""A buffer, and the live tensor that is copied into it."""


class Staging:
    """The buffers of a training state, and the copy into them that is under way.

    One copy at a time: whoever still reads the last one must be done before `stage` is called again.

    Args:
        model: whose state it is; who changes its parameters outside of ``optimizer.step`` calls `wait_for_staging`.
    """

    def __init__(self, model: nn.Module) -> None:
        _STAGINGS.setdefault(model, weakref.WeakSet()).add(self)
        self._buffers: dict[str, torch.Tensor] = {}
        self._copy: _Copy | None = None
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._hook: RemovableHandle | None = None

    @torch.no_grad()  # else each `to_local` of hundreds makes an autograd node
    def stage(self, state: DCPState, *, weights_only: bool = False) -> dict[str, Any]:
        """Begin to copy ``state``, and return what `DCPState.state_dict` returns, with the buffers for tensors.

        All of it is copied when this returns, except for what only ``optimizer.step`` changes; `finish` waits for that.
        With ``weights_only`` that is the model alone; buffers of the rest stay for the next time.

        Raises:
            ConfigError: see `DCPState.state_dict`.
            RuntimeError: torch has no memory for the buffers, or the device failed.
        """
        self.wait()
        live = (DCPState(state.model) if weights_only else state).state_dict()
        pairs: dict[str, Pair] = {}
        kept, self._buffers = self._buffers, {}
        values = _companion(live, "", kept, pairs, self._buffers)
        if weights_only:
            self._buffers = kept | self._buffers
        later = state.names_changed_in_step()
        _Copy(pair for name, pair in pairs.items() if name not in later).finish()
        if later and state.optimizer is not None:
            self._wait_before_steps_of(state.optimizer)
        self._copy = _Copy((pair for name, pair in pairs.items() if name in later), overlapped=True)
        return values

    def finish(self) -> None:
        """Return when all of what was staged last is in its buffers; raises what went wrong with that."""
        if self._copy is not None:
            self._copy.finish()

    def wait(self) -> None:
        """Return when the live tensors may be changed. What went wrong is for `finish`, and for who reads the copy."""
        if self._copy is not None:
            self._copy.release_live()

    def release(self) -> None:
        """Give the buffers up; nobody may read them any more."""
        self.wait()
        if self._copy is not None:
            self._copy.drop()
        self._copy, self._buffers = None, {}
        if self._hook is not None:
            self._hook.remove()
            self._hook = self._optimizer = None

    def _wait_before_steps_of(self, optimizer: torch.optim.Optimizer) -> None:
        if self._optimizer is None or self._optimizer() is not optimizer:
            if self._hook is not None:
                self._hook.remove()
            self._hook = optimizer.register_step_pre_hook(lambda *_: self.wait())
            self._optimizer = weakref.ref(optimizer)


@dataclass(frozen=True)
class StagedState:
    """What `Staging.stage` returned, for `save_dcp` in the place of the state itself."""

    staging: Staging
    values: Mapping[str, Any]

    def state_dict(self) -> Mapping[str, Any]:
        """The values, once they are all there; raises what went wrong with that."""
        self.staging.finish()
        return self.values


class _Copy:
    """Some tensors on their way to the host: CPU tensors in a thread or at once, CUDA tensors on streams."""

    def __init__(self, pairs: Iterable[Pair], *, overlapped: bool = False) -> None:
        on_host, on_device = [], defaultdict[torch.device, list[Pair]](list)
        for buffer, live in pairs:
            (on_device[live.device] if live.is_cuda else on_host).append((buffer, live))
        self._on_device = dict(on_device)  # keeps what is read alive until it has been read
        self._events = {device: _copy_on_stream(device, some) for device, some in on_device.items()}
        self._future: Future[None] | None = None
        if on_host and overlapped:
            pool = ThreadPoolExecutor(1, thread_name_prefix="staging")
            self._future = pool.submit(_copy_in_thread, on_host, torch.get_num_threads())
            pool.shutdown(wait=False)  # the thread ends with its task
        else:
            _copy_all(on_host)

    def release_live(self) -> None:
        """Have what follows, here and on the devices, wait until the live tensors have been read."""
        if self._future is not None:
            self._future.exception()
        for device, event in self._events.items():
            event.wait(torch.cuda.current_stream(device))

    def finish(self) -> None:
        """Return when the buffers are filled; raises what went wrong."""
        self.drop()
        if self._future is not None:
            self._future.result()

    def drop(self) -> None:
        """Return when nothing writes to the buffers any more, and let go of the live tensors."""
        for event in self._events.values():
            event.synchronize()
        self._on_device.clear()
        if self._future is not None:
            self._future.exception()


def _copy_all(pairs: Iterable[Pair]) -> None:
    for buffer, live in pairs:
        buffer.copy_(live)


def _copy_in_thread(pairs: Iterable[Pair], threads: int) -> None:
    torch.set_num_threads(threads)  # else a new thread takes all cores
    _copy_all(pairs)


def _copy_on_stream(device: torch.device, pairs: list[Pair]) -> torch.cuda.Event:
    stream, event = torch.cuda.Stream(device), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for buffer, live in pairs:
            buffer.copy_(live, non_blocking=True)
        event.record(stream)
    return event


def _companion(
    live: Mapping[str, Any],
    prefix: str,
    kept: Mapping[str, torch.Tensor],
    pairs: dict[str, Pair],
    buffers: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """``live`` with a buffer for each tensor, one of ``kept`` where it fits; the last two are filled by dotted name."""
    values: dict[str, Any] = {}
    for key, value in live.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            values[key] = _companion(value, f"{name}.", kept, pairs, buffers)
            continue
        local, buffer = local_tensor(value), kept.get(name)
        if buffer is None or not _fits(buffer, value):
            buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            if isinstance(value, DTensor):  # (`DTensor.from_local` would move it to the mesh's device)
                buffer = DTensor(buffer, value._spec, requires_grad=False)
        values[key] = buffers[name] = buffer
        pairs[name] = local_tensor(buffer), local
    return values


def _fits(buffer: torch.Tensor, live: torch.Tensor) -> bool:
    if isinstance(buffer, DTensor) and isinstance(live, DTensor):
        return buffer._spec == live._spec  # shape and dtype are in there
    if isinstance(buffer, DTensor) or isinstance(live, DTensor):
        return False
    return buffer.shape == live.shape and buffer.dtype == live.dtype


_STAGINGS: "weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Staging]]" = weakref.WeakKeyDictionary()


def wait_for_staging(model: nn.Module) -> None:
    """Return when the parameters of ``model`` may be changed other than by a step: by a load, say."""
    for staging in _STAGINGS.get(model, ()):
        staging.wait()
