"""`FleetMember`: the state of one server of a fleet, its wanted weights, and the last report on it.

The fleet decides what a server is told and when. A member notes what the server answered. When the
prober of the fleet looks after it, it has the server load the wanted weights, or sleep again.

The publisher's thread and the prober's thread both update a server. Each holds the member's lock
until the server has answered, however long that takes. So a server has one update at a time, and
gets no second one after a timeout before it has answered the first. An answer counts only if its
weights are still the wanted ones and their folder is unchanged.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from threading import Condition, Lock
from typing import Generic, TypeVar, cast

from ...utils.errors import ConfigError, PublishError, ServerError, WorkerLost
from ...utils.logging import get_logger
from ...utils.manifest import read_manifest
from ...utils.remote import without_secrets
from ...utils.stopping import require_no_stop
from ...utils.timing import doubled, timed
from ..hf.versions import holds_adapters, holds_delta_alone
from .api import (
    TAGS,
    AdapterServer,
    DistributedServer,
    InferenceServer,
    ObservableServer,
    ServerReport,
    ServerState,
    ServerStatus,
    SleepingServer,
    weights_label,
)
from .client import ServerClient
from .stream import BucketReader

logger = get_logger(__name__)

S = TypeVar("S", bound=InferenceServer)

STOP_LOOK_S = 0.2
"""How often a wait looks for a request to stop the job."""
ABOUT_TO_SLEEP = "it is about to sleep"
"""Error of a server that should sleep, until the command to sleep has reached it."""

# A server is gone if a status request takes longer. A busy server may take some seconds.
_SILENCE_S = 10.0
_LONGEST_PAUSE_S = 300.0
"""Longest pause between failed loads, and time limit of commands to sleep."""


@dataclass(frozen=True)
class PublishedFolder:
    """A published version for servers to load."""

    path: str
    version: int
    label: str  # `weights_label` of the folder
    type: str  # see `WeightUpdateMeta.type`. "delta": it holds changes alone
    timeout_s: float  # time limit of one server
    on_disk: bool = True  # whether it has the weights, or only describes weights that are sent

    def unchanged(self) -> bool:
        """Whether the folder still has the same contents, by the digest of its manifest."""
        try:
            return weights_label(self.path, self.version) == self.label
        except OSError:
            return False

    def load_into(self, server: InferenceServer, buckets: BucketReader | None) -> int:
        """Have a server load the folder, or receive its weights. Returns the version that it serves
        then.
        """
        if isinstance(server, ServerClient):
            server.allow(self.timeout_s)
        if self.type == "adapter":
            return cast(AdapterServer, server).update_adapters_from_disk(self.path, self.version)
        if buckets is not None:
            receiver = cast(DistributedServer, server)
            return receiver.update_weights_from_distributed(self.path, self.version, buckets)
        return server.update_weights_from_disk(self.path, self.version)


def published_folder(
    path: str | PathLike[str], version: int, sent: bool, timeout_s: float
) -> PublishedFolder:
    """Read which version a folder holds. ``sent``: its weights are sent to the servers.

    Raises PublishError if it cannot be read, and ConfigError if it holds another version.
    """
    try:
        manifest = read_manifest(path)
        label = weights_label(path, version)
        update_type = "delta" if holds_delta_alone(path) else "disk"
    except OSError as error:
        raise PublishError(
            f"{path} cannot be read: {error}; no server was told. Publish again"
        ) from error
    found = manifest.get("weight_version")
    if found != version:
        raise ConfigError(
            f"{path} holds weight version {found}; it was to be published as version {version}"
        )

    # Weights that are sent may be on disk as well, for servers that restart.
    on_disk = True
    if sent:
        update_type = "xccl"
        on_disk = any(Path(path).glob("*.safetensors"))
    elif holds_adapters(manifest):
        update_type = "adapter"
    return PublishedFolder(fspath(path), version, label, update_type, timeout_s, on_disk)


class FleetMember(Generic[S]):
    """A server of a fleet, and the latest ``report`` on it.

    ``changed`` guards the state of all servers and is notified after each change of a report.
    """

    def __init__(self, server: S, changed: Condition) -> None:
        self.server = server
        self.name = without_secrets(str(getattr(server, "name", server)))
        self.report = ServerReport(self.name)
        self.changed = changed
        self.busy = Lock()  # held by the thread that talks to the server

        # The version that the server should serve, and the same one after the server answered to
        # it, in whatever way, and after the server confirmed it.
        self.wanted: PublishedFolder | None = None
        self._answered: PublishedFolder | None = None
        self.confirmed: PublishedFolder | None = None
        self._loading: PublishedFolder | None = None  # folder of the load that runs
        self.removed = False

        # Sleep.
        self.resting: tuple[str, ...] = ()  # parts that should sleep
        self._sleep_level = 1
        self._sleeps = False  # whether it was put to sleep since the last `rest`
        self._slept_with: PublishedFolder | None = None  # confirmed when it was put to sleep

        # Failed loads of the wanted version, and the problem that was logged last.
        self._failures = 0
        self._failed_at = 0.0
        self._logged: frozenset[str] = frozenset()

        self._asked_at: float | None = None  # start of the status request that runs

    @property
    def serves(self) -> bool:
        """Whether the server may generate."""
        return self.report.state is ServerState.SERVING

    def folders_in_use(self) -> set[str]:
        """Folders that the server is loading, or may read adapters from again."""
        used: set[str] = set()
        if isinstance(self.server, AdapterServer):
            used |= self.server.folders_in_use()
        loading = self._loading  # read once, because another thread sets it
        if loading is not None:
            used.add(loading.path)
        return used

    def await_end_of_load(self, version: int, began: float, timeout_s: float | None) -> None:
        """Wait for the end of a load of ``version`` or a newer one. PublishError after
        ``timeout_s`` (None: the time limit of the load) since ``began``, on the monotonic clock,
        and StopRequested if the job is to stop. The caller holds ``changed``.
        """
        folder = self._loading
        if folder is None or folder.version < version:
            return

        def ended() -> bool:
            return self.removed or self._loading is not folder

        limit_s = folder.timeout_s if timeout_s is None else timeout_s
        while not self.changed.wait_for(ended, STOP_LOOK_S):
            require_no_stop("inference servers", began)
            if time.monotonic() < began + limit_s:
                continue
            raise PublishError(
                f"inference server {self.name} is still loading {folder.path} after another "
                f"{limit_s:g} s, so nothing was written in its place; see to the server or remove "
                "it from the fleet, and publish again"
            )

    @contextmanager
    def alone(self, deadline: float) -> Iterator[None]:
        """Wait until the server has answered an earlier update, or raise PublishError after
        ``deadline`` (``time.monotonic``).
        """
        if not self.busy.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PublishError("it has not answered to an earlier update yet")
        try:
            yield
        finally:
            self.busy.release()

    # Wishes for the server. It is not told of them here.

    def want(self, folder: PublishedFolder | None) -> None:
        """Set the weights that the server should serve. None: it may not be used any more."""
        with self.changed:
            self.wanted = folder
            self._logged = frozenset()
            self._failures = 0
            if folder is not None:
                self.resting = ()
            elif self.serves:
                problem = "its weights are about to be replaced"
                self.note(ServerState.BEHIND, problem, self.report.label)

    def leave(self) -> None:
        """Note that the server belongs to the fleet no more."""
        with self.changed:
            self.removed = True
            self.wanted = None
            self.resting = ()
            self.changed.notify_all()

    def rest(self, tags: Collection[str], level: int = 1) -> None:
        """Set the parts that should sleep. The server gets no requests from now on."""
        with self.changed:
            self._slept_with = self.confirmed or self._slept_with
            self.confirmed = None
            self.resting = tuple(tags)
            self._sleep_level = level
            self._sleeps = False
            self._failures = 0
            if self.serves:
                self.note(ServerState.ASLEEP, ABOUT_TO_SLEEP, self.report.label)

    # Its updates so far

    @property
    def missed_no_update(self) -> bool:
        """Whether the server should answer the next update, because it missed none."""
        return self.wanted is None or self.report.state in (ServerState.SERVING, ServerState.ASLEEP)

    # Talking to the server. The caller holds `busy`, but not for a status request.

    def load(self, folder: PublishedFolder, buckets: BucketReader | None = None) -> None:
        """Have the server load ``folder``, or receive its weights, and note the outcome.

        Raises any error of the client, and PublishError if the server serves another version
        afterwards, or is not to load the folder any more.
        """
        with self.changed:  # a withdrawal comes before this, or waits for the end of the load
            if self.wanted is not folder or self.resting:
                raise PublishError(f"it is not to load {folder.path} any more")
            self._loading = folder
            self.confirmed = None
            self._slept_with = None
        seconds: dict[str, float] = {}
        try:
            with timed(seconds, "total"):
                served = folder.load_into(self.server, buckets)
            if served != folder.version:
                raise PublishError(
                    f"it serves version {served!r} after it was told to load version "
                    f"{folder.version}"
                )
            if not folder.unchanged():
                raise PublishError(f"{folder.path} was replaced while it was loaded")
        except Exception as error:
            self._note_failed_load(folder, error)
            raise
        finally:
            with self.changed:
                self._loading = None
                self.changed.notify_all()
                if isinstance(self.server, ObservableServer):
                    seconds |= self.server.seconds
                self.report = replace(self.report, seconds=seconds)
        self._note_loaded(folder)

    def command(self, command: Callable[[SleepingServer], None], timeout_s: float) -> None:
        """Give a command of `SleepingServer`, and note the state after it."""
        if isinstance(self.server, ServerClient):
            self.server.allow(timeout_s)
        error: str | None = None
        try:
            command(cast(SleepingServer, self.server))
        except Exception as failure:
            error = _describe(failure)
            raise
        finally:
            self._note_commanded(error)

    def fall_asleep(self, timeout_s: float) -> None:
        """Have the server sleep. Raises as `command` does."""
        self.command(lambda server: server.sleep(self._sleep_level), timeout_s)
        self._sleeps = True

    def _ask(self, error: str | None = None) -> ServerStatus | None:
        """Ask for the status. Without an answer, note the server as gone because of ``error`` or
        the error here. None also if it is no `ObservableServer`.
        """
        if not isinstance(self.server, ObservableServer):
            return None
        self._asked_at = time.monotonic()
        try:
            return self.server.status()
        except Exception as unanswered:  # the report holds the errors of the prober
            self.note(ServerState.GONE, error or _describe(unanswered))
            return None
        finally:
            self._asked_at = None

    # Calls of the prober. The server loads the weights that it should serve, or sleeps again.

    def note_silence(self) -> None:
        """Note the server as gone if a status request has taken too long."""
        with self.changed:
            asked_at = self._asked_at  # another thread ends the request at any moment
            if asked_at is None:
                return
            silent_s = time.monotonic() - asked_at
            if silent_s >= _SILENCE_S:
                self.note(ServerState.GONE, f"it has not answered for {silent_s:.0f} s")

    def look_after(self, retry_s: float) -> None:
        """Have the server load the wanted weights if it serves others, or sleep if it should. Do
        nothing during another update.
        """
        if not self.busy.acquire(blocking=False):
            return
        try:
            folder = self.wanted
            if self.resting:
                self._look_after_sleeper()
            elif folder is not None and self._needs_load(folder) and folder.on_disk:
                # The status request took a while, in which the publisher may have decided
                # otherwise.
                still_wanted = self.wanted is folder and not self.resting
                if still_wanted and time.monotonic() >= self._retry_at(retry_s):
                    self.load(folder)
        finally:
            self.busy.release()

    def _look_after_sleeper(self) -> None:
        if self.report.error == ABOUT_TO_SLEEP:  # the command is on its way
            return
        status = self._ask()
        if status is None:
            return
        whole = self.resting == TAGS
        if not set(self.resting) <= set(status.asleep):
            self._note_unready(status, "it was restarted while it should sleep")
        elif self._sleeps or not whole:
            self._note_unready(status, None)
            return

        # Also if it said before that it sleeps, and then failed to.
        if whole:
            with suppress(Exception):  # the report has it
                self.fall_asleep(_LONGEST_PAUSE_S)

    def _needs_load(self, folder: PublishedFolder) -> bool:
        if not isinstance(self.server, ObservableServer):
            return not self.serves
        status = self._ask()
        if status is None:
            self._failures = 0  # the server may have been restarted
            return False

        with self.changed:
            # Meanwhile the publisher may have decided otherwise.
            if self.wanted is not folder or self.resting:
                return False

            # The label alone proves nothing: the load may have failed afterwards, or another job
            # may publish.
            if self.confirmed is folder and status == ServerStatus(folder.label, paused=False):
                self._confirm(folder)
                return False

            # The error of a failed load is more specific than what the server says.
            problem = self._seen_problem(folder, status)
            if self._failures and self.report.error:
                problem = self.report.error
            self._note_unready(status, problem)
            return True

    def _seen_problem(self, folder: PublishedFolder, status: ServerStatus) -> str:
        seen = f"it serves {status.label or 'other weights'}"
        if status.asleep:
            seen = "it sleeps"
        elif status.paused:
            seen = "it is paused"

        other_label = status.label not in (None, folder.label)
        if other_label and not status.paused and self.confirmed is folder:
            seen += (
                f", published by somebody else since it confirmed {folder.label}; let one job "
                "publish to a server"
            )
        return seen

    def _retry_at(self, pause_s: float) -> float:
        """Time of the next load. The pause begins after the second failure, and doubles with
        each.
        """
        if self._failures <= 1:
            return 0.0
        return self._failed_at + doubled(pause_s, self._failures - 2, _LONGEST_PAUSE_S)

    # Notes of the answers of the server.

    def _note_loaded(self, folder: PublishedFolder) -> None:
        with self.changed:
            if self.wanted is not folder:
                problem = f"it serves version {folder.version}"
                self.note(ServerState.BEHIND, problem, folder.label)
                return
            self._answered = folder
            self._failures = 0
            if not self.resting:
                self._confirm(folder)

    def _note_failed_load(self, folder: PublishedFolder, error: Exception) -> None:
        text = _describe(error)
        observable = isinstance(self.server, ObservableServer)
        with self.changed:
            if self.wanted is folder:
                self._answered = folder
                self._failures += 1
                self._failed_at = time.monotonic()
            state = ServerState.BEHIND
            if isinstance(error, WorkerLost):
                state = ServerState.GONE
            elif observable and not self.serves:
                state = self.report.state  # until the status request below
            self.note(state, text)

        status = self._ask(text)
        if status is not None:
            self._note_unready(status, text)

    def _note_commanded(self, error: str | None) -> None:
        if not isinstance(self.server, ObservableServer):
            sleeps = self.resting and error is None
            self.note(ServerState.ASLEEP if sleeps else ServerState.BEHIND, error)
            return
        status = self._ask(error)
        if status is not None and not self._note_kept(status):
            self._note_unready(status, error)

    def _note_kept(self, status: ServerStatus) -> bool:
        """Note that it serves if it woke up with the wanted weights, which it had confirmed before
        it slept.
        """
        with self.changed:
            folder = self.wanted
            if self.resting or folder is None or folder is not self._slept_with:
                return False
            if status != ServerStatus(folder.label, paused=False):
                return False
            self._confirm(folder)
            return True

    def _confirm(self, folder: PublishedFolder) -> None:
        """Note that the server serves the wanted weights. The caller holds ``changed``."""
        self.confirmed = folder
        self.note(ServerState.SERVING, None, folder.label)

    def note_unanswered(self, folder: PublishedFolder, state: ServerState, error: str) -> None:
        """Note the end of the publisher's wait, unless the server has answered to ``folder`` by
        now.
        """
        with self.changed:
            if self.wanted is folder and self._answered is not folder:
                self.note(state, error)

    def _note_unready(self, status: ServerStatus, error: str | None) -> None:
        """Note the state of a server that must not generate."""
        state = ServerState.BEHIND
        if status.asleep:
            state = ServerState.ASLEEP
        elif status.paused:
            state = ServerState.PAUSED
        self.note(state, error, status.label)

    def note(self, state: ServerState, error: str | None, label: str | None = None) -> None:
        """Replace the report. A change of the state is logged."""
        with self.changed:
            before = self.report.state
            self.report = replace(self.report, state=state, error=error, label=label)
            if state is not before:
                self._log_change(before)
                self._logged = self._logged | {error} if error else frozenset()
            self.changed.notify_all()

    def _log_change(self, before: ServerState) -> None:
        report = self.report
        # Without a wanted folder, its version is just being published again, and the server has no
        # fault.
        fine = self.wanted is None or self.serves
        meant_to_sleep = report.state is ServerState.ASLEEP and self.resting
        level = logging.INFO if fine or meant_to_sleep else logging.WARNING

        # An error of a server that comes and goes is logged once.
        shown = str(report)
        if report.error in self._logged:
            shown = f"{self.name} is {report.state} as before"
        logger.log(level, "inference server %s (it was %s)", shown, before)


def require_support(member: FleetMember, update_type: str) -> None:
    """Raise ConfigError if a server does not support a type of update, or ``sleep``."""
    problem = _unsupported(member.server, update_type)
    if problem is not None:
        raise ConfigError(
            f"inference server {member.name}, a {type(member.server).__name__}, {problem}"
        )


def _unsupported(server: object, update_type: str) -> str | None:
    if update_type == "xccl" and not isinstance(server, DistributedServer):
        return "cannot be sent weights; publish with WeightUpdateMeta type 'disk'"
    if update_type == "adapter" and not isinstance(server, AdapterServer):
        return (
            "has no endpoint that loads adapters; publish merged weights with WeightUpdateMeta "
            "type 'disk'"
        )
    if update_type == "delta" and getattr(server, "mirror", None) is None:
        return (
            "has no mirror, which makes weights from changes; give the client its URL "
            "(mirror='http://host:9000'), or publish without delta"
        )
    if update_type == "sleep" and not isinstance(server, SleepingServer):
        return "cannot sleep; give it GPUs of its own"
    return None


def _describe(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ServerError | WorkerLost):
        text = str(error)
    return without_secrets(text)
