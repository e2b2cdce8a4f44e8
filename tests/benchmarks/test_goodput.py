"""The benchmark that kills a job at random moments: its faults, its counts, and a quick run."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import goodput
from benchmarks.goodput import (
    ANSWER_TOKENS,
    FULL,
    KINDS,
    QUICK,
    WAYS,
    Fault,
    Launcher,
    Row,
    Struck,
    count_answers,
    draw_faults,
    table,
)
from examples.copy_task import MAX_NEW_TOKENS
from examples.tiny_models import EOS_ID
from tests.limits import stretched, wait_until

ROOT = Path(__file__).parents[2]
_PR_SET_CHILD_SUBREAPER = 36


def test_the_faults_are_the_same_each_time_and_come_at_the_given_rate() -> None:
    faults = draw_faults(1000, 20.0)
    assert faults == draw_faults(1000, 20.0)
    assert faults[:4] == [Fault(fault.kind, fault.at_s / 2) for fault in draw_faults(4, 40.0)]
    assert faults[-1].at_s / 1000 == pytest.approx(20.0, rel=0.1)
    assert {fault.kind for fault in faults[:4]} == set(KINDS)


def test_answers_count_when_their_last_token_was_sampled(tmp_path: Path) -> None:
    assert ANSWER_TOKENS == MAX_NEW_TOKENS
    lines = [
        {"rid": "short", "position": 0, "token": 7},
        {"rid": "short", "position": 1, "token": EOS_ID},
        {"rid": "cut off", "position": 0, "token": 7},
        {"rid": "longest", "position": MAX_NEW_TOKENS - 1, "token": 7},
        {"call": "POST /pause", "body": ""},
    ]
    text = "\n".join(map(json.dumps, lines))
    (tmp_path / "one.jsonl").write_text(text + '\n{"rid": "torn", "token": 2, "posi')
    (tmp_path / "other.jsonl").write_text(text)
    assert count_answers(tmp_path) == 4


def test_the_table_names_the_faults_that_struck_and_runs_that_did_not_finish() -> None:
    struck = [Struck(kind, 1.0, 1.5, 7, 0.0) for kind in ("server", "driver", "server")]
    rows = [
        Row("undisturbed", None, [], True, 60.0, 0.8, 0, 0, 0.9, "aa"),
        Row("holdfast", 20.0, struck, True, 80.0, 0.7, 5, 64, 0.9, "aa", exits=1),
        Row("blocking", 20.0, [], False, 9.0, 0.0, 0, 0, 0.0, None, reason="it ended\nwith 1"),
        Row("areal", 20.0, struck, False, 600.0, 0.1, 50, 640, 0.2, None),
    ]
    found = table(rows, {"cores": 2, "load_average": 2.0}, FULL)
    assert (
        "| holdfast | 20 | 3: 1 driver, 2 server | 1 | 80 | 70.0% | 5 | 64 | 0.900 | equal |"
        in found
    )
    assert "| 0.000 | failed: it ended |" in found
    assert found.rstrip().endswith("| not finished |")


class _Run:
    """A job whose orphans stay zombies, because its parent adopts them and never waits for any."""

    def __init__(self) -> None:
        code = (
            "import ctypes, subprocess, time\n"
            f"ctypes.CDLL(None).prctl({_PR_SET_CHILD_SUBREAPER}, 1, 0, 0, 0)\n"
            "command = ['sh', '-c', 'sleep 100 & sleep 100 & wait']\n"
            "print(subprocess.Popen(command).pid, flush=True)\n"
            "time.sleep(100)\n"
        )
        command = [sys.executable, "-c", code]
        self.parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.parent.stdout is not None
        self.driver = psutil.Process(int(self.parent.stdout.readline()))
        wait_until(lambda: len(self.driver.children()) == 2, 10)

    def pids(self) -> dict[str, list[int]]:
        return {"driver": [self.driver.pid]}

    def exit_code(self) -> int | None:
        return None

    def kill(self, name: str) -> None:
        self.driver.kill()


def test_the_end_of_a_job_waits_until_its_processes_are_dead_but_not_for_their_parents() -> None:
    run: Any = _Run()
    with run.parent:
        others = run.driver.children()
        try:
            launcher = Launcher(run, [], whole=True)
            began_s = time.monotonic()
            launcher._end_all()
            assert time.monotonic() - began_s < stretched(2)
            assert [process.status() for process in others] == [psutil.STATUS_ZOMBIE] * 2
        finally:
            run.parent.kill()


class _FailingRun:
    """A job that ends with an error at once."""

    def __init__(self, folder: Path, *settings: str, **names: str) -> None:
        self.trial_root = folder

    def start(self) -> None:
        pass

    def exit_code(self) -> int:
        return 3

    def last_step(self) -> int:
        return -1

    def log_tail(self) -> str:
        return "broken"

    def stats(self) -> list[Any]:
        return []


def test_a_run_that_fails_is_a_row_with_its_reason_and_the_others_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goodput, "GrpoRun", _FailingRun)
    # A run adds to the environment.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert goodput.main(["--quick", "--out", str(tmp_path), "--ways", "areal"]) == 1
    rows = json.loads((tmp_path / "goodput.json").read_text())["rows"]
    assert [(row["way"], row["finished"], row["exits"]) for row in rows] == [
        ("undisturbed", False, 1),
        ("areal", False, 1),
    ]
    assert all(row["reason"] == "the job ended with 3:\nbroken" for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_quick_run_strikes_every_way_at_the_same_moments(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.goodput", "--quick", "--out", str(tmp_path)]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=stretched(600)
    )
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads((tmp_path / "goodput.json").read_text())
    undisturbed, *struck = document["rows"]
    assert undisturbed["struck"] == [] and undisturbed["again"] == 0
    assert undisturbed["samples_lost"] == 0

    assert [row["way"] for row in struck] == list(WAYS)
    faults = draw_faults(QUICK.most_faults, *QUICK.means_s)
    planned = [(fault.kind, round(fault.at_s, 2)) for fault in faults]
    for row in struck:
        assert row["finished"] and row["samples_lost"] >= 0 and 0 < row["goodput"] < 1
        happened = [(fault["kind"], fault["planned_s"]) for fault in row["struck"]]
        assert happened and happened == planned[: len(happened)], row["way"]
        assert all(fault["struck_s"] >= fault["planned_s"] for fault in row["struck"])
        processes = {(fault["pid"], fault["created"]) for fault in row["struck"]}
        assert len(processes) == len(happened), "each fault has killed another process"
    assert "| areal | 1 |" in (tmp_path / "goodput.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"goodput.json", "goodput.md"}
