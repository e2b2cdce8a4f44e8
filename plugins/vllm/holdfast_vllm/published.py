"""A published folder compared with its manifest, and with the model that is served, before anything is loaded from it.

The format is that of Holdfast's ``docs/checkpoint-format.md``, version 2. The reader is a second one because a server's
environment has no Holdfast: that needs a torch of its own choice. It knows neither torch nor vLLM.
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


class FolderError(ValueError):
    """A folder that is not what was published; nothing was loaded from it."""


def file_digest(path: str | os.PathLike[str]) -> str:
    """``"xxh3_128:<hex>"`` of a file's bytes."""
    with open(path, "rb", buffering=0) as file:
        return f"xxh3_128:{hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}"  # type: ignore[arg-type]


def read_manifest(folder: str | os.PathLike[str], digest: str) -> dict[str, Mapping[str, Any]]:
    """The files of a published folder: name -> ``{"bytes": size, "digest": digest}``.

    Args:
        folder: a version as Holdfast publishes it.
        digest: of the manifest's own bytes, as its publisher knows it.

    Raises:
        FolderError: there is no manifest, it is damaged, of another format, or not the one that was published.
    """
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
    """Compare the sizes of all files, and the bytes of every ``world_size``-th one from ``rank`` on, with the manifest.

    Raises:
        FolderError: naming the first file that is missing, of another size or of other bytes.
    """
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
    """See that the config of a folder is one of the model that is served, as far as its tensors depend on it.

    Raises:
        FolderError: it has another size, or is of another architecture.
    """
    for key in sorted(stored.keys() & served.keys()):
        here, there = stored[key], served[key]
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            check_model(here, there, f"{where}, {key}")
        elif _shapes_tensors(key) and here != there:
            raise FolderError(f"{where}: {key} is {here!r}, this server's model has {there!r}; it is another model")


def _shapes_tensors(key: str) -> bool:
    return key in ("model_type", "tie_word_embeddings") or key.startswith("num_") or key.endswith(("_dim", "_size"))
