"""Private names of Ray: nodes that will be drained, free resources per node, and who started the
cluster.
"""

from collections.abc import Mapping

import ray
import ray._private.node
import ray._private.state
import ray._private.worker

from . import privates, require

NAMES = privates(
    {
        "say what is free on each node": ["ray._private.state:available_resources_per_node()"],
        "know that no node will join a Ray that this process has started": [
            "ray._private.worker:_global_node",
            "ray._private.node:Node.is_head()",
        ],
    }
)
require("ray", NAMES)


def draining_deadlines(timeout_s: float) -> Mapping[str, int] | None:
    """Return node id -> Unix time in ms of its removal (0 if unknown), or None if this version of
    Ray does not tell.

    Missing support is no error at import, because a run works without these notices.

    Raises:
        RayError: Ray did not answer in ``timeout_s``.
    """
    control = getattr(ray.get_runtime_context().worker, "gcs_client", None)
    ask = getattr(control, "get_draining_nodes", None)
    return None if ask is None else ask(timeout=timeout_s)


def free_by_node() -> Mapping[str, Mapping[str, float]]:
    """Return node id -> unreserved resources, as of a moment ago."""
    return ray._private.state.available_resources_per_node()


def started_here() -> bool:
    """Return whether this process started the cluster (``ray.init(address="local")``), which no
    other node can join.
    """
    node = ray._private.worker._global_node
    return node is not None and node.is_head()
