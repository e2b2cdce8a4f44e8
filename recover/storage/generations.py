"""Generations in a local folder: stage, commit, list, verify, quarantine, delete by retention.

A generation becomes visible only when it is complete, and no folder is ever overwritten. All of
this runs in one process, the leader: rank 0 under torchrun, the driver under Ray.
"""

import contextlib
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...utils.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
)
from ...utils.files import (
    StrPath,
    as_write_error,
    commit_folder,
    fsync_dir,
    make_durably,
    remove_or_log,
    replace_atomically,
    walk_leaves,
    write_durably,
)
from ...utils.logging import get_logger
from ...utils.manifest import (
    FileEntry,
    check_listing,
    read_manifest,
    verify_file,
    verify_folder,
    write_manifest,
)
from ..info import INFO_NAME, RecoverInfo

if TYPE_CHECKING:
    from ..config import RecoverConfig

logger = get_logger(__name__)

LOCK_NAME = "recover.lock"
"""Name of a run's lock file, next to the folder of generations. See `RecoverConfig.lock_path`."""
TRACKER_NAME = "latest_checkpointed_iteration.txt"
OWNER_NAME = "run_id.txt"
_GENERATION = re.compile(r"global_step_(\d+)")
_PIN = re.compile(r"\.pinned-global_step_(\d+)")


@dataclass(frozen=True)
class Generation:
    """One committed snapshot: the state after ``step``."""

    step: int
    path: Path


def stored_bytes(path: Path) -> int:
    """Bytes of all files of a generation, according to its manifest."""
    return sum(entry["bytes"] for entry in read_manifest(path)["files"].values())


class GenerationStore:
    """The generations of one run.

    Args:
        root: the ``recover`` folder. The first snapshot creates it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()  # ranks may have other working folders
        self._told_of_metric = False

    @property
    def tracker(self) -> Path:
        """File with the newest step, for people and other tools. Holdfast never chooses by it."""
        return self.root / TRACKER_NAME

    @property
    def owner(self) -> Path:
        """File with the id of the folder's run. The first commit writes it. It never changes."""
        return self.root / OWNER_NAME

    def run_id(self) -> str | None:
        """Id of the run that the folder belongs to. None if nothing in the folder tells it.

        A folder of an older version has no `owner` file. Then the newest generation that can be
        read tells the id. The same holds for a file without its line end, which a power cut has
        torn.
        """
        with contextlib.suppress(FileNotFoundError):
            text = self.owner.read_text(errors="replace")
            if text.endswith("\n"):
                return text.strip()
        # A folder of an older version.
        committed = [generation.path for generation in self.generations()]
        for path in (*committed, *self.quarantined()):
            with contextlib.suppress(CheckpointError, OSError):
                return RecoverInfo.read(path).run_id
        return None

    def require_own(self, run_id: str | None, where: StrPath) -> None:
        """Raise `CheckpointMismatchError` if the generation at ``where`` is of another run than
        this folder.

        A folder that never held a generation takes one of any run.
        """
        own = self.run_id()
        if own is not None and run_id is not None and run_id != own:
            raise CheckpointMismatchError(
                f"{where} is of run {run_id}, but {self.root} belongs to run {own}. To go on from "
                "it on purpose, give it a new folder (another recover.trial_name), or name it "
                "with recover.resume_path. Otherwise move it away, or name the mirror of this run"
            )

    def path_of(self, step: int) -> Path:
        """Path of the generation of ``step``, which need not exist."""
        return self.root / f"global_step_{step}"

    def generations(self) -> list[Generation]:
        """All committed generations that are not quarantined, newest first. Nothing is verified."""
        if not self.root.is_dir():
            return []
        found = []
        for path in self.root.iterdir():
            match = _GENERATION.fullmatch(path.name)
            if match and path.is_dir():
                found.append(Generation(int(match[1]), path))
        return sorted(found, key=lambda generation: generation.step, reverse=True)

    def pins(self) -> set[int]:
        """Steps that a person has pinned. No rule deletes their generations."""
        names = os.listdir(self.root) if self.root.is_dir() else []
        matches = [_PIN.fullmatch(name) for name in names]
        return {int(match[1]) for match in matches if match}

    def pin(self, step: int) -> None:
        """Keep the generation of ``step`` regardless of the rules. It need not exist yet.

        The mark is a file next to the generation, because a generation never changes after its
        commit.
        """
        if step not in self.pins():
            write_durably(self._pin_of(step), b"")
            fsync_dir(self.root)

    def unpin(self, step: int) -> None:
        """Apply the rules to the generation of ``step`` again."""
        self._pin_of(step).unlink(missing_ok=True)
        fsync_dir(self.root)

    def quarantined(self) -> list[Path]:
        """Folders of rejected generations, kept for inspection."""
        return sorted(self.root.glob(".rejected-*"))

    def sweep(self) -> None:
        """Remove staging folders, half-removed generations and unfinished tracker files of killed
        writers.
        """
        if self.root.is_dir():
            fsync_dir(self.root)  # renames of an earlier process may not be on the disk yet
        for pattern in (".staging-*", ".retired-*", f".{TRACKER_NAME}.*", f".{OWNER_NAME}.*"):
            for leftover in self.root.glob(pattern):
                logger.info("sweeping %s, left by a writer that was killed", leftover)
                remove_or_log(leftover)

    def open_staging(self, step: int) -> Path:
        """Create a hidden folder to write the generation of ``step``.

        Raises `CheckpointExistsError` if the generation exists, `CheckpointWriteError` if the
        folder cannot be created.
        """
        final = self.path_of(step)
        staging = self.root / f".staging-{step}-{uuid.uuid4().hex[:12]}"
        with as_write_error(staging):
            if final.exists():
                raise CheckpointExistsError(f"{final} exists already and is never written over")
            make_durably(self.root)
            staging.mkdir()
        return staging

    def staged_bytes(self, step: int) -> int:
        """Bytes in the staging folders of ``step``, which ranks are writing to."""
        n_bytes = 0
        for staging in self.root.glob(f".staging-{step}-*"):
            with contextlib.suppress(OSError):  # usually renamed or removed meanwhile
                n_bytes += sum(status.st_size for _, status in walk_leaves(staging))
        return n_bytes

    def newest_bytes(self) -> int:
        """Size of the newest generation, as an estimate for the next one. 0 if there is none."""
        for generation in self.generations():
            with contextlib.suppress(CheckpointError, OSError):
                return stored_bytes(generation.path)
        return 0

    def commit(
        self, staging: Path, step: int, entries: Iterable[FileEntry], facts: Mapping[str, Any]
    ) -> Generation:
        """Make a staged generation visible: manifest, fsync, rename, fsync, tracker, in this order.

        Each writer has fsynced its files. ``facts`` are other contents of the manifest. Names and
        sizes on disk are compared with it before the rename, so that no generation becomes visible
        that the next start would refuse. A tracker that cannot be written is no error, because it
        is only a hint.

        Raises:
            CheckpointWriteError: the file system refused, or a file of a rank is missing. Nothing
                is visible, except if the fsync after the rename failed: then a complete generation
                is visible, which a power cut may take away.
        """
        # The manifest is written last, so that it lists everything.
        with as_write_error(self.path_of(step)):
            write_manifest(staging, entries, facts)
            try:
                check_listing(staging)
            except CheckpointCorruptError as error:
                raise CheckpointWriteError(
                    f"{error}; do all ranks see the same {self.root}?"
                ) from error
        return self.adopt(staging, step)

    def adopt(self, staging: Path, step: int) -> Generation:
        """Make a staged folder with a manifest visible, for example a fetched copy. Raises as
        `commit`.
        """
        final = self.path_of(step)
        with as_write_error(final):
            commit_folder(staging, final)
        # Hints, which follow the rename. The generation is committed, whatever happens to them.
        newest = step
        with contextlib.suppress(OSError):
            newest = max([step, *(generation.step for generation in self.generations())])
        self._note(self.tracker, str(newest))
        run_id = None
        try:
            if not self.owner.exists():
                run_id = read_manifest(final).get("run_id")
        except (CheckpointError, OSError) as error:
            logger.warning("cannot note the run of %s: %s", final, error)
        if run_id is not None:
            self._note(self.owner, f"{run_id}\n")
        return Generation(step, final)

    def _note(self, path: Path, text: str) -> None:
        try:
            replace_atomically(path, text.encode())
        except OSError as error:
            logger.warning("cannot write %s: %s", path, error)

    def discard(self, staging: Path) -> None:
        """Remove a staging folder after a failed write."""
        shutil.rmtree(staging, ignore_errors=True)

    def newest_valid(
        self,
        check: Callable[[Path], RecoverInfo] | None = None,
        *,
        quarantine: bool = True,
        required: Path | None = None,
    ) -> tuple[Generation, RecoverInfo] | None:
        """Find the newest generation that passes ``check``. None stands for `verify`.

        Damaged generations are quarantined, or only logged if ``quarantine`` is False. None is
        returned if no usable one is left, and `quarantined` tells whether there ever was one. The
        error of a damaged generation at the resolved path ``required`` is raised instead.
        """
        check = check or self.verify
        for generation in self.generations():
            # Other errors than damage leave: an older generation would be no answer to them.
            try:
                return generation, check(generation.path)
            except CheckpointCorruptError as error:
                if generation.path.resolve() == required:
                    raise
                if quarantine:
                    self.quarantine(generation, str(error))
                else:
                    logger.warning("%s is not usable: %s", generation.path, error)
        return None

    def verify(self, path: Path) -> RecoverInfo:
        """Check a generation as `inspect` does, and compare every byte with its manifest."""
        info = self.inspect(path)
        verify_folder(path)
        return info

    def inspect(self, path: Path) -> RecoverInfo:
        """Compare names and sizes of a generation's files with its manifest, and read its info.

        Raises:
            CheckpointNotFoundError: there is no such folder.
            CheckpointCorruptError: something is wrong. The message names the first problem.
            CheckpointMismatchError: another version of Holdfast wrote the generation.
        """
        if not path.is_dir():
            raise CheckpointNotFoundError(f"there is no generation at {path}")
        files = check_listing(path)["files"]
        if INFO_NAME in files:  # check its bytes before they are parsed
            verify_file(path, INFO_NAME, files[INFO_NAME])
        info = RecoverInfo.read(path)
        step = info.last_step_info.global_step
        named = _GENERATION.fullmatch(path.name)
        if named and int(named[1]) != step:
            raise CheckpointCorruptError(f"{path} was renamed: it holds step {step}")
        return info

    def quarantine(self, generation: Generation, reason: str) -> Path:
        """Rename a generation so that nothing resumes from it. It stays for inspection."""
        # The reason becomes a part of the name.
        problem = reason.replace(str(generation.path), "").lower()
        words = re.sub(r"[^a-z0-9]+", "-", problem).strip("-")
        target = self.root / f".rejected-{generation.path.name}-{words[:80]}"
        if target.exists():
            target = target.with_name(f"{target.name}-{uuid.uuid4().hex[:8]}")

        os.rename(generation.path, target)
        fsync_dir(self.root)
        logger.warning("quarantined %s as %s: %s", generation.path, target.name, reason)
        return target

    def delete_by_retention(self, rules: "RetentionRules", copied: Collection[int] = ()) -> None:
        """Remove the generations that no rule keeps, oldest first, judged by the current contents
        of the folder.

        The newest usable generation always stays, and so do pinned ones and the steps ``copied``,
        whose files are being read.
        """
        # Look at everything first. If something cannot be read, nothing is deleted.
        try:
            generations = {generation.step: generation for generation in self.generations()}
            usable = (step for step, found in generations.items() if self._usable(found))
            newest_usable = next(usable, None)
            metrics: dict[int, Mapping[str, float]] = {}
            for step, generation in generations.items():
                metrics[step] = self._metrics(generation) if rules.best else {}
            pins = self.pins()
        except OSError as error:
            logger.warning("no generation is deleted, because one cannot be read: %s", error)
            return
        # Oldest first, so that a crash in between leaves the newest ones.
        keep = steps_to_keep(metrics, rules) | {newest_usable, *pins, *copied}
        obsolete = sorted(generations.keys() - keep)
        if obsolete and rules.best:
            self._warn_of_metric(rules, metrics)
        for step in obsolete:
            remove_or_log(generations[step].path)

    def _warn_of_metric(self, rules: "RetentionRules", metrics: "_Metrics") -> None:
        """Warn once if there is nothing to choose the best generations by."""
        names = sorted(set[str]().union(*metrics.values()))
        if rules.metric in names or self._told_of_metric:
            return
        self._told_of_metric = True
        logger.warning(
            "keep_best keeps nothing in %s: no generation has the metric %r (they have %s). "
            "Generations have the metrics of their own step: save at steps that have this one",
            self.root,
            rules.metric,
            names or "none",
        )

    def _usable(self, generation: Generation) -> bool:
        try:
            self.inspect(generation.path)
        except CheckpointError:
            return False
        return True

    def _metrics(self, generation: Generation) -> Mapping[str, float]:
        try:
            return RecoverInfo.read(generation.path).metrics
        except CheckpointError:
            return {}

    def _pin_of(self, step: int) -> Path:
        return self.root / f".pinned-{self.path_of(step).name}"


@dataclass(frozen=True)
class RetentionRules:
    """Rules for the generations that stay after a commit: the union of what each rule keeps.

    No state is needed between calls: if a rule would keep a generation given the whole history, it
    also kept it at every earlier moment. So no commit removes it too early.
    """

    last: int | None  # number of newest generations. None keeps all
    every_steps: int | None = None  # keep every N-th step. With 100: steps 99, 199, 299 ...
    best: int | None = None  # number of best generations by ``metric``
    metric: str | None = None  # name of one of a generation's metrics
    mode: str = "max"  # whether the ``max`` or the ``min`` of ``metric`` is best

    @classmethod
    def from_config(cls, config: "RecoverConfig") -> "RetentionRules":
        """Rules for the run's own folder."""
        return cls(
            last=config.max_ckpt_to_keep,
            every_steps=config.keep_every_steps,
            best=config.keep_best,
            metric=config.best_metric,
            mode=config.best_mode,
        )


_Metrics = Mapping[int, Mapping[str, float]]
"""Step of a generation -> its metrics."""


def steps_to_keep(generations: _Metrics, rules: RetentionRules) -> set[int]:
    """Return the steps of the generations to keep. ``generations``: step -> metrics. The newest is
    always kept.
    """
    return {step for step, reasons in reasons_to_keep(generations, rules).items() if reasons}


def reasons_to_keep(generations: _Metrics, rules: RetentionRules) -> dict[int, list[str]]:
    """Return the names of the rules that keep each step. Generations that no rule keeps go at the
    next commit.
    """
    # Steps that each rule wants.
    newest_first = sorted(generations, reverse=True)
    last = f"last {rules.last}" if rules.last else "all"
    wanted = {
        "newest": newest_first[:1],
        last: newest_first[: rules.last],
    }
    if rules.every_steps is not None:
        every = [step for step in newest_first if (step + 1) % rules.every_steps == 0]
        wanted[f"every {rules.every_steps} steps"] = every
    if rules.best is not None and rules.metric is not None:
        best = _best_first(generations, rules.metric, rules.mode)
        wanted[f"best {rules.best} by {rules.metric}"] = best[: rules.best]

    # Rules that want each step.
    reasons: dict[int, list[str]] = {}
    for step in newest_first:
        reasons[step] = [rule for rule, steps in wanted.items() if step in steps]
    return reasons


def _best_first(generations: _Metrics, metric: str, mode: str) -> list[int]:
    # Newer first if equal. Steps whose metric is missing or NaN are left out.
    sign = 1 if mode == "max" else -1
    ranked = []
    for step, metrics in generations.items():
        value = metrics.get(metric, math.nan)
        if not math.isnan(value):
            ranked.append((sign * value, step))
    return [step for _, step in sorted(ranked, reverse=True)]
