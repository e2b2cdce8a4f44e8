"""Every kind of damage to a generation is found before anything is touched, and never means starting over."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from tests.recover.runs import Tiny, hidden, make_handler, names, newest, run_until, step_info

pytestmark = pytest.mark.timeout(60)


def _flip(path: Path, position: int = -20) -> None:
    """Flip a bit; at -20 of a manifest is the digest of its last file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def _set_format(folder: Path, version: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format_version": version}))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (lambda folder: _flip(folder / "default" / "__0_0.distcp"), "default-0-0-distcp-has-digest"),
    "truncated": (lambda folder: os.truncate(folder / "state" / "rank_00000.pt", 99), "state-rank-00000-pt-has-99-byt"),
    "missing": (lambda folder: (folder / "default" / ".metadata").unlink(), "file-default-metadata-is-missing"),
    "extra": (lambda folder: (folder / "default" / "x.distcp").touch(), "file-default-x-distcp-is-not-in-the-manifest"),
    "no info": (lambda folder: (folder / "recover_info.json").unlink(), "file-recover-info-json-is-missing"),
    "manifest gone": (lambda folder: (folder / "manifest.json").unlink(), "manifest-json-is-missing"),
    "manifest garbage": (lambda folder: (folder / "manifest.json").write_text("}"), "manifest-json-is-not-a-manifest"),
    "manifest flipped": (lambda folder: _flip(folder / "manifest.json"), ""),
    "strange format": (lambda folder: _set_format(folder, "2"), "manifest-json-has-format-version-2"),
    "empty": (lambda folder: [path.unlink() for path in folder.rglob("*") if path.is_file()], "manifest-json-is-miss"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_generation_is_set_aside_with_the_reason_and_the_one_before_is_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    strike, reason = DAMAGES[damage]
    digests = run_until(tmp_path, 3)
    strike(newest(tmp_path))
    tiny = Tiny()
    with caplog.at_level(logging.WARNING):
        info = make_handler(tmp_path).load(tiny.state)
    assert info and info.last_step_info.global_step == 1 and tiny.digest() == digests[1]
    assert names(tmp_path) == ["global_step_1"]
    (rejected,) = hidden(tmp_path)
    assert rejected.startswith(f".rejected-global_step_2-{reason}")
    assert "set" in caplog.text and "global_step_2 aside as .rejected-global_step_2-" in caplog.text
    run_until(tmp_path, 4, first=2)  # the step is made again
    assert names(tmp_path) == ["global_step_2", "global_step_3"]


@pytest.mark.parametrize("mode", ["auto", "must"])
def test_a_run_with_nothing_usable_left_never_starts_over(tmp_path: Path, mode: str) -> None:
    run_until(tmp_path, 2)
    for folder in (tmp_path / "e" / "t" / "recover").glob("global_step_*"):
        _flip(folder / "default" / "__0_0.distcp")
    for _ in range(2):  # the second time only what was set aside is left
        handler = make_handler(tmp_path, mode=mode, freq_steps=1)
        with pytest.raises(
            CheckpointCorruptError, match=r"no usable generation left: \.rejected-global_step_0-default"
        ):
            handler.load(Tiny().state)
        with pytest.raises(ConfigError, match="before load"):
            handler.dump(Tiny().state, step_info(0))
    assert len(hidden(tmp_path)) == 2


def test_a_generation_of_a_newer_format_is_left_alone_and_stops_the_run(tmp_path: Path) -> None:
    run_until(tmp_path, 2)
    _set_format(newest(tmp_path), 2)
    for _ in range(2):
        with pytest.raises(CheckpointMismatchError, match="reads version 1"):
            make_handler(tmp_path).load(Tiny().state)
    assert names(tmp_path) == ["global_step_0", "global_step_1"]


def test_a_renamed_generation_and_a_stray_file_are_not_resumed_from(tmp_path: Path) -> None:
    run_until(tmp_path, 1)
    newest(tmp_path).rename(newest(tmp_path).with_name("global_step_8"))
    (newest(tmp_path).parent / "global_step_9").write_text("not a folder")
    with pytest.raises(CheckpointCorruptError, match="was-renamed-it-holds-step-0"):
        make_handler(tmp_path).load(Tiny().state)
