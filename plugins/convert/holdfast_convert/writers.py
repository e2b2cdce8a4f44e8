"""Write DCP folders of Holdfast and AReaL, and generations in the folder of a run."""

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from holdfast.engine.api import StepInfo
from holdfast.engine.dcp.fingerprint import BlockSampler, combine_samples
from holdfast.engine.dcp.format import rank_key
from holdfast.engine.dcp.optimizer_state import hyperparameters
from holdfast.engine.dcp.save import Entry, write_entries
from holdfast.engine.dcp.state import ROOT
from holdfast.engine.memory.lazy_tensor import LazyTensor
from holdfast.recover.export.digests import Seen
from holdfast.recover.info import (
    INFO_NAME,
    EngineFacts,
    RecoverInfo,
    rank_state_name,
)
from holdfast.recover.saving.snapshot import write_process
from holdfast.recover.storage.generations import LOCK_NAME, GenerationStore
from holdfast.utils.errors import CheckpointExistsError, ConfigError
from holdfast.utils.folder_lock import FolderLock
from holdfast.utils.manifest import FileEntry, write_entry
from holdfast.utils.plain_values import pack_json, pack_plain
from holdfast.utils.rng import rng_digest

from .checkpoint import Checkpoint

_TORCH_DEFAULTS = {
    "foreach": None,
    "fused": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "decoupled_weight_decay": True,
}
"""Hyperparameters of torch's AdamW that Holdfast does not store, but that a loader asks for."""


def write_dcp(checkpoint: Checkpoint, folder: Path, seen: Seen) -> list[FileEntry]:
    """Write a folder in the format of `save_dcp`, for `load_dcp` and `RecoverHandler` at any world
    size.
    """
    entries = dcp_entries(checkpoint)
    return write_entries(folder, entries, _below_root(seen))


def write_areal(checkpoint: Checkpoint, folder: Path, seen: Seen) -> list[FileEntry]:
    """Write a folder in the format of AReaL's engine, ``dcp.save({"dcp": DCPState(model,
    optimizer)})``.

    AReaL's loader asks for each hyperparameter by name, and for tied tensors under every name.
    """
    entries = _areal_entries(checkpoint)
    return write_entries(folder, entries, _below_root(seen))


def _below_root(seen: Seen) -> Seen:
    def below(name: str, first: int, values: Tensor) -> None:
        seen(name.removeprefix(f"{ROOT}."), first, values)

    return below


def plain_groups(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The parameter groups in the form that Holdfast stores."""
    found: list[dict[str, Any]] = []
    for group in checkpoint.groups or ():
        names = list(group["params"])
        found.append({**hyperparameters(group), "params": names})
    return found


def optimizer_steps(checkpoint: Checkpoint) -> int:
    """Number of updates that the optimizer has counted, or 0."""
    counts: list[int] = []
    for entries in checkpoint.optimizer.values():
        if "step" in entries:
            step = entries["step"]
            if isinstance(step, LazyTensor):
                step = step.rows(0, 1)
            counts.append(int(step))
    return max(counts, default=0)


def dcp_entries(checkpoint: Checkpoint) -> Iterator[Entry]:
    """The entries of a folder in the format of `save_dcp`."""
    # A folder of weights alone has no optimizer and no counters.
    for name, tensor in checkpoint.model.items():
        yield Entry((ROOT, "model", name), tensor)
    if checkpoint.groups is None:
        return

    # Values of the optimizer that are no tensors go into one JSON.
    plain: dict[str, dict[str, Any]] = {}
    for name, entries in checkpoint.optimizer.items():
        for key, value in entries.items():
            if isinstance(value, LazyTensor):
                yield Entry((ROOT, "optim", "state", name, key), value)
            else:
                plain.setdefault(name, {})[key] = value

    packed: dict[str, Any] = {
        "param_groups": plain_groups(checkpoint),
        "optim_plain": plain,
        "scheduler": checkpoint.scheduler,
        "counters": {
            "version": 0,
            "optimizer_steps": optimizer_steps(checkpoint),
            "skipped_steps": 0,
            "steps_since_schedule": 0,
        },
    }
    for key, value in packed.items():
        if value:
            data = pack_json(value, key)
            yield Entry((ROOT, key), LazyTensor.of(data))

    # A load gives each rank its own.
    for rank, state in enumerate(checkpoint.rng):
        for generator, tensor in state.items():
            path = (ROOT, "rng", rank_key(rank), generator)
            yield Entry(path, LazyTensor.of(tensor))


def _areal_entries(checkpoint: Checkpoint) -> Iterator[Entry]:
    for name, tensor in checkpoint.model.items():
        yield Entry((ROOT, "model", name), tensor)
    # Under every name, as AReaL saves them.
    for alias, name in checkpoint.aliases.items():
        yield Entry((ROOT, "model", alias), checkpoint.model[name])

    for name, entries in checkpoint.optimizer.items():
        for key, value in entries.items():
            yield Entry((ROOT, "optim", "state", name, key), value)

    for number, group in enumerate(checkpoint.groups or ()):
        # Values of the group itself win over defaults.
        values = {"initial_lr": group.get("lr"), **_TORCH_DEFAULTS, **group}
        for key, value in values.items():
            yield Entry((ROOT, "optim", "param_groups", number, key), value)


_ANEW = {
    "data": "the dataloader starts at its beginning: put it to its place yourself, or train on "
    "other samples",
    "generators": "random generators stay as the script seeded them",
    "schedule": "the learning-rate schedule starts anew, from the rates that were saved",
    "epochs": "the steps of an epoch are not known: the place in the epoch is counted by those of "
    "the new run",
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
    store = GenerationStore(run / "recover")
    lock = FolderLock(run / LOCK_NAME)
    had_lock = lock.path.exists()
    lock.acquire(timeout_s=1.0)

    def commit(entries: Iterable[FileEntry], facts: Mapping[str, Any]) -> Path:
        lock.confirm()
        return store.commit(staging, step, entries, facts).path

    try:
        # A generation of another run among those of this one would be resumed from.
        found = store.generations()
        if found:
            raise CheckpointExistsError(
                f"{store.root} holds {found[0].path.name} already; convert into the folder of a "
                "new trial"
            )

        # Leftovers of a killed conversion.
        store.sweep()

        staging = store.open_staging(step)
        try:
            yield staging, commit
        except BaseException:
            store.discard(staging)
            raise
    except BaseException:
        # Removed while it is held: a job that waits for it notices before it commits.
        if not had_lock:
            lock.path.unlink(missing_ok=True)
        raise
    finally:
        lock.release()


def last_step(
    checkpoints: Mapping[str, Checkpoint],
    step: int | None,
    epoch_steps: int | None,
) -> tuple[StepInfo, str]:
    """Step of the generation, and how it is known. Raises `ConfigError` if neither source nor
    caller know it.
    """
    first = next(iter(checkpoints.values()))
    how = "as given"
    if step is None:
        step = first.step
        how = "as the source says"
    if step is None:
        step = optimizer_steps(first) - 1
        how = "by the optimizer's updates; give step= (--step) if a step makes several"
    if step < 0:
        raise ConfigError(
            "how many steps were trained is not known: give step= (--step), the last one counted "
            "from 0"
        )
    epoch_steps = epoch_steps or first.epoch_steps or step + 1
    return StepInfo.at(step, epoch_steps), how


def what_starts_anew(
    checkpoints: Mapping[str, Checkpoint],
    epoch_steps: int | None,
) -> dict[str, str]:
    """Part of a run that the source lacks -> how the run starts without it."""
    some = list(checkpoints.values())
    first = some[0]
    trained = [each for each in some if each.groups is not None]
    lacking = {
        "data": True,
        "generators": not first.rng,
        "schedule": any(each.scheduler is None for each in trained),
        "epochs": epoch_steps is None and first.epoch_steps is None,
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

    # A folder for each engine.
    facts: dict[str, EngineFacts] = {}
    for name, checkpoint in checkpoints.items():
        groups = checkpoint.groups
        has_rate = bool(groups) and "lr" in groups[0]
        if groups is not None and not has_rate:
            raise ConfigError(
                f"{name} has parameter groups without a rate (lr); load it with load_dcp"
            )
        sampler = BlockSampler()
        (staging / name).mkdir()
        sampled = _sampled(checkpoint, sampler, seen[name])
        for file in write_dcp(checkpoint, staging / name, sampled):
            entries.append(FileEntry(f"{name}/{file.name}", file.bytes, file.digest))
        facts[name] = _facts(checkpoint, sampler)

    # The generators of each rank that has saved the source.
    first = next(iter(checkpoints.values()))
    rng: dict[str, str] = {}
    for rank, state in enumerate(first.rng):
        name = rank_state_name(rank)
        data = pack_plain("generators", {"rng": state, "user": {}})
        entries.append(write_process(staging, name, data))
        rng[Path(name).stem] = rng_digest(state)

    # The file that a start reads first.
    info = RecoverInfo(
        last,
        uuid.uuid4().hex,
        first.ranks,
        engines=facts,
        rng=rng,
        converted={"from": first.format, **lacks},
    )
    entries.append(write_entry(staging, INFO_NAME, info.to_json()))
    return info, entries


def _sampled(checkpoint: Checkpoint, sampler: BlockSampler, seen: Seen) -> Seen:
    """Let ``sampler`` see every block, too."""
    numels = {name: tensor.numel for name, tensor in checkpoint.tensors()}

    def both(name: str, first: int, values: Tensor) -> None:
        sampler.add(name, numels.get(name, 0), first, values)
        seen(name, first, values)

    return both


def _facts(checkpoint: Checkpoint, sampler: BlockSampler) -> EngineFacts:
    combined = combine_samples([sampler.sums])
    model = str(combined["model"])
    if checkpoint.groups is None:
        return EngineFacts(None, None, None, {"model": model}, False)

    # The start compares these with what it has loaded.
    schedule_step = 0
    if checkpoint.scheduler is not None:
        schedule_step = checkpoint.scheduler.get("last_epoch", 0)
    return EngineFacts(
        optimizer_steps(checkpoint),
        float(checkpoint.groups[0]["lr"]),
        schedule_step,
        {"model": model, "optim": str(combined["optim"])},
        bool(combined["moved"]),
    )
