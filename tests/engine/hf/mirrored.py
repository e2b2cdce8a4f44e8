"""The files of published versions, as ``holdfast_weights`` makes them from deltas."""

import os
import tempfile
from pathlib import Path

import numpy as np
from holdfast_weights.delta import Chunk, Tensor, _places
from holdfast_weights.mirror import Mirror
from holdfast_weights.source import Source

from holdfast.engine.hf.versions import version_path
from holdfast.engine.servers.api import weights_label
from holdfast.utils.files import walk_files
from holdfast.utils.manifest import DELTA_NAME, MANIFEST_NAME, read_manifest


def files_of_version(
    root: str | Path, version: int, through_deltas: bool = False
) -> dict[str, bytes]:
    """The files of a version, compared with its manifest. With ``through_deltas`` an anchor is also
    made from its base.

    Raises FolderError if a file differs from the manifest.
    """
    source, folder = Path(root).absolute(), version_path(root, version)
    with tempfile.TemporaryDirectory() as scratch:
        mirror = Mirror(Source(str(source)), Path(scratch, "mirror"))
        try:
            mirror.open()
            if through_deltas and (folder / DELTA_NAME).is_dir():
                base = read_manifest(folder / DELTA_NAME)["base"]
                mirror.prepare(base["version"], base["label"])
            made = mirror.prepare(version, weights_label(folder, version))
            names = [name for name in walk_files(made) if not name.startswith(f"{DELTA_NAME}/")]
            return {name: (made / name).read_bytes() for name in names if name != MANIFEST_NAME}
        finally:
            os.close(mirror._lock_fd)


def decode_places(code: str, codes: np.ndarray) -> np.ndarray:
    """The places of changed elements, counted from the first element of the chunk."""
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(codes.tobytes())
        stored = Tensor(Path(), "", f"U{8 * codes.itemsize}", len(codes), 0)
        return np.concatenate([*_places(file, Chunk("", 0, code, stored, stored))])  # type: ignore[arg-type]
