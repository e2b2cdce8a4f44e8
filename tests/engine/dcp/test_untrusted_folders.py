"""Untrusted folders: no code in them runs, and missing or replaced data is never accepted."""

import copyreg
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.fsdp import fully_shard

from holdfast.engine.dcp import format as format_module
from holdfast.engine.dcp import reader
from holdfast.engine.dcp.format import check_coverage
from holdfast.engine.dcp.load import Checkpoint, load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.memory.tensors import local_tensor
from holdfast.utils.compat.torch_private import StorageInfo
from holdfast.utils.errors import CheckpointCorruptError, CheckpointError, HoldfastError
from tests.engine.trained import copies, trained
from tests.helpers import run_ranks

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


class Bomb:
    """Pickles to a call that creates a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def unsealed(folder: Path) -> Path:
    """A training checkpoint without a manifest, so that no digests reveal changes."""
    save_dcp(folder, trained(0))
    (folder / "manifest.json").unlink()
    return folder


def plant_weight(folder: Path, value: Any) -> None:
    """Let ``.metadata`` say that the weight is in another file, which holds ``value``."""
    torch.save(value, folder / "other.distcp")
    place = StorageInfo("other.distcp", 0, (folder / "other.distcp").stat().st_size)
    index = MetadataIndex("dcp.model.weight", torch.Size([0, 0]))
    _rewrite(lambda metadata: metadata.storage_data.update({index: place}))(folder)


def refused(folder: Path, words: str) -> None:
    """Load, and expect that the damage is named and nothing has changed."""
    target = trained(1)
    before = copies(target)
    with pytest.raises(CheckpointCorruptError, match=words):
        load_dcp(folder, target)
    assert all(torch.equal(before[name], tensor) for name, tensor in copies(target).items())


def test_metadata_that_would_run_code_is_named_and_not_run(tmp_path: Path) -> None:
    folder, bomb = unsealed(tmp_path / "a"), tmp_path / "went_off"
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(bomb)))
    refused(folder, r"asks for posix\.mkdir, which no checkpoint needs")
    assert not bomb.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert bomb.exists(), "the bomb is real"


def test_an_archive_that_would_run_code_is_named_and_not_run(tmp_path: Path) -> None:
    folder, bomb = unsealed(tmp_path / "a"), tmp_path / "went_off"
    plant_weight(folder, [torch.ones(3, 4), Bomb(bomb)])
    refused(folder, r"dcp\.model\.weight cannot be read: it holds \S*mkdir")
    assert not bomb.exists()
    torch.load(folder / "other.distcp", weights_only=False)
    assert bomb.exists(), "the bomb is real"


@pytest.mark.parametrize(
    "other", [torch.ones(3, 4, dtype=torch.int32), torch.ones(4, 4), [1.0] * 20]
)
def test_a_tensor_that_is_not_what_the_metadata_announces_is_damage(
    tmp_path: Path, other: Any
) -> None:
    """Torch would cast one, and take a corner of the other."""
    plant_weight(folder := unsealed(tmp_path / "a"), other)
    refused(folder, r"dcp\.model\.weight holds .*; \.metadata announces \[3, 4\] torch.float32")


def test_properties_with_the_strides_of_torch_2_15_are_read_by_every_torch(tmp_path: Path) -> None:
    save_dcp(folder := tmp_path / "a", saved := trained(0))
    (folder / "manifest.json").unlink()
    with open(folder / ".metadata", "rb") as file:
        found = pickle.load(file)
    with open(folder / ".metadata", "wb") as file:
        pickler = pickle.Pickler(file)
        pickler.dispatch_table = copyreg.dispatch_table | {
            TensorProperties: lambda p: (TensorProperties, (), (*p.__getstate__()[:5], (4, 1)))
        }
        pickler.dump(found)
    load_dcp(folder, target := trained(1))
    assert all(torch.equal(copies(target)[name], tensor) for name, tensor in copies(saved).items())


class _Properties:
    """Replaces torch's class and keeps the stored values."""

    states: ClassVar[list[tuple[Any, ...]]] = []

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _Properties.states.append(state)


class _Noting(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Properties if name == "TensorProperties" else super().find_class(module, name)


def test_properties_are_stored_with_the_five_fields_that_torch_before_2_15_can_read(
    tmp_path: Path,
) -> None:
    save_dcp(tmp_path / "a", trained(0))
    with open(tmp_path / "a" / ".metadata", "rb") as file:
        _Noting(file).load()
    assert _Properties.states and {len(state) for state in _Properties.states} == {5}


def test_a_strided_tensor_of_another_writer_is_read(tmp_path: Path) -> None:
    plant_weight(folder := unsealed(tmp_path / "a"), torch.arange(24.0).view(6, 4)[::2])
    load_dcp(folder, target := trained(1))
    assert torch.equal(target.live_tensors()["model.weight"], torch.arange(24.0).view(6, 4)[::2])


def _save_sharded(rank: int, world_size: int, folder: str) -> None:
    save_dcp(f"{folder}/c", _sharded(1.0))


def _load_sharded(rank: int, world_size: int, folder: str) -> str:
    state = _sharded(0.0)
    try:
        load_dcp(f"{folder}/c", state)
    except HoldfastError as error:
        return f"{type(error).__name__} {error}"
    assert all(bool((local_tensor(tensor) == 1).all()) for tensor in state.live_tensors().values())
    return "loaded"


def _sharded(value: float) -> DCPState:
    model = nn.Linear(3, 4, bias=False)
    fully_shard(model)
    nn.init.constant_(model.weight, value)
    return DCPState(model)


def test_damage_that_one_rank_reads_fails_the_load_on_all(tmp_path: Path) -> None:
    run_ranks(_save_sharded, 2, str(tmp_path))
    for world_size in (1, 2, 3):
        assert run_ranks(_load_sharded, world_size, str(tmp_path)) == ["loaded"] * world_size
    damage(tmp_path / "c" / "__1_0.distcp")
    first, second = run_ranks(_load_sharded, 2, str(tmp_path))
    assert "PeerError" in first and "rank 1: CheckpointCorruptError" in first
    assert "CheckpointCorruptError" in second and "__1_0.distcp has digest" in second


def _load_where_one_rank_has_no_file(rank: int, world_size: int, folder: str) -> str:
    """Remove a file that only rank 1 reads after rank 0 has looked, as if the folder were not
    shared.
    """
    if rank == 1:
        (Path(folder) / "c" / "manifest.json").unlink()
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(reader, "open", _no_such_file, raising=False)
        return _load_sharded(rank, world_size, folder)


def _no_such_file(path: Path, *args: Any, **kwargs: Any) -> Any:
    raise FileNotFoundError(path)


def test_a_rank_that_does_not_see_a_file_says_so_on_all(tmp_path: Path) -> None:
    run_ranks(_save_sharded, 2, str(tmp_path))
    first, second = run_ranks(_load_where_one_rank_has_no_file, 2, str(tmp_path))
    assert "PeerError" in first and "CheckpointNotFoundError" in second
    assert "rank 1 does not see" in first and "rank 1 does not see" in second


def _read_and_count(rank: int, world_size: int, folder: str) -> tuple[int, int]:
    """Count how often this rank unpickles ``.metadata`` and stats data files while it checks and
    loads.
    """
    parsed, looked, unpickler, stat = [], [], format_module._MetadataUnpickler, os.stat

    def counted_unpickler(*args: Any) -> Any:
        parsed.append(1)
        return unpickler(*args)

    def counted_stat(path: Any, **kwargs: Any) -> os.stat_result:
        if str(path).endswith(".distcp"):
            looked.append(Path(str(path)).name)
        return stat(path, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format_module, "_MetadataUnpickler", counted_unpickler)
        patch.setattr(os, "stat", counted_stat)
        (Path(folder) / "c" / "manifest.json").unlink(missing_ok=True)
        Checkpoint.open(f"{folder}/c").check(_sharded(0.0))
        load_dcp(f"{folder}/c", _sharded(0.0))
    return len(parsed), len(set(looked))


def test_rank_0_alone_parses_metadata_once_and_looks_at_every_file(tmp_path: Path) -> None:
    run_ranks(_save_sharded, 3, str(tmp_path))
    assert run_ranks(_read_and_count, 3, str(tmp_path)) == [(1, 3), (0, 1), (0, 0)], (
        "rank 2 has no row to read"
    )


def damage(path: Path) -> None:
    """Flip a bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def tensor(shape: list[int], *chunks: tuple[list[int], list[int]]) -> TensorStorageMetadata:
    """Metadata of a tensor made of chunks ``(offsets, sizes)``."""
    pieces = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks
    ]
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), pieces)


WHOLE = {
    "rows": tensor([4, 3], ([0, 0], [1, 3]), ([1, 0], [3, 3])),
    "rows and ranks without any": tensor(
        [2, 3], ([0, 0], [1, 3]), ([1, 0], [1, 3]), ([2, 0], [0, 3])
    ),
    "columns": tensor([4, 3], ([0, 2], [4, 1]), ([0, 0], [4, 2])),
    "pinwheel": tensor(
        [3, 3],
        ([0, 0], [1, 2]),
        ([0, 2], [2, 1]),
        ([1, 0], [2, 1]),
        ([1, 1], [1, 1]),
        ([2, 1], [1, 2]),
    ),
    "cubes": tensor(
        [2, 2, 2], *(([i, j, k], [1, 1, 1]) for i in (1, 0) for j in (0, 1) for k in (0, 1))
    ),
    "scalar": tensor([], ([], [])),
    "empty": tensor([0, 3], ([0, 0], [0, 3])),
    "a thousand rows": tensor([1024, 8], *(([row, 0], [1, 8]) for row in range(1024))),
}

BROKEN = {
    "a row is missing": (
        tensor([4, 3], ([0, 0], [1, 3]), ([2, 0], [2, 3])),
        "do not cover it: 9 elements",
    ),
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
    "out of bounds": (
        tensor([4, 3], ([2, 0], [4, 3])),
        r"from \[2 0\] to \[6 3\], outside of \[4, 3\]",
    ),
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
    """Put the second of two chunks onto the first. The sizes still add up."""
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
def test_metadata_that_does_not_add_up_is_refused_before_anything_changes(
    tmp_path: Path, strike: str
) -> None:
    change, words = STRIKES[strike]
    _rewrite(change)(unsealed(tmp_path / "a"))
    refused(tmp_path / "a", words)


def test_any_damage_to_unsealed_metadata_is_an_error_of_ours_or_harmless(tmp_path: Path) -> None:
    """A folder of stock torch has no digests, but noticed damage must be reported as damage."""
    unsealed(tmp_path / "a")
    path, target, rng = tmp_path / "a" / ".metadata", trained(1), random.Random(0)
    original = path.read_bytes()
    for length in range(0, len(original), 29):
        path.write_bytes(original[:length])
        with pytest.raises(CheckpointCorruptError):
            Checkpoint.open(tmp_path / "a").read(target)
    for _ in range(400):
        damaged = bytearray(original)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            Checkpoint.open(tmp_path / "a").read(target)
        except CheckpointError:
            continue
