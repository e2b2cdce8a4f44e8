"""Entries of a module's state dict besides parameters and buffers: restored on every rank, or
refused.
"""

import functools
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from holdfast.engine.dcp.load import Checkpoint, load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState, StagedState
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from tests.helpers import run_ranks
from tests.recover.runs import SPEC, step_info

pytestmark = pytest.mark.timeout(120)


class Extra(nn.Linear):
    """Has extra state: plain values and a tensor."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen: dict[str, Any] = {"steps": 0}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Overriding(nn.Linear):
    """Saves an additional scale, and loads it."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = torch.ones(2)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.scale = state_dict.pop(f"{prefix}scale")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Hooked(nn.Linear):
    """Saves a count through hooks, and loads it through one."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.count = 0
        self.register_state_dict_post_hook(self.add)
        self.register_load_state_dict_pre_hook(self.take)

    @staticmethod
    def add(module: Any, state_dict: Any, prefix: str, metadata: Any) -> None:
        state_dict[f"{prefix}count"] = module.count

    @staticmethod
    def take(module: Any, state_dict: Any, prefix: str, *args: Any) -> None:
        module.count = state_dict.pop(f"{prefix}count")


class Model(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        torch.manual_seed(value)
        self.extra, self.overriding, self.hooked = Extra(), Overriding(), Hooked()
        self.extra.seen = {
            "steps": value,
            "names": ["a", (1, 2.5, None)],
            "mean": torch.full((3,), float(value)),
        }
        self.overriding.scale = torch.full((2,), value + 0.5)
        self.hooked.count = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hooked(self.overriding(self.extra(x)))


def described(model: Any) -> str:
    return repr((model.extra.seen, model.overriding.scale, model.hooked.count))


def training(model: nn.Module) -> DCPState:
    return DCPState(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("make", [DCPState, training])
def test_entries_that_modules_add_to_their_state_dict_are_restored(
    make: Callable[[nn.Module], DCPState], tmp_path: Path
) -> None:
    saved, loaded = Model(5), Model(7)
    save_dcp(tmp_path / "c", make(saved))
    load_dcp(tmp_path / "c", make(loaded))
    assert described(loaded) == described(saved)
    assert all(
        torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.parameters(), strict=True)
    )
    load_dcp(tmp_path / "c", DCPState(again := Model(8)))
    assert described(again) == described(saved)


def test_the_handler_brings_it_back_as_it_was_when_it_was_staged(tmp_path: Path) -> None:
    model = Model(5)
    config = RecoverConfig("e", "t", fileroot=str(tmp_path), freq_steps=1)
    with RecoverHandler(config, SPEC) as handler:
        handler.load(state := training(model))
        handler.dump(state, step_info(0))
        was = described(model)
        model.extra.seen["mean"].zero_()
        model.overriding.scale.zero_()
    with RecoverHandler(config, SPEC) as handler:
        assert handler.load(training(resumed := Model(7))) is not None
    assert described(resumed) == was != described(model)


@pytest.mark.slow
def test_it_comes_back_whatever_wraps_the_modules(tmp_path: Path) -> None:
    saved, loaded = Model(5), Model(7)
    save_dcp(tmp_path / "c", DCPState(saved))
    loaded.extra = checkpoint_wrapper(loaded.extra)  # type: ignore[assignment]
    compiled: Any = torch.compile(loaded.overriding)
    loaded.overriding = compiled
    load_dcp(tmp_path / "c", DCPState(loaded))
    assert described(loaded) == described(saved)
    save_dcp(tmp_path / "d", DCPState(loaded))
    load_dcp(tmp_path / "d", DCPState(again := Model(8)))
    assert described(again) == described(saved)


def _sharded(rank: int, value: int) -> DCPState:
    model = Model(value)
    model.extra.seen["rank"] = rank
    for module in (model.extra, model.overriding, model):
        fully_shard(module)
    return training(model)


def _save(rank: int, world_size: int, folder: str) -> str:
    state = _sharded(rank, 5)
    save_dcp(f"{folder}/c", state)
    return described(state.model)


def _load(rank: int, world_size: int, folder: str) -> str:
    state = _sharded(9, 7)
    load_dcp(f"{folder}/c", state)
    return described(state.model)


def test_each_rank_gets_its_own_and_a_new_one_rank_0s(tmp_path: Path) -> None:
    saved = run_ranks(_save, 2, str(tmp_path))
    assert saved[0] != saved[1]
    assert run_ranks(_load, 2, str(tmp_path)) == saved
    assert run_ranks(_load, 3, str(tmp_path)) == [*saved, saved[0]]
    assert run_ranks(_load, 1, str(tmp_path)) == saved[:1]


def test_a_model_that_adds_nothing_is_not_asked_for_its_state_dict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        method = getattr(nn.Module, name)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return method(*args, **kwargs)

        return call

    for name in ("state_dict", "load_state_dict", "_save_to_state_dict"):
        monkeypatch.setattr(nn.Module, name, watched(name))
    state = training(nn.Sequential(nn.Linear(3, 3), checkpoint_wrapper(nn.BatchNorm1d(3))))
    for name, adds in (("quiet", False), ("loud", True)):
        save_dcp(tmp_path / name, state)
        load_dcp(tmp_path / name, state)
        assert bool(called) == adds
        state = training(Model(5))


class OnlyGet(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1


class OnlySaves(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = torch.ones(2)


class Custom:
    """Can only be read by running code."""


def _model_with(thing: Any) -> nn.Module:
    model = Model(5)
    model.extra.seen = {"deep": [thing]}
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an object": (lambda: _model_with(Custom()), r"state of modules cannot be saved.*Custom"),
    "extra state that nothing takes": (
        lambda: nn.Sequential(OnlyGet(2, 2)),
        r"0\._extra_state.* OnlyGet.*set_extra_state",
    ),
    "an entry that nothing takes": (lambda: nn.Sequential(OnlySaves(2, 2)), r"0\.scale.*OnlySaves"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_state_that_could_not_be_restored_is_refused_at_save_by_name(
    what: str, tmp_path: Path
) -> None:
    make, words = REFUSED[what]
    with pytest.raises(ConfigError, match=words):
        save_dcp(tmp_path / "c", DCPState(make()))
    assert list(tmp_path.iterdir()) == []


def _with_dtensor(rank: int, world_size: int, folder: str) -> str:
    state = _sharded(rank, 5)
    extra: Any = state.model.extra
    extra.seen["copy"] = next(state.model.parameters()).detach().clone()
    with pytest.raises(ConfigError, match=r"extra\._extra_state holds a DTensor") as refused:
        save_dcp(f"{folder}/c", state)
    return str(refused.value)


def test_a_dtensor_in_it_is_refused_at_save(tmp_path: Path) -> None:
    run_ranks(_with_dtensor, 1, str(tmp_path))


def refusal(folder: Path, model: nn.Module, kind: type[Exception]) -> str:
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(kind) as refused:
        load_dcp(folder, DCPState(model))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return str(refused.value)


class Bare(nn.Module):
    """The same parameters, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.overriding, self.hooked = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)


def test_a_folder_without_module_state_loads_and_names_the_unchanged_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_dcp(tmp_path / "older", DCPState(Bare()))
    model = Model(7)
    was = described(model)
    with caplog.at_level(logging.WARNING):
        load_dcp(tmp_path / "older", DCPState(model))
    assert described(model) == was
    assert "no state of modules" in caplog.text and "extra._extra_state" in caplog.text


def test_a_model_that_could_not_take_it_refuses_the_folder(tmp_path: Path) -> None:
    save_dcp(tmp_path / "c", DCPState(Model(5)))
    assert "extra._extra_state" in refusal(tmp_path / "c", Bare(), CheckpointMismatchError)


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


class Malicious(DCPState):
    def state_dict(self) -> dict[str, Any]:
        data = pickle.dumps(Bomb("bomb_went_off"))
        framed = bytearray(len(data).to_bytes(8, "little") + data)
        return super().state_dict() | {
            "module_state": {"rank_00000": torch.frombuffer(framed, dtype=torch.uint8)}
        }


class Short(DCPState):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "module_state": {"rank_00000": torch.full((4,), 255, dtype=torch.uint8)}
        }


@pytest.mark.parametrize("kind", [Malicious, Short])
def test_bytes_that_are_no_plain_data_are_refused_before_anything_changes(
    kind: type[DCPState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_dcp(
        tmp_path / "c", StagedState(kind(Model(5)).state_dict(), lambda: None)
    )  # a save would refuse the state
    refusal(tmp_path / "c", Model(7), CheckpointCorruptError)
    assert not (tmp_path / "bomb_went_off").exists()
    Checkpoint.open(tmp_path / "c").check(DCPState(Model(7)))


def test_entries_that_come_and_go_are_loaded_by_the_hooks_that_know_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Later(Hooked):
        @staticmethod
        def add(module: Any, state_dict: Any, prefix: str, metadata: Any) -> None:
            if module.count:
                state_dict[f"{prefix}count"] = module.count

        @staticmethod
        def take(module: Any, state_dict: Any, prefix: str, *args: Any) -> None:
            module.count = state_dict.pop(f"{prefix}count", -1)

    saved, loaded = Later(), Later()
    saved.count = 3
    save_dcp(tmp_path / "c", DCPState(saved))
    load_dcp(tmp_path / "c", DCPState(loaded))
    assert loaded.count == 3
    save_dcp(tmp_path / "d", DCPState(nn.Sequential(Later(), Extra())))
    both = nn.Sequential(Later(), Extra())
    both[0].count = 4  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        load_dcp(tmp_path / "d", DCPState(both))
    assert both[0].count == 4 and "0.count" in caplog.text
