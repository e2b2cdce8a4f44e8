"""`ServerFleet`: update inference servers together, and repair the servers that missed an update.

A publication succeeds once enough servers have confirmed it. The other servers get no requests
(`serving`). A thread, the prober, asks every server regularly which weights it serves, and at once
after a publication that a server missed. It has each of the others load the folder published last.
So a restarted server, or one that a killed publisher left paused, recovers by itself.

A server that should sleep is left asleep by the prober, and put to sleep again after a restart.

Servers may be added and removed at any time. With a `ServerSource`, such as servers that the job
starts itself, the prober adds those that have started and removes those that have ended.

Only one process may update a server: rank 0 of the trainers, or the driver of a Ray job. All
threads are daemons.
"""

import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from threading import Condition, Event, Lock, Thread
from typing import Generic, cast

from ...utils.config import require_choice, require_range
from ...utils.errors import (
    ConfigError,
    HoldfastError,
    NoServerError,
    PublishError,
    ServerError,
    SlowServerError,
    UnreachableServerError,
    WorkerLost,
    WrongContentError,
)
from ...utils.logging import get_logger
from ...utils.stopping import require_no_stop
from ...utils.threads import on_daemon_thread
from .api import (
    KV_CACHE,
    TAGS,
    ServerReport,
    ServerSource,
    ServerState,
    server_stats,
)
from .client import ServerClient
from .fleet_member import (
    ABOUT_TO_SLEEP,
    STOP_LOOK_S,
    FleetMember,
    PublishedFolder,
    S,
    published_folder,
    require_support,
)
from .stream import BucketReader, WeightStream

logger = get_logger(__name__)

_START_LOOK_S = 0.1
_REMOVAL_LOOK_S = 1.0
_END_S = 30.0
"""Longest time between an error of a server with a dead engine and its end."""


class ServerFleet(Generic[S]):
    """Inference servers and their states. Any thread may call any method.

        fleet = ServerFleet([VLLMServer(url) for url in urls], min_servers=len(urls) - 1)
        engine.connect_engine(fleet, WeightUpdateMeta("disk", "/shared/weights"))
        executor = RolloutExecutor(config, loader, workflow, fleet)

    Args:
        servers: clients, or a `ServerSource`. Without `ObservableServer`, the state follows from
            the updates alone.
        min_servers: confirmations that a publication needs. None: from all servers that are not
            removed meanwhile, or from one of a source.
        probe_interval_s: interval of the prober, which starts with the first `update`. None: no
            prober, so a server that missed an update waits for the next one.
        server_wait_s: longest wait of an update for servers of a source that are starting.

    Raises:
        ConfigError: a value is out of range, or two servers have the same name.
    """

    def __init__(
        self,
        servers: Iterable[S] | ServerSource[S],
        min_servers: int | None = None,
        probe_interval_s: float | None = 5.0,
        server_wait_s: float = 1800.0,
    ) -> None:
        require_range("probe_interval_s", probe_interval_s, low=0.01)
        require_range("server_wait_s", server_wait_s, low=0.0)
        self._changed = Condition()
        self._folder: PublishedFolder | None = None
        self._scratch: str | None = None
        self._updating = Lock()
        self._sleep_level: int | None = None  # if all servers were put to sleep

        # The source of the servers, and its error after which the run cannot go on.
        self._source: ServerSource[S] | None = None
        self._following = Lock()
        self._followed: list[S] = []  # what the source had last
        self._lost: HoldfastError | None = None
        self._unread = False
        self._server_wait_s = server_wait_s
        if isinstance(servers, ServerSource):
            self._source = servers
            min_servers = 1 if min_servers is None else min_servers

        # The prober.
        self._probe_interval_s = probe_interval_s
        self._prober: Thread | None = None
        self._woken = Event()
        self._closed = Event()

        # Each change replaces the members, and every loop reads them once.
        self._members: tuple[FleetMember[S], ...] = ()
        if self._source is None:
            for server in cast(Iterable[S], servers):
                self.add(server)
        self._min_servers = min_servers
        self._needed(None)

    def add(self, server: S) -> None:
        """Add a server. It gets no requests before the prober, or an update, has had it load the
        newest version.

        Raises:
            ConfigError: the fleet has a server with this name, or the server does not support the
                type of the last publication.
        """
        member = FleetMember(server, self._changed)
        with self._changed:
            if any(member.name == other.name for other in self._members):
                raise ConfigError(
                    f"inference server {member.name} is named twice; name each once, or give them "
                    "other names"
                )
            folder = self._folder
            if folder is not None:
                require_support(member, folder.type)
            if isinstance(server, ServerClient):
                server.connections.open(member)

            # From here on it takes part in whatever the others do.
            self._members = (*self._members, member)
            if self._sleep_level is not None:
                member.rest(TAGS, self._sleep_level)
            elif folder is not None:
                member.want(folder)
            self._changed.notify_all()
        self._woken.set()

    def remove(self, name: str, drain_s: float = 600.0) -> None:
        """Remove a server. It gets no more requests, and is not updated any more.

        Requests in flight may end. Those that have not ended after ``drain_s`` are cut off and sent
        to other servers, with the same seeds. No ticket is lost or trained twice. The server itself
        goes on, and may be added again.

        Args:
            name: ``name`` of its client, such as the URL.
            drain_s: longest wait for its requests. If the server is added again meanwhile, the
                wait ends and nothing is cut off.

        Raises:
            ConfigError: the fleet has no such server.
        """
        with self._changed:
            names = [member.name for member in self._members]
            if name not in names:
                raise ConfigError(f"there is no inference server {name}; there are {names}")
            gone = self._members[names.index(name)]
            self._members = tuple(member for member in self._members if member is not gone)
            gone.leave()
        if isinstance(gone.server, ServerClient):
            gone.server.connections.drain(gone, drain_s)

    def update(
        self,
        path: str | PathLike[str],
        version: int,
        timeout_s: float,
        min_servers: int | None = None,
        *,
        stream: WeightStream | None = None,
    ) -> list[ServerReport]:
        """Have every server load a published folder of weights or adapters. Return once enough have
        confirmed it.

        All servers are told at once, even if their label is right, because a server may be paused.
        A server that missed the last update is waited for only while its confirmation is needed,
        any other until it answers. The prober updates the rest, also after an error. If servers of
        a source fail, they have 30 s to end, because the engine of one may be dead, and are waited
        for again (``server_wait_s``).

        Args:
            path: folder of the version, as `publish_weights` writes it. The servers must see it
                under this path, unless its weights are sent.
            version: version in its manifest.
            timeout_s: time limit of each server, now and when the prober updates it later. A client
                with a shorter limit keeps to its limit.
            min_servers: needed confirmations. None: as in `ServerFleet`.
            stream: buckets of the folder's weights, which another thread gathers, for servers that
                are `DistributedServer`s. The folder may then hold only its manifest and small
                files. Only if it holds the weights, too, can the prober update a server.

        Returns:
            `states` after the update.

        Raises:
            ConfigError: ``min_servers`` exceeds the number of servers, a server of the source does
                not start, the folder has another version, a server cannot receive weights, takes no
                adapters, or has no mirror for a folder of changes, or the servers were put to
                sleep.
            CheckpointCorruptError: there is no published folder.
            RolloutError: too few servers of the source are left.
            WorkerLost: too few servers confirmed, and one of the others lost its worker.
            PublishError: the folder cannot be read, or too few servers confirmed. The message names
                the others and their errors.
            StopRequested: the job was asked to stop while servers of the source were awaited.
        """
        needed = self._needed(min_servers)
        folder = published_folder(path, version, stream is not None, timeout_s)
        with self._updating:
            self.require_awake()
            self.await_start(needed)
            self.require_support(folder.type)
            return self._have_loaded(folder, needed, stream)

    def _have_loaded(
        self, folder: PublishedFolder, min_servers: int | None, stream: WeightStream | None = None
    ) -> list[ServerReport]:
        deadline = time.monotonic() + folder.timeout_s

        # All servers are to have the version, whatever becomes of this update. Those that missed
        # an earlier one are not waited for without need.
        with self._changed:
            self._folder = folder
            members = self._members
        awaited = {member for member in members if member.missed_no_update}
        for member in members:
            member.want(folder)

        # Tell all servers at once.
        readers: list[BucketReader] | list[None] = [None] * len(members)
        if stream is not None:
            readers = stream.open(member in awaited for member in members)
        told: dict[Future[None], FleetMember] = {}
        for member, reader in zip(members, readers, strict=True):
            tell = partial(_tell, member, folder, deadline, reader)
            told[on_daemon_thread(tell, f"weight update of {member.name}")] = member

        # Wait for them. What is not confirmed now is left to the prober.
        try:
            confirmed, needed, failed = _wait(told, awaited, min_servers, deadline)
        finally:
            late = time.monotonic() >= deadline
            _note_unanswered(members, folder, awaited, late)
            self._wake_prober()

        # Servers of a source that have ended come back, and the prober has them load the folder.
        if confirmed < needed and folder.on_disk and self._come_back(failed):
            self.wait_serving(needed, self._server_wait_s)
            confirmed = len(self.serving())

        # The result.
        if confirmed >= needed:
            self._log_done(confirmed, f"serve {folder.path}", deadline - folder.timeout_s)
            return self.states()
        failure = self._failure(folder, confirmed, needed)
        for error in failed.values():
            if isinstance(error, WorkerLost):  # the caller may start the worker again
                raise error from failure
        raise failure from next(iter(failed.values()), None)

    def _come_back(self, failed: dict[FleetMember, BaseException]) -> bool:
        """Whether all servers that failed have ended, or end now, and their source starts them
        again.
        """
        if self._source is None or self._prober is None:
            return False
        refused: dict[FleetMember, BaseException] = {}
        for member, error in failed.items():
            if not isinstance(error, UnreachableServerError | SlowServerError):
                refused[member] = error
        return self._have_ended(refused)

    def _have_ended(self, failed: dict[FleetMember, BaseException]) -> bool:
        """Whether all servers that failed end now, because their engine was killed, or serve after
        all. False without a source, which could start them again.
        """
        for error in failed.values():
            if not isinstance(error, ServerError) or isinstance(error, WrongContentError):
                return False
        began = time.monotonic()
        while not all(member.removed or member.serves for member in failed):
            if self._source is None or time.monotonic() > began + _END_S:
                return False
            require_no_stop("inference servers", began)
            self._follow()
            time.sleep(_START_LOOK_S)
        return True

    def sleep(self, timeout_s: float = 300.0, level: int = 1) -> list[ServerReport]:
        """Have all servers free the memory of their GPUs. Returns `states` once all of them sleep.

        They get no requests from now on. Requests in flight wait, and the weights of the next
        update answer them. The prober puts a server to sleep that is restarted meanwhile. A server
        that is down has no memory, and is no error.

        Args:
            timeout_s: time limit of each server.
            level: see `VLLMServer.sleep`.

        Raises:
            ConfigError: a server cannot sleep, or level 2 would drop the base model of adapters.
            RolloutError: too few servers of the source are left.
            ServerError: a server may still have its memory. The message names it and its error.
        """
        with self._updating:
            self._follow()
            self.require_sleep(level, None if self._folder is None else self._folder.type)
            if self._source is not None:
                self._source.hold(True)
                self._follow()  # a server may have started meanwhile
            with self._changed:
                self._sleep_level = level
                members = self._members
                for member in members:
                    member.rest(TAGS, level)
            failed = self._command(
                members, lambda member: member.fall_asleep(timeout_s), "sleep", timeout_s
            )
            self._wake_prober()

        # A server that is down has no memory.
        awake = {
            member: error
            for member, error in failed.items()
            if not isinstance(error, NoServerError)
        }
        if awake:
            raise ServerError(
                f"{len(awake)} of {len(members)} inference servers may still have the "
                f"memory of their GPUs: {_reasons(awake)}. See to them, or end them, before "
                "anything else takes that memory"
            ) from next(iter(awake.values()))
        return self.states()

    def wake_up(
        self, tags: Collection[str] = TAGS, timeout_s: float = 300.0, min_servers: int | None = None
    ) -> list[ServerReport]:
        """Have the servers take their memory back. Returns `states` once enough of them have it.

        With ``("weights",)`` they serve after the next `update`, which wakes their KV caches after
        the load. With both tags they load the last published version again and serve it. If it is
        in no folder, they serve the weights that they kept.

        Args:
            tags: parts to wake up, ``"weights"`` and ``"kv_cache"``.
            timeout_s: time limit of each server.
            min_servers: servers that must wake up. None: as in `ServerFleet`.

        Raises:
            ConfigError: there is no such tag, or a server cannot sleep.
            PublishError, RolloutError: too few servers of the source have started, or are left.
            ServerError, WorkerLost: too few servers woke up. The message names the others and their
                errors. Servers of a source had 30 s to end before, as in `update`.
            StopRequested: the job was asked to stop while servers of the source were awaited.
        """
        for tag in tags:
            require_choice("tags", tag, TAGS)
        needed = self._needed(min_servers)
        self.require_support("sleep")
        with self._updating:
            self._sleep_level = None
            if self._source is not None:
                self._source.hold(False)
            self.await_start(needed)

            # With both parts and a version on disk, a load wakes the servers and repairs the rest.
            if KV_CACHE in tags and self._folder is not None and self._folder.on_disk:
                return self._have_loaded(replace(self._folder, timeout_s=timeout_s), needed)

            # Else they only take their memory back.
            members = self._members
            for member in members:
                member.rest([tag for tag in TAGS if tag not in tags])
            failed = self._command(
                members,
                lambda member: member.command(lambda server: server.wake_up(tags), timeout_s),
                "wake up",
                timeout_s,
            )

        awake, needed = _count(set(members) - set(failed), members, needed)
        if awake < needed and self._have_ended(failed):
            self.await_start(needed)
            awake = len(self._members)  # servers that are started again do not sleep
        if awake < needed:
            raise ServerError(
                f"{awake} of {len(members)} inference servers "
                f"woke up, {needed} are needed: {_reasons(failed)}. See to these servers, or let "
                "fewer suffice (min_servers)"
            ) from next(iter(failed.values()), None)
        return self.states()

    def _command(
        self,
        members: Iterable[FleetMember],
        command: Callable[[FleetMember], None],
        what: str,
        timeout_s: float,
    ) -> dict[FleetMember, BaseException]:
        """Give servers a command at once, and wait. Returns the errors."""
        end = time.monotonic() + timeout_s
        told = {
            member: on_daemon_thread(partial(_carry_out, member, command, end), what)
            for member in members
        }

        # A server that was removed meanwhile may never answer.
        left_s = timeout_s
        while left_s > 0:
            awaited = [call for member, call in told.items() if not member.removed]
            _, late = wait(awaited, min(left_s, _REMOVAL_LOOK_S))
            if not late:
                break
            left_s = max(0.0, end - time.monotonic())

        failed: dict[FleetMember, BaseException] = {}
        for member, call in told.items():
            if not call.done():
                waited_s = timeout_s - left_s
                failed[member] = ServerError(f"it did not {what} within {waited_s:g} s")
                member.note(ServerState.GONE, str(failed[member]))
                continue
            error = call.exception()
            if error is not None:
                failed[member] = error

        self._log_done(len(told) - len(failed), f"did {what},", end - timeout_s)
        return failed

    def _log_done(self, done: int, what: str, since: float) -> None:
        count = len(self._members)
        if count:  # else the driver tells the servers, and logs it
            took_s = time.monotonic() - since
            logger.info("%d of %d inference servers %s after %.3f s", done, count, what, took_s)

    def require_awake(self) -> None:
        """Raise ConfigError if the servers were put to sleep, because an update takes memory of
        their GPUs.
        """
        if self._sleep_level is not None:
            raise ConfigError(
                "the inference servers sleep, and something else may have the memory of their "
                "GPUs; publish inside of `colocated(engine, fleet).rollout()`, or call "
                "fleet.wake_up(('weights',)) first"
            )

    def require_sleep(self, level: int, update_type: str | None) -> None:
        """Raise ConfigError if a server cannot sleep, or level 2 would drop what updates of this
        type build on.
        """
        require_choice("level", level, (1, 2))
        self.require_support("sleep")
        if level == 2 and update_type == "adapter":
            raise ConfigError(
                "sleep at level 2 drops the base model of the published adapters; take level 1"
            )

    def withdraw(self, version: int, timeout_s: float | None = None) -> None:
        """Stop loading ``version`` or a newer one, because it is about to be replaced. Its servers
        are behind then. Return once no server loads it any more.

        Raises PublishError if a load did not end within ``timeout_s`` (None: its own time limit),
        and StopRequested if the job was asked to stop meanwhile. Then replace nothing.
        """
        began = time.monotonic()
        with self._updating, self._changed:
            if self._folder is not None and self._folder.version >= version:
                self._folder = None
                for member in self._members:
                    member.want(None)
            for member in self._members:
                member.await_end_of_load(version, began, timeout_s)

    def require_support(self, update_type: str) -> None:
        """Raise ConfigError if a server cannot be updated by this `WeightUpdateMeta.type`, or from
        a ``"delta"``.
        """
        for member in self._members:
            require_support(member, update_type)

    def may_check_content(self) -> bool:
        """Whether a client checks contents. True without servers, because the folder may be loaded
        elsewhere.
        """
        members = self._members
        return not members or any(
            getattr(member.server, "checks_content", False) for member in members
        )

    def serving(self) -> list[S]:
        """The servers that may generate now.

        Raises RolloutError or ConfigError if the source of the servers cannot start enough of them.
        """
        if self._lost is not None:
            raise self._lost
        return [member.server for member in self._members if member.serves]

    def wait_serving(self, count: int, timeout_s: float) -> bool:
        """Wait until ``count`` servers may generate. False: ``timeout_s`` passed before.

        Raises StopRequested if the job was asked to stop meanwhile, or the errors of `serving`.
        """
        began = time.monotonic()
        end = began + timeout_s
        with self._changed:
            while len(self.serving()) < count:
                left_s = end - time.monotonic()
                if left_s <= 0:
                    return False
                require_no_stop("inference servers", began)
                self._changed.wait(min(left_s, STOP_LOOK_S))
            return True

    @property
    def is_away(self) -> bool:
        """Whether servers are just updated, or rest for a turn, so that requests have to wait."""
        resting = any(member.resting for member in self._members)
        return resting or self._sleep_level is not None or self._updating.locked()

    def states(self) -> list[ServerReport]:
        """A report on each server, in the order in which they were added. Those of a source that do
        not answer come last.
        """
        reports = [member.report for member in self._members]
        if self._source is not None:
            reports += self._source.absent()
        return reports

    def stats(self) -> dict[str, float]:
        """Number of servers per state, and seconds of the phases of an update (`server_stats`)."""
        stats = server_stats(self.states())
        if self._source is not None:
            stats |= self._source.stats()
        return stats

    @property
    def may_get_servers(self) -> bool:
        """Whether there are servers, or a source may start some."""
        return self._source is not None or bool(self._members)

    def folders_in_use(self) -> set[Path]:
        """Folders that a server is loading, or whose adapters a request still uses."""
        return {Path(folder) for member in self._members for folder in member.folders_in_use()}

    def scratch_folder(self) -> str:
        """A temporary folder for descriptions of weights that are not written. It goes with the
        fleet.
        """
        if self._scratch is None:
            self._scratch = tempfile.mkdtemp(prefix="holdfast-weights-")
            weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        return self._scratch

    def close(self) -> None:
        """Stop the prober. An update that runs on a server goes on."""
        self._closed.set()
        self._woken.set()
        if self._prober is not None:
            self._prober.join()

    def _needed(self, min_servers: int | None) -> int | None:
        """Confirmations that are needed. None: those of all servers, which a source never needs."""
        needed = self._min_servers if min_servers is None else min_servers
        require_range("min_servers", needed, low=1)
        count = len(self._members)
        if needed is not None and needed > count and self._source is None:
            raise ConfigError(f"min_servers is {needed}, but there are {count} inference servers")
        return needed

    def _failure(self, folder: PublishedFolder, confirmed: int, needed: int) -> PublishError:
        reports = [report for report in self.states() if report.state is not ServerState.SERVING]
        others = "; ".join(f"{report.name} is {report.state}: {report.error}" for report in reports)
        return PublishError(
            f"weight version {folder.version} was confirmed by {confirmed} of "
            f"{len(self.states())} inference servers, {needed} are needed: {others}. "
            f"{folder.path} stays; see to these servers and publish again, or let fewer suffice "
            "(min_servers)"
        )

    # Servers of a source

    def await_start(self, min_servers: int | None = None) -> None:
        """Wait until the source has started enough servers. Raises its errors, PublishError after
        ``server_wait_s``, and StopRequested if the job was asked to stop.
        """
        if self._source is None:
            return
        needed = self._needed(min_servers)
        began = time.monotonic()
        end = began + self._server_wait_s
        while True:
            self._follow()
            members = self._members
            if needed is None or len(members) >= needed:
                return
            if time.monotonic() > end:
                absent = "; ".join(str(report) for report in self._source.absent())
                raise PublishError(
                    f"{len(members)} inference servers answer after {self._server_wait_s:g} s, "
                    f"{needed} are needed: {absent}. See to these servers, or wait longer "
                    "(server_wait_s)"
                )
            require_no_stop("inference servers", began)
            time.sleep(_START_LOOK_S)

    def _follow(self) -> None:
        """Follow the source, if there is one. Raises its errors."""
        if self._source is not None:
            self._follow_source(self._source)
        if self._lost is not None:
            raise self._lost

    def _follow_source(self, source: ServerSource[S]) -> None:
        """Remove the servers that have ended, and add the new ones."""
        with self._following:
            try:
                servers = source.servers()
                for member in self._members:
                    if _has(self._followed, member.server) and not _has(servers, member.server):
                        self.remove(member.name, drain_s=0.0)

                # A server that the user has removed is not added again before it was restarted.
                self._followed = [server for server in self._followed if _has(servers, server)]
                for server in servers:
                    if not _has(self._followed, server):
                        self.add(server)
                        self._followed.append(server)
                self._lost = None
                self._unread = False
            except OSError as error:  # the shared folder may come back
                if not self._unread:
                    logger.warning("the list of servers cannot be read: %s", error)
                self._unread = True
            except HoldfastError as error:
                self._lost = error
                with self._changed:
                    self._changed.notify_all()

    # The prober

    def _wake_prober(self) -> None:
        """Start the prober, and have it look at servers that do not serve at once."""
        if self._probe_interval_s is None or self._closed.is_set():
            return
        if self._prober is None:
            self._prober = Thread(
                target=self._look_after_all, name="inference server prober", daemon=True
            )
            self._prober.start()
        if not all(member.serves for member in self._members):
            self._woken.set()

    def _look_after_all(self) -> None:
        while True:
            self._woken.wait(self._probe_interval_s)
            self._woken.clear()
            if self._closed.is_set():
                return
            if self._source is not None:
                self._follow_source(self._source)
            members = self._members
            for member in members:
                member.note_silence()
            for member in members:  # on threads, because a server may not answer
                look = partial(member.look_after, self._probe_interval_s or 0.0)
                on_daemon_thread(look, f"prober of {member.name}")


def _has(servers: Iterable[object], server: object) -> bool:
    return any(one is server for one in servers)


# Commands to one server


def _note_unanswered(
    members: Iterable[FleetMember], folder: PublishedFolder, awaited: set[FleetMember], late: bool
) -> None:
    """Note which servers are gone or behind at the end of the wait for them."""
    for member in members:
        if late:
            problem = f"it did not load {folder.path} within {folder.timeout_s:g} s"
            member.note_unanswered(folder, ServerState.GONE, problem)
        elif member in awaited:
            problem = f"it has not loaded {folder.path} yet"
            member.note_unanswered(folder, ServerState.BEHIND, problem)


def _tell(
    member: FleetMember, folder: PublishedFolder, deadline: float, buckets: BucketReader | None
) -> None:
    """Have the server load ``folder`` of the last `want`, or receive its weights, once it has
    answered an earlier update.

    Raises any error of the client, and PublishError if the server serves another version
    afterwards, or did not answer an earlier update before ``deadline`` (``time.monotonic``).
    """
    try:
        with member.alone(deadline):
            if member.removed:
                raise NoServerError("it was removed")
            if member.confirmed is not folder:  # else the prober was faster
                member.load(folder, buckets)
    finally:
        if buckets is not None:
            buckets.close()


def _carry_out(
    member: FleetMember, command: Callable[[FleetMember], None], deadline: float
) -> None:
    """Give a command after `FleetMember.rest`. Raises as `_tell` does. Without an answer to the
    earlier update the server is gone.
    """
    try:
        with member.alone(deadline):
            command(member)
    finally:
        if member.report.error == ABOUT_TO_SLEEP:  # the command never reached the server
            member.note(ServerState.GONE, "it has not answered to an earlier update yet")


def _reasons(failed: dict[FleetMember, BaseException]) -> str:
    return "; ".join(
        f"{member.name} is {member.report.state}: {error}" for member, error in failed.items()
    )


def _wait(
    told: dict[Future[None], FleetMember],
    awaited: set[FleetMember],
    min_servers: int | None,
    deadline: float,
) -> tuple[int, int, dict[FleetMember, BaseException]]:
    """Wait for needed and ``awaited`` answers. Returns the number of confirmations, how many are
    needed, and the servers that answered with errors.
    """
    confirmed: set[FleetMember] = set()
    failed: dict[FleetMember, BaseException] = {}
    pending = set(told)
    while True:
        # A server that was removed meanwhile may never answer.
        pending = {call for call in pending if call.done() or not told[call].removed}
        count, needed = _count(confirmed, told.values(), min_servers)
        waits_for_awaited = any(told[call] in awaited for call in pending)
        if count + len(pending) < needed or (count >= needed and not waits_for_awaited):
            break
        left_s = max(0.0, deadline - time.monotonic())
        done, pending = wait(pending, min(left_s, _REMOVAL_LOOK_S), FIRST_COMPLETED)
        if not done and left_s <= _REMOVAL_LOOK_S:
            break
        for call in done:
            error = call.exception()
            if error is None:
                confirmed.add(told[call])
            else:
                failed[told[call]] = error
    return *_count(confirmed, told.values(), min_servers), failed


def _count(
    done: Collection[FleetMember], members: Iterable[FleetMember], min_servers: int | None
) -> tuple[int, int]:
    """How many servers have done something, and how many need to: if ``min_servers`` is None, all
    that were not removed meanwhile.
    """
    if min_servers is not None:
        return len(done), min_servers
    left = [member for member in members if not member.removed]
    return sum(member in done for member in left), len(left)
