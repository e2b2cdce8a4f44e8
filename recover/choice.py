"""Which generation a run resumes from: the newest that verifies, here or at the mirror, or the one it was told.

One process chooses by names and sizes; then every rank compares the bytes of its share of the files. What fails is set
aside with the reason, and the next older one is tried. A run whose every generation failed does not start over.
"""

from functools import partial
from pathlib import Path

from ..engine.api import FinetuneSpec
from ..utils.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError, MirrorError
from ..utils.files import file_digest
from ..utils.logging import get_logger
from ..utils.manifest import MANIFEST_NAME, read_manifest
from .config import RecoverConfig
from .info import RecoverInfo
from .mirror import Mirror
from .rank_reading import check_bytes
from .ranks import Ranks
from .store import GenerationStore

logger = get_logger(__name__)

Choice = tuple[Path, RecoverInfo]


class ResumeChoice:
    """The choice of one run. All methods but `choose` run in the process that decides.

    Args:
        config: its ``mode`` and ``resume_path``.
        ft_spec: how the run is cut into epochs; a generation that was cut differently is refused.
        store: where the generations are.

    Attributes:
        resume_path: the generation to go back to, or None.
        origin: digest of that generation's manifest, in the process that decides and once it has chosen. A folder can
            move; this tells whether the newest generation descends from it.
    """

    def __init__(self, config: RecoverConfig, ft_spec: FinetuneSpec, store: GenerationStore) -> None:
        self._mode, self._ft_spec, self._store = config.mode, ft_spec, store
        self._fetched: set[int] = set()
        self.resume_path = None if config.resume_path is None else Path(config.resume_path).resolve()
        self.origin: str | None = None

    def choose(self, ranks: Ranks, mirror: Mirror | None) -> Choice | None:
        """The generation to resume from, verified; None when there is nothing and never was. All ranks take part.

        Args:
            ranks: who compares the bytes.
            mirror: where else to look, in the process that decides.

        Raises:
            CheckpointCorruptError: there was something to resume, but nothing of it is usable.
            CheckpointNotFoundError: mode ``must`` or ``resume_path``, and there is nothing.
            CheckpointMismatchError: the generation is not of this run, or of a newer format.
        """
        ranks.decide(self._store.sweep)
        while (choice := ranks.decide_slowly(partial(self._candidate, mirror))) is not None:
            path = choice[0]
            files = ranks.decide(lambda path=path: read_manifest(path)["files"])
            problems = [found for found in ranks.run_all(check_bytes, str(path), files) if found is not None]
            if not problems:
                return choice
            ranks.decide(partial(self._refuse, path, problems[0]))
        return None

    def go_back(self, resumed: Choice, mirror: Mirror | None) -> None:
        """Give up what is newer than ``resumed``: a ``resume_path`` goes back behind it; else nothing is."""
        path, step = resumed[0].resolve(), resumed[1].last_step_info.global_step
        if self.resume_path is None or path != self.resume_path:
            return
        for generation in self._store.generations():
            if generation.step > step or (generation.step == step and generation.path.resolve() != path):
                self._store.set_aside(generation, f"superseded by resume_path {path.name}")
        if mirror is not None:
            mirror.forget_newer(step)

    def _candidate(self, mirror: Mirror | None) -> Choice | None:
        newest, wanted = self._newest(mirror), self.resume_path
        if wanted is not None and (newest is None or not _descends(newest[1], wanted)):
            choice = (wanted, self._store.inspect(wanted))
            self.origin = _origin(wanted)
        elif newest is not None:
            choice = newest
            self.origin = None if wanted is None else newest[1].resume_origin
        else:
            self._check_nothing_was_there()
            return None
        self._check_same_run(*choice)
        return choice

    def _newest(self, mirror: Mirror | None) -> Choice | None:
        local = self._local()
        if mirror is None:
            return local
        try:
            return self._local() if self._fetch_newer(mirror, local) else local
        except MirrorError as error:
            if local is None:
                raise CheckpointNotFoundError(
                    f"{self._store.root} holds nothing to resume, and the mirror cannot be read ({error}); whether "
                    "this run is to be resumed is not known. Try again when it can, or unset recover.mirror_url"
                ) from error
            logger.warning("the mirror cannot be read (%s); resuming from the newest local generation", error)
            return local

    def _local(self) -> Choice | None:
        found = self._store.newest_valid(self._store.inspect)
        return None if found is None else (found[0].path, found[1])

    def _fetch_newer(self, mirror: Mirror, local: Choice | None) -> bool:
        """Fetch the mirror's newest sound generation that is newer than the local one; whether there was any."""
        steps = mirror.steps()
        for step in steps:
            if local is not None and step <= local[1].last_step_info.global_step:
                return False
            if step in self._fetched:  # and refused since: this disk damages what is written to it
                continue
            try:
                mirror.fetch(step, self._store)
            except CheckpointCorruptError as error:
                logger.warning("the mirror's copy of step %d is not usable: %s", step, error)
            else:
                self._fetched.add(step)
                return True
        if local is None and (traces := mirror.traces()):
            raise CheckpointCorruptError(
                f"{self._store.root} holds nothing usable, and no copy at {mirror.url} is complete and sound (there is "
                f"something of steps {traces}; see the log). Look at them, or move them away to start from step 0"
            )
        return False

    def _refuse(self, path: Path, problem: str) -> None:
        if path == self.resume_path:
            raise CheckpointCorruptError(problem)
        (generation,) = (generation for generation in self._store.generations() if generation.path == path)
        self._store.set_aside(generation, problem)

    def _check_nothing_was_there(self) -> None:
        if rejected := self._store.rejected():
            raise CheckpointCorruptError(
                f"{self._store.root} has no usable generation left: {', '.join(path.name for path in rejected)} were "
                "set aside. Look at them, restore a copy, or move the folder away to start from step 0"
            )
        if self._store.tracker.exists():
            raise CheckpointCorruptError(
                f"{self._store.tracker} says that generations were committed here, but there is none. Restore a copy, "
                "or move the folder away to start from step 0"
            )
        if self._mode == "must":
            raise CheckpointNotFoundError(f"recover.mode is 'must', but {self._store.root} has no generation to resume")

    def _check_same_run(self, path: Path, info: RecoverInfo) -> None:
        saved, now = info.last_step_info.steps_per_epoch, self._ft_spec.steps_per_epoch
        if saved != now:
            raise CheckpointMismatchError(
                f"{path} is of a run with {saved} steps an epoch, this one has {now}; use its dataset and batch size"
            )


def _descends(newest: RecoverInfo, wanted: Path) -> bool:
    """Whether the run has gone back to ``wanted`` before, and is ahead of it; retention may have removed it since."""
    origin = _origin(wanted)
    return newest.resume_path == str(wanted) if origin is None else newest.resume_origin == origin


def _origin(wanted: Path) -> str | None:
    manifest = wanted / MANIFEST_NAME
    return file_digest(manifest) if manifest.is_file() else None
