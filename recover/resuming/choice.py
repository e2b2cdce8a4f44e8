"""Choose the generation that a run resumes from.

The rule, in the order of the code:

1. With ``resume_path``, that generation. Once the run has gone back to it and committed newer
   generations, which remember it as their origin, rule 2 applies again, also if retention has
   removed it since.
2. Otherwise the newest sound generation. A local one wins over a copy at the mirror of the same or
   an older step. A newer copy is fetched first, at most once per step. If the mirror cannot be
   read, the newest local one is taken with a warning, but without a local one the start fails. Pins
   (`GenerationStore.pin`) have no influence on the choice.
3. Damaged: a local generation is quarantined with the reason, and the next older one is tried. A
   damaged copy at the mirror is skipped. Copies marked as damaged are read again only if nothing is
   left here. A damaged ``resume_path`` is an error.
4. Of another run: a generation with another ``run_id`` than the folder (unless it is the
   ``resume_path``), with another number of steps per epoch, of a newer format, or of other engines
   is an error, and it stays where it is.
5. Nothing found: the run starts at step 0 only if nothing there may hold work and the mode is not
   ``must``. Otherwise it is an error. At the mirror, empty folders and copies that were never
   finished hold none.
6. Newer than a ``resume_path``: once the restore has succeeded, newer local generations are
   quarantined, and the mirror forgets newer copies.

The leader decides by names and sizes. Then all ranks compare the bytes, which may lead back to rule
3. A host that needs the step before it has an engine can `peek`: the same choice by names and
sizes, without changing the disk. The mirror is that of the run's generations (`storage.mirror`).
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ...engine.api import FinetuneSpec, StepInfo
from ...utils.distributed import RankGroup, rank_zero_decides_slowly
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
from ..ranks import Ranks
from ..storage.generations import GenerationStore
from ..storage.mirror import CopyState, Mirror
from .check import check_bytes

logger = get_logger(__name__)


class Choice(NamedTuple):
    """A generation to resume from. At the mirror it has the path that it will get."""

    path: Path
    info: RecoverInfo

    @property
    def step(self) -> int:
        """The last step that is in the generation."""
        return self.info.last_step_info.global_step


class ResumeChoice:
    """The choice of one run. `peek` and `choose` run in every process, the other methods in the
    leader.

    A generation with another number of steps per epoch than ``ft_spec`` is refused, unless
    ``epochs_may_change``.

    Attributes:
        resume_path: the generation to go back to, or None.
        origin: digest of that generation's manifest, in the leader after the choice. It identifies
            the generation when its folder has moved, so that newer generations can be recognised as
            its descendants. Without ``resume_path``, that of the generation which the run went back
            to before, if it did.
    """

    def __init__(
        self,
        config: RecoverConfig,
        ft_spec: FinetuneSpec,
        store: GenerationStore,
        *,
        epochs_may_change: bool,
    ) -> None:
        self._config = config
        self._ft_spec = ft_spec
        self._store = store
        self._epochs_may_change = epochs_may_change
        self._fetched: set[int] = set()
        self._peeked: list[StepInfo | None] = []  # what `peek` has told, if it was called
        self.resume_path: Path | None = None
        if config.resume_path is not None:
            self.resume_path = Path(config.resume_path).resolve()
        self.origin: str | None = None
        self._went_back_to: str | None = None  # in the leader after the choice

    def peek(self, group: RankGroup) -> StepInfo | None:
        """The step that `choose` will find if the bytes are sound. None if there is nothing to
        resume.

        Collective over ``group`` once torch.distributed is initialised. Raises as `choose`, as far
        as names and sizes show the problem.
        """
        found = rank_zero_decides_slowly(self._look, group)
        self._peeked = [found]
        return found

    def choose(self, ranks: Ranks, mirror: Mirror | None) -> Choice | None:
        """Choose and verify a generation. None if there is nothing and never was. All ranks compare
        the bytes.

        Raises:
            CheckpointCorruptError: there was something to resume, but no generation is usable.
            CheckpointNotFoundError: there is nothing, with mode ``must`` or ``resume_path``.
            CheckpointMismatchError: the generation is of another run or of a newer format, or its
                step is not the one that `peek` returned.
        """
        ranks.decide(self._store.sweep)
        while True:
            # The leader chooses by names and sizes.
            choice = ranks.decide_slowly(partial(self._candidate, mirror, only_look=False))
            ranks.here(partial(self._check_peeked, choice))
            if choice is None:
                break

            # All ranks compare the bytes.
            path = choice.path
            files = ranks.decide(lambda path=path: read_manifest(path)["files"])
            answers = ranks.run_all(check_bytes, str(path), files)
            problems = [problem for problem in answers if problem is not None]
            if not problems:
                break
            ranks.decide(partial(self._refuse, path, problems[0]))
        self._peeked = []
        return choice

    def _look(self) -> StepInfo | None:
        config = self._config
        with ExitStack() as ends:
            mirror = None
            if config.mirror_path is not None:
                mirror = Mirror(config.mirror_path, config.mirror_max_to_keep)
                ends.callback(mirror.close, 0.0)
            found = self._candidate(mirror, only_look=True)
        return None if found is None else found.info.last_step_info

    def _check_peeked(self, choice: Choice | None) -> None:
        found = None if choice is None else choice.info.last_step_info
        if not self._peeked or self._peeked == [found]:
            return
        told = "that there is nothing"
        if self._peeked[0] is not None:
            told = f"step {self._peeked[0].global_step}"
        here = "nothing"
        if choice is not None:
            here = f"step {choice.step} ({choice.path})"
        raise CheckpointMismatchError(
            f"peek told {told}, but what can be resumed is {here}: the bytes of what was told "
            "are bad (see the log), or another job was still at work. Nothing was restored; "
            "start again"
        )

    # Rule 1: resume_path

    def _candidate(self, mirror: Mirror | None, *, only_look: bool) -> Choice | None:
        # Once the run has gone back to ``wanted`` and is ahead of it, the newest one wins again.
        newest = self._newest(mirror, only_look)
        wanted = self.resume_path
        if wanted is not None and (newest is None or not _descends(newest.info, wanted)):
            choice = Choice(wanted, self._store.inspect(wanted))
            self.origin = _origin(wanted)
            self._went_back_to = str(wanted)
        elif newest is not None:
            choice = newest
            self._store.require_own(newest.info.run_id, newest.path)
            # A start without ``resume_path`` does not forget that the run went back.
            self.origin = newest.info.resume_origin
            self._went_back_to = newest.info.resume_path if wanted is None else str(wanted)
        else:
            self._check_nothing_was_there()
            return None
        return self._require_this_run(choice)

    # Rule 2: the newest, here or at the mirror

    def _newest(self, mirror: Mirror | None, only_look: bool) -> Choice | None:
        local = self._local(only_look)
        if mirror is None:
            return local
        try:
            return self._newer_copy(mirror, local, only_look) or local
        except MirrorError as error:
            if local is None:
                raise CheckpointNotFoundError(
                    f"{self._store.root} holds nothing to resume, and the mirror cannot be read "
                    f"({error}); whether this run is to be resumed is not known. Try again when "
                    "it can, or unset recover.mirror_url"
                ) from error
            logger.warning(
                "the mirror cannot be read (%s); resuming from the newest local generation", error
            )
            return local

    def _local(self, only_look: bool) -> Choice | None:
        found = self._store.newest_valid(
            self._store.inspect, quarantine=not only_look, required=self.resume_path
        )
        if found is None:
            return None
        generation, info = found
        return Choice(generation.path, info)

    def _newer_copy(self, mirror: Mirror, local: Choice | None, only_look: bool) -> Choice | None:
        """The mirror's newest sound copy that is newer than the local generation, fetched unless
        ``only_look``.
        """
        states = mirror.states()
        steps = [step for step, state in states.items() if state in ("complete", "unconfirmed")]
        if local is None:
            # A damaged one may be read right this time.
            steps += [step for step, state in states.items() if state == "damaged"]
        for step in steps:
            if local is not None and step <= local.step:
                return None
            if step in self._fetched:  # and refused since, because this disk damages it
                continue
            try:
                if only_look:
                    return Choice(self._store.path_of(step), mirror.inspect(step))
                mirror.fetch(step, self._store)
            except CheckpointCorruptError as error:
                logger.warning("the mirror's copy of step %d is not usable: %s", step, error)
                continue
            self._fetched.add(step)
            fetched = self._local(only_look)
            if fetched is not None and fetched.step == step:
                return fetched

        if local is None:
            self._check_no_work_at(mirror.url, states)
        return None

    # Rule 3: damaged

    def _refuse(self, path: Path, problem: str) -> None:
        if path == self.resume_path:
            raise CheckpointCorruptError(problem)
        (generation,) = (found for found in self._store.generations() if found.path == path)
        self._store.quarantine(generation, problem)

    # Rule 4: of another run

    def _require_this_run(self, choice: Choice) -> Choice:
        """Refuse another number of steps per epoch. A converted generation may have none, and takes
        this run's.
        """
        saved = choice.info.last_step_info.steps_per_epoch
        now = self._ft_spec.steps_per_epoch
        if choice.info.lacks("epochs"):
            last_step = StepInfo.at(choice.step, now)
            return Choice(choice.path, replace(choice.info, last_step_info=last_step))
        if saved != now and not self._epochs_may_change:
            raise CheckpointMismatchError(
                f"{choice.path} is of a run with {saved} steps an epoch, this one has {now}; use "
                "its dataset and batch size, or RecoverHandler(..., epochs_may_change=True), and "
                "begin with handler.first_step(info), where info is what load returned. A "
                "ResumableDataLoader then finds its place if samples were added at the end of its "
                "dataset; put any other data to its place yourself"
            )
        return choice

    # Rule 5: nothing found

    def _check_nothing_was_there(self) -> None:
        unusable = [generation.path.name for generation in self._store.generations()]
        if unusable:
            raise CheckpointCorruptError(
                f"{self._store.root} holds nothing usable: {', '.join(unusable)} are damaged (see "
                "the log). Look at them, restore a copy, or move the folder away to start from "
                "step 0"
            )
        rejected = [path.name for path in self._store.quarantined()]
        if rejected:
            raise CheckpointCorruptError(
                f"{self._store.root} has no usable generation left: {', '.join(rejected)} were "
                "quarantined. Look at them, restore a copy, or move the folder away to start "
                "from step 0"
            )
        if self._store.tracker.exists():
            raise CheckpointCorruptError(
                f"{self._store.tracker} says that generations were committed here, but there is "
                "none. Restore a copy, or move the folder away to start from step 0"
            )
        if self._config.mode == "must":
            raise CheckpointNotFoundError(
                f"recover.mode is 'must', but {self._store.root} has no generation to resume"
            )

    def _check_no_work_at(self, url: str, states: dict[int, CopyState]) -> None:
        # A run of which there is something must not start at step 0.
        nothing_in: tuple[CopyState, ...] = ("empty", "incomplete")
        kept = [step for step, state in states.items() if state not in nothing_in]
        if kept:
            raise CheckpointCorruptError(
                f"{self._store.root} holds nothing usable, and no copy at {url} is complete and "
                f"sound (there is something of steps {kept}; see the log and `holdfast mirror ls "
                f"{url}`. A .damaged-global_step_<step> there marks a copy that was read wrong "
                "twice, and alike). Look at them, or move them away to start from step 0"
            )
        if states:
            logger.warning(
                "%s has traces of steps %s, but no copy of them was ever finished, or all their "
                "files were removed: there is nothing to resume",
                url,
                list(states),
            )

    # Rule 6: newer than a resume_path

    def go_back(self, resumed: Choice, mirror: Mirror | None) -> None:
        """Give up generations and copies newer than ``resumed``, if it is the ``resume_path``."""
        if not self.is_wanted(resumed.path):
            return
        path = resumed.path.resolve()
        for generation in self._store.generations():
            is_newer = generation.step > resumed.step
            replaces_it = generation.step == resumed.step and generation.path.resolve() != path
            if is_newer or replaces_it:
                self._store.quarantine(generation, f"superseded by resume_path {path.name}")
        if mirror is not None:
            mirror.forget_newer(resumed.step)

    def is_wanted(self, path: Path) -> bool:
        """Whether a generation is the ``resume_path`` itself."""
        return path.resolve() == self.resume_path

    @property
    def resumed_from(self) -> tuple[str | None, str | None]:
        """``resume_path``, of this start or of an earlier one, and the digest of its manifest, as
        `RecoverInfo` remembers them. In the leader.
        """
        return self._went_back_to, self.origin


def _descends(newest: RecoverInfo, wanted: Path) -> bool:
    """Whether the run has gone back to ``wanted`` before and is ahead of that generation now."""
    if newest.resume_origin is not None and newest.resume_origin == _origin(wanted):
        return True
    if newest.resume_path != str(wanted):
        return False
    if wanted.exists():  # else retention has removed it
        logger.warning(
            "%s is not the generation that this run went on from: it was damaged or replaced "
            "since. The run keeps its own generations and goes on from the newest. To begin from "
            "this one, take another trial_name",
            wanted,
        )
    return True


def _origin(wanted: Path) -> str | None:
    manifest = wanted / MANIFEST_NAME
    return file_digest(manifest) if manifest.is_file() else None
