"""Meshes with and without copies of the sharded model train as one process does, and load each
other's checkpoints.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from holdfast.engine import FSDPConfig, MicroBatchSpec, ParallelStrategy
from holdfast.engine.api import Batch
from holdfast.engine.hf.shard_ranges import whole_tensor
from holdfast.engine.training import gradient_sync
from holdfast.engine.training.meshes import open_meshes
from holdfast.utils.errors import ConfigError
from tests.engine.meshes import SGD, Mesh, check_loads, engine_on, fingerprint, own_rows
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.engine.test_fsdp_engine import (
    capture_gradients,
    loss_tokens,
    make_batch,
    make_engine,
    nll,
    reference,
    rows,
    same,
    whole,
)
from tests.helpers import run_ranks, untimed
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(150)

MESHES = [Mesh(2, replicas=2), Mesh(4, replicas=2), Mesh(4, replicas=4)]
SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)
"""The function that FSDP2 calls: the first from torch 2.13 on."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen3"
    write_model_folder(path, tiny_qwen3())
    return path


def _steps(rank: int, world_size: int, folder: str, mesh: Mesh, sync: str) -> None:
    ref: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = reference(ref, make_batch())[0]
    norm = float(torch.stack([param.grad.norm() for param in ref.parameters()]).norm())
    engine = engine_on(folder, mesh, sync, optimizer=SGD)
    plain = engine_on(folder, Mesh(world_size), optimizer=SGD)
    shape, replicas = engine.model.lm_head.weight.device_mesh.shape, mesh.replicas
    batch, summed, scattered = own_rows(engine), [], []
    assert shape == ((replicas, world_size // replicas) if replicas > 1 else (world_size,))
    assert (engine.data_parallel_rank, engine.data_parallel_world_size) == (rank, world_size)
    torch.testing.assert_close(
        engine.forward_batch(batch), plain.forward_batch(batch), rtol=0, atol=1e-6
    )
    gradients = capture_gradients(engine)
    for n_mbs in (1, 3):
        engine.config.mb_spec = MicroBatchSpec(n_mbs=n_mbs)
        with (
            patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as all_reduce,
            patch.object(dist, SCATTER, side_effect=getattr(dist, SCATTER)) as reduce_scatter,
        ):
            stats = engine.train_batch(batch, nll, loss_tokens)
        summed.append(all_reduce.call_count)
        scattered.append(reduce_scatter.call_count)
        assert stats["loss"] == pytest.approx(expected, rel=1e-6)
        assert stats["grad_norm"] == pytest.approx(norm, rel=1e-5)
        for name, param in ref.named_parameters():
            torch.testing.assert_close(
                gradients[name].cpu(), param.grad, rtol=1e-5, atol=1e-6, msg=name
            )
    assert summed[0] == summed[1] and (replicas == 1 or summed[0] > 1), (
        "replicas are summed once a step"
    )
    assert scattered[1] == (1 if sync == "last" else 3) * scattered[0]
    assert replicas == world_size or scattered[0] > 0
    assert fingerprint(engine) == fingerprint(plain)


STEPS = [(mesh, sync) for mesh in [Mesh(2), *MESHES] for sync in ("every", "last")]


@pytest.mark.parametrize(
    ("mesh", "sync"), slow_but([(MESHES[0], "every"), (Mesh(2), "last")], STEPS), ids=str
)
def test_every_mesh_takes_the_steps_of_the_unsharded_model(
    folder: Path, mesh: Mesh, sync: str
) -> None:
    run_ranks(_steps, mesh.ranks, str(folder), mesh, sync)


class Broken(Exception):
    """Raised by a loss, or by its backward."""


def fail(grad: torch.Tensor) -> None:
    raise Broken


def _loss_that_raises(
    rank: int, world_size: int, folder: str, replicas: int, sync: str, in_backward: bool
) -> None:
    mesh = Mesh(world_size, replicas=replicas)
    engine, twin = (
        engine_on(folder, mesh, sync, mb_spec=MicroBatchSpec(n_mbs=3)) for _ in range(2)
    )
    batch, calls = rows(make_batch(), slice(rank * 4, rank * 4 + 4)), []

    def breaking(logits: Any, mb: Batch) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3 and not in_backward:
            raise Broken
        return nll(logits, mb)

    def at_the_end_of_a_backward(module: Any, args: Any, output: torch.Tensor) -> None:
        if len(calls) == 2 and in_backward:
            output.register_hook(fail)

    hook = engine.model.model.embed_tokens.register_forward_hook(at_the_end_of_a_backward)
    with pytest.raises(Broken):
        engine.train_batch(batch, breaking, loss_tokens)
    hook.remove()
    assert all(param.grad is None for param in engine.model.parameters())
    found, expected = capture_gradients(engine), capture_gradients(twin)
    stats, twins = (untimed(each.train_batch(batch, nll, loss_tokens)) for each in (engine, twin))
    assert stats == twins
    assert same(found, expected) and same(whole(engine), whole(twin))


RAISES = [
    (*mesh, place)
    for mesh in ((1, "every"), (1, "last"), (2, "every"))
    for place in ("loss", "backward")
]


@pytest.mark.parametrize(
    ("replicas", "sync", "place"), slow_but([(2, "every", "backward")], RAISES)
)
def test_a_loss_that_raises_leaves_no_part_of_a_gradient_for_the_next_step(
    folder: Path, replicas: int, sync: str, place: str
) -> None:
    in_backward = place == "backward"
    if in_backward and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("this torch cannot use a model again after an error in a backward")
    run_ranks(_loss_that_raises, 2, str(folder), replicas, sync, in_backward)


def _gather_over_a_slice(rank: int, world_size: int) -> None:
    root = init_device_mesh("cpu", (2, 1), mesh_dim_names=("model", "shard"))
    alone: Any = [dist.new_group([one]) for one in range(world_size)][rank]
    values = torch.full((3, 2), float(rank))
    tensor = distribute_tensor(values, root["shard"], [Shard(0)], src_data_rank=None)
    assert torch.equal(whole_tensor(tensor, alone), values), "each rank has a model of its own"


def test_a_model_on_a_slice_of_a_mesh_is_gathered_over_its_own_ranks() -> None:
    run_ranks(_gather_over_a_slice, 2)


def _second_default_group(rank: int, world_size: int, folder: str) -> None:
    found = []
    for _ in range(2):
        engine = engine_on(folder, MESHES[0], optimizer=SGD)
        gradients = capture_gradients(engine)
        engine.train_batch(own_rows(engine), nll, loss_tokens)
        found.append((engine.model.lm_head.weight.device_mesh, gradients))
        engine.destroy()
    (first, gradients), (second, later) = found
    assert first == second and same(gradients, later), (
        "engines of one default group share its meshes"
    )
    timeout = timedelta(seconds=7)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}.again", world_size),
        rank=rank,
        world_size=world_size,
    )
    again = open_meshes(
        ParallelStrategy(world_size, replicate_size=2), torch.device("cpu"), timeout
    ).fsdp
    assert again != first, "DTensor's caches tell the meshes apart"
    for name in again.mesh_dim_names or ():
        assert again.get_group(name)._get_backend(torch.device("cpu")).options._timeout == timeout  # type: ignore[attr-defined]


def test_meshes_belong_to_a_default_group_and_have_its_time_limit(folder: Path) -> None:
    run_ranks(_second_default_group, 2, str(folder))


def _choices(rank: int, world_size: int, folder: str) -> dict[str, bool]:
    lora, bfloat16, found = (
        {"use_lora": True, "lora_rank": 2},
        {"grad_reduce_dtype": "bfloat16"},
        {},
    )
    for name, sync, limit, changes in (
        ("small", "auto", 2 << 30, {}),
        ("large", "auto", 1000, {}),
        ("large, last", "last", 1000, {}),
        ("small, every", "every", 2 << 30, {}),
        ("summed in bfloat16", "auto", 2 << 30, bfloat16),
        ("adapters", "auto", 1000, lora),
        ("adapters in bfloat16", "auto", 1000, lora | bfloat16),
    ):
        with (
            patch.object(gradient_sync, "ALWAYS_AFFORDABLE_BYTES", limit),
            patch.object(gradient_sync, "logger") as log,
        ):
            found[name] = engine_on(folder, Mesh(world_size), sync, **changes)._sync_last
        if rank == 0 and world_size > 1:
            words = (
                "once a step, which takes"
                if found[name]
                else "in every micro-batch; once a step would take"
            )
            (text,) = [call.args[0] % call.args[1:] for call in log.info.call_args_list]
            assert words in text and sync in text
            assert name != "small" or f"takes {4 * 19104} bytes" in text
    return found


@pytest.mark.slow
def test_gradients_are_summed_once_a_step_if_their_whole_sum_is_small(folder: Path) -> None:
    expected = {"small": True, "large": False, "large, last": True, "small, every": False}
    expected |= {"summed in bfloat16": False, "adapters": True, "adapters in bfloat16": False}
    assert run_ranks(_choices, 2, str(folder)) == [expected] * 2
    assert run_ranks(_choices, 1, str(folder)) == [dict.fromkeys(expected, False)]


@pytest.mark.slow
def test_checkpoints_of_replicas_load_into_shards_and_back(folder: Path, tmp_path: Path) -> None:
    check_loads(folder, tmp_path, MESHES[0], [Mesh(2)])


@pytest.mark.slow
@pytest.mark.parametrize("saved_by", [Mesh(1), Mesh(2), Mesh(3), Mesh(4), *MESHES], ids=str)
def test_checkpoints_load_into_every_mesh(folder: Path, tmp_path: Path, saved_by: Mesh) -> None:
    check_loads(folder, tmp_path, saved_by, [Mesh(1), Mesh(3), Mesh(4), *MESHES])


def _refusals(rank: int, world_size: int, folder: str) -> None:
    for changes, words in (
        (
            {"backend": "fsdp:d3"},
            r"data_parallel_size is 3, but 2 rank\(s\) have joined.* 'fsdp:d2'",
        ),
        (
            {"fsdp": FSDPConfig(replicate_size=3)},
            r"replicate_size.* is 3, with 2 data-parallel ranks; .*\[1, 2\]",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            make_engine(folder, **changes)
    engine = make_engine(folder, backend="fsdp:d2", optimizer=None)
    engine.destroy()
    for strategy, words in (
        (
            ParallelStrategy(context_parallel_size=2),
            r"was given \{.*'c': 2.*\}, but config keys .* say \{'d': 2",
        ),
        (ParallelStrategy(data_parallel_size=1), r"was given \{'d': 1, .* say \{'d': 2, 'r': 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            engine.create_process_group(strategy)
    engine.create_process_group(ParallelStrategy(data_parallel_size=2))
    engine.destroy()


def test_a_mesh_that_does_not_fit_is_refused_on_all_ranks(folder: Path) -> None:
    run_ranks(_refusals, 2, str(folder))
