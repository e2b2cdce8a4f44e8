"""The GRPO example on a cluster whose control process (GCS) dies and is restarted, with tables in
external storage.

The storage is Redis, or RocksDB on a disk, which newer versions of Ray include. Tests of missing
storage are skipped. `test_grpo_nodes` covers clusters without such storage.
"""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray._private.node import Node

from examples.chaos import GrpoRun
from tests.helpers import free_port
from tests.integration.test_grpo_nodes import (
    assert_all_trained_once,
    assert_ends_as,
    expected,
    kill_a_trainers_node,
    start,
    train_until,
    wait_for_attempt,
)
from tests.limits import stretched
from tests.ray_clusters import cluster_of

__all__ = ["expected", "start"]  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

AWAY_S = 5.0
"""Longest absence of the control process after a loss. By default Ray waits for a minute."""


@contextlib.contextmanager
def redis(folder: Path, set_env: Callable[[str, str], None]) -> Iterator[None]:
    """Run a Redis server for a cluster that is started inside the block."""
    if (program := shutil.which("redis-server")) is None:
        pytest.skip("there is no redis-server on this machine; install Redis")
    port = free_port()
    command = [
        program,
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        str(folder),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            end = time.monotonic() + stretched(20)
            while True:
                assert server.poll() is None and time.monotonic() < end, "Redis did not start"
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            set_env("RAY_REDIS_ADDRESS", f"127.0.0.1:{port}")
            yield
        finally:
            server.kill()


@contextlib.contextmanager
def rocksdb(folder: Path, set_env: Callable[[str, str], None]) -> Iterator[None]:
    """Set the environment for a cluster with its tables in a folder."""
    if not hasattr(Node, "_is_rocksdb_gcs"):
        pytest.skip("this Ray cannot keep its tables in RocksDB")
    set_env("RAY_gcs_storage", "rocksdb")
    set_env("RAY_gcs_storage_path", str(folder))
    yield


@pytest.fixture(params=[redis, rocksdb])
def stored_elsewhere(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Clusters started inside the test store their tables in this way."""
    folder = tmp_path / "tables"
    folder.mkdir()
    with request.param(folder, monkeypatch.setenv):
        yield


@pytest.mark.usefixtures("stored_elsewhere")
def test_a_job_goes_on_over_the_death_of_rays_control_process(
    start: Callable[..., GrpoRun], expected: str
) -> None:
    with cluster_of(3) as cluster:
        run = start(cluster)
        train_until(run, 11)
        assert cluster.head_node is not None
        cluster.head_node.kill_gcs_server()
        train_until(run, 15)  # not needed as long as nothing happens
        cluster.head_node.start_gcs_server()
        assert_ends_as(run, expected)
        assert_all_trained_once(run)
        assert [attempt["world_size"] for attempt in run.attempts()] == [2]


@pytest.mark.usefixtures("stored_elsewhere")
def test_a_node_lost_with_the_control_process_is_replaced_once_that_is_back(
    start: Callable[..., GrpoRun], expected: str
) -> None:
    with cluster_of(4) as cluster:
        run = start(cluster)
        train_until(run, 11)
        assert cluster.head_node is not None
        cluster.head_node.kill_gcs_server()
        struck = kill_a_trainers_node(cluster, run)
        time.sleep(AWAY_S)
        cluster.head_node.start_gcs_server()
        attempt = wait_for_attempt(run, 1)
        print(
            f"{time.time() - struck:.1f} s from the loss to the next attempt, {AWAY_S:g} s of "
            "them without a GCS"
        )
        assert_ends_as(run, expected)
        assert attempt["world_size"] == 2 and attempt["step"] >= 10
