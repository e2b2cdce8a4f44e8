"""Manifests of published folders, and folders compared with their manifests.

A manifest lists the files of a full folder with their sizes and digests. The digest of the manifest
itself is a part of the version's label. The format is in Holdfast's ``docs/checkpoint-format.md``,
versions 2 and 3. This is a second reader next to ``holdfast.utils.manifest``, because a server's
environment has no Holdfast, which would need another torch. Tests demand the same answers of both.

The digest of a weight file covers the digests of its pieces, so several threads compute it, with a
piece (4 MiB) of memory each. Every name, size and piece is checked when a manifest is parsed.
"""

import json
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from .errors import NOT_AS_EXPECTED, FolderError, MissingError
from .files import list_files, read_exactly
from .threads import in_parallel

MANIFEST_NAME = "manifest.json"
DELTA_NAME = "delta"
PIECE_BYTES = 4 << 20
"""Most bytes of a piece."""
MAX_MANIFEST_BYTES = 1 << 28
TAIL_BYTES = len(b',\n "digest": "xxh3_128:"\n}') + 32
"""Length of the end of a manifest, which has the digest of all bytes before it."""

_FORMAT_VERSIONS = (2, 3)
_DIGEST_BYTES = 16
_SPARSE = 16
"""Runs that are further apart than this many times their length are read one by one."""

Files = Mapping[str, Mapping[str, Any]]
"""File name -> ``{"bytes": size, "digest": digest}``, with ``"pieces"`` for a weight file of format
version 3.
"""


@dataclass(frozen=True)
class Manifest:
    """A parsed ``manifest.json``."""

    data: bytes  # the file itself
    facts: Mapping[str, Any]  # its fields
    where: str  # its path, for messages

    @property
    def files(self) -> Files:
        """Files by name."""
        return self.facts["files"]

    @cached_property
    def digest(self) -> str:
        """Digest of the manifest itself."""
        return _digest(self.data)

    @property
    def label(self) -> str:
        """Label of the version: ``"121-xxh3_128:<hex>"``."""
        return f"{self.facts.get('weight_version')}-{self.digest}"

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(entry["bytes"] for entry in self.files.values())

    @property
    def weights(self) -> Files:
        """Weight files."""
        return {name: entry for name, entry in self.files.items() if name.endswith(".safetensors")}


def _digest(data: bytes) -> str:
    return f"xxh3_128:{xxhash.xxh3_128(data).hexdigest()}"


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a folder. Raises MissingError, or FolderError as `parse_manifest`."""
    path = Path(folder) / MANIFEST_NAME
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError(f"{path} is missing") from None
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_MANIFEST_BYTES:
        raise FolderError(f"{path} is not a regular file of at most {MAX_MANIFEST_BYTES} bytes")
    return parse_manifest(path.read_bytes(), path)


def parse_manifest(data: bytes, where: str | Path) -> Manifest:
    """Parse a manifest that was read from ``where``.

    Raises FolderError if its own digest, its format version, or the name, size, digest or pieces of
    a file are wrong.
    """
    # The manifest ends with the digest of all bytes before it.
    body, _, checksum = data.rpartition(b',\n "digest": "')
    if checksum != f'{_digest(body)}"\n}}'.encode():
        raise FolderError(f"{where} is damaged: the digest it ends with is wrong")
    try:
        document = json.loads(data)
        version = document["format_version"]
        if version not in _FORMAT_VERSIONS:
            raise FolderError(
                f"{where} has format version {version!r}, this reader knows {_FORMAT_VERSIONS}; "
                "install the holdfast-weights of the trainer's Holdfast"
            )
        for name, entry in document["files"].items():
            _check_entry(name, entry, where)
    except FolderError:
        raise
    except NOT_AS_EXPECTED as error:
        raise FolderError(f"{where} is not a manifest: {type(error).__name__}: {error}") from error
    return Manifest(data, document, str(where))


def stays_inside(name: str) -> bool:
    """Return whether a relative POSIX path stays in its folder, and names a file there."""
    if re.search(r"[\\\x00-\x1f]", name):
        return False
    return not any(part in ("", ".", "..") for part in name.split("/"))


def _check_entry(name: str, entry: Mapping[str, Any], where: str | Path) -> None:
    if not stays_inside(name) or name == MANIFEST_NAME or name.split("/")[0] == DELTA_NAME:
        raise FolderError(f"{where} names {name!r}, which is no file of its folder")
    n_bytes = entry["bytes"]
    if type(n_bytes) is not int or not 0 <= n_bytes < 1 << 62:
        raise FolderError(f"{where}: {name} has the size {n_bytes!r}")

    # The digest of a file with pieces is made from theirs.
    digest = entry["digest"]
    pieces = entry.get("pieces")
    kind = "xxh3_128" if pieces is None else "xxh3_128t"
    if not re.fullmatch(f"{kind}:[0-9a-f]{{32}}", digest):
        raise FolderError(
            f"{where}: {name} has the digest {digest!r}, expected {kind}:<32 hexadecimal digits>"
        )
    if pieces:
        _check_pieces(f"{where}: {name}", np.array(pieces), n_bytes)
    elif pieces is not None and n_bytes:
        raise FolderError(f"{where}: {name} has {n_bytes} bytes and no pieces")


def _check_pieces(where: str, pieces: np.ndarray, n_bytes: int) -> None:
    if pieces.ndim != 2 or pieces.shape[1] != 4 or pieces.dtype.kind != "i":
        raise FolderError(f"{where} has a list of pieces that are not [offset, run, step, rows]")
    offset, run, step, rows = pieces.T

    # A piece is at least one row of one byte, and no larger than agreed.
    good = (run >= 1) & (rows >= 1)
    good &= (run <= PIECE_BYTES) & (rows <= PIECE_BYTES)
    good &= run * rows <= PIECE_BYTES

    # It is inside of the file. Only several rows have a step, which is not shorter than a row.
    several = rows > 1
    room = n_bytes - offset - run
    most_step = np.where(several, room // np.maximum(rows - 1, 1), 0)
    least_step = np.where(several, run, 0)
    good &= (offset >= 0) & (offset <= n_bytes - run)
    good &= (step >= least_step) & (step <= most_step)
    if not good.all():
        bad = pieces[int(np.argmin(good))].tolist()
        raise FolderError(
            f"{where}: piece {bad} is not inside {n_bytes} bytes, or larger than {PIECE_BYTES}"
        )

    total = int((run * rows).sum())
    if total != n_bytes:
        raise FolderError(f"{where} has pieces of {total} bytes in total, and {n_bytes} bytes")
    if (offset[1:] <= offset[:-1]).any():
        raise FolderError(f"{where} has pieces that are not sorted by their offsets")


def check_folder(folder: str | Path) -> Manifest:
    """Compare a full folder with its manifest, every byte, and return the manifest. A ``delta`` in
    it is not read.

    Raises FolderError for the first difference, such as a further file, or a link.
    """
    manifest = read_manifest(folder)
    found = set(list_files(Path(folder))) - {MANIFEST_NAME}
    extra = [
        name
        for name in sorted(found - manifest.files.keys())
        if not name.startswith(f"{DELTA_NAME}/")
    ]
    if extra:
        raise FolderError(f"{folder}: {extra[0]} is not in the manifest ({len(extra)} in all)")
    check_files(folder, manifest.files)
    return manifest


def check_files(
    folder: str | Path,
    files: Files,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Raise FolderError if the size of a file, or the digest of one of this rank's share, is not in
    the manifest.
    """
    for name, entry in files.items():
        path = Path(folder) / name
        if not path.is_file():
            raise FolderError(f"{path} is missing")
        n_bytes = path.stat().st_size
        if n_bytes != entry["bytes"]:
            raise FolderError(f"{path} has {n_bytes} bytes, the manifest says {entry['bytes']}")

    # The bytes of every ``world_size``-th file.
    share = dict(list(files.items())[rank::world_size])
    found = _file_digests(Path(folder), share)
    for name, entry in share.items():
        if found[name] != entry["digest"]:
            raise FolderError(
                f"{folder}: {name} has digest {found[name]}, the manifest says {entry['digest']}"
            )


def _file_digests(folder: Path, files: Files) -> dict[str, str]:
    pieces = {}
    digests = {}
    for name, entry in files.items():
        pieces[name] = entry.get("pieces", [None])
        digests[name] = bytearray(_DIGEST_BYTES * len(pieces[name]))

    # Each thread digests one piece, or one file without pieces, at a time.
    def compute(item: tuple[str, int, list[int] | None]) -> None:
        name, number, piece = item
        digest = xxhash.xxh3_128()
        with open(folder / name, "rb", buffering=0) as file:
            for data in _contents(file) if piece is None else _runs(file, *piece):
                digest.update(data)
        begin = number * _DIGEST_BYTES
        digests[name][begin : begin + _DIGEST_BYTES] = digest.digest()

    in_parallel(
        compute,
        ((name, number, piece) for name in files for number, piece in enumerate(pieces[name])),
    )

    found = {}
    for name, digest in digests.items():
        if "pieces" in files[name]:
            found[name] = f"xxh3_128t:{xxhash.xxh3_128(digest).hexdigest()}"
        else:
            found[name] = f"xxh3_128:{digest.hex()}"
    return found


def _contents(file: FileIO) -> Iterator[bytes]:
    while data := file.read(PIECE_BYTES):
        yield data


def _runs(
    file: FileIO,
    offset: int,
    run: int,
    step: int,
    rows: int,
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a piece. Several short runs are read with the bytes between them."""
    together = 1
    if step <= _SPARSE * run:
        together = max(1, PIECE_BYTES // max(step, 1))
    for first in range(0, rows, together):
        count = min(together, rows - first)
        data = read_exactly(file, offset + first * step, (count - 1) * step + run)
        if count == 1:
            yield data
            continue
        # The digest is of the runs alone.
        values = np.frombuffer(data, np.uint8)
        table = np.lib.stride_tricks.as_strided(values, (count, run), (step, 1))
        yield np.ascontiguousarray(table).data
