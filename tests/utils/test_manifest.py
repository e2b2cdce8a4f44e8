"""Any change to a folder with a manifest is found and named before a file in it is used."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.utils.errors import CheckpointCorruptError, CheckpointMismatchError
from holdfast.utils.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    FileEntry,
    encode_manifest,
    file_entries,
    read_manifest,
    verify_folder,
    write_entry,
    write_manifest,
)
from holdfast.utils.pieces import Piece, join_digests, piece_digest


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    folder = tmp_path / "global_step_3"
    (folder / "actor").mkdir(parents=True)
    for name, size in (("actor/a.distcp", 5000), ("actor/.metadata", 10), ("empty", 0)):
        (folder / name).write_bytes(os.urandom(size))
    entries = [
        *file_entries(folder, ["empty"]),
        *file_entries(folder, ["actor/a.distcp", "actor/.metadata"]),
    ]
    write_manifest(folder, entries, {"global_step": 3, "run_id": "r"})
    return folder


def test_a_listed_folder_verifies_and_gives_back_its_facts_and_files(listed: Path) -> None:
    manifest = verify_folder(listed)
    assert (manifest["global_step"], manifest["run_id"]) == (3, "r")
    assert list(manifest["files"]) == ["actor/.metadata", "actor/a.distcp", "empty"]
    assert manifest["files"]["actor/a.distcp"]["bytes"] == 5000
    assert manifest == read_manifest(listed)


def test_every_single_flipped_bit_of_a_file_is_found(listed: Path) -> None:
    path = listed / "actor" / ".metadata"
    original = path.read_bytes()
    for bit in range(8 * len(original)):
        damaged = bytearray(original)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(
            CheckpointCorruptError,
            match=r"actor/\.metadata has digest xxh3_128:\w+, the manifest says",
        ):
            verify_folder(listed)
    path.write_bytes(original)
    verify_folder(listed)


def test_every_flipped_bit_and_every_truncation_of_the_manifest_itself_is_damage(
    tmp_path: Path,
) -> None:
    """It is not taken for a newer or older format, nor for a valid manifest with other contents."""
    write_manifest(tmp_path, [FileEntry("a", 1, "xxh3_128:" + 32 * "0")], {"step": 2, "loss": 0.5})
    path = tmp_path / MANIFEST_NAME
    original = path.read_bytes()
    assert json.loads(original)["step"] == 2, "it is plain JSON"
    damaged = [original[:n] for n in range(len(original))]
    damaged += [original + extra for extra in (b" ", b"\n", b"\0", b"}", original)]
    for bit in range(8 * len(original)):
        flipped = bytearray(original)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(CheckpointCorruptError, match="is not a manifest as it was committed"):
            read_manifest(tmp_path)
    path.write_bytes(original)
    assert read_manifest(tmp_path)["loss"] == 0.5


def _reseal(folder: Path, **changes: object) -> None:
    """Write the manifest with ``changes``, like another version of Holdfast."""
    document = json.loads((folder / MANIFEST_NAME).read_text())
    del document["digest"]
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(document | changes))


def test_a_manifest_of_a_newer_format_is_no_damage_whatever_it_says(listed: Path) -> None:
    _reseal(listed, format_version=4, files="elsewhere")
    with pytest.raises(
        CheckpointMismatchError,
        match=r"has format version 4; this Holdfast reads version 3\. Upgrade",
    ):
        read_manifest(listed)


def test_a_manifest_without_a_digest_is_refused_as_possibly_damaged(listed: Path) -> None:
    document = json.loads((listed / MANIFEST_NAME).read_text())
    del document["digest"]
    for version in (1, 2, 3, 4):
        (listed / MANIFEST_NAME).write_text(
            json.dumps(document | {"format_version": version}, indent=1)
        )
        with pytest.raises(CheckpointCorruptError, match="not a manifest as it was committed"):
            read_manifest(listed)


def test_a_sealed_file_is_described_as_it_lies_and_never_overwritten(tmp_path: Path) -> None:
    entry = write_entry(tmp_path, "info.json", b"{}")
    assert [entry] == file_entries(tmp_path, ["info.json"])
    with pytest.raises(FileExistsError):
        write_entry(tmp_path, "info.json", b"[]")
    assert (tmp_path / "info.json").read_bytes() == b"{}"


PIECES = [[0, 100, 0, 1], [100, 4, 10, 10], [104, 6, 10, 10]]


@pytest.fixture
def pieced(tmp_path: Path) -> Path:
    """A folder with a file of 200 bytes that two ranks have written: a header, and columns of a
    matrix.
    """
    data = os.urandom(200)
    (tmp_path / "w").write_bytes(data)
    left, right = (
        b"".join(data[at + row * 10 :][:run] for row in range(10))
        for at, run in ((100, 4), (104, 6))
    )
    digest = join_digests(map(piece_digest, (data[:100], left, right)))
    write_manifest(
        tmp_path,
        [FileEntry("w", 200, digest, [Piece(*piece) for piece in PIECES])],
        {"weight_version": 1},
    )
    return tmp_path


def test_a_file_in_pieces_is_verified_byte_by_byte_and_has_its_own_format_version(
    pieced: Path,
) -> None:
    manifest = verify_folder(pieced)
    assert manifest["format_version"] == FORMAT_VERSION == 3
    assert json.loads((pieced / MANIFEST_NAME).read_bytes())["files"]["w"]["pieces"] == PIECES
    data = (pieced / "w").read_bytes()
    for at in range(len(data)):
        (pieced / "w").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(
            CheckpointCorruptError,
            match=r"w has digest xxh3_128t:\w+, the manifest says xxh3_128t:",
        ):
            verify_folder(pieced)


@pytest.mark.parametrize(
    "pieces",
    [
        PIECES[:2],
        [*PIECES, [0, 1, 0, 1]],
        [[0, 200, 0, 2]],
        [[0, 200, 1, 1]],
        [[0, 100, 99, 2]],
        [[1, 200, 0, 1]],
        [[-1, 200, 0, 1]],
        [[0, 0, 0, 1], [0, 200, 0, 1]],
        [[0, 200.0, 0, 1]],
        [[0, 200, 0]],
        [["0", 200, 0, 1]],
        [200],
        7,
    ],
)
def test_pieces_that_cannot_cover_the_file_are_refused(pieced: Path, pieces: object) -> None:
    document = json.loads((pieced / MANIFEST_NAME).read_bytes())["files"]["w"]
    _reseal(pieced, files={"w": document | {"pieces": pieces}})
    with pytest.raises(CheckpointCorruptError, match="is not a manifest: "):
        verify_folder(pieced)


def _truncate(folder: Path) -> None:
    os.truncate(folder / "actor" / "a.distcp", 4999)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, r"actor/a\.distcp has 4999 bytes, the manifest says 5000"),
        (lambda folder: (folder / "empty").unlink(), "file empty is missing"),
        (lambda folder: (folder / "new").touch(), "file new is not in the manifest"),
        (
            lambda folder: (folder / MANIFEST_NAME).unlink(),
            "missing: the folder was never committed",
        ),
        (lambda folder: (folder / MANIFEST_NAME).write_bytes(b""), "is not a manifest"),
        (lambda folder: (folder / MANIFEST_NAME).write_bytes(b"[]"), "is not a manifest"),
        (lambda folder: _reseal(folder, files={"a": 1}), "is not a manifest: TypeError"),
        (lambda folder: _reseal(folder, files=[]), "is not a manifest: AttributeError"),
        (lambda folder: _reseal(folder, format_version="2"), "format version '2'; expected 2 or 3"),
        (lambda folder: _reseal(folder, format_version=1), "format version 1; expected 2 or 3"),
    ],
)
def test_damage_is_named(listed: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(listed)
    with pytest.raises(CheckpointCorruptError, match=message):
        verify_folder(listed)


def test_a_manifest_is_never_written_over(listed: Path) -> None:
    with pytest.raises(FileExistsError):
        write_manifest(listed, [], {})
    verify_folder(listed)
