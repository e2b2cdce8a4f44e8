"""The simulated device itself: it shows bugs, blames no correct program, and computes as the CPU
does.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.simulated_cuda import device
from tests.simulated_cuda.bugs import BUGS

pytestmark = pytest.mark.simulated_gpu

InMode = Callable[[str], None]


@pytest.mark.parametrize("mode", device.MODES)
@pytest.mark.parametrize("name", BUGS)
def test_a_missing_wait_shows_in_its_mode_and_correct_programs_are_right_in_all(
    name: str, mode: str, in_mode: InMode
) -> None:
    in_mode(mode)
    bug = BUGS[name]
    for _ in range(5):
        assert bug.finds(bug.run(True)) == "right"
        assert bug.finds(bug.run(False)) == ("wrong" if mode in bug.found_in else "right")


BETWEEN_STREAMS = (
    "a tensor is written while another stream copies it",
    "a stream copies a tensor before another has made it",
    "a tensor is freed while another stream copies it",
    "a result is used before another stream has made it",
)


@pytest.mark.parametrize("name", BUGS)
def test_races_between_streams_are_found_and_name_both_lines(name: str, in_mode: InMode) -> None:
    in_mode("races")
    bug = BUGS[name]
    assert bug.finds(bug.run(True)) == "right" and device.races() == []
    bug.run(False)
    found = device.races()
    assert bool(found) == (name in BETWEEN_STREAMS), found
    for race in found:
        assert race.count("bugs.py:") == 2 and " on stream " in race, race


def test_a_process_reports_bugs_at_once_until_they_are_forgotten(
    in_mode: InMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(device.REPORTS, str(tmp_path))
    in_mode("races")
    for bug in BUGS.values():
        bug.run(True)
    assert not list(tmp_path.iterdir())
    BUGS["memory is unregistered while it is copied to"].run(False)
    BUGS["a result is used before another stream has made it"].run(False)
    report = tmp_path / str(os.getpid())
    first, *others = report.read_text().splitlines()
    assert first.startswith("host memory is unregistered") and others == device.races()
    device.install()
    assert not report.exists()


def test_a_copy_to_pageable_memory_is_done_when_it_returns(in_mode: InMode) -> None:
    in_mode("late-copies")
    host = torch.zeros(5)
    host.copy_(torch.ones(5, device="cuda"), non_blocking=True)
    assert host.tolist() == [1.0] * 5


def test_values_from_pageable_memory_are_those_of_the_call(in_mode: InMode) -> None:
    in_mode("late-copies")
    host = torch.ones(5)
    there = host.to("cuda", non_blocking=True)
    host.zero_()
    assert there.tolist() == [1.0] * 5


def test_a_strided_target_is_copied_through_pageable_memory(in_mode: InMode) -> None:
    in_mode("late-copies")
    host = torch.zeros(5, 2).pin_memory()
    host[:, 0].copy_(torch.ones(5, device="cuda"), non_blocking=True)
    assert host[:, 0].tolist() == [1.0] * 5


def test_polling_an_event_ends(in_mode: InMode) -> None:
    in_mode("late-copies")
    host, event = torch.zeros(5).pin_memory(), torch.cuda.Event()
    for _ in range(3):
        host.copy_(torch.ones(5, device="cuda"), non_blocking=True)
    event.record()
    assert not event.query()
    assert any(event.query() for _ in range(10))
    assert host.tolist() == [1.0] * 5


def test_streams_of_two_devices_wait_for_a_copy_between_them(in_mode: InMode) -> None:
    in_mode("late-copies")
    there = torch.zeros(5, device="cuda:1")
    there.copy_(torch.ones(5, device="cuda:0"))
    there.add_(1)
    assert there.tolist() == [2.0] * 5


def test_new_memory_is_poisoned() -> None:
    assert torch.empty(5, device="cuda").isnan().all()
    assert torch.empty(5, device="cuda", dtype=torch.int64).tolist() == [-1] * 5


def test_a_pinned_block_that_is_freed_lives_until_its_copy_is_done(in_mode: InMode) -> None:
    in_mode("late-copies")
    there = torch.full((5,), 2.0).pin_memory().to("cuda", non_blocking=True)
    torch.zeros(5).pin_memory()
    assert there.tolist() == [2.0] * 5


def test_an_operator_that_returns_a_view_is_refused_unless_the_device_knows_it() -> None:
    library = torch.library.Library("simulated", "DEF")
    library.define("peek(Tensor(a) given) -> Tensor(a)")
    library.impl("peek", lambda given: given[:1], "CPU")
    with pytest.raises(RuntimeError, match="the simulated device has no view simulated::peek"):
        torch.ops.simulated.peek(torch.ones(2, device="cuda"))


def test_random_numbers_repeat_and_leave_those_of_the_cpu_alone() -> None:
    torch.manual_seed(3)
    state, of_cpu = torch.cuda.get_rng_state(), torch.get_rng_state()
    first = torch.rand(4, device="cuda"), torch.nn.functional.dropout(torch.ones(50, device="cuda"))
    torch.cuda.set_rng_state(state)
    again = torch.rand(4, device="cuda"), torch.nn.functional.dropout(torch.ones(50, device="cuda"))
    assert all(map(torch.equal, first, again))
    assert torch.equal(of_cpu, torch.get_rng_state())
    assert state.shape == (16,)
    assert not torch.equal(first[0], torch.rand(4, device="cuda"))


def test_memory_is_counted_and_returned() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(1000, device="cuda")
    assert torch.cuda.memory_allocated() == before + tensor.nbytes
    del tensor
    assert torch.cuda.memory_allocated() == before


def test_the_nth_allocation_fails(faults: Callable[[str, int], None]) -> None:
    faults("allocation", 2)
    torch.empty(5, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(5, device="cuda")
    torch.empty(5, device="cuda")


def test_a_device_lost_in_a_copy_fails_every_later_call(faults: Callable[[str, int], None]) -> None:
    tensor, host = torch.ones(5, device="cuda"), torch.zeros(5).pin_memory()
    faults("copy", 1)
    host.copy_(tensor, non_blocking=True)
    for call in (torch.cuda.synchronize, tensor.sum, tensor.cpu, torch.cuda.Event().record):
        with pytest.raises(torch.AcceleratorError, match="unspecified launch failure"):
            call()


def test_the_registration_of_host_memory_fails(faults: Callable[[str, int], None]) -> None:
    faults("host_register", 1)
    memory, cudart = torch.zeros(5), cast(Any, torch.cuda.cudart())
    assert cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1) != 0
    assert not memory.is_pinned()
