"""Chains of published versions: a version that holds changes alone, the version before it, and so
on to all weights.
"""

import os
from pathlib import Path

from ...utils.errors import CheckpointCorruptError, CheckpointError
from ...utils.files import StrPath
from ...utils.manifest import DELTA_NAME, MANIFEST_NAME, check_listing, read_manifest, verify_folder


def version_path(root: StrPath, version: int) -> Path:
    """The folder of a version: ``<root>/v00000121``."""
    return Path(root) / f"v{version:08d}"


def holds_delta_alone(folder: StrPath) -> bool:
    """Whether a published folder holds only the changes from the version before."""
    changes = Path(folder) / DELTA_NAME / MANIFEST_NAME
    return changes.is_file() and set(os.listdir(folder)) == {DELTA_NAME, MANIFEST_NAME}


def base_of(folder: Path) -> Path:
    """The base of a version of changes: the folder before them. Raises as `read_manifest`."""
    changes = read_manifest(folder / DELTA_NAME)
    base = changes["base"]["version"]
    if base >= changes["weight_version"]:
        raise CheckpointCorruptError(f"{folder} is made from version {base}, which is not older")
    return version_path(folder.parent, base)


def made_from(folder: Path) -> list[Path]:
    """The folder of a version, its base, the base of that, and so on. Empty if one is missing or
    damaged.
    """
    folders = [folder]
    try:
        while holds_delta_alone(folder):
            folder = base_of(folder)
            folders.append(folder)
    except CheckpointError:
        return []
    if not folder.is_dir():
        return []
    return folders


def chain_problem(folder: Path) -> str | None:
    """Describe the first damage with which no version after ``folder`` can be made from it, or
    return None.

    Sizes of all files are compared, and the bytes of the newest changes. The bytes of older files
    are not read again.
    """
    compare = verify_folder
    try:
        while holds_delta_alone(folder):
            compare(folder / DELTA_NAME)
            folder = base_of(folder)

            # The bytes of older changes were compared when they were the newest.
            compare = check_listing
        check_listing(folder)
    except (OSError, CheckpointError) as error:
        return str(error)
    return None
