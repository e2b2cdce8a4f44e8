"""One interface to all ranks, for a process that is a rank (torchrun) or drives the ranks (Ray).

Under torchrun every rank calls the handler, and rank 0 leads. Under Ray the driver calls the
handler, leads, and sends the ranks their part. `LocalRanks` and `DrivenRanks` have the same
methods: ``run_all`` and ``run_sessions`` for the work of every rank, ``decide`` for the work of the
leader.

What a rank keeps from one step to the next (staging buffers, plans, a process group) is its
session. Under torchrun the session is an object of this process. Under Ray it lives in the process
of the rank, and the driver calls it by a key.
"""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from ..engine.api import Stateful
from ..utils.distributed import (
    RankGroup,
    all_ranks_succeed,
    gather_objects,
    get_rank,
    get_world_size,
    rank_zero_decides,
    rank_zero_decides_slowly,
    reduce_flags_of,
)
from ..utils.errors import ConfigError, WorkerLost
from ..utils.launch import is_task_of_srun
from ..utils.logging import get_logger
from .engines import RankEngines, engines_of

logger = get_logger(__name__)

T = TypeVar("T")


class DrivenGroup(Protocol):
    """The methods of a `WorkerGroup` that recovery needs."""

    world_size: int

    def run_all(self, fn: Callable[..., Any], /, *args: Any) -> list[Any]:
        """Call ``fn(worker, *args)`` on every rank. Results are in rank order."""
        ...

    def run_in_background(self, fn: Callable[..., Any], /, *args: Any) -> list[Any]:
        """`run_all` on a separate thread in every worker, while other calls continue."""
        ...


@dataclass
class SessionRef:
    """Reference to the sessions of a handler, each with a ``background_group`` and ``close()``."""

    # names the session in the processes of driven ranks
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    own: Any = None  # session of this process, if this process is a rank


class LocalRanks:
    """Ranks that call the handler themselves, among them this process.

    Ranks with the same data call it with dataloaders in the same position. ``caller`` is the index
    of this rank's data among the data of the ``n_callers`` ranks that differ. The first rank with
    the same data is their head.
    """

    is_driver = False  # whether the caller is a process of its own, apart from the ranks

    def __init__(
        self,
        target: RankEngines,
        group: RankGroup = None,
        session: SessionRef | None = None,
    ) -> None:
        self._target = target
        self._group = group
        self._session = session or SessionRef()
        self.world_size = get_world_size(group)
        self.ranks_with_same_data = target.ranks_with_same_data

        # Ranks with the same data are consecutive.
        rank = get_rank(group)
        self.n_callers = self.world_size // self.ranks_with_same_data
        self.caller, peer = divmod(rank, self.ranks_with_same_data)
        self.is_head = peer == 0
        self.is_leader = rank == 0

    def run_all(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """Run ``fn(target, *args)`` on every rank. Every rank gets all results."""
        work = partial(fn, self._target, *args)
        return self.here(work)

    def open_sessions(self, make: Callable[..., Any], *args: Any) -> None:
        """Open the session of every rank as ``make(holder, *args)``. If one rank fails, all
        sessions are closed.
        """
        try:
            with all_ranks_succeed("opening a session of recovery", self._group):
                self.close_sessions()
                self._session.own = make(self._target, *args)
        except BaseException:
            self.close_sessions()
            raise

    def run_sessions(self, method: Callable[..., T], *args: Any) -> list[T]:
        """Run ``method(session, holder, *args)`` on every rank. Every rank gets all results."""
        session = _known(self._session.own)
        return self.run_all(partial(method, session), *args)

    def close_sessions(self) -> None:
        """Close the session of this rank, if it is open. Not collective."""
        # Forgotten first, so that a second call finds nothing to close.
        session = self._session.own
        self._session.own = None
        if session is not None:
            session.close()

    def apart(self) -> "LocalRanks":
        """Return the same ranks with sessions of another kind."""
        return LocalRanks(self._target, self._group)

    def in_background(self) -> "LocalRanks":
        """Return the same ranks for another thread. They use the background group of their
        sessions.
        """
        session = self._session
        group = session.own.background_group
        return LocalRanks(self._target, group, session)

    def decide(self, decision: Callable[[], T]) -> T:
        """Run ``decision`` in the leader. Every caller gets its result or its error."""
        return rank_zero_decides(decision, self._group)

    def decide_slowly(self, work: Callable[[], T]) -> T:
        """Do the same for work that may take longer than the timeout of the group."""
        return rank_zero_decides_slowly(work, self._group)

    def here(self, fn: Callable[[], T]) -> list[T]:
        """Run ``fn`` in every caller. Every caller gets all results. A failure in one is raised in
        all.
        """
        with all_ranks_succeed("a step of recovery", self._group):
            result = fn()
        return gather_objects(result, self._group)

    def flags(self, ask: Callable[[], int]) -> int:
        """Return the bitwise OR of ``ask()`` over all callers, in one collective of a small tensor.

        A failure in one caller is raised in all.
        """
        return reduce_flags_of("a step of recovery", ask, self._group)


class DrivenRanks:
    """Remote ranks that this process drives, with the methods of `LocalRanks`. The only caller
    decides by itself.

    With ``in_background`` it calls the ranks from another thread, while other calls of the group
    continue.
    """

    is_driver = True
    is_leader = True
    is_head = True
    n_callers = 1
    ranks_with_same_data = 1
    caller = 0

    def __init__(
        self, group: DrivenGroup, session: SessionRef, *, in_background: bool = False
    ) -> None:
        self._group = group
        self._session = session
        self.world_size = group.world_size
        # The background has threads of its own in the workers.
        self._run = group.run_all
        if in_background:
            self._run = group.run_in_background

    def run_all(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """Run ``fn(worker, *args)`` on every rank."""
        return self._run(fn, *args)

    def open_sessions(self, make: Callable[..., Any], *args: Any) -> None:
        """Open the session of every rank. If one rank fails, all sessions are closed."""
        # A rank that has opened its own does not see that another one failed.
        try:
            self.run_all(_open_session, self._session.key, make, *args)
        except BaseException:
            self.close_sessions()
            raise

    def run_sessions(self, method: Callable[..., T], *args: Any) -> list[T]:
        """Run ``method(session, worker, *args)`` on every rank."""
        return self.run_all(_run_session, self._session.key, method, *args)

    def close_sessions(self) -> None:
        """Close the sessions of all ranks. A group that was lost has nothing left to close."""
        try:
            self.run_all(_close_session, self._session.key)
        except WorkerLost as loss:
            logger.warning("%s, after the last snapshot", loss)

    def apart(self) -> "DrivenRanks":
        """Return the same ranks with sessions of another kind."""
        return DrivenRanks(self._group, SessionRef())

    def in_background(self) -> "DrivenRanks":
        """Return the same ranks for another thread."""
        return DrivenRanks(self._group, self._session, in_background=True)

    def decide(self, decision: Callable[[], T]) -> T:
        """Run ``decision`` here."""
        return decision()

    decide_slowly = decide

    def here(self, fn: Callable[[], T]) -> list[T]:
        """Run ``fn`` here."""
        return [fn()]

    def flags(self, ask: Callable[[], int]) -> int:
        """Run ``ask`` here."""
        return ask()


_SESSIONS: dict[str, Any] = {}
"""Sessions of driven ranks, in the process of each: a driver can name a session, but cannot hold
it.
"""


# These run in the process of a driven rank. ``holder`` is its worker.


def _open_session(holder: Any, key: str, make: Callable[..., Any], *args: Any) -> None:
    _close_session(holder, key)
    _SESSIONS[key] = make(holder, *args)


def _run_session(holder: Any, key: str, method: Callable[..., T], *args: Any) -> T:
    session = _known(_SESSIONS.get(key))
    return method(session, holder, *args)


def _close_session(holder: Any, key: str) -> None:
    session = _SESSIONS.pop(key, None)
    if session is not None:
        session.close()


def _known(session: Any) -> Any:
    if session is None:
        raise ConfigError(
            "this rank does not know the handler; call load with the same workers before dump"
        )
    return session


Ranks = LocalRanks | DrivenRanks


def ranks_of(
    engine: Any,
    stateful: Mapping[str, Stateful],
    group: RankGroup,
    session: SessionRef,
) -> Ranks:
    """Return `DrivenRanks` if ``engine`` is a `WorkerGroup`, else `LocalRanks` with the engines
    that it has.

    Raises ConfigError if this process is one of several tasks of srun and has no process group:
    each task would take the folder of the run for its own.
    """
    # Asked by the attribute, because Ray may not be installed.
    if hasattr(type(engine), "run_in_background"):
        return DrivenRanks(engine, session)
    if not dist.is_initialized() and is_task_of_srun():
        raise ConfigError(
            "this process is one of several tasks of srun, and there is no process group. "
            "engine.create_process_group() of Holdfast joins the tasks. For another trainer set "
            "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. If each task is a run of "
            "its own, unset SLURM_STEP_ID"
        )
    target = engines_of(engine)
    # The registered objects of this process are those of a rank too.
    everything = RankEngines(target.engines, target.stateful | dict(stateful), group)
    return LocalRanks(everything, group, session)
