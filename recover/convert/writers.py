"""Write Hugging Face folders, DCP folders of Holdfast and AReaL, and generations in the folder of a
run.
"""

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...engine.api import HFExportOptions, StepInfo
from ...engine.dcp.fingerprint import BlockSampler, combine_samples
from ...engine.dcp.optimizer_state import hyperparameters
from ...engine.dcp.save import Entry, write_entries
from ...engine.dcp.state import ROOT, rank_key
from ...engine.hf.save_lazily import write_lazily
from ...engine.hf.sidecars import adopt_base
from ...engine.memory.lazy_tensor import LazyTensor
from ...utils.errors import CheckpointExistsError, CheckpointMismatchError, ConfigError
from ...utils.folder_lock import FolderLock
from ...utils.manifest import FileEntry, write_entry
from ...utils.plain_values import pack_json, pack_plain
from ...utils.rng import rng_digest
from ..info import INFO_NAME, EngineFacts, RecoverInfo, rank_state_name
from ..saving.snapshot import write_process
from ..storage.generations import LOCK_NAME, GenerationStore
from .checkpoint import Checkpoint

Seen = Callable[[str, int, torch.Tensor], None]
"""Called for each block with ``model.<name>`` or ``optim.state.<parameter>.<entry>``, first element
and values.
"""

_TORCH_DEFAULTS = {
    **{
        "foreach": None,
        "fused": None,
        "maximize": False,
        "capturable": False,
        "differentiable": False,
    },
    "decoupled_weight_decay": True,
}
"""Hyperparameters of torch's AdamW that Holdfast does not store, but that a loader asks for."""


def write_dcp(checkpoint: Checkpoint, folder: Path, seen: Seen) -> list[FileEntry]:
    """Write a folder in the format of `save_dcp`, for `load_dcp` and `RecoverHandler` at any world
    size.
    """
    return write_entries(folder, dcp_entries(checkpoint), _below_root(seen))


def write_areal(checkpoint: Checkpoint, folder: Path, seen: Seen) -> list[FileEntry]:
    """Write a folder in the format of AReaL's engine, ``dcp.save({"dcp": DCPState(model,
    optimizer)})``.

    AReaL's loader asks for each hyperparameter by name, and for tied tensors under every name.
    """
    return write_entries(folder, _areal_entries(checkpoint), _below_root(seen))


def write_hf(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype | None, seen: Seen) -> None:
    """Write a folder for ``from_pretrained``, with config, tokenizer and other small files of the
    model.
    """
    if checkpoint.architecture is None:
        raise ConfigError(
            f"a source of format {checkpoint.format} has no config.json; name a folder that has "
            "the model's, with its tokenizer if it is to go along: config=, --config"
        )
    model, base = checkpoint.architecture.model, checkpoint.architecture.folder
    adopt_base(model, base)
    options = HFExportOptions(dtype=dtype, base_model_path=base)
    try:
        write_lazily(
            model,
            checkpoint.model,
            folder,
            options,
            lambda name, *block: seen(f"model.{name}", *block),
        )
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(
            f"the source is not of the model of {base}/config.json: {error}"
        ) from error


def plain_groups(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The parameter groups in the form that Holdfast stores."""
    return [
        hyperparameters(group) | {"params": list(group["params"])}
        for group in checkpoint.groups or ()
    ]


def optimizer_steps(checkpoint: Checkpoint) -> int:
    """Number of updates that the optimizer has counted, or 0."""
    counts = (entries["step"] for entries in checkpoint.optimizer.values() if "step" in entries)
    return max(
        (int(step.rows(0, 1)) if isinstance(step, LazyTensor) else int(step) for step in counts),
        default=0,
    )


def _below_root(seen: Seen) -> Seen:
    return lambda name, *block: seen(name.removeprefix(f"{ROOT}."), *block)


def dcp_entries(checkpoint: Checkpoint) -> Iterator[Entry]:
    """The entries of a folder in the format of `save_dcp`."""
    yield from (Entry((ROOT, "model", name), tensor) for name, tensor in checkpoint.model.items())
    if checkpoint.groups is None:
        return
    plain: dict[str, dict[str, Any]] = {}
    for name, entries in checkpoint.optimizer.items():
        for key, value in entries.items():
            if isinstance(value, LazyTensor):
                yield Entry((ROOT, "optim", "state", name, key), value)
            else:
                plain.setdefault(name, {})[key] = value
    steps = optimizer_steps(checkpoint)
    counters = {
        "version": 0,
        "optimizer_steps": steps,
        "skipped_steps": 0,
        "steps_since_schedule": 0,
    }
    packed = {
        "param_groups": plain_groups(checkpoint),
        "optim_plain": plain,
        "scheduler": checkpoint.scheduler,
    }
    for key, value in (packed | {"counters": counters}).items():
        if value:
            yield Entry((ROOT, key), LazyTensor.of(pack_json(value, key)))
    for rank, state in enumerate(checkpoint.rng):
        for generator, tensor in state.items():
            yield Entry((ROOT, "rng", rank_key(rank), generator), LazyTensor.of(tensor))


def _areal_entries(checkpoint: Checkpoint) -> Iterator[Entry]:
    yield from (Entry((ROOT, "model", name), tensor) for name, tensor in checkpoint.model.items())
    for alias, name in checkpoint.aliases.items():
        yield Entry((ROOT, "model", alias), checkpoint.model[name])
    for name, entries in checkpoint.optimizer.items():
        yield from (
            Entry((ROOT, "optim", "state", name, key), value) for key, value in entries.items()
        )
    for number, group in enumerate(checkpoint.groups or ()):
        for key, value in ({"initial_lr": group.get("lr")} | _TORCH_DEFAULTS | group).items():
            yield Entry((ROOT, "optim", "param_groups", number, key), value)


_ANEW = {
    "data": "the dataloader starts at its beginning: put it to its place yourself, or train on other samples",
    "generators": "random generators stay as the script seeded them",
    "schedule": "the learning-rate schedule starts anew, from the rates that were saved",
    "epochs": "the steps of an epoch are not known: the place in the epoch is counted by those of the new run",
}

Commit = Callable[[Iterable[FileEntry], Mapping[str, Any]], Path]
"""Called with the files of a generation and the facts for its manifest. Returns the folder of the
generation.
"""


@contextmanager
def staged_generation(run: Path, step: int) -> Iterator[tuple[Path, Commit]]:
    """Lock the folder of a run, and yield a staging folder for a step and the function that commits
    it.

    If the block fails, the staging folder is removed, and a new lock file too.

    Raises:
        FolderInUseError: a job uses the run.
        CheckpointExistsError: the run holds generations already.
    """
    store, lock = GenerationStore(run / "recover"), FolderLock(run / LOCK_NAME)
    had_lock = lock.path.exists()
    lock.acquire(timeout_s=1.0)

    def commit(entries: Iterable[FileEntry], facts: Mapping[str, Any]) -> Path:
        lock.confirm()
        return store.commit(staging, step, entries, facts).path

    try:
        if found := store.generations():
            raise CheckpointExistsError(
                f"{store.root} holds {found[0].path.name} already; convert into the folder of a "
                "new trial"
            )
        store.sweep()
        staging = store.open_staging(step)
        try:
            yield staging, commit
        except BaseException:
            store.discard(staging)
            raise
    except BaseException:
        if (
            not had_lock
        ):  # removed while it is held: a job that waits for it notices before it commits
            lock.path.unlink(missing_ok=True)
        raise
    finally:
        lock.release()


def last_step(
    checkpoints: Mapping[str, Checkpoint], step: int | None, epoch_steps: int | None
) -> tuple[StepInfo, str]:
    """Step of the generation, and how it is known. Raises `ConfigError` if neither source nor
    caller know it.
    """
    first = next(iter(checkpoints.values()))
    how = "as given" if step is not None else "as the source says"
    if step is None and (step := first.step) is None:
        step = optimizer_steps(first) - 1
        how = "by the optimizer's updates; give step= (--step) if a step makes several"
    if step < 0:
        raise ConfigError(
            "how many steps were trained is not known: give step= (--step), the last one counted "
            "from 0"
        )
    return StepInfo.at(step, epoch_steps or first.epoch_steps or step + 1), how


def what_starts_anew(
    checkpoints: Mapping[str, Checkpoint], epoch_steps: int | None
) -> dict[str, str]:
    """Part of a run that the source lacks -> how the run starts without it."""
    some = list(checkpoints.values())
    lacking = {
        "data": True,
        "generators": not some[0].rng,
        "schedule": any(each.groups is not None and each.scheduler is None for each in some),
        "epochs": epoch_steps is None and some[0].epoch_steps is None,
    }
    return {part: _ANEW[part] for part, lacks in lacking.items() if lacks}


def write_generation(
    checkpoints: Mapping[str, Checkpoint],
    staging: Path,
    last: StepInfo,
    lacks: Mapping[str, str],
    seen: Mapping[str, Seen],
) -> tuple[RecoverInfo, list[FileEntry]]:
    """Write all files of a generation except the manifest."""
    entries: list[FileEntry] = []
    facts: dict[str, EngineFacts] = {}
    first = next(iter(checkpoints.values()))
    for name, checkpoint in checkpoints.items():
        if checkpoint.groups is not None and not (
            checkpoint.groups and "lr" in checkpoint.groups[0]
        ):
            raise ConfigError(
                f"{name} has parameter groups without a rate (lr); load it with load_dcp"
            )
        sampler = BlockSampler()
        (staging / name).mkdir()
        files = write_dcp(checkpoint, staging / name, _sampled(checkpoint, sampler, seen[name]))
        entries += [FileEntry(f"{name}/{file.name}", file.bytes, file.digest) for file in files]
        facts[name] = _facts(checkpoint, sampler)
    rng: dict[str, str] = {}
    for rank, state in enumerate(first.rng):
        name, data = rank_state_name(rank), pack_plain("generators", {"rng": state, "user": {}})
        entries.append(write_process(staging, name, data))
        rng[Path(name).stem] = rng_digest(state)
    converted = {"from": first.format, **lacks}
    info = RecoverInfo(
        last, uuid.uuid4().hex, first.ranks, engines=facts, rng=rng, converted=converted
    )
    entries.append(write_entry(staging, INFO_NAME, info.to_json()))
    return info, entries


def _sampled(checkpoint: Checkpoint, sampler: BlockSampler, seen: Seen) -> Seen:
    numels = {f"model.{name}": tensor.numel for name, tensor in checkpoint.model.items()}
    for name, values in checkpoint.optimizer.items():
        numels |= {
            f"optim.state.{name}.{key}": getattr(value, "numel", 0) for key, value in values.items()
        }

    def both(name: str, first: int, values: torch.Tensor) -> None:
        sampler.add(name, numels.get(name, 0), first, values)
        seen(name, first, values)

    return both


def _facts(checkpoint: Checkpoint, sampler: BlockSampler) -> EngineFacts:
    combined = combine_samples([sampler.sums])
    if checkpoint.groups is None:
        return EngineFacts(None, None, None, {"model": str(combined["model"])}, False)
    schedule = 0 if checkpoint.scheduler is None else checkpoint.scheduler.get("last_epoch", 0)
    fingerprints = {part: str(combined[part]) for part in ("model", "optim")}
    rate = float(checkpoint.groups[0]["lr"])
    return EngineFacts(
        optimizer_steps(checkpoint), rate, schedule, fingerprints, bool(combined["moved"])
    )
