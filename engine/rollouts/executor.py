"""`RolloutExecutor`: hands out tickets, runs their episodes beside the training, and gives the batch of each step.

**Order.** A step trains on ``loader.batch_size`` tickets. They are drawn from the loader in program order: the first
round of a step in the `set_version` that lets it start, further rounds, in place of rejected tickets, in its
`next_batch`. A batch is the accepted tickets of its step by number. So which prompts a step trains on does not depend
on what arrives when, and a run that was killed draws as one that was not.

**Staleness.** Weights of version v are those after v steps. The tickets of step s start once v >= s -
``max_head_offpolicyness``, and servers in use serve at least v; so each token of step s was sampled by weights of a
version from s - ``max_head_offpolicyness`` to s (version s + 1 is made from the batch of s). An update in the middle of
a sequence only makes what follows newer. Answers that say otherwise are not taken (`TicketEngine.check`).

**State.** The loader is read in `set_version` and `next_batch` only, that is, in the thread that also calls
`RecoverHandler.dump`: its cursor and this ledger are one cut. The ledger holds a step's tickets, trajectories
included, until `set_version` says that the step is trained.
"""

import asyncio
import heapq
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Self

import torch

from ...utils.errors import ConfigError, RolloutError, RolloutTimeout
from ...utils.heartbeat import beating
from ...utils.logging import get_logger
from ..api import Batch
from .config import RolloutConfig
from .ledger import Ledger
from .loop_thread import LoopThread
from .requests import RequestSender, Servers, TicketEngine
from .ticket import Ticket
from .trajectory import Trajectory, check_trajectory, concat_trajectories, sampled_versions
from .workflow import RolloutWorkflow

logger = get_logger(__name__)

_CLOSE_S = 5.0
_BEAT_EVERY_S = 1.0


class PromptLoader(Protocol):
    """Where prompts come from; `holdfast.recover.ResumableDataLoader` is one."""

    @property
    def dataset(self) -> Any:
        """Samples by index; read in the caller's thread."""
        ...

    @property
    def batch_size(self) -> int:
        """Tickets that a step trains on."""
        ...

    def index_batches(self) -> Iterator[Sequence[int]]:
        """Indices of the samples in the order they are to be used, without end; the loader's state moves along."""
        ...


class RolloutExecutor:
    """Samples for the steps to come, at most ``max_head_offpolicyness`` ahead; see the module for what it guarantees.

    A step is: publish the weights, `set_version`, `next_batch`, train, `RecoverHandler.dump`. Register the executor
    with the handler before `load`, and pass the loader to `load` and `dump`. One thread calls all methods.

    Args:
        config: bounds.
        loader: prompts. Nobody else iterates over it.
        workflow: run for every ticket.
        servers: to sample with.
        should_accept: a ticket whose trajectory it refuses is rejected, as one whose workflow returns None;
            `rewards_differ` is the dynamic sampling of DAPO. It runs on the thread of the workflow.
    """

    def __init__(
        self,
        config: RolloutConfig,
        loader: PromptLoader,
        workflow: RolloutWorkflow,
        servers: Servers,
        *,
        should_accept: Callable[[Trajectory], bool] | None = None,
    ) -> None:
        self.config = config
        self._loader, self._workflow, self._should_accept = loader, workflow, should_accept
        self._indices = iter(loader.index_batches())
        self._sender = RequestSender(servers, config)
        self._ledger = Ledger(loader.batch_size, config.seed)
        self._changed = threading.Condition()  # guards the ledger and what follows
        self._failure: RolloutError | None = None
        self._waiting: list[tuple[int, int, Ticket, Any]] = []  # a heap: earlier steps first
        self._tasks: set[asyncio.Task[None]] = set()
        self._waited_s, self._staleness = 0.0, torch.zeros(0)
        self._loop = LoopThread("rollouts")
        self._restored = self._closed = False

    def set_version(self, version: int) -> None:
        """The servers in use serve the weights after ``version`` steps: start what may start now.

        Steps before ``version`` are trained; their tickets are left behind. The same version may be set again.

        Raises:
            ConfigError: it is older than the last, or a step before it was not trained.
            RolloutError: the loop is blocked; see `LoopThread.call`.
        """
        self._require_open()
        with self._changed:
            last = self._ledger.version
            if last is not None and version < last:
                raise ConfigError(
                    f"set_version({version}) after version {last}: the tickets of steps before {last} are gone. "
                    "Versions count the steps trained; after a resume the first is that of the restored weights"
                )
            for step in range(last or 0, version):
                self._ledger.require_trained(step)
            if last is None and version > 0:
                logger.warning("no state of rollouts was restored: tickets are numbered from 0, at step %d", version)
            self._ledger.set_version(version)
            if self._restored:
                self._ledger.resample_stale(self.config.max_head_offpolicyness)
                self._restored = False
            for step in range(self._ledger.next_step, self._end_of_steps()):
                self._hand_out(step, self._ledger.batch_size)
        self._start()

    def next_batch(self, step: int) -> Batch:
        """Wait until all tickets of ``step`` are finished; the batch they make.

        Asked again before the next `set_version`, it is the same.

        Returns:
            all sequences of the step's tickets, in the order of their numbers, as `Trajectory` has them, padded to
            ``[B, S]``; integers and masks are int64.

        Raises:
            RolloutTimeout: that took longer than ``batch_timeout_s``.
            RolloutError: a ticket cannot be finished, or too many were rejected.
            ConfigError: the step is trained, may not start with the present version, or is beyond ``total_steps``.
        """
        return concat_trajectories([trajectory for _, trajectory in self.next_trajectories(step)])

    def next_trajectories(self, step: int) -> list[tuple[Ticket, Trajectory]]:
        """What `next_batch` makes a batch of. Nothing may change the tensors."""
        self._require_open()
        self._require_startable(step)
        started_s = time.monotonic()
        with beating(_BEAT_EVERY_S):
            for round in range(self.config.max_rounds + 1):
                self._wait_until_decided(step, started_s + self.config.batch_timeout_s)
                with self._changed:
                    missing = self._ledger.missing(step)
                    if missing and round < self.config.max_rounds:
                        self._hand_out(step, missing)
                if not missing:
                    break
                self._start()
        self._waited_s = time.monotonic() - started_s
        if missing:
            raise RolloutError(
                f"step {step} lacks {missing} of {self._ledger.batch_size} tickets after {self.config.max_rounds} "
                "rounds of replacements: the workflow, or should_accept, rejects almost all of them"
            )
        with self._changed:
            accepted = self._ledger.accepted(step)
        self._staleness = step - torch.cat([sampled_versions(each) for _, each in accepted])
        return accepted

    def pause(self) -> None:
        """Send no request until `resume`, because the servers are about to be updated. What is under way goes on."""
        self._require_open()
        self._loop.call(self._sender.pause)

    def resume(self) -> None:
        """Send requests again."""
        self._require_open()
        self._loop.call(self._sender.resume)

    def stats(self) -> dict[str, float]:
        """Numbers for a log, of the batch given last: ``staleness_mean`` and ``staleness_max`` of its sampled tokens
        (steps), ``waited_s`` for it; ``running`` tickets now; ``finished`` and ``rejected`` ones of the whole run, and
        requests ``retried`` since this executor was made. Each name begins with ``rollouts/``. What ``stats()`` of the
        workflow returns, if it has one, is added."""
        with self._changed:
            staleness = self._staleness.float() if len(self._staleness) else torch.zeros(1)
            numbers = {
                "staleness_mean": staleness.mean().item(),
                "staleness_max": staleness.max().item(),
                "waited_s": self._waited_s,
                "running": len(self._tasks),
                "finished": self._ledger.finished,
                "rejected": self._ledger.rejected,
                "retried": self._sender.retried,
            }
        own = {f"rollouts/{name}": float(number) for name, number in numbers.items()}
        return own | getattr(self._workflow, "stats", dict)()

    def close(self) -> None:
        """Give up what is being sampled; may be called twice. The workflow and the servers are their owner's."""
        self._closed = True
        self._loop.close(_CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # State

    def state_dict(self) -> dict[str, Any]:
        """The ledger; see `Ledger.state_dict`. Its size is that of the trajectories of at most
        ``max_head_offpolicyness`` + 1 steps."""
        with self._changed:
            return self._ledger.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a ledger; its unfinished tickets start with the next `set_version`, and finished ones that are too
        stale for this executor's ``max_head_offpolicyness`` are sampled again.

        Raises:
            CheckpointMismatchError: see `Ledger.load_state_dict`.
            ConfigError: this executor has handed out tickets of its own.
        """
        with self._changed:
            if self._ledger.version is not None:
                raise ConfigError("the RolloutExecutor has begun already; load into a new one, before set_version")
            self._ledger.load_state_dict(state_dict)
            self._restored = True

    # Tickets, in the caller's thread

    def _end_of_steps(self) -> int:
        """The first step that may not start yet."""
        assert self._ledger.version is not None
        end = self._ledger.version + self.config.max_head_offpolicyness + 1
        return end if self.config.total_steps is None else min(end, self.config.total_steps)

    def _hand_out(self, step: int, count: int) -> None:
        while len(self._ledger.drawn) < count:
            drawn = next(self._indices, None)
            if drawn is None:
                raise ConfigError(f"the loader has no sample left for step {step}; index_batches must not end")
            self._ledger.drawn += map(int, drawn)
        self._ledger.hand_out(step, count)

    def _start(self) -> None:
        """Give the loop what may run and does not yet."""
        with self._changed:
            new = self._ledger.not_started(range(self._end_of_steps()))
            work = [(ticket.step, ticket.number, ticket, self._loader.dataset[ticket.index]) for ticket in new]
            self._ledger.note_started(new)
        self._loop.call(self._enqueue, work)

    def _require_startable(self, step: int) -> None:
        version, total = self._ledger.version, self.config.total_steps
        if version is None:
            raise ConfigError(f"next_batch({step}) before set_version: nothing may be sampled yet")
        if total is not None and step >= total:
            raise ConfigError(f"next_batch({step}), but total_steps is {total}")
        if not version <= step < self._end_of_steps():
            raise ConfigError(
                f"next_batch({step}) with version {version} and max_head_offpolicyness "
                f"{self.config.max_head_offpolicyness}; expected a step from {version} to {self._end_of_steps() - 1}. "
                "Call set_version once the servers serve newer weights"
            )

    def _wait_until_decided(self, step: int, given_up_s: float) -> None:
        def decided() -> bool:
            return self._failure is not None or self._ledger.decided(step)

        with self._changed:
            in_time = self._changed.wait_for(decided, max(0.0, given_up_s - time.monotonic()))
            if self._failure is not None:
                raise self._failure
            if not in_time:
                unfinished = self._ledger.outstanding([step])
                raise RolloutTimeout(
                    f"{len(unfinished)} of the tickets of step {step} were not finished within "
                    f"{self.config.batch_timeout_s:g} s, the first is {unfinished[0]}; {len(self._tasks)} tickets run, "
                    f"{self._sender.retried} requests were sent again. Raise batch_timeout_s, or see to the servers"
                )

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("the RolloutExecutor is closed; make a new one")

    # Episodes, on the loop's thread

    def _enqueue(self, work: list[tuple[int, int, Ticket, Any]]) -> None:
        for item in work:
            heapq.heappush(self._waiting, item)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._tasks) < self.config.max_concurrent_rollouts and self._failure is None:
            *_, ticket, data = heapq.heappop(self._waiting)
            task = asyncio.get_running_loop().create_task(self._run(ticket, data))
            self._tasks.add(task)
            task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._closed:
            self._fill()

    async def _run(self, ticket: Ticket, data: Any) -> None:
        engine = TicketEngine(ticket, ticket.step - self.config.max_head_offpolicyness, self._sender)
        try:
            trajectory = await self._workflow.arun_episode(engine, data)
            if trajectory is not None:
                check_trajectory(trajectory)
                if self._should_accept is not None and not self._should_accept(trajectory):
                    trajectory = None
        except BaseException as error:
            if self._closed:
                raise
            self._fail(ticket, error)  # also of a SystemExit, which would end the loop, and of a CancelledError
            return
        with self._changed:
            if trajectory is None:
                self._ledger.reject(ticket.number)
            else:
                kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in trajectory.items()}
                self._ledger.finish(ticket.number, kept)
            if self._ledger.decided(ticket.step):
                self._changed.notify_all()

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        logger.error("%s failed", ticket, exc_info=error)
        failure = RolloutError(f"{ticket} cannot be finished: {type(error).__name__}: {error}")
        failure.__cause__ = error
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()
