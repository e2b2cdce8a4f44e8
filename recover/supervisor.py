"""Run a job on Ray, and run it again after workers are lost, in the same places if they can still
be used.

When a `WorkerLost` leaves the job, every process of the attempt is killed first, because a survivor
could still write. Then the job is called again with the next `Attempt`. Any other exception is
raised at once: a bug, Ctrl-C, `Preempted`. SIGTERM ends the job too while no `RecoverHandler`
answers it. A job that can continue without one group catches the loss and restarts only that group
with `Attempt.restart`. The driver is not watched: after its death, run the same command again.
While a job runs, no other job can use its folder.
"""

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

from ..engine.workers.group import WorkerGroup  # first: it says what to install if there is no Ray

# isort: split
import ray
from ray.exceptions import RayError

from ..engine.workers.nodes import draining_nodes
from ..engine.workers.placement import Placement, PlacementRequest, WorkerResources, place
from ..engine.workers.rank_answers import headline, require_ray
from ..utils.errors import (
    AttemptEnded,
    ClusterLost,
    ConfigError,
    Preempted,
    RetriesExhausted,
    Terminated,
    WorkerLost,
)
from ..utils.folder_lock import FolderLock
from ..utils.logging import get_logger
from ..utils.processes import refuse_import_of_script
from ..utils.timing import doubled
from .config import RecoverConfig
from .storage.journal import Journal
from .triggers import StopNotice

T = TypeVar("T")

logger = get_logger(__name__)

BACK_OFF_S = 10.0
"""Pause before a group that started too late is started again, so that an overloaded machine can
recover. The pause doubles each time, up to `LONGEST_BACK_OFF_S`.
"""
LONGEST_BACK_OFF_S = 300.0
_TERMINATED = "SIGTERM came while no handler of the run could save anything"


@dataclass
class RecoveryEvent:
    """One loss of workers, and how long the recovery took.

    If the whole attempt is repeated, the last two times refer to the newest group of the next
    attempt.
    """

    group: str  # name of the worker group that lost ranks
    ranks: list[int]
    cause: str
    attempt: int  # number of the attempt that was running
    detected_at: float  # when the supervisor noticed the loss, in seconds since the epoch
    torn_down_s: float  # seconds until all old processes were gone
    placed_s: float | None = None  # seconds until the new worker group had its place
    rebuilt_s: float | None = None  # seconds until the new worker group was up


class _Start(NamedTuple):
    request: PlacementRequest
    make: Callable[[Placement], WorkerGroup]


@dataclass
class Attempt:
    """One run of the job.

    Threads of the job may start worker groups in parallel. If the attempt ends while a group still
    starts, the group ends too, and its `worker_group` call raises `WorkerLost`.

    Attributes:
        number: 0 for the first run.
        last_loss: loss that ended the previous attempt. None if there was no loss.
        event: event of that loss, whose times are still being filled in. None if there was no loss.
    """

    number: int
    last_loss: WorkerLost | None
    event: RecoveryEvent | None
    _groups: "_AttemptGroups"
    _losses: "_Losses"
    _places: "_Places"
    _starts: dict[str, _Start] = field(default_factory=dict)

    def worker_group(
        self,
        worker_cls: Callable[..., Any],
        *misplaced: Any,
        name: str,
        world_size: int = 1,
        min_world_size: int | None = None,
        multiple_of: int = 1,
        resources: WorkerResources | None = None,
        strategy: str = "PACK",
        stall_timeout_s: float | None = 1800.0,
        **options: Any,
    ) -> WorkerGroup:
        """Start a `WorkerGroup` in the place of the previous attempt's group of the same name and
        request.

        The group ends with the attempt. Other arguments and exceptions are those of `WorkerGroup`.

        Args:
            worker_cls, misplaced, options: see `WorkerGroup`.
            name: name of the group, unique in the attempt.
            world_size: number of ranks.
            min_world_size: smallest usable number of ranks, taken if the cluster cannot hold all of
                them for ``recover.shrink_after_s``. The group's ``world_size`` is the actual
                number. None requires all ranks.
            multiple_of: the actual number of ranks is a multiple of this (see
                `ParallelStrategy.multiple_of`).
            resources: resources of each rank. None means one CPU.
            strategy: how Ray distributes the ranks over nodes: PACK, SPREAD, STRICT_PACK or
                STRICT_SPREAD.
            stall_timeout_s: see `WorkerGroup`. Doubled for the next group of this name if this one
                made no progress and was lost, unless the last retry was ``retry_window_s`` ago.
        Raises:
            ConfigError: this attempt already started a group of this name.
            ResourcesUnavailable: the cluster lacked the resources for ``recover.node_wait_s``.
            ClusterLost: Ray's control process is gone.
        """
        request = PlacementRequest(
            name, world_size, resources or WorkerResources(), strategy, min_world_size, multiple_of
        )

        # Called when there is room, with as many ranks as there is room for.
        def make(placement: Placement) -> WorkerGroup:
            timeout_s = stall_timeout_s
            if timeout_s is not None:
                timeout_s *= self._losses.stall_factor(name)
            return WorkerGroup(
                worker_cls,
                *misplaced,
                name=name,
                world_size=placement.world_size,
                resources=request.resources,
                placement=placement,
                stall_timeout_s=timeout_s,
                on_created=self._groups.admit,
                **options,
            )

        start = _Start(request, make)
        # Atomic, because threads of the job may start groups at the same time.
        if self._starts.setdefault(name, start) is not start:
            raise ConfigError(
                f"this attempt has a worker group {name!r} already; give each its own name"
            )
        return self._build(start, self.event)

    def restart(self, loss: WorkerLost) -> WorkerGroup:
        """Start the group that ``loss`` names again, with the same class, arguments and place.
        Other groups continue.

        The restart counts as a retry and adds an event. All old processes are gone before the first
        new one starts, so handles from the old group, for example a `RemoteServer`, are dead.

        Raises:
            ConfigError: this attempt has no group of that name.
            RetriesExhausted: there were too many losses.
            WorkerLost: the group was lost again while it started, and may be restarted again. Or
                the attempt has ended.
        """
        group = self._groups.find(loss.group)
        if group is None:
            raise ConfigError(
                f"this attempt has no worker group {loss.group!r} to start again"
            ) from loss
        event = self._losses.note(loss, self.number, group.kill)
        logger.warning("%s; it is started again", loss)
        self._losses.spend_retry(loss, group)
        return self._build(self._starts[loss.group], event)

    def draining(self) -> StopNotice | None:
        """Ray's notice that a node of a worker or of the driver is about to go. None if there is no
        notice.

        Can be given to `RecoverHandler` as one of its ``notices``. Costs one round trip to Ray's
        control process, a millisecond or less.
        """
        nodes = {ray.get_runtime_context().get_node_id()}
        for group in self._groups.all():
            nodes.update(group.node_ids())
        ends = {node: end for node, end in draining_nodes().items() if node in nodes}
        if not ends:
            return None
        first_end = min(filter(None, ends.values()), default=None)
        return StopNotice(f"Ray drains node(s) {', '.join(ends)}", first_end)

    def can_grow(self) -> bool:
        """Whether ranks that a group was started without are available now. Costs at most one round
        trip to Ray.
        """
        return any(group.placement.can_grow() for group in self._groups.all())

    def start_again(self) -> NoReturn:
        """End this attempt, so that the supervisor begins the next one with as many ranks as
        possible.

        Call it when `can_grow` returns True, after ``dump`` and ``wait`` of the handler. It is
        neither a loss nor a retry.

        Raises:
            AttemptEnded: always. Let it leave the job.
        """
        raise AttemptEnded

    def _build(self, start: _Start, event: RecoveryEvent | None) -> WorkerGroup:
        name = start.request.name
        try:
            placement = self._places.get(start.request)
        except RayError as error:
            raise ClusterLost(
                f"Ray cannot place worker group {name!r} ({headline(error)}): its control process "
                "does not answer, or was started anew without its tables. Checkpoints are intact: "
                "start Ray again, and the same command resumes from the newest"
            ) from error
        if event is not None:
            event.placed_s = time.time() - event.detected_at

        group = start.make(placement)
        self._losses.note_start(name)
        if event is not None:
            event.rebuilt_s = time.time() - event.detected_at
            logger.info(
                "worker group %r has its place %.2f s after the loss, and is up after %.2f s",
                name,
                event.placed_s,
                event.rebuilt_s,
            )
        return group


class Supervisor:
    """Runs a job until it returns, fails, or loses workers too often.

    Example:

        supervisor = Supervisor(RecoverConfig(fileroot="runs", retries=3))

        def job(attempt: Attempt) -> None:
            gpu = WorkerResources(gpus=1)
            trainer = attempt.worker_group(Trainer, name="trainer", world_size=2, resources=gpu)
            handler.load(trainer)  # resume, then train

        supervisor.run(job)

    Args:
        config: ``retries`` and ``retry_window_s`` limit the losses. ``node_wait_s`` and
            ``shrink_after_s`` limit the wait for resources. The folder of the run is locked, unless
            the mode is ``off``. None stands for mode ``off``.

    Attributes:
        events: all losses so far, oldest first.
    """

    def __init__(self, config: RecoverConfig | None = None) -> None:
        self._config = config or RecoverConfig(mode="off")
        self._journal = Journal(self._config.trial_root)
        self._losses = _Losses(self._config, self._journal)
        self.events = self._losses.events

    def run(self, job: Callable[[Attempt], T]) -> T:
        """Call ``job(attempt)`` and return its result. Call it again after each `WorkerLost`.

        Before this returns or raises, all worker groups are shut down and their places are given
        back to Ray.

        Raises:
            ConfigError: Ray is not initialised, or a helper process imports the script.
            JobRefusedError: another job still used the folder of the run after ``lock_timeout_s``.
            RetriesExhausted: there were more losses than the configuration allows. Raised from the
                last `WorkerLost`.
            Terminated: SIGTERM came while no `RecoverHandler` answered it.
            BaseException: any other exception of the job, `Preempted` included, at once and
                unchanged.
        """
        refuse_import_of_script()
        require_ray()
        sigterm = _Sigterm()
        with sigterm.handled(), ExitStack() as stack:
            if self._config.mode != "off":
                lock = FolderLock(self._config.lock_path)
                lock.acquire_for_job(self._config.lock_timeout_s)
                stack.callback(lock.release)
                self._journal.open()
                stack.callback(self._journal.close)
            places = _Places(self._config)
            stack.callback(places.remove)
            with self._journal.telling(), sigterm.named():
                result = self._run(job, places)
            self._journal.note("returned")
            return result

    def _run(self, job: Callable[[Attempt], T], places: "_Places") -> T:
        number = 0
        groups = _AttemptGroups(number)
        loss: WorkerLost | None = None
        event: RecoveryEvent | None = None
        try:
            while True:
                self._journal.begin(supervised=True)
                attempt = Attempt(number, loss, event, groups, self._losses, places)
                try:
                    result = job(attempt)
                    groups.end(partial(WorkerGroup.shutdown, at_end=True))
                    return result
                except AttemptEnded:
                    logger.info("attempt %d ends to go on with more ranks", number)
                    groups.end(WorkerGroup.shutdown)
                    loss = None
                    event = None
                except WorkerLost as error:
                    event = self._losses.note(error, number, groups.end)
                    logger.warning("attempt %d ended: %s", number, error)
                    self._losses.spend_retry(error, groups.find(error.group))
                    loss = error
                number += 1
                groups = _AttemptGroups(number)
        finally:
            groups.end(partial(WorkerGroup.kill, at_end=True))


class _Sigterm:
    """SIGTERM to a driver while no `RecoverHandler` answers it. Ray's own handlers first end the
    cluster below the job, or exit with 15 or 1 as after an error.
    """

    def __init__(self) -> None:
        self._came = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Raise `Terminated` during the block. Another handler than Ray's is left alone."""
        before = signal.getsignal(signal.SIGTERM)
        is_main = threading.current_thread() is threading.main_thread()
        is_rays = str(getattr(before, "__module__", "")).startswith("ray.")
        if not (is_main and is_rays):
            yield
            return
        signal.signal(signal.SIGTERM, self._on_signal)
        try:
            with self.named():
                yield
        finally:
            signal.signal(signal.SIGTERM, before)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Raise `Terminated` again, of which calls of Ray make a ``SystemExit(1)``."""
        try:
            yield
        except Preempted:
            raise  # a handler has answered a later signal
        except SystemExit:
            if self._came:
                raise Terminated(_TERMINATED) from None
            raise

    def _on_signal(self, number: int, frame: FrameType | None) -> NoReturn:
        self._came = True
        raise Terminated(_TERMINATED)


class _AttemptGroups:
    """The worker groups of one attempt, which end with it. Thread-safe."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._lock = threading.Lock()
        self._groups: dict[str, WorkerGroup] = {}
        self._ended = False

    def admit(self, group: WorkerGroup) -> None:
        """Take in a group before its processes start, so that they end with the attempt whatever
        happens. WorkerLost if the attempt has ended.
        """
        with self._lock:
            if self._ended:
                raise WorkerLost(
                    group.name, range(group.world_size), f"attempt {self._number} has ended"
                )
            self._groups[group.name] = group

    def find(self, name: str) -> WorkerGroup | None:
        """The newest group of this name that was admitted."""
        with self._lock:
            return self._groups.get(name)

    def all(self) -> list[WorkerGroup]:
        """All groups that were admitted."""
        with self._lock:
            return list(self._groups.values())

    def end(self, end: Callable[[WorkerGroup], None] = WorkerGroup.kill) -> None:
        """End all groups, even if ending one raises."""
        with self._lock:
            self._ended = True
        with ExitStack() as stack:
            for group in self._groups.values():
                stack.callback(end, group)


class _Losses:
    """The losses of all runs of a supervisor: retries within the window, late starts and stalls.
    Threads of the job may restart groups at the same time.
    """

    def __init__(self, config: RecoverConfig, journal: Journal) -> None:
        self._config = config
        self._journal = journal
        self.events: list[RecoveryEvent] = []
        self._lock = threading.Lock()
        self._retried_at: list[float] = []
        # group name -> late starts since its last start in time
        self._late_starts: Counter[str] = Counter()
        self._stalls: Counter[str] = Counter()
        self._stalled_s = 0.0

    def stall_factor(self, name: str) -> int:
        """How many times as long as at first a group may make no progress."""
        return 2 ** self._stalls[name]

    def note_start(self, name: str) -> None:
        """Note that a group came up in time."""
        self._late_starts.pop(name, None)

    def note(self, loss: WorkerLost, attempt: int, tear_down: Callable[[], None]) -> RecoveryEvent:
        """Tear down what could still write before anything else happens, and note the loss."""
        detected_at = time.time()
        tear_down()
        torn_down_s = time.time() - detected_at
        event = RecoveryEvent(loss.group, loss.ranks, loss.cause, attempt, detected_at, torn_down_s)
        self.events.append(event)
        self._journal.note(
            "loss",
            group=loss.group,
            ranks=loss.ranks,
            cause=loss.cause,
            torn_down_s=round(torn_down_s, 3),
        )
        return event

    def spend_retry(self, loss: WorkerLost, group: WorkerGroup | None) -> None:
        """Count a retry, and pause before the ``group`` if it started too late.

        Raises RetriesExhausted if there were too many.
        """
        window_s = self._config.retry_window_s
        with self._lock:
            # The wait for workers that hang is left out. It may be longer than the window, and the
            # job would be started again for ever.
            if group is not None:
                self._stalled_s += group.stalled_s
            now = time.monotonic() - self._stalled_s
            recent = [moment for moment in self._retried_at if now - moment <= window_s]
            self._retried_at = [*recent, now]
        if len(recent) >= self._config.retries:
            raise RetriesExhausted(
                f"workers were lost again after {len(recent)} retries within {window_s:g} s "
                f"(allowed: {self._config.retries}); the last loss: {loss}. Find what kills them, "
                "or raise retries; the newest checkpoint is intact and the same command resumes "
                "from it"
            ) from loss
        if group is None:  # of another job, or it never started
            return

        # Allow more time for a step or a start that has just timed out. A limit that was long
        # enough until now stays.
        if group.stalled_s:
            if recent or not self._stalls[group.name]:
                self._stalls[group.name] += 1
            logger.warning(
                "worker group %r made no progress for its stall_timeout_s; the next one may take "
                "%d times as long, in case its calls just take long",
                group.name,
                self.stall_factor(group.name),
            )
        if group.started_late:
            self._late_starts[group.name] += 1
            pause_s = doubled(BACK_OFF_S, self._late_starts[group.name] - 1, LONGEST_BACK_OFF_S)
            logger.warning(
                "worker group %r did not come up in time: its nodes may have too much to do, and "
                "it is started again in %g s",
                group.name,
                pause_s,
            )
            time.sleep(pause_s)


@dataclass
class _Place:
    lock: threading.Lock = field(default_factory=threading.Lock)
    placement: Placement | None = None


class _Places:
    """Places of the worker groups of a job, kept from one attempt to the next. Thread-safe."""

    def __init__(self, config: RecoverConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._removed = threading.Event()
        self._places: dict[str, _Place] = {}

    def get(self, request: PlacementRequest) -> Placement:
        # The previous attempt's place, grown if possible, or a new place if it cannot be used any
        # more.
        with self._lock:
            if self._removed.is_set():
                raise WorkerLost(request.name, range(request.world_size), "the job has ended")
            at = self._places.setdefault(request.name, _Place())
        with at.lock:
            placement = at.placement
            if placement is not None:
                if placement.request == request and placement.is_sound():
                    if placement.can_grow():
                        placement.grow()
                    return placement
                logger.info("worker group %r is placed anew", request.name)
                placement.remove()
                at.placement = None
            at.placement = place(
                request,
                self._config.node_wait_s,
                shrink_after_s=self._config.shrink_after_s,
                stop=self._removed,
            )
            return at.placement

    def remove(self) -> None:
        # Give all places back to Ray, and end every wait for one.
        with self._lock:
            self._removed.set()
            places = list(self._places.values())
        for at in places:
            with at.lock:
                if at.placement is not None:
                    at.placement.remove()
