"""Twins probe the architecture, independently of config values and of how the process computes, and
are small.
"""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2Config,
    HunYuanMoEV1Config,
    LlamaConfig,
    PreTrainedModel,
)

from holdfast.engine.config import RouterReplayConfig
from holdfast.engine.training import probe_model
from holdfast.engine.training.probe_model import Twins, with_few_layers
from holdfast.engine.training.weights import give_memory
from tests.engine.architectures.tiny import tiny_config
from tests.engine.hf_models import sharded
from tests.engine.models import build_reference, tiny_qwen3, tiny_qwen3_moe, write_model_folder
from tests.engine.seeing import config_of
from tests.engine.test_fsdp_engine import make_batch, make_engine, reference
from tests.helpers import run_ranks

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")

BACKENDS: Any = torch.backends
PRODUCTS = (BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul)


def _with_tf32(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    BACKENDS.fp32_precision = "tf32"
    found: dict[str, Any] = {}
    for packed in (True, False):
        engine = make_engine(folder, pack_sequences=packed)
        found[f"head, packed {packed}"] = engine._scoring_head is not None
        engine.destroy()
    model = build_reference(tiny_qwen3())
    with torch.no_grad(), Twins(model, CPU).of(model.config, torch.float32):
        found["inside"] = [product.fp32_precision for product in PRODUCTS]
    found["after"] = [product.fp32_precision for product in PRODUCTS]
    BACKENDS.fp32_precision = "ieee"
    found["set later"] = [product.fp32_precision for product in PRODUCTS]
    return found


def test_tf32_that_was_set_for_all_products_is_suspended_for_twins_alone(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    (found,) = run_ranks(_with_tf32, 1, str(tmp_path / "model"))
    assert found == {
        "head, packed True": True,
        "head, packed False": True,
        "inside": ["ieee"] * 2,
        "after": ["tf32"] * 2,
        "set later": ["ieee"] * 2,
    }


def _with_older_functions(rank: int, world_size: int) -> list[Any]:
    model, found = build_reference(tiny_qwen3()), []
    for precision in ("high", "medium", "highest"):
        torch.set_float32_matmul_precision(precision)
        before = [product.fp32_precision for product in PRODUCTS]
        with torch.no_grad(), Twins(model, CPU).of(model.config, torch.float32):
            assert [product.fp32_precision for product in PRODUCTS] == ["ieee"] * 2
            assert torch.get_float32_matmul_precision() == "highest"
        assert [product.fp32_precision for product in PRODUCTS] == before
        found.append(torch.get_float32_matmul_precision())
    return found


def test_precision_that_was_set_by_the_older_function_comes_back() -> None:
    assert run_ranks(_with_older_functions, 1) == [["high", "medium", "highest"]]


def test_a_config_with_a_number_of_experts_for_each_layer_starts(tmp_path: Path) -> None:
    """tencent/Hunyuan-A13B-Instruct has such a config."""
    each = {"num_shared_expert": [1, 1, 1], "moe_topk": [2, 2, 2], "num_hidden_layers": 3}
    config = HunYuanMoEV1Config(**{**tiny_config("hunyuan_v1_moe").to_dict(), **each})
    model = write_model_folder(tmp_path / "model", config)
    engine, batch = make_engine(tmp_path / "model"), make_batch((9, 4))
    torch.testing.assert_close(
        engine.forward_batch(batch), reference(model, batch)[1], rtol=0, atol=2e-5
    )
    engine.destroy()


def test_the_probes_of_a_start_share_a_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model_folder(tmp_path / "dense", tiny_qwen3(layers=6))
    write_model_folder(tmp_path / "experts", tiny_qwen3_moe())
    n_layers = list[int]()

    def counted(twin: PreTrainedModel, *args: Any) -> list[str]:
        n_layers.append(twin.config.num_hidden_layers)
        return give_memory(twin, *args)

    monkeypatch.setattr(probe_model, "give_memory", counted)
    # Packing, shared prompts and the head. Then packing, the head and the routers.
    make_engine(tmp_path / "dense", enable_tree_training=True).destroy()
    assert n_layers == [2]
    make_engine(tmp_path / "experts", router_replay=RouterReplayConfig("R3")).destroy()
    assert n_layers == [2, 2]


def _other_attention(config: Any) -> None:
    config.text_config._attn_implementation = "eager"


def _other_rotation(config: Any) -> None:
    config.text_config.rope_parameters["full_attention"]["rope_theta"] = 7.0


def _undeclared_key(config: Any) -> None:
    config.text_config.attention_chunk_size = 8


@pytest.mark.parametrize("change", [_other_attention, _other_rotation, _undeclared_key])
def test_a_twin_serves_again_for_an_equal_config_alone(change: Callable[[Any], None]) -> None:
    model = build_reference(tiny_config("gemma3"))
    config, twins = copy.deepcopy(model.config), Twins(model, CPU)
    with twins.of(config, torch.float32) as first:
        weights = list(first.parameters())
    with twins.of(copy.deepcopy(config), torch.float32) as again:
        assert again is first
    change(config)
    with twins.of(config, torch.float32) as other:
        assert other is not first
        assert {param.untyped_storage().nbytes() for param in weights} == {0}, "one at a time"
    with twins.of(config, torch.bfloat16) as half:
        assert half is not other and half.dtype == torch.bfloat16
    with suppress(ValueError), twins.of(config, torch.bfloat16) as failed:
        raise ValueError("inside of a probe")
    assert failed is half
    with twins.of(config, torch.bfloat16) as new:
        assert new is not half
    twins.close()
    with twins.of(config, torch.bfloat16) as last:
        assert last is not new


def _after_an_error_on_one_rank(rank: int, world_size: int) -> list[list[float]]:
    with torch.device("meta"):
        model = sharded(AutoModelForCausalLM.from_config(tiny_qwen3()))
    twins, found = Twins(model, CPU), []
    for fails in (rank == 0, False):
        with suppress(ValueError), torch.no_grad(), twins.of(model.config, torch.float32) as twin:
            logits = twin(input_ids=torch.arange(5)[None], use_cache=False).logits
            found.append(logits.flatten().tolist())
            if fails:
                raise ValueError("inside of a probe")
    return found


def test_a_rank_whose_probe_failed_goes_on_with_a_new_twin_and_its_peers_with_theirs() -> None:
    for first, second in run_ranks(_after_an_error_on_one_rank, 2, timeout_s=20):
        assert first == second


def _under_tensor_parallelism(rank: int, world_size: int) -> list[str]:
    mesh, model = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp")),
        build_reference(tiny_qwen3()),
    )
    parallelize_module(model.model.embed_tokens, mesh["tp"], RowwiseParallel())
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh["fsdp"])
    with torch.no_grad(), Twins(model, CPU).of(model.config, torch.float32) as twin:
        params: list[Any] = list(twin.parameters())
        return [f"{param.device_mesh.mesh_dim_names} {param.placements}" for param in params]


def test_a_twin_of_a_model_under_tensor_parallelism_is_sharded_over_its_fsdp_mesh() -> None:
    for found in run_ranks(_under_tensor_parallelism, 4):
        assert set(found) == {"('fsdp',) (Shard(dim=0),)"}


def _units(rank: int, world_size: int) -> list[list[str]]:
    model = AutoModelForImageTextToText.from_config(config_of("glm4v"), dtype=torch.float32)
    fully_shard(model.get_input_embeddings())
    sharded(model)
    with torch.no_grad(), Twins(model, CPU).of(model.config, torch.float32) as twin:
        return [
            [name for name, module in each.named_modules() if isinstance(module, FSDPModule)]
            for each in (model, twin)
        ]


def test_a_twin_shards_no_other_embedding_than_its_model_does() -> None:
    ((of_model, of_twin),) = run_ranks(_units, 1)
    assert "model.language_model.embed_tokens" in of_model
    assert of_twin == of_model


@contextmanager
def most_elements() -> Iterator[dict[str, int]]:
    """Yield the largest number of elements of new parameters in memory at any forward of a
    module.
    """
    found = {"parameters": 0}

    # Engines of earlier tests may still exist.
    others = [thing for thing in gc.get_objects() if isinstance(thing, nn.Parameter)]
    of_others = {id(param) for param in others}

    def count(*_: Any) -> None:
        params = {
            id(thing): thing
            for thing in gc.get_objects()
            if isinstance(thing, nn.Parameter) and id(thing) not in of_others
        }.values()
        local = [param.to_local() if isinstance(param, DTensor) else param for param in params]
        elements = sum(
            each.untyped_storage().nbytes() // each.element_size()
            for each in local
            if not each.is_meta
        )
        found["parameters"] = max(found["parameters"], elements)

    hook = nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: count() if is_head(module) else None
    )
    try:
        yield found
    finally:
        hook.remove()
        others.clear()  # until now, so that none of their ids is a new parameter's


def is_head(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == 15


def test_looking_for_the_head_takes_the_memory_of_two_layers_before_the_model_has_any(
    tmp_path: Path,
) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3(layers=12, tied=False))
    few = sum(
        param.numel() for param in build_reference(tiny_qwen3(layers=2, tied=False)).parameters()
    )
    gc.collect()
    with most_elements() as found:
        engine = make_engine(tmp_path / "model", pack_sequences=False)
    assert engine._scoring_head is not None
    assert 0 < found["parameters"] <= 1.2 * few
    engine.destroy()


def test_few_layers_are_one_of_each_kind_and_two_at_least() -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2
    config: Any = LlamaConfig(num_hidden_layers=6)
    config.layer_types, config.moe_topk = kinds, [1, 1, 1, 1, 2, 2]
    few: Any = with_few_layers(config)
    assert few.layer_types == ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]
    assert few.moe_topk == [1, 1, 1, 2] and few.num_hidden_layers == 4
    assert config.layer_types == kinds and config.num_hidden_layers == 6
    assert with_few_layers(GPT2Config(n_layer=48)).n_layer == 2
