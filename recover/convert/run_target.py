"""A generation that `RecoverHandler.load` takes in mode ``auto``, in the folder of a run that has none yet."""

import uuid
from collections.abc import Mapping
from pathlib import Path

import torch

from ...engine.api import StepInfo
from ...engine.dcp.fingerprint import BlockSampler, combine_samples
from ...utils.errors import CheckpointExistsError, ConfigError
from ...utils.folder_lock import FolderLock
from ...utils.manifest import FileEntry, write_entry
from ...utils.rng import rng_digest
from ...utils.safe_torch import pack_plain
from ..consistency import EngineFacts
from ..info import INFO_NAME, RecoverInfo
from ..process_state import rank_state_name, write_process
from ..saving.snapshot import manifest_facts
from ..storage.generations import GenerationStore
from .checkpoint import Checkpoint
from .targets import Seen, optimizer_steps, write_dcp

_LOCK_WAIT_S = 1.0
_ANEW = {
    "data": "the dataloader starts at its beginning: put it to its place yourself, or train on other samples",
    "generators": "random generators stay as the script seeded them",
    "schedule": "the learning-rate schedule starts anew, from the rates that were saved",
    "epochs": "the steps of an epoch are not known: the place in the epoch is counted by those of the new run",
}


class RunTarget:
    """The folder of a run, ``<fileroot>/<experiment>/<trial>``, locked while a generation is made in it.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._store = GenerationStore(folder / "recover")
        self._lock = FolderLock(folder / "recover.lock")

    def open(self, step: int) -> Path:
        """Lock the folder, remove what a killed conversion left, and give a staging folder.

        Raises:
            FolderInUseError: a job uses it.
            CheckpointExistsError: it holds generations already.
        """
        self._lock.acquire(_LOCK_WAIT_S)
        if found := self._store.generations():
            raise CheckpointExistsError(
                f"{self._store.root} holds {found[0].path.name} already; convert into the folder of a new trial"
            )
        self._store.sweep()
        return self._store.open_staging(step)

    def commit(self, staging: Path, info: RecoverInfo, entries: list[FileEntry]) -> Path:
        """Make the generation visible; its path."""
        step = info.last_step_info.global_step
        return self._store.commit(staging, step, entries, manifest_facts(info)).path

    def discard(self, staging: Path) -> None:
        """Remove the staging folder of a conversion that failed."""
        self._store.discard(staging)

    def close(self) -> None:
        """Give up the lock; may be called without one."""
        self._lock.release()


def last_step(checkpoints: Mapping[str, Checkpoint], step: int | None, epoch_steps: int | None) -> tuple[StepInfo, str]:
    """The step of the generation, and how it is known.

    Raises:
        ConfigError: nothing tells it.
    """
    first = next(iter(checkpoints.values()))
    how = "as given" if step is not None else "as the source says"
    if step is None and (step := first.step) is None:
        step, how = (
            optimizer_steps(first) - 1,
            "by the optimizer's updates; give step= (--step) if a step makes several",
        )
    if step < 0:
        raise ConfigError("how many steps were trained is not known: give step= (--step), the last one counted from 0")
    return StepInfo.at(step, epoch_steps or first.epoch_steps or step + 1), how


def what_starts_anew(checkpoints: Mapping[str, Checkpoint], epoch_steps: int | None) -> dict[str, str]:
    """Part of a run -> what becomes of it, of what the source does not have."""
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
    """Write every file of a generation but its manifest.

    Raises:
        ConfigError: the hyperparameters of an optimizer are not known.
    """
    entries: list[FileEntry] = []
    facts: dict[str, EngineFacts] = {}
    first = next(iter(checkpoints.values()))
    for name, checkpoint in checkpoints.items():
        if checkpoint.optimizer and checkpoint.groups is None:
            raise ConfigError(
                f"{name} has optimizer state without hyperparameters (rate, betas); load it with load_dcp"
            )
        if checkpoint.groups is not None and not all("lr" in group for group in checkpoint.groups[:1] or [{}]):
            raise ConfigError(f"{name} has parameter groups without a rate (lr); load it with load_dcp")
        sampler = BlockSampler()
        (staging / name).mkdir()
        files = write_dcp(checkpoint, staging / name, _sampled(checkpoint, sampler, seen[name]))
        entries += [FileEntry(f"{name}/{file.name}", file.bytes, file.digest) for file in files]
        facts[name] = _facts(checkpoint, sampler)
    rng: dict[str, str] = {}
    for rank, state in enumerate(first.rng):
        data = pack_plain("generators", {"rng": state, "user": {}})
        entries.append(write_process(staging, rank_state_name(rank), data))
        rng[Path(rank_state_name(rank)).stem] = rng_digest(state)
    converted = {"from": first.format, **lacks}
    info = RecoverInfo(last, uuid.uuid4().hex, first.ranks, engines=facts, rng=rng, converted=converted)
    entries.append(write_entry(staging, INFO_NAME, info.to_json()))
    return info, entries


def _sampled(checkpoint: Checkpoint, sampler: BlockSampler, seen: Seen) -> Seen:
    numels = {f"model.{name}": tensor.numel for name, tensor in checkpoint.model.items()}
    for name, values in checkpoint.optimizer.items():
        numels |= {f"optim.state.{name}.{key}": getattr(value, "numel", 0) for key, value in values.items()}

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
    return EngineFacts(optimizer_steps(checkpoint), rate, schedule, fingerprints, bool(combined["moved"]))
