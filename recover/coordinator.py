"""One way to speak to all ranks, whether this process is one of them (torchrun) or drives them (Ray).

The handler's steps are of two kinds: what every rank does with its own shard, and what the leader decides. `Ranks` has
a method for each. Under torchrun every rank calls the handler and rank 0 leads; under Ray the driver calls the handler,
leads, and sends the ranks their part.

What a rank keeps from one step to the next (staging buffers, plans, a process group) is its session: an object of this
process under torchrun, under Ray one in the process of each rank, which the driver calls by a name.
"""

import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch.distributed as dist

from ..engine.api import Stateful
from ..engine.dcp.state import DCPState
from ..utils.distributed import (
    all_ranks_succeed,
    gather_objects,
    get_rank,
    get_world_size,
    rank_zero_decides,
    rank_zero_decides_slowly,
    reduce_flags_of,
)
from ..utils.errors import ConfigError, WorkerLost
from ..utils.logging import get_logger
from .host_engine import as_engine, shows_engine

logger = get_logger(__name__)

T = TypeVar("T")


@runtime_checkable
class RankGroup(Protocol):
    """Remote ranks that can be called as one; `holdfast.engine.workers.group.WorkerGroup` is one."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def run_all(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """``fn(worker, *args)`` on every rank; results in rank order."""
        ...

    def run_in_background(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """`run_all` from another thread of the caller and on another thread of every rank: calls go on meanwhile."""
        ...


@dataclass
class RankTarget:
    """What one rank snapshots.

    Attributes:
        engines: name -> what `as_engine` takes; a name is that of a folder in a generation.
        stateful: name -> user object of this rank.
        group: process group for engines that have none of their own; None is the default group.
    """

    engines: dict[str, Any]
    stateful: dict[str, Stateful] = field(default_factory=dict)
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not self.engines:
            raise ConfigError("there is no engine to snapshot; pass at least one")
        if bad := [name for name in self.engines if name == "state" or not re.fullmatch(r"[A-Za-z0-9_-]+", name)]:
            raise ConfigError(f"engine name {bad[0]!r} cannot be used; expected letters, digits, _ and -, not 'state'")
        self.engines = {name: as_engine(engine) for name, engine in self.engines.items()}

    def state(self, name: str) -> DCPState:
        """What is saved and restored of an engine."""
        engine = self.engines[name]
        if not isinstance(engine, DCPState):
            engine = engine.dcp_state() if engine.optimizer is not None else engine.dcp_state(with_optim=False)
        if engine.group is None:
            engine.group = self.group_of(name)
        return engine

    def group_of(self, name: str | None = None) -> dist.ProcessGroup | None:
        """Control group (gloo) of an engine; of the first one without a name."""
        engine = next(iter(self.engines.values())) if name is None else self.engines[name]
        return getattr(engine, "control_group", None) or self.group


def rank_target(holder: Any) -> RankTarget:
    """What to snapshot of ``holder``: a `RankTarget`, a dict of engines, what `as_engine` takes, or a worker object.

    A worker object shows its engines as ``engines`` (a dict) or ``engine``, and may show per-rank user objects as
    ``stateful`` (a dict).

    Raises:
        ConfigError: it shows neither, nor anything else that can be snapshotted.
    """
    if isinstance(holder, RankTarget):
        return holder
    if isinstance(holder, Mapping):
        return RankTarget(dict(holder))
    engines = getattr(holder, "engines", None) or {"default": getattr(holder, "engine", None)}
    if None not in engines.values():
        return RankTarget(dict(engines), dict(getattr(holder, "stateful", {})))
    if shows_engine(holder):
        return RankTarget({"default": holder})
    raise ConfigError(
        f"{type(holder).__name__} has neither 'engines' nor 'engine', nor 'model' and 'optimizer'; the handler cannot "
        "snapshot it"
    )


class Session(Protocol):
    """What a rank keeps for one handler.

    Attributes:
        background_group: gloo group of the ranks for another thread; None when there is none.
    """

    background_group: dist.ProcessGroup | None

    def close(self) -> None:
        """Free it; each rank for itself."""
        ...


S = TypeVar("S", bound=Session)


@dataclass
class SessionRef:
    """Where the sessions of a handler are.

    Attributes:
        key: name of the session in the processes of driven ranks.
        own: the session of this process, where it is a rank itself.
    """

    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    own: Any = None


class LocalRanks:
    """This process is one of the ranks; all of them call the handler.

    Args:
        target: what this rank snapshots.
        group: process group of the ranks (gloo); None is the default group.
        session: of the handler.

    Attributes:
        world_size: number of ranks.
        n_callers: number of processes that call the handler, each with a dataloader of its own.
        caller: which of them this is.
        is_driver: whether the caller is a process besides the ranks.
        is_leader: whether decisions are made in this process.
    """

    is_driver = False

    def __init__(
        self, target: RankTarget, group: dist.ProcessGroup | None = None, session: SessionRef | None = None
    ) -> None:
        self._target, self._group, self._session = target, group, session or SessionRef()
        self.world_size = self.n_callers = get_world_size(group)
        self.caller = get_rank(group)
        self.is_leader = self.caller == 0

    def run_all(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """Run ``fn(target, *args)`` here as on every rank; every rank gets all results."""
        return self.here(partial(fn, self._target, *args))

    def open_sessions(self, make: Callable[..., S], *args: Any) -> None:
        """Make every rank's session as ``make(holder, *args)``; none stays open if any fails."""
        try:
            with all_ranks_succeed("opening a session of recovery", self._group):
                self.close_sessions()
                self._session.own = make(self._target, *args)
        except BaseException:
            self.close_sessions()
            raise

    def run_sessions(self, method: Callable[..., T], *args: Any) -> list[T]:
        """Run ``method(session, holder, *args)`` here as on every rank; every rank gets all results."""
        return self.run_all(partial(method, _known(self._session.own)), *args)

    def close_sessions(self) -> None:
        """Close that of this rank, if it is open. Waits for nobody."""
        session, self._session.own = self._session.own, None
        if session is not None:
            session.close()

    def in_background(self) -> "LocalRanks":
        """The same ranks for another thread, which agree over the background group of their sessions."""
        return LocalRanks(self._target, self._session.own.background_group, self._session)

    def decide(self, decision: Callable[[], T]) -> T:
        """Rank 0 decides, all follow."""
        return rank_zero_decides(decision, self._group)

    def decide_slowly(self, work: Callable[[], T]) -> T:
        """`decide` for what may take longer than the group's timeout."""
        return rank_zero_decides_slowly(work, self._group)

    def here(self, fn: Callable[[], T]) -> list[T]:
        """Run ``fn`` in every process that calls the handler; all get all results. What fails in one raises in all."""
        with all_ranks_succeed("a step of recovery", self._group):
            result = fn()
        return gather_objects(result, self._group)

    def flags(self, ask: Callable[[], int]) -> int:
        """Bitwise OR of ``ask()`` over the processes that call the handler. What fails in one raises in all.

        One small tensor for all ranks; objects travel only when ``ask`` fails.
        """
        return reduce_flags_of("a step of recovery", ask, self._group)


class DrivenRanks:
    """This process drives remote ranks and decides by itself.

    Args:
        group: the remote ranks.
        session: of the handler.
        in_background: whether this is for another thread, while the group goes on with its other calls.
    """

    is_driver = True
    is_leader = True
    n_callers = 1
    caller = 0

    def __init__(self, group: RankGroup, session: SessionRef | None = None, *, in_background: bool = False) -> None:
        self._group, self._session, self._in_background = group, session or SessionRef(), in_background
        self.world_size = group.world_size

    def run_all(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """Run ``fn(worker, *args)`` on every rank."""
        return self._group.run_in_background(fn, *args) if self._in_background else self._group.run_all(fn, *args)

    def open_sessions(self, make: Callable[..., S], *args: Any) -> None:
        """Make every rank's session as ``make(holder, *args)``; none stays open if any fails."""
        try:
            self.run_all(_open_session, self._session.key, make, *args)
        except BaseException:
            self.close_sessions()
            raise

    def run_sessions(self, method: Callable[..., T], *args: Any) -> list[T]:
        """Run ``method(session, holder, *args)`` on every rank."""
        return self.run_all(_run_session, self._session.key, method, *args)

    def close_sessions(self) -> None:
        """Close those of all ranks; those of a group that is lost have nothing left to close."""
        try:
            self.run_all(_close_session, self._session.key)
        except WorkerLost as loss:
            logger.warning("%s, after the last snapshot", loss)

    def in_background(self) -> "DrivenRanks":
        """The same ranks for another thread."""
        return DrivenRanks(self._group, self._session, in_background=True)

    def decide(self, decision: Callable[[], T]) -> T:
        """Nobody else to ask."""
        return decision()

    def decide_slowly(self, work: Callable[[], T]) -> T:
        """Nobody waits."""
        return work()

    def here(self, fn: Callable[[], T]) -> list[T]:
        """Only the driver calls the handler."""
        return [fn()]

    def flags(self, ask: Callable[[], int]) -> int:
        """Only the driver calls the handler."""
        return ask()


_SESSIONS: dict[str, Session] = {}
"""Of driven ranks, in the process of each: a driver can name the session, not hold it."""


def _open_session(holder: Any, key: str, make: Callable[..., Session], *args: Any) -> None:
    _close_session(holder, key)
    _SESSIONS[key] = make(holder, *args)


def _run_session(holder: Any, key: str, method: Callable[..., T], *args: Any) -> T:
    return method(_known(_SESSIONS.get(key)), holder, *args)


def _close_session(holder: Any, key: str) -> None:
    if (session := _SESSIONS.pop(key, None)) is not None:
        session.close()


def _known(session: Session | None) -> Session:
    if session is None:
        raise ConfigError("this rank does not know the handler; call load with the same workers before dump")
    return session


Ranks = LocalRanks | DrivenRanks


def ranks_of(
    engine: Any, stateful: Mapping[str, Stateful], group: dist.ProcessGroup | None, session: SessionRef
) -> Ranks:
    """`DrivenRanks` if ``engine`` is a `RankGroup`, else `LocalRanks`.

    Args:
        engine: a `RankGroup`, or what `rank_target` takes.
        stateful: name -> user object of this process; one of a rank, when the ranks call the handler.
        group: of the ranks that call the handler; None is the default group.
        session: of the handler.
    """
    if isinstance(engine, RankGroup):
        return DrivenRanks(engine, session)
    target = rank_target(engine)
    return LocalRanks(RankTarget(target.engines, target.stateful | dict(stateful), group), group, session)
