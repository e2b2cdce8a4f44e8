"""Prefetching and a separate group for reductions change no gradient, and are refused by a torch
without them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from holdfast.engine import FSDPConfig, MicroBatchSpec, OptimizerConfig
from holdfast.engine.training.sharding import set_overlap
from holdfast.utils.errors import ConfigError
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.engine.test_fsdp_engine import (
    loss_tokens,
    make_batch,
    make_engine,
    nll,
    rows,
    same,
    whole,
)
from tests.helpers import run_ranks

SGD = OptimizerConfig(type="sgd", lr=0.1, gradient_clipping=1e9)
KEYS: tuple[dict[str, Any], ...] = (
    {},
    {"forward_prefetch": 1},
    {"forward_prefetch": 5, "backward_prefetch": 2},
    {"separate_reduce_scatter_group": True},
)


def _trained(rank: int, world_size: int, folder: str) -> None:
    states, batch = (
        [],
        rows(make_batch(), slice(rank * 8 // world_size, (rank + 1) * 8 // world_size)),
    )
    for keys in KEYS if hasattr(FSDPModule, "set_separate_reduce_scatter_group") else KEYS[:-1]:
        every: dict[str, Any] = {"gradient_sync": "every"}
        engine = make_engine(
            folder, optimizer=SGD, fsdp=FSDPConfig(**every | keys), mb_spec=MicroBatchSpec(n_mbs=2)
        )
        for _ in range(2):
            engine.forward_batch(batch)
            engine.train_batch(batch, nll, loss_tokens)
        states.append(whole(engine))
    assert all(same(state, states[0]) for state in states)


@pytest.mark.slow
def test_overlap_changes_no_weight(tmp_path: Path) -> None:
    write_model_folder(tmp_path, tiny_qwen3())
    run_ranks(_trained, 2, str(tmp_path))


def _refused(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    name = "set_separate_reduce_scatter_group"
    if hasattr(FSDPModule, name):
        delattr(FSDPModule, name)
    set_overlap(model, FSDPConfig(forward_prefetch=3))
    with pytest.raises(
        ConfigError, match=f"reduce_scatter_group' is True, but FSDPModule.{name} does not exist"
    ):
        set_overlap(model, FSDPConfig(separate_reduce_scatter_group=True))
    assert model(torch.ones(1, 2)).shape == (1, 2)


def test_a_torch_without_separate_groups_is_refused() -> None:
    run_ranks(_refused, 1)
    with pytest.raises(ConfigError, match=r"fsdp\.backward_prefetch' is -1"):
        FSDPConfig(backward_prefetch=-1)
