"""Folders with quantized weights are refused before anything is built. The error names the method
and a remedy.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.utils.quantization_config import Mxfp4Config

from holdfast.engine import FSDPEngine, TrainEngineConfig, load_hf
from holdfast.utils.errors import ConfigError
from tests.engine.hf_models import tiny_config, tiny_model
from tests.engine.test_fsdp_engine import SPEC

DECLARED: dict[str, tuple[dict[str, Any], str]] = {
    "mxfp4": (
        {"quant_method": "mxfp4"},
        r"quantized with mxfp4.*\n.*Mxfp4Config\n.*Mxfp4Config\(dequantize=True\)",
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        r"with fp8.*\n.*\n.*FineGrainedFP8Config\(deq",
    ),
    "bitsandbytes": (
        {"load_in_4bit": True},
        r"with bitsandbytes.*\n.*\n.*device_map='auto'\)\.dequantize\(\)",
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4},
        "with gptq; expected plain ones.*Use the weights that it was made",
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4},
        "with awq; expected plain ones.*Use the weights that it was made from",
    ),
}


def _initialize(folder: Path) -> None:
    engine = FSDPEngine(TrainEngineConfig(path=str(folder), dtype="float32"))
    engine.create_process_group()
    try:
        engine.initialize(None, SPEC)
    finally:
        engine.destroy()


@pytest.mark.parametrize("nested", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", DECLARED)
def test_a_folder_that_declares_quantization_is_refused_with_lines_undoing_it(
    method: str, nested: bool, tmp_path: Path
) -> None:
    quantization, message = DECLARED[method]
    config = tiny_config("llama").to_dict()
    config |= (
        {"text_config": {"quantization_config": quantization}}
        if nested
        else {"quantization_config": quantization}
    )
    (tmp_path / "config.json").write_text(
        json.dumps(config)
    )  # without weights, because only the config is read
    with pytest.raises(ConfigError, match=message):
        _initialize(tmp_path)


NAMES = {
    "mxfp4": "model.layers.0.mlp.experts.gate_up_proj_blocks",
    "fp8": "model.layers.0.mlp.up_proj.weight_scale_inv",
    "GPTQ or AWQ": "model.layers.0.mlp.up_proj.qweight",
    "bitsandbytes": "model.layers.0.mlp.up_proj.weight.absmax",
    "compressed-tensors": "model.layers.0.mlp.up_proj.weight_packed",
}


@pytest.mark.parametrize("method", NAMES)
def test_tensors_named_as_quantized_are_refused_where_the_config_is_silent(
    method: str, tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        weights | {NAMES[method]: torch.zeros(2, dtype=torch.uint8)}, tmp_path / "model.safetensors"
    )
    for load in (_initialize, lambda folder: load_hf(tiny_model("llama", seed=1), folder)):
        with pytest.raises(
            ConfigError, match=f"{tmp_path} holds weights that are quantized with {method}"
        ):
            load(tmp_path)


def test_a_folder_with_an_empty_quantization_config_is_not_quantized(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    _initialize(tmp_path)


def _quantized_gpt_oss(folder: Path) -> None:
    config = GptOssConfig(
        vocab_size=15,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["full_attention"],
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for key in [
        key for key in weights if key.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        experts, inputs, outputs = weights.pop(key).shape
        weights[f"{key}_blocks"] = torch.randint(
            0, 255, (experts, outputs, inputs // 32, 16), dtype=torch.uint8
        )
        weights[f"{key}_scales"] = torch.randint(
            120, 130, (experts, outputs, inputs // 32), dtype=torch.uint8
        )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )


def test_the_lines_that_a_refusal_prints_make_a_folder_that_loads(tmp_path: Path) -> None:
    folder, plain = tmp_path / "quantized", tmp_path / "plain"
    torch.manual_seed(0)
    _quantized_gpt_oss(folder)
    with pytest.raises(ConfigError, match="quantized with mxfp4") as refusal:
        _initialize(folder)
    *_, imports, load, save = str(refusal.value).split("\n")
    exec(
        "\n".join(
            line.strip().replace("<new folder>", str(plain)) for line in (imports, load, save)
        )
    )
    model = AutoModelForCausalLM.from_config(
        GptOssConfig.from_pretrained(plain), dtype=torch.float32
    )
    assert load_hf(model, plain) == []
    expected = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    ).state_dict()
    assert all(
        torch.equal(value, expected[key].float()) for key, value in model.state_dict().items()
    )
