"""The manifest of a folder: every file in it with size and digest, written last, checked before anything is used.

A folder without a valid manifest is not a checkpoint. Sizes are compared before digests, so that the usual
damage (a short or missing file) is found without reading gigabytes.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointCorruptError, CheckpointMismatchError
from .files import file_digest, fsync_file, walk_files, write_durably

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class FileEntry:
    """One file of a folder.

    Attributes:
        name: POSIX path relative to the folder.
        bytes: size.
        digest: as `file_digest` gives it.
    """

    name: str
    bytes: int
    digest: str


def seal_files(folder: str | os.PathLike[str], names: Iterable[str]) -> list[FileEntry]:
    """Fsync the named files and describe them; what a rank does with the files it wrote."""
    root, entries = Path(folder), []
    for name in names:
        fsync_file(root / name)
        entries.append(FileEntry(name, (root / name).stat().st_size, file_digest(root / name)))
    return entries


def write_manifest(folder: str | os.PathLike[str], entries: Iterable[FileEntry], facts: Mapping[str, Any]) -> None:
    """Write and fsync ``manifest.json``.

    Args:
        folder: where the files are.
        entries: every file of the folder, once.
        facts: JSON-able things to remember beside them (step, world size, versions ...).
    """
    files = {e.name: {"bytes": e.bytes, "digest": e.digest} for e in sorted(entries, key=lambda e: e.name)}
    document = {"format_version": FORMAT_VERSION, **facts, "files": files}
    write_durably(Path(folder) / MANIFEST_NAME, json.dumps(document, indent=1).encode())


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The parsed manifest.

    Raises:
        CheckpointCorruptError: it is missing, or is not what `write_manifest` writes.
        CheckpointMismatchError: it is of a format newer than this code knows: nothing is wrong with it.
    """
    path = Path(folder) / MANIFEST_NAME
    try:
        document = json.loads(path.read_bytes())
        version, files = document["format_version"], document["files"]
        entries = [FileEntry(name, entry["bytes"], entry["digest"]) for name, entry in files.items()]
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{path} is missing: the folder was never committed") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorruptError(f"{path} is not a manifest: {type(error).__name__}: {error}") from error
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointMismatchError(
            f"{path} has format version {version}; this Holdfast reads version {FORMAT_VERSION}. Upgrade Holdfast"
        )
    if version != FORMAT_VERSION:
        raise CheckpointCorruptError(f"{path} has format version {version!r}; expected {FORMAT_VERSION}")
    return document | {"files": {entry.name: asdict(entry) for entry in entries}}


def check_listing(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Compare names and sizes, but not contents, with the manifest and return the manifest.

    Raises:
        CheckpointCorruptError: naming the first file that is missing, extra or of another size.
    """
    root, manifest = Path(folder), read_manifest(folder)
    present, expected = set(walk_files(root)) - {MANIFEST_NAME}, manifest["files"]
    if missing := sorted(expected.keys() - present):
        raise CheckpointCorruptError(f"{root}: file {missing[0]} is missing ({len(missing)} in all)")
    if extra := sorted(present - expected.keys()):
        raise CheckpointCorruptError(f"{root}: file {extra[0]} is not in the manifest ({len(extra)} in all)")
    for name, entry in expected.items():
        size = (root / name).stat().st_size
        if size != entry["bytes"]:
            raise CheckpointCorruptError(f"{root}: {name} has {size} bytes, the manifest says {entry['bytes']}")
    return manifest


def verify_folder(folder: str | os.PathLike[str], rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Compare names, sizes and bytes with the manifest and return the manifest.

    Ranks can share the reading: each compares the bytes of every ``world_size``-th file.

    Raises:
        CheckpointCorruptError: naming the first file that is missing, extra, of another size or of other bytes.
        OSError: a file that is there cannot be read. That may pass (a network file system, permissions), so it is no
            verdict on the folder.
    """
    root, manifest = Path(folder), check_listing(folder)
    for name, entry in list(manifest["files"].items())[rank::world_size]:
        digest = file_digest(root / name)
        if digest != entry["digest"]:
            raise CheckpointCorruptError(f"{root}: {name} has digest {digest}, the manifest says {entry['digest']}")
    return manifest
