"""Generations of Holdfast: every engine, with step and generators; what else they hold is named as ignored."""

from pathlib import Path

from ...utils.manifest import MANIFEST_NAME
from ..info import INFO_NAME, RecoverInfo
from .checkpoint import Checkpoint, ReadOptions
from .dcp import read_folder


def recognises(folder: Path) -> bool:
    """Whether a `RecoverHandler` wrote it, or a conversion."""
    return (folder / INFO_NAME).is_file() and (folder / MANIFEST_NAME).is_file()


def read(folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
    """Every engine of the generation; see `checkpoint.Reader`."""
    info = RecoverInfo.read(folder)
    found = {
        path.name: read_folder(path, options)
        for path in sorted(folder.iterdir())
        if path.is_dir() and (path / ".metadata").is_file()
    }
    beside = [name for name in ("data.pt",) if (folder / name).is_file()]
    beside += (
        ["state/ (objects given to the handler, the driver's generators)"] if any(folder.glob("state/*.pt")) else []
    )
    for checkpoint in found.values():
        checkpoint.format = "Holdfast generation"
        checkpoint.step = info.last_step_info.global_step
        checkpoint.epoch_steps = info.last_step_info.steps_per_epoch
        checkpoint.ranks = info.world_size
        checkpoint.ignored += beside
    return found
