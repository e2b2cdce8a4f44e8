"""A run whose generations are copied away comes back from the copies when its own folder is gone or
bad.
"""

import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.recover import RecoverHandler
from holdfast.recover.resuming.check import check_bytes
from holdfast.recover.storage.mirror import Mirror
from holdfast.recover.triggers import StopNotice
from holdfast.utils import distributed
from holdfast.utils.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    FolderInUseError,
    Preempted,
)
from holdfast.utils.remote import RemoteFolder
from tests.helpers import run_ranks
from tests.limits import stretched, wait_until
from tests.recover.runs import Tiny, hidden, make_handler, names, newest, run_until, step_info

pytestmark = pytest.mark.timeout(90)


def _mirrored(tmp_path: Path, name: str = "run", **options: Any) -> RecoverHandler:
    return make_handler(tmp_path / name, mirror_url=f"file://{tmp_path}/mirror", **options)


def _train(tmp_path: Path, steps: int, **options: Any) -> list[str]:
    return run_until(tmp_path / "run", steps, mirror_url=f"file://{tmp_path}/mirror", **options)


def _copies(tmp_path: Path) -> list[str]:
    return sorted(
        path.parent.name
        for path in (tmp_path / "mirror" / "e" / "t").glob("global_step_*/manifest.json")
    )


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_closed_run_has_its_newest_generations_at_the_mirror(tmp_path: Path) -> None:
    _train(tmp_path, 5, mirror_max_to_keep=1)
    assert _copies(tmp_path) == ["global_step_4"] and names(tmp_path / "run") == [
        "global_step_3",
        "global_step_4",
    ]


def _go_on(rank: int, world_size: int, root: str) -> None:
    run_until(Path(root), 5, first=2, max_ckpt_to_keep=None)


def test_a_run_that_lost_its_folder_deletes_nothing_of_the_job_that_has_it(tmp_path: Path) -> None:
    handler, tiny = _mirrored(tmp_path, freq_steps=1, max_ckpt_to_keep=1), Tiny()
    handler.load(tiny.state)
    for step in range(2):
        assert handler.dump(tiny.state, step_info(step))
        tiny.step()
    mirror = handler._folder.mirror
    assert mirror is not None and mirror.wait(stretched(30))
    handler.config.lock_path.unlink()
    # a separate process, because all locks of one process on a path are the same
    run_ranks(_go_on, 1, str(tmp_path / "run"))
    kept = names(tmp_path / "run")
    assert kept[-4:] == [f"global_step_{step}" for step in range(1, 5)]

    with pytest.raises(FolderInUseError, match="has been in use by pid"):
        handler.dump(tiny.state, step_info(2))
    handler.close()
    assert names(tmp_path / "run") == kept


def test_a_snapshot_whose_copy_cannot_begin_is_copied_at_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def refuse_copies(thread: threading.Thread) -> None:  # like Python 3.12 at its end
        if thread.name == "mirror":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    tiny = Tiny()
    with (
        monkeypatch.context() as patch,
        _mirrored(tmp_path, freq_steps=1, save_failures_allowed=0) as handler,
    ):
        patch.setattr(threading.Thread, "start", refuse_copies)
        handler.load(tiny.state)
        assert handler.dump(tiny.state, step_info(0)) and handler.save_stats.failed == 0
        handler.close()
    assert "committed, but what follows failed: can't create new thread" in caplog.text
    assert names(tmp_path / "run") == ["global_step_0"] and _copies(tmp_path) == []
    with _mirrored(tmp_path) as handler:
        info = handler.load(tiny.state)
        assert info and info.last_step_info.global_step == 0
    assert _copies(tmp_path) == ["global_step_0"]


def test_a_run_whose_folder_is_gone_comes_back_from_the_mirror(tmp_path: Path) -> None:
    digests = _train(tmp_path, 3)
    shutil.rmtree(tmp_path / "run")
    tiny = Tiny()
    info = _mirrored(tmp_path).load(tiny.state)
    assert info and info.last_step_info.global_step == 2 and tiny.digest() == digests[2]
    assert names(tmp_path / "run") == ["global_step_2"] and hidden(tmp_path / "run") == []


def test_a_damaged_generation_is_replaced_by_its_copy_not_an_older(tmp_path: Path) -> None:
    digests = _train(tmp_path, 3)
    _flip(newest(tmp_path / "run") / "default" / "__0_0.distcp")
    tiny = Tiny()
    info = _mirrored(tmp_path).load(tiny.state)
    assert info and info.last_step_info.global_step == 2 and tiny.digest() == digests[2]
    assert [name[:24] for name in hidden(tmp_path / "run")] == [".rejected-global_step_2-"]


def test_a_damaged_copy_is_passed_over_for_an_older_one(tmp_path: Path) -> None:
    digests = _train(tmp_path, 3, mirror_max_to_keep=None)
    shutil.rmtree(tmp_path / "run")
    copies = [int(name.rpartition("_")[2]) for name in _copies(tmp_path)]
    if len(copies) < 2:
        pytest.fail(f"only {copies} were copied")
    _flip(tmp_path / "mirror" / "e" / "t" / "global_step_2" / "default" / "__0_0.distcp")
    tiny = Tiny()
    info = _mirrored(tmp_path).load(tiny.state)
    assert (
        info
        and info.last_step_info.global_step == copies[-2]
        and tiny.digest() == digests[copies[-2]]
    )


def test_with_every_copy_bad_the_run_does_not_start_over(tmp_path: Path) -> None:
    _train(tmp_path, 3)
    shutil.rmtree(tmp_path / "run")
    for copy in (tmp_path / "mirror" / "e" / "t").glob("global_step_*"):
        _flip(copy / "default" / "__0_0.distcp")
    with pytest.raises(
        CheckpointCorruptError, match=r"no copy at file:.* is complete and sound \(there is some"
    ):
        _mirrored(tmp_path).load(Tiny().state)


def _lose_all_but(tmp_path: Path, left: str) -> Path:
    """Lose the folder of a run whose only copy has lost its manifest, and more."""
    _train(tmp_path, 1)
    shutil.rmtree(tmp_path / "run")
    mirror = tmp_path / "mirror" / "e" / "t"
    copy = mirror / "global_step_0"
    manifest = copy / "manifest.json"
    if left in ("all files and the marker", "some files and the marker", "the marker"):
        shutil.copy(manifest, mirror / ".copying-global_step_0")
    manifest.unlink()
    if left == "some files and the marker":
        (copy / "recover_info.json").unlink()
    if left in ("the marker", "empty folders"):
        shutil.rmtree(copy)
    if left == "empty folders":
        (copy / "default").mkdir(parents=True)
    return mirror


@pytest.mark.parametrize("left", ["some files and the marker", "the marker", "empty folders"])
def test_traces_that_hold_no_work_do_not_stop_a_fresh_start(
    tmp_path: Path, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = _lose_all_but(tmp_path, left)
    peeked = _mirrored(tmp_path)
    assert peeked.peek() is None
    peeked.close()
    digests = _train(tmp_path, 2)
    assert f"file://{mirror} has traces of steps [0], but no copy" in caplog.text
    assert "there is nothing to resume" in caplog.text

    # Copies of the new run replace these traces.
    shutil.rmtree(tmp_path / "run")
    tiny = Tiny()
    info = _mirrored(tmp_path).load(tiny.state)
    assert info and info.last_step_info.global_step == 1 and tiny.digest() == digests[1]


def test_files_without_a_manifest_stop_a_fresh_start(tmp_path: Path) -> None:
    _lose_all_but(tmp_path, "all files")
    with pytest.raises(CheckpointCorruptError, match=r"something of steps \[0\]; .*mirror ls"):
        _mirrored(tmp_path).load(Tiny().state)


def test_a_run_comes_back_from_a_copy_that_lacks_only_its_manifest(tmp_path: Path) -> None:
    mirror = _lose_all_but(tmp_path, "all files and the marker")
    tiny = Tiny()
    handler = _mirrored(tmp_path)
    peeked = handler.peek()
    info = handler.load(tiny.state)
    assert peeked and info and peeked.global_step == info.last_step_info.global_step == 0
    handler.close()
    assert _copies(tmp_path) == ["global_step_0"] and not list(mirror.glob(".copying-*"))


@pytest.mark.parametrize("bad_reads", [1, 2])
def test_reads_that_fail_at_times_do_not_condemn_the_only_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad_reads: int
) -> None:
    digests = _train(tmp_path, 1)
    shutil.rmtree(tmp_path / "run")
    read, wrong = RemoteFolder.chunks, list(range(bad_reads))

    def flip_now_and_then(folder: RemoteFolder, path: str, size: int) -> Iterator[bytes]:
        for chunk in read(folder, path, size):
            flips = path.endswith(".distcp") and wrong
            yield bytes([chunk[0] ^ 1 << wrong.pop()]) + chunk[1:] if flips else chunk

    monkeypatch.setattr(RemoteFolder, "chunks", flip_now_and_then)
    if bad_reads == 2:
        with (
            _mirrored(tmp_path) as handler,
            pytest.raises(CheckpointCorruptError, match="no copy at file:"),
        ):
            handler.load(Tiny().state)
    assert not list(tmp_path.rglob(".damaged-*"))
    tiny = Tiny()
    with _mirrored(tmp_path) as handler:
        assert handler.load(tiny.state) is not None and tiny.digest() == digests[0]


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_an_only_copy_found_bad_is_tried_again_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    digests = _train(tmp_path, 1)
    shutil.rmtree(tmp_path / "run")
    file = tmp_path / "mirror" / "e" / "t" / "global_step_0" / "default" / "__0_0.distcp"
    good = file.read_bytes()
    if damage == "flipped":
        _flip(file)
    else:
        file.unlink()
    for _ in range(2):
        with (
            _mirrored(tmp_path) as handler,
            pytest.raises(CheckpointCorruptError, match=r"\.damaged-global_step_<step>"),
        ):
            handler.load(Tiny().state)
    marked = [path.name for path in tmp_path.rglob(".damaged-*")]
    assert marked == ([".damaged-global_step_0"] if damage == "flipped" else [])
    assert (".damaged-global_step_0 says so" in caplog.text) == (damage == "flipped")
    file.write_bytes(good)
    tiny = Tiny()
    with _mirrored(tmp_path) as handler:
        assert handler.peek() == step_info(0)
        assert handler.load(tiny.state) is not None and tiny.digest() == digests[0]
    assert _copies(tmp_path) == ["global_step_0"] and not list(tmp_path.rglob(".damaged-*")), (
        "its copy replaced it"
    )


@pytest.mark.slow
def test_an_unreadable_mirror_stops_only_a_run_without_generations_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _train(tmp_path, 2)
    shutil.rmtree(tmp_path / "mirror")
    (tmp_path / "mirror").write_text("a file")
    with caplog.at_level(logging.WARNING):
        info = _mirrored(tmp_path).load(Tiny().state)
    assert (
        info and info.last_step_info.global_step == 1 and "the mirror cannot be read" in caplog.text
    )
    with pytest.raises(
        CheckpointNotFoundError, match="whether this run is to be resumed is not known"
    ):
        _mirrored(tmp_path, "fresh").load(Tiny().state)


@pytest.mark.slow
def test_a_mirror_that_fails_never_stops_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler, tiny = _mirrored(tmp_path, freq_steps=1), Tiny()
    handler.load(tiny.state)
    (tmp_path / "mirror").write_text("a file")
    assert handler.dump(tiny.state, step_info(0))
    handler.close()
    assert "no copy of" in caplog.text and names(tmp_path / "run") == ["global_step_0"]


def test_going_back_with_resume_path_also_forgets_the_newer_copies(tmp_path: Path) -> None:
    _train(tmp_path, 4, max_ckpt_to_keep=None, mirror_max_to_keep=None)
    wanted = str(tmp_path / "run" / "e" / "t" / "recover" / "global_step_1")
    handler = _mirrored(tmp_path, resume_path=wanted)
    info = handler.load(Tiny().state)
    handler.close()
    assert info and info.last_step_info.global_step == 1
    assert max(_copies(tmp_path)) == "global_step_1"


def _run_id(run: Path) -> str:
    return json.loads((newest(run) / "recover_info.json").read_text())["run_id"]


def test_a_generation_that_somebody_copied_from_another_run_is_refused_with_both_ids(
    tmp_path: Path,
) -> None:
    run_until(tmp_path / "run", 2)
    run_until(tmp_path / "other", 3)
    root, own = tmp_path / "run" / "e" / "t" / "recover", _run_id(tmp_path / "run")
    shutil.copytree(newest(tmp_path / "other"), root / "global_step_2")
    refused = (
        f"global_step_2 is of run {_run_id(tmp_path / 'other')}, but {root} belongs to run {own}"
    )
    for act in (RecoverHandler.peek, lambda handler: handler.load(Tiny().state)):
        with pytest.raises(CheckpointMismatchError, match=f"{refused}.*a new folder.*resume_path"):
            act(make_handler(tmp_path / "run"))
    assert names(tmp_path / "run") == ["global_step_0", "global_step_1", "global_step_2"]

    # An older copy, found when the run's own generations are damaged.
    shutil.rmtree(root / "global_step_2")
    shutil.rmtree(root / "global_step_0")
    shutil.copytree(
        tmp_path / "other" / "e" / "t" / "recover" / "global_step_1", tmp_path / "older"
    )
    _flip(newest(tmp_path / "run") / "default" / "__0_0.distcp")
    with pytest.raises(CheckpointCorruptError):
        make_handler(tmp_path / "run").load(Tiny().state)
    os.rename(tmp_path / "older", root / "global_step_1")
    with pytest.raises(CheckpointMismatchError, match=f"belongs to run {own}"):
        make_handler(tmp_path / "run").load(Tiny().state)

    # On purpose. The run keeps its own id.
    run_until(tmp_path / "run", 3, first=2, resume_path=str(root / "global_step_1"))
    assert _run_id(tmp_path / "run") == own and names(tmp_path / "run")[-1] == "global_step_2"


def test_a_copy_of_another_run_at_the_mirror_is_not_fetched_into_a_run(tmp_path: Path) -> None:
    run_until(tmp_path / "run", 2)
    run_until(tmp_path / "other", 4, mirror_url=f"file://{tmp_path}/mirror")
    for act in (RecoverHandler.peek, lambda handler: handler.load(Tiny().state)):
        with pytest.raises(
            CheckpointMismatchError,
            match=rf"global_step_3 is of run {_run_id(tmp_path / 'other')}, but",
        ):
            act(_mirrored(tmp_path))
    assert (
        names(tmp_path / "run") == ["global_step_0", "global_step_1"]
        and hidden(tmp_path / "run") == []
    )


def test_a_trial_that_starts_from_another_one_has_an_id_of_its_own(tmp_path: Path) -> None:
    run_until(tmp_path / "a", 2)
    run_until(tmp_path / "b", 3, first=2, resume_path=str(newest(tmp_path / "a")))
    assert _run_id(tmp_path / "b") != _run_id(tmp_path / "a")
    shutil.copytree(
        newest(tmp_path / "b"), tmp_path / "a" / "e" / "t" / "recover" / "global_step_2"
    )
    with pytest.raises(CheckpointMismatchError, match="is of run"):
        make_handler(tmp_path / "a").load(Tiny().state)


def test_a_run_of_an_older_version_that_went_over_to_another_run_goes_on(tmp_path: Path) -> None:
    """Its folder has two ids and no file that names one: the newest generation counts."""
    run_until(tmp_path / "a", 3)
    run_until(tmp_path / "b", 2)
    root = tmp_path / "b" / "e" / "t" / "recover"
    shutil.copytree(newest(tmp_path / "a"), root / "global_step_2")
    (root / "run_id.txt").unlink()
    run_until(tmp_path / "b", 4, first=3)
    assert (
        _run_id(tmp_path / "b")
        == _run_id(tmp_path / "a")
        == (root / "run_id.txt").read_text().strip()
    )


def test_a_copy_that_a_crash_cut_short_is_made_after_the_restart(tmp_path: Path) -> None:
    run_until(tmp_path / "run", 2)  # as if killed before any copy
    handler = _mirrored(tmp_path)
    handler.load(Tiny().state)
    handler.close()
    assert _copies(tmp_path) == ["global_step_1"]


def test_a_copy_that_arrives_bad_again_is_not_fetched_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _train(tmp_path, 3, max_ckpt_to_keep=None, mirror_max_to_keep=None)

    def damage_the_newest(holder: Any, generation: str, files: Any) -> str | None:
        bad = generation.endswith("global_step_2")
        return "this disk flips bits" if bad else check_bytes(holder, generation, files)

    monkeypatch.setattr("holdfast.recover.resuming.choice.check_bytes", damage_the_newest)
    info = _mirrored(tmp_path).load(Tiny().state)
    assert info and info.last_step_info.global_step == 1
    assert len(hidden(tmp_path / "run")) == 2, (
        "the local one, and the one that was fetched in its place"
    )


@pytest.mark.parametrize(
    ("ends", "waits_s"), [({"must_save_by": "1s"}, 0), ({}, 2)], ids=["deadline", "signal"]
)
def test_a_stop_waits_for_a_copy_once_and_not_beyond_its_deadline(
    ends: dict[str, str],
    waits_s: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    released = threading.Event()
    waited: list[float] = []
    wait = Mirror.wait

    def noted(mirror: Mirror, timeout_s: float) -> bool:
        waited.append(timeout_s)
        return wait(mirror, timeout_s)

    monkeypatch.setattr(Mirror, "_copy", lambda *_: released.wait(stretched(60)) or 0)
    monkeypatch.setattr(Mirror, "wait", noted)
    handler, tiny = _mirrored(tmp_path, mirror_timeout_s=2.0, **ends), Tiny()
    handler.load(tiny.state)
    if not ends:
        os.kill(os.getpid(), signal.SIGTERM)
    with caplog.at_level(logging.INFO), pytest.raises(Preempted):
        handler.dump(tiny.state, step_info(0))
    released.set()
    assert waited == [waits_s, 0]
    assert caplog.text.count("waiting up to 2 s for the copy of step(s) [0]") == bool(waits_s)
    assert "gave up copying step(s) [0]" in caplog.text
    assert names(tmp_path / "run") == ["global_step_0"]


def _told_on_the_last_rank(rank: int, world_size: int, root: str) -> list[float]:
    waited: list[float] = []
    wait = Mirror.wait

    def noted(mirror: Mirror, timeout_s: float) -> bool:
        waited.append(timeout_s)
        return wait(mirror, timeout_s)

    Mirror.wait = noted  # type: ignore[method-assign]
    notices = []
    if rank == world_size - 1:
        notices.append(lambda: StopNotice("spot instance reclaimed", by=time.time() + 20))
    handler, tiny = _mirrored(Path(root), notices=notices), Tiny()
    handler.load(tiny.state)
    with pytest.raises(Preempted, match="spot instance reclaimed"):
        handler.dump(tiny.state, step_info(0))
    return waited


def test_a_notice_to_one_rank_limits_the_wait_for_copies_in_the_leader(tmp_path: Path) -> None:
    first, second = run_ranks(_told_on_the_last_rank, 2, str(tmp_path))
    assert len(first) == 2 and first[0] < 20 and first[1] == 0 and second == []


def _go_back_while_others_wait(rank: int, world_size: int, root: str) -> int:
    """Remove copies only after another rank was told to go on waiting."""
    forgetting, told = Path(root) / "forgetting", Path(root) / "told"
    forget = Mirror.forget_newer

    def slowly(mirror: Mirror, step: int) -> None:
        forgetting.touch()
        wait_until(told.exists)
        forget(mirror, step)

    def beat() -> None:
        if forgetting.exists():
            told.touch()

    Mirror.forget_newer = slowly  # type: ignore[method-assign]
    distributed.WORD_EVERY_S = 0.05
    if rank == 1:
        distributed.beat = beat
    wanted = f"{root}/run/e/t/recover/global_step_0"
    with _mirrored(Path(root), resume_path=wanted) as handler:
        info = handler.load(Tiny().state)
    assert info is not None
    return info.last_step_info.global_step


def test_ranks_wait_for_as_long_as_a_run_that_goes_back_removes_copies(tmp_path: Path) -> None:
    _train(tmp_path, 2)
    assert run_ranks(_go_back_while_others_wait, 2, str(tmp_path)) == [0, 0]
    assert _copies(tmp_path) == ["global_step_0"]
