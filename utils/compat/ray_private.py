"""What Ray keeps to itself: the nodes that it was told to drain, what is free on each node, and who started it."""

from collections.abc import Mapping

import ray
import ray._private.node
import ray._private.state
import ray._private.worker

from . import Private, require

_LOCAL = "know that no node will join a Ray that this process has started"

NAMES = (
    Private("ray._private.state:available_resources_per_node", "say what is free on each node", ()),
    Private("ray._private.worker:_global_node", _LOCAL),
    Private("ray._private.node:Node.is_head", _LOCAL, ()),
)

require("ray", NAMES)


def draining_deadlines(timeout_s: float) -> Mapping[str, int] | None:
    """Node id -> unix time in ms when it will be gone, 0 when nobody said; None when this Ray does not tell.

    That is no error at import, unlike what else is needed here: a run goes on without such notices.

    Raises:
        RayError: Ray did not answer in ``timeout_s``.
    """
    control = getattr(ray.get_runtime_context().worker, "gcs_client", None)
    ask = getattr(control, "get_draining_nodes", None)
    return None if ask is None else ask(timeout=timeout_s)


def free_by_node() -> Mapping[str, Mapping[str, float]]:
    """Node id -> resources that nothing has reserved there, as of a moment ago."""
    return ray._private.state.available_resources_per_node()


def started_here() -> bool:
    """Whether this process has started the cluster, as ``ray.init(address="local")`` does: then no node joins it."""
    node = ray._private.worker._global_node
    return node is not None and node.is_head()
