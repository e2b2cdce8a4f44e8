"""Exports of models with adapters of PEFT or of other libraries: merged as PEFT merges them, or
refused.
"""

import copy
import json
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    OFTConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from transformers import AutoModelForCausalLM, PreTrainedModel, ZambaConfig, ZambaForCausalLM

from holdfast.engine import WeightUpdateMeta, publish_weights
from holdfast.engine.api import HFExportOptions
from holdfast.engine.hf.adapter_folder import load_adapters, require_adapters, save_adapters
from holdfast.engine.hf.load import load_hf
from holdfast.engine.hf.save import save_hf
from holdfast.engine.lora.adapters import describe_adapters
from holdfast.utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from tests.engine.hf_models import ARCHITECTURES, sharded, tiny_model
from tests.engine.models import build_reference, tiny_qwen3
from tests.helpers import run_ranks

ATTENTION = {"gpt2": ["c_attn", "c_proj", "c_fc"]}


def adapted(name: str, **options: object) -> PeftModel:
    """A ``PeftModel`` whose adapters are random."""
    keys = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ATTENTION.get(name, ["q_proj", "v_proj", "o_proj"]),
        **options,
    }
    model = get_peft_model(tiny_model(name), LoraConfig(fan_in_fan_out=name == "gpt2", **keys))  # type: ignore[arg-type]
    torch.manual_seed(5)
    for key, param in model.named_parameters():
        if "lora_" in key:
            param.data.normal_(0, 0.3)
    assert isinstance(model, PeftModel)
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_peft_model_and_the_model_inside_are_exported_merged_as_peft_merges_them(
    name: str, tmp_path: Path
) -> None:
    model = adapted(name, use_rslora=name == "llama")
    save_hf(model, tmp_path / "outer")  # type: ignore[arg-type]
    save_hf(model.get_base_model(), tmp_path / "inner")  # type: ignore[arg-type]
    merged = copy.deepcopy(model).merge_and_unload()
    merged.save_pretrained(tmp_path / "theirs")
    files = [
        (tmp_path / folder / "model.safetensors").read_bytes()
        for folder in ("outer", "inner", "theirs")
    ]
    assert files[0] == files[1] == files[2]
    assert (tmp_path / "outer" / "config.json").read_text() == (
        tmp_path / "inner" / "config.json"
    ).read_text()
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "outer")) is type(merged)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpoint": checkpoint_wrapper,
    "offload": offload_wrapper,
    "both": lambda module: offload_wrapper(checkpoint_wrapper(module)),
}


def wrap_blocks(model: PreTrainedModel, wrap: Callable[[nn.Module], nn.Module]) -> PreTrainedModel:
    """Put a wrapper around every block, as Accelerate does for activation checkpointing."""
    blocks: Any = model.get_submodule("model.layers")
    for number in range(len(blocks)):
        blocks[number] = wrap(blocks[number])
    return model


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_adapters_in_wrapped_blocks_are_exported_as_without_the_wrappers(
    wrapper: str, tmp_path: Path
) -> None:
    plain = adapted("qwen3_tied", modules_to_save=["input_layernorm"])
    wrapped = copy.deepcopy(plain)
    wrap_blocks(wrapped.get_base_model(), WRAPPERS[wrapper])  # type: ignore[arg-type]
    ours, theirs = tmp_path / "wrapped", tmp_path / "plain"
    save_hf(wrapped, ours)  # type: ignore[arg-type]
    save_hf(plain, theirs)  # type: ignore[arg-type]
    weights = "model.safetensors"
    assert (ours / weights).read_bytes() == (theirs / weights).read_bytes()
    save_adapters(wrapped, tmp_path / "wrapped peft", HFExportOptions())
    save_adapters(plain, tmp_path / "plain peft", HFExportOptions())
    weights = "adapter_model.safetensors"
    one, two = (tmp_path / f"{name} peft" / weights for name in ("wrapped", "plain"))
    assert one.read_bytes() == two.read_bytes()
    assert describe_adapters(wrapped) == describe_adapters(plain)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    exported = AutoModelForCausalLM.from_pretrained(ours)
    torch.testing.assert_close(exported(input_ids=ids).logits, plain(input_ids=ids).logits)


def _export_wrapped(rank: int, world_size: int, root: Path) -> bool:
    model = adapted("qwen3_untied").get_base_model()
    model = sharded(wrap_blocks(model, checkpoint_wrapper))  # type: ignore[arg-type]
    save_hf(model, root / "export")
    save_adapters(model, root / "adapters", HFExportOptions())
    for version, form in enumerate(("disk", "adapter"), 1):
        for name, param in model.named_parameters():
            param.requires_grad_("lora_" in name)
        meta = WeightUpdateMeta(form, str(root / form))  # type: ignore[arg-type]
        publish_weights(model, meta, version=version, servers=[])

    # A load gives every rank the values again.
    before = {name: param.full_tensor() for name, param in model.named_parameters()}  # type: ignore[operator]
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.zero_()
    load_adapters(model, root / "adapters")
    return all(
        torch.equal(before[name], param.full_tensor())  # type: ignore[operator]
        for name, param in model.named_parameters()
    )


def test_sharded_adapters_in_wrapped_blocks_are_exported_published_and_loaded(
    tmp_path: Path,
) -> None:
    assert run_ranks(_export_wrapped, 2, tmp_path) == [True, True]
    plain = adapted("qwen3_untied")
    plain.save_pretrained(str(tmp_path / "theirs"))
    plain.merge_and_unload().save_pretrained(tmp_path / "merged")
    for name, theirs, folders in (
        ("model.safetensors", "merged", ("export", "disk/v00000001")),
        ("adapter_model.safetensors", "theirs", ("adapters", "adapter/v00000002")),
    ):
        expected = (tmp_path / theirs / name).read_bytes()
        for folder in folders:
            assert (tmp_path / folder / name).read_bytes() == expected, folder


def _leave_out_inside(_: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
    for key in list(state):
        if key.startswith(f"{prefix}inside."):
            state[key.replace("inside.", "", 1)] = state.pop(key)


class Renamed(nn.Module):
    """A wrapper that leaves its own name out of state dicts, and is not one of torch's."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.register_state_dict_post_hook(_leave_out_inside)


def test_an_adapter_without_a_weight_in_the_files_is_refused_instead_of_left_out(
    tmp_path: Path,
) -> None:
    model = wrap_blocks(adapted("llama").get_base_model(), Renamed)  # type: ignore[arg-type]
    with pytest.raises(
        CheckpointMismatchError,
        match=r"layers\.0\.inside\.self_attn\.o_proj\.weight \(6 such\) has an adapter, but the "
        r"state_dict of LlamaForCausalLM has no weight of this name",
    ):
        save_hf(model, tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_fully_trained_layers_are_exported_as_trained_and_merged_adapters_count_once(
    tmp_path: Path,
) -> None:
    model = adapted("qwen3_untied", modules_to_save=["lm_head"])
    model.get_base_model().lm_head.modules_to_save["default"].weight.data.add_(1)  # type: ignore[union-attr, operator]
    save_hf(model, tmp_path / "live")  # type: ignore[arg-type]
    model.merge_adapter()
    save_hf(model, tmp_path / "merged")  # type: ignore[arg-type]
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("live", "merged"))
    assert one == two
    exported, before = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "live"),
        tiny_model("qwen3_untied"),
    )
    assert torch.equal(exported.lm_head.weight, before.lm_head.weight + 1)  # type: ignore[union-attr, operator]


def test_adapters_that_are_more_than_a_product_are_refused(tmp_path: Path) -> None:
    ia3 = get_peft_model(
        tiny_model("llama"), IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    )
    for model, reason in (
        (adapted("llama", use_dora=True), "variant of LoRA"),
        (adapted("llama", target_modules=["embed_tokens"]), "no linear layer with LoRA"),
        (ia3, "no linear layer with LoRA"),
    ):
        with pytest.raises(CheckpointMismatchError, match=f"{reason}.*merge_and_unload"):
            save_hf(model, tmp_path / "never")  # type: ignore[arg-type]
        assert not (tmp_path / "never").exists()


def test_an_adapter_on_a_tied_head_is_refused_instead_of_left_out(tmp_path: Path) -> None:
    model = get_peft_model(
        build_reference(tiny_qwen3()), LoraConfig(r=2, target_modules=["lm_head"])
    )
    with pytest.raises(
        CheckpointMismatchError,
        match=r"lm_head\.weight has an adapter and is tied to model\.embed_tokens",
    ):
        save_hf(model, tmp_path / "x")  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()


def test_an_adapter_on_a_weight_that_other_layers_share_is_refused(tmp_path: Path) -> None:
    config = ZambaConfig(
        vocab_size=15,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        n_mamba_heads=2,
        mamba_d_state=4,
        mamba_dt_rank=2,
        use_mamba_kernels=False,
    )
    # The files hold this one of the two names.
    layer = "model.layers.2.shared_transf.self_attn.q_proj"
    model = get_peft_model(ZambaForCausalLM(config), LoraConfig(r=2, target_modules=[layer]))
    with pytest.raises(
        CheckpointMismatchError,
        match=r"layers\.2\S+ has an adapter and is tied to model\.layers\.4\.",
    ):
        save_hf(model, tmp_path / "x")  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()


def test_a_head_that_was_trained_apart_from_its_embedding_is_exported_as_not_tied(
    tmp_path: Path,
) -> None:
    model = adapted("qwen3_tied", modules_to_save=["lm_head"])
    model.get_base_model().lm_head.modules_to_save["default"].weight.data.add_(1)  # type: ignore[union-attr, operator]
    save_hf(model, tmp_path / "out")  # type: ignore[arg-type]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert model.config.tie_word_embeddings is True
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = exported.state_dict()
    embedding = tiny_model("qwen3_tied").state_dict()["model.embed_tokens.weight"]
    assert torch.equal(found["model.embed_tokens.weight"], embedding)
    assert torch.equal(found["lm_head.weight"], embedding + 1)

    # Loads of the export build the model that its config says.
    assert load_hf(AutoModelForCausalLM.from_config(exported.config), tmp_path / "out") == []


def test_a_parameter_that_the_architecture_does_not_have_is_an_error(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.extra = nn.Linear(2, 2)
    with pytest.raises(
        CheckpointMismatchError, match=r"LlamaForCausalLM has no parameter extra\.weight \(2 such\)"
    ):
        save_hf(model, tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_a_peft_model_is_saved_as_peft_saves_it(tmp_path: Path) -> None:
    for name, options in (
        ("gpt2", {}),
        ("qwen3_untied", {"modules_to_save": ["lm_head"], "use_dora": True}),
    ):
        model = adapted(name, **options)
        save_adapters(model, tmp_path / name, HFExportOptions())
        model.save_pretrained(str(tmp_path / f"{name} theirs"))
        one, two = (
            load_file(tmp_path / folder / "adapter_model.safetensors")
            for folder in (name, f"{name} theirs")
        )
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
        ids = torch.tensor([[3, 1, 4, 1, 5]])
        again = PeftModel.from_pretrained(tiny_model(name), str(tmp_path / name)).eval()
        assert torch.equal(again(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    with pytest.raises(CheckpointMismatchError, match="has no adapters of PEFT"):
        save_adapters(tiny_model("llama"), tmp_path / "never", HFExportOptions())
    beside = adapted("qwen3_untied")
    beside.get_base_model().lm_head.requires_grad_(True)  # type: ignore[union-attr, operator]
    with pytest.raises(CheckpointMismatchError, match=r"lm_head.*is trained beside the adapters"):
        save_adapters(beside, tmp_path / "never", HFExportOptions())


SHARING: dict[str, Callable[[], Any]] = {
    "tied copies": lambda: LoraConfig(
        r=2,
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
    ),
    "projections of all layers": lambda: VeraConfig(r=2, target_modules=["q_proj"]),
    "buffers that are not stored": lambda: OFTConfig(oft_block_size=4, target_modules=["q_proj"]),
}


@pytest.mark.parametrize("case", SHARING)
def test_adapters_that_share_tensors_or_add_buffers_are_saved_as_peft_saves_them(
    case: str, tmp_path: Path
) -> None:
    model = get_peft_model(tiny_model("qwen3_tied"), SHARING[case]())
    save_adapters(model, tmp_path / "ours", HFExportOptions())
    model.save_pretrained(str(tmp_path / "theirs"))
    one, two = (
        (tmp_path / folder / "adapter_model.safetensors").read_bytes()
        for folder in ("ours", "theirs")
    )
    assert one == two


def test_several_active_adapters_are_refused_by_save_publish_and_load(tmp_path: Path) -> None:
    save_adapters(adapted("llama"), tmp_path / "one", HFExportOptions())
    model = adapted("llama").get_base_model()
    model.add_adapter(LoraConfig(r=4, target_modules=["k_proj"]), "other")  # type: ignore[operator]
    model.set_adapter(["default", "other"])  # type: ignore[operator]
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name and ".default." in name)
    for use in (require_adapters, lambda model: load_adapters(model, tmp_path / "one")):
        with pytest.raises(
            CheckpointMismatchError, match=r"has 2 active adapters \(default, other\)"
        ):
            use(model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"alpha_pattern": {"v_proj": 64}}, {"rank_pattern": {"v_proj": 1}}]
)
def test_adapters_that_servers_would_scale_otherwise_are_saved_and_not_published(
    options: dict[str, object], tmp_path: Path
) -> None:
    model = adapted("qwen3_untied", **options)
    meta = WeightUpdateMeta("adapter", str(tmp_path / "w"))
    expected = r"scale all of them by 2 \(lora_alpha 8, r 4\), and model.*v_proj.* type 'disk'"
    with pytest.raises(ConfigError, match=expected):
        publish_weights(model, meta, version=1, servers=[])  # type: ignore[arg-type]
    assert not (tmp_path / "w").exists()
    save_adapters(model, tmp_path / "export", HFExportOptions())

    # Patterns that agree are published, and so is rsLoRA, which takes one root for all layers.
    both = {"alpha_pattern": {"v_proj": 2}, "rank_pattern": {"v_proj": 1}}
    for alike in (both, {"use_rslora": True}):
        require_adapters(adapted("qwen3_untied", **alike))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha_pattern": {"v_proj": 64}}, r"count 16 \(alpha 64, rank 4\), here 2: .*v_proj"),
        ({"alpha_pattern": {"0.self_attn.q_proj": 4}}, r"here 2: model.layers.0.self_attn.q_proj"),
        ({"init_lora_weights": "pissa"}, r"began with init_lora_weights 'pissa', here True"),
        ({"init_lora_weights": "olora"}, r"began with init_lora_weights 'olora', here True"),
    ],
)
def test_a_folder_whose_adapters_mean_something_else_here_is_refused(
    options: dict[str, object], message: str, tmp_path: Path
) -> None:
    there = adapted("llama", **options)
    there.save_pretrained(str(tmp_path / "theirs"))
    here = adapted("llama")
    before = copy.deepcopy(here.state_dict())
    with pytest.raises(CheckpointMismatchError, match=message):
        load_adapters(here, tmp_path / "theirs")  # type: ignore[arg-type]
    assert all(torch.equal(before[key], value) for key, value in here.state_dict().items())
    load_adapters(adapted("llama", **options), tmp_path / "theirs")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("peft_type", "NEWTYPE", r"a peft_type that the installed PEFT does not know, 'NEWTYPE'"),
        ("r", 0, r"no scaling of model\S+: .*zero"),
        ("lora_alpha", "x", r"no scaling of model\S+: unsupported"),
        ("rank_pattern", [1], r"no scaling of model\S+: 'list' object"),
        (
            "alpha_pattern",
            {"(": 2},
            r"no scaling of model\S+: missing \)",
        ),
    ],
)
def test_a_damaged_or_newer_config_of_adapters_is_refused_by_its_name(
    key: str, value: object, message: str, tmp_path: Path
) -> None:
    model = adapted("llama")
    save_adapters(model, tmp_path / "damaged", HFExportOptions())
    path = tmp_path / "damaged" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    error = ConfigError if key == "peft_type" else CheckpointCorruptError
    with pytest.raises(error, match=f"{re.escape(str(path))}.*{message}"):
        load_adapters(model, tmp_path / "damaged")  # type: ignore[arg-type]


def test_a_model_with_adapters_in_a_part_without_their_config_is_saved_without_it() -> None:
    model = nn.ModuleDict({"policy": nn.Sequential(nn.Linear(4, 4))})
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"]), model["policy"])
    assert describe_adapters(model["policy"]) is not None and describe_adapters(model) is None


def test_integer_counters_of_a_fully_trained_layer_keep_their_dtype(tmp_path: Path) -> None:
    model = get_peft_model(
        nn.Sequential(OrderedDict(layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))),  # type: ignore[arg-type]
        LoraConfig(r=2, target_modules=["layer"], modules_to_save=["norm"]),
    )
    save_adapters(model, tmp_path / "saved", HFExportOptions(torch.bfloat16))
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    (counts,) = (
        tensor.dtype for name, tensor in saved.items() if name.endswith("num_batches_tracked")
    )
    assert counts == torch.int64 and torch.bfloat16 in {tensor.dtype for tensor in saved.values()}
