"""Plans of saves: the plan that each rank makes alone is, byte for byte, the plan that rank 0 would
make for all.
"""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from holdfast.engine.dcp import save
from holdfast.engine.dcp.format import stored_properties
from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import DCPSaver
from holdfast.engine.dcp.save_plan import agree_on, describe_state, find_shards, vote_on
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.memory.tensors import counts_here, flatten, local_box, local_tensor
from holdfast.utils.compat.torch_private import StridedShard
from holdfast.utils.distributed import gather_objects
from tests.helpers import run_ranks
from tests.tiers import slow_but

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


class Counter:
    """A user's counter."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {"value": 3}


class Extra(nn.Linear):
    """A layer with state of a module."""

    def get_extra_state(self) -> Any:
        return {"count": 1}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"count": 1}


def _train(model: nn.Module) -> DCPState:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    return DCPState(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3), Counter())


def _fsdp(world_size: int) -> DCPState:
    """Uneven rows, and layers with fewer rows than ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 201), nn.Linear(201, 200), nn.Linear(200, 3), Extra(3, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return _train(model)


def _peers(world_size: int) -> DCPState:
    """Pairs of ranks with the same data: two ranks have the same generators, and each has state of
    a module.
    """
    state = _fsdp(world_size)
    state.ranks_with_same_data = 2
    return state


def _hybrid(world_size: int) -> DCPState:
    """Sharded in pairs, and replicated over the pairs: large and small shards that several ranks
    hold.
    """
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(7, 301), nn.Linear(301, 300), nn.Linear(300, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _train(model)


def _replicated(world_size: int) -> DCPState:
    """Complete on every rank, so the large tensors are distributed."""
    torch.manual_seed(0)
    return _train(
        nn.Sequential(
            nn.Linear(7, 200), nn.Linear(200, 200), nn.Linear(200, 180), nn.Linear(180, 3)
        )
    )


def _placed(world_size: int) -> DCPState:
    """Buffers sharded by rows, columns and both, and of several dtypes."""
    model, line = nn.Module(), init_device_mesh("cpu", (world_size,))
    square = init_device_mesh("cpu", (world_size // 2, 2)) if world_size % 2 == 0 else None
    placements: list[tuple[DeviceMesh | None, list[Placement]]] = [
        (line, [Shard(0)]),
        (line, [Shard(1)]),
        (line, [Replicate()]),
        (square, [Shard(0), Shard(1)]),
        (square, [Shard(0), Shard(0)]),
        (square, [Replicate(), Shard(1)]),
        (square, [Shard(1), Replicate()]),
    ]
    if (
        square is not None
    ):  # of a model with tensor parallelism: under FSDP2, and on a slice of the mesh
        named = init_device_mesh("cpu", tuple(square.shape), mesh_dim_names=("fsdp", "tp"))
        strided: Any = StridedShard(0, split_factor=2)
        placements += [
            (named, [strided, Shard(0)]),
            (named["fsdp"], [Shard(0)]),
            (named["tp"], [Shard(1)]),
        ]
    for number, (mesh, placed) in enumerate(placements):
        for shape in ([5, 9], [1, 4], [300, 301], [0, 4]) if mesh is not None else ():
            whole = (
                torch.arange(math.prod(shape))
                .to(torch.bfloat16 if number % 2 else torch.float32)
                .view(shape)
            )
            model.register_buffer(
                f"b{number}_{shape[0]}", distribute_tensor(whole, mesh, placed, src_data_rank=None)
            )
    model.register_buffer("plain", torch.arange(20_000.0))
    model.register_buffer("scalar", torch.tensor(7.5))
    return DCPState(model)


STATES: dict[str, Callable[[int], DCPState]] = {
    "fsdp": _fsdp, "peers": _peers, "hybrid": _hybrid, "replicated": _replicated, "placed": _placed
}  # fmt: skip


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def _write_both_ways(
    rank: int, world_size: int, folder: str, kind: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Files of a save planned by each rank alone, and of one planned by rank 0 for all."""
    state = STATES[kind](world_size)
    values, asked = state.state_dict(), list[bool]()

    def agreed(*args: Any) -> bool:
        asked.append(agree_on(*args))
        return asked[-1]

    with pytest.MonkeyPatch.context() as patch:
        for name, way in (("alone", agreed), ("together", lambda *_: False)):
            patch.setattr(save, "agree_on", way)
            (Path(folder) / name).mkdir(exist_ok=True)
            DCPSaver(state.ranks_with_same_data).write(Path(folder) / name, values)
    assert asked == [True]
    dist.barrier()
    expected = {name: local_tensor(tensor).clone() for name, tensor in state.live_tensors().items()}
    for tensor in state.live_tensors().values():
        local_tensor(tensor).detach().zero_()
    load_dcp(Path(folder) / "alone", state)
    assert all(
        torch.equal(local_tensor(t), expected[name]) for name, t in state.live_tensors().items()
    )
    return _digests(Path(folder) / "alone"), _digests(Path(folder) / "together")


@pytest.mark.parametrize(
    ("kind", "world_size"),
    slow_but(
        [("fsdp", 2), ("hybrid", 4), ("replicated", 3), ("placed", 3)],
        [
            *(("fsdp", 2), ("fsdp", 3), ("peers", 4), ("hybrid", 4), ("replicated", 3)),
            *(("placed", 2), ("placed", 3), ("placed", 4)),
        ],
    ),
)
def test_ranks_that_plan_alone_write_the_bytes_that_rank_0_would_plan(
    tmp_path: Path, kind: str, world_size: int
) -> None:
    for alone, together in run_ranks(_write_both_ways, world_size, str(tmp_path), kind):
        assert alone == together
        assert len(alone) == world_size + 1


def _agreements(rank: int, world_size: int) -> list[bool]:
    """Whether ranks agree: on the same model, if shape, name or dtype differ on one rank, on a
    strange placement.
    """
    mesh = init_device_mesh("cpu", (world_size,))
    alone = DeviceMesh("cpu", [rank])
    strange = distribute_tensor(torch.ones(4, 4), alone, [Replicate()], src_data_rank=None)
    sharded = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
    partial = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    cases = [
        {"w": sharded},
        {"w": torch.ones(3 + rank)},
        {"w" if rank else "v": torch.ones(3)},
        {"w": torch.ones(3, dtype=torch.float64 if rank else torch.float32)},
        {"w": sharded if rank else torch.ones(4, 4)},
        {"w": partial},
        {"w": strange},
    ]
    found = []
    for case in cases:
        tensors = dict(flatten({"dcp": {"model": case}}))
        found.append(agree_on(vote_on(describe_state(tensors, None), tensors), None))
    return found


def test_ranks_agree_on_a_structure_only_if_each_knows_all_shards() -> None:
    assert run_ranks(_agreements, 2) == [[True] + [False] * 6] * 2


def _boxes(rank: int, world_size: int) -> list[tuple[Any, Any]]:
    """This rank's boxes according to torch and according to Holdfast, for many shapes and
    placements.
    """
    found = []
    meshes = [init_device_mesh("cpu", shape) for shape in ((6,), (2, 3), (3, 2), (1, 6), (2, 1, 3))]
    for mesh in meshes:
        for shape in ((13, 5), (1, 7), (0, 3), (6, 6), (2, 3, 4), (25,)):
            for dims in np.ndindex(*(len(shape) + 1,) * mesh.ndim):
                placements = [Shard(dim) if dim < len(shape) else Replicate() for dim in dims]
                sizes, offsets = compute_local_shape_and_global_offset(
                    torch.Size(shape), mesh, placements
                )
                ours = find_shards(shape, mesh.mesh.tolist(), placements, range(world_size))
                assert ours is not None
                found.append(((tuple(offsets), tuple(sizes)), ours.boxes[rank]))
    return found


def _holders(rank: int, world_size: int) -> None:
    """The first holder of each part in a plan is the rank that counts the part, also on slices of a
    mesh.
    """
    root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    strided: Any = StridedShard(0, split_factor=2)
    for mesh, placements in (
        (root, [Replicate(), strided, Shard(0)]),
        (root, [Shard(0), Replicate(), Shard(1)]),
        (root["dp", "tp"], [strided, Shard(0)]),
        (root["dp", "cp"]._flatten("fsdp"), [Shard(0)]),
        (root["dp", "cp"]._flatten("fsdp"), [Replicate()]),
        (root["cp"], [Shard(1)]),
    ):
        tensor = distribute_tensor(
            torch.arange(64).view(8, 8), mesh, placements, src_data_rank=None
        )
        tensors = {"dcp.model.w": tensor}
        structure = describe_state(tensors, None)
        assert agree_on(vote_on(structure, tensors), None), placements
        assert structure.shards is not None
        (shards,) = structure.shards
        assert shards is not None and shards.boxes[rank] == local_box(tensor)
        assert counts_here(tensor) == (shards.holders[shards.number[rank]][0] == rank)
        assert (
            sum(gather_objects(local_box(tensor).sizes[0] * counts_here(tensor)))
            * local_box(tensor).sizes[1]
            == 64
        )


def test_the_first_holder_of_each_part_counts_it_on_every_mesh() -> None:
    run_ranks(_holders, 8)


def test_where_a_tensor_lies_is_no_part_of_the_metadata() -> None:
    """A copy that was staged on a GPU is pinned, and the tensor itself is not."""
    live, staged = (
        TensorProperties(dtype=torch.float32, pin_memory=pinned) for pinned in (False, True)
    )
    assert stored_properties(live) == stored_properties(staged)


def test_every_rank_is_known_to_hold_what_torch_gives_it() -> None:
    for boxes in run_ranks(_boxes, 6):
        assert len(boxes) > 200
        assert all(torchs == ours for torchs, ours in boxes), next(
            (t, o) for t, o in boxes if t != o
        )


def _save_what_differs(rank: int, world_size: int, folder: str) -> None:
    """One rank has an additional buffer."""
    model = nn.Linear(300, 300)
    if rank == 1:
        model.register_buffer("own", torch.ones(3))
    DCPSaver().write(folder, DCPState(model).state_dict())


def test_ranks_with_different_structures_still_write_one_checkpoint(tmp_path: Path) -> None:
    run_ranks(_save_what_differs, 3, str(tmp_path))
    model = nn.Linear(300, 300)
    model.register_buffer("own", torch.zeros(3))
    load_dcp(tmp_path, DCPState(model))
    assert torch.equal(dict(model.named_buffers())["own"], torch.ones(3))


def test_ranks_vote_on_the_cpu_whatever_the_default_device_is() -> None:
    tensors = {"w": torch.ones(3)}
    with torch.device("meta"):
        vote = vote_on(describe_state(tensors, None), tensors)
    assert vote.device.type == "cpu" and vote.shape == (5,)
