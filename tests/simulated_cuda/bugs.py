"""Seven small programs with one wait each, that are wrong without it.

Each returns the values that it finds at its end. All are programs that Holdfast could have been.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.simulated_cuda import device

N = 1000


@dataclass(frozen=True)
class Bug:
    """A program and what shows its bug.

    Attributes:
        run: the program. The argument says whether its wait is in place.
        right: its values with the wait, and without it where nothing is late.
        wrong: its values without the wait in the modes of ``found_in``. None: NaN.
        found_in: the modes that show the bug. The others do not.
    """

    run: Callable[[bool], list[float]]
    right: list[float]
    wrong: list[float] | None
    found_in: tuple[str, ...]

    def finds(self, values: list[float]) -> str:
        """``right``, ``wrong``, or the values if they are neither."""
        if values == self.right:
            return "right"
        wrong = all(map(math.isnan, values)) if self.wrong is None else values == self.wrong
        return "wrong" if wrong else str(values)


def _values(tensor: torch.Tensor) -> list[float]:
    return torch.unique(tensor).tolist()


def _full(value: float) -> torch.Tensor:
    return torch.full((N,), value, device="cuda")


def _snapshot(
    source_waits: bool = True, write_waits: bool = True, read_waits: bool = True
) -> list[float]:
    """Copy to pinned memory on a separate stream, while training goes on."""
    live = _full(0.0)
    live.fill_(1.0)  # the last kernel before the copy
    host = torch.full((N,), -5.0).pin_memory()
    stream, copied = torch.cuda.Stream(), torch.cuda.Event()
    if source_waits:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        host.copy_(live, non_blocking=True)
        copied.record(stream)
    if not read_waits:
        return _values(host)
    if write_waits:
        copied.wait(torch.cuda.current_stream())
    live.mul_(2.0)
    copied.synchronize()
    return _values(host)


def _written_during_its_copy(waits: bool) -> list[float]:
    return _snapshot(write_waits=waits)


def _read_before_it_is_copied(waits: bool) -> list[float]:
    return _snapshot(read_waits=waits)


def _copied_before_it_is_made(waits: bool) -> list[float]:
    return _snapshot(source_waits=waits)


def _block_used_again(waits: bool) -> list[float]:
    """A pinned block is filled again while the device copies from it."""
    block, target, copied = (
        torch.full((N,), 1.0).pin_memory(),
        torch.empty(N, device="cuda"),
        torch.cuda.Event(),
    )
    target.copy_(block, non_blocking=True)
    copied.record()
    if waits:
        copied.synchronize()
    block.fill_(7.0)
    return _values(target.cpu())


def _freed_during_its_copy(records: bool) -> list[float]:
    """A temporary tensor that another stream reads is freed by Python."""
    stream, host, temporary = torch.cuda.Stream(), torch.zeros(N).pin_memory(), _full(3.0)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if records:
            temporary.record_stream(torch.cuda.current_stream())
        host.copy_(temporary, non_blocking=True)
    del temporary
    _full(9.0).add_(1)
    stream.synchronize()
    return _values(host)


def _used_before_it_is_made(waits: bool) -> list[float]:
    """A result of another stream is used in the current one."""
    stream, source, result = torch.cuda.Stream(), _full(2.0), _full(0.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        result.copy_(source)
    if waits:
        torch.cuda.current_stream().wait_stream(stream)
    return _values((result + 1).cpu())


def _unregistered_during_a_copy(waits: bool) -> list[float]:
    """Memory of the program is unregistered while the device copies to it."""
    memory, before = torch.zeros(N), device.counts()["unregistered_in_use"]
    cudart: Any = torch.cuda.cudart()
    assert cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1) == 0
    memory.copy_(_full(1.0), non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    assert cudart.cudaHostUnregister(memory.data_ptr()) == 0
    return [float(device.counts()["unregistered_in_use"] - before)]


BUGS = {
    "a tensor is written while another stream copies it": Bug(
        _written_during_its_copy, [1.0], [2.0], ("late-copies",)
    ),
    "the host reads a copy before it is done": Bug(
        _read_before_it_is_copied, [1.0], [-5.0], ("late-copies",)
    ),
    "a stream copies a tensor before another has made it": Bug(
        _copied_before_it_is_made, [1.0], [0.0], ("late-kernels",)
    ),
    "a pinned block is filled again before it is copied": Bug(
        _block_used_again, [1.0], [7.0], ("late-copies",)
    ),
    "a tensor is freed while another stream copies it": Bug(
        _freed_during_its_copy, [3.0], None, ("late-copies",)
    ),
    "a result is used before another stream has made it": Bug(
        _used_before_it_is_made, [3.0], [1.0], ("late-copies",)
    ),
    "memory is unregistered while it is copied to": Bug(
        _unregistered_during_a_copy, [0.0], [1.0], tuple(device.MODES)
    ),
}
