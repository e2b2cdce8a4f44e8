"""`load_hf` loads what `from_pretrained` would load, equal to the bit, and exports use the same
names.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Llama4Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, Transpose, WeightConverter

from holdfast.engine.hf.load import load_hf
from holdfast.engine.hf.save import save_hf
from holdfast.utils.errors import CheckpointMismatchError
from tests.engine.hf_models import sharded, tiny_model
from tests.helpers import run_ranks
from tests.tiers import slow_but

TEXT: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MULTIMODAL: dict[str, PretrainedConfig] = {
    "Qwen3.5": Qwen3_5Config(
        text_config=TEXT | LINEAR,
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 16,
        },
    ),
    "Gemma3": Gemma3Config(
        text_config=TEXT,
        vision_config=VISION | {"image_size": 8, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=30,
        boi_token_index=29,
        eoi_token_index=28,
    ),
    "Llama4": Llama4Config(
        text_config=TEXT
        | {"intermediate_size_mlp": 24, "num_local_experts": 2, "interleave_moe_layer_step": 2},
        vision_config=VISION
        | {"image_size": 8, "patch_size": 4, "vision_output_dim": 16, "projector_input_dim": 16},
    ),
}


def write_multimodal(folder: Path, config: PretrainedConfig) -> None:
    """Write a vision-language model with random weights as it saves itself."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    model.save_pretrained(folder)


def _empty(folder: Path) -> PreTrainedModel:
    """The causal language model of a folder, with weights other than the folder's."""
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in model.state_dict().items()
    }


def _loads_as_from_pretrained(rank: int, world_size: int, root: Path) -> None:
    for name in MULTIMODAL:
        folder = root / name
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = sharded(_empty(folder))
        assert load_hf(model, folder) == [], name
        found = _whole(model)
        assert found.keys() == expected.state_dict().keys(), name
        for key, value in expected.state_dict().items():
            assert torch.equal(found[key], value), f"{name}: {key}"
        save_hf(model, root / f"{name} ours")
        if rank == 0:
            expected.save_pretrained(root / f"{name} theirs")
            ours, theirs = (
                root / f"{name} {whose}" / "model.safetensors" for whose in ("ours", "theirs")
            )
            assert ours.read_bytes() == theirs.read_bytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("world_size", slow_but([2], [1, 2]))
def test_a_multimodal_folder_loads_and_is_exported_as_a_causal_model(
    world_size: int, tmp_path: Path
) -> None:
    for name, config in MULTIMODAL.items():
        write_multimodal(tmp_path / name, config)
    run_ranks(_loads_as_from_pretrained, world_size, tmp_path)
    ours = load_file(tmp_path / "Qwen3.5 ours" / "model.safetensors")
    assert "model.language_model.norm.weight" in ours, "the names are the folder's"
    assert not any("visual" in key for key in ours)


@pytest.mark.parametrize(
    "stranger",
    ["language_model.model.layers.2.input_layernorm.weight", "language_model.lm_head.bias"],
)
def test_a_tensor_the_language_model_lacks_is_refused_in_multimodal_folders_too(
    stranger: str, tmp_path: Path
) -> None:
    write_multimodal(tmp_path, MULTIMODAL["Llama4"])
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {stranger: torch.zeros(16)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatchError, match=f"unexpected tensor {stranger} .1 in all"):
        load_hf(_empty(tmp_path), tmp_path)


def test_parts_beside_the_model_are_refused_in_a_folder_not_multimodal(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"vision_model.weight": torch.zeros(16)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatchError, match=r"unexpected tensor vision_model\.weight"):
        load_hf(tiny_model("llama"), tmp_path)


def _renamed(source: Path, target: Path, rename: Callable[[str], str]) -> Path:
    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    save_file({rename(key): value for key, value in weights.items()}, target / "model.safetensors")
    return target


def _without(prefix: str) -> Callable[[str], str]:
    return lambda key: key.removeprefix(prefix)


def test_a_base_model_prefix_may_be_absent_from_some_tensors(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "good")
    for name, rename in {
        "none": _without("model."),
        "layers": lambda key: key.removeprefix("model.") if ".layers." in key else key,
    }.items():
        folder = _renamed(tmp_path / "good", tmp_path / name, rename)
        model = tiny_model("llama", seed=1)
        assert load_hf(model, folder) == []
        assert all(
            torch.equal(value, tiny_model("llama").state_dict()[key])
            for key, value in model.state_dict().items()
        )


def test_a_tensor_that_is_there_under_two_names_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"norm.weight": torch.zeros(16)}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointMismatchError,
        match=r"tensor norm\.weight \(1 such\) fills what another one fills too",
    ):
        load_hf(tiny_model("llama"), tmp_path)


class Doubled(ConversionOps):
    """Arithmetic during the load."""

    def convert(
        self, input_dict: dict, source_patterns: list[str], target_patterns: list[str], **_: object
    ) -> dict:
        value = next(iter(input_dict.values()))
        return {target_patterns[0]: (value[0] if isinstance(value, list) else value) * 2}


FUSED = {
    "two tensors side by side": (
        WeightConverter(
            ["mlp.a.weight", "mlp.b.weight"],
            "mlp.down_proj.weight",
            operations=[Concatenate(dim=1)],
        ),
        lambda weight: {"a": weight[:, :12], "b": weight[:, 12:]},
    ),
    "two tensors one above the other, transposed": (
        WeightConverter(
            ["mlp.a.weight", "mlp.b.weight"],
            "mlp.down_proj.weight",
            operations=[Concatenate(dim=0), Transpose(0, 1)],
        ),
        lambda weight: {"a": weight.T[:12], "b": weight.T[12:]},
    ),
}
"""Tensors that replace one weight in a folder, and how transformers makes the weight from them."""


def _write_fused(folder: Path, kind: str) -> None:
    tiny_model("llama").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for key in [key for key in weights if key.endswith("mlp.down_proj.weight")]:
        parts = FUSED[kind][1](weights.pop(key))
        weights |= {
            key.replace("down_proj", name): part.contiguous() for name, part in parts.items()
        }
    save_file(weights, folder / "model.safetensors")


def _fused_loads(rank: int, world_size: int, root: Path, kind: str) -> None:
    register_checkpoint_conversion_mapping("llama", [FUSED[kind][0]], overwrite=True)
    model = sharded(tiny_model("llama", seed=1))
    load_hf(model, root)
    found = _whole(model)
    assert all(
        torch.equal(found[key], value) for key, value in tiny_model("llama").state_dict().items()
    )
    save_hf(model, root / "ours")
    assert (root / "ours" / "model.safetensors").read_bytes() == (
        root / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("world_size", slow_but([2], [1, 2]))
@pytest.mark.parametrize("kind", FUSED)
def test_weights_stored_in_pieces_load_and_are_exported_in_pieces(
    kind: str, world_size: int, tmp_path: Path
) -> None:
    _write_fused(tmp_path, kind)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    run_ranks(_fused_loads, world_size, tmp_path, kind)


def test_arithmetic_on_load_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    doubling = WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", operations=[Doubled()])
    register_checkpoint_conversion_mapping("llama", [doubling], overwrite=True)
    try:
        model = tiny_model("llama", seed=1)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(CheckpointMismatchError, match="more than rearranging"):
            load_hf(model, tmp_path)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    finally:
        register_checkpoint_conversion_mapping("llama", [], overwrite=True)


def test_a_model_that_was_not_loaded_is_exported_under_its_own_names(tmp_path: Path) -> None:
    write_multimodal(tmp_path, MULTIMODAL["Qwen3.5"])
    model = _empty(tmp_path)
    save_hf(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (tmp_path / whose / "model.safetensors" for whose in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()
    assert "model.norm.weight" in load_file(ours)
