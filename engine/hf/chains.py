"""Chains of published versions: a version that holds changes alone, the version before it, and so on to all weights."""

import os
from pathlib import Path

from ...utils.errors import CheckpointError
from ...utils.manifest import DELTA_NAME, MANIFEST_NAME, check_listing, read_manifest, verify_folder


def version_path(root: str | os.PathLike[str], version: int) -> Path:
    """The folder of a version: ``<root>/v00000121``."""
    return Path(root) / f"v{version:08d}"


def holds_delta_alone(folder: str | os.PathLike[str]) -> bool:
    """Whether a published folder holds only the changes from the version before."""
    changes = Path(folder) / DELTA_NAME / MANIFEST_NAME
    return changes.is_file() and set(os.listdir(folder)) == {DELTA_NAME, MANIFEST_NAME}


def base_of(folder: Path) -> Path:
    """The folder of the version that the changes in ``folder`` are from. Raises as `read_manifest`."""
    return version_path(folder.parent, read_manifest(folder / DELTA_NAME)["base"]["version"])


def made_from(folder: Path) -> list[Path]:
    """The folder of a version, and those that it is made from. Empty if one is missing, or its manifest is damaged."""
    folders = [folder]
    try:
        while holds_delta_alone(folders[-1]):
            folders.append(base_of(folders[-1]))
    except CheckpointError:
        return []
    return folders if folders[-1].is_dir() else []


def chain_problem(folder: Path) -> str | None:
    """Describe the first damage that prevents versions after ``folder`` from being made, or return None.

    Sizes of all files are compared, and the bytes of the newest changes. The bytes of older files are not read again.
    """
    newest = folder
    try:
        while holds_delta_alone(folder):
            compare = verify_folder if folder == newest else check_listing
            compare(folder / DELTA_NAME)
            folder = base_of(folder)
        check_listing(folder)
    except (OSError, CheckpointError) as error:
        return str(error)
    return None
