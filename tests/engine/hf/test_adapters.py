"""Exports of models that somebody else has put adapters into: merged, as PEFT merges them, or refused."""

import copy
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from holdfast.engine.api import HFExportOptions
from holdfast.engine.hf.adapter_folder import save_adapters
from holdfast.engine.hf.export import save_hf
from holdfast.utils.errors import CheckpointMismatchError
from tests.engine.hf_models import ARCHITECTURES, tiny_model
from tests.engine.models import build_reference, tiny_qwen3

ATTENTION = {"gpt2": ["c_attn", "c_proj", "c_fc"]}


def adapted(name: str, **options: object) -> PeftModel:
    """A ``PeftModel`` whose adapters are random."""
    keys = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION.get(name, ["q_proj", "v_proj", "o_proj"]), **options}
    model = get_peft_model(tiny_model(name), LoraConfig(fan_in_fan_out=name == "gpt2", **keys))  # type: ignore[arg-type]
    torch.manual_seed(5)
    for key, param in model.named_parameters():
        if "lora_" in key:
            param.data.normal_(0, 0.3)
    assert isinstance(model, PeftModel)
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_peft_model_and_the_model_inside_are_exported_merged_as_peft_merges_them(name: str, tmp_path: Path) -> None:
    model = adapted(name, use_rslora=name == "llama")
    save_hf(model, tmp_path / "outer")  # type: ignore[arg-type]
    save_hf(model.get_base_model(), tmp_path / "inner")  # type: ignore[arg-type]
    merged = copy.deepcopy(model).merge_and_unload()
    merged.save_pretrained(tmp_path / "theirs")
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("outer", "inner", "theirs")]
    assert files[0] == files[1] == files[2]
    assert (tmp_path / "outer" / "config.json").read_text() == (tmp_path / "inner" / "config.json").read_text()
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "outer")) is type(merged)


def test_what_peft_trains_as_a_whole_is_exported_as_trained_and_merged_adapters_count_once(tmp_path: Path) -> None:
    model = adapted("qwen3_untied", modules_to_save=["lm_head"])
    model.get_base_model().lm_head.modules_to_save["default"].weight.data.add_(1)  # type: ignore[union-attr, operator]
    save_hf(model, tmp_path / "live")  # type: ignore[arg-type]
    model.merge_adapter()
    save_hf(model, tmp_path / "merged")  # type: ignore[arg-type]
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("live", "merged"))
    assert one == two
    exported, before = AutoModelForCausalLM.from_pretrained(tmp_path / "live"), tiny_model("qwen3_untied")
    assert torch.equal(exported.lm_head.weight, before.lm_head.weight + 1)  # type: ignore[union-attr, operator]


def test_adapters_that_are_more_than_a_product_are_refused(tmp_path: Path) -> None:
    ia3 = get_peft_model(tiny_model("llama"), IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    for model, reason in (
        (adapted("llama", use_dora=True), "variant of LoRA"),
        (adapted("llama", target_modules=["embed_tokens"]), "no linear layer with LoRA"),
        (ia3, "no linear layer with LoRA"),
    ):
        with pytest.raises(CheckpointMismatchError, match=f"{reason}.*merge_and_unload"):
            save_hf(model, tmp_path / "never")  # type: ignore[arg-type]
        assert not (tmp_path / "never").exists()


def test_an_adapter_on_a_tied_head_is_refused_instead_of_left_out(tmp_path: Path) -> None:
    model = get_peft_model(build_reference(tiny_qwen3()), LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(
        CheckpointMismatchError, match=r"lm_head\.weight has an adapter and is tied to model\.embed_tokens"
    ):
        save_hf(model, tmp_path / "x")  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()


def test_a_parameter_that_the_architecture_does_not_have_is_an_error(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.extra = nn.Linear(2, 2)
    with pytest.raises(CheckpointMismatchError, match=r"LlamaForCausalLM has no parameter extra\.weight \(2 such\)"):
        save_hf(model, tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_a_peft_model_is_saved_as_peft_saves_it(tmp_path: Path) -> None:
    model = adapted("gpt2")
    save_adapters(model, tmp_path / "ours", HFExportOptions())  # type: ignore[arg-type]
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    again = PeftModel.from_pretrained(tiny_model("gpt2"), tmp_path / "ours").eval()
    assert torch.equal(again(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    with pytest.raises(CheckpointMismatchError, match="has no LoRA adapters"):
        save_adapters(tiny_model("llama"), tmp_path / "never", HFExportOptions())
    beside = adapted("qwen3_untied", modules_to_save=["lm_head"])
    with pytest.raises(CheckpointMismatchError, match=r"lm_head.*is trained beside the adapters"):
        save_adapters(beside, tmp_path / "never", HFExportOptions())  # type: ignore[arg-type]
