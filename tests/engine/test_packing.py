"""Packed and padded forwards agree, and a model whose packed sequences would see each other is refused."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    BloomConfig,
    FalconConfig,
    MambaConfig,
    PretrainedConfig,
    RwkvConfig,
)

from holdfast.engine import MicroBatchSpec
from holdfast.engine.microbatch import split_batch
from holdfast.engine.packing import check_packing, model_output
from holdfast.utils.errors import ConfigError
from tests.engine.hf_models import ARCHITECTURES, tiny_config, tiny_model

CPU = torch.device("cpu")
LENGTHS = (5, 1, 9, 3)


def make_micro_batch() -> Any:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(0, 15, mask.shape, generator=generator)
    return split_batch({"input_ids": ids, "attention_mask": mask.long()}, MicroBatchSpec(n_mbs=1))[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_packed_forward_equals_each_sequence_alone_and_the_padded_forward(name: str) -> None:
    model, mb = tiny_model(name), make_micro_batch()
    with torch.no_grad():
        packed, padded = model_output(model, mb, packed=True), model_output(model, mb, packed=False)
        sequences = mb.data["input_ids"].split(mb.cu_seqlens.diff().tolist())
        alone = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences])
    assert packed.shape == (sum(LENGTHS), 15)
    scale = float(alone.abs().max())
    assert float((packed - alone).abs().max()) < 1e-5 * scale
    assert float((padded - alone).abs().max()) < 1e-5 * scale
    check_packing(model, CPU)


def test_a_critic_gives_one_float32_value_a_token() -> None:
    config = tiny_config("qwen3_tied")
    config.num_labels = 1
    torch.manual_seed(0)
    critic = AutoModelForTokenClassification.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        values = [model_output(critic, make_micro_batch(), packed=packed) for packed in (True, False)]
    assert [(v.shape, v.dtype) for v in values] == [(torch.Size([sum(LENGTHS)]), torch.float32)] * 2
    assert torch.allclose(values[0], values[1], atol=0.02)
    check_packing(critic, CPU)


SIZES: dict[str, Any] = {"vocab_size": 15, "hidden_size": 32}
LEAKY: dict[str, PretrainedConfig] = {
    "a state space model": MambaConfig(**SIZES, num_hidden_layers=2, state_size=4),
    "a recurrent network": RwkvConfig(**SIZES, num_hidden_layers=2),
    "attention with linear biases": BloomConfig(**SIZES, n_layer=2, n_head=2),
    "rotary attention that takes no hint from position_ids": FalconConfig(
        **SIZES, num_hidden_layers=2, num_attention_heads=2
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", LEAKY)
def test_a_model_whose_packed_sequences_see_each_other_is_refused_even_with_untrained_weights(
    what: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LEAKY[what], dtype=dtype).train()
    with pytest.raises(ConfigError, match=r"lets packed sequences see each other.*'pack_sequences' to false"):
        check_packing(model, CPU)
    assert model.training, "the mode is put back"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_untrained_weights_and_half_precision_are_no_reason_to_refuse(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name), dtype=dtype).eval()
    check_packing(model, CPU)
    assert not model.training
