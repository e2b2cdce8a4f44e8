"""Logs of registered objects: which files follow which generation, in every lineage of a run."""

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.recover.storage.episodes import FollowsLog, folder_name, registered_name
from holdfast.recover.storage.generations import GenerationStore
from holdfast.utils.errors import CheckpointWriteError
from holdfast.utils.record_log import NO_PARENT, RecordLog, log_files
from tests.engine.rollouts.lives import Chat, Lasting
from tests.engine.rollouts.servers import make_executor
from tests.engine.rollouts.servers import make_loader as make_rollout_loader
from tests.helpers import run_ranks
from tests.limits import stretched
from tests.recover.runs import Diary, Tiny, make_handler, names, newest, step_info

pytestmark = pytest.mark.timeout(60)

WAIT_S = stretched(20.0)


class Life:
    """One life of a run whose state is a diary. Step n is dumped after the entry ``<life>:n``."""

    def __init__(self, root: Path, late: bool = False, **options: Any) -> None:
        self.root = root
        self.diary = Diary()
        self.tiny = Tiny()
        self.handler = make_handler(root, freq_steps=1, **options)
        self.handler.register("diary", self.diary)
        if late:
            self.handler.register("late", Late(self.diary))
        self.info = self.handler.load(self.tiny.state)

    @property
    def step(self) -> int:
        """The step that was restored, or -1."""
        return -1 if self.info is None else self.info.last_step_info.global_step

    def note(self, *entries: str) -> None:
        for entry in entries:
            self.diary.note(entry)

    def dump(self, step: int) -> bool:
        self.tiny.step()
        return self.handler.dump(self.tiny.state, step_info(step))

    def kill(self) -> None:
        """End without a snapshot. What was appended is in the files."""
        self.handler.close(wait=False)


@contextmanager
def life(root: Path, **options: Any) -> Iterator[Life]:
    """A life that is killed at the end of the block."""
    one = Life(root, **options)
    try:
        yield one
    finally:
        one.kill()


def logs(root: Path) -> Path:
    return root / "e" / "t" / "recover" / "episodes" / "diary"


def damage(generation: Path) -> None:
    (generation / "recover_info.json").write_bytes(b"{}")


def test_a_diary_follows_a_log() -> None:
    assert isinstance(Diary(), FollowsLog)


def test_entries_since_the_newest_generation_come_back_after_a_kill(tmp_path: Path) -> None:
    with life(tmp_path) as first:
        first.note("a")
        assert first.dump(0)
        first.note("b", "c")
    with life(tmp_path) as second:
        assert second.step == 0
        assert second.diary.read == ["b", "c"]
        assert second.diary.entries == ["a", "b", "c"]
        second.note("d")
    with life(tmp_path) as third:
        assert third.diary.read == ["b", "c", "d"], "the second life committed nothing"
        third.dump(1)
    with life(tmp_path) as fourth:
        assert fourth.diary.read == []
        assert fourth.diary.entries == ["a", "b", "c", "d"]


def test_a_fresh_run_that_is_killed_before_its_first_generation_loses_nothing(
    tmp_path: Path,
) -> None:
    for entry in "abc":
        with life(tmp_path) as one:
            assert one.info is None
            one.note(entry)
    with life(tmp_path) as last:
        assert last.diary.read == ["a", "b", "c"]


class Late:
    """An object that notes something while the state is captured, after the diary was."""

    def __init__(self, diary: Diary) -> None:
        self._diary = diary

    def state_dict(self) -> dict[str, Any]:
        self._diary.note("during the capture")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def test_an_entry_during_the_capture_is_in_the_state_or_follows_it(tmp_path: Path) -> None:
    with life(tmp_path, late=True) as first:
        first.note("before")
        assert first.dump(0)
        first.note("after")
    second = Life.__new__(Life)
    second.diary = Diary()
    handler = make_handler(tmp_path)
    handler.register("diary", second.diary)
    handler.register("late", Late(second.diary))
    handler.load(Tiny().state)
    handler.close(wait=False)
    assert second.diary.read == ["during the capture", "after"]
    assert second.diary.entries == ["before", "during the capture", "after"]


def test_the_newest_two_generations_have_their_files_and_no_older_one_has(tmp_path: Path) -> None:
    with life(tmp_path) as one:
        ids = [one.diary.log.id] if one.diary.log else []
        for step in range(4):
            one.note(f"before {step}")
            assert one.dump(step)
            assert one.diary.log is not None
            ids.append(one.diary.log.id)
        one.note("last")
    assert names(tmp_path) == ["global_step_2", "global_step_3"]
    assert [file.id for file in log_files(logs(tmp_path))] == ids[-2:]
    info = json.loads((newest(tmp_path) / "recover_info.json").read_text())
    assert info["logs"] == {"diary": ids[-1]}


def test_an_older_generation_is_followed_by_all_records_since_it(tmp_path: Path) -> None:
    with life(tmp_path) as one:
        for step in range(3):
            one.note(f"before {step}")
            assert one.dump(step)
        one.note("last")
    damage(newest(tmp_path))
    with life(tmp_path) as two:
        assert two.step == 1
        assert two.diary.read == ["before 2", "last"]
        assert two.diary.entries == ["before 0", "before 1", "before 2", "last"]
        assert two.diary.followed == [(True, False)]


def test_a_commit_that_failed_after_the_files_were_changed_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise CheckpointWriteError("no room")

    with life(tmp_path) as one:
        one.note("a")
        assert one.dump(0)
        one.note("b")
        with monkeypatch.context() as patch:
            patch.setattr(GenerationStore, "commit", refuse)
            assert not one.dump(1)
            one.note("c")
            assert not one.dump(2)
        one.note("d")
    with life(tmp_path) as two:
        assert two.step == 0
        assert two.diary.read == ["b", "c", "d"]
        assert two.dump(3)
        assert two.dump(4)
    assert len(log_files(logs(tmp_path))) == 2


def test_going_back_in_the_same_run_says_so_until_the_run_is_ahead_again(tmp_path: Path) -> None:
    with life(tmp_path) as one:
        for step in range(2):
            one.note(f"before {step}")
            assert one.dump(step)
        one.note("left behind")
    older = str(newest(tmp_path).with_name("global_step_0"))
    with life(tmp_path, resume_path=older) as two:
        assert two.step == 0
        assert two.diary.followed == [(True, True)]
        assert two.diary.read == ["before 1", "left behind"]
        two.note("new branch")
    with life(tmp_path, resume_path=older) as three:
        assert three.diary.followed == [(True, True)]
        assert three.diary.read == ["before 1", "left behind", "new branch"]
        assert three.dump(1)
        three.note("ahead")
    with life(tmp_path, resume_path=older) as four:
        assert four.step == 1
        assert four.diary.followed == [(True, False)]
        assert four.diary.read == ["ahead"]


def test_a_generation_of_another_trial_is_followed_by_neither_trial_before(tmp_path: Path) -> None:
    other = tmp_path / "other"
    with life(other) as one:
        one.note("of the other trial")
        assert one.dump(0)
        one.note("of the other trial, later")
    own = tmp_path / "own"
    with life(own) as fresh:
        fresh.note("of this trial's own past")
    path = str(newest(other))
    with life(own, resume_path=path) as two:
        assert two.diary.entries == ["of the other trial"]
        assert two.diary.read == []
        assert two.diary.followed == [(True, True)]
        two.note("since")
    with life(own, resume_path=path) as three:
        assert three.diary.read == ["since"]
        assert three.dump(1)
        three.note("ahead")
    with life(own, resume_path=path) as four:
        assert four.diary.entries == ["of the other trial", "since", "ahead"]


def test_a_generation_that_comes_from_the_mirror_is_complete_alone(tmp_path: Path) -> None:
    mirror = f"file://{tmp_path}/mirror"
    root = tmp_path / "run"
    with life(root, mirror_url=mirror) as one:
        one.note("a")
        assert one.dump(0)
        one.handler.wait()
        one.note("lost with the disk")
        one.handler.close()
    shutil.rmtree(root)
    with life(root, mirror_url=mirror) as two:
        assert two.step == 0
        assert two.diary.entries == ["a"]
        two.note("b")
    with life(root, mirror_url=mirror) as three:
        assert three.diary.entries == ["a", "b"]
    assert not list((tmp_path / "mirror").rglob("*.log"))


def test_an_old_generation_without_a_log_loads_and_reads_nothing(tmp_path: Path) -> None:
    with life(tmp_path) as stray:
        stray.note("of a life before the generation")
    with life(tmp_path, episode_log_s=None) as one:
        assert one.diary.log is None
        assert one.diary.followed == [(False, False)]
        one.note("a")
        assert one.dump(0)
        one.note("lost")
    with life(tmp_path) as two:
        assert two.diary.entries == ["a"]
        two.note("b")
        assert two.dump(1)
        two.note("c")
    with life(tmp_path) as three:
        assert three.diary.entries == ["a", "b", "c"]
        assert three.diary.read == ["c"]


def test_a_run_whose_objects_follow_no_log_makes_no_files(tmp_path: Path) -> None:
    handler = make_handler(tmp_path, freq_steps=1)
    tiny = Tiny()
    handler.load(tiny.state)
    handler.dump(tiny.state, step_info(0))
    handler.close()
    assert not logs(tmp_path).parent.exists()


def test_without_the_key_no_files_are_made(tmp_path: Path) -> None:
    with life(tmp_path, episode_log_s=None) as one:
        one.note("a")
        assert one.dump(0)
    assert not logs(tmp_path).parent.exists()


@pytest.mark.parametrize("name", ["rollouts", "../up", "a/b", ".hidden", "", "ö", "%", "a.b"])
def test_any_registered_name_is_one_visible_folder(name: str) -> None:
    folder = folder_name(name)
    assert "/" not in folder and folder and not folder.startswith(".")
    assert registered_name(folder) == name


def test_each_registered_object_has_a_log_of_its_own(tmp_path: Path) -> None:
    def load() -> tuple[Any, list[Diary]]:
        handler = make_handler(tmp_path, freq_steps=1)
        diaries = [Diary(), Diary()]
        handler.register("train/actor", diaries[0])
        handler.register("..", diaries[1])
        handler.load(Tiny().state)
        return handler, diaries

    handler, diaries = load()
    for at, diary in enumerate(diaries):
        diary.note(f"of {at}")
    handler.close(wait=False)
    handler, diaries = load()
    handler.close(wait=False)
    assert [diary.read for diary in diaries] == [["of 0"], ["of 1"]]
    assert sorted(os.listdir(logs(tmp_path).parent)) == ["%2E.", "train%2Factor"]


def test_a_log_that_cannot_be_written_fails_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse_logs(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith(".log"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse_logs)
        with life(tmp_path) as one:
            one.note("a")
            assert one.dump(0)
            assert one.dump(1)
            one.handler.wait()
    assert "goes on after the next snapshot" in caplog.text
    with life(tmp_path) as two:
        assert two.diary.entries == ["a"]
        two.note("b")
    with life(tmp_path) as three:
        assert three.diary.entries == ["a", "b"]


def test_a_log_that_cannot_be_listed_ends_the_start(tmp_path: Path) -> None:
    in_the_way = logs(tmp_path).parent
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("not a folder")
    with pytest.raises(OSError, match="episodes/diary"):
        Life(tmp_path)


def test_a_driver_that_lost_its_lock_writes_only_its_own_file(tmp_path: Path) -> None:
    loser = Life(tmp_path)
    loser.note("a")
    loser.dump(0)
    with life(tmp_path) as winner:
        winner.note("of the winner")
        loser.note("of the loser")
        assert winner.dump(1)
        winner.note("later")
    loser.kill()
    with life(tmp_path) as after:
        assert after.diary.read == ["later"]
        assert after.diary.entries == ["a", "of the winner", "later"]
        assert after.dump(2)
        assert after.dump(3)
    assert len(log_files(logs(tmp_path))) == 2


def test_a_second_load_of_a_handler_reads_what_the_first_one_wrote(tmp_path: Path) -> None:
    handler = make_handler(tmp_path, freq_steps=1)
    diary = Diary()
    handler.register("diary", diary)
    tiny = Tiny()
    handler.load(tiny.state)
    assert handler.dump(tiny.state, step_info(0))
    diary.note("a")
    handler.load(tiny.state)
    assert diary.read == diary.entries == ["a"]
    handler.close()


def test_the_journal_tells_how_many_records_a_start_has_read(tmp_path: Path) -> None:
    with life(tmp_path) as one:
        one.note("a", "b")
    with life(tmp_path):
        pass
    lines = (tmp_path / "e" / "t" / "journal.jsonl").read_text().splitlines()
    starts = [event for event in map(json.loads, lines) if event["event"] == "start"]
    assert [event["recorded"] for event in starts] == [0, 2]


def test_the_end_of_a_run_syncs_its_last_records(tmp_path: Path) -> None:
    one = Life(tmp_path, episode_log_s=1e6)
    one.note("a")
    log = one.diary.log
    assert log is not None
    one.handler.close()
    assert log.lag_s == 0.0
    assert log.append(b"late") == 0


def _leaders(rank: int, world_size: int, root: str) -> tuple[Any, ...]:
    handler = make_handler(root, freq_steps=1)
    diary = Diary()
    handler.register("diary", diary)
    tiny = Tiny()
    handler.load(tiny.state)
    diary.note(f"of rank {rank}")
    handler.dump(tiny.state, step_info(0))
    diary.note(f"of rank {rank}, later")
    handler.close()

    again = make_handler(root, freq_steps=1)
    diary = Diary()
    again.register("diary", diary)
    again.load(tiny.state)
    again.close()
    return diary.followed, diary.entries


@pytest.mark.timeout(90)
def test_of_several_ranks_only_the_leader_has_a_log(tmp_path: Path) -> None:
    first, second = run_ranks(_leaders, 2, str(tmp_path))
    assert first == ([(True, False)], ["of rank 0", "of rank 0, later"])
    assert second == ([(False, False)], ["of rank 1"])
    assert log_files(logs(tmp_path))[0].parent == NO_PARENT


def test_an_executor_samples_no_recorded_answer_again(tmp_path: Path) -> None:
    def start(server: Lasting) -> tuple[Any, Any]:
        loader = make_rollout_loader(2)
        executor = make_executor([server], Chat(turns=3), loader, max_head_offpolicyness=0)
        handler = make_handler(tmp_path, freq_steps=1)
        handler.register("rollouts", executor)
        handler.load(Tiny().state, loader)
        executor.set_version(0)
        return handler, executor

    # Two tickets with three answers each. The first life gets four of them.
    killed = Lasting(limit=4)
    handler, executor = start(killed)
    folder = logs(tmp_path).with_name("rollouts")
    end = time.monotonic() + WAIT_S
    while sum(1 for _ in RecordLog(folder, 1.0).read(NO_PARENT)) < 4:
        assert time.monotonic() < end, "the answers were not recorded"
        time.sleep(0.01)
    handler.close(wait=False)
    executor.close()

    server = Lasting()
    handler, executor = start(server)
    executor.next_batch(0)
    assert executor.stats()["rollouts/replayed"] == 4
    handler.close(wait=False)
    executor.close()
    assert not killed.answered.keys() & server.asked.keys()
    assert server.asked.total() == 2
