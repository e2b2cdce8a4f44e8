"""The host copy of a snapshot: staged values never change."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.memory.tensors import flatten
from holdfast.engine.staging import staged_state
from holdfast.engine.staging.staged_state import Staging
from tests.helpers import run_ranks

pytestmark = pytest.mark.timeout(60)


def trained(changes_only_in_step: bool = True) -> DCPState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = DCPState(model, optimizer, changes_only_in_step=changes_only_in_step)
    backward(state)
    optimizer.step()
    return state


def backward(state: DCPState) -> None:
    state.model(torch.randn(4, 5)).square().sum().backward()


def values_of(nested: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in flatten(nested)}


def assert_same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    tensors = dict(flatten(found))
    assert tensors.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []


class Gate:
    """Blocks the delayed copies until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        copy: Callable[..., None] = staged_state._copy_in_thread

        def held(*args: Any) -> None:
            assert self._open.wait(20)
            copy(*args)

        monkeypatch.setattr(staged_state, "_copy_in_thread", held)

    def open_in(self, seconds: float) -> None:
        threading.Timer(seconds, self._open.set).start()


def test_a_step_waits_for_the_copy_and_its_forward_and_backward_dont(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, gate = trained(), Gate(monkeypatch)
    before, staging = values_of(state.state_dict()), Staging(state.model)
    staged = staging.stage(state)
    backward(state)
    assert not torch.equal(
        dict(flatten(state.state_dict()))["model.1.running_mean"], before["model.1.running_mean"]
    )
    gate.open_in(0.2)
    assert state.optimizer is not None
    state.optimizer.step()
    staging.finish()
    assert_same(staged, before)
    now = values_of(state.state_dict())
    assert not torch.equal(now["model.0.weight"], before["model.0.weight"])


@pytest.mark.parametrize("trains", [True, False])
def test_without_a_promise_all_of_it_is_copied_at_once(
    monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    Gate(monkeypatch)
    state = trained(changes_only_in_step=False)
    state = state if trains else DCPState(state.model, changes_only_in_step=True)
    before = values_of(state.state_dict())
    staged = Staging(state.model).stage(state)
    with torch.no_grad():
        for tensor in state.live_tensors().values():
            tensor.zero_()
    assert_same(staged, before)


def test_buffers_are_kept_while_they_fit_and_freed_on_request() -> None:
    state = trained()
    staging = Staging(state.model)

    def addresses() -> dict[str, int]:
        staged = staging.stage(state)
        staging.finish()
        return {name: tensor.data_ptr() for name, tensor in flatten(staged)}

    first = addresses()
    assert addresses() == first
    assert isinstance(state.model, nn.Sequential)
    state.model[1].running_mean = torch.zeros(7, dtype=torch.float64)
    changed = addresses()
    assert [name for name in first if changed.get(name) != first[name]] == ["model.1.running_mean"]
    staging.release()
    assert state.optimizer is not None and not state.optimizer._optimizer_step_pre_hooks


def test_a_failed_copy_raises_for_its_reader_and_not_in_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(staged_state, "_copy_in_thread", fail)
    state = trained()
    staging = Staging(state.model)
    staging.stage(state)
    assert state.optimizer is not None
    state.optimizer.step()
    with pytest.raises(MemoryError, match="no room"):
        staging.finish()
    monkeypatch.undo()
    staging.stage(state)
    staging.finish()


def test_a_load_waits_for_the_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = trained()
    save_dcp(tmp_path / "older", state)
    assert state.optimizer is not None
    state.optimizer.step()
    before, staging, gate = values_of(state.state_dict()), Staging(state.model), Gate(monkeypatch)
    staged = staging.stage(state)
    gate.open_in(0.2)
    load_dcp(tmp_path / "older", state)
    staging.finish()
    assert_same(staged, before)


def _stage_shards(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 7), nn.Linear(7, 1)
    )  # one rank has an empty shard of the last layer
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = DCPState(model, optimizer, changes_only_in_step=True)
    live = dict(flatten(state.state_dict()))
    staging = Staging(model)
    staged = staging.stage(state)
    staging.finish()
    for name, tensor in flatten(staged):
        original = live[name]
        if isinstance(original, DTensor) and isinstance(tensor, DTensor):
            ours, theirs = tensor.to_local(), original.to_local()
            assert tensor.placements == original.placements and tensor.shape == original.shape
            assert torch.equal(ours, theirs) and (
                ours.data_ptr() != theirs.data_ptr() or not ours.numel()
            )
            assert torch.equal(tensor.full_tensor(), original.full_tensor())
        assert isinstance(tensor, DTensor) == isinstance(original, DTensor)


def test_a_staged_shard_is_a_shard_in_memory_of_its_own() -> None:
    run_ranks(_stage_shards, 2)


def test_a_thread_waits_for_a_devices_copy_with_that_device_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current, seen = [0], []  # a new thread starts at device 0, on which CUDA would create a context

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    copy: Any = object.__new__(staged_state._DeviceCopy)
    copy._device = torch.device("cuda", 1)
    copy._event = SimpleNamespace(synchronize=lambda: seen.append(current[-1]))
    copy.drop()
    assert (seen, current) == ([1], [0])
