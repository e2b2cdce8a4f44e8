"""Generations on disk: listed, verified, quarantined, cleaned up and deleted."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from holdfast.recover import GenerationStore, RecoverInfo
from holdfast.recover.info import INFO_NAME
from holdfast.recover.storage.generations import TRACKER_NAME, Generation, RetentionRules
from holdfast.utils.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointWriteError,
)
from holdfast.utils.files import write_durably
from holdfast.utils.manifest import FileEntry, file_entries
from tests.recover.runs import step_info


@pytest.fixture
def store(tmp_path: Path) -> GenerationStore:
    return GenerationStore(tmp_path / "a" / "b" / "recover")


def stage(store: GenerationStore, step: int) -> tuple[Path, list[FileEntry]]:
    staging = store.open_staging(step)
    (staging / "default").mkdir()
    write_durably(staging / "default" / "shard", os.urandom(100))
    write_durably(staging / INFO_NAME, RecoverInfo(step_info(step), "run", 1).to_json())
    return staging, file_entries(staging, ["default/shard", INFO_NAME])


def commit(store: GenerationStore, step: int) -> Generation:
    staging, entries = stage(store, step)
    return store.commit(staging, step, entries, {"step": step})


def test_a_store_that_does_not_exist_is_empty_and_not_made(store: GenerationStore) -> None:
    assert store.generations() == [] and store.quarantined() == [] and store.newest_valid() is None
    store.sweep()
    store.delete_by_retention(RetentionRules(1))
    assert not store.root.exists()
    with pytest.raises(CheckpointNotFoundError, match="there is no generation at"):
        store.verify(store.root / "global_step_0")


def test_a_generation_is_visible_only_after_its_commit(store: GenerationStore) -> None:
    staging, entries = stage(store, 3)
    assert store.generations() == [] and staging.name.startswith(".staging-3-")
    generation = store.commit(staging, 3, entries, {"step": 3})
    assert generation == Generation(3, store.root / "global_step_3") == store.generations()[0]
    assert not staging.exists() and (store.root / TRACKER_NAME).read_text() == "3"
    assert store.verify(generation.path).last_step_info.global_step == 3


def test_a_commit_stands_although_the_file_server_fails_after_the_rename(
    store: GenerationStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exists = Path.exists

    def stale(path: Path) -> bool:
        if path == store.owner and store.generations():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return exists(path)

    facts = {"step": 3, "run_id": "run"}
    staging, entries = stage(store, 3)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", stale)
        assert store.commit(staging, 3, entries, facts) == store.generations()[0]
    assert "Stale file handle" in caplog.text and not store.owner.exists()
    assert store.run_id() == "run" and store.tracker.read_text() == "3"
    staging, entries = stage(store, 4)
    store.commit(staging, 4, entries, facts | {"step": 4})
    assert store.owner.read_text() == "run\n"


def test_the_tracker_names_the_newest_also_after_an_older_one_came_back(
    store: GenerationStore,
) -> None:
    for step in (4, 1):
        commit(store, step)
        assert store.tracker.read_text() == "4"


def test_generations_are_ordered_by_number_and_other_names_are_ignored(
    store: GenerationStore,
) -> None:
    for step in (9, 100, 20):
        commit(store, step)
    for name in ("global_step_", "global_step_x", "global_step_7.old", "xglobal_step_7", "notes"):
        (store.root / name).mkdir()
    (store.root / "global_step_200").write_text("a file")
    assert [generation.step for generation in store.generations()] == [100, 20, 9]
    newest = store.newest_valid()
    assert newest is not None and newest[0].step == 100


def test_nothing_is_ever_written_over(store: GenerationStore) -> None:
    late, entries = stage(store, 1)
    before = (commit(store, 1).path / "default" / "shard").read_bytes()
    with pytest.raises(CheckpointExistsError, match="global_step_1 exists already"):
        store.open_staging(1)
    with pytest.raises(CheckpointWriteError, match="global_step_1 exists already"):
        store.commit(late, 1, entries, {})
    assert (store.root / "global_step_1" / "default" / "shard").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [("missing", "file default/gone is missing"), ("extra", "file extra is n")],
)
def test_a_generation_that_would_be_refused_later_is_not_committed(
    store: GenerationStore, change: str, message: str
) -> None:
    commit(store, 0)
    staging, entries = stage(store, 1)
    if change == "missing":  # written by a rank that sees another folder
        entries.append(FileEntry("default/gone", 5, f"xxh3_128:{0:032x}"))
    else:
        (staging / "extra").touch()
    with pytest.raises(CheckpointWriteError, match=f"{message}.*do all ranks see the same"):
        store.commit(staging, 1, entries, {})
    assert [generation.step for generation in store.generations()] == [0]
    assert (store.root / TRACKER_NAME).read_text() == "0"


def test_damaged_generations_are_set_aside_until_a_sound_one_is_found(
    store: GenerationStore,
) -> None:
    for step in range(4):
        commit(store, step)
    (store.root / "global_step_3" / "default" / "shard").write_bytes(bytes(100))
    os.truncate(store.root / "global_step_2" / "default" / "shard", 3)
    newest = store.newest_valid()
    assert newest is not None and newest[0].step == 1
    assert [generation.step for generation in store.generations()] == [1, 0]
    assert [path.name[:48] for path in store.quarantined()] == [
        ".rejected-global_step_2-default-shard-has-3-byte",
        ".rejected-global_step_3-default-shard-has-digest",
    ]


def test_setting_the_same_step_aside_twice_keeps_both(store: GenerationStore) -> None:
    paths = {store.quarantine(commit(store, 1), "Bad: *!* " + "very " * 50) for _ in range(2)}
    assert len(paths) == 2 == len(store.quarantined())
    assert all(
        len(path.name) < 140 and path.name.startswith(".rejected-global_step_1-bad-very")
        for path in paths
    )


def test_a_generation_without_a_readable_info_is_corrupt(store: GenerationStore) -> None:
    staging = store.open_staging(0)
    write_durably(staging / INFO_NAME, b'{"run_id": "r"}')
    store.commit(staging, 0, file_entries(staging, [INFO_NAME]), {})
    with pytest.raises(
        CheckpointCorruptError,
        match=r"recover_info\.json cannot be read: ValueError: info.last_step_info is missing",
    ):
        store.verify(store.root / "global_step_0")
    assert store.newest_valid() is None and len(store.quarantined()) == 1


def test_a_sweep_removes_what_a_killed_writer_left_and_nothing_else(store: GenerationStore) -> None:
    commit(store, 0)
    rejected = store.quarantine(commit(store, 1), "reason")
    stage(store, 2)
    (store.root / ".retired-global_step_9-x" / "default").mkdir(parents=True)
    (store.root / f".{TRACKER_NAME}.0123").write_text("1")
    (store.root / "notes.txt").write_text("mine")
    store.sweep()
    assert sorted(os.listdir(store.root)) == sorted(
        [rejected.name, "global_step_0", TRACKER_NAME, "notes.txt"]
    )


def test_the_newest_are_kept_and_none_is_half_removed(store: GenerationStore) -> None:
    for step in range(5):
        commit(store, step)
    store.delete_by_retention(RetentionRules(None))
    assert len(store.generations()) == 5
    store.delete_by_retention(RetentionRules(2))
    assert [generation.step for generation in store.generations()] == [4, 3]
    store.delete_by_retention(RetentionRules(3))
    assert len(store.generations()) == 2 and not list(store.root.glob(".*"))


def test_a_generation_that_is_a_link_loses_only_the_link(
    store: GenerationStore, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for step in (1, 2):
        moved = commit(store, step).path.rename(elsewhere / f"global_step_{step}")
        (store.root / moved.name).symlink_to(moved)
    commit(store, 3)
    assert [g.step for g in store.generations()] == [3, 2, 1]
    assert store.verify(store.path_of(2)).last_step_info.global_step == 2, "read through the link"
    store.path_of(1).rename(
        store.root / ".retired-global_step_1-0123456789ab"
    )  # like older versions left it
    store.delete_by_retention(RetentionRules(1))
    store.sweep()
    assert sorted(os.listdir(store.root)) == ["global_step_3", TRACKER_NAME]
    for step in (1, 2):
        assert store.verify(elsewhere / f"global_step_{step}").last_step_info.global_step == step


def commit_with(store: GenerationStore, step: int, metrics: dict[str, float]) -> None:
    staging = store.open_staging(step)
    write_durably(
        staging / INFO_NAME, RecoverInfo(step_info(step), "run", 1, metrics=metrics).to_json()
    )
    store.commit(staging, step, file_entries(staging, [INFO_NAME]), {})


def test_generations_stay_by_the_union_of_the_rules_computed_from_disk(
    store: GenerationStore,
) -> None:
    rules = RetentionRules(last=2, every_steps=5, best=1, metric="reward")
    for step, reward in enumerate((0.1, 0.9, 0.3, 0.2, 0.5, 0.6, 0.4, 0.7)):
        commit_with(GenerationStore(store.root), step, {"reward": reward})
        GenerationStore(store.root).delete_by_retention(rules)  # as after a restart
    assert [generation.step for generation in store.generations()] == [7, 6, 4, 1]


def test_pinned_generations_and_the_newest_usable_one_are_never_retired(
    store: GenerationStore,
) -> None:
    for step in range(5):
        commit(store, step)
    for step in (4, 3):
        os.truncate(store.root / f"global_step_{step}" / "manifest.json", 5)
    store.delete_by_retention(RetentionRules(1), copied={0})
    assert [generation.step for generation in store.generations()] == [4, 2, 0]


def test_a_generation_that_cannot_be_removed_stops_nothing(
    store: GenerationStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(4):
        commit(store, step)

    def refuse(path: str, *args: Any, **kwargs: Any) -> None:
        if "global_step_0" in str(path):
            raise PermissionError(13, "no", str(path))
        rename(path, *args, **kwargs)

    rename = os.rename
    monkeypatch.setattr(os, "rename", refuse)
    store.delete_by_retention(RetentionRules(1))
    assert [generation.step for generation in store.generations()] == [3, 0]
    assert "cannot remove" in caplog.text and "global_step_0" in caplog.text


def test_folders_are_made_with_the_users_umask(store: GenerationStore) -> None:
    before = os.umask(0o027)
    try:
        folder = commit(store, 0).path
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
