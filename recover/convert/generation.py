"""Generations of Holdfast: every engine, with step and generators; what else they hold is named as ignored."""

from pathlib import Path

from ...utils.config import require_choice
from ...utils.errors import CheckpointNotFoundError, ConfigError
from ...utils.manifest import MANIFEST_NAME
from ..info import INFO_NAME, RecoverInfo
from .checkpoint import Checkpoint, ReadOptions
from .dcp import read_folder


def recognises(folder: Path) -> bool:
    """Whether a `RecoverHandler` wrote it, or a conversion."""
    return (folder / INFO_NAME).is_file() and (folder / MANIFEST_NAME).is_file()


def engine_folder(folder: Path, engine: str | None) -> Path:
    """Where the tensors of one engine of a generation are; ``folder`` itself if it is no generation but holds them.

    Raises:
        ConfigError: it has several engines, and none is named, or none of that name.
    """
    if (folder / ".metadata").is_file():
        return folder
    found = {path.name: path for path in _engines(folder)}
    if engine is None and len(found) > 1:
        raise ConfigError(f"the source holds {sorted(found)}; say which one: engine=, --engine")
    require_choice("engine", engine, (None, *found))
    if not found:
        raise CheckpointNotFoundError(f"{folder} holds no engine")
    return found[engine] if engine is not None else next(iter(found.values()))


def _engines(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and (path / ".metadata").is_file()]


def read(folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
    """Every engine of the generation, or the one that is asked for; see `checkpoint.Reader`."""
    info, engines = RecoverInfo.read(folder), _engines(folder)
    asked = [path for path in engines if path.name == options.engine]  # the others may be of another base
    found = {path.name: read_folder(path, options) for path in asked or engines}
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
