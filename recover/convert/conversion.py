"""`convert`: turn a checkpoint of one trainer into a checkpoint of another.

A reader finds the position of each tensor, a writer asks for it block by block, the result is read
back and compared, and then the target gets its name. A killed conversion leaves a hidden folder,
which the next conversion to the same target removes.

Memory: one block of 64 MiB. Files of ``torch.save`` are mapped into memory. Exceptions: tensors in
DCP format from another version of torch, and tensors that transformers fuses or transposes, are
read as a whole. ``.bin`` files of torch before 1.6 are read completely. Disk: the target, once.
Reads: source and target, once each.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ...engine.api import EXPORT_DTYPES
from ...utils.atomic_folder import staged_folder
from ...utils.config import require_choice, require_range
from ...utils.errors import CheckpointNotFoundError, ConfigError
from ...utils.files import require_free_space
from ...utils.manifest import MANIFEST_NAME, require_outside_commits, verify_folder, write_manifest
from ...utils.remote import FETCH_FIRST, require_local
from ..saving.snapshot import manifest_facts
from . import dcp, hugging_face, verl
from .check import Digests, compare, compare_plain, require_all_written, require_loads, tensors_of
from .checkpoint import Checkpoint, ReadOptions
from .writers import (
    Seen,
    last_step,
    staged_generation,
    what_starts_anew,
    write_areal,
    write_dcp,
    write_generation,
    write_hf,
)

TARGETS = ("hf", "generation", "dcp", "areal")


_MODELS = "model.safetensors, pytorch_model.bin or pytorch_model_fsdp_0/ (models, Trainer and TRL, Accelerate)"
_SOURCES = (
    (
        "model_world_size_<N>_rank_<r>.pt, in it or in its actor/ or critic/ (verl)",
        verl.recognises,
        verl.read,
    ),
    (
        "recover_info.json and manifest.json (a generation of Holdfast)",
        dcp.is_generation,
        dcp.read_generation,
    ),
    (_MODELS, hugging_face.recognises, hugging_face.read),
    (".metadata (torch.distributed.checkpoint: AReaL, Holdfast, others)", dcp.recognises, dcp.read),
)
"""Formats, tried in this order: the files that identify each, for messages, and the functions of
its reader.
"""


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion."""

    source: str  # folder that was read
    format: str  # format of the source, for people
    target: str  # folder that was created
    to: str  # format of the target
    tensors: int  # number of tensors that were written and compared
    bytes: int  # bytes of their values
    optimizer: bool  # whether optimizer state is included
    step: int | None = None  # last step of a generation, counted from 0
    notes: list[str] = field(
        default_factory=list
    )  # remarks for people, for example how the step was found
    lacks: dict[str, str] = field(
        default_factory=dict
    )  # part of a run that the source lacks -> how the run starts
    ignored: list[str] = field(
        default_factory=list
    )  # names of other contents of the source, not converted
    seconds: float = 0.0  # duration


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
    merge: bool = False,
    base: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Conversion:
    """Convert the checkpoint in ``source`` to ``target``, which appears only after it was read back
    and compared.

    Example:

        convert("checkpoints/global_step_100", "models/step_100", to="hf")

    Args:
        source: folder of verl (one worker or one step), AReaL or Holdfast, with optimizer state. Or
            weights only: a Hugging Face model, a checkpoint of Trainer, TRL or Accelerate, or
            torch.distributed.checkpoint data under any root. The format is detected from the files.
            Nothing in the folder is executed.
        target: folder to create. With ``generation`` the folder of a run,
            ``<fileroot>/<experiment>/<trial>``.
        to: ``hf`` (for ``from_pretrained``), ``dcp`` (for `load_dcp`), ``generation`` (for
            `RecoverHandler.load`), or ``areal`` (for AReaL's engine, with its optimizer).
        dtype: ``float32``, ``bfloat16`` or ``float16`` for floating-point weights. None leaves them
            unchanged. Optimizer state never changes. An engine of Holdfast trains float32.
        root: root of DCP data, see `load_dcp`. None takes the only one.
        config: folder with the model's ``config.json`` if the source has none. Needed for ``hf``
            and for tied weights.
        engine: engine to read if the source has several. For a generation with one engine, its new
            name (``default``).
        step: last step of a generation, counted from 0, if the source does not contain it.
        steps_per_epoch: steps per epoch of a generation, if the source does not contain it.
        merge: with ``hf``, merge adapters into the base that the source left out.
        base: folder of the base. None takes the folder that the source names. Its digest must
            match.
        progress: show a bar on stderr.

    Raises:
        ConfigError: an argument is wrong, the format is unknown or ambiguous, or ``target`` is
            inside a committed folder.
        CheckpointNotFoundError, CheckpointCorruptError: the source is missing, incomplete or
            damaged, or could only be read by running code.
        CheckpointMismatchError: the parts do not belong to one model or to the model of ``config``,
            or the optimizer has no state for a parameter.
        CheckpointExistsError: ``target`` exists.
        CheckpointWriteError: the file system refused, or is full.
        FolderInUseError: a job uses the folder of the run.
    """
    began = time.monotonic()
    require_choice("to", to, TARGETS)
    require_choice("dtype", dtype, (None, *EXPORT_DTYPES))
    require_range("step", step, low=0)
    require_range("steps_per_epoch", steps_per_epoch, low=1)
    if to != "hf" and (merge or base is not None):
        raise ConfigError(
            "merge and base are for to='hf', where adapters become part of the weights; to is "
            f"{to!r}"
        )
    folder = require_local(source, "converting", FETCH_FIRST, "source")
    final = require_local(target, "converting", "convert to one, and copy that", "target")
    require_outside_commits(final)
    with ExitStack() as files:
        given = [None if each is None else Path(each) for each in (config, base)]
        options = ReadOptions(
            root, given[0], files, merge, given[1], engine, with_optimizer=to != "hf"
        )
        checkpoints = _chosen(_read_source(folder, options), to, engine)
        _require_trained(folder, checkpoints, to)
        if to != "hf" and dtype is not None:
            checkpoints = {
                name: _cast(each, EXPORT_DTYPES[dtype]) for name, each in checkpoints.items()
            }
        first = next(iter(checkpoints.values()))
        tensors = [
            tensor
            for each in checkpoints.values()
            for _, tensor in tensors_of(each, with_optimizer=to != "hf")
        ]
        n_bytes = sum(tensor.nbytes for tensor in tensors)
        with_optimizer = to != "hf" and any(each.optimizer for each in checkpoints.values())
        ignored = [
            name
            for each in checkpoints.values()
            for name in (*each.ignored, *_without_optimizer(each, to))
        ]
        done = Conversion(
            *(str(folder), first.format, str(final), to, len(tensors), n_bytes, with_optimizer),
            ignored=ignored,
        )
        require_free_space(final.parent, done.bytes, "make room, or convert to another disk")
        bar = files.enter_context(_Bar(progress, f"{first.format} to {to}", 2 * done.bytes))
        with _no_empty_folders_left(final / "recover" if to == "generation" else final.parent):
            if to == "generation":
                done = _to_generation(
                    checkpoints, final, options, (step, steps_per_epoch), bar, done
                )
            else:
                _to_folder(
                    first, final, to, None if dtype is None else EXPORT_DTYPES[dtype], options, bar
                )
    return replace(done, seconds=time.monotonic() - began)


@contextmanager
def _no_empty_folders_left(folder: Path) -> Iterator[None]:
    """If the block fails, remove ``folder`` and those of its parents that the block created and
    left empty.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    except BaseException:
        for each in missing:
            with suppress(OSError):
                each.rmdir()
        raise


def _read_source(folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
    """Engine name -> its checkpoint. A source with a manifest is verified first."""
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"there is no folder {folder}")
    for _, recognises, read in _SOURCES:
        if recognises(folder):
            if (folder / MANIFEST_NAME).is_file():
                verify_folder(folder)
            return read(folder, options)
    found, known = (
        sorted(path.name for path in folder.iterdir())[:12],
        "; ".join(marks for marks, *_ in _SOURCES),
    )
    raise ConfigError(
        f"{folder} is of no format that can be converted: it holds {found}. Looked for: {known}"
    )


def _require_trained(folder: Path, checkpoints: Mapping[str, Checkpoint], to: str) -> None:
    """Check that a load will find an optimizer in a generation, and a state for each of its
    parameters.
    """
    if to == "generation" and all(each.groups is None for each in checkpoints.values()):
        found = sorted({name for each in checkpoints.values() for name in each.ignored})
        raise ConfigError(
            f"{folder} holds weights and {found or 'nothing else'}, but no optimizer state that "
            "can be converted, which a run resumes with: start a run from the weights instead "
            "(--to hf)"
        )
    for checkpoint in checkpoints.values() if to != "hf" else ():
        checkpoint.require_states()
        require_loads(str(folder), checkpoint)


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
    model = checkpoint.model.items()
    cast = {
        name: tensor.to(dtype) if tensor.dtype.is_floating_point else tensor
        for name, tensor in model
    }
    return replace(checkpoint, model=cast)


def _without_optimizer(checkpoint: Checkpoint, to: str) -> list[str]:
    """Contents that Holdfast's folders hold only together with an optimizer, and that this source
    holds without one.
    """
    if to not in ("dcp", "generation") or checkpoint.groups is not None:
        return []
    generators = (
        bool(checkpoint.rng) and to == "dcp"
    )  # a generation stores them next to its engines
    return ["schedule"] * (checkpoint.scheduler is not None) + ["generators"] * generators


def _to_folder(
    checkpoint: Checkpoint,
    final: Path,
    to: str,
    dtype: torch.dtype | None,
    options: ReadOptions,
    bar: "_Bar",
) -> None:
    written, entries = Digests(bar.count), None
    with staged_folder(final) as staging:
        if to == "hf":
            write_hf(checkpoint, staging, dtype, written.seen)
        else:
            entries = (write_dcp if to == "dcp" else write_areal)(checkpoint, staging, written.seen)
        bar.say("comparing")
        _compare(f"{final}", staging, checkpoint, written, options, bar, plain=to != "hf")
        if (
            entries is not None
        ):  # only now: with a manifest, the comparison would read every file once more
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
    with staged_generation(final, last.global_step) as (staging, commit):
        written = {name: Digests(bar.count) for name in checkpoints}
        seen: dict[str, Seen] = {name: digests.seen for name, digests in written.items()}
        info, entries = write_generation(checkpoints, staging, last, lacks, seen)
        bar.say("comparing")
        for name, checkpoint in checkpoints.items():
            _compare(
                f"{final}, {name}",
                staging / name,
                checkpoint,
                written[name],
                options,
                bar,
                plain=True,
            )
        path = commit(entries, manifest_facts(info))
    notes = [f"step {last.global_step}, {how}"]
    return replace(done, target=str(path), step=last.global_step, notes=notes, lacks=lacks)


def _compare(
    what: str,
    staging: Path,
    source: Checkpoint,
    written: Digests,
    options: ReadOptions,
    bar: "_Bar",
    plain: bool,
) -> None:
    """Read the target back and compare it with the source. ``plain`` compares hyperparameters as
    well.
    """
    require_all_written(what, source, written.values(), with_optimizer=plain)
    config = None if source.architecture is None else source.architecture.folder
    with ExitStack() as files:
        again = replace(options, root=None, config=config, files=files)
        (target,) = _read_source(staging, again).values()
        compare(what, source, written.values(), target, Digests(bar.count))
        if plain:
            compare_plain(what, source, target)


class _Bar(Progress):
    """A progress bar on stderr, which prints nothing unless it is ``shown``."""

    def __init__(self, shown: bool, what: str, n_bytes: int) -> None:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        super().__init__(
            TextColumn("{task.description}"),
            *columns,
            console=Console(stderr=True),
            disable=not shown,
        )
        self._what, self._bytes = what, self.add_task(what, total=n_bytes)

    def count(self, n_bytes: int) -> None:
        self.advance(self._bytes, n_bytes)

    def say(self, doing: str) -> None:
        self.update(self._bytes, description=f"{self._what}, {doing}")
