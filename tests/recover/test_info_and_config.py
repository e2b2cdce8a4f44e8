"""The inputs of recovery, and the small files it writes besides tensors."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from holdfast.engine.api import StepInfo
from holdfast.recover import RecoverConfig, RecoverInfo
from holdfast.recover.info import INFO_NAME, EngineFacts
from holdfast.utils.config import load_config
from holdfast.utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError

INFO = RecoverInfo(StepInfo(1, 2, 8, 6), "ab12", 4, {"actor": 9}, "/x/global_step_3")


def test_an_info_comes_back_from_json_with_the_next_step(tmp_path: Path) -> None:
    (tmp_path / INFO_NAME).write_bytes(INFO.to_json())
    assert RecoverInfo.read(tmp_path) == INFO
    assert INFO.last_step_info.next() == StepInfo(1, 3, 9, 6)
    assert StepInfo(1, 5, 11, 6).next() == StepInfo(2, 0, 12, 6)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff",
        json.dumps({"run_id": "r", "world_size": 1}).encode(),
        INFO.to_json().replace(b"epoch_step", b"epoch_stop"),
        INFO.to_json().replace(b'"engines"', b'"motors"'),
        INFO.to_json().replace(b'"run_id"', b'"walk_id"'),
    ],
)
def test_an_info_that_is_not_one_is_corrupt(tmp_path: Path, content: bytes) -> None:
    (tmp_path / INFO_NAME).write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match=r"recover_info\.json cannot be read"):
        RecoverInfo.read(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        (
            "last_step_info",
            {"epoch": 1, "epoch_step": 2, "global_step": "8", "steps_per_epoch": 6},
            "global_step is '8'",
        ),
        ("last_step_info", [1, 2, 8, 6], r"last_step_info is \[1, 2, 8, 6\]; expected StepInfo"),
        ("run_id", None, "run_id is None; expected str"),
        ("world_size", True, "world_size is True; expected int"),
        ("weight_versions", {"actor": "9"}, "weight_versions.actor is '9'; expected int"),
        ("weight_versions", [], r"weight_versions is \[\]; expected dict"),
        ("resume_path", 3, "resume_path is 3; expected str"),
        ("save_s", "long", "save_s is 'long'; expected float"),
        ("metrics", {"reward": None}, "metrics.reward is None; expected float"),
        ("engines", {"actor": 1}, "engines.actor is 1; expected EngineFacts"),
        ("rng", {"rank_00000": 5}, "rng.rank_00000 is 5; expected str"),
        ("world_size", 1.5, "world_size is 1.5; expected int"),
    ],
)
def test_a_value_of_another_type_is_found_when_the_info_is_read(
    tmp_path: Path, field: str, value: Any, found: str
) -> None:
    (tmp_path / INFO_NAME).write_text(json.dumps(json.loads(INFO.to_json()) | {field: value}))
    with pytest.raises(
        CheckpointMismatchError,
        match=rf"recover_info\.json: info.*{found}.*another version of Holdfast",
    ):
        RecoverInfo.read(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("engines", {"actor": {"moved": True}}, "info.engines.actor.optimizer_steps is missing"),
        ("save_s", 10**400, "int too large to convert to float"),
    ],
)
def test_an_info_with_a_part_missing_is_corrupt(
    tmp_path: Path, field: str, value: Any, found: str
) -> None:
    (tmp_path / INFO_NAME).write_text(json.dumps(json.loads(INFO.to_json()) | {field: value}))
    with pytest.raises(
        CheckpointCorruptError, match=rf"recover_info\.json cannot be read: .*{found}"
    ):
        RecoverInfo.read(tmp_path)


def test_an_info_that_could_not_be_read_back_is_not_written() -> None:
    for version in ("v9", None, 9.5, object()):
        with pytest.raises(
            ConfigError, match=r"step 8 .*(expected int|not JSON serializable).*get_version"
        ):
            replace(INFO, weight_versions={"actor": version}).to_json()


def test_whole_steps_are_ints_whatever_they_were_computed_with(tmp_path: Path) -> None:
    steps = StepInfo(*divmod(9, 8.0), numpy.int64(9), 8.0)  # type: ignore[arg-type]
    assert repr(steps) == "StepInfo(epoch=1, epoch_step=1, global_step=9, steps_per_epoch=8)"
    for bad in (0.5, float("nan"), "9", None):
        with pytest.raises(ConfigError, match=r"StepInfo.global_step is .*; expected an int"):
            StepInfo(0, 0, bad, 8)  # type: ignore[arg-type]
    content = json.loads(INFO.to_json()) | {"last_step_info": asdict(steps) | {"epoch": 1.0}}
    (tmp_path / INFO_NAME).write_text(json.dumps(content))
    assert RecoverInfo.read(tmp_path).last_step_info == steps, "as an older version wrote it"


def test_additions_of_newer_versions_are_ignored_and_numbers_may_be_whole(tmp_path: Path) -> None:
    facts = {
        "optimizer_steps": None,
        "lr": 1,
        "schedule_step": 2,
        "fingerprints": {},
        "moved": False,
        "more": [1],
    }
    content = json.loads(INFO.to_json()) | {
        "engines": {"actor": facts},
        "save_s": 2,
        "later": {"x": 1},
    }
    content["last_step_info"]["later"] = 1
    (tmp_path / INFO_NAME).write_text(json.dumps(content))
    found = RecoverInfo.read(tmp_path)
    assert found == replace(
        INFO, engines={"actor": EngineFacts(None, 1.0, 2, {}, False)}, save_s=2.0
    )
    assert type(found.engines["actor"].lr) is type(found.save_s) is float


def test_rates_that_are_not_finite_survive_the_file(tmp_path: Path) -> None:
    for lr in (float("nan"), float("inf"), -float("inf")):
        (tmp_path / INFO_NAME).write_bytes(
            replace(INFO, engines={"a": EngineFacts(1, lr, None, {}, True)}).to_json()
        )
        assert repr(RecoverInfo.read(tmp_path).engines["a"].lr) == repr(lr)


def test_a_missing_info_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorruptError, match="FileNotFoundError"):
        RecoverInfo.read(tmp_path)


@pytest.mark.parametrize("key", ["fileroot", "resume_path", "trial_name"])
def test_a_path_that_leaves_no_room_for_the_names_of_files_is_refused(key: str) -> None:
    path = "t" * 256 if key == "trial_name" else "/" + "long/" * 814 + "end"  # 4074 bytes
    values: dict[str, Any] = {key: path}
    with pytest.raises(ConfigError, match=rf"{key}.* give a path of \d+ bytes"):
        RecoverConfig(**values)


def test_paths_follow_experiment_and_trial() -> None:
    config = RecoverConfig(experiment_name="gsm8k", trial_name="a", fileroot="/data")
    assert config.trial_root == Path("/data/gsm8k/a") and config.recover_root == Path(
        "/data/gsm8k/a/recover"
    )


@pytest.mark.parametrize(
    ("word", "mode"),
    [
        ("auto", "auto"),
        ("must", "must"),
        ("off", "off"),
        ("on", "auto"),
        ("disabled", "off"),
        ("'off'", "off"),
    ],
)
def test_every_mode_is_understood_in_yaml_in_an_override_and_in_python(
    tmp_path: Path, word: str, mode: str
) -> None:
    (tmp_path / "c.yaml").write_text(f"mode: {word}\n")
    assert load_config(RecoverConfig, tmp_path / "c.yaml").mode == mode
    assert load_config(RecoverConfig, overrides=[f"mode={word}"]).mode == mode
    assert RecoverConfig(mode=word.strip("'")).mode == mode


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "sometimes"),
        ("freq_steps", 0),
        ("freq_epochs", 0),
        ("freq_secs", -1.0),
        ("max_ckpt_to_keep", 0),
        ("retries", -1),
        ("retry_window_s", -1.0),
    ],
)
def test_a_bad_value_names_its_key(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"'recover.{field}' is {value!r}; expected"):
        RecoverConfig(**{field: value})


@pytest.mark.parametrize("field", ["fileroot", "resume_path"])
def test_an_empty_path_does_not_become_the_current_folder(field: str) -> None:
    expected = rf"config key 'recover\.{field}' is empty; .* needs a folder"
    with pytest.raises(ConfigError, match=expected):
        replace(RecoverConfig(), **{field: ""})


@pytest.mark.parametrize(
    ("field", "advice"), [("fileroot", "set recover.mirror_url"), ("resume_path", "fetch it")]
)
def test_a_url_never_becomes_a_local_folder(field: str, advice: str) -> None:
    expected = (
        rf"config key 'recover\.{field}' is memory:///shared/runs; .* needs a folder of this "
        rf"machine: .*{advice}"
    )
    remote, local = ({field: f"{protocol}:///shared/runs"} for protocol in ("memory", "file"))
    with pytest.raises(ConfigError, match=expected):
        replace(RecoverConfig(), **remote)
    assert getattr(replace(RecoverConfig(), **local), field) == "/shared/runs"
