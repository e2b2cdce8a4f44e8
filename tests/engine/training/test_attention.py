"""Packed sequences attend only within themselves, in memory that does not grow with the square of
the row.
"""

import copy
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from holdfast.engine import (
    FinetuneSpec,
    FSDPEngine,
    MicroBatchSpec,
    OptimizerConfig,
    SaveLoadMeta,
    TrainEngineConfig,
    full_state_dict,
)
from holdfast.engine.config import PACKED_ATTENTION
from holdfast.engine.rl import count_loss_tokens, sft_loss_fn
from holdfast.engine.training.attention import PackedRow, _attention, packed_row
from holdfast.engine.training.microbatch import split_batch
from holdfast.engine.training.model_output import model_output
from holdfast.engine.training.packed_batch import MicroBatch
from holdfast.engine.training.packing import check_packing, prepare_packing
from holdfast.engine.training.probe_model import Twins
from holdfast.utils.errors import ConfigError
from tests.engine.hf_models import ARCHITECTURES, tiny_config
from tests.engine.models import write_model_folder
from tests.helpers import run_ranks
from tests.tiers import slow_but

CPU = torch.device("cpu")
LENGTHS = (5, 1, 23, 3, 1)
SIZES: dict[str, Any] = {
    "vocab_size": 15,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = ["sliding_attention", "full_attention"]
SLIDING: dict[str, PretrainedConfig] = {
    "mistral": MistralConfig(**SIZES, sliding_window=6),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=6, layer_types=LAYERS),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, layer_types=LAYERS),
}
CONFIGS = {name: tiny_config(name) for name in ARCHITECTURES} | SLIDING


def _row(lengths: Sequence[int], window: int | None = None) -> PackedRow:
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedRow(tuple(lengths), boundaries, window)


def _micro_batch(lengths: Sequence[int]) -> MicroBatch:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, 15, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    spec = MicroBatchSpec(max_tokens_per_mb=None)
    return split_batch({"input_ids": ids, "attention_mask": mask.long()}, spec)[0]


def _model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def _attend(inputs: Sequence[torch.Tensor], mask: PackedRow | None, **options: Any) -> torch.Tensor:
    query, key, value = inputs
    return _attention(torch.nn.Module(), query, key, value, mask, **options)[0]


def _by_hand(query: Any, key: Any, value: Any, row: PackedRow, scale: float) -> torch.Tensor:
    """The formula over all pairs of tokens in float64: ``[1, T, heads, dim]``."""
    sequence = torch.repeat_interleave(torch.arange(len(row.lengths)), torch.tensor(row.lengths))
    age = torch.arange(len(sequence))[:, None] - torch.arange(len(sequence))
    seen = (sequence[:, None] == sequence) & (age >= 0) & (age < (row.window or len(sequence)))
    key, value = (
        each.double().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        for each in (key, value)
    )
    scores = (query.double() @ key.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(("window", "key_heads"), [(None, 2), (None, 4), (1, 2), (7, 1), (300, 2)])
def test_values_and_gradients_are_those_of_the_formula(window: int | None, key_heads: int) -> None:
    row = _row((1, 700, 5, 1, 300, 6), window)
    generator = torch.Generator().manual_seed(0)
    sizes = [(4, 8), (key_heads, 8), (key_heads, 6)]
    inputs = [
        torch.randn(1, heads, sum(row.lengths), dim, generator=generator) for heads, dim in sizes
    ]
    ours, reference = ([each.clone().requires_grad_() for each in inputs] for _ in range(2))
    out = _attend(ours, row, scaling=0.3)
    expected = _by_hand(*reference, row=row, scale=0.3)
    upstream = torch.randn(out.shape, generator=generator)
    (out * upstream).sum().backward()
    (expected * upstream).sum().backward()
    assert out.shape == (1, sum(row.lengths), 4, 6)
    assert torch.allclose(out.double(), expected, atol=1e-6)
    for one, other in zip(ours, reference, strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.allclose(one.grad, other.grad, atol=1e-5)


def test_dropped_weights_are_drawn_from_torchs_generator() -> None:
    row, inputs = _row(LENGTHS), [torch.randn(1, 2, sum(LENGTHS), 8) for _ in range(3)]
    outs = []
    for dropout, seed in ((0.5, 1), (0.5, 1), (0.5, 2), (0.0, 1)):
        torch.manual_seed(seed)
        outs.append(_attend(inputs, row, dropout=dropout))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2]) and not torch.equal(outs[0], outs[3])


def test_an_option_unknown_to_packed_attention_is_an_error() -> None:
    row, inputs = _row(LENGTHS), [torch.randn(1, 2, sum(LENGTHS), 8) for _ in range(3)]
    for mask in (row, None):
        for name in ("softcap", "s_aux"):
            with pytest.raises(ValueError, match=name):
                _attend(inputs, mask, **{name: torch.ones(2)})
    with pytest.raises(ValueError, match="position_bias"):
        _attend(inputs, row, position_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="not one row of 33 tokens"):
        _attend([inputs[0], inputs[1][:, :, 1:], inputs[2][:, :, 1:]], row)


def _gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return found


def _largest_difference(ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    assert ones.keys() == others.keys()
    largest = max(float(one.abs().max()) for one in ones.values())
    return max(float((ones[name] - others[name]).abs().max()) for name in ones) / largest


ALONE = [
    (name, lengths, again)
    for name in CONFIGS
    for lengths in (LENGTHS, (32,))
    for again in (False, True)
]
FAST = [("llama", LENGTHS, False), ("gpt2", LENGTHS, True), ("gemma3", LENGTHS, True)]


@pytest.mark.parametrize(("name", "lengths", "checkpointing"), slow_but(FAST, ALONE))
def test_gradients_are_those_of_each_sequence_alone(
    name: str, lengths: tuple[int, ...], checkpointing: bool
) -> None:
    model, mb = _model(CONFIGS[name]), _micro_batch(lengths)
    upstream = torch.randn(sum(lengths), 15, generator=torch.Generator().manual_seed(1))
    sequences = mb.data["input_ids"].split(mb.cu_seqlens.diff().tolist())
    assert model.config._attn_implementation == "sdpa"
    alone = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences])
    (alone * upstream).sum().backward()
    expected = _gradients(model)
    prepare_packing(Twins(model, CPU), TrainEngineConfig())
    assert model.config._attn_implementation == PACKED_ATTENTION
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    packed = model_output(model, mb, packed=True)
    (
        packed * upstream
    ).sum().backward()  # outside of packed_row, where checkpointing recomputes blocks
    assert torch.allclose(packed, alone, atol=1e-5 * float(alone.detach().abs().max()))
    assert _largest_difference(_gradients(model), expected) < 1e-6


class _LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation makes."""

    n_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [
            leaf.untyped_storage().nbytes() // leaf.itemsize
            for leaf in tree_leaves(out)
            if torch.is_tensor(leaf)
        ]
        self.n_elements = max(self.n_elements, *sizes, 0)
        return out


@pytest.mark.parametrize("name", slow_but(["gemma3"], ["llama", "gemma3"]))
def test_no_tensor_of_a_step_has_an_element_for_each_pair_of_tokens(name: str) -> None:
    """Covers forward and backward, and a row of one sequence under a window."""
    config = LlamaConfig(**SIZES) if name == "llama" else SLIDING[name]
    mb, n_tokens = _micro_batch((300, 1, 900, 400, 447)), 2048
    largest = {}
    for attention in ("sdpa", PACKED_ATTENTION):
        model = _model(config)
        if attention == PACKED_ATTENTION:
            prepare_packing(Twins(model, CPU), TrainEngineConfig())
        with _LargestTensor() as made:
            model_output(model, mb, packed=True).sum().backward()
        largest[attention] = made.n_elements
    assert largest["sdpa"] >= n_tokens**2
    assert largest[PACKED_ATTENTION] <= n_tokens * 48, "no more than the activations of the MLP"


@pytest.mark.slow
def test_a_model_called_outside_of_packed_rows_masks_padding_as_sdpa_does() -> None:
    for config in (tiny_config("llama"), SLIDING["gemma3"]):
        model = _model(config).eval()
        ids = torch.randint(3, 15, (2, 12), generator=torch.Generator().manual_seed(0))
        for mask in (
            None,
            torch.tensor([[0] * 5 + [1] * 7, [1] * 12]),
            torch.tensor([[1] * 9 + [0] * 3, [1] * 12]),
        ):
            expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            prepare_packing(Twins(model, CPU), TrainEngineConfig())
            assert model.config._attn_implementation == PACKED_ATTENTION
            assert torch.equal(
                model(input_ids=ids, attention_mask=mask, use_cache=False).logits, expected
            )
            positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]])
            outside = model(input_ids=ids[:1], position_ids=positions, use_cache=False).logits
            with packed_row((4, 8), torch.tensor([0, 4, 12], dtype=torch.int32)):
                inside = model(input_ids=ids[:1], position_ids=positions, use_cache=False).logits
            assert torch.allclose(outside, inside, atol=1e-5 * float(outside.detach().abs().max()))
            model = _model(config).eval()


class ReadsItsMask(LlamaForCausalLM):
    """Its layers read the mask in addition to passing it on."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.register_forward_pre_hook(self._read, with_kwargs=True)

    @staticmethod
    def _read(layer: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if kwargs["attention_mask"] is not None:
            assert kwargs["attention_mask"].float().dim() == 4


def test_a_model_that_cannot_do_with_it_keeps_its_attention_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = ReadsItsMask(LlamaConfig(**SIZES))
    with caplog.at_level(logging.INFO, logger="holdfast"):
        prepare_packing(Twins(model, CPU), TrainEngineConfig())
    assert model.config._attn_implementation == "sdpa"
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(
        "attention 'holdfast' is not for this model, which keeps 'sdpa': ReadsItsMask fails at a"
    )
    asked = ReadsItsMask(LlamaConfig(**{**SIZES, "attn_implementation": PACKED_ATTENTION}))
    with pytest.raises(ConfigError, match="ReadsItsMask fails at a packed row"):
        prepare_packing(Twins(asked, CPU), TrainEngineConfig(attn_impl=PACKED_ATTENTION))


def test_an_attention_that_was_asked_for_is_not_replaced() -> None:
    for name in ("sdpa", "eager"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation=name)
        prepare_packing(Twins(model, CPU), TrainEngineConfig(attn_impl=name))
        assert model.config._attn_implementation == name
    eager = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation="eager")
    prepare_packing(Twins(eager, CPU), TrainEngineConfig())
    assert eager.config._attn_implementation == "eager", "transformers chose it: it may know why"


def test_packed_attention_is_not_asked_for_without_packing() -> None:
    with pytest.raises(
        ConfigError, match=r"'attn_impl' is 'holdfast', .* 'pack_sequences' is false"
    ):
        TrainEngineConfig(attn_impl=PACKED_ATTENTION, pack_sequences=False)


@pytest.mark.slow
def test_the_check_compares_with_what_transformers_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lost window is no leak between sequences: a sequence alone would be wrong as well."""
    config = MistralConfig(**SIZES, sliding_window=32)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=PACKED_ATTENTION
    )
    check_packing(Twins(model, CPU))
    lost = lambda row, **changes: row  # noqa: E731
    monkeypatch.setattr("holdfast.engine.training.attention.replace", lost)
    with pytest.raises(ConfigError, match="in rows of more than 32 tokens"):
        check_packing(Twins(model, CPU))
    model = AutoModelForCausalLM.from_config(config)
    prepare_packing(Twins(model, CPU), TrainEngineConfig())
    assert model.config._attn_implementation == "sdpa"


SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=8)


def _trained(
    rank: int, world_size: int, folder: Path, attn_impl: str | None, checkpointing: bool
) -> Any:
    config = TrainEngineConfig(
        path=str(folder),
        dtype="float32",
        device="cpu",
        attn_impl=attn_impl,
        gradient_checkpointing=checkpointing,
        optimizer=OptimizerConfig(type="sgd", lr=0.1, gradient_clipping=1e9),
        mb_spec=MicroBatchSpec(max_tokens_per_mb=40),
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, SPEC)
    lengths = ((9, 1, 30), (2, 17, 1, 1))[rank]
    mask = torch.arange(30) < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, 15, mask.shape, generator=torch.Generator().manual_seed(rank)) * mask
    batch = {"input_ids": ids, "attention_mask": mask.long(), "loss_mask": mask.long()}
    stats = engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
    weights = full_state_dict(engine.model, group=engine.control_group)
    exported = folder.parent / f"{attn_impl}-{checkpointing}"
    engine.save(SaveLoadMeta(str(exported), "hf", False))
    attention = engine.model.config._attn_implementation
    engine.destroy()
    return attention, stats["loss"], weights, (exported / "config.json").read_text()


def _trained_both_ways(rank: int, world_size: int, folder: Path) -> Any:
    ways = (("sdpa", False), (None, False), (None, True))
    return [_trained(rank, world_size, folder, *way) for way in ways]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLIDING)
def test_two_ranks_train_and_export_as_with_sdpa(name: str, tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", SLIDING[name])
    found = run_ranks(_trained_both_ways, 2, tmp_path / "model")[0]
    _, loss, weights, exported = found[0]
    assert [attention for attention, *_ in found] == ["sdpa", PACKED_ATTENTION, PACKED_ATTENTION]
    for _, other_loss, other_weights, other_exported in found[1:]:
        assert other_loss == pytest.approx(loss, abs=1e-6)
        assert _largest_difference(weights, other_weights) < 1e-6
        assert other_exported == exported and PACKED_ATTENTION not in exported
    assert "attn_implementation" not in json.loads(exported)
