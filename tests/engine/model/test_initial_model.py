"""Models from other sources start with the same values as in transformers: nested models, buffers,
dtypes, heads.
"""

import json
import logging
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    BertConfig,
    FalconH1Config,
    Gemma3nTextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    MiniMaxConfig,
    Olmo2Config,
    PretrainedConfig,
    PreTrainedModel,
    ViTConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

from holdfast.engine import (
    FSDPEngine,
    OptimizerConfig,
    SaveLoadMeta,
    TrainEngineConfig,
)
from holdfast.engine.model import initial_model
from holdfast.engine.rl import RewardModelConfig
from holdfast.engine.training import weights
from holdfast.utils.errors import ConfigError
from tests.engine.architectures import tiny as architectures
from tests.engine.hf.test_load_plan import MULTIMODAL, TEXT, write_multimodal
from tests.engine.hf_models import tiny_model
from tests.engine.models import write_model_folder
from tests.engine.test_fsdp_engine import SPEC
from tests.helpers import run_ranks
from tests.tiers import slow_but

IDS = torch.randint(3, 28, (1, 9), generator=torch.Generator().manual_seed(0))


def test_the_start_says_which_parameters_text_trains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference: Any = write_model_folder(tmp_path / "model", architectures.tiny_config("gemma3"))
    reference(
        input_ids=IDS + architectures.FIRST_TOKEN, use_cache=False
    ).logits.square().sum().backward()
    trained = sum(param.numel() for param in reference.parameters() if param.grad is not None)
    untrained = sum(param.numel() for param in reference.parameters() if param.grad is None)
    assert untrained > 0, "transformers' causal class has the vision tower"
    with caplog.at_level(logging.INFO):
        engine = FSDPEngine(TrainEngineConfig(path=str(tmp_path / "model"), dtype="float32"))
        engine.create_process_group()
        engine.initialize(None, SPEC)
    assert (
        f": {trained + untrained} parameters, {trained} of them trained; text gives no gradient "
        f"to the {untrained} of model.vision_tower, model.multi_modal_projector, which take "
        "memory all the same"
    ) in caplog.text
    engine.destroy()


BROUGHT: dict[str, PretrainedConfig] = {
    "buffers computed by the model around": FalconH1Config(
        **TEXT,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=8,
    ),
    "parameters and buffers that only the constructor computes": ApertusConfig(**TEXT),
    "settings of a nested model": Gemma3nTextConfig(
        **TEXT
        | {
            "num_hidden_layers": 4,
            "intermediate_size": [24] * 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "vocab_size_per_layer_input": 31,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
        }
    ),
    "decays that are buffers": MiniMaxConfig(
        **TEXT,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=2,
        num_experts_per_tok=1,
        block_size=4,
    ),
    "no sdpa attention": GptOssConfig(**TEXT, num_local_experts=2, num_experts_per_tok=1),
    "rotary angles in float32": Olmo2Config(**TEXT),
    "embeddings that are not to be split, and tied": BertConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        is_decoder=True,
    ),
}


def write_brought(folder: Path, config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape) * 0.05)
    model.save_pretrained(folder)


def start(folder: str | Path, **changes: Any) -> Any:
    config: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "pack_sequences": False,
        "optimizer": None,
    }
    engine = FSDPEngine(TrainEngineConfig(path=str(folder), **config | changes))
    engine.create_process_group()
    try:
        engine.initialize(None, SPEC)
    except BaseException:
        engine.destroy()
        raise
    return engine


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _starts_as_from_pretrained(
    rank: int, world_size: int, root: Path, dtype: str
) -> dict[str, Any]:
    """Start an engine of every folder under ``root``. Returns name -> whether it computes exactly
    like transformers.
    """
    alike = {}
    for folder in sorted(root.iterdir()):
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        engine = start(folder, dtype=dtype)
        engine.eval()
        state = engine.model.state_dict()
        assert all(
            value.dtype == torch.float32 for value in state.values() if value.is_floating_point()
        ), folder
        for key, value in expected.state_dict().items():
            assert torch.equal(_whole(state[key]).to(value.dtype), value), f"{folder}: {key}"
        logits = engine.model(input_ids=IDS, use_cache=False).logits
        alike[folder.name] = torch.equal(logits, expected(input_ids=IDS, use_cache=False).logits)
        engine.destroy()
    return alike


@pytest.mark.parametrize(
    ("dtype", "world_size"), slow_but([("bfloat16", 1)], product(["float32", "bfloat16"], [1, 2]))
)
def test_an_engine_of_a_folder_computes_what_transformers_computes_in_that_dtype(
    dtype: str, world_size: int, tmp_path: Path
) -> None:
    for name, config in BROUGHT.items():
        write_brought(tmp_path / name, config)
    for name in ("Qwen3.5", "Gemma3"):
        write_multimodal(tmp_path / name, MULTIMODAL[name])
    for alike in run_ranks(_starts_as_from_pretrained, world_size, tmp_path, dtype):
        assert alike == dict.fromkeys([*BROUGHT, "Qwen3.5", "Gemma3"], True)


def test_buffers_are_exported_as_before_whatever_is_computed_with_them(tmp_path: Path) -> None:
    write_brought(tmp_path / "base", BROUGHT["decays that are buffers"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    engine = start(tmp_path / "base", dtype="bfloat16")
    engine.save(SaveLoadMeta(str(tmp_path / "ours"), "hf", with_optim=False))
    engine.save(SaveLoadMeta(str(tmp_path / "dcp"), "dcp", with_optim=False))
    ours, theirs = (tmp_path / whose / "model.safetensors" for whose in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()
    engine.destroy()
    engine = start(tmp_path / "base", dtype="float32")
    engine.load(SaveLoadMeta(str(tmp_path / "dcp"), "dcp", with_optim=False))
    assert all(
        torch.equal(_whole(value), model.state_dict()[key])
        for key, value in engine.model.state_dict().items()
    )
    engine.destroy()


@pytest.mark.slow
def test_a_model_trains_with_cast_buffers_and_recomputed_blocks(tmp_path: Path) -> None:
    write_brought(tmp_path, BROUGHT["decays that are buffers"])
    batch = {
        "input_ids": IDS,
        "attention_mask": torch.ones_like(IDS),
        "loss_mask": torch.ones_like(IDS),
    }
    losses = []
    for checkpointing in (False, True):
        engine = start(
            tmp_path,
            dtype="bfloat16",
            gradient_checkpointing=checkpointing,
            optimizer=OptimizerConfig(lr=1e-2),
        )
        step = [
            engine.train_batch(
                batch,
                lambda logits, mb: logits.float().square().mean(),
                lambda mb: mb["loss_mask"].sum(),
            )
            for _ in range(2)
        ]
        losses.append([stats["loss"] for stats in step])
        engine.destroy()
    assert losses[0] == losses[1]
    assert losses[0][1] < losses[0][0]


def test_the_old_model_is_gone_before_a_second_initialize_takes_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_brought(tmp_path / "base", BROUGHT["rotary angles in float32"])
    engine = start(tmp_path / "base", optimizer=OptimizerConfig(lr=1e-2))
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    engine.train_batch(
        batch, lambda logits, mb: logits.square().mean(), lambda mb: mb["loss_mask"].sum()
    )
    engine.save(SaveLoadMeta(str(tmp_path / "saved"), "dcp", with_optim=True), blocking=False)
    moments = [tensor for state in engine.optimizer.state.values() for tensor in state.values()]
    old = [weakref.ref(tensor) for tensor in (*engine.model.parameters(), *moments)]
    del moments
    alive = list[int]()

    def give_memory(*args: Any) -> list[str]:
        alive.append(sum(ref() is not None for ref in old))
        return weights.give_memory(*args)

    monkeypatch.setattr(initial_model, "give_memory", give_memory)
    engine.initialize(None, SPEC)
    assert len(old) > 20 and alive == [0]
    engine.destroy()


def test_weights_that_nothing_draws_are_asked_for_when_starting_from_scratch(
    tmp_path: Path,
) -> None:
    write_brought(tmp_path, BROUGHT["parameters and buffers that only the constructor computes"])
    with pytest.raises(
        ConfigError, match=r"does not initialise 'model\S*act_fn\.\w+'.*: it can only be loaded"
    ):
        start(tmp_path, init_from_scratch=True)


def test_a_critic_draws_only_the_weights_that_the_folder_lacks(tmp_path: Path) -> None:
    write_brought(tmp_path, BROUGHT["parameters and buffers that only the constructor computes"])
    engine = start(tmp_path, is_critic=True)
    state = {key: _whole(value) for key, value in engine.model.state_dict().items()}
    assert all(value.isfinite().all() for value in state.values())
    for key, value in load_file(tmp_path / "model.safetensors").items():
        assert key.startswith("lm_head.") or torch.equal(state[key], value), key
    engine.destroy()


def test_a_nested_model_draws_its_own_weights(tmp_path: Path) -> None:
    MULTIMODAL["Gemma3"].save_pretrained(tmp_path)
    engine = start(tmp_path, init_from_scratch=True)
    state = {key: _whole(value) for key, value in engine.model.state_dict().items()}
    assert all(value.isfinite().all() for value in state.values())
    probe = next(
        value
        for key, value in state.items()
        if key.endswith("vision_tower.embeddings.position_embedding.weight")
    )
    assert float(probe.std()) == pytest.approx(16**-0.5, rel=0.3), "Siglip's spread, not Gemma's"
    engine.destroy()


NEOX = GPTNeoXConfig(
    vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
)
HEADS = {
    "gpt_neox": (NEOX, "embed_out"),
    "bert": (BROUGHT["embeddings that are not to be split, and tied"], "cls"),
    "Qwen3.5": (MULTIMODAL["Qwen3.5"], "lm_head"),
}


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
@pytest.mark.parametrize("name", HEADS)
def test_a_critic_starts_from_a_causal_model_whatever_its_heads_name(
    name: str, tmp_path: Path
) -> None:
    config, head = HEADS[name]
    base = tmp_path / "base"
    (write_multimodal if name in MULTIMODAL else write_brought)(base, config)
    assert any(key.startswith(head) for key in load_file(base / "model.safetensors"))
    engine = start(base, is_critic=True)
    assert engine.model(input_ids=IDS, use_cache=False).logits.shape == (1, 9, 1)
    critic = AutoModelForTokenClassification.from_pretrained(
        base, dtype=torch.float32, num_labels=1
    )
    for key, value in critic.base_model.state_dict().items():
        assert torch.equal(_whole(engine.model.base_model.state_dict()[key]), value), key
    engine.save(SaveLoadMeta(str(tmp_path / "critic"), "hf", with_optim=False))
    engine.load(SaveLoadMeta(str(tmp_path / "critic"), "hf", with_optim=False))
    engine.load(SaveLoadMeta(str(base), "hf", with_optim=False))
    engine.destroy()


def test_a_reward_model_starts_from_a_causal_model_with_a_head_of_its_own(tmp_path: Path) -> None:
    write_brought(tmp_path, NEOX)
    engine = FSDPEngine(
        RewardModelConfig(path=str(tmp_path), dtype="float32", device="cpu", optimizer=None)
    )
    engine.create_process_group()
    engine.initialize(None, SPEC)
    assert engine.model(input_ids=IDS, use_cache=False).logits.shape == (1, 9, 1)
    engine.destroy()


RENAMED = ["deepseek_v4", "bailing_hybrid", "hy_v4"]
"""In their folders, tensors have other names than in the causal model."""
TIED_INSIDE = ["zamba", "prophetnet"]
"""Their bodies have weights that are stored under the name of another."""
HEADLESS = ["olmo2", "lfm2", "mamba", "llama4_text", "opt", *RENAMED, *TIED_INSIDE]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    slow_but(["opt", "hy_v4", "prophetnet"], HEADLESS),
)
def test_without_a_classifier_a_critic_is_a_layer_on_the_causal_body(
    model_type: str, tmp_path: Path
) -> None:
    config = architectures.tiny_config(model_type)
    assert type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    write_brought(tmp_path / "base", config)
    engine = start(tmp_path / "base", is_critic=True)
    causal = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    body = next(child for child in causal.children() if isinstance(child, PreTrainedModel))
    score = {key: _whole(value) for key, value in engine.model.score.state_dict().items()}
    with torch.no_grad():
        expected = torch.nn.functional.linear(body(IDS).last_hidden_state, **score)
        values = engine.eval().model(input_ids=IDS, use_cache=False).logits
    assert torch.allclose(values, expected, atol=1e-6) and values.std() > 0
    engine.save(SaveLoadMeta(str(tmp_path / "critic"), "hf", with_optim=False))
    engine.destroy()
    again = start(tmp_path / "critic", is_critic=True)
    with torch.no_grad():
        assert torch.equal(again.eval().model(input_ids=IDS, use_cache=False).logits, values)
    again.destroy()


def test_an_architecture_without_the_wanted_head_is_refused_naming_the_key(tmp_path: Path) -> None:
    ViTConfig().save_pretrained(tmp_path / "vit")
    for folder, changes, message in (
        (
            "vit",
            {"is_critic": True},
            (
                r"config key 'is_critic' is true, but of vit transformers has neither a model for "
                r"token classification"
            ),
        ),
        (
            "vit",
            {},
            (
                r"config key 'path': \S*vit holds a vit model, for which transformers has no "
                r"causal language model"
            ),
        ),
    ):
        with pytest.raises(ConfigError, match=message) as refusal:
            start(tmp_path / folder, init_from_scratch=True, **changes)
        assert "\n" not in str(refusal.value)


@pytest.mark.slow
def test_attention_is_ours_where_transformers_would_take_sdpa_unless_another_is_asked_for(
    tmp_path: Path,
) -> None:
    write_brought(tmp_path / "gpt_oss", BROUGHT["no sdpa attention"])
    write_brought(tmp_path / "olmo2", BROUGHT["rotary angles in float32"])
    for folder, asked, taken in (
        ("gpt_oss", {"pack_sequences": False}, "eager"),
        ("olmo2", {}, "holdfast"),
        ("olmo2", {"attn_impl": "sdpa"}, "sdpa"),
        ("olmo2", {"attn_impl": "eager"}, "eager"),
        ("olmo2", {"pack_sequences": False}, "sdpa"),
    ):
        engine = start(tmp_path / folder, **{"pack_sequences": True, **asked})
        assert engine.model.config._attn_implementation == taken
        engine.destroy()
    with pytest.raises(
        ConfigError, match="'attn_impl' 'sdpa': ValueError: GptOssForCausalLM does not support"
    ):
        start(tmp_path / "gpt_oss", attn_impl="sdpa")
    with pytest.raises(
        ConfigError, match=r"GptOssForCausalLM fails at a packed row .*has no 's_aux'"
    ):
        start(tmp_path / "gpt_oss", attn_impl="holdfast", pack_sequences=True)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class BroughtConfig(LlamaConfig):
    model_type = "brought"

class BroughtForCausalLM(LlamaForCausalLM):
    config_class = BroughtConfig
"""


def write_own_code(folder: Path) -> None:
    """A folder of an architecture that exists only in its own Python code."""
    tiny_model("llama").save_pretrained(folder)
    (folder / "brought.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    auto_map = {
        "AutoConfig": "brought.BroughtConfig",
        "AutoModelForCausalLM": "brought.BroughtForCausalLM",
    }
    config |= {
        "model_type": "brought",
        "architectures": ["BroughtForCausalLM"],
        "auto_map": auto_map,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _own_code(rank: int, world_size: int, root: Path) -> str:
    engine = start(root / "own", trust_remote_code=True, pack_sequences=True)
    engine.save(SaveLoadMeta(str(root / "exported"), "hf", with_optim=False))
    state = {key: _whole(value) for key, value in engine.model.state_dict().items()}
    assert all(
        torch.equal(value, state[key]) for key, value in tiny_model("llama").state_dict().items()
    )
    name = engine.model.config.model_type
    engine.destroy()
    return name


def test_code_that_comes_with_a_model_runs_only_when_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    write_own_code(tmp_path / "own")
    with pytest.raises(
        ConfigError,
        match=r"config.json cannot be used: .*Python code of its own.*'trust_remote_code' true",
    ):
        start(tmp_path / "own")
    assert run_ranks(_own_code, 2, tmp_path) == ["brought"] * 2
    assert (tmp_path / "exported" / "brought.py").is_file()
