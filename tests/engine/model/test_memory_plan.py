"""The memory of a step that is computed from a config is the memory that a step takes."""

import copy
import logging
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from holdfast.engine import (
    FSDPConfig,
    MicroBatchSpec,
    OptimizerConfig,
    ParallelStrategy,
    TrainEngineConfig,
)
from holdfast.engine.model.memory_plan import AnswerGroup, log_plan, measure_model, plan_step
from holdfast.utils.errors import ConfigError
from tests.engine.architectures.released import tiny_config
from tests.engine.model import host_peaks
from tests.engine.peak_memory import CAN_MEASURE
from tests.engine.test_fsdp_engine import loss_tokens, make_engine
from tests.helpers import run_ranks
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(150)

HEADS: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 256,
}
WIDE: dict[str, Any] = HEADS | {"hidden_size": 512}
MODELS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**HEADS, intermediate_size=768, num_hidden_layers=6, vocab_size=8000),
    "qwen3_tied": Qwen3Config(
        **HEADS,
        intermediate_size=1024,
        num_hidden_layers=8,
        vocab_size=600,
        tie_word_embeddings=True,
    ),
    "llama": LlamaConfig(**HEADS, intermediate_size=1024, num_hidden_layers=4, vocab_size=20000),
    "qwen3_moe": Qwen3MoeConfig(
        **HEADS,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        vocab_size=4000,
        num_experts=8,
        num_experts_per_tok=2,
    ),
    "wide": Qwen3Config(**WIDE, intermediate_size=2048, num_hidden_layers=3, vocab_size=600),
}
"""The largest part differs: logits, activations, the head's gradient, experts, a block."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators touched and that still exist. ``peak`` is
    their maximum.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, Any] = {}
        self._add(tensors)

    def _add(self, values: Any) -> None:
        for value in tree_flatten(values)[0]:
            if isinstance(value, torch.Tensor):
                storage = (
                    value.to_local() if isinstance(value, DTensor) else value
                ).untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._add((out, args, kwargs))
        living = {
            key: storage for key, ref in self._storages.items() if (storage := ref()) is not None
        }
        self._storages = {key: self._storages[key] for key in living}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in living.values()))
        return out


def loss(output: Any, mb: Any) -> torch.Tensor:
    return -(output.logprobs * mb["loss_mask"]).sum() / mb["loss_mask"].sum()


def _measured_and_planned(
    rank: int, world_size: int, folder: str, tokens: int, changes: Any
) -> tuple[int, int]:
    settings = {"init_from_scratch": True, "dtype": "bfloat16", **changes}
    engine = make_engine(folder, mb_spec=MicroBatchSpec(max_tokens_per_mb=tokens), **settings)
    ids = torch.randint(0, 500, (4, tokens // 2))
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "loss_mask": torch.ones_like(ids),
    }
    engine.train_batch(batch, loss, loss_tokens)
    states = [
        value
        for state in engine.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    with LiveBytes([*engine.model.parameters(), *states]) as live:
        assert engine.train_batch(batch, loss, loss_tokens)["n_mbs"] == 2
    sizes = measure_model(engine.config, tokens)
    plan = plan_step(sizes, engine.config, ParallelStrategy().for_world(world_size), tokens)
    assert sizes.n_parameters == sum(param.numel() for param in engine.model.parameters())
    return live.peak, plan.peak


SETTINGS = {
    "plain": {"fsdp": FSDPConfig(gradient_sync="every")},
    "sync_last": {"fsdp": FSDPConfig(gradient_sync="last")},
    "checkpointing": {"fsdp": FSDPConfig(gradient_sync="every"), "gradient_checkpointing": True},
    "every_2": {"fsdp": FSDPConfig(gradient_sync="every"), "gradient_checkpointing": "every_2"},
    "selective": {"fsdp": FSDPConfig(gradient_sync="every"), "gradient_checkpointing": "selective"},
    "adam8bit": {"optimizer": OptimizerConfig(type="adam8bit")},
    "adam_bf16": {"optimizer": OptimizerConfig(type="adam_bf16")},
    "muon": {"optimizer": OptimizerConfig(type="muon")},
    "gathered": {"fsdp": FSDPConfig(gradient_sync="every", reshard_after_forward=False)},
    "lora": {"use_lora": True},
    "float32": {"dtype": "float32"},
}


@pytest.mark.parametrize(
    ("model", "setting"),
    slow_but(
        [],
        [(model, setting) for model in MODELS for setting in SETTINGS],
    ),
)
def test_the_planned_peak_of_a_step_is_within_a_tenth_of_the_measured_one(
    tmp_path: Path, model: str, setting: str
) -> None:
    config = copy.deepcopy(MODELS[model])
    config.dtype = torch.bfloat16  # of frozen weights
    config.save_pretrained(tmp_path)
    tokens = 128 if model == "llama" else 1024
    for measured, planned in run_ranks(
        _measured_and_planned, 2, str(tmp_path), tokens, SETTINGS[setting]
    ):
        assert planned == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not CAN_MEASURE, reason="needs a writable /proc/self/clear_refs")
@pytest.mark.parametrize(
    ("model", "setting"), [("meta-llama/Llama-3.1-8B", "plain"), ("Qwen/Qwen3-30B-A3B", "lora")]
)
def test_the_resident_memory_of_each_phase_is_within_a_tenth_of_the_planned(
    tmp_path: Path, model: str, setting: str
) -> None:
    host_peaks.write_model(tmp_path, model)
    args = (host_peaks.measured_and_planned, host_peaks.RANKS, str(tmp_path), setting)
    for of_rank in run_ranks(*args, timeout_s=400):
        for phase, (measured, planned) in of_rank.items():
            assert planned == pytest.approx(measured, rel=0.1), phase


def test_more_ranks_of_any_kind_need_less_memory_on_each(tmp_path: Path) -> None:
    MODELS["qwen3_moe"].save_pretrained(tmp_path)
    config = TrainEngineConfig(path=str(tmp_path))
    sizes = measure_model(config, 4096)

    def peak(**kinds: int) -> int:
        return plan_step(sizes, config, ParallelStrategy(**kinds), 4096).peak

    alone = peak(data_parallel_size=1)
    assert peak(data_parallel_size=8) < alone
    assert peak(data_parallel_size=8, replicate_size=2) > peak(data_parallel_size=8)
    assert peak(data_parallel_size=4, context_parallel_size=2) < peak(data_parallel_size=8)
    assert peak(data_parallel_size=4, tensor_parallel_size=2) < peak(data_parallel_size=8)
    assert peak(data_parallel_size=8, expert_parallel_size=4) < peak(data_parallel_size=8)


def test_fewer_blocks_that_run_again_need_more_memory(tmp_path: Path) -> None:
    MODELS["qwen3"].save_pretrained(tmp_path)
    config = TrainEngineConfig(path=str(tmp_path))
    sizes, alone = measure_model(config, 4096), ParallelStrategy().for_world(1)
    choices = (True, "every_1", "every_2", "every_9", False, "selective")
    peaks = [
        plan_step(sizes, replace(config, gradient_checkpointing=each), alone, 4096).peak
        for each in choices
    ]
    assert peaks[0] == peaks[1] < peaks[2] < peaks[3] < peaks[4] and peaks[0] < peaks[5] < peaks[4]


def test_products_that_experts_write_to_are_not_among_the_results_that_selective_keeps(
    tmp_path: Path,
) -> None:
    config = tiny_config("openai/gpt-oss-20b")
    config.save_pretrained(tmp_path)
    sizes = measure_model(TrainEngineConfig(path=str(tmp_path)), 64)
    queries = config.num_attention_heads * config.head_dim
    keys_and_values = 2 * config.num_key_value_heads * config.head_dim
    # These products, that of the output and that of the router, in bfloat16.
    of_a_block = 2 * (queries + keys_and_values + config.hidden_size + config.num_local_experts)
    for block in sizes.blocks:
        assert block.results + block.results_in_parts == of_a_block


def test_copies_of_the_keys_of_a_shared_prompt_count_in_each_layer_that_keeps_them(
    tmp_path: Path,
) -> None:
    MODELS["qwen3"].save_pretrained(tmp_path)
    config = TrainEngineConfig(path=str(tmp_path))
    sizes, group = measure_model(config, 4096), AnswerGroup(prompt=701, answer=49, size=8)
    assert group.row_tokens == 1100 and group.factor == pytest.approx(8 * 750 / 1100)
    # Keys and values of two heads of 64 in bfloat16, for 8 x 700 copies in each 1,100 tokens.
    of_a_layer = 4096 * 8 * 700 / 1100 * 2 * 2 * 64 * 2

    def copies(checkpointing: bool | str, **kinds: int) -> float:
        settings = replace(config, gradient_checkpointing=checkpointing)
        mesh = ParallelStrategy(data_parallel_size=1, **kinds)
        plans = [plan_step(sizes, settings, mesh, 4096, group=each) for each in (None, group)]
        return (plans[1].peak - plans[0].peak) / of_a_layer

    assert copies(False) == pytest.approx(6, rel=1e-3)
    assert copies("every_2") == pytest.approx(3, rel=1e-3)
    assert 0 <= copies(True) <= 1.001
    for shared in ({"context_parallel_size": 2}, {"tensor_parallel_size": 2}):
        assert copies(False, **shared) == pytest.approx(3, rel=1e-3)


def test_state_in_host_memory_takes_none_of_the_device_except_a_block_in_the_step(
    tmp_path: Path,
) -> None:
    MODELS["wide"].save_pretrained(tmp_path)
    config = TrainEngineConfig(path=str(tmp_path), fsdp=FSDPConfig(gradient_sync="every"))
    assert config.optimizer is not None
    sizes, two = measure_model(config, 4096), ParallelStrategy().for_world(2)
    shard = 4 * sizes.n_trained // 2
    optimizer = replace(config, optimizer=replace(config.optimizer, offload=True))
    params = replace(config, fsdp=replace(config.fsdp, offload_params=True))
    for settings, on_host in ((config, 0), (optimizer, 2 * shard), (params, 4 * shard)):
        plan = plan_step(sizes, settings, two, 4096)
        assert plan.on_host == pytest.approx(on_host, rel=1e-3)
        assert plan.staged == pytest.approx(3 * shard, rel=1e-3)
    plan = plan_step(sizes, params, two, 4096)
    assert plan.weights == plan.gradients == plan.moments == 0 < plan.activations
    few_tokens = plan_step(sizes, optimizer, two, 1)
    assert few_tokens.moments == pytest.approx(2 * shard, rel=1e-3), (
        "one block holds all, and the step is the peak"
    )
    assert plan_step(sizes, optimizer, two, 4096).moments == 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that torch believes to have 1 GB."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=10**9)
    )
    return torch.device("cuda", 0)


def _logged(
    caplog: pytest.LogCaptureFixture, config: TrainEngineConfig, device: torch.device
) -> list[str]:
    caplog.clear()
    caplog.set_level(logging.DEBUG, "holdfast.engine.model.memory_plan")
    log_plan(config, ParallelStrategy().for_world(1), device)
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "holdfast.engine.model.memory_plan"
    ]


def test_the_log_has_the_planned_peak_next_to_the_memory_of_a_gpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gpu: torch.device
) -> None:
    MODELS["qwen3"].save_pretrained(tmp_path)
    config = TrainEngineConfig(path=str(tmp_path), mb_spec=MicroBatchSpec(max_tokens_per_mb=1024))
    (line,) = _logged(caplog, config, gpu)
    assert line.startswith(
        "a step of 1024 tokens per micro-batch is planned to take 0.291 GB on each rank ("
    )
    assert line.endswith("(activations 0.0918, moments 0.0705, head 0.0502); the device has 1 GB")
    (line,) = _logged(caplog, replace(config, mb_spec=MicroBatchSpec(max_tokens_per_mb=8192)), gpu)
    assert line.endswith("the device has 1 GB; holdfast plan says what to change")
    for silent in ({"mb_spec": MicroBatchSpec(max_tokens_per_mb=None)}, {"optimizer": None}):
        assert _logged(caplog, replace(config, **silent), gpu) == []
    assert _logged(caplog, config, torch.device("cpu")) == []


def test_an_engine_whose_memory_cannot_be_planned_starts_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gpu: torch.device
) -> None:
    tiny_config("microsoft/Phi-3.5-MoE-instruct").save_pretrained(tmp_path)
    assert (
        "cannot be computed from its config alone"
        in _logged(caplog, TrainEngineConfig(path=str(tmp_path)), gpu)[0]
    )
    assert caplog.records[-1].levelno == logging.DEBUG


PLANNED = {
    "openai/gpt-oss-20b": "sinks of the attention",
    "google/gemma-3-1b-it": "a buffer from a number",
    "google/gemma-4-26B-A4B": "other key-value heads in some layers",
    "microsoft/Phi-4-mini-instruct": "frequencies from a list",
}


@pytest.mark.parametrize("name", PLANNED)
def test_released_architectures_are_planned(tmp_path: Path, name: str) -> None:
    tiny_config(name).save_pretrained(tmp_path)
    assert measure_model(TrainEngineConfig(path=str(tmp_path)), 64).n_parameters > 0


def test_experts_are_planned_in_float32(tmp_path: Path) -> None:
    """On fake tensors torch multiplies groups in bfloat16 alone."""
    tiny_config("Qwen/Qwen3-30B-A3B").save_pretrained(tmp_path)
    half, full = (
        measure_model(TrainEngineConfig(path=str(tmp_path), dtype=d), 64)
        for d in ("bfloat16", "float32")
    )
    for of_half, of_full in zip(half.blocks, full.blocks, strict=True):
        assert of_half.kept_in_parts < of_full.kept_in_parts <= 2 * of_half.kept_in_parts


def test_an_architecture_whose_forward_depends_on_values_is_refused(tmp_path: Path) -> None:
    tiny_config("microsoft/Phi-3.5-MoE-instruct").save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError,
        match="activations of PhimoeForCausalLM cannot be computed from its config alone",
    ):
        measure_model(TrainEngineConfig(path=str(tmp_path)), 64)
