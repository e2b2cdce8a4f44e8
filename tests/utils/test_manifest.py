"""Any change to a sealed folder is found, and named, before a file of it is used."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.utils.errors import CheckpointCorruptError
from holdfast.utils.manifest import MANIFEST_NAME, read_manifest, seal_files, verify_folder, write_manifest


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder = tmp_path / "global_step_3"
    (folder / "actor").mkdir(parents=True)
    for name, size in (("actor/a.distcp", 5000), ("actor/.metadata", 10), ("empty", 0)):
        (folder / name).write_bytes(os.urandom(size))
    entries = [*seal_files(folder, ["empty"]), *seal_files(folder, ["actor/a.distcp", "actor/.metadata"])]
    write_manifest(folder, entries, {"global_step": 3, "run_id": "r"})
    return folder


def test_a_sealed_folder_verifies_and_gives_back_its_facts_and_files(sealed: Path) -> None:
    manifest = verify_folder(sealed)
    assert (manifest["global_step"], manifest["run_id"]) == (3, "r")
    assert list(manifest["files"]) == ["actor/.metadata", "actor/a.distcp", "empty"]
    assert manifest["files"]["actor/a.distcp"]["bytes"] == 5000
    assert manifest == read_manifest(sealed)


def test_every_single_flipped_bit_of_a_file_is_found(sealed: Path) -> None:
    path = sealed / "actor" / ".metadata"
    original = path.read_bytes()
    for bit in range(8 * len(original)):
        damaged = bytearray(original)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(
            CheckpointCorruptError, match=r"actor/\.metadata has digest xxh3_128:\w+, the manifest says"
        ):
            verify_folder(sealed)
    path.write_bytes(original)
    verify_folder(sealed)


def _truncate(folder: Path) -> None:
    os.truncate(folder / "actor" / "a.distcp", 4999)


def _damage_facts(folder: Path) -> None:
    document = json.loads((folder / MANIFEST_NAME).read_text())
    (folder / MANIFEST_NAME).write_text(json.dumps(document | {"format_version": "1"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, r"actor/a\.distcp has 4999 bytes, the manifest says 5000"),
        (lambda folder: (folder / "empty").unlink(), "file empty is missing"),
        (lambda folder: (folder / "new").touch(), "file new is not in the manifest"),
        (lambda folder: (folder / MANIFEST_NAME).unlink(), "missing: the folder was never committed"),
        (lambda folder: (folder / MANIFEST_NAME).write_bytes(b""), "is not a manifest"),
        (lambda folder: (folder / MANIFEST_NAME).write_bytes(b"[]"), "is not a manifest"),
        (lambda folder: (folder / MANIFEST_NAME).write_bytes(b'{"format_version": 1'), "is not a manifest"),
        (
            lambda folder: (folder / MANIFEST_NAME).write_bytes(b'{"format_version": 1, "files": {"a": 1}}'),
            "not a manif",
        ),
        (lambda folder: (folder / MANIFEST_NAME).write_bytes(b"\xff\xfe"), "is not a manifest"),
        (_damage_facts, "format version '1'; expected 1"),
    ],
)
def test_damage_is_named(sealed: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(sealed)
    with pytest.raises(CheckpointCorruptError, match=message):
        verify_folder(sealed)


def test_a_manifest_is_never_written_over(sealed: Path) -> None:
    with pytest.raises(FileExistsError):
        write_manifest(sealed, [], {})
    verify_folder(sealed)
