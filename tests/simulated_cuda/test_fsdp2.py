"""FSDP2 on simulated devices learns as the model does on the CPU, and a wait that is taken out of
it shows.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from holdfast.utils.devices import CUDA_BACKEND
from tests.helpers import run_ranks
from tests.simulated_cuda import device

pytestmark = pytest.mark.simulated_gpu

STEPS = 5


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 3)
    )


def _train(model: nn.Module, batches: torch.Tensor) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _sharded(world_size: int) -> nn.Sequential:
    model = _model().to("cuda")
    mesh = init_device_mesh("cuda", (world_size,))
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _largest_difference(
    rank: int, world_size: int, mode: str, wait_taken_out: bool = False
) -> float:
    """Largest difference between weights trained here and on the CPU. NaN if any weight is NaN."""
    device.install(mode)
    batches = torch.randn(STEPS, world_size, 4, 8, generator=torch.Generator().manual_seed(1))
    model, reference = _sharded(world_size), _model()
    if wait_taken_out:
        _take_out_the_wait_for_an_all_gather()
    _train(model, batches[:, rank].to("cuda"))
    _train(reference, batches.flatten(1, 2))
    found: dict[str, Any] = model.state_dict()
    weights = {
        name: weight.full_tensor().cpu()
        for name, weight in found.items()
        if isinstance(weight, DTensor)
    }
    assert weights.keys() == reference.state_dict().keys()
    differences = [
        (weights[name] - weight).abs() for name, weight in reference.state_dict().items()
    ]
    if not wait_taken_out:
        assert device.races() == [], "\n".join(device.races()[:6])
    return max(
        difference.max().item() if not difference.isnan().any() else float("nan")
        for difference in differences
    )


def _take_out_the_wait_for_an_all_gather() -> None:
    """The copy out of the gathered buffer waits neither for the event nor for the work of the
    collective.
    """
    copy_out = _fsdp_param_group.foreach_all_gather_copy_out

    def without_wait(result: Any, *others: Any) -> None:
        copy_out(result._replace(all_gather_event=None, all_gather_work=None), *others)

    _fsdp_param_group.foreach_all_gather_copy_out = without_wait


@pytest.mark.parametrize("mode", ["late-copies", "late-kernels", "races"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_are_those_of_the_cpu(mode: str, world_size: int) -> None:
    assert max(run_ranks(_largest_difference, world_size, mode)) < 1e-5


def test_a_wait_taken_out_of_fsdp2_shows() -> None:
    assert max(run_ranks(_largest_difference, 2, "immediate", True)) < 1e-5
    found = run_ranks(_largest_difference, 2, "late-copies", True)
    assert all(not difference < 1e-5 for difference in found), found


def _races_without_a_wait(rank: int, world_size: int) -> list[str]:
    _largest_difference(rank, world_size, "races", True)
    found = device.races()
    device.install("races")  # forgets them
    return found


def test_a_wait_taken_out_of_fsdp2_is_a_race() -> None:
    for races in run_ranks(_races_without_a_wait, 2):
        assert any("written by a collective" in race and "read by " in race for race in races), (
            races
        )


def _wait_for_a_collective_that_hangs(rank: int, world_size: int, folder: Path) -> None:
    group: Any = dist.new_group(backend=CUDA_BACKEND, timeout=timedelta(seconds=2))
    tensor = torch.ones(3, device="cuda")
    device.inject("collective", 1)
    dist.all_reduce(tensor, group=group)
    (folder / "the host went on").touch()
    tensor.sum().item()


def test_a_collective_that_hangs_ends_the_process_that_waits_for_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(AssertionError, match="the process died without a word"):
        run_ranks(_wait_for_a_collective_that_hangs, 1, tmp_path)
    assert (tmp_path / "the host went on").exists()
