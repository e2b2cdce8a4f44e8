"""Recognise the format of a source by its files, and read it."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast.utils.errors import CheckpointNotFoundError, ConfigError
from holdfast.utils.manifest import MANIFEST_NAME, verify_folder

from . import dcp, hugging_face, verl
from .checkpoint import Checkpoint, ReadOptions


class _Format(NamedTuple):
    """A format of sources, and its reader."""

    marks: str  # files that identify it, for messages
    recognises: Callable[[Path], bool]
    read: Callable[[Path, ReadOptions], dict[str, Checkpoint]]


# Each by files that only this format has.
_VERL = _Format(
    "model_world_size_<N>_rank_<r>.pt, in it or in its actor/ or critic/ (verl)",
    verl.recognises,
    verl.read,
)
_GENERATION = _Format(
    "recover_info.json and manifest.json (a generation of Holdfast)",
    dcp.is_generation,
    dcp.read_generation,
)
_MODEL = _Format(
    "model.safetensors, pytorch_model.bin or pytorch_model_fsdp_0/ "
    "(models, Trainer and TRL, Accelerate)",
    hugging_face.recognises,
    hugging_face.read,
)
_DCP = _Format(
    ".metadata (torch.distributed.checkpoint: AReaL, Holdfast, others)",
    dcp.recognises,
    dcp.read,
)
_FORMATS = (_VERL, _GENERATION, _MODEL, _DCP)
"""Tried in this order."""


def read_source(folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
    """Engine name -> its checkpoint. A source with a manifest is verified first."""
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"there is no folder {folder}")
    for each in _FORMATS:
        if each.recognises(folder):
            if (folder / MANIFEST_NAME).is_file():
                verify_folder(folder)
            return each.read(folder, options)

    # Say what was found, and what would have been recognised.
    found = sorted(path.name for path in folder.iterdir())
    known = "; ".join(each.marks for each in _FORMATS)
    raise ConfigError(
        f"{folder} is of no format that can be converted: it holds {found[:12]}. Looked for: "
        f"{known}"
    )
