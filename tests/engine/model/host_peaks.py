"""Peak host memory of real runs, by phase, next to the planned one: ``python -m
tests.engine.model.host_peaks``.

Ranks are processes on CPUs. A figure is the growth of a rank's resident memory (RSS) since another
engine has run with few tokens in this process and is gone, so that libraries, threads and
connections do not count. Two caches would:

- glibc keeps freed memory. `mallopt` has it give tensors pages of their own, and return them when
  they are freed.
- On CPUs torch and oneDNN keep 1.8 MB for each shape of a matrix product in bfloat16, and experts
  have many. Two variables limit that.
"""

import ctypes
import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from holdfast.engine import (
    FSDPEngine,
    MicroBatchSpec,
    OptimizerConfig,
    TrainEngineConfig,
    WeightUpdateMeta,
)
from holdfast.engine.model.memory_plan import measure_model, moment_bytes, plan_step
from tests.engine.architectures.released import model_type, tiny_values
from tests.engine.test_fsdp_engine import loss_tokens
from tests.helpers import run_ranks
from tests.recover.runs import SPEC, make_handler, step_info

SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 8192}
HEADS = {
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
MODELS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": {},
    "Qwen/Qwen2.5-7B-Instruct": {},
    "Qwen/Qwen3-0.6B": {},
    "Qwen/Qwen3-30B-A3B": EXPERTS,
    "google/gemma-3-1b-it": {},
}
"""Released architectures, in these sizes."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": "selective"},
    "lora": {"use_lora": True},
}
RANKS = 2
TOKENS = 256
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # names of glibc's mallopt


def write_model(folder: Path, name: str) -> None:
    """Write a folder with weights in bfloat16."""
    values = tiny_values(name) | SIZES | HEADS | MODELS[name]
    values.pop("layer_types", None)  # as many as the tiny model has layers
    config = CONFIG_MAPPING[model_type(name)].from_dict(values)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def _status(key: str) -> int:
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) << 10


class _Peaks:
    """Peaks of this process, phase by phase, above the memory at the start."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._start = _status("VmRSS")
        self._begin()

    def _begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM

    def take(self) -> int:
        """The peak since the last call."""
        peak = _status("VmHWM") - self._start
        self._begin()
        return peak

    def now(self) -> int:
        return _status("VmRSS") - self._start


def _loss(output: Any, mb: Any) -> torch.Tensor:
    return -(output.logprobs * mb["loss_mask"]).sum() / mb["loss_mask"].sum()


def _run(config: TrainEngineConfig, tokens: int, root: Path) -> dict[str, int]:
    """Train, snapshot, publish and leave. Returns the peak of each phase."""
    found, peaks = dict[str, int](), _Peaks()
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, SPEC)
    peaks.take()  # of the checks before the load
    found["loaded"] = peaks.now()
    ids = torch.randint(0, 90, (4, tokens // 2))
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "loss_mask": torch.ones_like(ids),
    }
    engine.train_batch(batch, _loss, loss_tokens)  # allocates the moments
    peaks.take()
    assert engine.optimizer is not None
    engine.optimizer.register_step_pre_hook(lambda *_: found.update(backward=peaks.take()))
    engine.train_batch(batch, _loss, loss_tokens)
    found["step"] = peaks.take()
    handler = make_handler(root / "run", freq_steps=1, async_save=True)
    handler.load(engine)
    handler.dump(engine, step_info(0))
    handler.wait()
    found["snapshot"] = peaks.take()
    engine.connect_engine([], WeightUpdateMeta("disk", str(root / "weights"), version=1))
    engine.update_weights()
    found["publication"] = peaks.take()
    engine.offload()
    found["offloaded"] = peaks.now()
    engine.onload()
    handler.close()
    engine.destroy()
    return found


def _keep_no_caches() -> None:
    os.environ.update(ONEDNN_PRIMITIVE_CACHE_CAPACITY="0", LRU_CACHE_CAPACITY="1")
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 13)
    libc.mallopt(_TRIM_THRESHOLD, 1 << 13)


def measured_and_planned(
    rank: int, world_size: int, folder: str, setting: str
) -> dict[str, tuple[int, int]]:
    """Phase -> (measured bytes, planned bytes) of this rank."""
    _keep_no_caches()
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "optimizer": OptimizerConfig(lr=1e-3),
        **SETTINGS[setting],
    }
    options["mb_spec"] = MicroBatchSpec(max_tokens_per_mb=TOKENS)
    config, runs = TrainEngineConfig(path=folder, **options), Path(folder) / setting
    _run(config, 32, runs / "first")
    found = _run(config, TOKENS, runs / "second")
    sizes = measure_model(config, TOKENS)
    plan = plan_step(sizes, config, config.parallel_strategy.for_world(world_size), TOKENS)
    assert config.optimizer is not None
    trained = sizes.n_trained // world_size
    state = plan.weights + moment_bytes(config.optimizer, trained, 0)
    largest = max(unit.largest for unit in sizes.units) // world_size
    *others, rest = (2 * (unit.dense + unit.experts) for unit in sizes.units)
    planned = {
        "loaded": plan.weights,
        "backward": plan.peak,
        "step": state
        + 4 * trained
        + 2 * 4 * largest,  # AdamW's temporary tensors, which a fused kernel does not need
        "snapshot": state + plan.staged,
        "publication": state
        + plan.staged
        + 2 * rest
        + 2 * max(others),  # gathered for the probe of the weights
        "offloaded": max(plan.staged, state),
    }
    return {phase: (found[phase], planned[phase]) for phase in planned}


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), name)
            for setting in SETTINGS:
                ranks = run_ranks(measured_and_planned, RANKS, folder, setting, timeout_s=900)
                cells = [
                    f"{phase} {planned / 1e6:.0f}/{measured / 1e6:.0f} MB {planned / measured:.3f}"
                    for phase, (measured, planned) in ranks[0].items()
                ]
                print(f"{name} {setting}: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
