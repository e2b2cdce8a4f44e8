"""All ranks succeed or all raise. Rank zero decides for all. The same code runs in a single
process.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.utils import distributed
from holdfast.utils.atomic_folder import staged_folder
from holdfast.utils.distributed import (
    all_agree,
    all_ranks_succeed,
    any_rank,
    gather_numbers,
    gather_numbers_of,
    gather_objects,
    get_rank,
    get_world_size,
    is_write_failure,
    rank_zero_decides,
    reduce_flags_of,
)
from holdfast.utils.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    PeerError,
)
from holdfast.utils.heartbeat import beat, seconds_since_beat
from holdfast.utils.logging import announce, configure_logging, get_logger
from tests.helpers import run_ranks


class UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def check_agreement(rank: int, world_size: int) -> None:
    assert (get_rank(), get_world_size()) == (rank, world_size)
    assert gather_objects({"rank": rank}) == [{"rank": r} for r in range(world_size)]

    with all_ranks_succeed("nothing"):
        pass
    try:
        with all_ranks_succeed("saving"):
            if rank == 1:
                raise CheckpointWriteError("disk full")
    except PeerError as error:
        assert (
            rank != 1
            and error.errors == {1: "CheckpointWriteError: disk full"}
            and error.what == "saving"
        )
    except CheckpointWriteError:
        assert rank == 1
    else:
        raise AssertionError("no error")

    assert rank_zero_decides(lambda: f"decided by {rank}") == "decided by 0"
    with pytest.raises(CheckpointNotFoundError, match="nothing in x"):
        rank_zero_decides(lambda: raise_(CheckpointNotFoundError("nothing in x")))
    with pytest.raises(PeerError, match="rank 0: UnpicklableError: holds a lock"):
        rank_zero_decides(lambda: raise_(UnpicklableError()))
    assert gather_objects(rank) == list(range(world_size)), "the group is in step after every error"


def check_write_failures(rank: int) -> None:
    """Check that every rank agrees on whether only writing failed, however deep the failure was."""
    full, bug = CheckpointWriteError("disk full"), KeyError("bug")
    for errors, write_failed in (
        ((None, full), True),
        ((full, full), True),
        ((full, bug), False),
        ((bug, None), False),
        ((bug, bug), False),
    ):
        own = errors[rank]
        try:
            with all_ranks_succeed("outside"), all_ranks_succeed("inside"):
                if own is not None:
                    raise own
        except Exception as error:
            assert is_write_failure(error) == write_failed, f"{errors} gave {error!r}"
            assert error is own or isinstance(error, PeerError)
            if own is full and not write_failed:
                assert (
                    isinstance(error, PeerError)
                    and "bug" in str(error)
                    and "disk full" not in str(error)
                )
        else:
            raise AssertionError("no error")
    assert (
        is_write_failure(full)
        and not is_write_failure(bug)
        and not is_write_failure(OSError(28, "no space"))
    )


def raise_(error: Exception) -> Any:
    raise error


def check_staging(rank: int, folder: Path) -> None:
    with staged_folder(folder / "done") as staging:
        (staging / f"{rank}").write_text("x")
        assert not (folder / "done").exists()
    assert sorted(os.listdir(folder / "done")) == ["0", "1"]

    with (
        pytest.raises(CheckpointExistsError, match="never written over"),
        staged_folder(folder / "done"),
    ):
        raise AssertionError("the block ran")
    with (
        pytest.raises(CheckpointWriteError if rank == 1 else PeerError, match="No space"),
        staged_folder(folder / "full"),
    ):
        if rank == 1:
            raise OSError(28, "No space left on device")
    gather_objects(None)
    assert os.listdir(folder) == ["done"]


class UnreadableResult:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return raise_, (KeyError("on arrival"),)


class StubbornError(Exception):
    """Raises an error while it is pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise ValueError("not me")


class Counted:
    """Counts how often it is pickled and unpickled in this process."""

    pickled = 0
    read = 0

    def __getstate__(self) -> dict[str, Any]:
        Counted.pickled += 1
        return {"payload": b"x" * 1000}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Counted.read += 1


def count_pickling(rank: int, world_size: int) -> tuple[int, int]:
    gather_objects(Counted())
    return Counted.pickled, Counted.read


def test_a_gathered_object_is_pickled_once_and_read_once_on_each_rank() -> None:
    assert run_ranks(count_pickling, 2) == [(1, 2)] * 2


def share_what_cannot_be_sent(rank: int, world_size: int) -> str:
    for result, why in (
        (threading.Lock(), "TypeError: cannot pickle"),
        (UnreadableResult(), "KeyError: 'on arrival'"),
    ):
        with pytest.raises(
            PeerError, match=f"rank 0: its result cannot be sent to the other ranks: {why}"
        ):
            rank_zero_decides(lambda result=result: result)
    with pytest.raises(PeerError, match="rank 0: StubbornError: so there"):
        rank_zero_decides(lambda: raise_(StubbornError("so there")))
    with pytest.raises(
        PeerError, match="rank 1: it cannot be sent to the other ranks: TypeError: cannot pickle"
    ):
        gather_objects(threading.Lock() if rank == 1 else "fine")
    with pytest.raises(PeerError, match=r"rank 0: it cannot be sent .*; rank 1: it cannot be sent"):
        gather_objects(UnreadableResult())
    assert gather_objects(rank) == list(range(world_size)), "the group is in step after every error"
    return "in step"


def test_an_object_that_cannot_be_pickled_is_an_error_on_all_waiting_ranks() -> None:
    assert run_ranks(share_what_cannot_be_sent, 2, timeout_s=30) == ["in step"] * 2


def ranks_agree(rank: int, world_size: int, folder: str) -> str:
    check_agreement(rank, world_size)
    check_write_failures(rank)
    check_staging(rank, Path(folder))
    return "agreed"


def test_ranks_agree_on_success_failure_decisions_and_staged_folders(tmp_path: Path) -> None:
    assert run_ranks(ranks_agree, 2, str(tmp_path)) == ["agreed"] * 2


def numbers_of_all_ranks(rank: int, world_size: int) -> str:
    assert gather_numbers([rank, 2**53 - rank, 0.1]) == [
        [r, 2.0**53 - r, 0.1] for r in range(world_size)
    ]
    with torch.device("meta"):
        assert gather_numbers([rank]) == [[r] for r in range(world_size)], (
            "the default device has no say"
        )
    assert reduce_flags_of("flags", lambda: 1 << (20 * rank)) == sum(
        1 << (20 * r) for r in range(world_size)
    )
    assert (any_rank(rank == 1), any_rank(False), all_agree(rank == 1), all_agree(True)) == (
        True,
        False,
        False,
        True,
    )
    assert gather_numbers_of("counting", lambda: (rank, -rank), 2) == [
        [r, -r] for r in range(world_size)
    ]
    assert reduce_flags_of("flagging", lambda: rank + 1) == 3
    with pytest.raises(KeyError if rank == 0 else PeerError, match="lost") as caught:
        reduce_flags_of("flagging", lambda: raise_(KeyError("lost")) if rank == 0 else 1)
    assert rank == 0 or (isinstance(caught.value, PeerError) and caught.value.what == "flagging")
    return "in step"


def test_every_rank_has_the_numbers_and_flags_of_all() -> None:
    assert run_ranks(numbers_of_all_ranks, 2) == ["in step"] * 2


def collectives_of_agreement(rank: int, world_size: int) -> dict[str, int]:
    group: Any = dist.group.WORLD
    counts = {}

    def count(name: str, step: Any) -> None:
        before = group._get_sequence_number_for_group()
        try:
            step()
        except (KeyError, PeerError):
            assert name == "failure"
        counts[name] = group._get_sequence_number_for_group() - before

    def succeed(fails: bool) -> None:
        with all_ranks_succeed("a step"):
            if fails:
                raise KeyError("lost")

    count("success", lambda: succeed(False))
    count("flags", lambda: reduce_flags_of("a step", lambda: 1))
    count("failure", lambda: succeed(rank == 0))
    return counts


def test_success_costs_one_collective_and_only_failure_tells_more() -> None:
    first, *others = run_ranks(collectives_of_agreement, 2)
    assert first["success"] == first["flags"] == 1 and first["failure"] > 1 and others == [first]


def test_a_process_without_a_group_is_a_world_of_one() -> None:
    assert (get_rank(), get_world_size(), gather_objects("x")) == (0, 1, ["x"])
    assert rank_zero_decides(lambda: 5) == 5
    assert gather_numbers([1, 0.5]) == [[1.0, 0.5]] and reduce_flags_of("x", lambda: 5) == 5
    with pytest.raises(KeyError), all_ranks_succeed("x"):
        raise KeyError
    with pytest.raises(KeyError):
        rank_zero_decides(lambda: raise_(KeyError()))


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The logger of Holdfast without handlers. It is put back at the end."""
    root = logging.getLogger("holdfast")
    level, handlers, propagate = root.level, list(root.handlers), root.propagate
    root.handlers.clear()
    yield root
    root.handlers[:] = handlers
    root.propagate = propagate
    root.setLevel(level)


def test_log_lines_name_the_rank_and_configuring_twice_does_not_double_them(
    root_logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logging("INFO")
    configure_logging("INFO")
    get_logger("holdfast.recover.storage.generations").info("step %d", 3)
    assert (
        capfd.readouterr().err.count(" rank 0 holdfast.recover.storage.generations | step 3\n") == 1
    )


def test_before_there_is_a_group_the_rank_is_that_of_the_launcher(
    root_logger: logging.Logger, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    configure_logging("INFO")
    get_logger("holdfast.x").info("begins")
    get_logger("holdfast.x").warning("is late")
    err = capfd.readouterr().err
    assert err.endswith(" rank 3 holdfast.x | is late\n") and "begins" not in err


def _log_at_two_levels(rank: int, world_size: int, folder: Path, others: str) -> str:
    with open(folder / f"{others}_{rank}.txt", "w+") as out:
        os.dup2(out.fileno(), 2)
        configure_logging("INFO", others)
        logger = get_logger("holdfast.engine")
        logger.info("begins")
        logger.warning("is late")
        out.seek(0)
        return out.read()


@pytest.mark.parametrize("others", ["WARNING", "INFO"])
def test_only_rank_0_tells_more_than_warnings_unless_told_to(tmp_path: Path, others: str) -> None:
    first, second = run_ranks(_log_at_two_levels, 2, tmp_path, others)
    assert re.sub(r"\d\d:\d\d:\d\d ", "", first) == (
        "rank 0 holdfast.engine | begins\nrank 0 holdfast.engine | is late\n"
    )
    assert second.count("rank 1 holdfast.engine | is late\n") == 1
    assert second.count("begins") == (others == "INFO")


class Collected(logging.Handler):
    """Keeps the names of the levels of its records."""

    def __init__(self, level: str = "NOTSET") -> None:
        super().__init__(level)
        self.levels: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.levels.append(record.levelname)


def test_a_line_for_everybody_is_seen_whatever_the_levels_of_logger_and_handlers(
    capfd: pytest.CaptureFixture[str],
) -> None:
    announce(logging.Logger("of nobody"), "resumed at step %d", 16)
    assert capfd.readouterr().err == "resumed at step 16\n"

    seen = []
    for level, of_handler in [
        ("INFO", "NOTSET"),
        ("WARNING", "NOTSET"),
        ("DEBUG", "WARNING"),
        ("ERROR", "NOTSET"),
    ]:
        logger = logging.Logger("of somebody", level)
        collected = Collected(of_handler)
        logger.addHandler(collected)
        announce(logger, "resumed")
        seen.append(collected.levels)
    assert seen == [["INFO"], ["WARNING"], ["WARNING"], []]


def _decide_slowly(rank: int, world_size: int) -> float:
    distributed.WORD_EVERY_S = 0.1
    beat()
    distributed.rank_zero_decides_slowly(lambda: time.sleep(1))
    return seconds_since_beat()


def test_ranks_that_wait_for_a_slow_decision_make_progress_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "WORD_EVERY_S", 0.1)
    assert max(_decide_slowly(0, 1), *run_ranks(_decide_slowly, 2)) < 0.6
    before = seconds_since_beat()
    time.sleep(0.4)
    assert seconds_since_beat() >= before + 0.4


def _work_slowly(rank: int, world_size: int, failing: int | None) -> str:
    group = distributed.new_background_group(None, timeout_s=1.0)
    distributed.WORD_EVERY_S = 0.1

    def work() -> None:
        time.sleep(2.5 * rank)
        if rank == failing:
            raise CheckpointWriteError("no room")

    try:
        distributed.all_ranks_succeed_slowly("working", work, group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{seconds_since_beat() < 0.5}"


@pytest.mark.slow
def test_slow_work_of_one_rank_outlasts_the_timeout_of_the_group() -> None:
    assert run_ranks(_work_slowly, 2, None) == ["True", "True"]


def test_slow_work_that_fails_on_one_rank_fails_on_all() -> None:
    first, second = run_ranks(_work_slowly, 2, 1)
    assert first.startswith("PeerError: working failed on rank 1: CheckpointWriteError: no room")
    assert second == "CheckpointWriteError: no room"
    with pytest.raises(CheckpointWriteError, match="no room"):  # a world of one
        distributed.all_ranks_succeed_slowly("working", _refuse)


def _refuse() -> None:
    raise CheckpointWriteError("no room")
