"""After a restore the handler checks the state and logs the result."""

import errno
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine.dcp.load import Checkpoint, DCPLoad
from holdfast.engine.dcp.state import DCPState, SavedValues
from holdfast.recover.info import INFO_NAME, RecoverInfo
from holdfast.utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from tests.faults.generations import reseal
from tests.helpers import run_ranks
from tests.recover.runs import (
    Meter,
    Tiny,
    hidden,
    make_handler,
    names,
    newest,
    run_until,
    step_info,
)

pytestmark = pytest.mark.timeout(60)


def test_a_generation_remembers_steps_rate_schedule_samples_and_generators(tmp_path: Path) -> None:
    run_until(tmp_path, 3)
    info = RecoverInfo.read(newest(tmp_path))
    facts = info.engines["default"]
    assert (facts.optimizer_steps, facts.lr, facts.schedule_step, facts.moved) == (
        3,
        0.1 / 4,
        3,
        True,
    )
    assert facts.fingerprints.keys() == {"model", "optim"} and info.rng.keys() == {"rank_00000"}


def test_the_restored_state_is_logged_in_one_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_until(tmp_path, 3)
    with caplog.at_level(logging.INFO):
        make_handler(tmp_path).load(Tiny().state)
    (message,) = [
        record.getMessage()
        for record in caplog.records
        if "restored from global_step_2" in record.getMessage()
    ]
    facts = RecoverInfo.read(newest(tmp_path)).engines["default"]
    for word in (
        "step 2",
        "optimizer_steps",
        "0.025",
        *facts.fingerprints.values(),
        "generators of rank_00000",
    ):
        assert word in message
    assert all(len(line) <= 120 for line in message.splitlines())


def _plain_sgd() -> DCPState:
    """A model whose optimizer has no state, so that only ``requires_grad`` tells which weights are
    trained.
    """
    model = Tiny().model
    return DCPState(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _use_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True


def _use_other_attention() -> None:
    torch.backends.cuda.enable_flash_sdp(False)


def _save_with_tf32(rank: int, world_size: int, root: str) -> None:
    _use_tf32()
    handler, state = make_handler(root, freq_steps=1), _plain_sgd()
    handler.load(state)
    handler.dump(state, step_info(2))
    handler.close()


def _warnings_of_load(
    rank: int, world_size: int, root: str, prepare: Callable[[], None] | None, freeze: bool
) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("holdfast").addHandler(handler)
    if prepare is not None:
        prepare()
    state = _plain_sgd()
    next(iter(state.model.parameters())).requires_grad_(not freeze)
    make_handler(root).load(state)
    return [message for message in messages if "settings" in message]


def test_a_process_with_other_settings_is_warned_once_with_both_values_of_each(
    tmp_path: Path,
) -> None:
    run_ranks(_save_with_tf32, 1, str(tmp_path))
    assert run_ranks(_warnings_of_load, 1, str(tmp_path), _use_tf32, False) == [[]]
    ((warning,),) = run_ranks(_warnings_of_load, 1, str(tmp_path), _use_other_attention, True)
    for change in (
        "torch.backends.cuda.matmul.fp32_precision was tf32, is ieee",
        "torch.backends.cudnn.benchmark was True, is False",
        "torch.backends.cuda.flash_sdp_enabled was True, is False",
        "trained parameters of default was 2 of 2 (names ",
    ):
        assert change in warning
    assert (
        warning.startswith("global_step_2 was saved with other settings")
        and warning.count(", is ") == 4
    )


def test_a_generation_of_an_older_version_without_switches_loads_without_a_warning(
    tmp_path: Path,
) -> None:
    run_ranks(_save_with_tf32, 1, str(tmp_path))
    path = newest(tmp_path) / INFO_NAME
    content = json.loads(path.read_bytes())
    assert content.pop("switches")
    path.write_text(json.dumps(content))
    reseal(path.parent)
    assert run_ranks(_warnings_of_load, 1, str(tmp_path), None, False) == [[]]


class _Forgetful(DCPState):
    """Loses a value while it is loaded, as other systems have done silently."""

    lost = ""

    def restore(self, values: SavedValues) -> None:
        super().restore(values)
        assert self.optimizer is not None and self.scheduler is not None
        if self.lost == "moments":
            for entry in self.optimizer.state.values():
                entry["exp_avg"].zero_()
        if self.lost == "weights":
            next(iter(self.model.parameters())).data[0, 0] += 1
        if self.lost == "schedule":
            self.scheduler.last_epoch = 0
        if self.lost == "rate":
            self.optimizer.param_groups[0]["lr"] = 0.5


@pytest.mark.parametrize(
    ("lost", "what"),
    [
        ("moments", "optim"),
        ("weights", "model"),
        ("schedule", "schedule_step"),
        ("rate", "lr"),
        ("generators", "rank"),
    ],
)
def test_a_restore_that_lost_something_stops_the_run(
    tmp_path: Path, lost: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_until(tmp_path, 3)
    tiny = Tiny()
    state = _Forgetful(tiny.model, tiny.optimizer, tiny.scheduler)
    state.lost = lost
    if lost == "generators":
        monkeypatch.setattr(
            "holdfast.recover.resuming.restore.restore_rng", lambda state: torch.manual_seed(3)
        )
    with pytest.raises(
        CheckpointCorruptError,
        match=rf"global_step_2 was restored, but .*{what}.* is .*; recover_info",
    ):
        make_handler(tmp_path).load(state)


class _Draws(Meter):
    """A user's object that draws random numbers when it is restored. Generators come last, so
    nothing changes.
    """

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        torch.rand(3)


def test_objects_that_draw_while_they_are_restored_do_not_disturb_the_generators(
    tmp_path: Path,
) -> None:
    handler, tiny = make_handler(tmp_path, freq_steps=1), Tiny()
    handler.register("it", _Draws())
    handler.load(tiny.state)
    handler.dump(tiny.state, step_info(0))
    expected = torch.rand(1)
    again = make_handler(tmp_path)
    again.register("it", _Draws())
    again.load(tiny.state)
    assert torch.equal(torch.rand(1), expected)


def test_no_engine_is_touched_when_the_data_of_another_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, actor, critic = make_handler(tmp_path, freq_steps=1), Tiny(), Tiny()
    handler.load({"actor": actor.state, "critic": critic.state})
    actor.step()
    critic.step()
    handler.dump({"actor": actor.state, "critic": critic.state}, step_info(0))

    read = Checkpoint.read

    def fail_for_the_second(saved: Checkpoint, state: DCPState) -> DCPLoad:
        load = read(saved, state)
        if saved.path.name == "critic":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return load

    monkeypatch.setattr(Checkpoint, "read", fail_for_the_second)
    fresh = {"actor": Tiny(), "critic": Tiny()}
    before = {name: tiny.digest() for name, tiny in fresh.items()}
    with pytest.raises(OSError, match="Input/output"):
        make_handler(tmp_path).load({name: tiny.state for name, tiny in fresh.items()})
    assert {name: tiny.digest() for name, tiny in fresh.items()} == before
    assert names(tmp_path) == ["global_step_0"], "a failing disk is no verdict on the generation"


@pytest.mark.parametrize("lr", [math.nan, math.inf])
def test_a_rate_that_is_not_finite_can_be_resumed(tmp_path: Path, lr: float) -> None:
    run_until(tmp_path, 1)
    handler, tiny = make_handler(tmp_path, freq_steps=1), Tiny()
    handler.load(tiny.state)
    tiny.optimizer.param_groups[0]["lr"] = lr
    handler.dump(tiny.state, step_info(1))
    handler.close()
    again = Tiny()
    with make_handler(tmp_path, freq_steps=1) as handler:
        assert handler.load(again.state) is not None
        assert repr(again.optimizer.param_groups[0]["lr"]) == repr(lr)
        handler.dump(again.state, step_info(2))
    assert repr(RecoverInfo.read(newest(tmp_path)).engines["default"].lr) == repr(lr)


def test_a_schedule_that_is_stepped_by_fractions_of_an_epoch_goes_on(tmp_path: Path) -> None:
    tiny = Tiny()
    with make_handler(tmp_path, freq_steps=1) as handler:
        handler.load(tiny.state)
        tiny.step()
        tiny.scheduler.step(0.125)  # type: ignore[arg-type]
        assert handler.dump(tiny.state, step_info(0))
    again = Tiny()
    with make_handler(tmp_path) as handler:
        assert handler.load(again.state) is not None
    assert again.digest() == tiny.digest() and again.scheduler.last_epoch == 0.125


class _Versioned(DCPState):
    version: Any = "v1"

    def get_version(self) -> Any:
        return self.version

    def set_version(self, version: Any) -> None:
        self.version = version


def test_an_unreadable_snapshot_fails_and_those_before_it_stay(tmp_path: Path) -> None:
    tiny = Tiny()
    state = _Versioned(tiny.model, tiny.optimizer, tiny.scheduler)
    with make_handler(tmp_path, freq_steps=1) as handler:
        handler.load(state)
        for step, version in enumerate([1, None, "v3"]):
            tiny.step()
            state.version = version
            if version == 1:
                handler.dump(state, step_info(step))
                continue
            with pytest.raises(
                ConfigError,
                match=f"step {step} .*: info.weight_versions.default is {version!r}; expect",
            ):
                handler.dump(state, step_info(step))
    assert names(tmp_path) == ["global_step_0"] and hidden(tmp_path) == []
    with make_handler(tmp_path) as handler:
        assert handler.load(state) is not None and state.version == 1


@pytest.mark.parametrize(("field", "value"), [("weight_versions", "v2"), ("engines", 0.1)])
def test_a_generation_with_other_types_ends_the_start_and_stays(
    tmp_path: Path, field: str, value: Any
) -> None:
    """The digests fit, so another version wrote it and may read it."""
    run_until(tmp_path, 2)
    folder = newest(tmp_path)
    info = json.loads((folder / "recover_info.json").read_text())
    (folder / "recover_info.json").write_text(json.dumps(info | {field: {"default": value}}))
    reseal(folder)
    tiny = Tiny()
    before = tiny.digest()
    for _ in range(2):
        with (
            make_handler(tmp_path) as handler,
            pytest.raises(
                CheckpointMismatchError,
                match=f"{field}.default is {value!r}; expected .*; another version of Holdfast",
            ),
        ):
            handler.load(tiny.state)
    assert names(tmp_path) == ["global_step_0", "global_step_1"] and hidden(tmp_path) == []
    assert tiny.digest() == before
