"""Packed and padded forwards agree, and models that would mix packed sequences are refused."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    BloomConfig,
    FalconConfig,
    JambaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    RwkvConfig,
    XLNetConfig,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from holdfast.engine import MicroBatchSpec
from holdfast.engine.training import probe_model
from holdfast.engine.training.microbatch import split_batch
from holdfast.engine.training.model_output import model_output
from holdfast.engine.training.packing import check_packing
from holdfast.engine.training.probe_model import Twins
from holdfast.engine.training.weights import give_memory
from holdfast.utils.errors import ConfigError
from tests.engine.architectures import tiny as architectures
from tests.engine.hf_models import ARCHITECTURES, sharded, tiny_config, tiny_model
from tests.helpers import run_ranks
from tests.tiers import slow_but

CPU = torch.device("cpu")
LENGTHS = (5, 1, 9, 3)


def make_micro_batch() -> Any:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(0, 15, mask.shape, generator=generator)
    return split_batch({"input_ids": ids, "attention_mask": mask.long()}, MicroBatchSpec(n_mbs=1))[
        0
    ]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_packed_forward_equals_each_sequence_alone_and_the_padded_forward(name: str) -> None:
    model, mb = tiny_model(name), make_micro_batch()
    with torch.no_grad():
        packed, padded = model_output(model, mb, packed=True), model_output(model, mb, packed=False)
        sequences = mb.data["input_ids"].split(mb.cu_seqlens.diff().tolist())
        alone = torch.cat(
            [model(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences]
        )
    assert packed.shape == (sum(LENGTHS), 15)
    scale = float(alone.abs().max())
    assert float((packed - alone).abs().max()) < 1e-5 * scale
    assert float((padded - alone).abs().max()) < 1e-5 * scale
    check_packing(Twins(model, CPU))


def test_a_critic_gives_one_float32_value_a_token() -> None:
    config = tiny_config("qwen3_tied")
    config.num_labels = 1
    torch.manual_seed(0)
    critic = AutoModelForTokenClassification.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        values = [
            model_output(critic, make_micro_batch(), packed=packed) for packed in (True, False)
        ]
    assert [(v.shape, v.dtype) for v in values] == [(torch.Size([sum(LENGTHS)]), torch.float32)] * 2
    assert torch.allclose(values[0], values[1], atol=0.02)
    check_packing(Twins(critic, CPU))


SIZES: dict[str, Any] = {"vocab_size": 15, "hidden_size": 32}
MORE: dict[str, Any] = {
    **SIZES,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CONVOLUTION = ["conv", "full_attention", "conv"]
LEAKY: dict[str, PretrainedConfig] = {
    "a state space model": MambaConfig(**SIZES, num_hidden_layers=2, state_size=4),
    "a recurrent network": RwkvConfig(**SIZES, num_hidden_layers=2),
    "attention with linear biases": BloomConfig(**SIZES, n_layer=2, n_head=2),
    "rotary attention that takes no hint from position_ids": FalconConfig(
        **SIZES, num_hidden_layers=2, num_attention_heads=2
    ),
    "attention whose projections have three dims": XLNetConfig(
        vocab_size=15, d_model=32, n_layer=2, n_head=2, d_inner=48
    ),
    "short convolutions": Lfm2Config(**MORE, num_hidden_layers=3, layer_types=CONVOLUTION),
    "short convolutions beside experts": Lfm2MoeConfig(
        **MORE,
        num_hidden_layers=3,
        layer_types=CONVOLUTION,
        num_dense_layers=1,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "a state space between attention": JambaConfig(
        **MORE,
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        mamba_d_state=4,
    ),
}


def _untouched(model: PreTrainedModel) -> None:
    pass


def _moved(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        param.add_(torch.randn(param.shape, generator=generator).to(param) * 0.05)


def _zero(model: PreTrainedModel) -> None:
    for param in model.parameters():
        param.zero_()


WEIGHTS = {"fresh": _untouched, "moved": _moved, "zero": _zero}


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("what", LEAKY)
def test_a_model_whose_packed_sequences_see_each_other_is_always_refused(
    what: str, weights: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LEAKY[what], dtype=dtype).train()
    with torch.no_grad():
        WEIGHTS[weights](model)
    with pytest.raises(
        ConfigError, match=r"lets packed sequences see each other.*'pack_sequences' to false"
    ):
        check_packing(Twins(model, CPU))


def test_a_model_that_fails_at_packed_rows_is_refused_with_reason() -> None:
    """Reformer accepts only rows of whole chunks."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        architectures.tiny_config("reformer"), dtype=torch.float32
    )
    with pytest.raises(
        ConfigError,
        match=r"^ReformerModelWithLMHead fails at a packed row \(.*'pack_sequences' to false",
    ):
        check_packing(Twins(model, CPU))


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_weights_and_no_precision_are_a_reason_to_refuse(
    name: str, weights: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name), dtype=dtype).eval()
    with torch.no_grad():
        WEIGHTS[weights](model)
    check_packing(Twins(model, CPU))


def test_the_check_leaves_weights_mode_and_generators_alone() -> None:
    model = tiny_model("qwen3_moe").train()
    before, rng = (
        {key: value.clone() for key, value in model.state_dict().items()},
        torch.get_rng_state(),
    )
    config = model.config.to_dict()
    check_packing(Twins(model, CPU))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert model.training and model.config.to_dict() == config
    assert torch.get_float32_matmul_precision() == "highest"


class RowChunks(LlamaForCausalLM):
    """Attends within chunks counted from the start of the row, like Llama4 in older
    transformers.
    """

    def forward(self, input_ids: Any, position_ids: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        chunk = torch.arange(input_ids.shape[1]) // self.config.attention_chunk_size
        sequence = (position_ids[0] == 0).cumsum(0)
        alike = (sequence[:, None] == sequence) & (chunk[:, None] == chunk)
        mask = (alike & torch.ones_like(alike).tril())[None, None]
        return super().forward(
            input_ids=input_ids, position_ids=position_ids, attention_mask=mask, **kwargs
        )


@pytest.mark.slow
def test_a_model_that_cuts_windows_packs_rows_no_longer_than_these() -> None:
    config = LlamaConfig(**MORE, num_hidden_layers=2)
    config.attention_chunk_size, config.sliding_window = 64, 16
    model = RowChunks(config)
    for most in (None, 65):
        with pytest.raises(
            ConfigError,
            match=r"in rows of more than 64 tokens \(its 'attention_chunk_size'\); set .*mb",
        ):
            check_packing(Twins(model, CPU), max_row_tokens=most)
    check_packing(Twins(model, CPU), max_row_tokens=64)


def test_windows_and_chunks_that_restart_with_each_sequence_are_packed() -> None:
    sliding = Qwen3Config(
        **MORE, num_hidden_layers=2, head_dim=8, use_sliding_window=True, sliding_window=4096
    )
    sliding.layer_types = ["sliding_attention", "full_attention"]
    for config in (sliding, tiny_config("qwen3_tied")):
        check_packing(Twins(AutoModelForCausalLM.from_config(config), CPU))


class LateLeak(LlamaForCausalLM):
    """Its last layer mixes each token with the one before it. No list in the config tells."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        layers: Any = self.model.layers
        for number, layer in enumerate(layers):
            layer.mlp.__class__ = LeakingMLP
            layer.mlp.leaks = number == 5


class LeakingMLP(LlamaMLP):
    leaks: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + x.roll(1, dims=1) if self.leaks else x)


def test_a_deep_model_is_tested_with_a_layer_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def sized(twin: PreTrainedModel, *args: Any) -> list[str]:
        sizes.append(twin.config.num_hidden_layers)
        return give_memory(twin, *args)

    monkeypatch.setattr(probe_model, "give_memory", sized)
    check_packing(Twins(LlamaForCausalLM(LlamaConfig(**MORE, num_hidden_layers=12)), CPU))
    assert sizes == [2]
    with pytest.raises(ConfigError, match="LateLeak lets packed sequences see each other"):
        check_packing(Twins(LateLeak(LlamaConfig(**MORE, num_hidden_layers=6)), CPU))
    assert sizes == [2, 6]


def _sharded_check(rank: int, world_size: int) -> list[str]:
    """Check models without memory: a valid one, and one that leaks through a convolution."""
    verdicts = []
    for config in (tiny_config("qwen3_tied"), LEAKY["short convolutions"]):
        with torch.device("meta"):
            model = sharded(AutoModelForCausalLM.from_config(config))
        rng = torch.get_rng_state()
        try:
            check_packing(Twins(model, CPU))
            verdicts.append("packed")
        except ConfigError as error:
            verdicts.append(str(error))
        assert all(param.is_meta for param in model.parameters())
        assert torch.equal(torch.get_rng_state(), rng)
    return verdicts


@pytest.mark.parametrize("world_size", slow_but([2], [2, 3]))
def test_all_ranks_agree_about_a_sharded_model_without_memory(world_size: int) -> None:
    for sound, leaky in run_ranks(_sharded_check, world_size):
        assert sound == "packed"
        assert leaky.startswith("Lfm2ForCausalLM lets packed sequences see each other")
