"""Run a job, and run it again after workers were lost, in the same places where these can still be used.

The job is a function of an `Attempt`; it builds its worker groups through it, restores with `RecoverHandler` and
trains. When a `WorkerLost` leaves the job, every process of the attempt is killed first (a survivor could still
write), and the job is called again with the next attempt; after a start that timed out, not at once. A job that can go
on without a group, one that only samples say, catches its loss and has `Attempt.restart` start that group alone.
Anything else that leaves the job is a bug, Ctrl-C, or `Preempted`, and is raised at once. The driver itself is not
watched: one that was killed needs only the same command again. While a job runs, no other can use its folder.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import ray
from ray.exceptions import RayError

from ..engine.workers.group import WorkerGroup
from ..engine.workers.nodes import draining_nodes
from ..engine.workers.placement import Placement, PlacementRequest, WorkerResources
from ..engine.workers.ray_adapter import headline, require_ray
from ..utils.errors import AttemptEnded, ClusterLost, ConfigError, RetriesExhausted, WorkerLost
from ..utils.folder_lock import FolderLock
from ..utils.logging import get_logger
from .config import RecoverConfig
from .placements import Placements
from .storage.journal import Journal
from .triggers.signals import StopNotice

T = TypeVar("T")

logger = get_logger(__name__)

BACK_OFF_S = 10.0
"""How long a group that did not come up in time is left alone before it is started again: what starts on an overloaded
machine loads it further. Twice as long each time, and at most `LONGEST_BACK_OFF_S`."""
LONGEST_BACK_OFF_S = 300.0


@dataclass
class RecoveryEvent:
    """One loss, and how long coming back from it took.

    Attributes:
        group: name of the worker group that lost ranks.
        ranks: the ranks it lost.
        cause: what was seen of their end.
        attempt: number of the attempt it happened in.
        detected_at: when the supervisor heard of it, seconds since the epoch.
        torn_down_s: from then until no process was left, of the attempt or of the one group that is started again.
        placed_s: from then until the newest worker group had its place, or that one group; None while it has none.
        rebuilt_s: from then until the newest worker group of the next attempt was up, or that one group; None while
            there is none.
    """

    group: str
    ranks: list[int]
    cause: str
    attempt: int
    detected_at: float
    torn_down_s: float
    placed_s: float | None = None
    rebuilt_s: float | None = None


@dataclass
class Attempt:
    """One run of the job.

    Threads of the job may start and use a worker group each at the same time. One group that still starts when the
    attempt ends, because another was lost say, ends with it, and its `worker_group` raises `WorkerLost`.

    Attributes:
        number: 0 for the first run.
        last_loss: what ended the attempt before this one; None in the first, and in one that begins with more ranks.
        event: the same with its times, which go on being filled in; None where there was no loss.
    """

    number: int
    last_loss: WorkerLost | None
    event: RecoveryEvent | None
    _supervisor: "Supervisor"
    _placements: "Placements"
    _groups: dict[str, WorkerGroup] = field(default_factory=dict)
    _starts: dict[str, tuple[PlacementRequest, Callable[[Placement], WorkerGroup]]] = field(default_factory=dict)
    _ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def worker_group(
        self,
        worker_cls: Callable[..., Any],
        *misplaced: Any,
        name: str,
        world_size: int = 1,
        min_world_size: int | None = None,
        resources: WorkerResources | None = None,
        strategy: str = "PACK",
        stall_timeout_s: float | None = 1800.0,
        **options: Any,
    ) -> WorkerGroup:
        """A `WorkerGroup` where the last attempt's group of this name and request was; ended with the attempt.

        Takes what `WorkerGroup` takes, ``args`` and ``kwargs`` of the workers included, and raises what it raises.
        ``stall_timeout_s`` is doubled for every time that a group of this name was lost for want of progress.

        Args:
            worker_cls: see `WorkerGroup`.
            misplaced: likewise.
            name: likewise.
            world_size: number of ranks.
            min_world_size: how few ranks will do when the cluster has not had the resources of all for
                ``recover.shrink_after_s``; the group's ``world_size`` says how many there are. None: all are needed.
            resources: what each rank needs; one CPU when None.
            strategy: how Ray distributes the ranks over nodes: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
            stall_timeout_s: see `WorkerGroup`.
            options: likewise.

        Raises:
            ConfigError: this attempt has, or tried to start, a group of that name already.
            ResourcesUnavailable: the cluster did not have the resources within ``recover.node_wait_s``.
            ClusterLost: Ray's control process is gone.
        """
        request = PlacementRequest(name, world_size, resources or WorkerResources(), strategy, min_world_size)

        def start(placement: Placement) -> WorkerGroup:
            return WorkerGroup(
                worker_cls,
                *misplaced,
                name=name,
                world_size=placement.world_size,
                resources=request.resources,
                placement=placement,
                stall_timeout_s=self._supervisor._patience_with(name, stall_timeout_s),
                on_created=self._admit,
                **options,
            )

        with self._lock:
            if name in self._starts:
                raise ConfigError(f"this attempt has a worker group {name!r} already; give each its own name")
            self._starts[name] = request, start
        return self._build(name, self.event)

    def restart(self, loss: WorkerLost) -> WorkerGroup:
        """Start the group that ``loss`` names again: the same class, arguments and place; all other groups live on.

        Its old processes are gone before the first new one starts. It counts as a retry and is an event like any other
        loss. Nobody knows the new processes yet: what was obtained from the old group, a `RemoteServer` say, is dead.

        Raises:
            ConfigError: this attempt has no group of that name.
            RetriesExhausted: that was one loss too many.
            WorkerLost: the group was lost again while it started, and may be started again; or the attempt has ended.
        """
        with self._lock:
            lost = self._groups.get(loss.group)
        if lost is None:
            raise ConfigError(f"this attempt has no worker group {loss.group!r} to start again") from loss
        event = self._supervisor._note_loss(loss, self.number, lost.kill)
        logger.warning("%s; it is started again", loss)
        self._supervisor._spend_retry(loss)
        self._supervisor._learn_from(lost)
        return self._build(loss.group, event)

    def draining(self) -> StopNotice | None:
        """Ray's notice that a node of this attempt, a worker's or the driver's, is about to go; None without one.

        One for `RecoverHandler`'s ``notices``. Costs a round trip to Ray's control process, a millisecond or less.
        """
        with self._lock:
            groups = list(self._groups.values())
        nodes = {ray.get_runtime_context().get_node_id()}.union(*(group.node_ids() for group in groups))
        ends = {node: end for node, end in draining_nodes().items() if node in nodes}
        if not ends:
            return None
        return StopNotice(f"Ray drains node(s) {', '.join(ends)}", min(filter(None, ends.values()), default=None))

    def can_grow(self) -> bool:
        """Whether ranks that a group was started without can be had now; `start_again` then begins with them.

        Costs a round trip to Ray's control process where a group has too few ranks, else nothing.
        """
        with self._lock:
            groups = list(self._groups.values())
        return any(group.placement.can_grow() for group in groups)

    def start_again(self) -> NoReturn:
        """End this attempt at a step that is snapshotted, and have the supervisor begin the next with all ranks it can.

        That is no loss, and no retry. Call it when `can_grow` says so, after ``dump`` and ``wait`` of the handler.

        Raises:
            AttemptEnded: always; let it leave the job.
        """
        raise AttemptEnded

    def _build(self, name: str, event: RecoveryEvent | None) -> WorkerGroup:
        request, start = self._starts[name]
        try:
            placement = self._placements.get(request)
        except RayError as error:
            raise ClusterLost(
                f"Ray cannot place worker group {name!r} ({headline(error)}): its control process does not answer, or "
                "was started anew without its tables. Checkpoints are intact: start Ray again, and the same command "
                "resumes from the newest"
            ) from error
        if event is not None:
            event.placed_s = time.time() - event.detected_at
        group = start(placement)
        self._supervisor._late_starts.pop(name, None)
        if event is not None:
            event.rebuilt_s = time.time() - event.detected_at
            logger.info(
                "worker group %r has its place %.2f s after the loss, and is up after %.2f s",
                name, event.placed_s, event.rebuilt_s,
            )  # fmt: skip
        return group

    def _admit(self, group: WorkerGroup) -> None:
        """Take in a group before its processes start, so that whatever becomes of them they end with the attempt."""
        with self._lock:
            if self._ended:
                raise WorkerLost(group.name, range(group.world_size), f"attempt {self.number} has ended")
            self._groups[group.name] = group

    def _shutdown(self) -> None:
        self._end(WorkerGroup.shutdown)

    def _kill(self) -> None:
        self._end(WorkerGroup.kill)

    def _end(self, end: Callable[[WorkerGroup], None]) -> None:
        with self._lock:
            self._ended = True
        with ExitStack() as stack:
            for group in self._groups.values():
                stack.callback(end, group)


class Supervisor:
    """Runs a job until it returns, fails, or has lost workers too often.

    Args:
        config: its ``retries`` and ``retry_window_s`` say how often that is, ``node_wait_s`` and ``shrink_after_s`` how
            long resources are waited for, and it names the folder to lock (not with mode ``off``).

    Attributes:
        events: every loss so far, oldest first.
    """

    def __init__(self, config: RecoverConfig | None = None) -> None:
        self._config = config or RecoverConfig(mode="off")
        self._retried_at: list[float] = []
        self._lock = threading.Lock()
        self._late_starts: Counter[str] = Counter()  # by name of the group, since the last that came up
        self._stalls: Counter[str] = Counter()
        self.events: list[RecoveryEvent] = []
        self._journal = Journal(self._config.trial_root)

    def run(self, job: Callable[[Attempt], T]) -> T:
        """Call ``job(attempt)`` and return its result; call it again after each `WorkerLost`.

        Worker groups are shut down, and their places given back to Ray, before this returns or raises.

        Raises:
            ConfigError: Ray is not initialised.
            FolderInUseError: another job uses the run's folder, and still did after ``lock_timeout_s``.
            RetriesExhausted: from the last `WorkerLost`, when there were more than the configuration allows.
            BaseException: whatever else the job raised, `Preempted` among it, unchanged and at once.
        """
        require_ray()
        with ExitStack() as stack:
            if self._config.mode != "off":
                lock = FolderLock(self._config.lock_path)
                lock.acquire(self._config.lock_timeout_s)
                stack.callback(lock.release)
                self._journal.open()
                stack.callback(self._journal.close)
            placements = Placements(self._config)
            stack.callback(placements.remove)
            with self._journal.telling():
                result = self._run(job, placements)
            self._journal.note("returned")
            return result

    def _run(self, job: Callable[[Attempt], T], placements: Placements) -> T:
        attempt = Attempt(0, None, None, self, placements)
        try:
            while True:
                self._journal.begin()
                try:
                    result = job(attempt)
                    attempt._shutdown()
                    return result
                except AttemptEnded:
                    logger.info("attempt %d ends to go on with more ranks", attempt.number)
                    attempt._shutdown()
                    attempt = Attempt(attempt.number + 1, None, None, self, placements)
                except WorkerLost as loss:
                    event = self._note_loss(loss, attempt.number, attempt._kill)
                    logger.warning("attempt %d ended: %s", attempt.number, loss)
                    self._spend_retry(loss)
                    self._learn_from(attempt._groups.get(loss.group))
                    attempt = Attempt(attempt.number + 1, loss, event, self, placements)
        finally:
            attempt._kill()

    def _note_loss(self, loss: WorkerLost, attempt: int, tear_down: Callable[[], None]) -> RecoveryEvent:
        detected_at = time.time()
        tear_down()
        torn_down_s = time.time() - detected_at
        event = RecoveryEvent(loss.group, loss.ranks, loss.cause, attempt, detected_at, torn_down_s)
        self.events.append(event)
        self._journal.note(
            "loss", group=loss.group, ranks=loss.ranks, cause=loss.cause, torn_down_s=round(torn_down_s, 3)
        )
        return event

    def _spend_retry(self, loss: WorkerLost) -> None:
        now = time.monotonic()
        window_s = self._config.retry_window_s
        with self._lock:
            recent = [moment for moment in self._retried_at if now - moment <= window_s]
            self._retried_at = [*recent, now]
        if len(recent) >= self._config.retries:
            raise RetriesExhausted(
                f"workers were lost again after {len(recent)} retries within {window_s:g} s "
                f"(allowed: {self._config.retries}); the last loss: {loss}. Find what kills them, "
                "or raise retries; the newest checkpoint is intact and the same command resumes from it"
            ) from loss

    def _learn_from(self, lost: WorkerGroup | None) -> None:
        """Do not do again at once what has just failed for want of time."""
        if lost is not None and lost.stalled:
            self._stalls[lost.name] += 1
            logger.warning(
                "worker group %r made no progress for its stall_timeout_s; the next one may take %d times as long, in "
                "case its calls just take long",
                lost.name, 2 ** self._stalls[lost.name],
            )  # fmt: skip
        if lost is not None and lost.started_late:
            self._late_starts[lost.name] += 1
            pause_s = min(BACK_OFF_S * 2 ** (self._late_starts[lost.name] - 1), LONGEST_BACK_OFF_S)
            logger.warning(
                "worker group %r did not come up in time: its nodes may have too much to do, and it is started again "
                "in %g s",
                lost.name, pause_s,
            )  # fmt: skip
            time.sleep(pause_s)

    def _patience_with(self, name: str, stall_timeout_s: float | None) -> float | None:
        return None if stall_timeout_s is None else stall_timeout_s * 2 ** self._stalls[name]
