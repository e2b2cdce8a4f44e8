"""Each step is logged once, however often the run was killed. Sums over ranks require the same
names everywhere.
"""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from holdfast.utils.distributed import get_rank
from holdfast.utils.errors import PeerError
from holdfast.utils.metrics import STATS_NAME, StatsLogger, read_stats, reduce_stats
from tests.helpers import run_ranks
from tests.limits import stretched


def log_steps(stats: StatsLogger, steps: range, life: int) -> None:
    for step in steps:
        stats.log(step, {"loss": step / 3, "life": life})


def read_tensorboard(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_stats_are_read_back_exactly_one_line_a_step(tmp_path: Path) -> None:
    stats = StatsLogger(tmp_path / "new" / "folder")
    stats.log(0, {"b": 0.1, "a": 1e-17})
    stats.log(1, {"b": math.inf, "a": torch.tensor(2.5)})  # type: ignore[dict-item]
    # Lines can be read before close, because nothing is held back.
    assert read_stats(tmp_path / "new" / "folder" / STATS_NAME) == [
        {"step": 0, "b": 0.1, "a": 1e-17},
        {"step": 1, "b": math.inf, "a": 2.5},
    ]
    stats.close()
    stats.close()


def test_a_relative_folder_stays_the_same_if_the_program_leaves_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stats = StatsLogger("stats")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    stats.resume_after(None)
    stats.log(0, {"loss": 0.5})
    stats.close()
    assert read_stats(tmp_path / "stats" / STATS_NAME) == [{"step": 0, "loss": 0.5}]


def test_steps_after_the_resumed_one_are_dropped_from_both_files(tmp_path: Path) -> None:
    first = StatsLogger(tmp_path, ["tensorboard"])
    first.resume_after(None)
    log_steps(first, range(0, 7), life=1)
    second = StatsLogger(tmp_path, ["tensorboard"])  # the first was killed and never closed
    second.resume_after(3)
    log_steps(second, range(4, 6), life=2)
    third = StatsLogger(tmp_path, ["tensorboard"])
    third.resume_after(3)
    log_steps(third, range(4, 10), life=3)
    third.close()
    expected = [(step, 1.0 if step <= 3 else 3.0) for step in range(10)]
    assert [(line["step"], line["life"]) for line in read_stats(tmp_path / STATS_NAME)] == expected
    assert read_tensorboard(tmp_path, "life") == expected


def test_a_fresh_start_drops_the_log_of_a_life_without_snapshots(tmp_path: Path) -> None:
    log_steps(StatsLogger(tmp_path, ["tensorboard"]), range(3), life=1)
    again = StatsLogger(tmp_path, ["tensorboard"])
    again.resume_after(None)
    log_steps(again, range(2), life=2)
    again.close()
    assert [(line["step"], line["life"]) for line in read_stats(tmp_path / STATS_NAME)] == [
        (0, 2.0),
        (1, 2.0),
    ]
    assert read_tensorboard(tmp_path, "life") == [(0, 2.0), (1, 2.0)]


@pytest.mark.parametrize("cut", range(1, 30, 4))
def test_a_line_torn_by_a_crash_is_skipped_and_spoils_no_other(cut: int, tmp_path: Path) -> None:
    path = tmp_path / STATS_NAME
    log_steps(StatsLogger(tmp_path), range(3), life=1)
    path.write_bytes(path.read_bytes()[:-cut])
    assert [line["step"] for line in read_stats(path)] == ([0, 1, 2] if cut == 1 else [0, 1])

    log_steps(StatsLogger(tmp_path), range(3, 4), life=2)  # appended without resume_after
    assert [line["step"] for line in read_stats(path)] == ([0, 1, 2, 3] if cut == 1 else [0, 1, 3])

    resumed = StatsLogger(tmp_path)
    resumed.resume_after(1)
    log_steps(resumed, range(2, 4), life=3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]
    assert os.listdir(tmp_path) == [STATS_NAME]


def test_no_line_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, signal\nfrom holdfast.utils.metrics import StatsLogger\n"
        f"stats = StatsLogger({str(tmp_path)!r}, ['tensorboard'])\n"
        "for step in range(5): stats.log(step, {'x': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], timeout=stretched(60), cwd=tmp_path, capture_output=True
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert [line["step"] for line in read_stats(tmp_path / STATS_NAME)] == list(range(5))
    assert read_tensorboard(tmp_path, "x") == [(step, float(step)) for step in range(5)]


def test_a_stat_called_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="called 'step'"):
        StatsLogger(tmp_path).log(0, {"step": 1.0})


def test_reading_stats_that_do_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_stats(tmp_path / STATS_NAME)


def reduce_on_ranks(rank: int, world_size: int) -> dict[str, float]:
    # Insertion order differs between ranks, and float32 would lose the 1.
    values = {"tokens": 2.0**40 + rank, "loss": 0.1 * rank}
    sums = reduce_stats(dict(sorted(values.items(), reverse=rank == 1)))
    assert reduce_stats({}) == {}
    mine = {"loss": 1.0} | ({"kl": 1.0} if rank == 0 else {"clip": 1.0, "ent": 1.0})
    with pytest.raises(
        PeerError,
        match=r"rank 1: names differ from rank 0: lacks \['kl'\], has besides \['clip', 'ent'\]",
    ):
        reduce_stats(mine)
    assert reduce_stats({"after": 1.0}) == {"after": world_size} and get_rank() == rank
    return sums


def test_reduce_sums_by_name_in_float64_and_refuses_other_names_everywhere() -> None:
    results = run_ranks(reduce_on_ranks, 2)
    assert results == [{"loss": 0.1, "tokens": 2.0**41 + 1}] * 2


def test_reduce_without_peers_returns_the_numbers() -> None:
    assert reduce_stats({"b": 1, "a": 0.5}) == {"a": 0.5, "b": 1.0}
