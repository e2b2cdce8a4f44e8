"""Manifest of a folder: size and digest of every file. It is written last and checked before
anything is used.

A folder without a valid manifest is not a checkpoint. Sizes are compared before digests, so that
the usual damage (a short or missing file) is found without reading gigabytes.

``holdfast_weights.manifest`` is a second reader, for the environments of inference servers, which
have no Holdfast. Tests show both the same good and bad manifests, and demand the same answers.

The last field of the JSON file is the digest of all bytes before it. That digest is checked first,
so that damage cannot look like another format version. Every later version must keep it. Format
version 1, which had none and was never released, is refused. Version 3 has files with pieces
(`Piece`), version 2 has none.
"""

import contextlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from .files import (
    DurableFile,
    StrPath,
    bytes_digest,
    file_digest,
    open_regular,
    read_window,
    walk_leaves,
    write_durably,
)
from .pieces import Piece, read_digest, require_whole

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 3
"""Newest version that this code reads. A folder without files in pieces has version 2."""
_WITHOUT_PIECES = 2

DELTA_NAME = "delta"
"""Folder in a published version that holds the changes from the version before, with its own
manifest.
"""
DELTA_FILES = "files"
"""Folder in there with the small files that changed."""

Manifest = Mapping[str, Any]
"""Contents of a manifest."""
EntryFields = Mapping[str, Any]
"""Entry of a file in a manifest: ``bytes``, ``digest``, and ``pieces`` if it has any."""


@dataclass(frozen=True)
class FileEntry:
    """A file of a folder. ``name`` is its POSIX path relative to the folder.

    ``digest`` is its `file_digest`, or the `join_digests` of its ``pieces``.
    """

    name: str
    bytes: int
    digest: str
    pieces: Sequence[Piece] | None = None

    def described(self) -> dict[str, Any]:
        """The entry in a manifest."""
        entry: dict[str, Any] = {"bytes": self.bytes, "digest": self.digest}
        if self.pieces is not None:
            entry["pieces"] = self.pieces
        return entry


def file_entries(folder: StrPath, names: Iterable[str]) -> list[FileEntry]:
    """Describe the named files, reading each once. Their writers have fsynced them."""
    entries = []
    for name in names:
        path = Path(folder) / name
        entries.append(FileEntry(name, path.stat().st_size, file_digest(path)))
    return entries


def write_entry(folder: StrPath, name: str, data: bytes) -> FileEntry:
    """Create and fsync the file ``name`` with ``data``, and describe it. See `DurableFile`."""
    with DurableFile(Path(folder) / name) as file:
        file.write(data)
    return FileEntry(name, file.bytes, file.digest)


def write_manifest(folder: StrPath, entries: Iterable[FileEntry], facts: Mapping[str, Any]) -> None:
    """Write and fsync ``manifest.json`` with all files of the folder and further ``facts`` (step,
    world size ...).
    """
    by_name = sorted(entries, key=lambda entry: entry.name)
    files = {entry.name: entry.described() for entry in by_name}

    # Older versions of Holdfast read a folder in which no file has pieces.
    has_pieces = any("pieces" in entry for entry in files.values())
    version = FORMAT_VERSION if has_pieces else _WITHOUT_PIECES
    document = {"format_version": version, **facts, "files": files}
    write_durably(Path(folder) / MANIFEST_NAME, encode_manifest(document))


def encode_manifest(document: Manifest) -> bytes:
    """Encode ``document`` as JSON with a last field ``digest`` of all bytes before it."""
    body = json.dumps(document, indent=1).encode().removesuffix(b"\n}")
    return body + _self_checksum(body)


def _self_checksum(body: bytes) -> bytes:
    return f',\n "digest": "{bytes_digest(body)}"\n}}'.encode()


_SELF_CHECKSUM_BYTES = len(_self_checksum(b""))
_BEGINS = b'{\n "format_version":'


def require_outside_commits(path: StrPath) -> None:
    """Raise `ConfigError` if ``path`` is, or lies in, a committed folder, which one file more would
    damage.
    """
    # A link may lead into a committed folder.
    real = Path(os.path.realpath(path))
    for folder in (real, *real.parents):
        if _is_committed(folder):
            raise ConfigError(
                f"{path} is in {folder}, which is committed with a {MANIFEST_NAME}: with one file "
                "more it would be refused as damaged. Choose a folder outside of it"
            )


def _is_committed(folder: Path) -> bool:
    # Other programs use the name manifest.json, too.
    with contextlib.suppress(OSError), open(open_regular(folder / MANIFEST_NAME), "rb") as file:
        return file.read(len(_BEGINS)) == _BEGINS
    return False


def read_manifest(folder: StrPath) -> Manifest:
    """Read and parse the manifest of a folder.

    Raises:
        CheckpointCorruptError: the manifest is missing, or `write_manifest` did not write it like
            this.
        CheckpointMismatchError: its format is newer than this code. Nothing is wrong with it.
    """
    path = Path(folder) / MANIFEST_NAME
    try:
        # A link's target can change, and reading a pipe may never end.
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointCorruptError(f"{path} is not a regular file")
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{path} is missing: the folder was never committed") from None
    return parse_manifest(data, path)


def manifest_digest(folder: StrPath) -> str:
    """Digest of ``manifest.json``, and so of everything that it lists. OSError if it is missing."""
    return bytes_digest((Path(folder) / MANIFEST_NAME).read_bytes())


def parse_manifest(data: bytes, path: StrPath) -> Manifest:
    """Parse the bytes of a manifest. Errors call the file ``path``. Raises as `read_manifest`."""
    # The digest at the end comes first, so that damage cannot look like another format version.
    body = data[:-_SELF_CHECKSUM_BYTES]
    if data[-_SELF_CHECKSUM_BYTES:] != _self_checksum(body):
        raise CheckpointCorruptError(
            f"{path} is not a manifest as it was committed: the digest it ends with is wrong"
        )
    # Only the number of an unknown version is read.
    known = (_WITHOUT_PIECES, FORMAT_VERSION)
    files = {}
    try:
        document = json.loads(data)
        version = document["format_version"]
        if version in known:
            for name, entry in document["files"].items():
                described = _parse_entry(name, entry).described()
                files[name] = {"name": name} | described
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(
            f"{path} is not a manifest: {type(error).__name__}: {error}"
        ) from error
    # A newer version is sound, any other has never existed.
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointMismatchError(
            f"{path} has format version {version}; this Holdfast reads version {FORMAT_VERSION}. "
            "Upgrade Holdfast"
        )
    if version not in known:
        raise CheckpointCorruptError(
            f"{path} has format version {version!r}; expected {_WITHOUT_PIECES} or {FORMAT_VERSION}"
        )
    return document | {"files": files}


def _parse_entry(name: str, entry: EntryFields) -> FileEntry:
    n_bytes = entry["bytes"]
    digest = entry["digest"]
    numbers = entry.get("pieces")
    if type(n_bytes) is not int or not 0 <= n_bytes < 1 << 62:
        raise ValueError(f"{name} has the size {n_bytes!r}")

    # A digest of pieces is of another kind than one of the whole file.
    kind = "xxh3_128" if numbers is None else "xxh3_128t"
    if not re.fullmatch(f"{kind}:[0-9a-f]{{32}}", digest):
        raise ValueError(f"{name} has the digest {digest!r}")
    if numbers is None:
        return FileEntry(name, n_bytes, digest)

    # The pieces cover the file.
    pieces = [Piece(*piece) for piece in numbers]
    require_whole(pieces, n_bytes)
    return FileEntry(name, n_bytes, digest, pieces)


def check_listing(folder: StrPath) -> Manifest:
    """Compare names and sizes, but not contents, with the manifest, and return the manifest.

    The changes in a published version (`has_delta`) are another folder with a manifest, and left
    out.

    Raises:
        CheckpointCorruptError: a file is missing, extra, of another size, or not a regular file.
        CheckpointMismatchError: the folder is a published version that holds changes alone. Nothing
            is wrong with it.
    """
    manifest = read_manifest(folder)
    compare_listing(list_files(Path(folder)), manifest, folder)
    return manifest


def has_delta(manifest: Manifest, names: Collection[str]) -> bool:
    """Whether a folder with this manifest and these files is a published version with changes in
    `DELTA_NAME`.
    """
    return "weight_version" in manifest and f"{DELTA_NAME}/{MANIFEST_NAME}" in names


def is_delta_alone(manifest: Manifest, names: Collection[str]) -> bool:
    """Whether it has no files but these changes."""
    tops = {name.partition("/")[0] for name in names}
    return has_delta(manifest, names) and tops == {MANIFEST_NAME, DELTA_NAME}


def compare_listing(sizes: Mapping[str, int], manifest: Manifest, folder: StrPath) -> None:
    """Do the same with the ``sizes`` of a folder's files, including the manifest."""
    expected = manifest["files"]
    found = set(sizes) - {MANIFEST_NAME}
    if is_delta_alone(manifest, sizes):
        raise CheckpointMismatchError(
            f"{folder} holds only the changes from the version before, in {DELTA_NAME}/: a mirror "
            "(holdfast-weights mirror) makes the weights from them"
        )
    # Changes beside whole weights have a manifest of their own.
    if has_delta(manifest, sizes):
        found = {name for name in found if not name.startswith(f"{DELTA_NAME}/")}

    # Names come before sizes.
    missing = sorted(expected.keys() - found)
    if missing:
        raise CheckpointCorruptError(
            f"{folder}: file {missing[0]} is missing ({len(missing)} in all)"
        )
    extra = sorted(found - expected.keys())
    if extra:
        raise CheckpointCorruptError(
            f"{folder}: file {extra[0]} is not in the manifest ({len(extra)} in all)"
        )
    # Names agree now.
    for name, entry in expected.items():
        if sizes[name] != entry["bytes"]:
            raise CheckpointCorruptError(
                f"{folder}: {name} has {sizes[name]} bytes, the manifest says {entry['bytes']}"
            )


def list_files(root: Path) -> dict[str, int]:
    """Return POSIX path relative to ``root`` -> size, for every file below it.

    Raises `CheckpointCorruptError` for anything that no commit creates: a link, a pipe, an empty
    folder.
    """
    sizes = {}
    for name, status in walk_leaves(root):
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointCorruptError(f"{root}: {name} is not a regular file")
        sizes[name] = status.st_size
    return sizes


def verify_folder(folder: StrPath) -> Manifest:
    """Compare names, sizes and bytes with the manifest, and return the manifest. The same for the
    changes in it.

    Raises `CheckpointCorruptError` for the first difference, otherwise as `check_listing`. An
    OSError (an existing file cannot be read) may be temporary, so it says nothing about the folder.
    """
    manifest = check_listing(folder)
    for name, entry in manifest["files"].items():
        verify_file(folder, name, entry)

    # The changes are a folder with a manifest of its own.
    if has_delta(manifest, list_files(Path(folder))):
        verify_folder(Path(folder) / DELTA_NAME)
    return manifest


def verify_file(folder: StrPath, name: str, entry: EntryFields) -> None:
    """Compare the bytes of one file with its entry in the manifest. Raises as `verify_folder`."""
    digest = described_digest(Path(folder) / name, entry)
    if digest != entry["digest"]:
        raise CheckpointCorruptError(
            f"{folder}: {name} has digest {digest}, the manifest says {entry['digest']}"
        )


def described_digest(path: StrPath, entry: EntryFields) -> str:
    """Digest of a file, of the kind that its entry in a manifest has. Reads a few megabytes at a
    time.
    """
    if "pieces" not in entry:
        return file_digest(path)
    with open(path, "rb", buffering=0) as file:
        read = partial(read_window, file.fileno())
        return read_digest(entry["pieces"], read)
