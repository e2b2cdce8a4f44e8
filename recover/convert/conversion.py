"""`convert`: a checkpoint of one trainer as a checkpoint of another.

A reader finds where each tensor lies; a writer asks for it block by block; what was written is read back and compared;
then the target is renamed to its name. A conversion that is killed leaves a hidden folder that the next one of the same
target removes before it starts again; nothing half-done is ever under the target's name.

Memory: a block of 64 MiB of one tensor. Files of ``torch.save`` are mapped, so that what is read of them is the page
cache's. Exceptions: a tensor that another version of torch has written in DCP format, one that transformers fuses or
transposes (each as a whole, with those it is made of), and ``.bin`` files of torch before 1.6 (all of it).
Disk: the target, once. Reading: the source once, the target once.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ...engine.api import EXPORT_DTYPES
from ...utils.atomic_folder import staged_folder
from ...utils.config import require_choice, require_range
from ...utils.errors import ConfigError
from ...utils.files import require_free_space
from ...utils.manifest import FileEntry, write_manifest
from ...utils.remote import FETCH_FIRST, require_local
from .check import Digests, compare, compare_plain, require_all_written, tensors_of
from .checkpoint import Checkpoint, ReadOptions
from .run_target import RunTarget, last_step, what_starts_anew, write_generation
from .sources import read_source
from .targets import Seen, write_areal, write_dcp, write_hf

TARGETS = ("hf", "generation", "dcp", "areal")


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        source: folder that was read.
        format: what it is.
        target: folder that was made.
        to: its format.
        tensors: tensors that were written and compared.
        bytes: of their values.
        optimizer: whether their optimizer state is among them.
        step: of a generation, its last step, counted from 0.
        notes: what a person should know: how the step was found, say.
        lacks: part of a run that the source does not have -> what becomes of it.
        ignored: what the source holds besides, which is not converted.
        seconds: how long it took.
    """

    source: str
    format: str
    target: str
    to: str
    tensors: int
    bytes: int
    optimizer: bool
    step: int | None = None
    notes: list[str] = field(default_factory=list)
    lacks: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    seconds: float = 0.0


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    dtype: str | None = None,
    root: str | None = None,
    config: str | os.PathLike[str] | None = None,
    engine: str | None = None,
    step: int | None = None,
    steps_per_epoch: int | None = None,
    parameters: Sequence[Sequence[str]] | None = None,
    merge: bool = False,
    base: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Conversion:
    """Make ``target`` of the checkpoint in ``source``; it appears complete and compared with the source, or not at all.

    Args:
        source: folder of verl (a worker's, or a step's), Accelerate, transformers or TRL, torch.distributed.checkpoint
            under any root (torchtitan, AReaL, scripts), Holdfast, or of a Hugging Face model. What it is is seen by
            what is in it. Nothing in it is run.
        target: folder to make. With ``generation`` the folder of a run, ``<fileroot>/<experiment>/<trial>``.
        to: ``hf`` (weights that ``from_pretrained`` loads), ``dcp`` (what `load_dcp` loads), ``generation`` (what
            `RecoverHandler.load` resumes from), or ``areal`` (what AReaL's engine loads, optimizer included).
        dtype: ``float32``, ``bfloat16`` or ``float16`` for floating-point weights; None: as they are. Optimizer state
            stays as it is. An engine of Holdfast trains float32.
        root: of DCP data, see `load_dcp`; None: the only one there is.
        config: folder with the model's ``config.json``, where the source has none: for ``hf``, for tied weights, and
            for the order of parameters.
        engine: of a source with several, which one; of a generation with one, what to call it (``default``).
        step: of a generation, its last step counted from 0, where the source does not say it.
        steps_per_epoch: of a generation, likewise.
        parameters: names of the parameters of each group, in the order in which the optimizer was given them, where the
            source has numbers and its rule is not known.
        merge: with ``hf``, merge adapters whose base the source left out into that base.
        base: folder of it; None: the one that the source names. It must be what the source's digest says.
        progress: show a bar on stderr.

    Raises:
        ConfigError: an argument is wrong, the source is of no known format, or it is ambiguous; the message says what
            to give.
        CheckpointNotFoundError, CheckpointCorruptError: the source is not there, incomplete, damaged, or holds what
            could only be read by running code.
        CheckpointMismatchError: its parts are not of one model, or not of that of ``config``.
        CheckpointExistsError: ``target`` exists.
        CheckpointWriteError: the file system refused, or has no room.
        FolderInUseError: a job uses the run's folder.
    """
    began = time.monotonic()
    require_choice("to", to, TARGETS)
    require_choice("dtype", dtype, (None, *EXPORT_DTYPES))
    require_range("step", step, low=0)
    require_range("steps_per_epoch", steps_per_epoch, low=1)
    if to != "hf" and (merge or base is not None):
        raise ConfigError(f"merge and base are for to='hf', where adapters become part of the weights; to is {to!r}")
    folder = require_local(source, "converting", FETCH_FIRST, "source")
    final = require_local(target, "converting", "convert to one, and copy that", "target")
    with ExitStack() as files:
        given = [None if each is None else Path(each) for each in (config, base)]
        options = ReadOptions(root, given[0], parameters, files, merge, given[1], engine)
        checkpoints = _chosen(read_source(folder, options), to, engine)
        if to != "hf" and dtype is not None:
            checkpoints = {name: _cast(each, EXPORT_DTYPES[dtype]) for name, each in checkpoints.items()}
        first = next(iter(checkpoints.values()))
        done = Conversion(
            str(folder),
            first.format,
            str(final),
            to,
            sum(1 for _ in _wanted(checkpoints, to)),
            sum(tensor.nbytes for tensor in _wanted(checkpoints, to)),
            to != "hf" and any(each.optimizer for each in checkpoints.values()),
            notes=[note for each in checkpoints.values() for note in each.notes],
            ignored=[name for each in checkpoints.values() for name in (*each.ignored, *_without_optimizer(each, to))],
        )
        require_free_space(final.parent, done.bytes, "make room, or convert to another disk")
        with _bar(progress, f"{first.format} to {to}", 2 * done.bytes) as bar:
            if to == "generation":
                done = _to_generation(checkpoints, final, options, (step, steps_per_epoch), bar, done)
            else:
                _to_folder(first, final, to, None if dtype is None else EXPORT_DTYPES[dtype], options, bar)
    return replace(done, seconds=time.monotonic() - began)


def _chosen(found: dict[str, Checkpoint], to: str, engine: str | None) -> dict[str, Checkpoint]:
    if len(found) == 1:
        if to != "generation":
            require_choice("engine", engine, (None, *found))
        (only,) = found.values()
        return {engine or next(iter(found)): only}
    if engine is not None:
        require_choice("engine", engine, tuple(found))
        return {engine: found[engine]}
    if to != "generation":
        raise ConfigError(f"the source holds {sorted(found)}; say which one: engine=, --engine")
    return found


def _cast(checkpoint: Checkpoint, dtype: torch.dtype) -> Checkpoint:
    cast = {
        name: tensor.to(dtype) if tensor.dtype.is_floating_point else tensor
        for name, tensor in checkpoint.model.items()
    }
    return replace(checkpoint, model=cast)


def _wanted(checkpoints: Mapping[str, Checkpoint], to: str) -> Iterator[Any]:
    for checkpoint in checkpoints.values():
        yield from (tensor for _, tensor in tensors_of(checkpoint, with_optimizer=to != "hf"))


def _without_optimizer(checkpoint: Checkpoint, to: str) -> list[str]:
    """What Holdfast's folders have only together with an optimizer, where the source has it without one."""
    if to not in ("dcp", "generation") or checkpoint.groups is not None:
        return []
    generators = bool(checkpoint.rng) and to == "dcp"  # a generation keeps them beside its engines
    return ["schedule"] * (checkpoint.scheduler is not None) + ["generators"] * generators


def _to_folder(
    checkpoint: Checkpoint, final: Path, to: str, dtype: torch.dtype | None, options: ReadOptions, bar: "_Bar"
) -> None:
    written, entries = Digests(bar.advance), list[FileEntry]()
    with staged_folder(final) as staging:
        if to == "hf":
            write_hf(checkpoint, staging, dtype, written.seen)
        else:
            write = write_dcp if to == "dcp" else write_areal
            entries = write(checkpoint, staging, written.seen)
        bar.say("comparing")
        _compare(f"{final}", staging, checkpoint, written, options, bar, plain=to != "hf")
        if to != "hf":  # only now, lest every file be digested again
            write_manifest(staging, entries, {"world_size": 1})


def _to_generation(
    checkpoints: Mapping[str, Checkpoint],
    final: Path,
    options: ReadOptions,
    place: tuple[int | None, int | None],
    bar: "_Bar",
    done: Conversion,
) -> Conversion:
    last, how = last_step(checkpoints, *place)
    lacks = what_starts_anew(checkpoints, place[1])
    target = RunTarget(final)
    try:
        staging = target.open(last.global_step)
        try:
            written = {name: Digests(bar.advance) for name in checkpoints}
            seen: dict[str, Seen] = {name: digests.seen for name, digests in written.items()}
            info, entries = write_generation(checkpoints, staging, last, lacks, seen)
            bar.say("comparing")
            for name, checkpoint in checkpoints.items():
                _compare(f"{final}, {name}", staging / name, checkpoint, written[name], options, bar, plain=True)
            path = target.commit(staging, info, entries)
        except BaseException:
            target.discard(staging)
            raise
    finally:
        target.close()
    notes = [*done.notes, f"step {last.global_step}, {how}"]
    return replace(done, target=str(path), step=last.global_step, notes=notes, lacks=lacks)


def _compare(
    what: str,
    staging: Path,
    checkpoint: Checkpoint,
    written: Digests,
    options: ReadOptions,
    bar: "_Bar",
    *,
    plain: bool,
) -> None:
    """Read a folder back that was written, and compare it with what was read; ``plain``: hyperparameters, too."""
    require_all_written(what, checkpoint, written.values(), with_optimizer=plain)
    config = None if checkpoint.architecture is None else checkpoint.architecture.folder
    with ExitStack() as files:
        again = replace(options, root=None, config=config, parameters=None, files=files)
        (target,) = read_source(staging, again).values()
        compare(what, checkpoint, written.values(), target, Digests(bar.advance))
        if plain:
            compare_plain(what, checkpoint, target)


class _Bar:
    """A progress bar, or none."""

    def __init__(self, progress: Progress | None, what: str, n_bytes: int) -> None:
        self._progress = progress
        self._what = what
        self._task = None if progress is None else progress.add_task(what, total=n_bytes)

    def advance(self, n_bytes: int) -> None:
        """Count bytes."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, n_bytes)

    def say(self, doing: str) -> None:
        """Add what is being done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=f"{self._what}, {doing}")


@contextmanager
def _bar(shown: bool, what: str, n_bytes: int) -> Iterator[_Bar]:
    if not shown:
        yield _Bar(None, what, n_bytes)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield _Bar(progress, what, n_bytes)
