"""One Ray actor per rank on a placement group, called as one. The death of any rank is one
`WorkerLost`.

This file starts the ranks (rendezvous without a port race), calls a method on all of them, and
decides what a failure means:

- A process died, or missed the deadline: every survivor is killed, then `WorkerLost` is raised.
- A process is stopped, or makes no progress (an endless loop): the same. See `answers`.
- A collective timed out on some ranks: the ranks with a pending call hang, so the same.
- A rank raised another error: it is raised, ``from`` Ray's, which has the worker's traceback. gloo
  neighbours of a dead rank fail before Ray reports the death, so an error is believed only after
  `ERROR_GRACE_S`. Neighbours of a stopped rank fail when their collective times out, so ranks with
  a pending call are pinged then. If they are well (they wait in a collective for the failed rank),
  all are killed, because ranks out of step cannot continue. If every rank has answered, the group
  stays usable.

A call costs about a millisecond more than the method. Ray never restarts or repeats anything: a
repeated method could apply an update twice, and a restarted actor has no process group.
"""

import reprlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from ...utils.distributed import collective_broke
from ...utils.errors import ConfigError, WorkerLost
from ...utils.logging import get_logger
from ...utils.processes import ProcessId
from .actor import RankActor, RankProcess, Rendezvous
from .nodes import ended_nodes
from .placement import Placement, PlacementRequest, WorkerResources, place
from .rank_answers import (
    Answers,
    Patience,
    cause_of,
    culprit,
    headline,
    ping,
    raise_cause,
    require_ray,
    wait_watching,
)
from .remote_server import RemoteServer
from .termination import LeaseKeeper, end_on_nodes

__all__ = ["RemoteServer", "WorkerGroup", "WorkerResources"]

logger = get_logger(__name__)


class WorkerGroup:
    """``world_size`` copies of a worker class, each in its own process, called as one.

    Example::

        resources = WorkerResources(gpus=1)
        group = WorkerGroup(Trainer, args=(config,), world_size=8, resources=resources)
        stats = group.call_all("train_step", batch)
        group.shutdown()

    Every method may raise `WorkerLost`. After that the group is dead, and every later call raises
    it again at once. Several threads may each use their own group at the same time. A group is used
    by one thread at a time, with two
    exceptions: `run_in_background`, and `kill`, which also interrupts the start. A waiting call
    then raises `WorkerLost`.

    Attributes:
        name: name in errors and logs.
        world_size: number of ranks.
        placement: where the ranks run. Another group can be built on it once this one is dead.
        started_late: the group was lost because it did not start in time.
        stalled_s: seconds without progress of any rank for which the group was lost. 0.0 if it was
            not lost, or for another reason.
    """

    def __init__(
        self,
        worker_cls: Callable[..., Any],
        *misplaced: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        world_size: int = 1,
        name: str = "workers",
        placement: Placement | None = None,
        resources: WorkerResources | None = None,
        process_group: bool = True,
        process_group_timeout_s: float = 600.0,
        start_timeout_s: float = 120.0,
        build_timeout_s: float = 3600.0,
        hang_timeout_s: float | None = 60.0,
        stall_timeout_s: float | None = 1800.0,
        kill_timeout_s: float = 600.0,
        on_created: Callable[["WorkerGroup"], None] | None = None,
        env: Mapping[str, str] | None = None,
        **unknown: Any,
    ) -> None:
        """Start the ranks and construct ``worker_cls(*args, **kwargs)`` on each, inside the default
        process group.

        Args:
            worker_cls: class to construct on each rank. `shutdown` calls its optional
                ``destroy()``.
            args: positional arguments of ``worker_cls``, the same on every rank.
            kwargs: keyword arguments of ``worker_cls``, the same on every rank.
            world_size: number of ranks.
            name: name in errors and logs.
            placement: a bundle for each rank. None: created here, and removed by `shutdown`.
            resources: resources of each rank. None: one CPU. Ranks without GPUs get an empty
                CUDA_VISIBLE_DEVICES, unless ``env`` sets it, so that they compute on the CPU.
            process_group: join the ranks with torch.distributed (gloo, and nccl with GPUs). RANK,
                WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are set in either case.
            process_group_timeout_s: time limit for a collective.
            start_timeout_s: time limit for each of: placing the group, starting its processes, and
                their rendezvous.
            build_timeout_s: time limit for the constructors, which may load a large model.
            hang_timeout_s: a rank that does not answer a ping for this time is lost. A rank on
                another node that has not heard from this process for this time ends itself. None:
                no pings, no leases, and ``stall_timeout_s`` has no effect. Does not apply while the
                group starts.
            stall_timeout_s: if none of the ranks with a pending call has made progress for this
                time, they are lost. A longer call must call ``holdfast.utils.heartbeat.beat()`` now
                and then, as the engine does for every micro-batch. Without a process group
                computing is also progress (an hour of sampling is fine), but waiting, for example
                for a server, is not. None: no limit.
            kill_timeout_s: time limit for killed processes to disappear. SIGKILL waits until the
                kernel has freed pinned memory and GPU resources. Processes that take longer end the
                job.
            on_created: called with the group before its first process starts. An error in it ends
                the start.
            env: environment variables, set before the processes start.
            misplaced: must be empty, like ``unknown``. The error says how to pass arguments of
                ``worker_cls``.
            unknown: see ``misplaced``.

        Raises:
            ConfigError: an unknown argument, Ray is not initialised, or it can never provide the
                resources.
            ResourcesUnavailable: Ray did not provide the resources in time.
            WorkerLost: a rank died or did not start in time.
        """
        if misplaced or unknown:
            names = [f"{key}=..." for key in unknown]
            found = ", ".join([*map(reprlib.repr, misplaced), *names])
            raise ConfigError(
                f"a WorkerGroup takes no {found}; what the workers are constructed with goes "
                f"apart: WorkerGroup({getattr(worker_cls, '__name__', worker_cls)}, args=(...), "
                f"kwargs={{...}}, ...)"
            )
        require_ray()
        self.name = name
        self.world_size = world_size
        self.started_late = False
        self.stalled_s = 0.0
        self._resources = resources or WorkerResources()
        self._node_id = ray.get_runtime_context().get_node_id()
        self._owns_placement = placement is None
        if placement is None:
            request = PlacementRequest(name, world_size, self._resources)
            placement = place(request, start_timeout_s)
        self.placement = placement
        self._processes: list[RankProcess] = []
        self._actors: list[Any] = []
        self._loss: WorkerLost | None = None
        self._came_up = False
        self._closed = False
        # calls that are waiting or were interrupted
        self._n_calls = 0
        self._lock = threading.Lock()
        self._hang_timeout_s = hang_timeout_s
        self._kill_timeout_s = kill_timeout_s
        self._ended: set[ProcessId] = set()
        self._leases: LeaseKeeper | None = None
        # no pings yet: importing torch may hold the interpreter too long
        self._patience = Patience(None)

        try:
            if on_created is not None:
                on_created(self)
            self._start(process_group, process_group_timeout_s, start_timeout_s, dict(env or {}))

            built = {}
            for rank, actor in enumerate(self._actors):
                built[rank] = actor.build.remote(worker_cls, tuple(args), dict(kwargs or {}))
            self._gather("the constructor", built, build_timeout_s)
            self._patience = Patience(hang_timeout_s, stall_timeout_s)
            self._came_up = True

            # Ranks on this node end with its raylet, which ends with the driver. Others may be cut
            # off from both.
            elsewhere = {}
            for rank, at in enumerate(self._processes):
                if at.node_id != self._node_id:
                    elsewhere[rank] = self._actors[rank]
            if elsewhere and hang_timeout_s is not None:
                self._leases = LeaseKeeper(elsewhere, hang_timeout_s)
        except BaseException:
            self._close(at_end=False)
            raise

    def _create_actor(self, rank: int, env: dict[str, str]) -> Any:
        options: dict[str, Any] = {
            "num_cpus": self._resources.cpus,
            "num_gpus": self._resources.gpus,
            "resources": dict(self._resources.custom),
            # Ray restarts and repeats nothing, see the head of this file.
            "max_restarts": 0,
            "max_task_retries": 0,
            "concurrency_groups": {"health": 1, "background": 1},
            "scheduling_strategy": self.placement.slot(rank),
        }
        if env:
            options["runtime_env"] = {"env_vars": env}
        remote: Any = ray.remote(**options)
        return remote(RankActor).remote()

    def _start(
        self,
        process_group: bool,
        process_group_timeout_s: float,
        start_timeout_s: float,
        env: dict[str, str],
    ) -> None:
        began = time.monotonic()
        for rank in range(self.world_size):
            self._actors.append(self._create_actor(rank, env))
            # after the append, so that either `kill` sees the actor or this sees the kill
            self._check_usable()

        # Rank 0 serves the store of the process group, at a port that it reports.
        started = {}
        for rank, actor in enumerate(self._actors):
            started[rank] = actor.start.remote(process_group and rank == 0)
        answers = self._gather("its start", started, start_timeout_s)
        started_s = time.monotonic() - began
        self._processes = [process for process, _ in answers]
        rendezvous = None
        if process_group:
            host = self._processes[0].host
            _, port = answers[0]
            generation = f"{self.name}-{uuid.uuid4().hex[:8]}"
            rendezvous = Rendezvous(host, port, generation, process_group_timeout_s)

        # Ray does not hide GPUs from ranks without one.
        gpus = self._resources.gpus
        hidden = {}
        if not gpus and "CUDA_VISIBLE_DEVICES" not in env:
            hidden["CUDA_VISIBLE_DEVICES"] = ""

        # torchrun's variables. A rank with a GPU has the index of its GPU as local rank.
        threads = max(1, int(self._resources.cpus))
        nodes = [process.node_id for process in self._processes]
        joined = {}
        for rank, actor in enumerate(self._actors):
            node = nodes[rank]
            local_rank = self._processes[rank].device
            if local_rank is None:
                local_rank = nodes[:rank].count(node)
            variables = {
                **hidden,
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(nodes.count(node)),
            }
            joined[rank] = actor.join.remote(variables, threads, gpus, rendezvous)
        self._gather("the rendezvous", joined, start_timeout_s)
        joined_s = time.monotonic() - began - started_s
        logger.info(
            "worker group %r: started in %.2f s, rendezvous in %.2f s",
            self.name,
            started_s,
            joined_s,
        )

    def call_all(
        self,
        method: str,
        *args: Any,
        per_rank: Sequence[tuple] | None = None,
        deadline: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``worker.method(*args, *per_rank[rank], **kwargs)`` on every rank. Results are in
        rank order.

        Args:
            method: name of the worker's method.
            args: arguments that are the same on every rank.
            per_rank: further positional arguments, a tuple for each rank.
            deadline: seconds after which a rank without an answer is lost. None: wait while all
                live and answer pings.
            kwargs: keyword arguments that are the same on every rank.

        Raises:
            WorkerLost: a rank died or missed the deadline, or itself raised a `WorkerLost` of
                another group.
            Exception: the worker raised it. If several ranks failed, an error that is not just a
                `PeerError`. Or arguments of a rank could not be sent. If others had got theirs, the
                group is killed.
        """
        name = f"{method}()"

        def send(actor: Any, share: tuple) -> Any:
            return actor.call.remote(method, (*args, *share), kwargs)

        return self._gather(name, self._send(name, send, per_rank), deadline)

    def call(
        self, rank: int, method: str, *args: Any, deadline: float | None = None, **kwargs: Any
    ) -> Any:
        """Call ``worker.method(*args, **kwargs)`` on one rank. Raises like `call_all`."""
        self._check_usable()
        ref = self._actors[rank].call.remote(method, args, kwargs)
        (value,) = self._gather(f"{method}()", {rank: ref}, deadline)
        return value

    def run_all(
        self, fn: Callable[..., Any], *args: Any, per_rank: Sequence[tuple] | None = None
    ) -> list[Any]:
        """Call top-level ``fn(worker, *args, *per_rank[rank])`` on every rank, like `call_all`."""

        def send(actor: Any, share: tuple) -> Any:
            return actor.run.remote(fn, (*args, *share))

        return self._gather(_name(fn), self._send(_name(fn), send, per_rank), None)

    def run_in_background(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """`run_all` on a separate thread in every worker, while other calls continue.

        May be called from another thread, one at a time. Collectives in ``fn`` need their own
        process group. If the group is lost meanwhile, both callers get the error.
        """

        def send(actor: Any, _: tuple) -> Any:
            return actor.run.options(concurrency_group="background").remote(fn, args)

        return self._gather(_name(fn), self._send(_name(fn), send, None), None)

    def ping(self, timeout_s: float = 1.0) -> list[int]:
        """Ranks that are dead or do not answer in time. A busy worker does not delay the answer."""
        answered = ping(dict(enumerate(self._actors)), timeout_s)
        return [rank for rank in range(self.world_size) if rank not in answered]

    def pids(self) -> list[int]:
        """Process id of each rank, on its host."""
        return [process.id.pid for process in self._processes]

    def node_ids(self) -> set[str]:
        """Ray's names of the nodes where the ranks run."""
        return {process.node_id for process in self._processes}

    def server(self, timeout_s: float = 240.0) -> RemoteServer:
        """A picklable `InferenceServer` in front of the worker of rank 0, for workers of other
        groups.

        Args:
            timeout_s: time limit for an answer. Must be less than `WeightUpdateMeta.timeout_s`,
                after which the publisher would report an error of the server instead of a loss.
        """
        return RemoteServer(self._actors[0], self.name, 0, timeout_s, self._hang_timeout_s)

    def shutdown(
        self,
        timeout_s: float = 10.0,
        *,
        at_end: bool = False,
    ) -> None:
        """Call each worker's ``destroy()`` if it has one, end the processes, and remove a placement
        created here.

        A second call does nothing. On a lost group it only removes the placement. After an
        interrupted call (Ctrl-C) the ranks are out of step, so they are killed without
        ``destroy()``. ``at_end`` as for `kill`.

        Raises:
            Exception: error of ``destroy()``, raised after everything has ended.
        """
        if self._closed:
            return
        try:
            if self._loss is None and not self._n_calls:
                refs = {}
                for rank, actor in enumerate(self._actors):
                    refs[rank] = actor.destroy.remote()
                self._gather("destroy()", refs, timeout_s)
        except WorkerLost as loss:
            logger.warning("%s during shutdown", loss)
        finally:
            self._close(at_end)

    def kill(self, *, at_end: bool = False) -> None:
        """Kill every process, and return when they are gone on every node. The placement stays.

        ``at_end``: the job ends, and starts nothing in their place. Nodes that do not answer are
        not waited for, because they may be ending too. HoldfastError if a process still runs
        ``kill_timeout_s`` after SIGKILL.
        """
        # A call that waits in another thread raises this loss.
        if self._loss is None:
            ranks = range(self.world_size)
            self._loss = WorkerLost(self.name, ranks, "the group was killed on request")
        if self._leases is not None:
            self._leases.stop()

        left = [at for at in self._processes if at.id not in self._ended]
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
        else:
            # Without Ray, other nodes cannot be checked.
            left = [at for at in left if at.node_id == self._node_id]

        # Each node ends its own.
        nodes: dict[str, list[ProcessId]] = {}
        for at in left:
            nodes.setdefault(at.node_id, []).append(at.id)
        leases = None if at_end else self._lease_ends()
        end_on_nodes(nodes, self._node_id, self.name, self._kill_timeout_s, leases)
        self._ended.update(at.id for at in left)

    def _lease_ends(self) -> dict[str, float]:
        """Time at which the leases of all ranks on a node have ended, for nodes where all ranks
        have one.
        """
        if self._leases is None:
            return {}
        # A node counts as over with its last lease, if all of its ranks have one.
        ends: dict[str, float] = {}
        unleased: set[str] = set()
        for rank, at in enumerate(self._processes):
            end = self._leases.end_of(rank)
            if end is None:
                unleased.add(at.node_id)
            else:
                ends[at.node_id] = max(end, ends.get(at.node_id, end))
        return {node: end for node, end in ends.items() if node not in unleased}

    def _close(self, at_end: bool) -> None:
        self._closed = True
        self.kill(at_end=at_end)
        if self._owns_placement:
            self.placement.remove()

    def _check_usable(self) -> None:
        if self._loss is not None:
            raise WorkerLost(self.name, self._loss.ranks, self._loss.cause)

    def _send(
        self, what: str, send: Callable[[Any, tuple], Any], per_rank: Sequence[tuple] | None
    ) -> dict[int, Any]:
        """Send a call to each rank with its share of ``per_rank``, if the group is usable. Return
        the references of the answers by rank.

        An error after the first rank, for example of a share that cannot be pickled, leaves ranks
        in a call that the others never get. So the group is killed.
        """
        if per_rank is None:
            per_rank = [()] * self.world_size
        if len(per_rank) != self.world_size:
            raise ConfigError(
                f"per_rank has {len(per_rank)} entries; {self.name!r} has {self.world_size} ranks"
            )
        self._check_usable()
        refs: dict[int, Any] = {}
        try:
            for rank, actor in enumerate(self._actors):
                refs[rank] = send(actor, per_rank[rank])
        except BaseException as error:
            if refs:
                left = range(len(refs), self.world_size)
                self._lose(left, f"{what} could not be sent to all ranks ({headline(error)})")
            raise
        return refs

    def _gather(
        self,
        what: str,
        refs: Mapping[int, Any],
        deadline: float | None,
    ) -> list[Any]:
        answers = Answers({ref: rank for rank, ref in refs.items()})
        with self._lock:
            self._n_calls += 1
        actors = dict(enumerate(self._actors))
        hung = wait_watching(answers, actors, self._patience, deadline, self._on_ended_nodes)
        with self._lock:
            self._n_calls -= 1

        # Another thread has killed the group, or is doing so.
        if self._loss is not None:
            raise self._lose(self._loss.ranks, self._loss.cause)
        if not (answers.lost or answers.errors or answers.pending):
            return [answers.values[rank] for rank in refs]

        # Deaths explain all else, whoever has noticed them: Ray, the nodes, or this kernel.
        lost = set(answers.lost)
        if answers.pending:
            lost.update(self._on_ended_nodes())
        for rank, at in enumerate(self._processes):
            if at.node_id == self._node_id and not at.id.alive():
                lost.add(rank)
        if lost:
            error = next(iter(answers.lost.values()), None)
            raise self._lose(lost, f"died during {what} ({headline(error)})") from error

        if hung:
            self.stalled_s = hung.stalled_s
            raise self._lose(hung.ranks, f"{hung.symptom} during {what}")
        waiting = sorted(answers.pending.values())
        if not answers.errors:
            self.started_late = not self._came_up
            raise self._lose(waiting, f"no answer to {what} within {deadline:g} s")

        # The code of a rank has failed. Ranks that wait for it cannot go on.
        error, rank = culprit(answers.errors)
        if collective_broke(cause_of(error)):
            who = "others gave up waiting for them in" if waiting else "nobody could finish"
            symptom = f"{who} a collective of {what} ({headline(cause_of(error))})"
            raise self._lose(waiting or list(answers.errors), symptom) from error
        if waiting:
            symptom = f"killed in {what}, where they waited for rank {rank}, which failed"
            self._lose(waiting, symptom)
        raise_cause(error)

    def _lose(self, ranks: Sequence[int] | set[int], cause: str) -> WorkerLost:
        """Kill the group, and return the loss to raise from now on.

        If two threads see a loss, the first one decides, because the second may only see the ranks
        that the first one killed.
        """
        with self._lock:
            first = self._loss is None
            loss = self._loss or WorkerLost(self.name, sorted(ranks), cause)
            self._loss = loss
        start = time.monotonic()
        self.kill()
        took_s = time.monotonic() - start
        if first:
            logger.warning("%s; every process was gone %.3f s later", loss, took_s)
        # A new object, because each caller that raises it adds its own traceback.
        return WorkerLost(*loss.args)

    def _on_ended_nodes(self) -> list[int]:
        others = self.node_ids() - {self._node_id}
        ended = ended_nodes(others)
        return [rank for rank, at in enumerate(self._processes) if at.node_id in ended]


def _name(fn: Callable[..., Any]) -> str:
    return f"{getattr(fn, '__name__', fn)}()"
