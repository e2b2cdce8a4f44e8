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
# seconds between checks for dead nodes while waiting for their tasks
_NODES_EVERY_S = 1.0
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""First bytes of an HTTP/2 client: the preface and an empty SETTINGS frame (RFC 9113, 3.4)."""

logger = get_logger(__name__)


class Raylet(Enum):
    """Result of contacting a raylet."""

    WELL = "answers"
    ENDED = "nobody listens at its raylet's port"
    SILENT = f"its raylet does not answer within {PROBE_S:g} s"


def ask_raylets(nodes: Iterable[str]) -> dict[str, Raylet]:
    """Contact the raylet of each of ``nodes`` (Ray's names), even if Ray says that it is dead."""
    wanted = set(nodes)
    if not wanted:
        return {}
    found = [node for node in ray.nodes() if node["NodeID"] in wanted]
    names = [node["NodeID"] for node in found]
    with ThreadPoolExecutor(PROBES_AT_A_TIME) as pool:
        states = pool.map(_ask, found)
        return dict(zip(names, states, strict=True))


def ended_nodes(nodes: Iterable[str]) -> set[str]:
    """The nodes whose raylet has ended with its workers, which Ray reports two seconds later. Empty
    if Ray is away.
    """
    try:
        states = ask_raylets(nodes)
    except (RayError, RuntimeError) as error:
        # RuntimeError: the interpreter is ending and starts no threads.
        logger.warning("the nodes could not be asked whether they have ended: %s", headline(error))
        return set()
    return {node for node, state in states.items() if state is Raylet.ENDED}


def are_well(nodes: Iterable[str]) -> bool:
    """Whether all these nodes answer. True if Ray is away."""
    try:
        states = ask_raylets(nodes)
    except (RayError, RuntimeError) as error:
        logger.warning("the nodes could not be asked whether they answer: %s", headline(error))
        return True
    return all(state is Raylet.WELL for state in states.values())


def _ask(node: Mapping[str, Any]) -> Raylet:
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    # A raylet that is ending resets the first connection and refuses the second.
    for _ in range(2):
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
    avoided: dict[str, str] = {}
    for node, state in ask_raylets(alive).items():
        if state is not Raylet.WELL:
            avoided[node] = state.value
    for node in draining_nodes():
        if node in alive:
            avoided[node] = "it is being drained"
    return avoided


def alive_nodes() -> dict[str, Mapping[str, float]]:
    """Resources of the nodes that Ray considers alive, by Ray's name."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def own_address() -> str:
    """Address of the node that this process runs on."""
    return ray.util.get_node_ip_address()


def own_node() -> str:
    """Ray's name of the node that this process runs on."""
    return ray.get_runtime_context().get_node_id()


def own_gpus() -> list[str]:
    """Ids of the GPUs that Ray gave this actor, as in CUDA_VISIBLE_DEVICES."""
    return [str(gpu) for gpu in ray.get_gpu_ids()]


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
    # A deadline of 0 is one that Ray does not know.
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
            place: Any = NodeAffinitySchedulingStrategy(node, soft=False)
            remote: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=place)
            ref = remote(fn).remote(*given)
            self._refs[ref] = node

    def collect(self, limits_s: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, str]]:
        """Answers by node, each within its limit, and the reason for each that is missing."""
        answers: dict[str, Any] = {}
        silent: dict[str, str] = {}
        began = time.monotonic()
        while self._refs:
            silent |= self._drop_dead()

            # A node whose time is over is not waited for.
            waited_s = time.monotonic() - began
            for ref, node in list(self._refs.items()):
                limit_s = limits_s[node]
                if waited_s >= limit_s:
                    del self._refs[ref]
                    silent[node] = f"no answer within {limit_s:.0f} s"

            refs = list(self._refs)
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_NODES_EVERY_S)
            for ref in ready:
                node = self._refs.pop(ref)
                try:
                    answers[node] = ray.get(ref)
                except RayError as error:
                    silent[node] = headline(error)
        return answers, silent

    def _drop_dead(self) -> dict[str, str]:
        alive = alive_nodes()
        states = ask_raylets(self._refs.values())
        dead: dict[str, str] = {}
        for ref, node in list(self._refs.items()):
            if node not in alive:
                dead[node] = "Ray says that it is dead"
            elif states.get(node) is Raylet.ENDED:
                dead[node] = Raylet.ENDED.value
            else:
                continue
            del self._refs[ref]
        return dead
