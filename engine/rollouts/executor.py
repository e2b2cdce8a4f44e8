"""`RolloutExecutor`: hand out tickets, run their episodes during training, and return the batch of
each step.

**Order.** A step trains on ``loader.batch_size`` tickets. They are drawn from the loader in program
order. The first round of a step is drawn in the `set_version` that lets the step start.
Replacements of rejected tickets are drawn in its `next_batch`. A batch is the accepted tickets of
its step by number. So the prompts of a step do not depend on arrival times, and a killed and
resumed run draws the same prompts.

**Staleness.** Version v of the weights exists after v steps. The tickets of step s start once v >=
s - ``max_head_offpolicyness``, and the servers in use serve at least v. So weights of versions s -
``max_head_offpolicyness`` to s sample the tokens of step s (its batch produces version s + 1). An
update within a sequence only makes the later tokens newer. Other answers are refused
(`TicketEngine.check`).

**State.** Only `set_version` and `next_batch` read the loader, in the thread that also calls
`RecoverHandler.dump`. So its cursor and the ledger are consistent. The ledger keeps the tickets of
a step with their trajectories until `set_version` marks the step as trained.
"""

import asyncio
import heapq
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch.profiler import record_function

from ...utils.errors import (
    CheckpointMismatchError,
    ConfigError,
    PromptError,
    RolloutError,
    RolloutTimeout,
    ServerError,
    StopRequested,
)
from ...utils.heartbeat import beating
from ...utils.logging import get_logger
from ...utils.record_log import NO_PARENT, RecordLog
from ..api import Batch, StateDict
from ..servers.api import ObservableServer, labelled_version
from ..training.batch import images_of, map_tensors, with_images
from .config import RolloutConfig
from .ledger import Ledger, Outcome, Ticket
from .recorded import Bounds, Recorded, split_records
from .requests import RequestSender, Servers, TicketEngine
from .ticket_lives import TicketLives
from .trajectory import Trajectory, check_trajectory, concat_trajectories, sampled_versions
from .workflow import RolloutWorkflow

logger = get_logger(__name__)

_BLOCKED_S = 60.0
_CLOSE_S = 5.0
_BEAT_EVERY_S = 1.0
# keys of a state, in addition to those of the ledger
_LOG = "log"
_RECORDS = "records"
# servers that are asked for the label of the weights before the version goes without one
_ASKED_FOR_LABEL = 3


class _Episode(NamedTuple):
    """A ticket with its sample. Ordered by step, then by number, which is unique."""

    step: int
    number: int
    ticket: Ticket
    data: Any


class PromptLoader(Protocol):
    """A source of prompts, such as `holdfast.recover.ResumableDataLoader`."""

    @property
    def dataset(self) -> Any:
        """Samples by index, read in the caller's thread."""
        ...

    @property
    def batch_size(self) -> int:
        """Number of tickets per step."""
        ...

    def index_batches(self) -> Iterator[Sequence[int]]:
        """Yield indices of samples in the order of use, without end. The loader's state advances
        with them.
        """
        ...


class RolloutExecutor:
    """Sample for the next steps, at most ``max_head_offpolicyness`` ahead. The module docstring
    states the guarantees.

        config = RolloutConfig(max_head_offpolicyness=1)
        executor = RolloutExecutor(config, loader, workflow, fleet)
        handler.register("rollouts", executor)  # before handler.load
        handler.load(engine, dataloader=loader)
        for step in range(first, last):
            engine.update_weights()  # publishes engine.get_version()
            executor.set_version(step)
            stats = engine.train_batch(executor.next_batch(step), loss_fn, loss_weight_fn)
            engine.set_version(step + 1)
            handler.dump(engine, step, dataloader=loader)

    One thread must call all methods.

    Args:
        config: bounds.
        loader: prompts. Only the executor may iterate over it.
        workflow: runs once per ticket.
        servers: a list of servers, or a `ServerFleet`, which knows the usable ones.
        should_accept: returns False to reject a trajectory, on the thread of the workflow.
            `rewards_differ` is the dynamic sampling of DAPO.

    Raises:
        ConfigError: ``servers`` is neither a list nor a fleet.
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
        self._loader = loader
        self._workflow = workflow
        self._should_accept = should_accept
        self._indices = iter(loader.index_batches())
        self._sender = RequestSender(servers, config)
        self._recorded = Recorded(config.replay)
        self._lives = TicketLives()
        self._log: RecordLog | None = None
        # the log that the restored generation names. None: it names none
        self._log_id: str | None = NO_PARENT
        self._restored = False
        self._closed = False

        # The condition guards the ledger and the following attributes.
        self._changed = threading.Condition()
        self._ledger = Ledger(loader.batch_size, config.seed)
        self._failure: RolloutError | StopRequested | None = None
        self._waiting: list[_Episode] = []  # a heap: earlier steps first
        self._tasks: set[asyncio.Task[None]] = set()
        self._waited_s = 0.0
        self._staleness = torch.zeros(0)

        self._loop = _LoopThread()

    def set_version(self, version: int) -> None:
        """Note that the servers serve the weights after ``version`` steps, and start the tickets
        that may start now.

        Tickets of steps before ``version`` are dropped as trained. The same version may be set
        again.

        Raises:
            ConfigError: the version is older than the last one, or a step before it was not
                trained.
            RolloutError: a workflow has blocked the loop for a minute, or images of a restored
                ticket are missing or have changed.
        """
        self._require_open()
        # Asked without the lock, because a server may take seconds to say.
        label = self._label_of(version)
        with self._changed:
            last = self._ledger.version
            if last is not None and version < last:
                raise ConfigError(
                    f"set_version({version}) after version {last}: the tickets of steps before "
                    f"{last} are gone. Versions count the steps trained; after a resume the first "
                    "is that of the restored weights"
                )
            # Weights of this version exist only if all steps before it were trained.
            for step in range(last or 0, version):
                self._ledger.require_trained(step)
            if last is None and version > 0:
                logger.warning(
                    "no state of rollouts was restored: tickets are numbered from 0, at step %d",
                    version,
                )
            self._ledger.set_version(version)
            self._lives.end(before_step=version)

            # Entries of a restored ledger are made usable before the first new ticket.
            if self._restored:
                again = self._ledger.resample_stale(self.config.max_head_offpolicyness)
                self._recorded.sample_again(again)
                self._restore_images()
                self._restored = False
            self._recorded.keep(
                self._ledger.numbers(Outcome.OUTSTANDING),
                self._ledger.numbers(Outcome.FINISHED),
                self._ledger.next_number,
            )
            self._recorded.confirm(version, label)
            # The first round of every step that may start now.
            for step in range(self._ledger.next_step, self._end_of_steps()):
                self._hand_out(step, self._ledger.batch_size)
        self._start(version)

    @record_function("sampling")
    def next_batch(self, step: int) -> Batch:
        """Wait for all tickets of ``step`` and return their batch. Repeated calls return the same
        batch.

        Returns:
            the entries of `Trajectory` for all sequences, in the order of ticket numbers, padded to
            ``[B, S]``. Integers and masks are int64.

        Raises:
            RolloutTimeout: the wait exceeded ``batch_timeout_s``.
            RolloutError: a ticket cannot be finished, or too many were rejected.
            StopRequested: the job was asked to stop while a ticket waited for a server.
            ConfigError: the step is trained, may not start with the present version, or exceeds
                ``total_steps``.
        """
        return concat_trajectories([trajectory for _, trajectory in self.next_trajectories(step)])

    def next_trajectories(self, step: int) -> list[tuple[Ticket, Trajectory]]:
        """Return the tickets and trajectories of `next_batch`. The caller must not change the
        tensors.
        """
        self._require_open()
        self._require_startable(step)
        started_s = time.monotonic()
        given_up_s = started_s + self.config.batch_timeout_s

        # A step that is asked for ahead of its version waits for no weights.
        self._start(step)

        # Each round waits for its tickets, then replaces those that were rejected.
        last_round = self.config.max_rounds
        with beating(_BEAT_EVERY_S):
            for round in range(last_round + 1):
                self._wait_until_decided(step, given_up_s)
                with self._changed:
                    missing = self._ledger.missing(step)
                    if missing and round < last_round:
                        self._hand_out(step, missing)
                if not missing:
                    break
                self._start(step)
        self._waited_s = time.monotonic() - started_s
        if missing:
            raise RolloutError(
                f"step {step} lacks {missing} of {self._ledger.batch_size} tickets after "
                f"{last_round} rounds of replacements: the workflow, or "
                "should_accept, rejects almost all of them"
            )

        with self._changed:
            accepted = self._ledger.accepted(step)
            self._lives.train([ticket for ticket, _ in accepted])
        versions = [sampled_versions(trajectory) for _, trajectory in accepted]
        self._staleness = step - torch.cat(versions)
        return accepted

    def pause(self) -> None:
        """Send no new request until `resume`, as during an update. Requests in flight go on."""
        self._require_open()
        self._loop.call(self._sender.open.clear)

    def resume(self) -> None:
        """Send requests again."""
        self._require_open()
        self._loop.call(self._sender.open.set)

    def stats(self) -> dict[str, float]:
        """Statistics under ``rollouts/``, and those from ``stats()`` of the workflow if it has this
        method.

        - ``staleness_mean``, ``staleness_max`` (steps) and ``waited_s`` of the last batch
        - ``running`` tickets now, ``finished`` and ``rejected`` tickets of the whole run
        - ``retried`` requests of this process
        - ``replayed`` answers that this process took from records, ``replayed_tokens`` in them,
          answers that were ``dropped`` (too stale, or of weights that this run has not), and
          ``unused`` records of tickets that ended without asking for them
        - ``log_bytes`` written to the log by this process, ``log_lag_s`` since when a record is not
          on disk yet, ``log_failed``: 1 while nothing is written after an error
        """
        with self._changed:
            # A mean of nothing would be nan.
            staleness = torch.zeros(1)
            if len(self._staleness):
                staleness = self._staleness.float()
            numbers = {
                "staleness_mean": staleness.mean().item(),
                "staleness_max": staleness.max().item(),
                "waited_s": self._waited_s,
                "running": len(self._tasks),
                "finished": self._ledger.finished,
                "rejected": self._ledger.rejected,
                "retried": self._sender.retried,
                **self._recorded.stats(),
            }
        own = {f"rollouts/{name}": float(number) for name, number in numbers.items()}
        return own | getattr(self._workflow, "stats", dict)()

    def close(self) -> None:
        """Cancel all episodes. The workflow and the servers stay open. Later calls do nothing."""
        self._closed = True
        self._loop.close()
        self._lives.end(before_step=math.inf)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # State

    def state_dict(self) -> StateDict:
        """The ledger, with the trajectories of at most ``max_head_offpolicyness`` + 1 steps.

        It also has the records of tickets that are not finished, the calls of the others with an
        outside effect, and the id of the log that has the later ones.
        """
        with self._changed:
            state = self._ledger.state_dict()
            records = self._recorded.state()
            if records:
                state[_RECORDS] = torch.frombuffer(records, dtype=torch.uint8)
            if self._log is not None:
                state[_LOG] = self._log.id
            return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a ledger before the first `set_version`, which starts its unfinished tickets and
        the too stale ones. Records of unfinished tickets are used again.

        CheckpointMismatchError as in `Ledger.load_state_dict`. ConfigError if tickets were handed
        out already.
        """
        with self._changed:
            self._require_new()
            ledger_state = state_dict
            log_id = None
            records: list[bytes] = []
            if isinstance(state_dict, dict):
                ledger_state = dict(state_dict)
                log_id = ledger_state.pop(_LOG, None)
                records = _records_of(ledger_state.pop(_RECORDS, None))
            if not isinstance(log_id, str | None):
                raise CheckpointMismatchError(
                    f"the state of the rollouts has {_LOG} {log_id!r}, which is no id of a log"
                )
            self._ledger.load_state_dict(ledger_state)
            # The run before may not have asked for them.
            if self.config.return_routed_experts:
                self._ledger.mark_without_routes()
            self._recorded.load(records)
            self._log_id = log_id
            self._restored = True

    def follow_log(self, log: RecordLog | None, went_back: bool) -> None:
        """Use the records that followed the restored generation, and write new ones to ``log``.

        `RecoverHandler.load` calls it after `load_state_dict`. None: nothing is written.
        ``went_back``: whether the run resumes from a generation that was named by hand. ConfigError
        if answers would then be taken whatever weights sampled them.
        """
        with self._changed:
            if not self._restored:
                self._require_new()
            if went_back and self.config.replay == "all":
                raise ConfigError(
                    "replay='all' with resume_path: answers of the weights that the run leaves "
                    "would be trained on. Start once with replay='exact' or 'off'"
                )
            if log is None:
                return
            self._log = log
            self._recorded.follow(log, log.read(self._log_id))
            log.start(self._log_id)

    def _require_new(self) -> None:
        if self._ledger.version is not None:
            raise ConfigError(
                "the RolloutExecutor has begun already; load into a new one, before set_version"
            )

    # Tickets, in the caller's thread

    def _restore_images(self) -> None:
        workflow: Any = self._workflow
        with beating(_BEAT_EVERY_S):
            for entry in self._ledger.without_images():
                if not hasattr(workflow, "restore_images"):
                    raise ConfigError(
                        f"{entry.ticket} has images, and {type(workflow).__name__} has no "
                        "restore_images"
                    )
                try:
                    data = self._loader.dataset[entry.ticket.index]
                    entry.trajectory = workflow.restore_images(entry.trajectory, data)
                except PromptError as error:
                    raise RolloutError(f"{entry.ticket} cannot be restored: {error}") from error

    def _end_of_steps(self) -> int:
        assert self._ledger.version is not None
        end = self._ledger.version + self.config.max_head_offpolicyness + 1
        if self.config.total_steps is None:
            return end
        return min(end, self.config.total_steps)

    def _hand_out(self, step: int, count: int) -> None:
        while len(self._ledger.drawn) < count:
            drawn = next(self._indices, None)
            if drawn is None:
                raise ConfigError(
                    f"the loader has no sample left for step {step}; index_batches must not end"
                )
            self._ledger.drawn += map(int, drawn)
        self._ledger.hand_out(step, count)

    def _start(self, due: int) -> None:
        """Start the tickets whose recorded weights exist. Those of step ``due`` do not wait for
        weights.
        """
        with self._changed:
            # After a resume these are also tickets of the restored ledger. A ticket that waited for
            # its weights in a slot could keep out one that is needed before.
            version = self._ledger.version
            assert version is not None
            new = []
            for entry in self._ledger.not_started(range(self._end_of_steps())):
                ticket = entry.ticket
                if ticket.step == due:
                    self._recorded.drop_newer(ticket.number)
                if self._recorded.newest(ticket.number, self._bounds(ticket)) <= version:
                    new.append(entry)

            work = []
            for entry in new:
                data = self._loader.dataset[entry.ticket.index]
                work.append(_Episode(entry.ticket.step, entry.ticket.number, entry.ticket, data))

            # Reading a sample may fail, and then none was started.
            for entry in new:
                entry.started = True
                self._lives.queue(entry.ticket)
        if work:
            self._loop.call(self._enqueue, work)

    def _bounds(self, ticket: Ticket) -> Bounds:
        return Bounds(ticket.step - self.config.max_head_offpolicyness, ticket.step)

    def _label_of(self, version: int) -> str | None:
        """The label that a server reports for ``version``, or None."""
        for server in self._sender.usable()[:_ASKED_FOR_LABEL]:
            if not isinstance(server, ObservableServer):
                continue
            try:
                label = server.status().label
            except ServerError as error:
                logger.warning("%s does not say which weights it serves: %s", server.name, error)
                continue
            if labelled_version(label) == version:
                return label
        return None

    def _require_startable(self, step: int) -> None:
        version = self._ledger.version
        total = self.config.total_steps
        if version is None:
            raise ConfigError(f"next_batch({step}) before set_version: nothing may be sampled yet")
        if total is not None and step >= total:
            raise ConfigError(f"next_batch({step}), but total_steps is {total}")
        # Tickets of this step are gone, or may not be sampled yet.
        if not version <= step < self._end_of_steps():
            raise ConfigError(
                f"next_batch({step}) with version {version} and max_head_offpolicyness "
                f"{self.config.max_head_offpolicyness}; expected a step from {version} to "
                f"{self._end_of_steps() - 1}. Call set_version once the servers serve newer "
                "weights"
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
                    f"{self.config.batch_timeout_s:g} s, the first is {unfinished[0]}; "
                    f"{len(self._tasks)} tickets run, {self._sender.retried} requests were sent "
                    "again. Raise batch_timeout_s, or see to the servers"
                )

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("the RolloutExecutor is closed; make a new one")

    # Episodes, on the loop's thread

    def _enqueue(self, work: list[_Episode]) -> None:
        for episode in work:
            heapq.heappush(self._waiting, episode)
        self._fill()

    def _fill(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and self._failure is None:
            if len(self._tasks) >= self.config.max_concurrent_rollouts:
                return
            episode = heapq.heappop(self._waiting)
            task = loop.create_task(self._run(episode.ticket, episode.data))
            self._tasks.add(task)
            task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._closed:
            self._fill()
        elif not task.cancelled():
            task.exception()  # retrieved, or asyncio would log it

    async def _run(self, ticket: Ticket, data: Any) -> None:
        engine = TicketEngine(ticket, self._bounds(ticket), self._sender, self._recorded)
        try:
            episode = self._lives.begin(engine, ticket)
            trajectory = await self._workflow.arun_episode(episode, data)
            if trajectory is not None:
                check_trajectory(trajectory)
                if self._should_accept is not None and not self._should_accept(trajectory):
                    trajectory = None
            if trajectory is not None:
                trajectory = _kept(trajectory)
        except BaseException as error:
            # Also for CancelledError, and SystemExit, which would end the loop.
            if self._closed:
                raise
            self._fail(ticket, error)
            return

        with self._changed:
            self._ledger.settle(ticket.number, trajectory)
            self._recorded.forget(ticket.number, finished=trajectory is not None)
            engine.is_over = True
            self._lives.settle(ticket, accepted=trajectory is not None)
            if self._ledger.decided(ticket.step):
                self._changed.notify_all()

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        # A job that stops has not failed.
        failure: RolloutError | StopRequested
        if isinstance(error, StopRequested):
            failure = error
        else:
            logger.error("%s failed", ticket, exc_info=error)
            failure = RolloutError(f"{ticket} cannot be finished: {type(error).__name__}: {error}")
            failure.__cause__ = error
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()


def _kept(trajectory: Trajectory) -> Trajectory:
    """A copy in host memory, apart from images: rows of a prompt share their pixels."""
    copied = map_tensors(
        with_images(trajectory, None), lambda tensor: tensor.detach().to("cpu", copy=True)
    )
    return with_images(copied, images_of(trajectory))


def _records_of(packed: Any) -> list[bytes]:
    if packed is None:
        return []
    if not isinstance(packed, torch.Tensor) or packed.dtype != torch.uint8 or packed.dim() != 1:
        raise CheckpointMismatchError(
            f"the state of the rollouts has {_RECORDS} of type {type(packed).__name__}; expected a "
            "[n] uint8 tensor"
        )
    return split_records(packed.numpy().tobytes())


class _LoopThread:
    """A running asyncio loop on a daemon thread, for callers that block."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # A SystemExit in a task that a workflow started leaves the loop. The ticket that awaits the
        # task gets the error when the loop goes on.
        while not (self._stopped or self._loop.is_closed()):
            try:
                self._loop.run_forever()
            except BaseException as error:
                logger.warning("a task on the loop of the rollouts raised %r", error)

    def call(self, fn: Callable[..., object], *args: Any) -> None:
        async def called() -> None:
            fn(*args)

        try:
            asyncio.run_coroutine_threadsafe(called(), self._loop).result(_BLOCKED_S)
        except TimeoutError as error:
            raise RolloutError(
                f"the loop of {self._thread.name!r} has done nothing for {_BLOCKED_S:g} s: a "
                "workflow blocks it. Await what takes long, or call it in a CallPool"
            ) from error

    def close(self) -> None:
        """Cancel all tasks and end the thread. After `_CLOSE_S` the thread is abandoned."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._stop()))
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _stop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()  # closes the connections of clients
        self._stopped = True
        self._loop.stop()
