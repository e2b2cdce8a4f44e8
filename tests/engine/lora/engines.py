"""Engines with adapters for tests, and a batch to train them on."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.engine import FinetuneSpec, FSDPEngine, TrainEngineConfig
from holdfast.engine.config import OptimizerConfig
from tests.engine.models import build_reference, tiny_qwen3
from tests.helpers import untimed

RANK, ALPHA = 4, 8


def write_base(folder: Path, seed: int = 0, hidden_size: int = 32) -> Path:
    """A model folder in bfloat16."""
    build_reference(tiny_qwen3(hidden_size=hidden_size), seed).bfloat16().save_pretrained(folder)
    return folder


def lora_engine(base: Path, **keys: Any) -> FSDPEngine:
    """An initialized engine that trains adapters of ``base`` and computes in float32."""
    lora = {"use_lora": True, "lora_rank": RANK, "lora_alpha": ALPHA}
    given: Any = {"path": str(base), "dtype": "float32", "device": "cpu", **lora, **keys}
    engine = FSDPEngine(TrainEngineConfig(optimizer=OptimizerConfig(lr=1e-2), **given))
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(1, 100, 1))
    return engine


def batch() -> dict[str, torch.Tensor]:
    """Two rows of different lengths."""
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [9, 3, 5, 7, 11, 0, 0, 0]])
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": mask}


def train(engine: FSDPEngine, steps: int) -> list[dict[str, float]]:
    """Train and return the statistics of each step without its speed."""

    def loss_fn(output: Any, mb: dict[str, torch.Tensor]) -> torch.Tensor:
        return -output.logprobs[mb["loss_mask"].bool()].mean()

    steps_stats = (
        engine.train_batch(batch(), loss_fn, lambda mb: mb["loss_mask"].sum()) for _ in range(steps)
    )
    return [untimed(stats) for stats in steps_stats]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a whole tensor (collective)."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained_state(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Adapters and moments (collective)."""
    return {name: whole(tensor) for name, tensor in engine.dcp_state().live_tensors().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether names and bits are equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
