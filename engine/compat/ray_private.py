"""What Ray keeps to itself: the nodes that it was told to drain, which it shows only to its own Serve and Train."""

from collections.abc import Mapping

import ray


def draining_deadlines(timeout_s: float) -> Mapping[str, int] | None:
    """Node id -> unix time in ms when it will be gone, 0 when nobody said; None when this Ray does not tell.

    That is no error at import, unlike what the other files here need: a run goes on without such notices.

    Raises:
        RayError: Ray did not answer in ``timeout_s``.
    """
    control = getattr(ray.get_runtime_context().worker, "gcs_client", None)
    ask = getattr(control, "get_draining_nodes", None)
    return None if ask is None else ask(timeout=timeout_s)
