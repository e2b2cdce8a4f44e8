"""Ranks that share experts train as one process does, and load the checkpoints of other meshes."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig

from holdfast.engine import MicroBatchSpec, ParallelStrategy, TrainEngineConfig
from holdfast.engine.api import Batch
from holdfast.engine.training.expert_parallel import shard_experts
from holdfast.engine.training.meshes import open_meshes
from holdfast.utils.compat.transformers_private import plan_experts
from holdfast.utils.errors import ConfigError
from tests.engine.architectures.released import tiny_config
from tests.engine.meshes import SGD, Mesh, check_loads, engine_on, fingerprint, own_rows, share
from tests.engine.models import NEEDS_PLANS, build_reference, tiny_qwen3, write_model_folder
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
from tests.helpers import run_ranks
from tests.tiers import slow_but

pytestmark = [pytest.mark.timeout(150), NEEDS_PLANS]

MODELS = {
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
    "glm4_moe": "zai-org/GLM-4.5",
    "deepseek_v3": "deepseek-ai/DeepSeek-R1",
}
MESHES = [
    Mesh(2, "fsdp:e2"),
    Mesh(4, "fsdp:e2"),
    Mesh(4, "fsdp:e4"),
    Mesh(4, "fsdp:e2", replicas=2),
]


def tiny_moe(name: str, n_experts: int | None = None) -> PretrainedConfig:
    config: Any = tiny_config(MODELS[name])
    if n_experts is not None:
        config.num_experts = n_experts
    return config


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in MODELS:
        found[name] = tmp_path_factory.mktemp("models") / name
        write_model_folder(found[name], tiny_moe(name, 12 if name == "qwen3_moe" else None))
    found["uneven"] = (
        tmp_path_factory.mktemp("models") / "uneven"
    )  # three experts, then shards of two and one
    write_model_folder(found["uneven"], tiny_moe("qwen3_moe", 6))
    return found


def _steps(
    rank: int, world_size: int, folder: str, mesh: Mesh, sync: str, checkpointing: bool
) -> None:
    ref: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = reference(ref, make_batch())[0]
    norm = float(
        torch.stack(
            [param.grad.norm() for param in ref.parameters() if param.grad is not None]
        ).norm()
    )
    engine = engine_on(folder, mesh, sync, optimizer=SGD, gradient_checkpointing=checkpointing)
    plain, batch = engine_on(folder, Mesh(world_size), optimizer=SGD), own_rows(engine)
    assert (
        engine._scoring_head is not None and engine.model.config._attn_implementation == "holdfast"
    )
    torch.testing.assert_close(
        engine.forward_batch(batch), plain.forward_batch(batch), rtol=0, atol=1e-6
    )
    gradients = capture_gradients(engine)
    for n_mbs in (1, 3):
        engine.config.mb_spec = MicroBatchSpec(n_mbs=n_mbs)
        stats = engine.train_batch(batch, nll, loss_tokens)
        assert stats["loss"] == pytest.approx(expected, rel=1e-6)
        assert stats["grad_norm"] == pytest.approx(norm, rel=1e-6)
        for name, param in ref.named_parameters():
            if param.grad is not None:
                limit = 1e-5 * float(param.grad.abs().max())
                torch.testing.assert_close(
                    gradients[name].cpu(), param.grad, rtol=0, atol=max(limit, 1e-8), msg=name
                )
    assert fingerprint(engine) == fingerprint(plain)


STEPS = [
    (model, mesh, sync, checkpointing)
    for model in MODELS
    for mesh in MESHES
    for sync in ("every", "last")
    for checkpointing in (False, True)
]
QUICK = [("qwen3_moe", MESHES[0], "every", True)]


@pytest.mark.parametrize(
    ("model", "mesh", "sync", "checkpointing"), slow_but(QUICK, STEPS), ids=str
)
def test_ranks_that_share_experts_take_the_steps_of_the_unsharded_model(
    folders: dict[str, Path], model: str, mesh: Mesh, sync: str, checkpointing: bool
) -> None:
    run_ranks(_steps, mesh.ranks, str(folders[model]), mesh, sync, checkpointing)


def lopsided(rank: int, world_size: int, folder: str) -> None:
    """All tokens choose experts of the first rank: the others compute none, and must meet the
    collectives.
    """
    ref: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference(ref, make_batch())
    engine = engine_on(folder, MESHES[0], optimizer=SGD)
    gradients = capture_gradients(engine)
    stats = engine.train_batch(own_rows(engine), nll, loss_tokens)
    for name, param in ref.named_parameters():
        torch.testing.assert_close(
            gradients[name].cpu(), param.grad, rtol=1e-4, atol=1e-6, msg=name
        )
    assert stats["expert_load_max_over_mean"] >= 2, "half of the experts get everything"
    last = gradients["model.layers.3.mlp.experts.down_proj"]
    assert last[:8].abs().max() > 0 and not last[8:].any()


@pytest.mark.slow
def test_experts_that_get_no_token_have_a_gradient_of_zeros(tmp_path: Path) -> None:
    model = build_reference(tiny_moe("deepseek_v3"))
    for module in model.modules():
        if "e_score_correction_bias" in dict(module.named_buffers(recurse=False)):
            module.get_buffer("e_score_correction_bias")[:8] += 100
    model.save_pretrained(tmp_path / "lopsided")
    run_ranks(lopsided, 2, str(tmp_path / "lopsided"))


def test_rules_for_ranks_with_the_same_data_are_left_out() -> None:
    """Gemma-4's rules also split dense layers, which is right only for ranks with the same data."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("google/gemma-4-26B-A4B"))
    assert "colwise" in model.ep_plan.values()
    assert set(plan_experts(model, 2).values()) == {"grouped_gemm", "ep_dispatch_experts"}


COEF = 0.3


def balanced(ref: Any, parts: list[Batch]) -> tuple[float, float]:
    """Gradients of the loss with the balance loss of transformers, and the expected statistics."""
    ref.config.output_router_logits, balance, counts = True, 0.0, torch.zeros(2, ref.num_experts)
    weights = [part["loss_mask"][:, 1:].sum() for part in parts]
    gradients = {name: torch.zeros_like(param) for name, param in ref.named_parameters()}
    for part, weight in zip(parts, weights, strict=True):
        found = {}
        hook = ref.register_forward_hook(lambda *args, found=found: found.update(args[-1]))
        reference(ref, part)
        hook.remove()
        parts_of_loss = {name: param.grad.clone() for name, param in ref.named_parameters()}
        ref.zero_grad()
        aux = ref(
            input_ids=part["input_ids"], attention_mask=part["attention_mask"], use_cache=False
        ).aux_loss
        (COEF * aux).backward()
        share_of_part = weight / sum(weights)
        balance += float(aux * share_of_part)
        for name, param in ref.named_parameters():
            gradients[name] += share_of_part * (
                parts_of_loss[name] + (0.0 if param.grad is None else param.grad)
            )
        for layer, logits in enumerate(found["router_logits"]):
            chosen = (
                logits.softmax(-1)
                .topk(ref.num_experts_per_tok)
                .indices[part["attention_mask"].flatten().bool()]
            )
            counts[layer] += torch.bincount(chosen.flatten(), minlength=ref.num_experts)
    for name, param in ref.named_parameters():
        param.grad = gradients[name]
    return balance, float((counts.max(1).values / counts.mean(1)).mean())


def _balance(rank: int, world_size: int, folder: str, mesh: Mesh) -> None:
    ref: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss = reference(ref, make_batch())[0]
    balance, load = balanced(
        ref, [rows(make_batch(), share(other, world_size)) for other in range(world_size)]
    )
    batch = rows(make_batch(), share(rank, world_size))
    for packed, checkpointing in ((True, False), (True, True), (False, True)):
        changes = {
            "pack_sequences": packed,
            "gradient_checkpointing": checkpointing,
            "router_aux_loss_coef": COEF,
        }
        engine = engine_on(folder, mesh, optimizer=SGD, pad_to_maximum=packed, **changes)
        engine.config.mb_spec = MicroBatchSpec(max_tokens_per_mb=64)
        gradients = capture_gradients(engine)
        stats = engine.train_batch(batch, nll, loss_tokens)
        assert stats["loss"] == pytest.approx(loss, rel=1e-6), "the loss of the caller"
        assert stats["router_aux_loss"] == pytest.approx(balance, rel=1e-5)
        assert stats["expert_load_max_over_mean"] == pytest.approx(load, rel=1e-6)
        n_choices = int(batch["attention_mask"].sum()) * ref.num_experts_per_tok
        assert [int(each.sum()) for each in engine._routers._loads] == [
            n_choices
        ] * 2 and not engine._routers._logits
        for name, param in ref.named_parameters():
            limit = 1e-5 * float(param.grad.abs().max())
            torch.testing.assert_close(
                gradients[name].cpu(), param.grad, rtol=0, atol=max(limit, 1e-8), msg=name
            )
        one_row = rows(batch, slice(0, 1) if world_size == 1 else slice(-1, None))
        one_row["loss_mask"] = one_row["loss_mask"] * (
            rank > 0 or world_size == 1
        )  # a dummy on rank 0
        again = engine.train_batch(one_row, nll, loss_tokens)
        assert rank > 0 or world_size == 1 or not any(each.any() for each in engine._routers._loads)
        assert (
            1 <= again["expert_load_max_over_mean"] <= ref.num_experts
            and again["router_aux_loss"] > 0
        )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", slow_but(MESHES[:1], [Mesh(1), Mesh(2), *MESHES[:3]]), ids=str)
def test_the_balance_loss_and_the_load_of_experts_are_those_of_transformers(
    folders: dict[str, Path], mesh: Mesh
) -> None:
    run_ranks(_balance, mesh.ranks, str(folders["qwen3_moe"]), mesh)


def safe_names(folder: Path) -> list[str]:
    return [name for path in folder.glob("*.safetensors") for name in safe_open(path, "pt").keys()]  # noqa: SIM118


@pytest.mark.slow
def test_checkpoints_of_shared_experts_load_into_shards_and_back(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    check_loads(folders["uneven"], tmp_path / "shared", MESHES[0], [Mesh(2)])
    check_loads(folders["uneven"], tmp_path / "shards", Mesh(2), [MESHES[0]])
    for name in ("shared", "shards"):
        assert any(".experts.0.gate_proj" in key for key in safe_names(tmp_path / name / "now_hf"))


def _refusals(rank: int, world_size: int, dense: str, moe: str) -> None:
    uneven = (
        "expert_parallel_size is 2, but Qwen3MoeForCausalLM has 5 experts in a layer; expected "
        "one of [1], which"
    )
    for folder, changes, words in (
        (
            dense,
            {},
            (
                "expert_parallel_size is 2, but transformers has no rules to split experts of "
                "Qwen3ForCausalLM; set"
            ),
        ),
        (moe, {}, uneven),
        (
            moe,
            {"use_lora": True},
            "but config key 'use_lora' is true: experts with adapters are not split; set",
        ),
        (
            moe,
            {"backend": "fsdp:e3"},
            "expert_parallel_size is 3, with 2 ranks in a replica; expected one of [1, 2]",
        ),
        (
            dense,
            {"backend": "fsdp", "router_aux_loss_coef": 0.1},
            "router_aux_loss_coef' is 0.1, but transformers knows",
        ),
        (
            moe,
            {"backend": "fsdp:t2e2"},
            "expert_parallel_size is 2 and tensor_parallel_size 2, which are not",
        ),
    ):
        with (
            patch.object(torch.nn.Module, "to_empty") as memory,
            pytest.raises(ConfigError, match=re.escape(words)),
        ):
            make_engine(folder, **{"backend": "fsdp:e2", **changes})
        assert memory.call_count == 0, "nothing was given memory"
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(tiny_moe("qwen3_moe"))
        model.model.layers[0].mlp.experts.scale = torch.nn.Parameter(torch.ones(3))
    strategy = ParallelStrategy(world_size, expert_parallel_size=world_size)
    meshes = open_meshes(strategy, torch.device("cpu"), timedelta(seconds=60))
    with pytest.raises(
        ConfigError,
        match=r"all experts of Qwen3MoeForCausalLM share model\.layers\.0\.mlp\.experts\.scale",
    ):
        shard_experts(model, TrainEngineConfig(), meshes)  # each rank would train its own copy


def test_experts_that_cannot_be_split_are_refused_on_all_ranks(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    write_model_folder(tmp_path / "dense", tiny_qwen3())
    write_model_folder(tmp_path / "five", tiny_moe("qwen3_moe", 5))
    run_ranks(_refusals, 2, str(tmp_path / "dense"), str(tmp_path / "five"))


def _drawn(rank: int, world_size: int, folder: str, mesh: Mesh) -> dict[str, torch.Tensor]:
    engine = engine_on(folder, mesh, init_from_scratch=True, seed=3)
    before = whole(engine)
    critic = engine_on(folder, mesh, is_critic=True, dtype="bfloat16")
    stats = critic.train_batch(
        own_rows(critic), lambda values, mb: (values * mb["loss_mask"]).sum() / 7, loss_tokens
    )
    assert stats["expert_load_max_over_mean"] >= 1 and not stats["update_skipped"]
    return before


@pytest.mark.slow
def test_weights_drawn_from_a_seed_are_the_same_however_experts_are_split(
    folders: dict[str, Path],
) -> None:
    one, two = (
        run_ranks(_drawn, 2, str(folders["uneven"]), mesh)[0] for mesh in (Mesh(2), MESHES[0])
    )
    assert same(one, two)


FITTING = {"uneven": [mesh for mesh in MESHES if mesh.backend != "fsdp:e4"], "deepseek_v3": MESHES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "saved_by"), [(name, mesh) for name in FITTING for mesh in FITTING[name]], ids=str
)
def test_checkpoints_of_shared_experts_load_into_every_mesh(
    folders: dict[str, Path], tmp_path: Path, saved_by: Mesh, model: str
) -> None:
    check_loads(
        folders[model], tmp_path, saved_by, [Mesh(1), Mesh(3), Mesh(4, replicas=2), *FITTING[model]]
    )
    assert any(".experts.0.gate_proj" in key for key in safe_names(tmp_path / "now_hf"))
