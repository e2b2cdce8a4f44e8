"""Processes of other nodes are checked, slow deaths are waited for, and dead nodes are skipped."""

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from holdfast.engine.workers import termination
from holdfast.engine.workers.group import WorkerGroup
from holdfast.engine.workers.termination import end_on_nodes
from holdfast.utils.errors import HoldfastError, WorkerLost
from holdfast.utils.processes import ProcessId
from tests.limits import stretched
from tests.ray_clusters import NODE, cluster_of, node_of, raylet_pid, stop_raylet
from tests.ray_helpers import Worker, running, worker_environment

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    """Two nodes on this machine, each with room for one rank. The driver is on the first."""
    with cluster_of(2) as cluster:
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=worker_environment(),
        )
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """The two nodes again, whatever tests in this process have done to the second one."""
    if len(started.worker_nodes) != 1:
        for node in list(started.worker_nodes):
            started.remove_node(node, allow_graceful=False)
        started.add_node(**NODE)
    return started


class Diary:
    """A worker that keeps writing to a file, without any call."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder, os.environ["RANK"])
        threading.Thread(target=self.write_on, daemon=True).start()

    def write_on(self) -> None:
        while True:
            with self.path.open("a") as file:
                file.write(".")
            time.sleep(0.02)


def pid_elsewhere(group: WorkerGroup) -> int:
    """Process id of the rank that is not on the driver's node."""
    here = ray.get_runtime_context().get_node_id()
    (pid,) = (process.id.pid for process in group._processes if process.node_id != here)
    return pid


@pytest.mark.slow
def test_a_killed_group_is_gone_on_all_nodes_when_kill_returns(cluster: Cluster) -> None:
    group = WorkerGroup(Worker, world_size=2, process_group=False)
    assert len(group.node_ids()) == 2
    elsewhere = pid_elsewhere(group)
    os.kill(elsewhere, signal.SIGSTOP)  # Ray takes seconds to end a stopped process
    group.kill()
    assert not any(running(pid) for pid in group.pids())
    group.shutdown()


@pytest.mark.slow
def test_a_node_that_died_is_passed_over_with_a_word(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    group = WorkerGroup(Worker, world_size=2, process_group=False, name="pair")
    elsewhere = pid_elsewhere(group)
    (node,) = group.node_ids() - {ray.get_runtime_context().get_node_id()}
    (dying,) = (other for other in cluster.list_all_nodes() if other.node_id == node)
    threading.Timer(0.5, cluster.remove_node, (dying,), {"allow_graceful": False}).start()
    began = time.monotonic()
    with pytest.raises(WorkerLost):
        group.call_all("idle")
    assert time.monotonic() - began < stretched(30) and not running(elsewhere)
    assert (
        f"node {node} is dead or does not answer" in caplog.text
        and "of worker group 'pair'" in caplog.text
    )
    group.shutdown()


@pytest.mark.slow
def test_a_rank_whose_node_ray_cannot_reach_writes_nothing_once_kill_returns(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = WorkerGroup(
        Diary, args=(str(tmp_path),), world_size=2, process_group=False, hang_timeout_s=4.0
    )
    elsewhere = pid_elsewhere(group)
    (rank,) = (str(rank) for rank, pid in enumerate(group.pids()) if pid == elsewhere)
    time.sleep(6.0)  # longer than a lease, so it has been renewed
    assert running(elsewhere)
    node = node_of(cluster, elsewhere)
    stop_raylet(node)
    time.sleep(0.5)
    assert running(elsewhere), "the raylet's workers go on without it"
    began = time.monotonic()
    group.kill()
    print(
        f"gone {time.monotonic() - began:.1f} s after the raylet was stopped, with a lease of 4 s"
    )
    written = (tmp_path / rank).stat().st_size
    assert not running(elsewhere)
    assert time.monotonic() - began < stretched(10)
    os.kill(raylet_pid(node), signal.SIGCONT)  # the node comes back
    time.sleep(1.0)
    assert (tmp_path / rank).stat().st_size == written
    assert "count as gone when their lease is over" in caplog.text
    group.shutdown()
    cluster.remove_node(node, allow_graceful=False)


@pytest.mark.slow
def test_a_node_that_ends_in_a_collective_is_a_loss_before_ray_knows_of_it(
    cluster: Cluster,
) -> None:
    group = WorkerGroup(Worker, world_size=2, name="pair")
    elsewhere = pid_elsewhere(group)
    threading.Timer(
        0.5, cluster.remove_node, (node_of(cluster, elsewhere),), {"allow_graceful": False}
    ).start()
    rank = group.pids().index(elsewhere)
    with pytest.raises(
        WorkerLost, match=rf"lost rank\(s\) \[{rank}\]: died during \w+\(\) \(the process is gone\)"
    ):
        group.call_all("reduce_forever")
    group.shutdown()


class Deathless(ProcessId):
    """A process that SIGKILL does not reach, as if it hangs in a driver. The test ends it."""

    def kill(self) -> None:
        pass


@pytest.fixture
def stuck() -> Iterator[tuple[subprocess.Popen[bytes], Deathless]]:
    process = subprocess.Popen(["sleep", "60"])
    started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    yield process, Deathless(process.pid, started)
    process.kill()
    process.wait()


def test_a_process_that_takes_long_to_die_is_awaited_and_reported(
    stuck: tuple[subprocess.Popen[bytes], Deathless],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    process, found = stuck
    monkeypatch.setattr(termination, "REPORT_EVERY_S", 0.5)
    threading.Timer(2.0, process.kill).start()
    began = time.monotonic()
    end_on_nodes({"here": [found]}, "here", "trainer", timeout_s=60)
    took_s = time.monotonic() - began
    assert took_s > 1.9
    told = [record.getMessage() for record in caplog.records]
    assert (
        1 <= len(told) <= took_s / 0.5
        and f"processes [{process.pid}] on node here of worker group 'trainer' still run" in told[0]
    )


def test_a_process_that_outlives_the_timeout_is_an_error_with_advice(
    stuck: tuple[subprocess.Popen[bytes], Deathless],
) -> None:
    process, found = stuck
    with pytest.raises(
        HoldfastError,
        match=rf"\[{process.pid}\] on node here .* still run \d+ s after SIGKILL.*dmesg",
    ):
        end_on_nodes({"here": [found]}, "here", "trainer", timeout_s=1.0)
