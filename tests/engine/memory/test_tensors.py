"""The block of a sharded tensor on a rank, for every placement, and on a rank outside of the mesh.
Its memory.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.engine.api import SaveLoadMeta
from holdfast.engine.dcp.fingerprint import bit_sum, sample_state
from holdfast.engine.hf.shard_ranges import local_part, whole_tensor
from holdfast.engine.memory.tensors import counts_here, cut_boxes, local_box, local_tensor
from holdfast.utils.compat.torch_private import made_sharded
from holdfast.utils.distributed import gather_objects, new_background_group
from holdfast.utils.errors import ConfigError
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.engine.test_fsdp_engine import loss_tokens, make_batch, make_engine, nll
from tests.helpers import run_ranks

PLACEMENTS: dict[str, list[Any]] = {
    "rows": [Replicate(), Shard(0)],
    "columns": [Replicate(), Shard(1)],
    "both": [Shard(0), Shard(1)],
    "rows twice": [Shard(0), Shard(0)],
    "whole": [Replicate(), Replicate()],
}


SAMPLED = int(sample_state({"model.w": torch.arange(35).view(7, 5)})["model"])
"""Fingerprint on one rank."""


def _boxes(rank: int, world_size: int) -> None:
    whole = torch.arange(35).view(7, 5)
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in PLACEMENTS.values():
        tensor = distribute_tensor(whole, mesh, placements)
        offsets, sizes = local_box(tensor)
        expected = whole[
            tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        ]
        assert torch.equal(tensor.to_local(), expected), placements
    assert local_box(whole) == ((0, 0), (7, 5)) and local_box(torch.tensor(1.0)) == ((), ())
    few = distribute_tensor(torch.arange(3), init_device_mesh("cpu", (4,)), [Shard(0)])
    assert local_box(few) == ((rank,), (int(rank < 3),))
    half = DTensor.from_local(torch.ones(1, 5), DeviceMesh("cpu", [0, 1]), [Shard(0)])
    part = local_part(half, range(world_size))
    if rank < 2:
        assert part.box == ((rank, 0), (1, 5)) and (part.replica, part.replicas) == (0, 1)
        assert sample_state({"model.w": half})["model"] != 0
    else:
        assert part.box == ((0, 0), (0, 0)) and part.replicas == 0
        assert sample_state({"model.w": half})["model"] == 0


def test_the_box_of_a_rank_is_its_part_of_the_tensor() -> None:
    run_ranks(_boxes, 4)


def _gathers_and_counts(rank: int, world_size: int) -> None:
    whole, mesh = (
        torch.arange(35).view(7, 5),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp")),
    )
    group = new_background_group(None, 30)
    cases: list[tuple[DeviceMesh, list[Any]]] = [
        (mesh, placements) for placements in PLACEMENTS.values()
    ]
    cases += [(mesh["fsdp"], [Shard(0)]), (mesh["tp"], [Shard(1)]), (mesh["tp"], [Replicate()])]
    alone = bit_sum("w", whole, (0, 0))
    for on, placements in cases:
        tensor = distribute_tensor(whole, on, placements)
        assert torch.equal(whole_tensor(tensor, group), whole), placements
        own = (
            bit_sum("w", tensor.to_local(), local_box(tensor).offsets) if counts_here(tensor) else 0
        )
        sums = [
            (bits, sample["model"])
            for bits, sample in gather_objects((own, sample_state({"model.w": tensor})))
        ]
        assert (sum(bits for bits, _ in sums) - alone) % 2**64 == 0, placements
        assert (sum(samples for _, samples in sums) - SAMPLED) % 2**64 == 0, placements
    few = distribute_tensor(torch.arange(3), init_device_mesh("cpu", (4,)), [Shard(0)])
    assert torch.equal(whole_tensor(few, group), torch.arange(3))


def _under_fsdp_and_tensor_parallelism(rank: int, world_size: int) -> None:
    mesh, whole = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp")),
        torch.arange(40.0).view(8, 5),
    )
    linear = nn.Linear(5, 8, bias=False)
    with torch.no_grad():
        linear.weight.copy_(whole)
    fully_shard(parallelize_module(linear, mesh["tp"], ColwiseParallel()), mesh=mesh["fsdp"])
    weight: Any = linear.weight
    (first, _), (rows, _) = local_box(weight)
    assert torch.equal(weight.to_local(), whole[first : first + rows])
    assert torch.equal(whole_tensor(weight, new_background_group(None, 30)), whole)
    alone = made_sharded(
        whole[:4], mesh["tp"], (_StridedShard(0, split_factor=2),), whole.shape, whole.stride()
    )
    with pytest.raises(
        ConfigError, match=r"a tensor \[8, 5\] is placed as .* shard experts one by one"
    ):
        local_box(alone)


def test_a_strided_shard_is_refused_alone_and_has_a_block_with_the_cut_before_it() -> None:
    run_ranks(_under_fsdp_and_tensor_parallelism, 4)


def _chunk(begin: int, rows: int, parts: int, number: int) -> tuple[int, int]:
    """First row and number of rows of a part as ``torch.chunk`` cuts, and so FSDP2."""
    step = -(-rows // parts)
    first = min(number * step, rows)
    return begin + first, min(step, rows - first)


def test_rows_that_fsdp2_and_dtensor_cut_differently_are_refused_and_no_others() -> None:
    refused = different = 0
    for rows, shards, parts in itertools.product(range(1, 33), range(1, 5), range(1, 4)):
        placements = [_StridedShard(0, split_factor=parts), Shard(0)]
        coordinates = list(itertools.product(range(shards), range(parts)))
        by_fsdp2 = [
            _chunk(*_chunk(0, rows, parts, part), shards, shard) for shard, part in coordinates
        ]
        by_dtensor = []
        for at in coordinates:
            (n_rows,), (begin,) = _compute_local_shape_and_global_offset(
                (rows,), (shards, parts), list(at), placements
            )
            by_dtensor.append((begin, n_rows))
        agree = all(
            a[1] == b[1] and (a == b or not a[1]) for a, b in zip(by_fsdp2, by_dtensor, strict=True)
        )
        different += not agree
        if shards > 2 and rows % parts:
            refused += 1
            with pytest.raises(
                ConfigError, match=f"FSDP2 and DTensor cut {rows} rows differently, because {parts}"
            ):
                cut_boxes((rows,), (shards, parts), placements, np.array(coordinates))
            continue
        found = cut_boxes((rows,), (shards, parts), placements, np.array(coordinates))
        assert agree and found is not None
        assert [(box.offsets[0], box.sizes[0]) for box in found if box.sizes[0]] == [
            one for one in by_fsdp2 if one[1]
        ]
    assert refused > different > 0


def test_each_part_counts_once_and_is_gathered_once_on_meshes_and_their_slices() -> None:
    run_ranks(_gathers_and_counts, 4)


def test_saves_and_loads_leave_the_memory_of_parameters_and_moments_free_to_be_released(
    tmp_path: Path,
) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    engine = make_engine(tmp_path / "model")
    engine.train_batch(make_batch(), nll, loss_tokens)
    metas = [
        SaveLoadMeta(str(tmp_path / "dcp"), "dcp", with_optim=True),
        SaveLoadMeta(str(tmp_path / "hf"), "hf", with_optim=False),
    ]
    for meta in metas:
        engine.save(meta)
        engine.load(meta)
    live = engine.dcp_state().live_tensors()
    assert [
        name
        for name, tensor in live.items()
        if not local_tensor(tensor).untyped_storage().resizable()
    ] == []
    engine.destroy()
