"""Manifests of both versions are read, and anything that is not as published is refused with its
name and values.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from holdfast_weights.errors import FolderError
from holdfast_weights.manifest import check_files, check_folder, parse_manifest, stays_inside

from holdfast.utils import manifest as trainer
from holdfast.utils.errors import CheckpointCorruptError, CheckpointMismatchError
from holdfast.utils.manifest import encode_manifest, file_entries, write_manifest
from tests.plugins.weights.publisher import Publisher, digest, tree_digest, write_files

pytestmark = pytest.mark.timeout(60)

FILES = {"config.json": b"{}", "model.safetensors": b"one" * 5000, "empty.txt": b""}


def test_a_manifest_of_version_2_is_read(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    write_manifest(tmp_path, file_entries(tmp_path, FILES), {"weight_version": 3})
    manifest = check_folder(tmp_path)
    assert manifest.label == f"3-{digest((tmp_path / 'manifest.json').read_bytes())}"
    assert manifest.bytes == 15002


def test_every_flipped_byte_of_a_file_with_pieces_is_found(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, piece_elements=40)
    publisher.publish(1)
    folder = publisher.folder(1)
    name = "model-00001-of-00002.safetensors"
    files = {name: check_folder(folder).files[name]}
    data = bytearray((folder / name).read_bytes())
    for at in range(0, len(data), 7):
        data[at] ^= 1
        (folder / name).write_bytes(data)
        with pytest.raises(FolderError, match=f"{name} has digest xxh3_128t:"):
            check_files(folder, files)
        data[at] ^= 1
    (folder / name).write_bytes(data)
    check_files(folder, files)


@pytest.mark.parametrize(
    ("run", "step"), [(1, 1), (3, 7), (1, 5000), (1000, 4096), (70_000, 140_000), (5, 2 << 20)]
)
def test_runs_near_and_far_apart_are_digested(run: int, step: int, tmp_path: Path) -> None:
    rows = max(2, min(50, (20 << 20) // step))
    data = os.urandom(step * rows)
    (tmp_path / "m").write_bytes(data)
    pieces = [[0, run, step, rows]]
    entry = {
        "bytes": len(data),
        "digest": f"xxh3_128t:{tree_digest(data, pieces)}",
        "pieces": pieces,
    }
    check_files(tmp_path, {"m": entry})
    with pytest.raises(FolderError, match="has digest"):
        check_files(tmp_path, {"m": {**entry, "pieces": [[0, run, step, rows - 1]]}})


def manifest(**changes: Any) -> bytes:
    """A manifest with a weight file of two pieces."""
    pieces = [[0, 8, 0, 1], [8, 2, 4, 2], [10, 2, 4, 2]]
    entry = {
        "bytes": 16,
        "digest": "xxh3_128t:" + "0" * 32,
        "pieces": pieces,
        **changes.pop("entry", {}),
    }
    document = {
        "format_version": 3,
        "weight_version": 1,
        "files": {"m.safetensors": entry},
        **changes,
    }
    return encode_manifest({key: value for key, value in document.items() if value is not None})


def pieces(*rows: list[Any]) -> dict[str, Any]:
    return {"entry": {"pieces": list(rows)}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"format_version": 4}, "format version 4, this reader knows"),
    "no files": ({"files": None}, "KeyError: 'files'"),
    "files": ({"files": []}, "not a manifest"),
    "entry": ({"files": {"m": 3}}, "not a manifest"),
    "deep": ({"files": {"m": {"bytes": 1, "digest": [[[]]]}}}, "not a manifest"),
    "size": ({"entry": {"bytes": -1}}, "has the size -1"),
    "size of text": ({"entry": {"bytes": "16"}}, "has the size '16'"),
    "huge size": ({"entry": {"bytes": 10**30}}, "has the size 10000"),
    "digest": ({"entry": {"digest": "sha256:00"}}, "has the digest 'sha256:00'"),
    "digest of bytes with pieces": (
        {"entry": {"digest": "xxh3_128:" + "0" * 32}},
        "expected xxh3_128t",
    ),
    "digest of pieces without": ({"entry": {"pieces": None}}, "expected xxh3_128:"),
    "no pieces": (pieces(), "has 16 bytes and no pieces"),
    "hole": (pieces([0, 8, 0, 1]), "pieces of 8 bytes in total, and 16 bytes"),
    "twice": (pieces([0, 16, 0, 1], [0, 16, 0, 1]), "pieces of 32 bytes in total"),
    "same start": (pieces([0, 8, 0, 1], [0, 8, 0, 1]), "not sorted by their offsets"),
    "backwards": (pieces([8, 8, 0, 1], [0, 8, 0, 1]), "not sorted by their offsets"),
    "outside": (pieces([9, 8, 0, 1], [0, 8, 0, 1]), r"piece \[9, 8, 0, 1\] is not inside 16 bytes"),
    "last run outside": (pieces([0, 8, 9, 2]), "is not inside 16 bytes"),
    "negative": (pieces([-1, 16, 0, 1]), "is not inside"),
    "overlapping runs": (pieces([0, 8, 4, 2]), "is not inside"),
    "step without rows": (pieces([0, 16, 3, 1]), "is not inside"),
    "huge step": (pieces([0, 8, 2**62, 2]), "is not inside"),
    "huge run": (pieces([0, 2**62, 0, 1]), "is not inside"),
    "huge product": (pieces([0, 2**32, 2**32, 2**32]), "is not inside"),
    "beyond 64 bits": (pieces([0, 2**70, 0, 1]), r"not \[offset, run, step, rows\]"),
    "fractions": (pieces([0, 16.0, 0, 1]), r"not \[offset, run, step, rows\]"),
    "short piece": (pieces([0, 16, 0]), r"not \[offset, run, step, rows\]"),
    "ragged": (pieces([0, 16, 0, 1], [1]), "not a manifest"),
    "text": ({"entry": {"pieces": "abc"}}, r"not \[offset, run, step, rows\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_manifest_is_refused(name: str) -> None:
    changes, message = REFUSED[name]
    refuse(manifest(**changes), message)


def refuse(data: bytes, message: str) -> None:
    """Check that both readers refuse a manifest, this one with a message."""
    with pytest.raises(FolderError, match=message):
        parse_manifest(data, "m.json")
    with pytest.raises((CheckpointCorruptError, CheckpointMismatchError)):
        trainer.parse_manifest(data, "m.json")


@pytest.mark.parametrize("piece", [[0, (4 << 20) + 1, 0, 1], [0, 8, 8, 1 << 20]])
def test_a_piece_of_more_than_four_mebibytes_is_refused(piece: list[int]) -> None:
    size = piece[1] * piece[3]
    refuse(manifest(entry={"bytes": size, "pieces": [piece]}), "or larger than 4194304")


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[" * 100_000, manifest()[:-1], manifest().replace(b"16", b"17")]
)
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    refuse(data, "is damaged")


def test_a_deeply_nested_manifest_is_refused() -> None:
    data = b'{"a": ' + b"[" * 200_000
    refuse(data + f',\n "digest": "{digest(data)}"\n}}'.encode(), "not a manifest")


GOOD = {
    "version 3": manifest(),
    "version 2": manifest(
        format_version=2, files={"a/b.json": {"bytes": 2, "digest": digest(b"{}")}}
    ),
    "no files": manifest(files={}),
    "empty": manifest(entry={"bytes": 0, "pieces": []}),
    "largest piece": manifest(entry={"bytes": 4 << 20, "pieces": [[0, 4 << 20, 0, 1]]}),
    "further facts": manifest(base={"version": 1, "label": "x"}, changed=3),
}


@pytest.mark.parametrize("name", GOOD)
def test_both_readers_find_the_same_in_a_good_manifest(name: str) -> None:
    found, theirs = (
        parse_manifest(GOOD[name], "m.json"),
        trainer.parse_manifest(GOOD[name], "m.json"),
    )
    files = {
        file: {key: entry[key] for key in entry if key != "name"}
        for file, entry in theirs["files"].items()
    }
    assert json.loads(json.dumps(files)) == found.files
    assert {**theirs, "files": found.files} == found.facts


@pytest.mark.parametrize("name", ["version 3", "version 2", "largest piece"])
def test_both_readers_refuse_any_changed_byte(name: str) -> None:
    for at in range(len(GOOD[name])):
        data = bytearray(GOOD[name])
        data[at] ^= 1
        refuse(bytes(data), "is damaged|is not a manifest")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../../x",
        ".",
        "a//b",
        "a/",
        "..\\x",
        "a\0b",
        "a\nb",
        "manifest.json",
        "delta/x",
    ],
)
def test_names_that_leave_the_folder_are_refused(name: str) -> None:
    with pytest.raises(FolderError, match="no file of its folder"):
        parse_manifest(manifest(files={name: {"bytes": 0, "digest": digest(b"")}}), "m.json")


def test_usual_names_are_accepted() -> None:
    assert all(map(stays_inside, ("a", ".hidden", "a/b c#?%.json", "...", "é")))


def link_inside(folder: Path) -> None:
    (folder / "config.json").rename(folder.parent / "outside.json")
    (folder / "config.json").symlink_to(folder.parent / "outside.json")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "extra": (lambda folder: (folder / "more.bin").touch(), "more.bin is not in the manifest"),
    "link": (link_inside, "config.json is not a regular file"),
    "link to a folder": (lambda folder: (folder / "x").symlink_to("/"), "x is not a regular file"),
    "pipe": (lambda folder: os.mkfifo(folder / "pipe"), "pipe is not a regular file"),
    "cut": (
        lambda folder: os.truncate(folder / "config.json", 1),
        "has 1 bytes, the manifest says",
    ),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    "no folder": (shutil.rmtree, "manifest.json is missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused(name: str, tmp_path: Path) -> None:
    publisher, (damage, message) = Publisher(tmp_path), DAMAGES[name]
    publisher.publish(1)
    check_folder(publisher.folder(1))
    damage(publisher.folder(1))
    with pytest.raises(FolderError, match=message):
        check_folder(publisher.folder(1))
