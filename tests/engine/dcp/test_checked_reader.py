"""The reader of folders that nobody vouches for: nothing runs, nothing missing or other passes as what was saved."""

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from holdfast.engine.compat.torch_private import StorageInfo
from holdfast.engine.dcp.checked_reader import CheckedReader
from holdfast.engine.dcp.checkpoint import load_dcp, read_dcp, save_dcp
from holdfast.engine.dcp.metadata import check_coverage, read_metadata
from holdfast.utils.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from holdfast.utils.manifest import seal_files, write_manifest
from tests.engine.trained import copies, trained
from tests.helpers import run_ranks

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


class Bomb:
    """Pickles to a call that leaves a folder behind when it is run."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def state(value: float, **objects: Any) -> dict[str, Any]:
    return {"app": {"w": torch.full((4, 3), value), "b": torch.full((5,), value).bfloat16(), **objects}}


def save(folder: Path, *, sealed: bool = True, **objects: Any) -> Path:
    """A folder with or without a manifest."""
    dcp.save(state(1.0, **objects), checkpoint_id=folder)
    if sealed:
        write_manifest(folder, seal_files(folder, os.listdir(folder)), {})
    return folder


def load(folder: Path, into: dict[str, Any]) -> None:
    """Stock torch with the checked reader; its error when that is what failed inside of torch's."""
    try:
        dcp.load(into, storage_reader=CheckedReader(folder))
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()
        raise cause from error


@pytest.mark.parametrize("sealed", [True, False])
def test_stock_load_reads_tensors_and_plain_objects_through_the_checked_reader(tmp_path: Path, sealed: bool) -> None:
    into = state(0.0, step=0, plan=None)
    load(save(tmp_path / "a", sealed=sealed, step=7, plan=["x", (2, 1e-3)]), into)
    assert torch.equal(into["app"]["w"], torch.ones(4, 3)) and torch.equal(into["app"]["b"], torch.ones(5).bfloat16())
    assert into["app"]["step"] == 7 and into["app"]["plan"] == ["x", (2, 1e-3)]


def test_a_reader_that_is_pointed_elsewhere_checks_that_folder(tmp_path: Path) -> None:
    reader, into = CheckedReader(save(tmp_path / "a")), state(0.0)
    dcp.load(into, storage_reader=reader, checkpoint_id=save(tmp_path / "b"))
    assert torch.equal(into["app"]["w"], torch.ones(4, 3))
    damage(tmp_path / "b" / ".metadata")
    with pytest.raises(CheckpointCorruptError, match=r"\.metadata has digest"):
        dcp.load(into, storage_reader=reader, checkpoint_id=tmp_path / "b")
    with pytest.raises(CheckpointNotFoundError):
        reader.reset(tmp_path / "c")


def damage(path: Path) -> None:
    """Flip a bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_with_a_manifest_a_file_is_compared_before_any_byte_is_used(tmp_path: Path) -> None:
    damage(save(tmp_path / "a", step=7) / "__0_0.distcp")
    into = state(0.0, step=0)
    with pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp has digest"):
        load(tmp_path / "a", into)
    assert not into["app"]["w"].any() and into["app"]["step"] == 0
    (save(tmp_path / "b") / "extra").touch()
    with pytest.raises(CheckpointCorruptError, match="extra is not in the manifest"):
        load(tmp_path / "b", into)
    (tmp_path / "b" / "extra").unlink()
    damage(tmp_path / "b" / "manifest.json")
    with pytest.raises(CheckpointCorruptError, match="not a manifest"):
        load(tmp_path / "b", into)


def _save_sharded(rank: int, world_size: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    dcp.save({"w": distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])}, checkpoint_id=folder)
    if rank == 0:
        write_manifest(folder, seal_files(folder, os.listdir(folder)), {})


def _load_sharded(rank: int, world_size: int, folder: str) -> str:
    into = {"w": distribute_tensor(torch.zeros(4, 3), init_device_mesh("cpu", (world_size,)), [Shard(0)])}
    try:
        dcp.load(into, storage_reader=CheckedReader(folder))
    except CheckpointException as error:
        return "; ".join(f"rank {failed}: {type(cause).__name__}" for failed, (cause, _) in error.failures.items())
    assert torch.equal(into["w"].full_tensor(), torch.ones(4, 3))
    return "loaded"


def test_damage_that_one_rank_reads_fails_the_load_on_all(tmp_path: Path) -> None:
    run_ranks(_save_sharded, 2, str(tmp_path))
    for world_size in (1, 2, 3):
        assert run_ranks(_load_sharded, world_size, str(tmp_path)) == ["loaded"] * world_size
    damage(tmp_path / "__1_0.distcp")
    assert run_ranks(_load_sharded, 2, str(tmp_path)) == ["rank 1: CheckpointCorruptError"] * 2


def test_an_object_that_would_run_code_is_named_and_not_run(tmp_path: Path) -> None:
    for name, thing, named in (("bomb", Bomb(tmp_path / "went_off"), "mkdir"), ("path", Path("x"), "PosixPath")):
        folder = save(tmp_path / name, sealed=name == "bomb", thing=thing)
        with pytest.raises(CheckpointCorruptError, match=rf"app\.thing cannot be read: it holds \S*{named}"):
            load(folder, state(0.0, thing=None))
    assert not (tmp_path / "went_off").exists()
    dcp.load(state(0.0, thing=None), checkpoint_id=tmp_path / "bomb")
    assert (tmp_path / "went_off").exists(), "the bomb is real: torch's own reader runs it"


def test_metadata_that_would_run_code_is_named_and_not_run(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", sealed=False)
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "went_off")))
    with pytest.raises(CheckpointCorruptError, match=r"asks for posix\.mkdir, which no checkpoint needs"):
        load(folder, state(0.0))
    assert not (tmp_path / "went_off").exists()


def test_another_dtype_or_shape_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    folder = save(tmp_path / "a")
    into = {"app": {"w": torch.zeros(4, 3), "b": torch.zeros(5)}}
    with pytest.raises(
        CheckpointMismatchError, match=r"app\.b has dtype torch.bfloat16, but is to be read into torch.flo"
    ):
        load(folder, into)
    assert not into["app"]["w"].any()


def test_a_tensor_that_is_not_what_the_metadata_announces_is_damage(tmp_path: Path) -> None:
    """Without a manifest; torch would cast the one, and take a corner of the other."""
    for name, other in (("dtype", torch.ones(4, 3, dtype=torch.int32)), ("shape", torch.ones(4, 4)), ("object", [1.0])):
        folder = save(tmp_path / name, sealed=False)
        metadata = read_metadata(folder)
        torch.save(other, folder / "other.distcp")
        size = (folder / "other.distcp").stat().st_size
        metadata.storage_data[MetadataIndex("app.w", torch.Size([0, 0]))] = StorageInfo("other.distcp", 0, size)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(
            CheckpointCorruptError, match=r"app\.w holds .*; \.metadata announces \[4, 3\] torch.float32"
        ):
            load(folder, state(0.0))


def tensor(shape: list[int], *chunks: tuple[list[int], list[int]]) -> TensorStorageMetadata:
    """Metadata of a tensor made of chunks ``(offsets, sizes)``."""
    pieces = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), pieces)


WHOLE = {
    "rows": tensor([4, 3], ([0, 0], [1, 3]), ([1, 0], [3, 3])),
    "rows and ranks without any": tensor([2, 3], ([0, 0], [1, 3]), ([1, 0], [1, 3]), ([2, 0], [0, 3])),
    "columns": tensor([4, 3], ([0, 2], [4, 1]), ([0, 0], [4, 2])),
    "pinwheel": tensor(
        [3, 3], ([0, 0], [1, 2]), ([0, 2], [2, 1]), ([1, 0], [2, 1]), ([1, 1], [1, 1]), ([2, 1], [1, 2])
    ),
    "cubes": tensor([2, 2, 2], *(([i, j, k], [1, 1, 1]) for i in (1, 0) for j in (0, 1) for k in (0, 1))),
    "scalar": tensor([], ([], [])),
    "empty": tensor([0, 3], ([0, 0], [0, 3])),
    "a thousand rows": tensor([1024, 8], *(([row, 0], [1, 8]) for row in range(1024))),
}

BROKEN = {
    "a row is missing": (tensor([4, 3], ([0, 0], [1, 3]), ([2, 0], [2, 3])), "do not cover it: 9 elements"),
    "no chunk": (tensor([4, 3]), "do not cover it: 0 elements"),
    "an overlap hides a gap": (
        tensor([4, 3], ([0, 0], [2, 3]), ([1, 0], [2, 3])),
        r"begin at \[0, 0\] and \[1, 0\] over",
    ),
    "twice the same": (tensor([4, 3], ([0, 0], [2, 3]), ([0, 0], [2, 3])), "overlap"),
    "columns overlap": (tensor([4, 4], ([0, 0], [4, 2]), ([0, 1], [4, 2])), "overlap"),
    "boxes overlap": (
        tensor([4, 4], ([0, 0], [2, 2]), ([1, 1], [2, 2]), ([2, 2], [2, 2]), ([0, 2], [2, 2])),
        r"begin at \[\d, \d\] and \[\d, \d\] overlap",
    ),
    "far apart in the list": (
        tensor([9, 1], *(([i, 0], [1, 1]) for i in range(7)), ([0, 0], [2, 1])),
        "overlap",
    ),
    "out of bounds": (tensor([4, 3], ([2, 0], [4, 3])), r"from \[2 0\] to \[6 3\], outside of \[4, 3\]"),
    "negative": (tensor([4, 3], ([-1, 0], [4, 3])), "outside of"),
    "two scalars": (tensor([], ([], []), ([], [])), "do not cover it: 2 elements"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_chunks_that_tile_a_tensor_cover_it(case: str) -> None:
    check_coverage("w", WHOLE[case])


@pytest.mark.parametrize("case", BROKEN)
def test_chunks_that_leave_a_gap_are_found_though_their_sizes_add_up(case: str) -> None:
    entry, words = BROKEN[case]
    with pytest.raises(CheckpointCorruptError, match=words):
        check_coverage("w", entry)


def test_random_tilings_cover_and_any_shift_of_a_piece_is_found() -> None:
    rng = random.Random(0)

    def cut(begin: list[int], end: list[int]) -> list[tuple[list[int], list[int]]]:
        dims = [d for d in range(len(begin)) if end[d] - begin[d] > 1]
        if not dims or rng.random() < 0.2:
            return [(begin, [e - b for b, e in zip(begin, end, strict=True)])]
        dim = rng.choice(dims)
        at = rng.randrange(begin[dim] + 1, end[dim])
        first, second = list(end), list(begin)
        first[dim] = second[dim] = at
        return cut(begin, first) + cut(second, end)

    for _ in range(200):
        shape = [rng.randint(2, 6) for _ in range(rng.randint(1, 3))]
        chunks = cut([0] * len(shape), shape)
        rng.shuffle(chunks)
        check_coverage("w", tensor(shape, *chunks))
        if len(chunks) > 1:
            moved, dim = rng.randrange(len(chunks)), rng.randrange(len(shape))
            offsets = list(chunks[moved][0])
            offsets[dim] += rng.choice([-1, 1])
            chunks[moved] = (offsets, chunks[moved][1])
            with pytest.raises(CheckpointCorruptError):
                check_coverage("w", tensor(shape, *chunks))


def _rewrite(change: Callable[[Metadata], object]) -> Callable[[Path], None]:
    def strike(folder: Path) -> None:
        metadata = dcp.FileSystemReader(folder).read_metadata()
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return strike


def _shift_second_chunk(metadata: Metadata) -> None:
    """One chunk of two now lies on the other: the sizes still add up."""
    name = next(n for n, e in metadata.state_dict_metadata.items() if n.endswith("model.weight"))
    info = metadata.storage_data.pop(MetadataIndex(name, torch.Size([0, 0])))
    for offset in ([0, 0], [1, 0]):
        metadata.storage_data[MetadataIndex(name, torch.Size(offset))] = info
    metadata.state_dict_metadata[name] = tensor([3, 4], ([0, 0], [2, 4]), ([1, 0], [1, 4]))


def _forget_place(metadata: Metadata) -> None:
    del metadata.storage_data[next(iter(metadata.storage_data))]


def _point_outside(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../secret"


def _transform(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]


def _forget_dtype(metadata: Metadata) -> None:
    for entry in metadata.state_dict_metadata.values():
        entry.properties.dtype = "float32"  # type: ignore[union-attr, assignment]


STRIKES: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "overlap": (_shift_second_chunk, "overlap"),
    "no place": (_forget_place, "no file holds"),
    "outside": (_point_outside, "points outside the folder"),
    "transformed": (_transform, "was written through"),
    "strange entry": (lambda m: m.state_dict_metadata.update(x=5), "expected a tensor or bytes"),  # type: ignore[dict-item]
    "no chunk": (lambda m: m.state_dict_metadata.update(x=tensor([])), "do not cover"),
    "no dtype": (_forget_dtype, "has dtype 'float32'"),
}


@pytest.mark.parametrize("strike", STRIKES)
def test_metadata_that_does_not_add_up_is_refused_before_anything_changes(tmp_path: Path, strike: str) -> None:
    change, words = STRIKES[strike]
    save_dcp(tmp_path / "a", trained(0))
    (tmp_path / "a" / "manifest.json").unlink()
    _rewrite(change)(tmp_path / "a")
    target = trained(1)
    before = copies(target)
    with pytest.raises(CheckpointCorruptError, match=words):
        load_dcp(tmp_path / "a", target)
    assert all(torch.equal(before[name], tensor) for name, tensor in copies(target).items())


def test_any_damage_to_unsealed_metadata_is_an_error_of_ours_or_harmless(tmp_path: Path) -> None:
    """A folder of stock torch has no digests; but what is noticed must not come out as something else."""
    save_dcp(tmp_path / "a", trained(0))
    (tmp_path / "a" / "manifest.json").unlink()
    path, target, rng = tmp_path / "a" / ".metadata", trained(1), random.Random(0)
    original = path.read_bytes()
    for length in range(0, len(original), 29):
        path.write_bytes(original[:length])
        with pytest.raises(CheckpointCorruptError):
            read_dcp(tmp_path / "a", target)
    for _ in range(400):
        damaged = bytearray(original)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            read_dcp(tmp_path / "a", target)
        except CheckpointError:
            continue
