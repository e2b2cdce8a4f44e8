"""Compare a published folder with its manifest and with the served model, before anything is loaded.

The format is version 2 in Holdfast's ``docs/checkpoint-format.md``. This is a second reader, because a server's
environment has no Holdfast, which would need another torch. It imports neither torch nor vLLM.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2
_SHAPING = ("model_type", "tie_word_embeddings")


class FolderError(ValueError):
    """The folder differs from the published one. Nothing was loaded."""


def file_digest(path: str | os.PathLike[str]) -> str:
    """``"xxh3_128:<hex>"`` of a file's bytes."""
    with open(path, "rb", buffering=0) as file:
        return f"xxh3_128:{hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}"  # type: ignore[arg-type]


def read_manifest(folder: str | os.PathLike[str], digest: str) -> dict[str, Mapping[str, Any]]:
    """Read the files of a published folder: name -> ``{"bytes": size, "digest": digest}``, or raise FolderError."""
    path = Path(folder) / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise FolderError(f"{path} is missing: this server does not see what was published there") from None
    body, _, checksum = data.rpartition(b',\n "digest": "')
    if checksum != f'{_digest(body)}"\n}}'.encode():
        raise FolderError(f"{path} is damaged: the digest it ends with is wrong")
    if _digest(data) != digest:
        raise FolderError(f"{path} has digest {_digest(data)}, published was one with {digest}: it is another version")
    document = json.loads(data)
    if document["format_version"] != FORMAT_VERSION:
        raise FolderError(
            f"{path} has format version {document['format_version']!r}, this plugin reads {FORMAT_VERSION}; "
            "install the holdfast-vllm of the trainer's Holdfast"
        )
    return document["files"]


def _digest(data: bytes) -> str:
    return f"xxh3_128:{xxhash.xxh3_128(data).hexdigest()}"


def check_files(
    folder: str | os.PathLike[str], files: Mapping[str, Mapping[str, Any]], rank: int = 0, world_size: int = 1
) -> None:
    """Raise FolderError if the size of a file, or the digest of one of this rank's share, is not in the manifest."""
    for name, entry in files.items():
        path = Path(folder) / name
        if not path.is_file():
            raise FolderError(f"{path} is missing")
        if (n_bytes := path.stat().st_size) != entry["bytes"]:
            raise FolderError(f"{path} has {n_bytes} bytes, the manifest says {entry['bytes']}")
    for name, entry in list(files.items())[rank::world_size]:
        if (found := file_digest(Path(folder) / name)) != entry["digest"]:
            raise FolderError(f"{folder}: {name} has digest {found}, the manifest says {entry['digest']}")


def check_model(stored: Mapping[str, Any], served: Mapping[str, Any], where: str | Path) -> None:
    """Raise FolderError if the config of a folder and the served one differ in a key that shapes tensors."""
    for key in sorted(stored.keys() & served.keys()):
        here, there = stored[key], served[key]
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            check_model(here, there, f"{where}, {key}")
        elif here != there and (key in _SHAPING or key.startswith("num_") or key.endswith(("_dim", "_size"))):
            raise FolderError(f"{where}: {key} is {here!r}, this server's model has {there!r}; it is another model")
