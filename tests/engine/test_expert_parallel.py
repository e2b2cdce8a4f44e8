"""Ranks that share experts train as one process does, and load the checkpoints of other meshes."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from holdfast.engine import FSDPConfig, MicroBatchSpec, ParallelStrategy, TrainEngineConfig
from holdfast.engine.training.expert_parallel import shard_experts
from holdfast.engine.training.meshes import open_meshes
from holdfast.utils.errors import ConfigError
from tests.engine.architectures.released import tiny_config
from tests.engine.models import build_reference, tiny_qwen3, write_model_folder
from tests.engine.test_fsdp_engine import (
    capture_gradients,
    loss_tokens,
    make_engine,
    nll,
    reference,
    same,
    whole,
)
from tests.engine.test_fsdp_engine import make_batch as make_any_batch
from tests.engine.test_meshes import SGD, contents, fingerprint, metas, share, weights
from tests.helpers import run_ranks
from tests.tiers import slow_but

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(not hasattr(PreTrainedModel, "_resolve_parallel_plans"), reason="transformers before 5.23"),
]

MODELS = {"qwen3_moe": "Qwen/Qwen3-30B-A3B", "glm4_moe": "zai-org/GLM-4.5", "deepseek_v3": "deepseek-ai/DeepSeek-R1"}
MESHES = [(2, 1, 2), (4, 1, 2), (4, 1, 4), (4, 2, 2)]
"""Ranks, replicas, and ranks that share experts."""


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
    found["uneven"] = tmp_path_factory.mktemp("models") / "uneven"  # three experts, then shards of two and one
    write_model_folder(found["uneven"], tiny_moe("qwen3_moe", 6))
    return found


def engine_with(folder: str, replicas: int, e: int, sync: str = "every", **changes: Any) -> Any:
    fsdp = FSDPConfig(replicate_size=replicas, gradient_sync=sync)
    return make_engine(folder, fsdp=fsdp, backend=f"fsdp:e{e}" if e > 1 else "fsdp", **changes)


def _steps(rank: int, world_size: int, folder: str, replicas: int, e: int, sync: str, checkpointing: bool) -> None:
    ref: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = reference(ref, make_any_batch())[0]
    norm = float(torch.stack([param.grad.norm() for param in ref.parameters() if param.grad is not None]).norm())
    batch = share(rank, world_size)
    engine = engine_with(folder, replicas, e, sync, optimizer=SGD, gradient_checkpointing=checkpointing)
    plain = engine_with(folder, 1, 1, optimizer=SGD)
    assert engine._scoring_head is not None and engine.model.config._attn_implementation == "holdfast"
    torch.testing.assert_close(engine.forward_batch(batch), plain.forward_batch(batch), rtol=0, atol=1e-6)
    gradients = capture_gradients(engine)
    for n_mbs in (1, 3):
        engine.config.mb_spec = MicroBatchSpec(n_mbs=n_mbs)
        stats = engine.train_batch(batch, nll, loss_tokens)
        assert stats["loss"] == pytest.approx(expected, rel=1e-6)
        assert stats["grad_norm"] == pytest.approx(norm, rel=1e-6)
        for name, param in ref.named_parameters():
            if param.grad is not None:
                limit = 1e-5 * float(param.grad.abs().max())
                torch.testing.assert_close(gradients[name], param.grad, rtol=0, atol=max(limit, 1e-8), msg=name)
    assert fingerprint(engine) == fingerprint(plain)


STEPS = [
    (model, *mesh, sync, checkpointing)
    for model in MODELS
    for mesh in MESHES
    for sync in ("every", "last")
    for checkpointing in (False, True)
]
QUICK = [("qwen3_moe", 2, 1, 2, "every", True), ("deepseek_v3", 2, 1, 2, "last", False)]


@pytest.mark.parametrize(("model", "world_size", "replicas", "e", "sync", "checkpointing"), slow_but(QUICK, STEPS))
def test_ranks_that_share_experts_take_the_steps_of_the_unsharded_model(
    folders: dict[str, Path], model: str, world_size: int, replicas: int, e: int, sync: str, checkpointing: bool
) -> None:
    run_ranks(_steps, world_size, str(folders[model]), replicas, e, sync, checkpointing)


def lopsided(rank: int, world_size: int, folder: str, e: int) -> None:
    """All tokens choose experts of the first rank: the others compute none, and must meet the collectives."""
    ref: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference(ref, make_any_batch())
    engine = engine_with(folder, 1, e, optimizer=SGD)
    gradients = capture_gradients(engine)
    engine.train_batch(share(rank, world_size), nll, loss_tokens)
    for name, param in ref.named_parameters():
        torch.testing.assert_close(gradients[name], param.grad, rtol=1e-5, atol=1e-7, msg=name)
    last = gradients["model.layers.3.mlp.experts.down_proj"]
    assert last[:8].abs().max() > 0 and not last[8:].any()


def test_experts_that_get_no_token_have_a_gradient_of_zeros(tmp_path: Path) -> None:
    model = build_reference(tiny_moe("deepseek_v3"))
    for module in model.modules():
        if "e_score_correction_bias" in dict(module.named_buffers(recurse=False)):
            module.get_buffer("e_score_correction_bias")[:8] += 100
    model.save_pretrained(tmp_path / "lopsided")
    run_ranks(lopsided, 2, str(tmp_path / "lopsided"), 2)


def _saves(rank: int, world_size: int, folder: str, out: Path, replicas: int, e: int) -> dict[str, Any]:
    """Save after a step, blocking and in the background, and load both again."""
    engine, other = (engine_with(folder, replicas, e) for _ in range(2))
    engine.train_batch(share(rank, world_size), nll, loss_tokens)
    engine.set_version(3)
    for meta, later in zip(metas(out, "now"), metas(out, "later"), strict=True):
        engine.save(meta)
        engine.save(later, blocking=False)
        engine.wait_for_save()
    before = whole(engine)
    for kind in ("now", "later"):
        dcp, hf = metas(out, kind)
        other.load(dcp)
        assert same(whole(other), before) and other.get_version() == 3
        other.train_batch(share(rank, world_size), nll, loss_tokens)
        other.load(hf)
        assert same(weights(other), weights(engine))
    return {"whole": before, "fingerprint": fingerprint(engine)}


def _loads(rank: int, world_size: int, folder: str, out: Path, replicas: int, e: int) -> dict[str, Any]:
    engine, hf = (engine_with(folder, replicas, e) for _ in range(2))
    engine.load(metas(out, "later")[0])
    hf.load(metas(out, "later")[1])
    assert same(weights(hf), weights(engine)) and engine.get_version() == 3
    return {"whole": whole(engine), "fingerprint": fingerprint(engine)}


def check_loads(folder: Path, out: Path, saved_by: tuple[int, int, int], loaded_by: list[tuple[int, int, int]]) -> None:
    world_size, *mesh = saved_by
    saved = run_ranks(_saves, world_size, str(folder), out, *mesh)[0]
    assert contents(out / "now_hf") == contents(out / "later_hf")
    assert any(".experts.0.gate_proj" in name for name in safe_names(out / "now_hf"))
    for world_size, *mesh in loaded_by:
        for found in run_ranks(_loads, world_size, str(folder), out, *mesh):
            assert same(found["whole"], saved["whole"]) and found["fingerprint"] == saved["fingerprint"]


def safe_names(folder: Path) -> list[str]:
    return [name for path in folder.glob("*.safetensors") for name in safe_open(path, "pt").keys()]  # noqa: SIM118


def test_checkpoints_of_shared_experts_load_into_shards_and_back(folders: dict[str, Path], tmp_path: Path) -> None:
    check_loads(folders["uneven"], tmp_path / "shared", (2, 1, 2), [(2, 1, 1)])
    check_loads(folders["uneven"], tmp_path / "shards", (2, 1, 1), [(2, 1, 2)])


def _refusals(rank: int, world_size: int, dense: str, moe: str) -> None:
    uneven = "expert_parallel_size is 2, but Qwen3MoeForCausalLM has 5 experts in a layer; expected one of [1], which"
    for folder, changes, words in (
        (
            dense,
            {},
            "expert_parallel_size is 2, but transformers has no rules to split experts of Qwen3ForCausalLM; set",
        ),
        (moe, {}, uneven),
        (moe, {"use_lora": True}, "but config key 'use_lora' is true: experts with adapters are not split; set"),
        (moe, {"backend": "fsdp:e3"}, "expert_parallel_size is 3, with 2 ranks in a replica; expected one of [1, 2]"),
        (moe, {"backend": "fsdp:t2e2"}, "with expert and tensor parallelism, which is not supported yet"),
    ):
        with patch.object(torch.nn.Module, "to_empty") as memory, pytest.raises(ConfigError, match=re.escape(words)):
            make_engine(folder, **{"backend": "fsdp:e2", **changes})
        assert memory.call_count == 0
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(tiny_moe("qwen3_moe"))
        model.model.layers[0].mlp.experts.scale = torch.nn.Parameter(torch.ones(3))
    strategy = ParallelStrategy(world_size, expert_parallel_size=world_size)
    meshes = open_meshes(strategy, torch.device("cpu"), timedelta(seconds=60))
    with pytest.raises(
        ConfigError, match=r"all experts of Qwen3MoeForCausalLM share model\.layers\.0\.mlp\.experts\.scale"
    ):
        shard_experts(model, TrainEngineConfig(), meshes)  # each rank would train its own copy


def test_experts_that_cannot_be_split_are_refused_on_all_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    write_model_folder(tmp_path / "dense", tiny_qwen3())
    write_model_folder(tmp_path / "five", tiny_moe("qwen3_moe", 5))
    run_ranks(_refusals, 2, str(tmp_path / "dense"), str(tmp_path / "five"))
