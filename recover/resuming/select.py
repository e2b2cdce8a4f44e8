"""Which generation a run resumes from: the newest that verifies, here or at the mirror, or the one it was told.

One process chooses by names and sizes; then every rank compares the bytes of its share of the files. What fails is
quarantined with the reason, and the next older one is tried. A run whose every generation failed does not start over.

A host that needs the step before it has an engine can `peek`: the same choice by names and sizes alone, which changes
nothing on the disk. What the bytes are is known in `choose` only; it does not go on with another step than was told.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ...engine.api import FinetuneSpec, StepInfo
from ...utils.distributed import rank_zero_decides_slowly
from ...utils.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    MirrorError,
)
from ...utils.files import file_digest
from ...utils.logging import get_logger
from ...utils.manifest import MANIFEST_NAME, read_manifest
from ..config import RecoverConfig
from ..info import RecoverInfo
from ..ranks.coordinator import Ranks
from ..storage.generations import GenerationStore
from ..storage.mirror import Mirror
from .rank import check_bytes

logger = get_logger(__name__)

Choice = tuple[Path, RecoverInfo]


class ResumeChoice:
    """The choice of one run. `peek` and `choose` run everywhere, the other methods in the leader.

    Args:
        config: its ``mode`` and ``resume_path``.
        ft_spec: how the run is cut into epochs; a generation that was cut differently is refused.
        epochs_may_change: do not refuse it.
        store: where the generations are.

    Attributes:
        resume_path: the generation to go back to, or None.
        origin: digest of that generation's manifest, in the leader and once it has chosen. A folder can
            move; this tells whether the newest generation descends from it.
    """

    def __init__(
        self, config: RecoverConfig, ft_spec: FinetuneSpec, store: GenerationStore, *, epochs_may_change: bool = False
    ) -> None:
        self._config, self._ft_spec, self._store = config, ft_spec, store
        self._epochs_may_change = epochs_may_change
        self._fetched: set[int] = set()
        self._told: list[StepInfo | None] = []
        self.resume_path = None if config.resume_path is None else Path(config.resume_path).resolve()
        self.origin: str | None = None

    def peek(self, group: dist.ProcessGroup | None) -> StepInfo | None:
        """The step that `choose` finds if the bytes are what names and sizes promise; None when there is nothing.

        Collective over ``group``, once there is torch.distributed; each process for itself before.

        Raises:
            as `choose`, of what can be seen so.
        """
        found = rank_zero_decides_slowly(self._look, group)
        self._told = [found]
        return found

    def choose(self, ranks: Ranks, mirror: Mirror | None) -> Choice | None:
        """The generation to resume from, verified; None when there is nothing and never was. All ranks take part.

        Args:
            ranks: who compares the bytes.
            mirror: where else to look, in the leader.

        Raises:
            CheckpointCorruptError: there was something to resume, but nothing of it is usable.
            CheckpointNotFoundError: mode ``must`` or ``resume_path``, and there is nothing.
            CheckpointMismatchError: the generation is not of this run, or of a newer format, or of another step than
                `peek` has told.
        """
        ranks.decide(self._store.sweep)
        while True:
            choice = ranks.decide_slowly(partial(self._candidate, mirror, only_look=False))
            ranks.here(partial(self._check_told, choice))
            if choice is None:
                self._told = []
                return None
            path = choice[0]
            files = ranks.decide(lambda path=path: read_manifest(path)["files"])
            problems = [found for found in ranks.run_all(check_bytes, str(path), files) if found is not None]
            if not problems:
                self._told = []
                return choice
            ranks.decide(partial(self._refuse, path, problems[0]))

    @property
    def resumed_from(self) -> tuple[str | None, str | None]:
        """``resume_path`` and the digest that goes with it, as `RecoverInfo` remembers them."""
        return None if self.resume_path is None else str(self.resume_path), self.origin

    def go_back(self, resumed: Choice, mirror: Mirror | None) -> None:
        """Give up what is newer than ``resumed``: a ``resume_path`` goes back behind it; else nothing is."""
        path, step = resumed[0].resolve(), resumed[1].last_step_info.global_step
        if self.resume_path is None or path != self.resume_path:
            return
        for generation in self._store.generations():
            if generation.step > step or (generation.step == step and generation.path.resolve() != path):
                self._store.quarantine(generation, f"superseded by resume_path {path.name}")
        if mirror is not None:
            mirror.forget_newer(step)

    def _look(self) -> StepInfo | None:
        with ExitStack() as ends:
            mirror = None
            if self._config.mirror_path is not None:
                mirror = Mirror(self._config.mirror_path, self._config.mirror_max_to_keep)
                ends.callback(mirror.close, 0.0)
            found = self._candidate(mirror, only_look=True)
        return None if found is None else found[1].last_step_info

    def _check_told(self, choice: Choice | None) -> None:
        found = None if choice is None else choice[1].last_step_info
        if self._told and self._told != [found]:
            told = "that there is nothing" if self._told[0] is None else f"step {self._told[0].global_step}"
            here = "nothing" if choice is None else f"step {choice[1].last_step_info.global_step} ({choice[0]})"
            raise CheckpointMismatchError(
                f"peek told {told}, but what can be resumed is {here}: the bytes of what was told are bad (see the "
                "log), or another job was still at work. Nothing was restored; start again"
            )

    def _candidate(self, mirror: Mirror | None, *, only_look: bool) -> Choice | None:
        newest, wanted = self._newest(mirror, only_look), self.resume_path
        if wanted is not None and (newest is None or not _descends(newest[1], wanted)):
            choice = (wanted, self._store.inspect(wanted))
            self.origin = _origin(wanted)
        elif newest is not None:
            choice = newest
            self.origin = None if wanted is None else newest[1].resume_origin
        else:
            self._check_nothing_was_there()
            return None
        return self._of_this_run(*choice)

    def _newest(self, mirror: Mirror | None, only_look: bool) -> Choice | None:
        local = self._local(only_look)
        if mirror is None:
            return local
        try:
            return self._newer_copy(mirror, local, only_look) or local
        except MirrorError as error:
            if local is None:
                raise CheckpointNotFoundError(
                    f"{self._store.root} holds nothing to resume, and the mirror cannot be read ({error}); whether "
                    "this run is to be resumed is not known. Try again when it can, or unset recover.mirror_url"
                ) from error
            logger.warning("the mirror cannot be read (%s); resuming from the newest local generation", error)
            return local

    def _local(self, only_look: bool) -> Choice | None:
        found = self._store.newest_valid(self._store.inspect, quarantine=not only_look)
        return None if found is None else (found[0].path, found[1])

    def _newer_copy(self, mirror: Mirror, local: Choice | None, only_look: bool) -> Choice | None:
        """The mirror's newest sound generation that is newer than the local one, fetched unless ``only_look``."""
        last_resort = mirror.steps(damaged=True) if local is None else []  # reads may be right again; all are verified
        for step in mirror.steps() + last_resort:
            if local is not None and step <= local[1].last_step_info.global_step:
                return None
            if step in self._fetched:  # and refused since: this disk damages what is written to it
                continue
            try:
                if only_look:
                    return self._store.path_of(step), mirror.inspect(step)
                mirror.fetch(step, self._store)
            except CheckpointCorruptError as error:
                logger.warning("the mirror's copy of step %d is not usable: %s", step, error)
                continue
            self._fetched.add(step)
            fetched = self._local(only_look)
            if fetched is not None and fetched[1].last_step_info.global_step == step:
                return fetched
        if local is None and (traces := mirror.traces()):
            raise CheckpointCorruptError(
                f"{self._store.root} holds nothing usable, and no copy at {mirror.url} is complete and sound (there is "
                f"something of steps {traces}; see the log. A .damaged-global_step_<step> there marks a copy that was "
                "read wrong twice, and alike). Look at them, or move them away to start from step 0"
            )
        return None

    def _refuse(self, path: Path, problem: str) -> None:
        if path == self.resume_path:
            raise CheckpointCorruptError(problem)
        (generation,) = (generation for generation in self._store.generations() if generation.path == path)
        self._store.quarantine(generation, problem)

    def _check_nothing_was_there(self) -> None:
        if unusable := [generation.path.name for generation in self._store.generations()]:
            raise CheckpointCorruptError(
                f"{self._store.root} holds nothing usable: {', '.join(unusable)} are damaged (see the log). Look at "
                "them, restore a copy, or move the folder away to start from step 0"
            )
        if rejected := self._store.quarantined():
            raise CheckpointCorruptError(
                f"{self._store.root} has no usable generation left: {', '.join(path.name for path in rejected)} were "
                "quarantined. Look at them, restore a copy, or move the folder away to start from step 0"
            )
        if self._store.tracker.exists():
            raise CheckpointCorruptError(
                f"{self._store.tracker} says that generations were committed here, but there is none. Restore a copy, "
                "or move the folder away to start from step 0"
            )
        if self._config.mode == "must":
            raise CheckpointNotFoundError(f"recover.mode is 'must', but {self._store.root} has no generation to resume")

    def _of_this_run(self, path: Path, info: RecoverInfo) -> Choice:
        """What was found, its step counted in this run's epochs where it was made by those of nobody."""
        saved, now = info.last_step_info.steps_per_epoch, self._ft_spec.steps_per_epoch
        if info.lacks("epochs"):
            return path, replace(info, last_step_info=StepInfo.at(info.last_step_info.global_step, now))
        if saved != now and not self._epochs_may_change:
            raise CheckpointMismatchError(
                f"{path} is of a run with {saved} steps an epoch, this one has {now}; use its dataset and batch size, "
                "or RecoverHandler(..., epochs_may_change=True) and put the data to its place yourself"
            )
        return path, info


def _descends(newest: RecoverInfo, wanted: Path) -> bool:
    """Whether the run has gone back to ``wanted`` before, and is ahead of it; retention may have removed it since."""
    origin = _origin(wanted)
    return newest.resume_path == str(wanted) if origin is None else newest.resume_origin == origin


def _origin(wanted: Path) -> str | None:
    manifest = wanted / MANIFEST_NAME
    return file_digest(manifest) if manifest.is_file() else None
