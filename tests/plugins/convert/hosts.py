"""Training with other libraries: a tiny Qwen3 with tied weights, its optimizer and schedule, and
their ways to save.
"""

import hashlib
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from holdfast.engine.dcp.state import DCPState


def tiny_config(tied: bool = True) -> Qwen3Config:
    config = Qwen3Config(
        vocab_size=33,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
        attention_dropout=0.1,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    return config


def tiny_experts() -> Qwen3MoeConfig:
    """A model whose experts are one tensor in memory and many in its files."""
    config = Qwen3MoeConfig(
        vocab_size=33,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,  # type: ignore[call-arg]
    )
    config.architectures = ["Qwen3MoeForCausalLM"]
    return config


def decay_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


class Host:
    """Model, AdamW and a schedule. On ranks the model is sharded layer by layer, like in verl.

    Args:
        seed: seed of the weights. Use another one for a host that loads.
        ranks: whether to shard over the default group.
        groups: whether the optimizer has two groups.
    """

    def __init__(
        self, seed: int = 0, *, ranks: bool = False, groups: bool = False, tied: bool = True
    ) -> None:
        torch.manual_seed(seed)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(tied))
        if ranks:
            for layer in self.model.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
        params = decay_groups(self.model) if groups else list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 / (1 + step)
        )

    @property
    def state(self) -> DCPState:
        return DCPState(self.model, self.optimizer, self.scheduler)

    def step(self) -> None:
        """Train on ids drawn by the generators, with dropout, so that a wrong generator state
        changes the step.
        """
        ids = torch.randint(0, 33, (2, 7))
        self.model.train()
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def train(self, steps: int, seed: int = 1) -> "Host":
        seed_all(seed + (dist.get_rank() if dist.is_initialized() else 0))
        for _ in range(steps):
            self.step()
        return self

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of model and optimizer, whole. All ranks call it."""
        return {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
            for name, tensor in self.state.live_tensors().items()
        }

    def digest(self) -> str:
        """SHA-256 of the tensors and the learning rates."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.tensors().items()):
            found.update(name.encode() + tensor.numpy().tobytes())
        return found.hexdigest() + str([group["lr"] for group in self.optimizer.param_groups])


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert differing(found, expected) == []


@dataclass
class FSDPConfig:
    """The contents of verl's fsdp_config.json."""

    FSDP_version: int
    world_size: int


def save_as_verl(host: Host, folder: Path, *, version: int = 2) -> None:
    """Write the files of verl's FSDPCheckpointManager, with the same calls. All ranks call it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    torch.save(host.model.state_dict(), folder / f"model_world_size_{world}_rank_{rank}.pt")
    torch.save(host.optimizer.state_dict(), folder / f"optim_world_size_{world}_rank_{rank}.pt")
    rng = {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }
    extra = {"lr_scheduler": host.scheduler.state_dict(), "rng": rng}
    torch.save(extra, folder / f"extra_state_world_size_{world}_rank_{rank}.pt")
    if rank == 0:
        host.model.config.save_pretrained(folder / "huggingface")
        (folder / "fsdp_config.json").write_text(
            json.dumps(asdict(FSDPConfig(version, world)), indent=4)
        )
    dist.barrier()


def load_as_verl(host: Host, folder: Path) -> None:
    """Load like verl, with the same calls."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def read(kind: str) -> Any:
        return torch.load(folder / f"{kind}_world_size_{world}_rank_{rank}.pt", weights_only=False)

    host.model.load_state_dict(read("model"))
    host.optimizer.load_state_dict(read("optim"))
    extra = read("extra_state")
    torch.set_rng_state(extra["rng"]["cpu"])
    np.random.set_state(extra["rng"]["numpy"])
    random.setstate(extra["rng"]["random"])
    host.scheduler.load_state_dict(extra["lr_scheduler"])
