"""Log-probabilities of a sequence do not depend on its neighbours in models that choose rotary
frequencies by length.

The reference is transformers with a rotary module of this file, which computes the rules of the
papers and of vLLM.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GraniteSWAConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PreTrainedModel,
)

from holdfast.engine import TrainEngineConfig
from holdfast.engine.training.packing import check_packing
from holdfast.engine.training.probe_model import Twins
from holdfast.engine.training.rotary import fix_frequencies, longest_sequence
from holdfast.utils.errors import BatchError, ConfigError
from tests.engine.models import write_model_folder
from tests.engine.test_fsdp_engine import make_engine
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(60)

ORIGINAL, MOST, SHORT, LONG = 64, 2048, 30, 100
"""Original and largest length, in the ratio of Phi-4-mini. Tokens of a sequence and of its
neighbour.
"""

_SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LENGTHS = {"max_position_embeddings": MOST, "original_max_position_embeddings": ORIGINAL}


def _longrope(pairs: int) -> dict[str, Any]:
    """Factors in the range of Phi-3-mini-128k-instruct, for heads of a few dimensions."""
    short = [1.05, 1.1, 1.3, 1.55, 1.9, 2.2, 2.6, 3.0][:pairs]
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": [1.03, 1.7, 4.2, 9.9, 24, 42, 60, 64][:pairs],
    }


def _scaling(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"rope_scaling": parameters}  # the name in released configs


def _phimoe() -> dict[str, Any]:
    scales = {"short_mscale": 1.24, "long_mscale": 1.34}
    return {
        **_longrope(8),
        **scales,
        "original_max_position_embeddings": ORIGINAL,
        "rope_theta": 10000.0,
    }


_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
_EXPERTS = {
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
}
_GEMMA: dict[str, Any] = {
    **_SIZES,
    "head_dim": 16,
    "max_position_embeddings": ORIGINAL,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
}
_THREE_QUARTERS: dict[str, Any] = {"partial_rotary_factor": 0.75}
_DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}

CONFIGS: dict[str, Any] = {
    "Phi-3-mini-128k": Phi3Config(**_SIZES, **_LENGTHS, **_scaling(_longrope(8))),
    "Phi-4-mini": Phi3Config(**_SIZES, **_LENGTHS, **_THREE_QUARTERS, **_scaling(_longrope(6))),
    "Phi-3.5-MoE": PhimoeConfig(
        **_SIZES, **_EXPERTS, max_position_embeddings=MOST, rope_parameters=_phimoe()
    ),
    "MiniCPM3": MiniCPM3Config(
        **_SIZES,
        max_position_embeddings=MOST,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        **_scaling({**_longrope(4), "original_max_position_embeddings": ORIGINAL}),
    ),
    "InternLM2 as Llama": LlamaConfig(
        **_SIZES, max_position_embeddings=ORIGINAL, **_scaling(_DYNAMIC)
    ),
    "Granite with bases by layer": GraniteSWAConfig(
        **_SIZES,
        max_position_embeddings=ORIGINAL,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
        layer_rope_theta=[10000.0, 500000.0],
        rope_parameters=_DYNAMIC,
    ),
    "Gemma-3 with a dynamic type of layer": Gemma3TextConfig(
        **_GEMMA, rope_parameters={"sliding_attention": _DEFAULT, "full_attention": _DYNAMIC}
    ),
    "Gemma-3 with a LongRoPE type of layer": Gemma3TextConfig(
        **{**_GEMMA, "max_position_embeddings": MOST},
        rope_parameters={
            "sliding_attention": _DEFAULT,
            "full_attention": {
                **_longrope(8),
                "rope_theta": 1e6,
                "original_max_position_embeddings": ORIGINAL,
            },
        },
    ),
}


class FixedRotary(nn.Module):
    """One set of frequencies, by the formulas of LongRoPE and of dynamic NTK scaling at vLLM's
    length.
    """

    def __init__(self, scalings: dict[str | None, dict[str, Any]], dim: int, is_long: bool) -> None:
        super().__init__()
        self.tables = {
            name: self._table(scaling, dim, is_long) for name, scaling in scalings.items()
        }

    def _table(
        self, scaling: dict[str, Any], dim: int, is_long: bool
    ) -> tuple[torch.Tensor, float]:
        exponents = torch.tensor([2 * i / dim for i in range(dim // 2)], dtype=torch.float64)
        theta, which = scaling["rope_theta"], "long" if is_long else "short"
        if scaling["rope_type"] == "dynamic" and is_long:
            at_most = scaling["factor"] * ORIGINAL
            stretch = scaling["factor"] * at_most / ORIGINAL - (scaling["factor"] - 1)
            theta *= stretch ** (dim / (dim - 2))
        if scaling["rope_type"] != "longrope":
            return theta**-exponents, 1.0
        factors = torch.tensor(scaling[f"{which}_factor"], dtype=torch.float64)
        scale = math.sqrt(1 + math.log(MOST / ORIGINAL) / math.log(ORIGINAL))
        return 1 / (factors * theta**exponents), scaling.get(f"{which}_mscale", scale)

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> Any:
        frequencies, scale = self.tables[layer_type]
        angles = (position_ids[..., None] * frequencies).repeat(1, 1, 2)
        return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)


def make_reference(folder: Path, is_long: bool) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    given = model.config.rope_parameters
    dim = (
        2
        * next(buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")).shape[
            -1
        ]
    )
    model.model.rotary_emb = FixedRotary(
        given if "full_attention" in given else {None: given}, dim, is_long
    )
    for module in getattr(model.model, "rotary_embs", ()):  # Granite has one for each base
        module.forward = FixedRotary({None: module.config.rope_parameters}, dim, is_long).forward
    return model.eval()


def make_batch(*lengths: int) -> dict[str, torch.Tensor]:
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    ids = torch.randint(0, 40, mask.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


@torch.no_grad()
def logprobs_alone(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


CASES = [(name, is_long) for name in CONFIGS for is_long in (False, True)]
DEFAULT_CASES = [
    *(("Phi-4-mini", True), ("InternLM2 as Llama", False)),
]


@pytest.mark.parametrize("packed", slow_but([True], [True, False]), ids=["packed", "padded"])
@pytest.mark.parametrize(("name", "is_long"), slow_but(DEFAULT_CASES, CASES))
def test_a_sequence_has_the_same_log_probabilities_beside_a_long_one_as_alone(
    name: str, is_long: bool, packed: bool, tmp_path: Path
) -> None:
    write_model_folder(tmp_path / "model", CONFIGS[name])
    reference = make_reference(tmp_path / "model", is_long)
    long = LONG if is_long else ORIGINAL
    engine = make_engine(
        tmp_path / "model", pack_sequences=packed, max_model_len=MOST if is_long else None
    )
    together, batch = engine.forward_batch(make_batch(SHORT, long)), make_batch(SHORT, long)
    alone = engine.forward_batch({key: tensor[:1, :SHORT] for key, tensor in batch.items()})
    for found, row, length in ((alone, 0, SHORT), (together, 0, SHORT), (together, 1, long)):
        expected = logprobs_alone(reference, batch["input_ids"][row, :length])
        torch.testing.assert_close(found[row, 1:length], expected, rtol=0, atol=2e-5)
    engine.destroy()


@pytest.mark.slow
def test_generation_computes_with_the_same_frequencies(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", CONFIGS["Phi-3-mini-128k"])
    engine = make_engine(tmp_path / "model", max_model_len=MOST)
    ids = make_batch(ORIGINAL - 4)["input_ids"]
    options: Any = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    reference: Any = make_reference(tmp_path / "model", is_long=True)
    expected = reference.generate(ids, **options)
    assert torch.equal(engine.eval().model.generate(ids, **options), expected)
    engine.destroy()


def test_the_config_that_is_exported_stays_as_the_author_wrote_it(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model", CONFIGS["InternLM2 as Llama"])
    engine = make_engine(tmp_path / "model")
    assert (
        engine.model.config.to_dict()
        == AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.to_dict()
    )
    assert engine.model.config.rope_parameters == model.config.rope_parameters
    engine.destroy()


@pytest.mark.parametrize(
    ("name", "limit", "length"),
    [
        ("Phi-3-mini-128k", None, ORIGINAL),
        ("Phi-3-mini-128k", 50, 50),
        ("InternLM2 as Llama", None, ORIGINAL),
    ],
)
def test_a_sequence_that_the_servers_would_not_take_is_refused(
    name: str, limit: int | None, length: int, tmp_path: Path
) -> None:
    write_model_folder(tmp_path / "model", CONFIGS[name])
    engine = make_engine(tmp_path / "model", max_model_len=limit)
    engine.forward_batch(make_batch(SHORT, length))
    with pytest.raises(
        BatchError,
        match=rf"row 1 of the batch has {length + 1} tokens; .* {length}, .*'max_model_len'",
    ):
        engine.forward_batch(make_batch(SHORT, length + 1))
    engine.destroy()


class Unfixed(Phi3ForCausalLM):
    """Uses the frequencies of the longest sequence and ignores its rotary module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.model.rotary_emb.config = self.config
        return super().forward(*args, **kwargs)


def test_packing_is_refused_to_a_model_whose_frequencies_depend_on_the_neighbours() -> None:
    model = Unfixed(CONFIGS["Phi-3-mini-128k"])
    with pytest.raises(
        ConfigError,
        match=r"wrongly in rows of more than 64 tokens \(its 'original_max_.*to 64 or less$",
    ):
        check_packing(Twins(model, torch.device("cpu")), max_row_tokens=ORIGINAL + 1)
    check_packing(Twins(model, torch.device("cpu")), max_row_tokens=ORIGINAL)
    check_packing(Twins(Phi3ForCausalLM(CONFIGS["Phi-3-mini-128k"]), torch.device("cpu")))


def test_the_limit_of_a_sequence_is_a_positive_number() -> None:
    with pytest.raises(ConfigError, match="'max_model_len'"):
        TrainEngineConfig(max_model_len=0)


class OwnRotary(LlamaForCausalLM):
    """Code outside of transformers, whose frequencies the engine cannot fix."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        body: Any = self.model
        body.rotary_emb = nn.Identity()


def test_code_that_chooses_by_length_itself_gets_no_sequence_beyond_its_first_choice() -> None:
    model = OwnRotary(CONFIGS["InternLM2 as Llama"])
    for limit in (None, ORIGINAL):
        fix_frequencies(model, limit)
        assert longest_sequence(model, limit) == ORIGINAL
    with pytest.raises(
        ConfigError, match=r"'max_model_len' is 65, but the code of OwnRotary .* to 64 or less"
    ):
        fix_frequencies(model, ORIGINAL + 1)
