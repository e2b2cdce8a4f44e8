"""Servers in a Ray cluster are placed, watched and moved, and end with whatever holds them."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RpcError

from holdfast.engine.launch import RayServers, ServerSpec, WatchLimits
from holdfast.engine.launch import watched as watched_module
from holdfast.engine.launch.on_ray import RayRun, _Host, _Left
from holdfast.engine.launch.program import Program, Run
from holdfast.engine.launch.watched import ProcessState, WatchedServer
from holdfast.engine.servers import ModelRequest, ServerFleet
from holdfast.engine.servers.api import GenerationHyperparameters
from holdfast.engine.worker_group import WorkerGroup, WorkerResources
from holdfast.engine.workers.placement import Placement, PlacementRequest
from holdfast.utils.errors import ConfigError
from holdfast.utils.processes import ProcessId, processes_of_group
from tests.engine.launch.stand_in import ROOT, quick_limits, stand_in_spec
from tests.engine.servers.scripted import write_published
from tests.limits import stretched, wait_until
from tests.ray_clusters import NODE, cluster_of, kill_node, node_of
from tests.ray_helpers import local_ray, worker_environment

__all__ = ["local_ray"]

pytestmark = pytest.mark.timeout(180)

START_S = 60.0
LIMIT_S = stretched(20)
REQUEST = ModelRequest([1, 2], GenerationHyperparameters(max_new_tokens=2), seed=1)
DRAINED_FOR_PREEMPTION = 2


@pytest.fixture(scope="module", autouse=True)
def often() -> Iterator[None]:
    """Look at servers more often than every five seconds, and restart them sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watched_module, "_LOOK_EVERY_S", 0.2)
        patch.setattr(watched_module, "_LOOK_LIMIT_S", stretched(0.5))
        patch.setattr(watched_module, "_LONGEST_PAUSE_S", 0.2)
        yield


@contextmanager
def launched(folder: Path, count: int, **options: Any) -> Iterator[RayServers]:
    """Servers that answer."""
    spec = stand_in_spec(folder)
    with RayServers(spec, count, folder / "servers", limits=quick_limits(), **options) as servers:
        servers.wait_until_up(stretched(START_S))
        wait_until(lambda: len(servers.pids()) == count)
        yield servers


def parents(pid: int) -> Iterator[int]:
    """The process ids of the ancestors of a process."""
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def actor_of(pid: int) -> int:
    """The actor of a server: program, guard, shelter, actor."""
    _, _, actor, *_ = parents(pid)
    return actor


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def another(servers: RayServers, before: Any) -> bool:
    """Whether all servers answer, and one is not ``before``."""
    now = list(servers.servers())
    return len(now) == len(servers._servers) and before not in now


@pytest.mark.slow
def test_a_server_runs_in_an_actor_with_its_gpu_and_is_restarted_in_its_place(
    local_ray: None, tmp_path: Path
) -> None:
    with launched(tmp_path, 1) as servers:
        (before,) = servers.servers()
        pid = servers.pids()["server_0"]
        assert before.url.startswith("http://127.0.0.1:")
        assert environment_of(pid)["CUDA_VISIBLE_DEVICES"] in ("0", "1")
        assert ray.available_resources()["GPU"] == 1

        # The death of the actor ends all of its processes.
        group = os.getpgid(pid)
        assert len(processes_of_group(group)) == 3
        os.kill(actor_of(pid), signal.SIGKILL)
        wait_until(partial(another, servers, before), START_S)
        assert processes_of_group(group) == []
        (after,) = servers.servers()
        assert after.url != before.url and after.api_key != before.api_key

        # So does the death of the program, which is another start in the same place.
        wait_until(servers.pids)
        os.kill(servers.pids()["server_0"], signal.SIGKILL)
        wait_until(partial(another, servers, after), START_S)
        assert servers.stats()["servers_restarted"] == 2
        wait_until(servers.pids)
        group = os.getpgid(servers.pids()["server_0"])
    assert processes_of_group(group) == []
    wait_until(lambda: ray.available_resources()["GPU"] == 2)


@pytest.mark.slow
def test_a_cluster_without_enough_gpus_is_an_error_that_says_what_is_missing(
    local_ray: None, tmp_path: Path
) -> None:
    spec = stand_in_spec(tmp_path, tensor_parallel_size=3)
    with (
        RayServers(spec, 1, tmp_path / "servers", limits=quick_limits()) as servers,
        pytest.raises(ConfigError, match=r"needs 1 x {'CPU': 1, 'GPU': 3}.* have .*'GPU': 2"),
    ):
        servers.wait_until_up(stretched(START_S))


def endless(folder: Path) -> Program:
    """A program without a server, which ends with SIGTERM."""
    return Program("server_0", lambda host, port: ["sleep", "600"], {}, folder, 0.5)


@pytest.mark.slow
def test_the_place_of_a_server_is_not_lost_with_an_error_of_ray(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = PlacementRequest("server_0", 1, WorkerResources(gpus=2))
    before = RayRun(request, START_S, endless(tmp_path), None)
    wait_until(lambda: before.began, START_S)
    before.end()
    with monkeypatch.context() as patch:
        error = RpcError("Ray is away")
        patch.setattr(Placement, "is_sound", Mock(side_effect=error))
        after = RayRun(request, START_S, endless(tmp_path), before)
        wait_until(lambda: after.began or after.problem(), START_S)
    assert after.problem() is None
    after.end()
    after.release()
    wait_until(lambda: ray.available_resources().get("GPU") == 2)


def test_only_what_is_left_on_the_same_node_is_ended(local_ray: None, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as left:
        group = ProcessId.of(left.pid)
        here = ray.get_runtime_context().get_node_id()
        for node, is_ended in (("another", False), (here, True)):
            host = _Host(endless(tmp_path), os.getcwd(), True, _Left(group, node))
            host.destroy()
            assert group.alive() is not is_ended


class EndedRun(Run):
    """A run that ends at once."""

    def problem(self) -> str | None:
        return "it ended"

    def end(self) -> None:
        pass

    def pid(self) -> int | None:
        return None

    def release(self) -> None:
        pass


@pytest.mark.parametrize("lost_node", [True, False])
def test_an_end_counts_as_a_restart_unless_the_node_was_lost(
    tmp_path: Path, lost_node: bool
) -> None:
    run = EndedRun()
    run.lost_node = lost_node
    spec = ServerSpec("vllm", "/model")
    limits = WatchLimits(max_restarts=0)
    server = WatchedServer(0, spec, tmp_path, limits, lambda program, before: run)
    server.step(hold=False)
    server.step(hold=False)
    assert server.error == "it ended"
    assert server.state is (ProcessState.WAITING if lost_node else ProcessState.FAILED)


@pytest.mark.slow
def test_servers_have_their_own_gpus_if_ray_sets_no_variable(
    local_ray: None, tmp_path: Path
) -> None:
    groups = [
        WorkerGroup(
            _Host,
            args=(endless(tmp_path), str(tmp_path), True, None),
            resources=WorkerResources(gpus=1),
            process_group=False,
            env={"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"},
        )
        for _ in range(2)
    ]
    seen: list[str] = []
    for group in groups:
        pid = group.call(0, "watch", 0.2).pid
        seen.append(environment_of(pid)["CUDA_VISIBLE_DEVICES"])
        group.shutdown()
    assert sorted(seen) == ["0", "1"]


@pytest.mark.slow
def test_an_environment_without_the_server_is_an_error_on_ray(
    local_ray: None, tmp_path: Path
) -> None:
    spec = ServerSpec("vllm", "/model", python="/nowhere/python")
    with (
        RayServers(spec, 1, tmp_path / "servers", limits=quick_limits()) as servers,
        pytest.raises(ConfigError, match="there is no program /nowhere/python"),
    ):
        servers.wait_until_up(stretched(START_S))


def test_gpus_that_are_not_those_of_the_spec_are_refused(tmp_path: Path) -> None:
    spec = ServerSpec("vllm", "/model", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"resources has 1 GPUs, and a server takes 2"):
        RayServers(spec, 1, tmp_path, WorkerResources(gpus=1))


def test_servers_need_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # the modules share it
    with pytest.raises(ConfigError, match="Ray is not initialised"):
        RayServers(ServerSpec("vllm", "/model"), 1, tmp_path).start()


# Several nodes


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    """The driver's node without GPUs, and two nodes with one each."""
    with cluster_of(1) as cluster:
        for _ in range(2):
            cluster.add_node(**NODE, num_gpus=1)
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=worker_environment(),
        )
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """The same nodes again, whatever tests have done to them."""
    while len(started.worker_nodes) < 2:
        started.add_node(**NODE, num_gpus=1)
    return started


def stay_up(fleet: ServerFleet, seen: list[set[int]]) -> None:
    """Sample from the fleet, as a run does while one of its servers is gone."""
    servers = fleet.serving()
    assert servers, "the run stands still"
    response = asyncio.run(servers[0].agenerate(REQUEST))
    seen.append(set(response.output_versions))


def lose_node(cluster: Cluster, node: Any) -> None:
    kill_node(cluster, node)


def drain_node(cluster: Cluster, node: Any) -> None:
    control = ray.get_runtime_context().worker.gcs_client
    by_ms = int((time.time() + 300) * 1000)
    assert control.drain_node(node.node_id, DRAINED_FOR_PREEMPTION, "reclaimed", by_ms)[0]


@pytest.mark.slow
@pytest.mark.parametrize("strike", [lose_node, drain_node])
def test_a_server_moves_to_another_node_and_the_run_goes_on(
    cluster: Cluster, tmp_path: Path, strike: Callable[[Cluster, Any], None]
) -> None:
    with (
        launched(tmp_path, 2) as servers,
        closing(ServerFleet(servers, probe_interval_s=0.1)) as fleet,
    ):
        fleet.update(write_published(tmp_path / "weights", 1), 1, LIMIT_S)
        wait_until(lambda: len(fleet.serving()) == 2)
        pid = servers.pids()["server_1"]
        lost = servers._servers[1].client
        node = node_of(cluster, actor_of(pid))
        processes = processes_of_group(os.getpgid(pid))
        assert node is not node_of(cluster, actor_of(servers.pids()["server_0"]))
        assert lost is not None and "//127.0.0.1:" not in lost.url, (
            "a node on another host may join"
        )

        # There is no room for it yet. The other server goes on.
        strike(cluster, node)
        wait_until(lambda: lost not in fleet.serving(), START_S)
        wait_until(lambda: not any(one.alive() for one in processes))
        seen: list[set[int]] = []
        stay_up(fleet, seen)
        fleet.update(write_published(tmp_path / "weights", 2), 2, LIMIT_S)
        stay_up(fleet, seen)
        assert seen == [{1}, {2}]

        # A node comes.
        added = cluster.add_node(**NODE, num_gpus=1)
        wait_until(lambda: len(fleet.serving()) == 2, START_S)
        wait_until(lambda: len(servers.pids()) == 2)
        assert node_of(cluster, actor_of(servers.pids()["server_1"])) is added
        response = asyncio.run(fleet.serving()[1].agenerate(REQUEST))
        assert set(response.output_versions) == {2}
        assert servers.stats()["servers_restarted"] >= 1
        assert list(servers._servers[1]._ends) == [], "it has used up restarts"
        if strike is drain_node:
            cluster.remove_node(node, allow_graceful=False)


@pytest.mark.slow
def test_a_start_without_room_on_a_node_ends_after_its_time_limit(
    cluster: Cluster, tmp_path: Path
) -> None:
    limits = WatchLimits(start_timeout_s=3.0, stop_timeout_s=0.5)
    spec = stand_in_spec(tmp_path, tensor_parallel_size=2)
    with (
        RayServers(spec, 1, tmp_path / "servers", limits=limits) as servers,
        pytest.raises(
            ConfigError, match=r"needs 1 x {'CPU': 1, 'GPU': 2}.*'GPU': 2.0}, room for 0"
        ),
    ):
        servers.wait_until_up(stretched(START_S))


@pytest.mark.slow
@pytest.mark.parametrize("when", ["ready", "starting"])
@pytest.mark.parametrize("where", ["local", "cluster"])
def test_nothing_is_left_of_servers_on_ray_whose_driver_is_killed(
    request: pytest.FixtureRequest, tmp_path: Path, where: str, when: str
) -> None:
    address = "local"
    if where == "cluster":
        address = request.getfixturevalue("cluster").address
    if when == "starting":
        (tmp_path / "starting").touch()
    command = [sys.executable, "-m", "tests.engine.launch.ray_driver", address, str(tmp_path)]
    with (
        open(tmp_path / "stderr", "w") as log,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
        ) as driver,
    ):
        assert driver.stdout is not None
        words = driver.stdout.readline().split()
        assert len(words) == 2, (tmp_path / "stderr").read_text()
        left: list[ProcessId] = []
        for word in words:
            left += processes_of_group(os.getpgid(int(word)))
            left.append(ProcessId.of(actor_of(int(word))))
        assert len(left) >= 6 and all(one.alive() for one in left)
        driver.kill()
        killed = time.monotonic()
        wait_until(lambda: not any(one.alive() for one in left), 15.0)
        print(f"nothing is left {time.monotonic() - killed:.1f} s after the kill")
