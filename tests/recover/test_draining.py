"""Ray's drain notice, on a cluster of two real nodes."""

import logging
import os
import signal
import time
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from holdfast.engine.workers.nodes import draining_nodes
from holdfast.engine.workers.placement import WorkerResources
from holdfast.recover.supervisor import Attempt, Supervisor
from holdfast.recover.triggers import StopNotice
from tests.limits import stretched, wait_until
from tests.ray_helpers import SMALLEST_STORE_BYTES, Server, worker_environment

pytestmark = pytest.mark.timeout(180)

PREEMPTION = 2
"""DRAIN_NODE_REASON_PREEMPTION in Ray's autoscaler.proto, which Ray may not refuse."""
DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Nodes ``driver``, ``a`` and ``b``, each with a resource of the same name."""
    ray.shutdown()  # the Ray that the modules share
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster()
    for name in ("driver", "a", "b"):
        cluster.add_node(num_cpus=1, object_store_memory=SMALLEST_STORE_BYTES, resources={name: 1})
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env=worker_environment(),
    )
    # A drained node is removed once it is idle, and with the driver's node this process too. These
    # actors keep the two nodes busy until the end.
    strangers = [
        ray.remote(num_cpus=0, resources={name: 1})(Server).remote() for name in ("driver", "b")
    ]
    assert ray.get([stranger.update_weights_from_disk.remote("", 1) for stranger in strangers]) == [
        1,
        1,
    ]
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def drain(node_id: str, deadline_s: float | None) -> float:
    """Drain a node like ``ray drain-node``. Returns the unix time of the deadline, 0 without
    one.
    """
    by_ms = 0 if deadline_s is None else int((time.time() + deadline_s) * 1000)
    control = ray.get_runtime_context().worker.gcs_client
    assert control.drain_node(node_id, PREEMPTION, "spot instance reclaimed", by_ms)[0]
    return by_ms / 1000


@pytest.mark.slow
def test_only_notices_of_nodes_with_a_worker_or_the_driver_count(cluster: Cluster) -> None:
    (node_b,) = (node["NodeID"] for node in ray.nodes() if "b" in node["Resources"])

    def job(attempt: Attempt) -> None:
        on_a = WorkerResources(custom={"a": 1})
        rollout = attempt.worker_group(Server, name="rollout", process_group=False, resources=on_a)
        (node_a,) = rollout.node_ids()
        assert attempt.draining() is None
        drain(node_b, None)
        assert node_b in draining_nodes()
        assert attempt.draining() is None, "nothing of this attempt runs there"

        by = drain(node_a, DEADLINE_S)
        assert attempt.draining() == StopNotice(f"Ray drains node(s) {node_a}", by)
        assert rollout.call(0, "update_weights_from_disk", "", 2) == 2, (
            "until the deadline the worker works"
        )

        own = ray.get_runtime_context().get_node_id()
        drain(own, None)
        notice = attempt.draining()
        assert notice is not None and notice.by == by
        assert own in notice.reason and node_a in notice.reason

    Supervisor().run(job)


@pytest.mark.slow
def test_a_node_that_is_drained_delays_neither_a_restart_nor_the_end(cluster: Cluster) -> None:
    """Tasks that look at its processes are refused, and the leases of its ranks last a minute."""
    for name in ("c", "d"):
        cluster.add_node(num_cpus=1, object_store_memory=SMALLEST_STORE_BYTES, resources={name: 1})
    returned: list[float] = []

    def job(attempt: Attempt) -> None:
        place = WorkerResources(custom={"cd"[attempt.number]: 1})
        group = attempt.worker_group(
            Server, name=f"rollout {attempt.number}", process_group=False, resources=place
        )
        assert group.call(0, "update_weights_from_disk", "", 2) == 2
        wait_until(group._lease_ends)
        (node,) = group.node_ids()
        drain(node, DEADLINE_S)
        if attempt.number == 0:
            os.kill(group.pids()[0], signal.SIGKILL)
            group.call(0, "update_weights_from_disk", "", 3)
        returned.append(time.monotonic())

    supervisor = Supervisor()
    supervisor.run(job)
    assert time.monotonic() - returned[0] < stretched(30)
    (loss,) = supervisor.events
    assert loss.torn_down_s < stretched(30)


@pytest.mark.slow
def test_a_ray_that_cannot_tell_has_no_notices(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    assert cluster.head_node is not None
    control = cluster.head_node.all_processes["gcs_server"][0].process
    os.kill(control.pid, signal.SIGSTOP)
    begun = time.monotonic()
    assert draining_nodes(timeout_s=0.5) == {}
    assert time.monotonic() - begun < stretched(5)
    assert "could not say which nodes are drained" in caplog.text
    os.kill(control.pid, signal.SIGCONT)
