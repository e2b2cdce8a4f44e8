"""Nodes of the cluster: which of them can be given work, and tasks on several nodes.

Ray takes 15 s or more to notice a dead node: its control process checks every raylet (the process
that represents a node) every 3 s and believes the fifth failure. Until then Ray places ranks there,
and they fail. So this module contacts the raylets itself before something is placed or ended. A
raylet is a gRPC server, which answers an HTTP/2 greeting:

- A refused connection: the raylet has ended, and so have its workers, which the kernel kills with
  their parent (see `RankActor`).
- Silence: the raylet is stopped, or the node is cut off or without power. Its workers may still
  run.
"""

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import cache
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...utils.compat.ray_private import draining_deadlines
from ...utils.logging import get_logger
from .rank_answers import headline

PROBE_S = 2.0
"""Seconds after which the node of an unanswering raylet counts as silent. A healthy raylet takes a
millisecond.
"""
PROBES_AT_A_TIME = 64
"""Number of raylets contacted in parallel."""
_NODES_EVERY_S = 1.0  # seconds between checks for dead nodes while waiting for their tasks
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""First bytes of an HTTP/2 client: the preface and an empty SETTINGS frame (RFC 9113, 3.4)."""

logger = get_logger(__name__)


class Raylet(Enum):
    """Result of contacting a raylet."""

    WELL = "answers"
    ENDED = "nobody listens at its raylet's port"
    SILENT = f"its raylet does not answer within {PROBE_S:g} s"


def ask_raylets(nodes: Iterable[str]) -> dict[str, Raylet]:
    """Contact the raylet of each of ``nodes`` (Ray's names), even if Ray says that a node is dead."""
    if not (wanted := set(nodes)):
        return {}
    found = {node["NodeID"]: node for node in ray.nodes() if node["NodeID"] in wanted}
    with ThreadPoolExecutor(PROBES_AT_A_TIME) as pool:
        return dict(zip(found, pool.map(_ask, found.values()), strict=True))


def ended_nodes(nodes: Iterable[str]) -> set[str]:
    """The nodes whose raylet has ended with its workers, which Ray reports two seconds later. Empty
    if Ray is away.
    """
    try:
        return {node for node, state in ask_raylets(nodes).items() if state is Raylet.ENDED}
    except (
        RayError,
        RuntimeError,
    ) as error:  # RuntimeError: the interpreter is ending and starts no threads
        logger.warning("the nodes could not be asked whether they have ended: %s", headline(error))
        return set()


def _ask(node: Mapping[str, Any]) -> Raylet:
    address = node["NodeManagerAddress"], node["NodeManagerPort"]
    for _ in range(2):  # a raylet that is ending resets the first connection and refuses the second
        try:
            with socket.create_connection(address, PROBE_S) as connection:
                connection.sendall(_GREETING)
                connection.recv(1)  # with TLS the answer is empty
            return Raylet.WELL
        except ConnectionRefusedError:
            return Raylet.ENDED
        except (ConnectionResetError, BrokenPipeError):
            continue
        except OSError:  # a timeout, or no route
            return Raylet.SILENT
    return Raylet.WELL


def nodes_to_avoid() -> dict[str, str]:
    """Nodes that Ray considers alive but that must get no work: node -> reason. Takes milliseconds
    if all are well.
    """
    alive = alive_nodes()
    states = ask_raylets(alive)
    avoided = {node: state.value for node, state in states.items() if state is not Raylet.WELL}
    return avoided | {node: "it is being drained" for node in draining_nodes() if node in alive}


def alive_nodes() -> dict[str, Mapping[str, float]]:
    """Resources of the nodes that Ray considers alive, by Ray's name."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def draining_nodes(timeout_s: float = 2.0) -> dict[str, float | None]:
    """Nodes that Ray is draining: node id -> unix time of their end, None if unknown. Empty if Ray
    cannot say.
    """
    try:
        deadlines = draining_deadlines(timeout_s)
    except RayError as error:
        logger.warning("Ray could not say which nodes are drained: %s", headline(error))
        return {}
    if deadlines is None:
        _warn_of_no_drain_notices()
        return {}
    return {node: end_ms / 1000 or None for node, end_ms in deadlines.items()}


@cache
def _warn_of_no_drain_notices() -> None:
    logger.warning(
        "Ray %s does not say which nodes are drained; its notices will not stop the run",
        ray.__version__,
    )


class NodeTasks:
    """One call of ``fn`` on each of several nodes, in tasks without resources. ``args`` are by
    Ray's name of a node.
    """

    def __init__(self, fn: Callable[..., Any], args: Mapping[str, tuple]) -> None:
        self._refs: dict[Any, str] = {}
        for node, given in args.items():
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=place)(fn)  # type: ignore[call-overload]
            self._refs[task.remote(*given)] = node

    def collect(self, limits_s: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, str]]:
        """Answers by node, each within its limit, and for each node without an answer the reason."""
        answers, silent, began = {}, {}, time.monotonic()
        while self._refs:
            silent |= self._drop_dead()
            waited_s = time.monotonic() - began
            for ref, node in list(self._refs.items()):
                if waited_s >= limits_s[node]:
                    silent[self._refs.pop(ref)] = f"no answer within {limits_s[node]:.0f} s"
            ready, _ = ray.wait(
                list(self._refs), num_returns=len(self._refs), timeout=_NODES_EVERY_S
            )
            for ref in ready:
                node = self._refs.pop(ref)
                try:
                    answers[node] = ray.get(ref)
                except RayError as error:
                    silent[node] = headline(error)
        return answers, silent

    def _drop_dead(self) -> dict[str, str]:
        alive, states, dead = alive_nodes(), ask_raylets(self._refs.values()), {}
        for ref, node in list(self._refs.items()):
            if node not in alive or states.get(node) is Raylet.ENDED:
                dead[self._refs.pop(ref)] = (
                    "Ray says that it is dead" if node not in alive else Raylet.ENDED.value
                )
        return dead
