"""`optimizer.implementation`: same results whatever the kernels, and checkpoints that load into
each other.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.engine import OptimizerConfig, SaveLoadMeta
from holdfast.engine.training.optimizer import build_optimizer
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
from tests.tiers import slow_but

IMPLEMENTATIONS = {
    "adam": ("loop", "foreach", "fused"),
    "muon": ("loop", "foreach", "fused"),
    "sgd": ("loop", "foreach"),
}


def config_of(kind: str, implementation: str) -> OptimizerConfig:
    return OptimizerConfig(
        type=kind, implementation=implementation, lr=1e-2, momentum=0.9, gradient_clipping=1e9
    )


@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
def test_kernels_are_those_of_the_config(kind: str) -> None:
    flags = {
        "auto": (None, None),
        "loop": (False, False),
        "foreach": (True, None),
        "fused": (None, True),
    }
    for name in ("auto", *IMPLEMENTATIONS[kind]):
        defaults = build_optimizer([nn.Parameter(torch.zeros(2))], config_of(kind, name)).defaults
        assert (defaults["foreach"], defaults["fused"]) == flags[name]


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("adam_bf16", "loop", "'foreach'"),
        ("adam_bf16", "fused", "'foreach'"),
        ("adam8bit", "fused", "'foreach'"),
        ("sgd", "fused", "'loop' or 'foreach'"),
    ],
)
def test_kernels_that_do_not_exist_are_refused(kind: str, name: str, expected: str) -> None:
    match = (
        f"'optimizer.implementation' is '{name}', but sharded parameters have {expected} for .* "
        f"'{kind}'"
    )
    with pytest.raises(ConfigError, match=match):
        OptimizerConfig(type=kind, implementation=name)
    with pytest.raises(ConfigError, match=r"optimizer\.implementation' is 'apex'"):
        OptimizerConfig(implementation="apex")


def _saved_and_loaded(rank: int, world_size: int, folder: str, out: str, kind: str) -> None:
    batch = rows(make_batch(), slice(rank * 8 // world_size, (rank + 1) * 8 // world_size))
    saved, after, names = {}, {}, IMPLEMENTATIONS[kind]
    for name in names:
        engine = make_engine(folder, optimizer=config_of(kind, name))
        for _ in range(2):
            engine.train_batch(batch, nll, loss_tokens)
        engine.save(SaveLoadMeta(f"{out}/{name}", "dcp", with_optim=True))
        saved[name] = whole(engine)
        engine.train_batch(batch, nll, loss_tokens)
        after[name] = whole(engine)
    assert same(after["loop"], after["foreach"])
    for key, tensor in (
        after["loop"].items() if kind == "adam" else ()
    ):  # Muon enlarges differences of gradients
        torch.testing.assert_close(after["fused"][key], tensor, rtol=1e-4, atol=1e-6)
    for source, target in product(names, names):
        engine = make_engine(folder, optimizer=config_of(kind, target))
        engine.load(SaveLoadMeta(f"{out}/{source}", "dcp", with_optim=True))
        assert same(whole(engine), saved[source]), (source, target)
        group, defaults = engine.optimizer.param_groups[0], engine.optimizer.defaults
        assert (group["foreach"], group["fused"]) == (defaults["foreach"], defaults["fused"]), (
            "they are not loaded"
        )
        engine.train_batch(batch, nll, loss_tokens)
        if source == target:
            assert same(whole(engine), after[source])


@pytest.mark.parametrize("kind", slow_but([], IMPLEMENTATIONS))
def test_checkpoints_load_from_each_into_each_bit_for_bit(kind: str, tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    run_ranks(_saved_and_loaded, 2, str(tmp_path / "model"), str(tmp_path), kind)


def _on_two_meshes(rank: int, world_size: int) -> None:
    results: dict[str, list[torch.Tensor]] = {}
    for name in ("auto", *IMPLEMENTATIONS["adam"]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 5), nn.Linear(5, 1)
        )  # a rank has an empty shard of the last one
        fully_shard(model[0], mesh=init_device_mesh("cpu", (world_size,)))
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard")),
        )
        params: Any = list(model.parameters())
        assert len({param.device_mesh for param in params}) == 2
        optimizer = build_optimizer(params, config_of("adam", name))
        for step in range(3):
            model(
                torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            ).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results[name] = [
            param.full_tensor().detach().clone() for param in params if isinstance(param, DTensor)
        ]
    for name in ("auto", "foreach"):
        assert all(map(torch.equal, results[name], results["loop"])), name
    for one, other in zip(results["fused"], results["loop"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_parameters_on_two_meshes_are_updated_by_each() -> None:
    run_ranks(_on_two_meshes, 2)
