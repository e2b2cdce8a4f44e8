"""Trainers of other libraries: the objects they pass instead of an engine, and how they count
steps.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.engine.api import FinetuneSpec, StepInfo
from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.utils.errors import CheckpointExistsError, CheckpointMismatchError, ConfigError
from tests.helpers import run_ranks
from tests.recover.runs import SPEC, Tiny, digest, make_handler, newest

pytestmark = pytest.mark.timeout(60)


def as_tuple(tiny: Tiny) -> Any:
    return (tiny.model, tiny.optimizer, tiny.scheduler)


def as_trainer(tiny: Tiny) -> Any:
    """A trainer with the names used by transformers' Trainer and AReaL's engines."""
    return SimpleNamespace(
        model=tiny.model, optimizer=tiny.optimizer, lr_scheduler=tiny.scheduler, cpu_group=None
    )


@pytest.mark.parametrize("shown", [as_tuple, as_trainer, lambda tiny: {"actor": as_tuple(tiny)}])
def test_a_model_with_its_optimizer_and_schedule_resumes_exactly_by_step_numbers(
    shown: Any, tmp_path: Path
) -> None:
    untouched, tiny, handler = Tiny(), Tiny(), make_handler(tmp_path, freq_steps=1)
    torch.manual_seed(1)
    expected = [untouched.step() for _ in range(5)]
    torch.manual_seed(1)
    assert handler.load(shown(tiny)) is None
    for step in range(3):
        assert tiny.step() == expected[step]
        handler.dump(shown(tiny), step)
    handler.close()
    again, handler = Tiny(), make_handler(tmp_path, freq_steps=1)
    torch.manual_seed(9)
    info = handler.load(shown(again))
    assert info is not None and info.last_step_info == StepInfo.at(2, SPEC.steps_per_epoch)
    assert [again.step() for _ in range(2)] == expected[3:]
    handler.close()


@pytest.mark.parametrize(
    "thing", [nn.Linear(2, 2), (1, 2), (), "model", SimpleNamespace(model=nn.Linear(2, 2))]
)
def test_an_object_without_model_and_optimizer_is_refused_with_its_type(
    thing: Any, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"{type(thing).__name__} has neither 'engines' nor 'engine', nor 'model'",
    ):
        make_handler(tmp_path, freq_steps=1).load(thing)
    with pytest.raises(
        ConfigError, match=r"cannot be snapshotted; expected an engine, a DCPState, a tuple \(model"
    ):
        make_handler(tmp_path / "named", freq_steps=1).load({"actor": thing})


def test_a_changed_number_of_steps_an_epoch_is_resumed_only_where_the_host_allows_it(
    tmp_path: Path,
) -> None:
    tiny, handler = Tiny(), make_handler(tmp_path, freq_steps=1)
    handler.load(tiny.state)
    handler.dump(tiny.state, 4)
    handler.close()
    config = RecoverConfig(
        experiment_name="e", trial_name="t", fileroot=str(tmp_path), freq_steps=1
    )
    longer = FinetuneSpec(total_train_epochs=3, dataset_size=40, train_batch_size=4)
    with pytest.raises(CheckpointMismatchError, match="6 steps an epoch, this one has 10"):
        RecoverHandler(config, longer).load(Tiny().state)
    with RecoverHandler(config, longer, epochs_may_change=True) as handler:
        assert handler.peek() == StepInfo.at(4, 6)
        info = handler.load(tiny.state)
        assert info is not None and info.last_step_info.global_step == 4
        assert handler.first_step(info) == StepInfo.at(5, 10)
        assert handler.dump(tiny.state, 5)
        handler.wait()
    assert newest(tmp_path).name == "global_step_5"
    with RecoverHandler(config, longer) as handler:
        assert handler.peek() == StepInfo.at(5, 10)


def test_a_step_is_known_by_its_number_alone() -> None:
    assert StepInfo.at(0, 6) == StepInfo(0, 0, 0, 6)
    assert StepInfo.at(13, 6) == StepInfo(2, 1, 13, 6) == StepInfo.at(12, 6).next()
    for step, per_epoch in ((-1, 6), (3, 0)):
        with pytest.raises(ConfigError, match="expected"):
            StepInfo.at(step, per_epoch)


def test_a_gradient_scaler_and_an_average_of_the_weights_are_in_the_same_generation(
    tmp_path: Path,
) -> None:
    def parts() -> tuple[Tiny, Any, Any]:
        tiny = Tiny()
        average = torch.optim.swa_utils.AveragedModel(
            tiny.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn()
        )
        return tiny, average, torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    tiny, average, scaler = parts()
    handler = make_handler(tmp_path, freq_steps=1)
    handler.register("scaler", scaler)
    handler.load({"model": as_tuple(tiny), "average": (average,)})
    for step in range(3):
        scaler.scale(tiny.model(torch.randn(5, 3)).square().mean()).backward()
        scaler.step(tiny.optimizer)
        scaler.update()
        average.update_parameters(tiny.model)
        handler.dump({"model": as_tuple(tiny), "average": (average,)}, step)
    handler.close()
    again, average_again, scaler_again = parts()
    handler = make_handler(tmp_path, freq_steps=1)
    handler.register("scaler", scaler_again)
    handler.load({"model": as_tuple(again), "average": (average_again,)})
    assert scaler_again.state_dict() == scaler.state_dict() and scaler.get_scale() == 8.0
    assert digest({"average": DCPState(average_again)}) == digest({"average": DCPState(average)})
    assert again.digest() == tiny.digest() and int(average_again.n_averaged) == 3
    handler.close()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _built(wrap: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    elif wrap == "compiled ddp":
        model = torch.compile(DistributedDataParallel(model), backend="eager")
    elif wrap == "fsdp":
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _move(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """Save a trained state in each way, and load it in every other."""
    digests = {}
    for wrap in ("ddp", "compiled ddp", "fsdp"):
        model, optimizer = _built(wrap)
        _train(model, optimizer)
        state = DCPState(model, optimizer)
        assert not any("module" in name for name in state.live_tensors())
        save_dcp(Path(folder) / wrap, state)
        digests[wrap] = digest({"": state})
    for source in digests:
        for wrap in digests:
            model, optimizer = _built(wrap)
            load_dcp(Path(folder) / source, DCPState(model, optimizer))
            assert digest({"": DCPState(model, optimizer)}) == digests[source], (source, wrap)
    return digests


@pytest.mark.slow
def test_a_run_moves_between_ddp_fsdp2_and_one_process(tmp_path: Path) -> None:
    first, second = run_ranks(_move, 2, str(tmp_path))
    assert first == second and not dist.is_initialized()
    for wrap, expected in first.items():
        model, optimizer = _built("one process")
        load_dcp(tmp_path / wrap, DCPState(model, optimizer))
        assert digest({"": DCPState(model, optimizer)}) == expected


def test_a_folder_is_replaced_only_on_request_and_only_by_a_complete_one(
    tmp_path: Path, monkeypatch: Any
) -> None:
    tiny, path = Tiny(), tmp_path / "step_1"
    save_dcp(path, tiny.state)
    first = tiny.digest()
    tiny.step()
    with pytest.raises(CheckpointExistsError, match="never written over"):
        save_dcp(path, tiny.state)
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.utils.atomic_folder.commit_folder", _refuse)
        with pytest.raises(OSError, match="no"):
            save_dcp(path, tiny.state, replace=True)
    assert _loaded(path) == first and [entry.name for entry in tmp_path.iterdir()] == ["step_1"]
    save_dcp(path, tiny.state, replace=True)
    assert _loaded(path) == tiny.digest() != first
    save_dcp(tmp_path / "step_2", tiny.state, replace=True)  # nothing there to replace
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step_1", "step_2"]


def test_a_folder_put_aside_by_a_killed_replacement_comes_back_with_the_next_one(
    tmp_path: Path, monkeypatch: Any
) -> None:
    tiny, path = Tiny(), tmp_path / "step_1"
    save_dcp(path, tiny.state)
    first = tiny.digest()
    path.rename(tmp_path / ".replaced-step_1")  # left by a kill between the two renames
    tiny.step()
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.engine.dcp.save.write_dcp", _refuse)
        with pytest.raises(OSError, match="no"):
            save_dcp(path, tiny.state, replace=True)
    assert _loaded(path) == first
    path.rename(tmp_path / ".replaced-step_1")
    save_dcp(path, tiny.state, replace=True)
    assert _loaded(path) == tiny.digest() and [entry.name for entry in tmp_path.iterdir()] == [
        "step_1"
    ]


def _refuse(*_: Any) -> Any:
    raise OSError("no")


def _loaded(path: Path) -> str:
    tiny = Tiny()
    load_dcp(path, tiny.state)
    return tiny.digest()
