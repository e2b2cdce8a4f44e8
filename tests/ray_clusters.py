"""Ray clusters of several nodes on this machine, each with its own raylet that can be killed,
stopped or joined.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from tests.limits import stretched
from tests.ray_helpers import SMALLEST_STORE_BYTES

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": SMALLEST_STORE_BYTES}


@contextlib.contextmanager
def cluster_of(n_nodes: int, **head: Any) -> Iterator[Cluster]:
    """A head and further nodes, ``n_nodes`` together, each with one CPU. A driver connects to the
    head.
    """
    ray.shutdown()  # the Ray that the modules share
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(
        initialize_head=True, head_node_args={**NODE, "include_dashboard": False, **head}
    )
    try:
        for _ in range(n_nodes - 1):
            cluster.add_node(**NODE)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


_RAY = str(Path(sys.executable).with_name("ray"))
_HEAD, _OTHER = "127.0.0.2", "127.0.0.3"  # Ray replaces 127.0.0.1 by the address of a network card


@contextlib.contextmanager
def started_cluster(log: Path, cpus: int) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Two nodes that ``ray start --block`` has started, as a job script does. Yields the address of
    the head, and the process of each node, which ends its node at SIGTERM.
    """
    with socket.create_server((_HEAD, 0)) as probe:
        address = f"{_HEAD}:{probe.getsockname()[1]}"
    options = [f"--num-cpus={cpus}", f"--object-store-memory={SMALLEST_STORE_BYTES}", "--block"]
    options += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    head = ["--head", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false"]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        with open(log, "ab") as output:
            for host, role in ((_HEAD, head), (_OTHER, [f"--address={address}"])):
                node = subprocess.Popen(
                    [_RAY, "start", *role, f"--node-ip-address={host}", *options],
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                nodes.append(node)
                _wait_for_head(address, log)
        yield address, nodes
    finally:
        # SIGTERM, because a killed ``ray start`` leaves its node behind. It drains for up to 30 s.
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(stretched(60))


def _wait_for_head(address: str, log: Path) -> None:
    end = time.monotonic() + stretched(60)
    while subprocess.run([_RAY, "health-check", "--address", address]).returncode != 0:
        assert time.monotonic() < end, log.read_text()


def raylet_pid(node: Any) -> int:
    """Process id of the raylet of a node of a `Cluster`."""
    return node.all_processes["raylet"][0].process.pid


def node_of(cluster: Cluster, pid: int) -> Any:
    """The node whose raylet has started the process ``pid``."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    (node,) = (node for node in cluster.list_all_nodes() if raylet_pid(node) == parent)
    return node


def kill_node(cluster: Cluster, node: Any) -> None:
    """SIGKILL every process of a node, like a power cut of its machine (but the kernel lives
    on).
    """
    cluster.remove_node(node, allow_graceful=False)


def stop_raylet(node: Any) -> None:
    """SIGSTOP the raylet of a node: Ray loses contact with the node, while its workers go on."""
    os.kill(raylet_pid(node), signal.SIGSTOP)
