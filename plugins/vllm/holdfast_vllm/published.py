"""Compare a published folder with its manifest and with the served model, before anything is
loaded.

The reader of manifests is ``holdfast_weights``. Nothing here imports torch or vLLM.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast_weights.errors import FolderError, MissingError
from holdfast_weights.manifest import Files, check_files
from holdfast_weights.manifest import read_manifest as _read_manifest

__all__ = ["FolderError", "check_files", "check_model", "read_manifest"]

_SHAPING = ("model_type", "tie_word_embeddings")


def read_manifest(folder: str | Path, digest: str) -> Files:
    """Read the files of a published folder whose manifest has ``digest``, or raise FolderError."""
    try:
        manifest = _read_manifest(folder)
    except MissingError as error:
        raise FolderError(f"{error}: this server does not see what was published there") from None
    if manifest.digest != digest:
        raise FolderError(
            f"{manifest.where} has digest {manifest.digest}, published was one with {digest}: it "
            "is another version"
        )
    return manifest.files


def check_model(
    stored: Mapping[str, Any],
    served: Mapping[str, Any],
    where: str | Path,
) -> None:
    """Raise FolderError if the config of a folder and the served one differ in a key that shapes
    tensors.
    """
    for key in sorted(stored.keys() & served.keys()):
        here = stored[key]
        there = served[key]
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            check_model(here, there, f"{where}, {key}")
            continue

        # Keys of numbers and sizes shape tensors, others only the computation.
        shapes = key in _SHAPING or key.startswith("num_") or key.endswith(("_dim", "_size"))
        if here != there and shapes:
            raise FolderError(
                f"{where}: {key} is {here!r}, this server's model has {there!r}; it is another "
                "model"
            )
