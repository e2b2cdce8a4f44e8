"""The GRPO example on a cluster of several nodes: one dies, and is replaced by a spare node, a late
one, or none.

Each test reports the seconds from the loss to the next step, by phase (``-rP`` shows them).
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from examples.chaos import GrpoRun, sha256
from holdfast.utils.metrics import read_stats
from tests.limits import stretched
from tests.once import make_once
from tests.ray_clusters import NODE, cluster_of, kill_node, node_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 40
SETTINGS = (f"total_steps={STEPS}", "n_prompts=60", "batch_size=4", "n_samples=4", "trackers=[]")
PATIENCE_S = stretched(240.0)
WANTED_S = stretched(10.0)
"""Longest time for the loss of a node, not counting the start of workers, which takes the same time
on every node.
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SHA-256 of the weights of an undisturbed run on one machine."""

    def make(folder: Path) -> str:
        run = GrpoRun(folder, *SETTINGS, "recover.mode=off")
        run.start()
        assert run.wait(PATIENCE_S) == 0, run.log_tail()
        return sha256(run.final_weights())

    return make_once(tmp_path_factory, "grpo_nodes", make)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., GrpoRun]]:
    """Starts the example on a cluster, with each trainer on its own node. Only one loss is
    allowed.
    """
    runs: list[GrpoRun] = []

    def begin(cluster: Cluster, *overrides: str) -> GrpoRun:
        own = (
            f"ray_address={cluster.address}",
            "strategy=SPREAD",
            "recover.freq_steps=5",
            "recover.retries=1",
        )
        run = GrpoRun(tmp_path / "run", *SETTINGS, *own, "log_level=INFO", *overrides)
        runs.append(run)
        run.start()
        return run

    yield begin
    for run in runs:
        run.stop()


def train_until(run: GrpoRun, step: int) -> None:
    run.wait_until(lambda: run.last_step() >= step or run.exit_code() is not None, PATIENCE_S)
    assert run.exit_code() is None, run.log_tail()


def kill_a_trainers_node(cluster: Cluster, run: GrpoRun) -> float:
    """Kill the node of a trainer without the driver. Returns the unix time."""
    nodes = [node_of(cluster, pid) for pid in run.pids()["trainer"]]
    victim = next(node for node in nodes if node is not cluster.head_node)
    struck = time.time()
    kill_node(cluster, victim)
    return struck


def wait_for_attempt(run: GrpoRun, number: int) -> dict[str, Any]:
    run.wait_until(lambda: len(run.attempts()) > number or run.exit_code() is not None, PATIENCE_S)
    assert run.exit_code() is None, run.log_tail()
    return run.attempts()[number]


def report(run: GrpoRun, struck: float, attempt: dict[str, Any]) -> float:
    """Print the seconds of each phase of a recovery. Returns the seconds until the workers were
    placed.
    """
    loss, stats = attempt["loss"], read_stats(run.trial_root / "stats" / "stats.jsonl")
    trained = min(entry["time"] for entry in stats if entry["time"] > attempt["time"])
    detected = loss["detected_at"] - struck
    phases = {
        "noticed": detected,
        "processes gone": detected + loss["torn_down_s"],
        "placed": detected + loss["placed_s"],
        "workers up": detected + loss["rebuilt_s"],
        "restored": attempt["time"] - struck,
        "first step": trained - struck,
    }
    print(
        "seconds from the loss:",
        ", ".join(f"{what} {seconds:.1f}" for what, seconds in phases.items()),
    )
    return phases["placed"]


def assert_ends_as(run: GrpoRun, expected: str) -> None:
    assert run.wait(PATIENCE_S) == 0, run.log_tail()
    assert sha256(run.final_weights()) == expected


def assert_all_trained_once(run: GrpoRun) -> None:
    stats = read_stats(run.trial_root / "stats" / "stats.jsonl")
    assert [entry["step"] for entry in stats] == list(range(STEPS))
    assert {entry["n_seqs"] for entry in stats} == {16.0}, "a step without all of its batch"


def test_a_spare_node_takes_the_place_of_one_that_dies(
    start: Callable[..., GrpoRun], expected: str
) -> None:
    with cluster_of(4) as cluster:
        run = start(cluster)
        train_until(run, 11)
        struck = kill_a_trainers_node(cluster, run)
        attempt = wait_for_attempt(run, 1)
        assert_ends_as(run, expected)
        assert report(run, struck, attempt) < WANTED_S
        assert [attempt["world_size"] for attempt in run.attempts()] == [2, 2]


def test_a_node_that_comes_late_is_waited_for_without_a_retry(
    start: Callable[..., GrpoRun], expected: str
) -> None:
    with cluster_of(3) as cluster:
        run = start(cluster)
        train_until(run, 11)
        struck = kill_a_trainers_node(cluster, run)
        run.wait_until(lambda: "'trainer' has waited" in run.log_tail(), PATIENCE_S)
        assert (
            "for 2 x {'CPU': 1.0} (SPREAD): 2 node(s) have {'CPU': 2.0}, room for 2 rank(s)"
            in run.log_tail()
        )
        time.sleep(5.0)  # nothing may happen meanwhile
        assert len(run.attempts()) == 1 and run.exit_code() is None
        joined = time.time()
        cluster.add_node(**NODE)
        attempt = wait_for_attempt(run, 1)
        assert_ends_as(run, expected)
        placed = struck + report(run, struck, attempt)
        assert placed - joined < WANTED_S
        assert [attempt["world_size"] for attempt in run.attempts()] == [2, 2]


def test_without_another_node_fewer_ranks_go_on_until_one_joins(
    start: Callable[..., GrpoRun],
) -> None:
    with cluster_of(3) as cluster:
        run = start(cluster, "min_trainers=1", "recover.shrink_after_s=3", "batch_size=4")
        train_until(run, 11)
        struck = kill_a_trainers_node(cluster, run)
        attempt = wait_for_attempt(run, 1)
        assert attempt["world_size"] == 1
        train_until(
            run, attempt["step"] + 6
        )  # a snapshot was taken, but there was no node to grow to
        assert len(run.attempts()) == 2
        cluster.add_node(**NODE)
        grown = wait_for_attempt(run, 2)
        assert (grown["world_size"], grown["loss"]) == (2, None)
        assert grown["step"] % 5 == 0, "not at a snapshot"
        assert run.wait(PATIENCE_S) == 0, run.log_tail()
        assert report(run, struck, attempt) < WANTED_S + 3
        assert_all_trained_once(run)
        assert [attempt["world_size"] for attempt in run.attempts()] == [2, 1, 2]


def test_a_wait_that_ends_is_one_error_and_the_command_resumes(
    start: Callable[..., GrpoRun], expected: str
) -> None:
    with cluster_of(3) as cluster:
        run = start(cluster, "recover.node_wait_s=4")
        train_until(run, 11)
        kill_a_trainers_node(cluster, run)
        assert run.wait(PATIENCE_S) == 1
        (told,) = [line for line in run.log_tail().splitlines() if line.startswith("error: ")]
        assert (
            "which Ray could not reserve within 4 s" in told and "the same command resumes" in told
        )
        cluster.add_node(**NODE)
        run.start()
        assert_ends_as(run, expected)
        assert json.dumps([attempt["step"] for attempt in run.attempts()]) != "[0, 0]", (
            "it began anew"
        )


def test_without_rays_control_process_the_job_ends_and_another_cluster_resumes_it(
    start: Callable[..., GrpoRun], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "8")  # 60 by default
    with cluster_of(3) as cluster:
        run = start(cluster)
        train_until(run, 11)
        assert cluster.head_node is not None
        cluster.head_node.kill_gcs_server()
        train_until(run, 12)
        assert run.wait(PATIENCE_S) not in (0, 75)
        assert run.last_step() < STEPS - 1
    with cluster_of(3) as cluster:
        again = start(cluster)
        assert_ends_as(again, expected)
        assert again.attempts()[-1]["step"] >= 10, "it began anew"
