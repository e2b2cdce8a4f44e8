"""`convert`: turn a checkpoint of one trainer into a checkpoint of another.

A reader finds the position of each tensor, a writer asks for it block by block, the result is read
back and compared, and then the target gets its name. A killed conversion leaves a hidden folder,
which the next conversion to the same target removes.

Memory: one block of 64 MiB. Files of ``torch.save`` are mapped into memory. Exceptions: tensors in
DCP format from another version of torch, and tensors that transformers fuses or transposes, are
read as a whole. ``.bin`` files of torch before 1.6 are read completely. Disk: the target, once.
Reads: source and target, once each.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from holdfast.engine.api import EXPORT_DTYPES
from holdfast.recover.export.digests import (
    Digests,
    Seen,
    require_all_written,
    require_equal,
)
from holdfast.recover.export.weights import ModelWeights
from holdfast.recover.export.writing import no_empty_folders_left, write_model
from holdfast.recover.saving.snapshot import manifest_facts
from holdfast.utils.atomic_folder import staged_folder
from holdfast.utils.config import require_choice, require_range
from holdfast.utils.errors import ConfigError
from holdfast.utils.files import StrPath, require_free_space
from holdfast.utils.manifest import require_outside_commits, write_manifest
from holdfast.utils.remote import FETCH_FIRST, require_local

from .check import compare_plain, require_loads, tensors_only
from .checkpoint import Checkpoint, ReadOptions
from .progress import ProgressBar
from .sources import read_source
from .writers import (
    last_step,
    staged_generation,
    what_starts_anew,
    write_areal,
    write_dcp,
    write_generation,
)

TARGETS = ("hf", "generation", "dcp", "areal")


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
    # Remarks for people, for example how the step was found.
    notes: list[str] = field(default_factory=list)
    # Part of a run that the source lacks -> how the run starts.
    lacks: dict[str, str] = field(default_factory=dict)
    # Names of other contents of the source, not converted.
    ignored: list[str] = field(default_factory=list)
    seconds: float = 0.0  # duration


def convert(
    source: StrPath,
    target: StrPath,
    *,
    to: str,
    dtype: str | None = None,
    root: str | None = None,
    config: StrPath | None = None,
    engine: str | None = None,
    step: int | None = None,
    steps_per_epoch: int | None = None,
    merge: bool = False,
    base: StrPath | None = None,
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
    to_weights = to == "hf"
    if not to_weights and (merge or base is not None):
        raise ConfigError(
            "merge and base are for to='hf', where adapters become part of the weights; to is "
            f"{to!r}"
        )
    # Both are folders of this machine.
    folder = require_local(source, "converting", FETCH_FIRST, "source")
    final = require_local(target, "converting", "convert to one, and copy that", "target")
    require_outside_commits(final)

    with ExitStack() as files:
        # Find every tensor. Nothing is written before the source is known to be complete.
        options = ReadOptions(
            root,
            config=None if config is None else Path(config),
            files=files,
            merge=merge,
            base=None if base is None else Path(base),
            engine=engine,
            with_optimizer=not to_weights,
        )
        found = read_source(folder, options)
        checkpoints = _chosen(found, to, engine)
        _require_trained(folder, checkpoints, to)
        wanted_dtype = None if dtype is None else EXPORT_DTYPES[dtype]
        if not to_weights and wanted_dtype is not None:
            checkpoints = _cast(checkpoints, wanted_dtype)

        done = _describe(checkpoints, str(folder), str(final), to)
        require_free_space(final.parent, done.bytes, "make room, or convert to another disk")

        # Every byte is counted twice: once as it is written, once as it is compared.
        what = f"{done.format} to {to}"
        bar = files.enter_context(ProgressBar(progress, what, 2 * done.bytes))
        if to == "generation":
            done = _to_generation(
                checkpoints,
                final,
                options,
                step,
                steps_per_epoch,
                bar,
                done,
            )
        else:
            (checkpoint,) = checkpoints.values()
            if to_weights:
                _to_hf(checkpoint, final, wanted_dtype, bar)
            else:
                _to_dcp(checkpoint, final, to, options, bar)
    return replace(done, seconds=time.monotonic() - began)


def _chosen(
    found: dict[str, Checkpoint],
    to: str,
    engine: str | None,
) -> dict[str, Checkpoint]:
    """The engines to convert. A single one may get another name in a generation."""
    # The name of a single engine does not matter, unless the target keeps it.
    if len(found) == 1:
        if to != "generation":
            require_choice("engine", engine, (None, *found))
        ((name, only),) = found.items()
        return {engine or name: only}
    if engine is not None:
        require_choice("engine", engine, tuple(found))
        return {engine: found[engine]}
    if to != "generation":
        raise ConfigError(f"the source holds {sorted(found)}; say which one: engine=, --engine")
    return found


def _require_trained(folder: Path, checkpoints: Mapping[str, Checkpoint], to: str) -> None:
    """Check that a load will find an optimizer in a generation, and a state for each of its
    parameters.
    """
    if to == "hf":
        return
    every = checkpoints.values()
    if to == "generation" and all(each.groups is None for each in every):
        found = sorted({name for each in every for name in each.ignored})
        raise ConfigError(
            f"{folder} holds weights and {found or 'nothing else'}, but no optimizer state that "
            "can be converted, which a run resumes with: start a run from the weights instead "
            "(--to hf)"
        )
    # Only here, because weights can be taken from any source.
    for checkpoint in every:
        checkpoint.require_states()
        require_loads(str(folder), checkpoint)


def _cast(checkpoints: Mapping[str, Checkpoint], dtype: torch.dtype) -> dict[str, Checkpoint]:
    """The same with floating-point weights as ``dtype``, and optimizer state as it is."""
    found: dict[str, Checkpoint] = {}
    for name, checkpoint in checkpoints.items():
        model = dict(checkpoint.model)
        for key, tensor in model.items():
            if tensor.dtype.is_floating_point:
                model[key] = tensor.to(dtype)
        found[name] = replace(checkpoint, model=model)
    return found


def _describe(
    checkpoints: Mapping[str, Checkpoint],
    source: str,
    target: str,
    to: str,
) -> Conversion:
    """The conversion as far as it is known before it begins."""
    to_weights = to == "hf"
    n_tensors = 0
    n_bytes = 0
    ignored: list[str] = []
    for checkpoint in checkpoints.values():
        for _, tensor in checkpoint.tensors(with_optimizer=not to_weights):
            n_tensors += 1
            n_bytes += tensor.nbytes
        ignored += checkpoint.ignored
        ignored += _without_optimizer(checkpoint, to)

    # All engines come from one source, so they have one format.
    first = next(iter(checkpoints.values()))
    has_optimizer = any(each.optimizer for each in checkpoints.values())
    return Conversion(
        source,
        first.format,
        target,
        to,
        n_tensors,
        n_bytes,
        optimizer=has_optimizer and not to_weights,
        ignored=ignored,
    )


def _without_optimizer(checkpoint: Checkpoint, to: str) -> list[str]:
    """Contents that Holdfast's folders hold only together with an optimizer, and that this source
    holds without one.
    """
    if to not in ("dcp", "generation") or checkpoint.groups is not None:
        return []
    found: list[str] = []
    if checkpoint.scheduler is not None:
        found.append("schedule")
    # A generation stores them next to its engines.
    if checkpoint.rng and to == "dcp":
        found.append("generators")
    return found


def _to_hf(
    checkpoint: Checkpoint,
    final: Path,
    dtype: torch.dtype | None,
    bar: ProgressBar,
) -> None:
    architecture = checkpoint.architecture
    if architecture is None:
        raise ConfigError(
            f"a source of format {checkpoint.format} has no config.json; name a folder that has "
            "the model's, with its tokenizer if it is to go along: config=, --config"
        )
    weights = ModelWeights(checkpoint.model, checkpoint.aliases)
    write_model(weights, architecture, final, dtype, bar.count, bar.say)


def _to_dcp(
    checkpoint: Checkpoint,
    final: Path,
    to: str,
    options: ReadOptions,
    bar: ProgressBar,
) -> None:
    # The two differ in the names of optimizer and hyperparameters only.
    write = write_dcp if to == "dcp" else write_areal
    written = Digests(bar.count)
    with no_empty_folders_left(final.parent), staged_folder(final) as staging:
        entries = write(checkpoint, staging, tensors_only(written.seen))
        bar.say("comparing")
        _compare(str(final), staging, checkpoint, written, options, bar)
        # Only now: with a manifest, the comparison would read every file once more.
        write_manifest(staging, entries, {"world_size": 1})


def _to_generation(
    checkpoints: Mapping[str, Checkpoint],
    final: Path,
    options: ReadOptions,
    step: int | None,
    steps_per_epoch: int | None,
    bar: ProgressBar,
    done: Conversion,
) -> Conversion:
    last, how = last_step(checkpoints, step, steps_per_epoch)
    lacks = what_starts_anew(checkpoints, steps_per_epoch)
    with (
        no_empty_folders_left(final / "recover"),
        staged_generation(final, last.global_step) as (staging, commit),
    ):
        written = {name: Digests(bar.count) for name in checkpoints}
        seen: dict[str, Seen] = {}
        for name, digests in written.items():
            seen[name] = tensors_only(digests.seen)
        info, entries = write_generation(checkpoints, staging, last, lacks, seen)

        bar.say("comparing")
        for name, checkpoint in checkpoints.items():
            what = f"{final}, {name}"
            _compare(what, staging / name, checkpoint, written[name], options, bar)

        # All engines are as they should be: the manifest makes them a generation.
        path = commit(entries, manifest_facts(info))
    return replace(
        done,
        target=str(path),
        step=last.global_step,
        notes=[f"step {last.global_step}, {how}"],
        lacks=lacks,
    )


def _compare(
    what: str,
    staging: Path,
    source: Checkpoint,
    written: Digests,
    options: ReadOptions,
    bar: ProgressBar,
) -> None:
    """Read the target back with the reader of its format, and compare it with the source."""
    require_all_written(what, dict(source.tensors()), written.values())

    # The reader needs the ties of the model, which the target may not name.
    config = None
    if source.architecture is not None:
        config = source.architecture.folder
    with ExitStack() as files:
        again = replace(options, root=None, config=config, files=files)
        (target,) = read_source(staging, again).values()
        digests = Digests(bar.count)
        digests.add_all(dict(target.tensors()))
    require_equal(what, written.values(), digests.values(), source.aliases)
    compare_plain(what, source, target)
