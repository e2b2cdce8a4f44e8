"""`RayServers`: inference servers in a Ray cluster, each in an actor that Ray places.

Each start of a server is a `WorkerGroup` of one rank, watched by a thread of this process. The rank
starts the server on its node, as `ServerProcesses` does here. So a server ends with its actor, the
actor with this process, and on a node that is cut off when its lease ends.

A server keeps its place in the cluster over restarts, unless its node is lost or drained. Then it
is placed again, and the other servers go on meanwhile.
"""

import math
import os
import threading
import time
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ...utils.compat.ray_private import started_here
from ...utils.errors import ConfigError, WorkerLost
from ...utils.files import StrPath
from ...utils.logging import get_logger
from ...utils.processes import ProcessId
from ...utils.threads import on_daemon_thread
from ..workers.group import WorkerGroup
from ..workers.nodes import are_well, draining_nodes, own_address, own_gpus, own_node
from ..workers.placement import Placement, PlacementRequest, WorkerResources, place
from ..workers.rank_answers import require_ray
from .keeper import ServerKeeper
from .program import LocalRun, Program, Run, end_left_group
from .spec import ServerSpec
from .watched import WatchedServer, WatchLimits

logger = get_logger(__name__)

_LOOK_S = 1.0
"""Seconds between two looks at the node of a server, and longest delay of its end."""
_BUILD_S = 60.0


class RayServers(ServerKeeper):
    """Inference servers that Ray places. A `ServerSource` and a context manager.

        spec = ServerSpec("vllm", "/models/base", tensor_parallel_size=2)
        with RayServers(spec, 4, "/shared/runs/exp/trial/servers") as servers:
            fleet = ServerFleet(servers)

    The driver creates it, after ``ray.init()``. The servers outlive the attempts of a `Supervisor`.

    Args:
        spec: how to start a server, on any node.
        count: number of servers.
        folder: see `ServerProcesses`. On a disk that not all nodes share, the logs are on the node
            of the server.
        resources: resources of a server. None: one CPU, and ``tensor_parallel_size`` GPUs.
        min_servers: the run ends if fewer servers are not failed.
        limits: when a server is restarted and given up. At its first start it may also wait
            ``start_timeout_s`` for its resources, and later without limit.

    Raises:
        ConfigError: the GPUs are not those of ``spec``, or a value is out of range.
    """

    def __init__(
        self,
        spec: ServerSpec,
        count: int,
        folder: StrPath,
        resources: WorkerResources | None = None,
        min_servers: int = 1,
        limits: WatchLimits = WatchLimits(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(spec, count, folder, min_servers)
        gpus = spec.tensor_parallel_size if spec.device == "cuda" else 0
        resources = resources or WorkerResources(gpus=gpus)
        if resources.gpus != gpus:
            raise ConfigError(
                f"resources has {resources.gpus:g} GPUs, and a server takes {gpus} "
                f"(tensor_parallel_size on {spec.device}); give it as many"
            )
        for number in range(count):
            request = PlacementRequest(f"server_{number}", 1, resources)
            launch = partial(RayRun, request, limits.start_timeout_s)
            server = WatchedServer(number, spec, self._own_folder, limits, launch)
            self._servers.append(server)
        self._processes += self._servers

    def start(self) -> None:
        """Place and start all servers, and return at once.

        Raises:
            ConfigError: see `ServerProcesses.start`, or Ray is not initialised.
        """
        require_ray()
        super().start()


class RayRun(Run):
    """One start of a program in the place of the run before, or in a new one."""

    def __init__(
        self,
        request: PlacementRequest,
        place_timeout_s: float,
        program: Program,
        before: Run | None,
    ) -> None:
        self._request = request
        self._place_timeout_s = place_timeout_s
        self._program = program
        self._placement: Placement | None = None
        self._left: _Left | None = None
        self._pid: int | None = None
        self._tail = ""
        self._problem: str | None = None
        self._stop = threading.Event()
        self._ended = on_daemon_thread(partial(self._watch, before), program.name)

    def problem(self) -> str | None:
        """See `Run`. Also the error of its place or its actor."""
        if self._problem is None and self._ended.done():
            error = self._ended.exception()
            self.blameless = isinstance(error, WorkerLost)
            self._problem = "it was ended" if error is None else str(error)
        return self._problem

    def end(self) -> None:
        """See `Run`. Its place stays for the next run."""
        self._stop.set()
        wait([self._ended], self._program.end_timeout_s + 2 * _LOOK_S)
        # Its node may be cut off, until its lease ends. Nobody waits for that.
        if not self._ended.done():
            self._ended.add_done_callback(lambda _: self.release())

    def pid(self) -> int | None:
        """See `Run`."""
        if self._problem is not None or self._ended.done():
            return None
        return self._pid

    def log_tail(self) -> str:
        """See `Run`. Without an answer of the actor, the log is read as a file."""
        return self._tail or super().log_tail()

    def release(self) -> None:
        """Give the place back to Ray."""
        placement = self._placement
        self._placement = None
        if placement is not None:
            placement.remove()

    # On the thread of this run

    def _watch(self, before: Run | None) -> None:
        left = self._place(before)
        group = WorkerGroup(
            _Host,
            args=(self._program, os.getcwd(), started_here(), left),
            name=self._request.name,
            placement=self._placement,
            resources=self._request.resources,
            process_group=False,
            build_timeout_s=_BUILD_S,
            stall_timeout_s=None,
        )
        try:
            self.url, self.log, self._left = group.call(0, "describe")
            self.began = time.monotonic()
            while self._problem is None and not self._stop.is_set():
                look: _Look = group.call(0, "watch", _LOOK_S)
                self._pid = look.pid
                self._tail = look.log_tail
                self._problem = look.problem
                drained = group.node_ids() & draining_nodes().keys()
                if drained and self._problem is None:
                    self.blameless = True
                    self.lost_node = True
                    self._problem = f"node {min(drained)} is being drained"
        except WorkerLost:
            self.lost_node = self.began is not None and not are_well(group.node_ids())
            raise
        finally:
            group.shutdown(self._program.end_timeout_s)

    def _place(self, before: Run | None) -> "_Left | None":
        """Take the place of the run before, and return what may be left there, or a new place."""
        if isinstance(before, RayRun) and before._ended.done():
            self._placement = before._placement
            before._placement = None
            if self._is_sound():
                return before._left
            self.release()

        # The others go on, so a node that was lost may be replaced at any time.
        timeout_s = self._place_timeout_s if before is None else math.inf
        self._placement = place(self._request, timeout_s, stop=self._stop)
        return None

    def _is_sound(self) -> bool:
        try:
            return self._placement is not None and self._placement.is_sound()
        except Exception as error:
            logger.warning("%s gets another place: %r", self._request.name, error)
            return False


class _Left(NamedTuple):
    """Process group of a program, and Ray's name of its node."""

    group: ProcessId
    node: str


class _Look(NamedTuple):
    """Process id of a program, and why it does not run any more, with the end of its log."""

    pid: int | None
    problem: str | None = None
    log_tail: str = ""


class _Host:
    """The worker that runs a program on its node.

    Args:
        program: the program.
        folder: working folder of the driver, for relative paths, if this node has it.
        is_local: whether the driver started the cluster, which no other host can join.
        left: an earlier run, of which something may be left if it was on this node.
    """

    def __init__(self, program: Program, folder: str, is_local: bool, left: _Left | None) -> None:
        self._node = own_node()
        if left is not None and left.node == self._node:
            end_left_group(left.group)
        with suppress(OSError):
            os.chdir(folder)
        host = "127.0.0.1" if is_local else own_address()

        # Ray may be told to leave the variable alone. Then all servers would take the first GPUs.
        gpus = own_gpus()
        if gpus:
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
            program = replace(program, variables={**program.variables, **visible})
        self._run = LocalRun(program, host, sheltered=True)

    def describe(self) -> tuple[str, Path | None, _Left]:
        """URL, log, and the processes, for the case that nobody can end them."""
        return self._run.url, self._run.log, _Left(self._run.group, self._node)

    def watch(self, timeout_s: float) -> _Look:
        """Return as soon as the program does not run any more, or after ``timeout_s``."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            problem = self._run.problem()
            if problem is not None:
                return _Look(None, problem, self._run.log_tail())
            time.sleep(_LOOK_S / 10)
        return _Look(self._run.pid())

    def destroy(self) -> None:
        """End the program."""
        self._run.end()
