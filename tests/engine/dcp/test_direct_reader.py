"""The way of values from the files to the live tensors: all arrive, unchanged, and none too
early.
"""

import errno
import math
import os
import shutil
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import (
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

from holdfast.engine.dcp import reader
from holdfast.engine.dcp.load import Checkpoint, load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.memory.tensors import local_tensor
from holdfast.utils.errors import CheckpointCorruptError
from tests.engine.peak_memory import CAN_MEASURE, peak_growth_bytes
from tests.engine.trained import copies, trained
from tests.helpers import run_ranks

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def test_read_values_change_nothing_until_they_are_applied(tmp_path: Path) -> None:
    source, target = trained(0), trained(1)
    save_dcp(tmp_path / "a", source)
    before, rng = copies(target), torch.get_rng_state()
    load = Checkpoint.open(tmp_path / "a").read(target)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.live_tensors().items())
    assert torch.equal(torch.get_rng_state(), rng)
    load.apply()
    assert all(
        torch.equal(tensor, target.live_tensors()[name])
        for name, tensor in source.live_tensors().items()
    )


def _overwrite(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(1000)
        file.write(b"other")


CHANGES: dict[str, Callable[[Path], object]] = {
    "removed": lambda path: path.unlink(),
    "written to": _overwrite,
    "cut short": lambda path: os.truncate(path, 1000),
    "replaced by the same bytes": lambda path: (
        path.rename(f"{path}.old"),
        shutil.copy(f"{path}.old", path),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_since_its_check_is_refused_before_anything_changes(
    tmp_path: Path, change: str
) -> None:
    target = trained(1)
    save_dcp(tmp_path / "a", trained(0))
    before, load = copies(target), Checkpoint.open(tmp_path / "a").read(target)
    CHANGES[change](tmp_path / "a" / "__0_0.distcp")
    with pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp changed, or was replaced"):
        load.apply()
    assert all(torch.equal(before[name], tensor) for name, tensor in copies(target).items())


def test_a_file_that_changes_during_its_copy_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = trained(1)
    save_dcp(tmp_path / "a", trained(0))
    load, read = Checkpoint.open(tmp_path / "a").read(target), os.preadv

    def disturbed(*args: Any) -> int:
        _overwrite(tmp_path / "a" / "__0_0.distcp")
        return read(*args)

    monkeypatch.setattr(os, "preadv", disturbed)
    with pytest.raises(
        CheckpointCorruptError,
        match=r"half loaded and must be loaded again.*changed, or was replaced",
    ):
        load.apply()


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("stage", ["stat before the read", "open", "stat after the read"])
def test_each_failure_after_the_first_value_says_that_the_model_is_half_loaded(
    stage: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = trained(1)
    save_dcp(tmp_path / "a", trained(0))
    load = Checkpoint.open(tmp_path / "a").read(target)
    stats = count()

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    def stat(path: Any, **options: Any) -> os.stat_result:
        if next(stats) == ("stat after the read" in stage):  # one file is checked before and after
            fail()
        return os.lstat(path)

    if "stat" in stage:
        monkeypatch.setattr(os, "stat", stat)
    else:
        monkeypatch.setattr(reader, "open", fail, raising=False)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        load.apply()
    assert caught.value.errno == code
    assert ("half loaded and must be loaded again" in str(caught.value)) == (
        stage != "stat before the read"
    )


def test_a_disk_that_fails_while_values_are_copied_is_an_os_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = trained(1)
    save_dcp(tmp_path / "a", trained(0))
    load = Checkpoint.open(tmp_path / "a").read(target)

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output error"):
        load.apply()


@pytest.mark.skipif(not CAN_MEASURE, reason="cannot reset the peak of memory")
def test_a_load_takes_a_few_megabytes_whatever_the_size_of_the_shard(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))
    state = DCPState(model, torch.optim.AdamW(model.parameters()))
    save_dcp(tmp_path / "a", state)
    load_dcp(tmp_path / "a", state)
    shard_bytes = sum(tensor.nbytes for tensor in state.live_tensors().values())
    assert shard_bytes > 200_000_000
    assert peak_growth_bytes(lambda: load_dcp(tmp_path / "a", state)) < 0.15 * shard_bytes


SHAPES: dict[str, tuple[list[int], list[Placement]]] = {
    "rows": ([7, 5], [Shard(0)]),
    "columns": ([7, 5], [Shard(1)]),
    "the middle": ([3, 4, 5], [Shard(1)]),
    "the last of three": ([3, 4, 5], [Shard(2)]),
    "fewer rows than ranks": ([1, 5], [Shard(0)]),
    "empty": ([0, 4], [Shard(0)]),
    "everywhere": ([6], [Replicate()]),
    "longer than a block": ([3, 1_400_001], [Shard(0)]),
    "columns longer than a block": ([1_400_001, 3], [Shard(1)]),
}
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
)


def _values(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(math.prod(shape)).remainder(251).to(torch.float32).to(dtype).view(shape)


def _model_of_shapes(world_size: int, factor: float) -> DCPState:
    """Buffers of every shape and dtype, including a scalar, transposed and strided ones."""
    mesh, model = init_device_mesh("cpu", (world_size,)), nn.Module()
    for index, (shape, placements) in enumerate(SHAPES.values()):
        for dtype in DTYPES if math.prod(shape) < 1000 else DTYPES[:2]:
            whole = (_values(shape, dtype).float() * factor).to(dtype)
            model.register_buffer(
                f"b{index}_{str(dtype).rpartition('.')[2]}",
                distribute_tensor(whole, mesh, placements, src_data_rank=None),
            )
    model.register_buffer("scalar", torch.tensor(7.5 * factor))
    model.register_buffer("transposed", (_values([3, 5], torch.float32) * factor).T)
    model.register_buffer("strided", (_values([40], torch.bfloat16) * factor)[::3])
    model.register_buffer("part", (_values([9, 9], torch.float32) * factor)[:, 2:4])
    return DCPState(model)


def _bytes_of(state: DCPState) -> dict[str, bytes]:
    tensors = {
        name: local_tensor(tensor).contiguous().view(-1)
        for name, tensor in state.live_tensors().items()
    }
    return {name: bytes(tensor.view(torch.uint8).numpy()) for name, tensor in tensors.items()}


def _save_shapes(rank: int, world_size: int, folder: str) -> None:
    state, other = _model_of_shapes(world_size, 1), _model_of_shapes(world_size, 0)
    save_dcp(f"{folder}/ours", state)
    dcp.save({"dcp": state}, checkpoint_id=f"{folder}/stock")
    dcp.load({"dcp": other.state_dict()}, checkpoint_id=f"{folder}/ours")
    assert _bytes_of(other) == _bytes_of(state)


def _load_shapes(rank: int, world_size: int, folder: str) -> None:
    for name in ("ours", "stock"):
        state = _model_of_shapes(world_size, 0)
        load_dcp(f"{folder}/{name}", state)
        assert _bytes_of(state) == _bytes_of(_model_of_shapes(world_size, 1)), name


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_shape_sharding_and_dtype_comes_back_from_ours_and_torchs_folders(
    tmp_path: Path, world_size: int
) -> None:
    run_ranks(_save_shapes, 2, str(tmp_path))
    run_ranks(_load_shapes, world_size, str(tmp_path))


def test_files_of_torch_with_and_without_checksums_are_read(tmp_path: Path) -> None:
    state = trained(0)
    for checksums in (False, True):
        torch.serialization.set_crc32_options(checksums)
        try:
            dcp.save({"dcp": state}, checkpoint_id=tmp_path / str(checksums))
        finally:
            torch.serialization.set_crc32_options(True)
        target = trained(1)
        load_dcp(tmp_path / str(checksums), target)
        assert all(
            torch.equal(target.live_tensors()[name], tensor)
            for name, tensor in state.live_tensors().items()
        )


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.engine.dcp.reader.reading_threads", lambda: 3)


def _layers(n: int) -> DCPState:
    model = nn.ModuleList([nn.Linear(64, 40 + number) for number in range(n)])
    return DCPState(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("n_layers", [1, 2, 50])
def test_several_threads_bring_every_value_to_its_place(tmp_path: Path, n_layers: int) -> None:
    source, target = _layers(n_layers), _layers(n_layers)
    save_dcp(tmp_path / "a", source)
    load_dcp(tmp_path / "a", target)
    assert _bytes_of(target) == _bytes_of(source)


def test_a_rank_reads_with_its_cores_although_torch_may_use_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, read = _layers(50), _layers(50), os.preadv
    save_dcp(tmp_path / "a", source)
    load = Checkpoint.open(tmp_path / "a").read(target)
    all_three, met = threading.Barrier(3), threading.local()

    def meet_once(*args: Any) -> int:
        if not hasattr(met, "before"):
            met.before = all_three.wait(10)
        return read(*args)

    monkeypatch.setattr(os, "preadv", meet_once)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # like torchrun and Ray
    load.apply()
    assert _bytes_of(target) == _bytes_of(source)


@pytest.mark.usefixtures("three_threads")
def test_a_read_error_in_one_of_several_threads_fails_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, read, calls = _layers(50), os.preadv, count()
    save_dcp(tmp_path / "a", _layers(50))
    load = Checkpoint.open(tmp_path / "a").read(target)

    def fail_once(*args: Any) -> int:
        if next(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*args)

    monkeypatch.setattr(os, "preadv", fail_once)
    with pytest.raises(OSError, match="half loaded and must be loaded again"):
        load.apply()
