"""The manifest of a folder: every file in it with size and digest, written last, checked before anything is used.

A folder without a valid manifest is not a checkpoint. Sizes are compared before digests, so that the usual
damage (a short or missing file) is found without reading gigabytes.

The manifest is JSON and answers for itself: its last field is the digest of all bytes before that field. It is checked
before anything else is believed, so that no damage can pass for another format version. Every later version must keep
this self-checksum; what has none (format version 1, which was never released) is refused.
"""

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from .files import DurableFile, bytes_digest, file_digest, open_regular, walk_leaves, write_durably

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2


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


def file_entries(folder: str | os.PathLike[str], names: Iterable[str]) -> list[FileEntry]:
    """Describe the named files, each of which is read once. To fsync them is for those who wrote them."""
    root = Path(folder)
    return [FileEntry(name, (root / name).stat().st_size, file_digest(root / name)) for name in names]


def write_entry(folder: str | os.PathLike[str], name: str, data: bytes) -> FileEntry:
    """Create the file ``name`` with ``data``, fsync and describe it, without reading it again.

    Raises:
        FileExistsError: it exists; nothing is ever written over.
    """
    with DurableFile(Path(folder) / name) as file:
        file.write(data)
    return FileEntry(name, file.bytes, file.digest)


def write_manifest(folder: str | os.PathLike[str], entries: Iterable[FileEntry], facts: Mapping[str, Any]) -> None:
    """Write and fsync ``manifest.json``.

    Args:
        folder: where the files are.
        entries: every file of the folder, once.
        facts: JSON-able things to remember beside them (step, world size, versions ...).
    """
    files = {e.name: {"bytes": e.bytes, "digest": e.digest} for e in sorted(entries, key=lambda e: e.name)}
    document = {"format_version": FORMAT_VERSION, **facts, "files": files}
    write_durably(Path(folder) / MANIFEST_NAME, encode_manifest(document))


def encode_manifest(document: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest: ``document`` as JSON, and a last field ``digest`` of all before it (self-checksum)."""
    body = json.dumps(document, indent=1).encode().removesuffix(b"\n}")
    return body + _self_checksum(body)


def _self_checksum(body: bytes) -> bytes:
    return f',\n "digest": "{bytes_digest(body)}"\n}}'.encode()


_SELF_CHECKSUM_BYTES = len(_self_checksum(b""))


_BEGINS = b'{\n "format_version":'


def require_outside_commits(path: str | os.PathLike[str]) -> None:
    """Refuse to write to ``path``, where it is or lies in a committed folder: a generation, or an export with a
    manifest. One file more than the manifest names would make that folder a damaged one.

    Raises:
        ConfigError: with the committed folder.
    """
    real = Path(os.path.realpath(path))
    for folder in (real, *real.parents):
        if _is_committed(folder):
            raise ConfigError(
                f"{path} is in {folder}, which is committed with a {MANIFEST_NAME}: with one file more it would be "
                "refused as damaged. Choose a folder outside of it"
            )


def _is_committed(folder: Path) -> bool:
    with contextlib.suppress(OSError), open(open_regular(folder / MANIFEST_NAME), "rb") as file:
        return file.read(len(_BEGINS)) == _BEGINS  # other things have a manifest.json, too
    return False


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The parsed manifest.

    Raises:
        CheckpointCorruptError: it is missing, or is not what `write_manifest` writes.
        CheckpointMismatchError: it is of a format newer than this code knows: nothing is wrong with it.
    """
    path = Path(folder) / MANIFEST_NAME
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # a link could lead anywhere tomorrow, a pipe would be read for ever
            raise CheckpointCorruptError(f"{path} is not a regular file")
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{path} is missing: the folder was never committed") from None
    return parse_manifest(data, path)


def parse_manifest(data: bytes, path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `read_manifest` returns of a file with ``data``, which its errors call ``path``."""
    if data[-_SELF_CHECKSUM_BYTES:] != _self_checksum(data[:-_SELF_CHECKSUM_BYTES]):
        raise CheckpointCorruptError(f"{path} is not a manifest as it was committed: the digest it ends with is wrong")
    try:
        document = json.loads(data)
        version = document["format_version"]
        files = document["files"].items() if version == FORMAT_VERSION else ()
        entries = [FileEntry(name, entry["bytes"], entry["digest"]) for name, entry in files]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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
        CheckpointCorruptError: naming the first file that is missing, extra, of another size, or no file but a link.
    """
    manifest = read_manifest(folder)
    compare_listing(list_files(Path(folder)), manifest, folder)
    return manifest


def compare_listing(sizes: Mapping[str, int], manifest: Mapping[str, Any], folder: str | os.PathLike[str]) -> None:
    """Compare the sizes of the files of a folder, the manifest among them, with what the manifest says.

    Raises:
        CheckpointCorruptError: naming the first file of ``folder`` that is missing, extra or of another size.
    """
    expected, found = manifest["files"], sizes.keys() - {MANIFEST_NAME}
    if missing := sorted(expected.keys() - found):
        raise CheckpointCorruptError(f"{folder}: file {missing[0]} is missing ({len(missing)} in all)")
    if extra := sorted(found - expected.keys()):
        raise CheckpointCorruptError(f"{folder}: file {extra[0]} is not in the manifest ({len(extra)} in all)")
    for name, entry in expected.items():
        if sizes[name] != entry["bytes"]:
            raise CheckpointCorruptError(
                f"{folder}: {name} has {sizes[name]} bytes, the manifest says {entry['bytes']}"
            )


def list_files(root: Path) -> dict[str, int]:
    """POSIX path relative to ``root`` -> size, of every file below it.

    Raises:
        CheckpointCorruptError: there is what no commit leaves: a link, a pipe, an empty folder.
    """
    sizes = {}
    for name, status in walk_leaves(root):
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointCorruptError(f"{root}: {name} is not a regular file")
        sizes[name] = status.st_size
    return sizes


def verify_folder(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Compare names, sizes and bytes with the manifest and return the manifest.

    Raises:
        CheckpointCorruptError: naming the first file that is missing, extra, of another size or of other bytes.
        OSError: a file that is there cannot be read. That may pass (a network file system, permissions), so it is no
            verdict on the folder.
    """
    manifest = check_listing(folder)
    for name, entry in manifest["files"].items():
        verify_file(folder, name, entry)
    return manifest


def verify_file(folder: str | os.PathLike[str], name: str, entry: Mapping[str, Any]) -> None:
    """Compare the bytes of one file with its entry in the manifest; raises as `verify_folder` does."""
    digest = file_digest(Path(folder) / name)
    if digest != entry["digest"]:
        raise CheckpointCorruptError(f"{folder}: {name} has digest {digest}, the manifest says {entry['digest']}")
