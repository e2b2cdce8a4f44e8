"""Generations of Holdfast, verified before anything is read of them."""

from pathlib import Path

from ...utils.manifest import MANIFEST_NAME, verify_folder
from ..info import INFO_NAME, RecoverInfo
from .checkpoint import Checkpoint, ReadOptions
from .dcp import read_folder


def recognises(folder: Path) -> bool:
    """Whether a `RecoverHandler` wrote it, or a conversion."""
    return (folder / INFO_NAME).is_file() and (folder / MANIFEST_NAME).is_file()


def read(folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
    """Every engine of the generation; see `checkpoint.Reader`."""
    verify_folder(folder)
    info = RecoverInfo.read(folder)
    found = {
        path.name: read_folder(path, options)
        for path in sorted(folder.iterdir())
        if path.is_dir() and (path / ".metadata").is_file()
    }
    for checkpoint in found.values():
        checkpoint.format = "Holdfast generation"
        checkpoint.step = info.last_step_info.global_step
        checkpoint.epoch_steps = info.last_step_info.steps_per_epoch
        checkpoint.ranks = info.world_size
        checkpoint.ignored += [name for name in ("data.pt",) if (folder / name).is_file()]
    return found
