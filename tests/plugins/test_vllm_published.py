"""The vLLM plugin accepts folders that Holdfast publishes, and no others."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from holdfast_vllm.published import FolderError, check_files, check_model, read_manifest

from holdfast.utils.files import file_digest
from holdfast.utils.manifest import MANIFEST_NAME, file_entries, write_manifest

pytestmark = pytest.mark.timeout(30)

FILES = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": b"one" * 1000,
    "model-00002-of-00002.safetensors": b"",
}


def publish(folder: Path, version: int = 3, files: dict[str, bytes] = FILES) -> str:
    """Write a version like the engine and return the digest of its manifest."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    write_manifest(folder, file_entries(folder, files), {"weight_version": version})
    return file_digest(folder / MANIFEST_NAME)


def check(folder: Path, digest: str, rank: int = 0, world_size: int = 1) -> list[str]:
    files = read_manifest(folder, digest)
    check_files(folder, files, rank, world_size)
    return list(files)


def flip_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_published_folder_is_accepted(tmp_path: Path) -> None:
    digest = publish(tmp_path / "v")
    assert check(tmp_path / "v", digest) == sorted(FILES)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (
        lambda folder: (folder / MANIFEST_NAME).unlink(),
        "is missing: this server does not see",
    ),
    "no folder": (shutil.rmtree, "is missing: this server does not see"),
    "manifest of other bytes": (lambda folder: flip_bit(folder / MANIFEST_NAME, 60), "is damaged"),
    "manifest cut": (lambda folder: (folder / MANIFEST_NAME).write_bytes(b""), "is damaged"),
    "file of other bytes": (
        lambda folder: flip_bit(folder / sorted(FILES)[1], 999),
        "has digest xxh3_128:",
    ),
    "file cut": (
        lambda folder: (folder / "config.json").write_bytes(b"{"),
        "has 1 bytes, the manifest says 2",
    ),
    "file missing": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused(name: str, tmp_path: Path) -> None:
    digest = publish(tmp_path / "v")
    damage, message = DAMAGES[name]
    damage(tmp_path / "v")
    with pytest.raises(FolderError, match=message):
        check(tmp_path / "v", digest)


def test_another_version_at_the_same_path_is_refused(tmp_path: Path) -> None:
    digest = publish(tmp_path / "v")
    publish(tmp_path / "w", version=4)
    with pytest.raises(FolderError, match="it is another version"):
        check(tmp_path / "w", digest)


def test_every_file_is_read_by_one_of_the_workers(tmp_path: Path) -> None:
    digest = publish(tmp_path / "v")
    flip_bit(tmp_path / "v" / sorted(FILES)[1], 0)
    check(tmp_path / "v", digest, rank=0, world_size=2)
    with pytest.raises(FolderError, match="has digest"):
        check(tmp_path / "v", digest, rank=1, world_size=2)


def test_a_folder_of_another_model_is_refused() -> None:
    served = {
        "hidden_size": 64,
        "dtype": "float32",
        "text_config": {"num_hidden_layers": 2},
        "num_labels": 2,
    }
    check_model(
        {"hidden_size": 64, "dtype": "bfloat16", "text_config": {"num_hidden_layers": 2}},
        served,
        "v3",
    )
    with pytest.raises(
        FolderError, match="v3, text_config: num_hidden_layers is 4, this server's model has 2"
    ):
        check_model({"hidden_size": 64, "text_config": {"num_hidden_layers": 4}}, served, "v3")
