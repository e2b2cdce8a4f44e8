"""Attacks by someone with write access to a generation: planted pickles, names that lead elsewhere,
and bombs.

Each attack is a function of the generation's folder, whose files are hard links, so it replaces the
files it changes. The caller writes the manifest again with matching digests.
"""

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from holdfast.recover.info import INFO_NAME
from holdfast.utils.compat.torch_private import StorageInfo
from holdfast.utils.files import file_digest
from holdfast.utils.manifest import MANIFEST_NAME, FileEntry, write_manifest
from tests.faults.generations import replace_bytes
from tests.faults.payloads import WRAPPINGS, payload_objects, payload_streams, zip_bomb

STATE = "state/rank_00000.pt"
WEIGHT, SCHEDULE, GENERATOR = "dcp.model.0.weight", "dcp.scheduler", "dcp.rng.rank_00000.python"
BOMB_BYTES = 256 << 20


@dataclass(frozen=True)
class Attack:
    """One malicious change to a generation.

    Attributes:
        name: description for the report.
        plant: function that changes the folder.
        named: words, at least one of which an error must contain.
    """

    name: str
    plant: Callable[[Path], object]
    named: tuple[str, ...]


def plant_file(name: str, data: bytes, folder: Path) -> None:
    replace_bytes(folder / name, data)


def _plant_user_state(data: bytes, folder: Path) -> None:
    """Plant it inside the valid file of a rank, in the packed state of a user's object."""
    state = torch.load(folder / STATE, weights_only=True)
    state["user"]["meter"] = data
    (folder / STATE).unlink()
    torch.save(state, folder / STATE)


def _plant_cursor(data: bytes, folder: Path) -> None:
    """Plant it inside the valid file of the dataloader."""
    state = torch.load(folder / "data.pt", weights_only=True)
    state["states"] = [data]
    (folder / "data.pt").unlink()
    torch.save(state, folder / "data.pt")


def change_metadata(
    change: Callable[[Metadata], object], folder: Path, engine: str = "actor"
) -> None:
    """Unpickle an engine's ``.metadata``, change it, and write it back."""
    metadata = FileSystemReader(folder / engine).read_metadata()
    change(metadata)
    replace_bytes(folder / engine / ".metadata", pickle.dumps(metadata))


def _indices(metadata: Metadata, name: str) -> list[MetadataIndex]:
    return [index for index in metadata.storage_data if index.fqn == name]


def _plant_entry(name: str, data: bytes, as_bytes: bool, folder: Path) -> None:
    """Put data into a data file where ``.metadata`` has an entry. With ``as_bytes``, also turn the
    entry into bytes.
    """
    file = folder / "actor" / "__0_0.distcp"
    before = file.read_bytes()
    replace_bytes(file, before + data)
    place = StorageInfo(file.name, len(before), len(data))

    def point(metadata: Metadata) -> None:
        for index in _indices(metadata, name):
            metadata.storage_data[index] = place
        if as_bytes:
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(name)] = place

    change_metadata(point, folder)


def _plant_in_metadata(part: str, value: Any, folder: Path) -> None:
    """Plant it among the valid values of ``.metadata``."""

    def add(metadata: Metadata) -> None:
        if part == "planner_data":
            metadata.planner_data = {"a": value}
        elif part == "storage_data":
            metadata.storage_data[MetadataIndex("x")] = value
        else:
            metadata.state_dict_metadata["x"] = value

    change_metadata(add, folder)


def pickle_attacks(marker: Path) -> Iterator[Attack]:
    """Yield every payload in every wrapping, in every place where a pickle is read or might be
    read.
    """
    for (what, stream), (how, wrap) in (
        (p, w) for p in payload_streams(marker).items() for w in WRAPPINGS.items()
    ):
        data, name = wrap(stream), f"{what}, {how}"
        for file in (
            "actor/.metadata",
            STATE,
            "data.pt",
            "state/driver.pt",
            INFO_NAME,
            MANIFEST_NAME,
        ):
            yield Attack(
                f"{name}, as {file}", partial(plant_file, file, data), (file, Path(file).name)
            )
        yield Attack(
            f"{name}, as the state of a user's object",
            partial(_plant_user_state, data),
            ("rank_00000.pt",),
        )
        yield Attack(f"{name}, as the data cursor", partial(_plant_cursor, data), ("data.pt",))
        for entry, as_bytes in (
            (WEIGHT, False),
            (SCHEDULE, False),
            (GENERATOR, False),
            (WEIGHT, True),
        ):
            kind = "object" if as_bytes else "tensor"
            yield Attack(
                f"{name}, as the {kind} {entry}",
                partial(_plant_entry, entry, data, as_bytes),
                (entry,),
            )
        yield Attack(
            f"{name}, as the object {SCHEDULE}",
            partial(_plant_entry, SCHEDULE, data, True),
            ("schedule",),
        )
    for what, value in payload_objects(marker).items():
        for part in ("planner_data", "storage_data", "state_dict_metadata"):
            plant = partial(_plant_in_metadata, part, value)
            yield Attack(f"{what}, in {part} of .metadata", plant, ("actor/.metadata",))


# Names that lead out of the folder, and sizes that exhaust the memory.


def _add_to_manifest(name: str, folder: Path) -> None:
    (folder.parents[1] / "outside").write_bytes(b"x")
    document = json.loads((folder / MANIFEST_NAME).read_text())
    entries = [
        FileEntry(file, entry["bytes"], entry["digest"])
        for file, entry in document["files"].items()
    ]
    outside = FileEntry(name, 1, file_digest(folder.parents[1] / "outside"))
    facts = {key: document[key] for key in document.keys() - {"format_version", "files", "digest"}}
    (folder / MANIFEST_NAME).unlink()
    write_manifest(folder, [*entries, outside], facts)


def _point_outside(path: str, folder: Path) -> None:
    def point(metadata: Metadata) -> None:
        for index in _indices(metadata, WEIGHT):
            place = metadata.storage_data[index]
            metadata.storage_data[index] = StorageInfo(path, place.offset, place.length)

    change_metadata(point, folder)


def _announce(name: str, shape: tuple[int, ...], folder: Path) -> None:
    def grow(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata[name]
        index, size = _indices(metadata, name)[0], torch.Size(shape)
        place = metadata.storage_data[index]
        entry.size, entry.chunks[0].sizes, entry.chunks[0].offsets = (
            size,
            size,
            torch.Size([0] * len(shape)),
        )
        del entry.chunks[1:]
        metadata.storage_data[MetadataIndex(name, entry.chunks[0].offsets)] = place

    change_metadata(grow, folder)


def _endless_text(folder: Path) -> None:
    """A value of a kilobyte with an endless ``repr``."""
    nest: Any = "x"
    for _ in range(60):
        nest = [nest, nest]

    def put(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata[WEIGHT]
        assert isinstance(entry, TensorStorageMetadata)
        entry.size = nest

    change_metadata(put, folder)


def _deep(name: str, folder: Path) -> None:
    replace_bytes(folder / name, b"[" * 100_000)


def odd_attacks() -> Iterator[Attack]:
    """Yield attacks that run no code, but must be refused all the same."""
    for path in ("../../outside", "/etc/hostname", "actor/../../../outside"):
        yield Attack(
            f"{path} in the manifest", partial(_add_to_manifest, path), (path, MANIFEST_NAME)
        )
    for path in (
        "../critic/__0_0.distcp",
        "/etc/hostname",
        "deep/../../critic/__0_0.distcp",
        "\0",
        ".",
        "",
    ):
        yield Attack(f"{path!r} in .metadata", partial(_point_outside, path), ("actor/.metadata",))
    for name in (WEIGHT, SCHEDULE, GENERATOR):
        for shape in ((1 << 31,), (1 << 45,), (1 << 62, 1 << 62), (1 << 70,)):
            yield Attack(
                f"{name} announced as {shape}", partial(_announce, name, shape), (name, ".metadata")
            )
    yield Attack("a size in .metadata whose text has no end", _endless_text, ("actor/.metadata",))
    for name in (INFO_NAME, MANIFEST_NAME, "actor/.metadata", STATE):
        yield Attack(f"{name} nested deeply", partial(_deep, name), (name,))


def bomb_attacks() -> Iterator[Attack]:
    """Yield small files that unpack to large ones."""
    bomb = zip_bomb(BOMB_BYTES)
    for file in (STATE, "data.pt"):
        yield Attack(f"a zip bomb as {file}", partial(plant_file, file, bomb), (Path(file).name,))
    yield Attack(
        "a zip bomb as a user's state", partial(_plant_user_state, bomb), ("rank_00000.pt",)
    )
    yield Attack(f"a zip bomb as {WEIGHT}", partial(_plant_entry, WEIGHT, bomb, False), (WEIGHT,))
