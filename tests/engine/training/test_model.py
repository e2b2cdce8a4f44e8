"""Models built without memory equal those built normally: blocks, buffers, dropout, gradient
checkpointing.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from holdfast.engine import TrainEngineConfig
from holdfast.engine.training.model import build_on_meta
from holdfast.engine.training.sharding import block_classes
from holdfast.engine.training.weights import compute_buffers, draw_weights, give_memory
from holdfast.utils.errors import ConfigError
from tests.engine.hf_models import ARCHITECTURES, tiny_config

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 15,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
MORE: dict[str, PretrainedConfig] = {
    "llama with scaled rotary frequencies": LlamaConfig(
        **SIZES,
        intermediate_size=24,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "opt": OPTConfig(**SIZES, ffn_dim=16, word_embed_proj_dim=16, max_position_embeddings=32),
    "bloom": BloomConfig(vocab_size=15, hidden_size=16, n_layer=2, n_head=2),
    "falcon": FalconConfig(**SIZES),
    "gpt-neo": GPTNeoConfig(
        vocab_size=15,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
    ),
}
EVERY = (*ARCHITECTURES, *MORE)
EAGER_ONLY = ("bloom", "gpt-neo")


def make_config(name: str) -> PretrainedConfig:
    return MORE[name] if name in MORE else tiny_config(name)


def build(folder: Path, name: str, config: PretrainedConfig, **changes: Any) -> PreTrainedModel:
    """A model on meta, from a folder that holds ``config``."""
    config.save_pretrained(folder)
    attn_impl = "eager" if name in EAGER_ONLY else "sdpa"
    engine_config = TrainEngineConfig(path=str(folder), attn_impl=attn_impl, **changes)
    return build_on_meta(engine_config)


def fill(model: PreTrainedModel, spread: float = 0.0) -> PreTrainedModel:
    """Give memory, buffers and seeded weights, ``spread`` wider than in transformers."""
    give_memory(model, compute_buffers(model), CPU)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0.0, 0.02 + spread, generator=generator)
    return model


@pytest.mark.parametrize("name", EVERY)
def test_buffers_are_those_of_a_model_built_normally(name: str, tmp_path: Path) -> None:
    model = build(tmp_path, name, make_config(name))
    compute_buffers(model)
    assert all(buffer.is_meta for buffer in model.buffers()), "the model does not change"
    model = fill(model)
    reference = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tmp_path), dtype=torch.float32
    )
    built, expected = dict(model.named_buffers()), dict(reference.named_buffers())
    assert built.keys() == expected.keys()
    for key, buffer in expected.items():
        assert buffer.dtype == built[key].dtype
        assert torch.equal(buffer, built[key]), key
    assert not any(param.is_meta for param in model.parameters())


class _Unwritten(nn.Module):
    """Computes a buffer only in its constructor, which has no effect on the meta device."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4, dtype=dtype, device="meta"), persistent=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_buffer_that_nothing_computes_is_an_error_rather_than_garbage(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = build(tmp_path, "llama", make_config("llama"))
    model.add_module("extra", _Unwritten(dtype))
    with pytest.raises(
        ConfigError, match="_Unwritten at 'extra' does not compute its buffer 'table'"
    ):
        give_memory(model, compute_buffers(model), CPU)


def with_dropout(config: PretrainedConfig) -> dict[str, float]:
    """Turn on every dropout option of a config. Returns the keys and values."""
    probabilities = {
        key: 0.5
        for key, value in config.to_dict().items()
        if "drop" in key and isinstance(value, float)
    }
    for key in probabilities:
        setattr(config, key, 0.5)
    return probabilities


@pytest.mark.parametrize("name", EVERY)
def test_disabled_dropout_makes_training_forwards_repeat_and_leaves_the_exported_config_alone(
    name: str, tmp_path: Path
) -> None:
    config = type(make_config(name))(**make_config(name).to_dict())
    probabilities = with_dropout(config)
    assert probabilities
    model = fill(build(tmp_path, name, config), spread=0.2).train()
    ids = torch.arange(8)[None]
    first, second = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
    assert torch.equal(first, second)
    model.config.save_pretrained(tmp_path / "exported")
    exported = AutoConfig.from_pretrained(tmp_path / "exported").to_dict()
    assert {key: exported[key] for key in probabilities} == probabilities


def test_dropout_stays_when_it_is_wanted(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=15,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    with_dropout(config)
    model = fill(build(tmp_path, "gpt2", config, disable_dropout=False), spread=0.2).train()
    first, second = (
        model(input_ids=torch.arange(8)[None], use_cache=False).logits for _ in range(2)
    )
    assert not torch.equal(first, second)


BLOCKS = {
    "llama": "LlamaDecoderLayer",
    "qwen3_tied": "Qwen3DecoderLayer",
    "qwen3_untied": "Qwen3DecoderLayer",
    "gemma": "GemmaDecoderLayer",
    "gpt2": "GPT2Block",
    "qwen3_moe": "Qwen3MoeDecoderLayer",
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_are_the_repeated_layers_unless_others_are_named(name: str, tmp_path: Path) -> None:
    model = build(tmp_path, name, make_config(name))
    (block,) = block_classes(model, None)
    assert block.__name__ == BLOCKS[name]
    assert sum(isinstance(module, block) for module in model.modules()) == 2
    named = block_classes(model, ["ModuleList", BLOCKS[name]])
    assert {cls.__name__ for cls in named} == {"ModuleList", BLOCKS[name]}
    with pytest.raises(
        ConfigError, match=r"transformer_layer_cls_to_wrap.*'NoSuchLayer'.*contains .*ModuleList"
    ):
        block_classes(model, ["ModuleList", "NoSuchLayer"])


CHOICES: tuple[bool | str, ...] = (False, True, "selective", "every_2", "every_1", "every_3")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradient_checkpointing_gives_the_same_gradients(name: str, tmp_path: Path) -> None:
    ids = torch.arange(12).reshape(2, 6)
    gradients: dict[bool | str, dict[str, Any]] = {}
    for choice in CHOICES[:4]:
        built = build(tmp_path, name, make_config(name), gradient_checkpointing=choice)
        model: Any = fill(built, spread=0.2).train()
        assert model.is_gradient_checkpointing == bool(choice)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients[choice] = {key: param.grad for key, param in model.named_parameters()}
    for choice in gradients:
        assert gradients[choice].keys() == gradients[False].keys(), "the names of the plain model"
        for key, gradient in gradients[False].items():
            assert torch.equal(gradient, gradients[choice][key]), (choice, key)


class Storages(TorchDispatchMode):
    """Counts the bytes of the memory that operators allocate inside the block, and that still
    exists.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves(args)
            if isinstance(tensor, torch.Tensor)
        }
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and (storage := tensor.untyped_storage())._cdata not in given
            ):
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def n_bytes(self) -> int:
        return sum(
            n_bytes for reference, n_bytes in self._storages.values() if not reference.expired()
        )


def kept_bytes(model: Any) -> int:
    """Bytes that a forward leaves behind for the backward."""
    ids = torch.arange(64)[None] % 15
    with Storages() as storages:
        loss = model(input_ids=ids, use_cache=False).logits.sum()
    n_bytes = storages.n_bytes()
    loss.backward()
    return n_bytes


def test_each_choice_of_blocks_keeps_fewer_activations(tmp_path: Path) -> None:
    sizes: dict[str, Any] = SIZES | {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 192,
    }
    config = LlamaConfig(**sizes)
    counts: dict[bool | str, float] = {}
    for choice in CHOICES:
        counts[choice] = kept_bytes(
            fill(build(tmp_path, "llama", config, gradient_checkpointing=choice)).train()
        )
    shares = {choice: count / counts[False] for choice, count in counts.items()}
    assert shares[True] == pytest.approx(shares["every_1"], rel=0.01) and shares[True] < 0.2, shares
    assert shares["every_2"] == pytest.approx((1 + shares[True]) / 2, abs=0.05)
    assert shares["every_2"] == pytest.approx(shares["every_3"], rel=0.01), (
        "blocks 0 and 2, or 0 and 3"
    )
    assert shares[True] < shares["selective"] < 0.7


def test_a_choice_of_blocks_that_does_not_exist_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for choice in ("every_0", "every_", "some", "every_2x"):
        with pytest.raises(
            ConfigError, match=f"'gradient_checkpointing' is '{choice}'; expected true, false"
        ):
            TrainEngineConfig(gradient_checkpointing=choice)
    monkeypatch.setattr(
        "holdfast.engine.training.checkpointing.GradientCheckpointingLayer", nn.Bilinear
    )
    with pytest.raises(ConfigError, match="is 'every_2', but LlamaForCausalLM has no blocks"):
        build(tmp_path, "llama", make_config("llama"), gradient_checkpointing="every_2")


def test_drawn_weights_have_the_spread_of_the_model_and_repeat(tmp_path: Path) -> None:
    drawn = []
    for seed in (1, 1, 2):
        model = build(tmp_path, "gpt2", make_config("gpt2"))
        blocks = block_classes(model, None)
        give_memory(model, compute_buffers(model), CPU)
        before = torch.get_rng_state()
        draw_weights(model, build_on_meta(TrainEngineConfig(path=str(tmp_path))), seed, blocks)
        assert torch.equal(torch.get_rng_state(), before), "the run's own generator was drawn from"
        drawn.append({key: param.detach().clone() for key, param in model.named_parameters()})
    assert all(torch.equal(drawn[0][key], drawn[1][key]) for key in drawn[0])
    assert any(not torch.equal(drawn[0][key], drawn[2][key]) for key in drawn[0])
    scaled = drawn[0][
        "transformer.h.0.mlp.c_proj.weight"
    ].std()  # GPT-2 scales it by 1 / sqrt(2 layers)
    assert float(scaled) == pytest.approx(0.02 / 2, rel=0.15)
    assert float(drawn[0]["transformer.h.0.mlp.c_fc.weight"].std()) == pytest.approx(0.02, rel=0.15)
    assert float(drawn[0]["transformer.h.0.ln_1.weight"].std()) == 0.0
