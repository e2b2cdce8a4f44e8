"""`ServerFleet`: update inference servers together, and repair the servers that missed an update.

A publication succeeds once enough servers have confirmed it. The other servers get no requests
(`serving`). A thread, the prober, asks every server regularly which weights it serves, and at once
after a publication that a server missed. It has each of the others load the folder published last.
So a restarted server, or one that a killed publisher left paused, recovers by itself.

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
from itertools import repeat
from os import PathLike, fspath
from pathlib import Path
from threading import Condition, Event, Lock, Thread
from typing import Generic

from ...utils.config import require_choice, require_range
from ...utils.errors import ConfigError, NoServerError, PublishError, ServerError, WorkerLost
from ...utils.logging import get_logger
from ...utils.manifest import read_manifest
from ...utils.threads import on_daemon_thread
from ..api import AdapterServer, DistributedServer, SleepingServer
from ..hf.versions import holds_adapters, holds_delta_alone
from .api import ServerReport, ServerState, server_stats, weights_label
from .fleet_member import FleetMember, PublishedFolder, S
from .sleep import KV_CACHE, TAGS
from .stream import WeightStream

logger = get_logger(__name__)

_SILENCE_S = (
    10.0  # A server is gone if a status request takes longer. A busy server may take some seconds.
)
_NEEDED: dict[str, tuple[Callable[[object], bool], str]] = {
    "xccl": (
        lambda server: isinstance(server, DistributedServer),
        "cannot be sent weights; publish with WeightUpdateMeta type 'disk'",
    ),
    "adapter": (
        lambda server: isinstance(server, AdapterServer),
        "has no endpoint that loads adapters; publish merged weights with WeightUpdateMeta type 'disk'",
    ),
    "delta": (
        lambda server: getattr(server, "mirror", None) is not None,
        "has no mirror, which makes weights from changes; give the client its URL "
        "(mirror='http://host:9000'), or publish without delta",
    ),
    "sleep": (
        lambda server: isinstance(server, SleepingServer),
        "cannot sleep; give it GPUs of its own",
    ),
}
"""Type of an update, or ``sleep`` -> whether a server supports it, and the problem if it does not.
"""


class ServerFleet(Generic[S]):
    """Inference servers and their states. Any thread may call any method.

        fleet = ServerFleet([VLLMServer(url) for url in urls], min_servers=len(urls) - 1)
        engine.connect_engine(fleet, WeightUpdateMeta("disk", "/shared/weights"))
        executor = RolloutExecutor(config, loader, workflow, servers=fleet.serving)

    Args:
        servers: clients. Without `ObservableServer`, the state follows from the updates alone.
        min_servers: confirmations that a publication needs. None: from all servers.
        probe_interval_s: interval of the prober, which starts with the first `update`. None: no
            prober, so a server that missed an update waits for the next one.

    Raises:
        ConfigError: a value is out of range, or two servers have the same name.
    """

    def __init__(
        self,
        servers: Iterable[S],
        min_servers: int | None = None,
        probe_interval_s: float | None = 5.0,
    ) -> None:
        require_range("probe_interval_s", probe_interval_s, low=0.01)
        self._changed = Condition()
        self._members = [
            FleetMember(server, self._changed, probe_interval_s or 0.0) for server in servers
        ]
        names = [member.name for member in self._members]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"inference server {twice[0]} is named twice; name each once, or give them other "
                "names"
            )
        self._min_servers = self._require_enough(min_servers)
        self._folder: PublishedFolder | None = None
        self._scratch: str | None = None
        self._updating = Lock()
        self._asleep = False
        self._probe_interval_s = probe_interval_s
        self._prober: Thread | None = None
        self._woken, self._closed = Event(), Event()

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
        any other until it answers. The prober updates the rest, also after an error.

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
            ConfigError: ``min_servers`` exceeds the number of servers, the folder has another
                version, a server cannot receive weights, takes no adapters, or has no mirror for a
                folder of changes, or the servers were put to sleep.
            CheckpointCorruptError: there is no published folder.
            WorkerLost: too few servers confirmed, and one of the others lost its worker.
            PublishError: the folder cannot be read, or too few servers confirmed. The message names
                the others and their errors.
        """
        needed = self._min_servers if min_servers is None else self._require_enough(min_servers)
        if stream is not None:
            self.require_support("xccl")
        folder = _published(path, version, stream is not None, timeout_s)
        self.require_support(folder.type)
        with self._updating:
            self.require_awake()
            return self._have_loaded(folder, needed, stream)

    def _have_loaded(
        self, folder: PublishedFolder, needed: int, stream: WeightStream | None = None
    ) -> list[ServerReport]:
        deadline = time.monotonic() + folder.timeout_s
        self._folder = folder
        awaited = {member for member in self._members if member.expected}
        for member in self._members:
            member.want(folder)
        readers = (
            stream.open(member in awaited for member in self._members) if stream else repeat(None)
        )
        told = {
            on_daemon_thread(
                partial(member.tell, folder, deadline, own), f"weight update of {member.name}"
            ): member
            for member, own in zip(self._members, readers, strict=False)
        }
        try:
            confirmed, errors = _wait(told, awaited, needed, deadline)
        finally:
            late = time.monotonic() >= deadline
            for member in self._members:
                if late:
                    member.give_up(
                        folder,
                        ServerState.GONE,
                        f"it did not load {folder.path} within {folder.timeout_s:g} s",
                    )
                elif member in awaited:
                    member.give_up(
                        folder, ServerState.BEHIND, f"it has not loaded {folder.path} yet"
                    )
            self._probe_soon()
        if confirmed >= needed:
            took_s = time.monotonic() - deadline + folder.timeout_s
            if count := len(self._members):  # else the driver updates the servers, and logs it
                logger.info(
                    "%d of %d inference servers serve %s after %.3f s",
                    confirmed,
                    count,
                    folder.path,
                    took_s,
                )
            return self.states()
        failure = self._failure(folder, confirmed, needed)
        for error in errors:
            if isinstance(error, WorkerLost):  # the caller may start the worker again
                raise error from failure
        raise failure from next(iter(errors), None)

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
            ServerError: a server may still have its memory. The message names it and its error.
        """
        with self._updating:
            self.require_sleep(level, None if self._folder is None else self._folder.type)
            self._asleep = True
            for member in self._members:
                member.rest(TAGS, level)
            failed = self._command(
                lambda member, end: member.sleep(timeout_s, end), "sleep", timeout_s
            )
            self._probe_soon()
        if awake := {
            member: error
            for member, error in failed.items()
            if not isinstance(error, NoServerError)
        }:
            raise ServerError(
                f"{len(awake)} of {len(self._members)} inference servers may still have the "
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
            ServerError, WorkerLost: too few servers woke up. The message names the others and their
                errors.
        """
        for tag in tags:
            require_choice("tags", tag, TAGS)
        needed = self._min_servers if min_servers is None else self._require_enough(min_servers)
        self.require_support("sleep")
        with self._updating:
            self._asleep = False
            if KV_CACHE in tags and self._folder is not None and self._folder.on_disk:
                return self._have_loaded(replace(self._folder, timeout_s=timeout_s), needed)
            for member in self._members:
                member.rest([tag for tag in TAGS if tag not in tags])
            failed = self._command(
                lambda member, end: member.wake_up(tags, timeout_s, end), "wake up", timeout_s
            )
        if len(self._members) - len(failed) < needed:
            raise ServerError(
                f"{len(self._members) - len(failed)} of {len(self._members)} inference servers "
                f"woke up, {needed} are needed: {_reasons(failed)}. See to these servers, or let "
                "fewer suffice (min_servers)"
            ) from next(iter(failed.values()))
        return self.states()

    def _command(
        self, command: Callable[[FleetMember[S], float], None], what: str, timeout_s: float
    ) -> dict[FleetMember[S], BaseException]:
        """Give all servers a command at once, and wait. Returns the errors."""
        end = time.monotonic() + timeout_s
        told = {
            member: on_daemon_thread(partial(command, member, end), what)
            for member in self._members
        }
        wait(told.values(), timeout_s)
        failed: dict[FleetMember[S], BaseException] = {}
        for member, call in told.items():
            if not call.done():
                failed[member] = ServerError(f"it did not {what} within {timeout_s:g} s")
                member.note_gone(str(failed[member]))
            elif (error := call.exception()) is not None:
                failed[member] = error
        if count := len(self._members):
            took_s = time.monotonic() - end + timeout_s
            logger.info(
                "%d of %d inference servers did %s, after %.3f s",
                count - len(failed),
                count,
                what,
                took_s,
            )
        return failed

    def require_awake(self) -> None:
        """Raise ConfigError if the servers were put to sleep, because an update takes memory of
        their GPUs.
        """
        if self._asleep:
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

    def withdraw(self, version: int) -> None:
        """Stop loading ``version`` or a newer one, because it is about to be replaced. Its servers
        are behind then.
        """
        with self._updating:
            if self._folder is not None and self._folder.version >= version:
                self._folder = None
                for member in self._members:
                    member.want(None)

    def require_support(self, update_type: str) -> None:
        """Raise ConfigError if a server cannot be updated by this `WeightUpdateMeta.type`, or from
        a ``"delta"``.
        """
        supports, problem = _NEEDED.get(update_type, (lambda _: True, ""))
        for member in self._members:
            if not supports(member.server):
                raise ConfigError(
                    f"inference server {member.name}, a {type(member.server).__name__}, {problem}"
                )

    def may_check_content(self) -> bool:
        """Whether a client checks contents. True without servers, because the folder may be loaded
        elsewhere.
        """
        return not self._members or any(
            getattr(member.server, "checks_content", False) for member in self._members
        )

    def serving(self) -> list[S]:
        """The servers that may generate now."""
        return [
            member.server for member in self._members if member.report.state is ServerState.SERVING
        ]

    def wait_serving(self, count: int, timeout_s: float) -> bool:
        """Wait until ``count`` servers may generate. False: there were fewer after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.serving()) >= count, timeout_s)

    def states(self) -> list[ServerReport]:
        """A report on each server, in the order of the constructor's ``servers``."""
        return [member.report for member in self._members]

    def stats(self) -> dict[str, float]:
        """Number of servers per state, and seconds of the phases of an update (`server_stats`)."""
        return server_stats(self.states())

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

    def _require_enough(self, min_servers: int | None) -> int:
        require_range("min_servers", min_servers, low=1)
        if min_servers is not None and min_servers > len(self._members):
            raise ConfigError(
                f"min_servers is {min_servers}, but there are {len(self._members)} inference "
                "servers"
            )
        return len(self._members) if min_servers is None else min_servers

    def _failure(self, folder: PublishedFolder, confirmed: int, needed: int) -> PublishError:
        reports = [report for report in self.states() if report.state is not ServerState.SERVING]
        others = "; ".join(f"{report.name} is {report.state}: {report.error}" for report in reports)
        return PublishError(
            f"weight version {folder.version} was confirmed by {confirmed} of "
            f"{len(self._members)} inference servers, {needed} are needed: {others}. "
            f"{folder.path} stays; see to these servers and publish again, or let fewer suffice "
            "(min_servers)"
        )

    def _probe_soon(self) -> None:
        if self._probe_interval_s is None or self._closed.is_set():
            return
        if self._prober is None:
            self._prober = Thread(
                target=self._probe_on, name="inference server prober", daemon=True
            )
            self._prober.start()
        if len(self.serving()) < len(self._members):
            self._woken.set()

    def _probe_on(self) -> None:
        while True:
            self._woken.wait(self._probe_interval_s)
            self._woken.clear()
            if self._closed.is_set():
                return
            for member in self._members:
                member.note_silence(_SILENCE_S)
            for member in self._members:  # on threads, because a probe may hang
                on_daemon_thread(member.probe, f"probe of {member.name}")


def _published(
    path: str | PathLike[str], version: int, sent: bool, timeout_s: float
) -> PublishedFolder:
    try:
        manifest, label, changes = (
            read_manifest(path),
            weights_label(path, version),
            holds_delta_alone(path),
        )
    except OSError as error:
        raise PublishError(
            f"{path} cannot be read: {error}; no server was told. Publish again"
        ) from error
    if (found := manifest.get("weight_version")) != version:
        raise ConfigError(
            f"{path} holds weight version {found}; it was to be published as version {version}"
        )
    update_type = (
        "xccl"
        if sent
        else "adapter"
        if holds_adapters(manifest)
        else "delta"
        if changes
        else "disk"
    )
    on_disk = not sent or any(Path(path).glob("*.safetensors"))
    return PublishedFolder(fspath(path), version, label, update_type, timeout_s, on_disk)


def _reasons(failed: dict[FleetMember[S], BaseException]) -> str:
    return "; ".join(
        f"{member.name} is {member.report.state}: {error}" for member, error in failed.items()
    )


def _wait(
    told: dict[Future[None], FleetMember], awaited: set[FleetMember], needed: int, deadline: float
) -> tuple[int, list[BaseException]]:
    """Wait for needed and ``awaited`` answers. Returns the number of confirmations, and the errors
    of the others.
    """
    confirmed, errors, pending = 0, [], set(told)
    while needed <= confirmed + len(pending) and (
        confirmed < needed or any(told[call] in awaited for call in pending)
    ):
        done, pending = wait(pending, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
        if not done:
            break
        outcomes = [call.exception() for call in done]
        errors += [error for error in outcomes if error is not None]
        confirmed += outcomes.count(None)
    return confirmed, errors
