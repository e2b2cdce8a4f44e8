"""Processes of other nodes are looked at, those that take long to die are waited for, dead nodes are passed over."""

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from holdfast.engine.workers import termination
from holdfast.engine.workers.group import WorkerGroup
from holdfast.engine.workers.termination import end_on_nodes
from holdfast.utils.errors import HoldfastError, WorkerLost
from holdfast.utils.processes import ProcessId
from tests.ray_helpers import SMALLEST_STORE_BYTES, Worker, running, worker_environment

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes on this machine, each with room for one rank; the driver is on the first."""
    ray.shutdown()  # the one that the modules share
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": SMALLEST_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env=worker_environment(),
    )
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def pid_elsewhere(group: WorkerGroup) -> int:
    """Of the rank on the node that is not the driver's."""
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
def test_a_node_that_died_is_passed_over_with_a_word(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    group = WorkerGroup(Worker, world_size=2, process_group=False, name="pair")
    elsewhere = pid_elsewhere(group)
    (node,) = group.node_ids() - {ray.get_runtime_context().get_node_id()}
    (dying,) = (other for other in cluster.list_all_nodes() if other.node_id == node)
    threading.Timer(0.5, cluster.remove_node, (dying,), {"allow_graceful": False}).start()
    began = time.monotonic()
    with pytest.raises(WorkerLost):
        group.call_all("idle")
    assert time.monotonic() - began < 30 and not running(elsewhere)
    assert f"node {node} is dead or does not answer" in caplog.text and "of worker group 'pair'" in caplog.text
    group.shutdown()


class Deathless(ProcessId):
    """One that SIGKILL does not reach, as when it is in a driver; the test ends it."""

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
    stuck: tuple[subprocess.Popen[bytes], Deathless], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process, found = stuck
    monkeypatch.setattr(termination, "REPORT_EVERY_S", 0.5)
    threading.Timer(2.0, process.kill).start()
    began = time.monotonic()
    end_on_nodes({"here": [found]}, "here", "trainer", timeout_s=60)
    assert 1.9 < time.monotonic() - began < 10
    told = [record.getMessage() for record in caplog.records]
    assert (
        1 <= len(told) <= 3 and f"processes [{process.pid}] on node here of worker group 'trainer' still run" in told[0]
    )


def test_a_process_that_outlives_the_timeout_is_an_error_with_advice(
    stuck: tuple[subprocess.Popen[bytes], Deathless],
) -> None:
    process, found = stuck
    with pytest.raises(HoldfastError, match=rf"\[{process.pid}\] on node here .* still run 1 s after SIGKILL.*dmesg"):
        end_on_nodes({"here": [found]}, "here", "trainer", timeout_s=1.0)
