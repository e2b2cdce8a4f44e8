"""The GRPO example when its rollout worker is lost, when a worker hangs, and when it is asked to
stop.

Each run ends with the bytes of an undisturbed run.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.chaos import GrpoRun, sha256
from holdfast.utils.metrics import read_stats
from tests.limits import stretched
from tests.once import make_once
from tests.ray_helpers import running

pytestmark = pytest.mark.timeout(600)

STEPS = 24
SETTINGS = (f"total_steps={STEPS}", "n_prompts=60", "batch_size=4", "n_samples=4", "trackers=[]")
PATIENCE_S = stretched(240.0)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SHA-256 of the weights of an undisturbed run."""

    def make(folder: Path) -> str:
        run = GrpoRun(folder, *SETTINGS, "recover.mode=off")
        run.start()
        assert run.wait(PATIENCE_S) == 0, run.log_tail()
        return sha256(run.final_weights())

    return make_once(tmp_path_factory, "grpo", make)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[GrpoRun]:
    """A run with few snapshots that finds hangs quickly."""
    run = GrpoRun(tmp_path / "run", *SETTINGS, "recover.freq_steps=10", "hang_timeout_s=5")
    yield run
    run.stop()


def processes(run: GrpoRun) -> dict[str, Any]:
    return json.loads((run.trial_root / "stats" / "processes.json").read_text())


def train_until(run: GrpoRun, step: int) -> None:
    run.wait_until(lambda: run.last_step() >= step or run.exit_code() is not None, PATIENCE_S)
    assert run.exit_code() is None, run.log_tail()


def assert_ends_as(run: GrpoRun, expected: str) -> None:
    assert run.wait(PATIENCE_S) == 0, run.log_tail()
    assert sha256(run.final_weights()) == expected
    assert [
        entry["step"] for entry in read_stats(run.trial_root / "stats" / "stats.jsonl")
    ] == list(range(STEPS))


@pytest.mark.slow
def test_a_run_whose_trainer_was_killed_ends_with_the_same_bytes(tmp_path: Path) -> None:
    settings = (*SETTINGS, "total_steps=6")
    reference, run = (
        GrpoRun(tmp_path / "reference", *settings, "recover.mode=off"),
        GrpoRun(tmp_path / "run", *settings, "recover.freq_steps=2"),
    )
    try:
        for started in (reference, run):
            started.start()
        train_until(run, 2)
        assert run.kill("trainer", 1)
        assert run.wait(PATIENCE_S) == 0, run.log_tail()
        assert reference.wait(PATIENCE_S) == 0, reference.log_tail()
    finally:
        reference.stop()
        run.stop()
    assert sha256(run.final_weights()) == sha256(reference.final_weights())
    first, second = run.attempts()
    assert first["step"] == 0 and second["step"] > 0, "it has resumed"
    assert (second["loss"]["group"], second["loss"]["ranks"]) == ("trainer", [1])


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=lambda signum: signum.name)
def test_the_loss_of_the_rollout_worker_leaves_the_trainers_alone(
    run: GrpoRun, expected: str, signum: signal.Signals
) -> None:
    run.start()
    train_until(run, 3)
    before = processes(run)
    for step in (5, 9):
        (rollout,) = processes(run)["rollout"]
        os.kill(rollout, signum)
        run.wait_until(lambda old=rollout: processes(run)["rollout"] != [old], PATIENCE_S)
        assert not running(rollout)
        train_until(run, step)
    after = processes(run)
    assert (after["driver"], after["trainer"]) == (before["driver"], before["trainer"])
    assert_ends_as(run, expected)
    assert [attempt["number"] for attempt in run.attempts()] == [0], "nothing was restored"


@pytest.mark.slow
def test_a_trainer_that_hangs_is_a_loss_like_its_death(run: GrpoRun, expected: str) -> None:
    run.start()
    train_until(run, 12)
    os.kill(processes(run)["trainer"][1], signal.SIGSTOP)
    assert_ends_as(run, expected)
    first, second = run.attempts()
    assert (first["step"], second["step"]) == (0, 10)
    assert (second["loss"]["group"], second["loss"]["ranks"]) == ("trainer", [1])


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda signum: signum.name)
def test_asked_to_stop_it_snapshots_exits_with_75_and_can_go_on(
    run: GrpoRun, expected: str, signum: signal.Signals
) -> None:
    run.start()
    train_until(run, 4)
    pids = processes(run)
    if (
        signum == signal.SIGINT
    ):  # Ctrl-C goes to every process of the terminal's group, Ray's among them
        os.killpg(os.getpgid(pids["driver"]), signum)
    else:
        os.kill(pids["driver"], signum)
    assert run.wait(PATIENCE_S) == 75, run.log_tail()
    assert f"stopped after a snapshot: {signum.name}" in run.log_tail()
    assert not any(running(pid) for pid in [*pids["trainer"], *pids["rollout"]])
    stopped_after = run.last_step()
    assert 4 <= stopped_after < STEPS - 1

    run.start()
    assert_ends_as(run, expected)
    assert [attempt["step"] for attempt in run.attempts()] == [0, stopped_after + 1]


@pytest.mark.slow
def test_ctrl_c_twice_stops_at_once_and_loses_nothing_committed(
    run: GrpoRun, expected: str
) -> None:
    run.start()
    train_until(run, 11)
    pids = processes(run)
    os.kill(pids["rollout"][0], signal.SIGSTOP)  # so that no step ends meanwhile
    time.sleep(0.5)
    group = os.getpgid(pids["driver"])
    os.killpg(group, signal.SIGINT)
    run.wait_until(
        lambda: "Ctrl-C again stops at once" in run.log_tail(), stretched(60)
    )  # else both may count as one
    os.killpg(group, signal.SIGINT)
    assert run.wait(stretched(60)) == 1, run.log_tail()
    assert "the same command goes on" in run.log_tail()
    assert not any(running(pid) for pid in [*pids["trainer"], *pids["rollout"]])

    run.start()
    assert_ends_as(run, expected)
    assert [attempt["step"] for attempt in run.attempts()] == [0, 10]
