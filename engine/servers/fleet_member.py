"""`FleetMember`: one server of a fleet, its wanted weights, and its known state.

The publisher's thread and the prober's thread both update a server. Each holds the member's lock
until the server has answered, however long that takes. So a server has one update at a time, and
gets no second one after a timeout before it has answered the first. An answer counts only if its
weights are still the wanted ones and their folder is unchanged.

A server that should sleep is left asleep by the prober, and put to sleep again after a restart.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Condition, Lock
from typing import Generic, TypeVar, cast

from ...utils.errors import PublishError, ServerError, WorkerLost
from ...utils.logging import get_logger
from ...utils.remote import without_secrets
from ...utils.timing import timed
from ..api import AdapterServer, DistributedServer, InferenceServer, SleepingServer
from .api import ObservableServer, ServerReport, ServerState, ServerStatus, weights_label
from .client import ServerClient
from .sleep import TAGS
from .stream import BucketReader

logger = get_logger(__name__)

S = TypeVar("S", bound=InferenceServer)

_LONGEST_PAUSE_S = 300.0
_ABOUT_TO_SLEEP = "it is about to sleep"


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

    def load_into(self, server: InferenceServer, buckets: BucketReader | None = None) -> int:
        """Have a server load the folder, or receive its weights. Returns the version that it serves
        then.
        """
        if isinstance(server, ServerClient):
            server.allow(self.timeout_s)
        if self.type == "adapter":
            return cast(AdapterServer, server).update_adapters_from_disk(self.path, self.version)
        if buckets is not None:
            return cast(DistributedServer, server).update_weights_from_distributed(
                self.path, self.version, buckets
            )
        return server.update_weights_from_disk(self.path, self.version)


class FleetMember(Generic[S]):
    """A server of a fleet, and the latest ``report`` on it.

    ``changed`` guards the reports on all servers and is notified after each change. ``retry_s`` is
    the pause of `probe` after a load failed twice. It doubles with each further failure.
    """

    def __init__(self, server: S, changed: Condition, retry_s: float) -> None:
        self.server = server
        self.name = without_secrets(str(getattr(server, "name", server)))
        self._changed = changed
        self._retry_s = retry_s
        self.report = ServerReport(self.name)
        self._wanted: PublishedFolder | None = None
        self._answered: PublishedFolder | None = None
        self._confirmed: PublishedFolder | None = None
        self._busy = Lock()
        self._loading: str | None = None
        self._asked_at: float | None = None
        self._failures, self._retry_at = 0, 0.0
        self._logged: frozenset[str] = frozenset()
        self._rest: tuple[str, ...] = ()  # parts that should sleep
        self._slept_with: PublishedFolder | None = (
            None  # what it had confirmed when it was put to sleep
        )
        self._level, self._sleeps = 1, False  # whether it was put to sleep since the last `rest`

    def folders_in_use(self) -> set[str]:
        """Folders that the server is loading, or may read adapters from again."""
        used = (
            self.server.folders_in_use() if isinstance(self.server, AdapterServer) else set[str]()
        )
        loading = self._loading  # read once, because another thread sets it
        return used if loading is None else used | {loading}

    @property
    def expected(self) -> bool:
        """Whether the server should answer the next update, because it missed none."""
        return self._wanted is None or self.report.state in (
            ServerState.SERVING,
            ServerState.ASLEEP,
        )

    def want(self, folder: PublishedFolder | None) -> None:
        """Set the weights that the server should serve, without telling it. None: it may not be
        used any more.
        """
        with self._changed:
            self._wanted, self._logged = folder, frozenset()
            self._forget_failures()
            if folder is not None:
                self._rest = ()
            if folder is None and self.report.state is ServerState.SERVING:
                self._note(
                    ServerState.BEHIND, "its weights are about to be replaced", self.report.label
                )

    def tell(
        self, folder: PublishedFolder, deadline: float, buckets: BucketReader | None = None
    ) -> None:
        """Have the server load ``folder`` of the last `want`, or receive its weights, once it has
        answered an earlier update.

        Raises any error of the client, and PublishError if the server serves another version
        afterwards, or did not answer an earlier update before ``deadline`` (``time.monotonic``).
        """
        try:
            with self._alone(deadline):
                if self._wanted is not folder or self._rest:
                    raise PublishError(f"it is not to load {folder.path} any more")
                if self._confirmed is not folder:  # else the prober was faster
                    self._load(folder, buckets)
        finally:
            if buckets is not None:
                buckets.close()

    @contextmanager
    def _alone(self, deadline: float) -> Iterator[None]:
        """Wait until the server has answered an earlier update, or raise PublishError."""
        if not self._busy.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PublishError("it has not answered to an earlier update yet")
        try:
            yield
        finally:
            self._busy.release()

    def rest(self, tags: Collection[str], level: int = 1) -> None:
        """Set the parts that should sleep, without telling the server. It gets no requests from now
        on.
        """
        with self._changed:
            self._slept_with = self._confirmed or self._slept_with
            self._rest, self._level, self._confirmed, self._sleeps = tuple(tags), level, None, False
            self._forget_failures()
            if self.report.state is ServerState.SERVING:
                self._note(ServerState.ASLEEP, _ABOUT_TO_SLEEP, self.report.label)

    def sleep(self, timeout_s: float, deadline: float) -> None:
        """Put the server to sleep. Raises as `tell` does."""
        with self._answering(deadline):
            self._fall_asleep(timeout_s)

    def wake_up(self, tags: Collection[str], timeout_s: float, deadline: float) -> None:
        """Wake parts of the server. It gets requests if it kept the wanted weights. Raises as
        `tell` does.
        """
        with self._answering(deadline):
            self._command(lambda server: server.wake_up(tags), timeout_s)

    @contextmanager
    def _answering(self, deadline: float) -> Iterator[None]:
        """Like `_alone`, for a command after `rest`. Without an answer to the earlier update the
        server is gone.
        """
        try:
            with self._alone(deadline):
                yield
        finally:
            if self.report.error == _ABOUT_TO_SLEEP:  # the command never reached the server
                self._note(ServerState.GONE, "it has not answered to an earlier update yet")

    def _fall_asleep(self, timeout_s: float) -> None:
        self._command(lambda server: server.sleep(self._level), timeout_s)
        self._sleeps = True

    def _command(self, command: Callable[[SleepingServer], None], timeout_s: float) -> None:
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
            if not isinstance(self.server, ObservableServer):
                self._note(
                    ServerState.ASLEEP if self._rest and error is None else ServerState.BEHIND,
                    error,
                )
            elif (status := self._ask(self.server, error)) is not None and not self._note_kept(
                status
            ):
                self._note_unready(status, error)

    def _note_kept(self, status: ServerStatus) -> bool:
        """Note that it serves if it woke up with the wanted weights, which it had confirmed before
        it slept.
        """
        with self._changed:
            folder = self._wanted
            if self._rest or folder is None or folder is not self._slept_with:
                return False
            if served := status == ServerStatus(folder.label, paused=False):
                self._confirmed = folder
                self._note(ServerState.SERVING, None, folder.label)
            return served

    def note_gone(self, error: str) -> None:
        """Note that the server did not answer a command in time."""
        self._note(ServerState.GONE, error)

    def give_up(self, folder: PublishedFolder, state: ServerState, error: str) -> None:
        """Note the end of the publisher's wait, unless the server has answered to ``folder`` by
        now.
        """
        with self._changed:
            if self._wanted is folder and self._answered is not folder:
                self._note(state, error)

    def probe(self) -> None:
        """Have the server load the wanted weights if it serves others. Do nothing during another
        update.
        """
        if not self._busy.acquire(blocking=False):
            return
        try:
            folder = self._wanted
            if self._rest:
                return self._probe_sleeper()
            if folder is None or not self._needs(folder) or not folder.on_disk:
                return
            if self._wanted is folder and not self._rest and time.monotonic() >= self._retry_at:
                self._load(folder)
        finally:
            self._busy.release()

    def note_silence(self, limit_s: float) -> None:
        """Note the server as gone if a status request has taken ``limit_s``."""
        with self._changed:
            if (
                self._asked_at is not None
                and (silent_s := time.monotonic() - self._asked_at) >= limit_s
            ):
                self._note(ServerState.GONE, f"it has not answered for {silent_s:.0f} s")

    def _probe_sleeper(self) -> None:
        if self.report.error == _ABOUT_TO_SLEEP:  # `sleep` is on its way
            return
        if (
            not isinstance(self.server, ObservableServer)
            or (status := self._ask(self.server)) is None
        ):
            return
        if not set(self._rest) <= set(status.asleep):
            self._note_unready(status, "it was restarted while it should sleep")
        elif self._sleeps or self._rest != TAGS:
            return self._note_unready(status, None)
        if self._rest == TAGS:  # also if it said before that it sleeps, and then failed to
            with suppress(Exception):  # the report has it
                self._fall_asleep(_LONGEST_PAUSE_S)

    def _needs(self, folder: PublishedFolder) -> bool:
        if not isinstance(self.server, ObservableServer):
            return self.report.state is not ServerState.SERVING
        status = self._ask(self.server)
        if status is None:
            self._forget_failures()  # the server may have been restarted
            return False
        # The label alone proves nothing: the load may have failed afterwards, or another job may
        # publish.
        with self._changed:
            if status == ServerStatus(folder.label, paused=False) and self._confirmed is folder:
                self._note(ServerState.SERVING, None, folder.label)
                return False
            if self._rest:
                return False
        seen = (
            "it sleeps"
            if status.asleep
            else "it is paused"
            if status.paused
            else f"it serves {status.label or 'other weights'}"
        )
        if (
            not status.paused
            and self._confirmed is folder
            and status.label not in (None, folder.label)
        ):
            seen += f", published by somebody else since it confirmed {folder.label}; let one job publish to a server"
        known = self.report.error if self._failures else None  # it is more specific
        self._note_unready(status, known or seen)
        return True

    def _load(self, folder: PublishedFolder, buckets: BucketReader | None = None) -> None:
        self._loading, self._confirmed, self._slept_with = folder.path, None, None
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
            self._fail(folder, error)
            raise
        finally:
            self._loading = None
            if isinstance(self.server, ObservableServer):
                seconds |= self.server.seconds
            with self._changed:
                self.report = replace(self.report, seconds=seconds)
        with self._changed:
            if self._wanted is folder:
                self._answered = folder
                self._forget_failures()
                if not self._rest:
                    self._confirmed = folder
                    self._note(ServerState.SERVING, None, folder.label)
            else:
                self._note(ServerState.BEHIND, f"it serves version {folder.version}", folder.label)

    def _fail(self, folder: PublishedFolder, error: Exception) -> None:
        text, observable = _describe(error), isinstance(self.server, ObservableServer)
        with self._changed:
            if self._wanted is folder:
                self._answered = folder
                self._failures += 1
                pause_s = self._retry_s * 2.0 ** (self._failures - 2) if self._failures > 1 else 0.0
                self._retry_at = time.monotonic() + min(pause_s, _LONGEST_PAUSE_S)
            state = ServerState.BEHIND
            if isinstance(error, WorkerLost):
                state = ServerState.GONE
            elif observable and self.report.state is not ServerState.SERVING:
                state = self.report.state  # until the status request below
            self._note(state, text)
        if (
            isinstance(self.server, ObservableServer)
            and (status := self._ask(self.server, text)) is not None
        ):
            self._note_unready(status, text)

    def _forget_failures(self) -> None:
        self._failures, self._retry_at = 0, 0.0

    def _ask(self, server: ObservableServer, error: str | None = None) -> ServerStatus | None:
        """Ask for the status. Without an answer, note the server as gone because of ``error`` or
        the error here.
        """
        self._asked_at = time.monotonic()
        try:
            return server.status()
        except Exception as unanswered:  # the report holds the errors of the prober
            self._note(ServerState.GONE, error or _describe(unanswered))
            return None
        finally:
            self._asked_at = None

    def _note_unready(self, status: ServerStatus, error: str | None) -> None:
        state = ServerState.PAUSED if status.paused else ServerState.BEHIND
        self._note(ServerState.ASLEEP if status.asleep else state, error, status.label)

    def _note(self, state: ServerState, error: str | None, label: str | None = None) -> None:
        with self._changed:
            before = self.report.state
            self.report = replace(self.report, state=state, error=error, label=label)
            if state is not before:
                # Without a wanted folder, its version is just being published again, and the server
                # has no fault.
                fine = (
                    self._wanted is None
                    or state is ServerState.SERVING
                    or (state is ServerState.ASLEEP and self._rest)
                )
                level = logging.INFO if fine else logging.WARNING
                report = (
                    f"{self.name} is {state} as before" if error in self._logged else self.report
                )
                logger.log(level, "inference server %s (it was %s)", report, before)
                self._logged = self._logged | {error} if error else frozenset()
            self._changed.notify_all()


def _describe(error: BaseException) -> str:
    text = (
        str(error)
        if isinstance(error, ServerError | WorkerLost)
        else f"{type(error).__name__}: {error}"
    )
    return without_secrets(text)
