"""Ray clusters of several nodes on this machine, each with its own raylet that can be killed,
stopped or joined.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

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
