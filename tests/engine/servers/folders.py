"""Published folders as a publisher leaves them: tiny models with a probe, or almost nothing for
hashed weights.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save
from transformers import PreTrainedModel

from holdfast.engine import WeightUpdateMeta
from holdfast.engine.hf.adapter_folder import CONFIG, WEIGHTS
from holdfast.engine.hf.versions import version_path, write_version
from holdfast.engine.servers.content_check import PROBE_NAME, WeightsProbe
from holdfast.utils.files import walk_files
from holdfast.utils.manifest import file_entries, write_entry, write_manifest
from tests.engine.models import build_reference, tiny_qwen3
from tests.engine.servers.fake_adapters import MODULES
from tests.engine.servers.fake_weights import HashedWeights

PROMPT = torch.randint(4, 60, (100,), generator=torch.Generator().manual_seed(5)).tolist()


def tiny_model(seed: int = 0) -> PreTrainedModel:
    """A Qwen3 with a vocabulary of 64."""
    return build_reference(tiny_qwen3(tied=False, vocab_size=64), seed)


def step(model: PreTrainedModel, lr: float) -> None:
    """Change every weight by ``lr``, up or down, like a first step of AdamW."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.where(torch.rand(param.shape, generator=generator) < 0.5, -lr, lr))


def model_logprobs(model: PreTrainedModel, ids: Sequence[int]) -> list[float]:
    """Log-probabilities of all tokens but the first, with another attention kernel than a
    fake's.
    """
    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = torch.log_softmax(
            model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float(), -1
        )
    return [float(row[token]) for row, token in zip(rows, ids[1:], strict=False)]


def publish_model(
    root: Path, version: int, model: PreTrainedModel, dtype: str = "float32", probe: bool = True
) -> str:
    """Publish a model and return the path of the folder."""
    folder, stored = version_path(root, version), copy.deepcopy(model)
    stored.to(getattr(torch, dtype)).save_pretrained(folder)
    entries = file_entries(folder, list(walk_files(folder)))
    if probe:
        found = WeightsProbe(PROMPT, model_logprobs(stored, PROMPT), dtype)
        entries.append(write_entry(folder, PROBE_NAME, found.encode()))
    write_manifest(folder, entries, {"weight_version": version})
    return str(folder)


def publish_hashed(root: Path, version: int, config: dict[str, int] | None = None) -> str:
    """Publish a folder for hashed weights, perhaps with a config, and return its path."""
    folder = version_path(root, version)
    folder.mkdir(parents=True)
    entries = [write_entry(folder, "model.safetensors", save({"version": torch.tensor(version)}))]
    if config is not None:
        entries.append(write_entry(folder, "config.json", json.dumps(config).encode()))
    write_manifest(folder, entries, {"weight_version": version})
    return str(folder)


def adapted_model(seed: int = 0) -> PreTrainedModel:
    """`tiny_model` with adapters of rank 8 that change nothing yet."""
    return adapted(tiny_model(seed), seed)


def adapted(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """The model with adapters of rank 8 on all its layers, which change nothing yet."""
    from peft import LoraConfig

    torch.manual_seed(seed)
    model.add_adapter(LoraConfig(r=8, lora_alpha=16, target_modules=MODULES, task_type="CAUSAL_LM"))
    return model


def step_adapters(model: PreTrainedModel, lr: float) -> None:
    """Apply `step` to the trained parameters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.where(torch.rand(param.shape, generator=generator) < 0.5, -lr, lr))


def publish_adapters(
    root: Path,
    version: int,
    model: PreTrainedModel,
    dtype: str | None = None,
    base: str = "float32",
) -> str:
    """Publish the adapters of a model with a base in float32, like an engine does. Returns the path
    of the folder.
    """
    probe = WeightsProbe(PROMPT, model_logprobs(model, PROMPT), base).encode()
    meta = WeightUpdateMeta("adapter", str(root), dtype=dtype)
    write_version(
        model, meta, version, base_dtype=getattr(torch, base), extra_files={PROBE_NAME: probe}
    )
    return str(version_path(root, version))


def publish_hashed_adapters(root: Path, version: int, rank: int = 8, probe: bool = False) -> str:
    """`publish_hashed` for adapters."""
    folder = version_path(root, version)
    folder.mkdir(parents=True)
    names = [f"base_model.model.model.layers.0.{module}.lora_A.weight" for module in MODULES]
    weights = save({name: torch.full((rank, 2), float(version)) for name in names})
    files = {WEIGHTS: weights, CONFIG: b"{}"}
    if probe:
        found = WeightsProbe(PROMPT, HashedWeights(version).prompt_logprobs(PROMPT), "float32")
        files[PROBE_NAME] = found.encode()
    entries = [write_entry(folder, name, data) for name, data in files.items()]
    write_manifest(folder, entries, {"weight_version": version, "base_dtype": "float32"})
    return str(folder)
