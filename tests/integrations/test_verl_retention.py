"""Older steps of a verl run: which are removed. A failed removal costs space, but does not stop the
run.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from holdfast.integrations.verl_retention import DCP, retire


def steps(root: Path, count: int, role: str = "actor") -> list[Path]:
    found = [root / f"global_step_{step}" / role for step in range(1, count + 1)]
    for folder in found:
        (folder / DCP).mkdir(parents=True)
    return found


def test_the_newest_steps_and_the_one_that_is_named_stay(tmp_path: Path) -> None:
    folders = steps(tmp_path, 5)
    (left := tmp_path / "global_step_1" / ".retired-actor-0123456789ab").mkdir()
    retire(folders[4], 2, named=2)
    assert [folder.exists() for folder in folders] == [
        False,
        True,
        False,
        True,
        True,
    ] and not left.exists()
    retire(folders[4], None, named=None)
    assert folders[1].exists()


def test_steps_of_the_sft_trainer_which_have_no_role_are_removed_too(tmp_path: Path) -> None:
    folders = steps(tmp_path, 5, role="")
    (left := tmp_path / ".retired-global_step_1-0123456789ab").mkdir()
    (folders[0] / "data_0.pt").touch()
    retire(folders[4], 2, named=2)
    assert [folder.exists() for folder in folders] == [
        False,
        True,
        False,
        True,
        True,
    ] and not left.exists()


def test_a_step_that_cannot_be_removed_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Any, *_: Any) -> None:
        raise PermissionError(f"not permitted: {path}")

    folders = steps(tmp_path, 2)
    monkeypatch.setattr(shutil, "rmtree", refuse)
    retire(folders[1], 1, named=None)
    assert "cannot remove" in caplog.text
