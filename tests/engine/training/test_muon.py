"""Muon with AdamW for the rest: the steps of torch's two optimizers, to the bit, on every mesh."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from holdfast.engine import OptimizerConfig
from holdfast.engine.memory.tensors import local_box
from holdfast.engine.training.muon import hidden_matrices, orthogonalized
from holdfast.engine.training.optimizer import build_optimizer
from holdfast.utils.compat.torch_private import like_sharded
from holdfast.utils.errors import ConfigError
from tests.engine.meshes import Mesh, engine_on
from tests.engine.models import HAS_PLANS, tiny_qwen3, tiny_qwen3_moe, write_model_folder
from tests.engine.test_fsdp_engine import whole
from tests.helpers import run_ranks
from tests.tiers import slow_but

CONFIG = OptimizerConfig(type="muon", lr=1e-2, weight_decay=0.1, implementation="foreach")


def torch_optimizers(
    matrices: list[nn.Parameter], others: list[nn.Parameter]
) -> list[torch.optim.Optimizer]:
    options: dict[str, Any] = {"lr": CONFIG.lr, "weight_decay": CONFIG.weight_decay}
    muon = torch.optim.Muon(matrices, **options, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, **options, foreach=True)]


def gradient_of(number: int, step: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + number))


def test_steps_are_those_of_torch_to_the_bit() -> None:
    shapes = [(6, 9), (9, 6), (5,), (16, 4), (2, 3, 4)]
    params, twins = (
        [nn.Parameter(gradient_of(n, 9, torch.Size(s))) for n, s in enumerate(shapes)]
        for _ in range(2)
    )
    optimizer = build_optimizer(params, CONFIG, [params[0], params[1]])
    others = torch_optimizers(twins[:2], twins[2:])
    for step in range(4):
        for number, both in enumerate(zip(params, twins, strict=True)):
            for param in both:
                param.grad = (
                    gradient_of(number, step, param.shape) if (number, step) != (1, 2) else None
                )
        for each in (optimizer, *others):
            each.step()
        assert all(map(torch.equal, params, twins)), step
    assert [set(optimizer.state[param]) for param in params[:3]] == [
        {"momentum_buffer"},
        {"momentum_buffer"},
        {"step", "exp_avg", "exp_avg_sq"},
    ]


def test_momentum_is_that_of_the_config() -> None:
    params = [nn.Parameter(torch.ones(2, 2))]
    for given, expected in ((None, 0.95), (0.5, 0.5), (0.0, 0.0)):
        config = OptimizerConfig(type="muon", momentum=given)
        assert [
            group["momentum"] for group in build_optimizer(params, config, params).param_groups
        ] == [expected] * 2


@pytest.mark.parametrize("shape", [(30, 50), (50, 30), (1, 4)], ids=str)
def test_singular_values_of_an_update_are_about_one(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(orthogonalized(torch.randn(shape) * 1e-3).float())
    assert bool(((values > 0.6) & (values < 1.3)).all())
    assert not orthogonalized(torch.zeros(shape)).any()


def _given_gradients(
    rank: int, world_size: int, folder: str, mesh: Mesh
) -> tuple[list[str], dict[str, torch.Tensor]]:
    engine = engine_on(folder, mesh, optimizer=CONFIG)
    params = dict(engine.model.named_parameters())
    chosen = {id(param) for param in hidden_matrices(engine.model)}
    for step in range(3):
        for number, param in enumerate(params.values()):
            part = local_box(param).of(gradient_of(number, step, param.shape))
            param.grad = like_sharded(part.contiguous().to(engine.device), param)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return [name for name, param in params.items() if id(param) in chosen], whole(engine)


MESHES = [
    Mesh(1),
    Mesh(2),
    Mesh(3),
    Mesh(4, replicas=2),
    Mesh(2, "fsdp:t2"),
    Mesh(4, "fsdp:d2t2"),
    Mesh(2, "fsdp:c2"),
]


@pytest.mark.parametrize("mesh", slow_but([Mesh(1), Mesh(3)], MESHES), ids=str)
def test_with_the_same_gradients_every_mesh_takes_the_steps_of_torch_to_the_bit(
    mesh: Mesh, tmp_path: Path
) -> None:
    write_model_folder(tmp_path, model := tiny_qwen3(vocab_size=16))
    if "t2" in mesh.backend and not HAS_PLANS:
        pytest.skip("this transformers cannot share matrices")
    ref: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    named = dict(ref.named_parameters())
    results = run_ranks(_given_gradients, mesh.ranks, str(tmp_path), mesh)
    names = results[0][0]
    assert len(names) == 7 * model.num_hidden_layers and all(
        "_proj.weight" in name for name in names
    )
    others = [param for name, param in named.items() if name not in names]
    optimizers = torch_optimizers([named[name] for name in names], others)
    for step in range(3):
        for number, param in enumerate(named.values()):
            param.grad = gradient_of(number, step, param.shape)
        for optimizer in optimizers:
            optimizer.step()
    for _, found in results:
        for name, param in named.items():
            assert torch.equal(found[f"model.{name}"], param), name


def _matrices(rank: int, world_size: int, folder: str, changes: dict[str, Any]) -> set[str]:
    engine = engine_on(folder, Mesh(world_size), optimizer=CONFIG, **changes)
    chosen = {id(param) for param in engine.optimizer.param_groups[0]["params"]}
    return {name for name, param in engine.model.named_parameters() if id(param) in chosen}


@pytest.mark.slow
def test_matrices_of_the_blocks_are_chosen_and_neither_experts_nor_embeddings_nor_the_head(
    tmp_path: Path,
) -> None:
    write_model_folder(tmp_path / "moe", tiny_qwen3_moe())
    write_model_folder(tmp_path / "dense", tiny_qwen3(tied=False))
    layers = [f"model.layers.{number}" for number in range(2)]
    attention = {f"{layer}.self_attn.{key}_proj.weight" for layer in layers for key in "qkvo"}
    mlp = {f"{layer}.mlp.{key}_proj.weight" for layer in layers for key in ("gate", "up", "down")}
    (found,) = run_ranks(_matrices, 1, str(tmp_path / "moe"), {})
    assert found == attention | {f"{layer}.mlp.gate.weight" for layer in layers}
    (found,) = run_ranks(_matrices, 1, str(tmp_path / "dense"), {"is_critic": True})
    assert found == attention | mlp
    (found,) = run_ranks(
        _matrices, 1, str(tmp_path / "dense"), {"use_lora": True, "target_modules": ["q_proj"]}
    )
    assert found == {
        f"{layer}.self_attn.q_proj.lora_{key}.default.weight" for layer in layers for key in "AB"
    }


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="'muon', but Sequential has no blocks with trained matrices"
    ):
        hidden_matrices(nn.Sequential(nn.Linear(2, 2)))
