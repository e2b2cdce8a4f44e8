"""`RunFolder`: all files of one run, in the leader.

    <trial>/recover.lock              held from `open` to `close`: one job at a time
    <trial>/journal.jsonl             what happened, for people
    <trial>/recover/global_step_<N>   generations
    <trial>/recover/episodes          records since the newest generations
    <trial>/hf/global_step_<N>        Hugging Face exports
    <mirror_url>/...                  the mirror: copies of generations

All changes to existing generations or exports happen inside `committing`.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Lock

from ...utils.errors import CheckpointWriteError, FolderInUseError
from ...utils.folder_lock import FolderLock
from ...utils.logging import announce, get_logger
from ...utils.processes import process_started_at
from ..config import RecoverConfig
from ..info import RecoverInfo
from .episodes import SOON_S, EpisodeLogs
from .generations import Generation, GenerationStore, RetentionRules
from .journal import Journal
from .mirror import Mirror
from .wall_time import RunningTime

logger = get_logger(__name__)

LOG_END_S = 30.0
"""How long the end of a run waits until its last records are on stable storage."""


class RunFolder:
    """The folder of one run and its mirror."""

    def __init__(self, config: RecoverConfig) -> None:
        self.generations = GenerationStore(config.recover_root)
        self.exports = GenerationStore(config.hf_root)
        self.mirror: Mirror | None = None  # until `open`
        self.journal = Journal(config.trial_root)
        self.wall_time = RunningTime(config.trial_root)
        self.logs = EpisodeLogs(config.recover_root, config.episode_log_s)
        # a commit was still running when the run ended, and may still succeed
        self.commit_hangs = False
        self._config = config
        self._rules = RetentionRules.from_config(config)
        self._lock = FolderLock(config.lock_path)
        self._commit_lock = Lock()
        self._confirming = Lock()
        self._ended = False
        self._committed = False
        self._copies_s = config.mirror_timeout_s  # to wait for copies at the end

    def open(self) -> None:
        """Take the lock (`JobRefusedError` after ``lock_timeout_s``) and connect to the mirror.

        A second call does nothing.
        """
        # The lock first: only its holder may write to the mirror.
        is_open = self._lock.held
        self._lock.acquire_for_job(self._config.lock_timeout_s)
        url = self._config.mirror_path
        is_connected = is_open and self.mirror is not None
        if url is not None and not is_connected:
            self.mirror = Mirror(url, self._config.mirror_max_to_keep, confirm=self.confirm)
        self.journal.open()

    def note_start(
        self,
        resumed: tuple[Path, RecoverInfo] | None,
        world_size: int,
        load_s: float,
        total_steps: int,
    ) -> None:
        """Record that the run of ``total_steps`` begins, or that ``load`` has restored ``resumed``
        in ``load_s`` seconds.

        Every caller calls it, and the leader, which has the lock, records it.
        """
        step = path = None
        if resumed is not None:
            path, info = resumed
            step = info.last_step_info.global_step
            if self._lock.held:
                announce(logger, "resumed at step %d from %s in %.3f s", step + 1, path, load_s)
        self.journal.start(
            step=step,
            generation=None if path is None else str(path),
            load_s=round(load_s, 3),
            world_size=world_size,
            total_steps=total_steps,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_started=round(process_started_at(), 3),
            keep=asdict(self._rules),
            mirror=None if self.mirror is None else self.mirror.url,
            recorded=self.logs.n_read,
        )

    def note_stop(self, step: int, reason: str) -> None:
        """Record that the run was asked to stop, and will do so after this step."""
        logger.warning("step %d: stopping after a snapshot: %s", step, reason)
        self.journal.note("stop", step=step, reason=reason)

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Run a block that changes generations or exports, one at a time.

        Raises without running the block if the lock was lost and another job has used the folder
        since, or after `end_commits`.
        """
        with self._commit_lock:
            if self._ended:
                raise CheckpointWriteError("the handler was closed before this was committed")
            self.confirm()
            yield

    def confirm(self) -> None:
        """Check that no other job has used the folder or its mirror since this one opened it. Any
        thread may call it.

        Raises as `FolderLock.confirm`, and `CheckpointWriteError` after `close`.
        """
        with self._confirming:
            if not self._lock.held:
                raise CheckpointWriteError(
                    f"this job has released {self._config.trial_root}, which another may use by now"
                )
            self._lock.confirm()

    def end_commits(self, timeout_s: float) -> None:
        """Prevent further commits, and wait for the current one. After ``timeout_s``, set
        ``commit_hangs``.
        """
        self._ended = True
        # Whoever has the lock is committing, and may hang with the storage.
        if self._commit_lock.acquire(timeout=timeout_s):
            self._commit_lock.release()
        else:
            logger.error(
                "a commit does not come back: the storage of %s hangs", self._config.recover_root
            )
            self.commit_hangs = True

    def staged_bytes(self, step: int) -> int:
        """Uncommitted bytes that ranks have written for ``step``."""
        return self.generations.staged_bytes(step) + self.exports.staged_bytes(step)

    def keep(self, generation: Generation, logs: Mapping[str, str]) -> None:
        """After a commit, copy the generation to the mirror, and delete the generations that no
        rule keeps and the records before them. ``logs`` is what `EpisodeLogs.rotate` returned.
        """
        self._committed = True
        self.copy(generation)
        self.delete_old()
        self.logs.keep(logs)

    def copy(self, generation: Generation) -> None:
        """Copy a generation of the run to the mirror, in the background."""
        if self.mirror is None:
            return
        # A ``resume_path`` may lead to another run, which has its own mirror.
        is_own = generation.path.parent.resolve() == self.generations.root.resolve()
        if is_own:
            self.mirror.submit(generation)

    def delete_old(self) -> None:
        """Delete the generations that no retention rule keeps and that are not being copied."""
        # Files that are being copied must stay until the copy is complete.
        copied = set() if self.mirror is None else self.mirror.pinned()
        self.generations.delete_by_retention(self._rules, copied)

    def finish_copies(self, left_s: float | None) -> None:
        """Wait for unfinished copies before `close`, which will not wait again.

        The wait ends after ``mirror_timeout_s``, and after ``left_s`` if that is not None.
        """
        if left_s is not None:
            self._copies_s = min(self._copies_s, left_s)
        if self.mirror is not None:
            self.mirror.wait(self._copies_s)
        self._copies_s = 0.0

    def close(self, *, wait: bool) -> None:
        """Close the mirror, delete the generations that copies had kept unless the lock was lost,
        and release the lock. `open` may follow.

        With ``wait``, pending copies are finished first. While a commit hangs, nothing is done: it
        may still succeed, so the lock is kept until the process ends.
        """
        # Records are synced within this time. A kill loses none of them anyway.
        self.logs.close(LOG_END_S if wait else SOON_S)
        if self.commit_hangs:
            return
        with ExitStack() as ends:  # run in reverse order: the lock goes last
            ends.callback(self._lock.release)
            ends.callback(self.journal.close)
            if self.mirror is not None:
                self.mirror.close(self._copies_s if wait else 0.0)
                if self._committed:  # a run that failed to load deletes nothing
                    self._delete_copied()

    def _delete_copied(self) -> None:
        try:
            self.confirm()
        except (FolderInUseError, CheckpointWriteError) as error:
            logger.error("the generations that copies had kept stay: %s", error)
            return
        self.delete_old()
