"""The arguments RUN and GEN: find the run or generation that they name, on this machine or at a
mirror.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ...utils.errors import (
    CheckpointNotFoundError,
    ConfigError,
    HoldfastError,
)
from ...utils.manifest import MANIFEST_NAME
from ..info import INFO_NAME
from ..storage.generations import (
    LOCK_NAME,
    TRACKER_NAME,
    GenerationStore,
)
from ..storage.journal import last_start
from .folders import Folder, UrlFolder, open_mirror

if TYPE_CHECKING:
    from ..storage.mirror import Mirror

T = TypeVar("T")

_STEP = re.compile(r"global_step_(\d+)")
_AT = re.compile(r"(.+)@(\d+|newest)", re.DOTALL)
_IN_A_STORE = re.compile(r"(\.(rejected|retired|pinned)-)?global_step_|\.staging-")
"""Names that a run creates in its folder of generations."""


run_argument = click.argument("run", metavar="RUN")
generation_argument = click.argument("generation", metavar="GEN")
stats_option = click.option(
    "--stats",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Path of the run's stats.jsonl.  [default: stats/stats.jsonl or stats.jsonl in RUN]",
)


def stats_file(trial_root: Path, named: Path | None) -> Path | None:
    """The file of `stats_option`, or the one in the usual place. None if there is none."""
    usual = [trial_root / "stats" / "stats.jsonl", trial_root / "stats.jsonl"]
    return named or next(filter(Path.is_file, usual), None)


class Run:
    """The generations of a run.

    Attributes:
        where: folder or URL, as it is printed.
        store: generations on this machine. None at a URL.
    """

    def __init__(self, text: str) -> None:
        self.store: GenerationStore | None = None
        self._mirror: Any = None
        self._traces: list[int] = []
        self._url = text.rstrip("/")
        if is_url(text):
            self._mirror = open_mirror(text)
            self.where = self._mirror.url
        else:
            self.store = GenerationStore(recover_root(local_path(text)))
            self.where = str(self.store.root)

    @property
    def trial_root(self) -> Path:
        """Folder of a run on this machine. Raises `ConfigError` at a URL."""
        return self.require_store().root.parent

    def require_store(self) -> GenerationStore:
        """Generations on this machine. Raises `ConfigError` at a URL."""
        if self.store is None:
            raise ConfigError(
                f"{self.where} is a copy at a URL; this command needs the run's folder on this "
                "machine"
            )
        return self.store

    def steps(self) -> list[int]:
        """Steps of the generations, newest first. At a mirror, incomplete and damaged copies are
        left out.
        """
        if self.store is None:
            return self._mirror.steps()
        generations = self.store.generations()
        return [generation.step for generation in generations]

    def damaged(self) -> list[int]:
        """Steps whose copies at a mirror were found damaged."""
        if self.store is not None:
            return []
        return self._mirror.steps(damaged=True)

    def recorded_mirror(self) -> str | None:
        """URL of the mirror in the last start of a run on this machine."""
        start = last_start(self.trial_root)
        if start is None:
            return None
        _, event = start
        return event.get("mirror")

    def open_mirror(self, url: str | None) -> "Mirror":
        """Open the mirror at ``url``, or the mirror of the run. Raises `ConfigError` if the run has
        none.
        """
        if url is None and self.store is None:
            url = self._url
        elif url is None:
            url = self.recorded_mirror()
        if url is None:
            raise ConfigError(
                f"{self.where}: no mirror was set when the run was last started; name one with "
                "--url"
            )
        return open_mirror(url)

    def folder(self, step: int) -> Folder:
        """The generation of a step. Raises `CheckpointNotFoundError` if there is none."""
        if self.store is not None:
            path = self.store.path_of(step)
            if path.is_dir():
                return Folder(path)
        else:
            # Listed once, because a mirror takes long to answer.
            if not self._traces:
                self._traces = self._mirror.traces()
            if step in self._traces:
                return UrlFolder(f"{self._url}/global_step_{step}")
        there = ", ".join(map(str, self.steps())) or "none"
        raise CheckpointNotFoundError(
            f"{self.where} has no generation of step {step}; there are: {there}"
        )

    def newest(self) -> Folder:
        """The newest generation. Raises `CheckpointNotFoundError` if there is none."""
        while True:
            # Twice, because a run may replace its only one while the folder is listed.
            steps = self.steps() or self.steps()
            if not steps:
                raise CheckpointNotFoundError(f"{self.where} has no generation yet")
            step = steps[0]
            try:
                return self.folder(step)
            except CheckpointNotFoundError:
                # Look again if the run has deleted it meanwhile.
                if self.store is None or self.store.path_of(step).is_dir():
                    raise


def find_generation(text: str) -> Folder:
    """Find the generation that GEN names. For a run, take its newest.

    Raises:
        CheckpointNotFoundError: there is no such generation.
    """
    named = _at_step(text)
    if named:
        run = Run(named[1])
        if named[2] == "newest":
            return run.newest()
        return run.folder(int(named[2]))
    # A run stands for its newest generation.
    if not _is_generation(text):
        return Run(text).newest()
    if not is_url(text):
        return Folder(local_path(text))
    # At a URL, a folder exists if there is a file in it.
    folder = UrlFolder(text.rstrip("/"))
    if not folder.sizes():
        raise CheckpointNotFoundError(f"there is nothing at {folder.where}")
    return folder


def read_generation(text: str, read: Callable[[Folder], T]) -> T:
    """Call ``read`` with the generation that GEN names. If a run deletes it meanwhile, look GEN up
    again.

    Raises:
        CheckpointNotFoundError: there is no such generation, or it is gone.
        HoldfastError, OSError: raised by ``read``, and the generation is still there.
    """
    while True:
        folder = find_generation(text)
        try:
            return read(folder)
        except (HoldfastError, OSError):
            if folder.path is None or folder.path.is_dir():
                raise


def names_generation(text: str) -> bool:
    """Whether an argument names one generation, or another checkpoint folder, rather than a run."""
    return _at_step(text) is not None or _is_generation(text)


def _at_step(text: str) -> re.Match[str] | None:
    """Run and step of ``RUN@120``, unless a folder has this name."""
    is_folder = not is_url(text) and local_path(text).exists()
    if is_folder:
        return None
    return _AT.fullmatch(text)


def _is_generation(text: str) -> bool:
    if is_url(text):
        _, _, name = text.rstrip("/").rpartition("/")
        return _STEP.fullmatch(name) is not None
    path = local_path(text)
    if _STEP.fullmatch(path.name):
        return True
    return (path / MANIFEST_NAME).is_file()


def find_step(text: str) -> tuple[GenerationStore, int]:
    """Store and step of a generation on this machine that a command will change. GEN must name the
    generation itself.

    Raises:
        ConfigError: GEN names a run, is a URL, or is a folder that Holdfast did not write as a
            generation.
        CheckpointNotFoundError: there is no such generation.
    """
    if is_url(text):
        raise ConfigError(f"{text} is at a URL; this command changes runs on this machine only")
    if not names_generation(text):
        raise ConfigError(
            f"{text} is no generation: name one, as {text}@120 or the folder global_step_120"
        )
    folder = find_generation(text)
    match = _STEP.fullmatch(folder.name)
    if folder.path is None or match is None:
        raise ConfigError(f"{folder.where} is no generation of a run on this machine")

    # Exports and the checkpoints of other trainers have the same folder names. A damaged generation
    # has one of these.
    marks = (folder.path / MANIFEST_NAME, folder.path / INFO_NAME)
    if not any(mark.exists() for mark in marks):
        raise ConfigError(
            f"{folder.where} has neither {MANIFEST_NAME} nor {INFO_NAME}: it is no generation of "
            "Holdfast"
        )
    return GenerationStore(folder.path.parent), int(match[1])


def is_url(text: str) -> bool:
    """Whether an argument is a URL that is not a folder on this machine."""
    return "://" in text and not text.startswith("file://")


def names_mirror(text: str) -> bool:
    """Whether RUN is the URL of a mirror. One on this machine has the form of a folder of
    generations, but no run keeps its own there.
    """
    if "://" not in text:
        return False
    if is_url(text):
        return True
    folder = local_path(text)
    is_run = holds_run(folder) or holds_run(folder / "recover")
    return folder.is_dir() and not is_run


def local_path(text: str) -> Path:
    """Path of the folder on this machine that an argument names."""
    return Path(text.removeprefix("file://"))


def holds_run(folder: Path) -> bool:
    """Whether a run keeps its generations in this folder. A run that has just started counts."""
    real = Path(os.path.realpath(folder))
    if real.name != "recover":
        return False
    has_generations = (real / TRACKER_NAME).exists()
    return has_generations or (real.parent / LOCK_NAME).exists()


def recover_root(path: Path) -> Path:
    """Folder of generations that RUN names. Raises `CheckpointNotFoundError` if RUN is not the
    folder of a run.
    """
    if not path.is_dir():
        raise CheckpointNotFoundError(f"there is no folder {path}")

    # The folder of the run. With a lock alone, the run has just started.
    root = path / "recover"
    if (path / LOCK_NAME).exists() or _holds_generations(root):
        return root

    # The folder of generations itself.
    if any(_STEP.fullmatch(child.name) for child in path.iterdir()):
        return path
    if path.name == "recover" and _holds_generations(path):
        return path

    # A folder that has runs below it, as the one of an experiment.
    nested = [*path.glob("*/recover"), *path.glob("*/*/recover")]
    below = sorted({found.parent for found in nested if _holds_generations(found)})
    hint = ""
    if below:
        hint = f"; runs below it: {', '.join(map(str, below[:8]))}"
    raise CheckpointNotFoundError(
        f"{path} is not the folder of a run: it has neither generations nor a recover/ for "
        f"them{hint}"
    )


def _holds_generations(root: Path) -> bool:
    """Whether a ``recover`` folder belongs to a run. A Python package may have the same name."""
    if not root.is_dir():
        return False
    if (root.parent / LOCK_NAME).exists():
        return True
    names = os.listdir(root)
    return not names or any(map(_IN_A_STORE.match, names))
