"""Install the simulated device: afterwards this process has CUDA, in torch and in torch.distributed
(as NCCL).

``HOLDFAST_SIMULATED_CUDA`` names the mode (`MODES`). Then every Python that a test starts installs
the device after its import of torch (``tests/startup/sitecustomize.py``). One schedule of a run
does not show all missing waits, two do:

- ``late-copies``: a copy runs when a wait requires it, a kernel runs at once.
- ``late-kernels``: the results of the last kernel of a stream reach memory when a wait requires
  them, a copy runs at once.
- ``immediate``: everything runs at once. For comparison.
- ``races``: the same, and two accesses of device memory that no wait orders are found, whatever
  their values (`races`). Accesses of the host are not seen.

It cannot show speed, overlap, limits of real memory, the numbers of a GPU's kernels, hangs inside
NCCL, errors of a driver, kernels that the CPU lacks (flash attention), or CUDA graphs. A collective
reads its inputs when it is called.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.simulated_cuda.build import NAME, built_library, load

VARIABLE = "HOLDFAST_SIMULATED_CUDA"
REPORTS = "HOLDFAST_SIMULATED_CUDA_REPORTS"
"""Variable for a folder in which each process reports races and memory that is unregistered during
a copy.
"""
MODES = {
    "late-copies": (True, False, False),
    "late-kernels": (False, True, False),
    "immediate": (False, False, False),
    "races": (False, False, True),
}
"""Name -> whether copies are late, whether results of kernels are late, and whether races are
looked for.
"""
DEVICES = 4
"""Devices, unless ``CUDA_VISIBLE_DEVICES`` names fewer."""
FAULTS = ("allocation", "copy", "host_register", "collective")
"""Calls that can be made to fail: see `inject`."""
CAPABILITY = (7, 0)
"""Compute capability of the last generation without flash attention, which has no operator on the
CPU.
"""

_C: Any = None


def install(mode: str | None = None) -> None:
    """Give this process the device. Later calls set the mode, and forget the races and the reports
    of this process.

    Args:
        mode: one of `MODES`. Default: ``HOLDFAST_SIMULATED_CUDA``, or ``late-copies``.

    Raises:
        BuildError: the extension does not compile here.
        ValueError: there is no such mode.
    """
    global _C
    mode = mode or os.environ.get(VARIABLE) or "late-copies"
    if mode not in MODES:
        raise ValueError(f"{VARIABLE} is {mode!r}; expected one of {', '.join(MODES)}")
    if _C is None:
        _C = load(NAME, built_library())
        _install_core()
        _install_streams()
        _install_storage()
        _install_nccl()
    _C.set_mode(*MODES[mode])


def inject(fault: str, nth: int) -> None:
    """Let the ``nth`` call from now fail, in this process. 0 takes the fault back.

    - ``allocation``: out of memory.
    - ``copy``: the device is lost when a copy runs. Every call that waits for it, and every later
      one, raises.
    - ``host_register``: ``cudaHostRegister`` refuses.
    - ``collective``: a collective never ends. The process that waits for it is aborted after the
      timeout of the group, as NCCL's watchdog does.
    """
    _C.inject(fault, nth)


def races() -> list[str]:
    """Races since the mode was set. Each names both operators, their streams and their lines of
    Python.
    """
    return _C.races()


def counts() -> dict[str, int]:
    """Counters of this process.

    - ``deferred``: copies and results that did not run at once.
    - ``registered``, ``unregistered``: calls of ``cudaHostRegister`` and ``cudaHostUnregister``.
    - ``unregistered_in_use``: calls of ``cudaHostUnregister`` before the end of a copy is known.
      Each is a bug.
    - ``pinned_by_torch``: bytes of ``pin_memory``.
    """
    return _C.counts()


_operators = torch.library.Library("aten", "IMPL")
"""Operators that torch has for CUDA alone. They last as long as this object."""


def _visible() -> list[int]:
    """Numbers of the devices that this process sees. As in CUDA, the variable is read until the
    first use.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return list(range(DEVICES))
    return [
        int(number)
        for number in shown.split(",")
        if number.strip().isdigit() and int(number) < DEVICES
    ]


def _device_count() -> int:
    if not torch.cuda.is_initialized():
        _C.set_device_count(len(_visible()))
    return _C.device_count()


def _index(device: Any = None) -> int:
    if device is None:
        return _C.current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return _C.current_device() if index is None else index


def _histogram(values: torch.Tensor, bins: int, low: float, high: float) -> torch.Tensor:
    """``torch.histc``, which counts integers on CUDA, but not on CPUs."""
    places = ((values.double() - low) * (bins / (high - low))).long().clamp(0, bins - 1)
    inside = (values >= low) & (values <= high)
    return values.new_zeros(bins).scatter_add_(
        0, places.flatten(), inside.flatten().to(values.dtype)
    )


def _set_device(index: int) -> None:
    torch.cuda.init()  # as THCPModule_setDevice_wrap does, on which `FakeTensor` relies
    _C.set_device(index)


class _Runtime:
    """``torch.cuda.cudart()``."""

    @staticmethod
    def cudaHostRegister(address: int, n_bytes: int, _flags: int) -> int:
        return _C.host_register(address, n_bytes)

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return _C.host_unregister(address)


class _Properties:
    """``torch.cuda.get_device_properties()``."""

    name = "simulated CUDA device"
    major, minor = CAPABILITY
    total_memory = 8 << 30
    multi_processor_count = 1

    def __init__(self, index: int) -> None:
        self.uuid = f"GPU-simulated-{_visible()[index]}"


def _install_core() -> None:
    """The functions of torch._C that only a torch with CUDA has, and what torch.cuda has read from
    it at its import.
    """
    core: dict[str, Callable[..., Any]] = {
        "_cuda_init": _device_count,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getDeviceCount": _device_count,
        "_cuda_getDevice": _C.current_device,
        "_cuda_setDevice": _set_device,
        "_cuda_exchangeDevice": _C.exchange_device,
        "_cuda_maybeExchangeDevice": _C.exchange_device,
        "_cuda_synchronize": lambda: torch.accelerator.synchronize(_C.current_device()),
        "_cuda_getCurrentRawStream": lambda index: torch.cuda.current_stream(index).stream_id,
        "_cuda_sleep": lambda _cycles: None,
        "_cuda_emptyCache": lambda: None,
        "_cuda_hostMemoryStats": lambda: {
            "allocated_bytes": {"current": counts()["pinned_by_torch"]}
        },
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_set_sync_debug_mode": lambda _mode: None,
        "_cuda_get_sync_debug_mode": lambda: 0,
    }
    for name, function in core.items():
        setattr(torch._C, name, function)
    _operators.impl(
        "histc", lambda values, bins=100, low=0, high=0: _histogram(values, bins, low, high), "CUDA"
    )
    python: dict[str, Any] = {
        "_cudart": _Runtime,
        "_exchange_device": _C.exchange_device,
        "_maybe_exchange_device": _C.exchange_device,
        "default_generators": tuple(_C.default_generator(index) for index in range(DEVICES)),
        "get_device_properties": lambda device=None: _Properties(_index(device)),
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: _Properties.name,
        "memory_allocated": lambda device=None: _C.allocated_bytes(_index(device)),
        "max_memory_allocated": lambda device=None: _C.peak_bytes(_index(device)),
        "reset_peak_memory_stats": lambda device=None: _C.reset_peak_bytes(_index(device)),
        "is_current_stream_capturing": lambda: False,
        "_queued_calls": [],  # checks of the real device
    }
    for name, value in python.items():
        setattr(torch.cuda, name, value)


def _install_streams() -> None:
    """The classes of streams and events, whose bases in torch._C are empty without CUDA."""

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **by_id: int) -> "Stream":
            torch.cuda.init()
            if by_id:
                return super().__new__(cls, **by_id)
            return super().__new__(
                cls, device=torch.device("cuda", _index(device)), priority=priority
            )

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    class Event(torch.Event):
        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> "Event":
            return super().__new__(cls, "cuda", enable_timing=enable_timing)

        def record(self, stream: Any = None) -> None:
            super().record(current_stream() if stream is None else stream)

        def wait(self, stream: Any = None) -> None:
            super().wait(current_stream() if stream is None else stream)

    def current_stream(device: Any = None) -> torch.Stream:
        torch.cuda.init()
        return torch.accelerator.current_stream(torch.device("cuda", _index(device)))

    def default_stream(device: Any = None) -> torch.Stream:
        index, cuda = _index(device), 1
        return Stream(stream_id=_C.default_stream_id(index), device_index=index, device_type=cuda)

    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": torch.accelerator.set_stream,
    }.items():
        setattr(torch.cuda, name, value)
    torch.cuda.streams.Stream, torch.cuda.streams.Event = Stream, Event  # type: ignore[misc]


def _install_storage() -> None:
    """The methods of ``UntypedStorage`` that torch compiles for each kind of device."""
    resize, move = torch.UntypedStorage.resize_, torch.UntypedStorage.to

    def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def resize_(self: torch.UntypedStorage, n_bytes: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize(self, n_bytes)
        _C.resize_storage(bytes_of(self), n_bytes)
        return self

    def to(
        self: torch.UntypedStorage, *, device: torch.device, non_blocking: bool = False
    ) -> torch.UntypedStorage:
        if torch.device(device).type != "cuda":
            return move(self, device=device, non_blocking=non_blocking)
        return bytes_of(self).to(device, non_blocking=non_blocking).untyped_storage()

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    torch.UntypedStorage.to = to  # type: ignore[method-assign]


def _install_nccl() -> None:
    """``ProcessGroupNCCL``: collectives of gloo on the memory of the device."""

    class _OfNccl(type):
        def __call__(cls, store: dist.Store, rank: int, size: int, options: Any) -> Any:
            gloo = dist.ProcessGroupGloo(store, rank, size, options._timeout)
            return _C.collectives(gloo, rank, size, options._timeout.total_seconds())

        def __instancecheck__(cls, backend: Any) -> bool:
            return isinstance(backend, _C.Collectives)

    class ProcessGroupNCCL(metaclass=_OfNccl):
        class Options:
            _timeout = dist.default_pg_timeout

    for module in (dist, distributed_c10d):
        module.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
    distributed_c10d._NCCL_AVAILABLE = True
