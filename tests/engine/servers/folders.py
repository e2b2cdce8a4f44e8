"""Published folders, as a publisher leaves them: tiny models with a probe, or next to nothing for hashed weights."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from holdfast.engine.hf.versions import version_path
from holdfast.engine.servers.probe import PROBE_NAME, WeightsProbe
from holdfast.utils.files import walk_files
from holdfast.utils.manifest import file_entries, write_entry, write_manifest
from tests.engine.models import build_reference, tiny_qwen3

PROMPT = torch.randint(4, 60, (100,), generator=torch.Generator().manual_seed(5)).tolist()


def tiny_model(seed: int = 0) -> PreTrainedModel:
    """A Qwen3 of 64 words."""
    return build_reference(tiny_qwen3(tied=False, vocab_size=64), seed)


def step(model: PreTrainedModel, lr: float) -> None:
    """About what a step of AdamW does at first: every weight moves by ``lr``, up or down."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.where(torch.rand(param.shape, generator=generator) < 0.5, -lr, lr))


def model_logprobs(model: PreTrainedModel, ids: Sequence[int]) -> list[float]:
    """Log-probabilities of all but the first, by another attention than a fake's."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = torch.log_softmax(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float(), -1)
    return [float(row[token]) for row, token in zip(rows, ids[1:], strict=False)]


def publish_model(root: Path, version: int, model: PreTrainedModel, dtype: str = "float32", probe: bool = True) -> str:
    """Publish a model; the path of the folder."""
    folder, stored = version_path(root, version), tiny_model()
    stored.load_state_dict(model.state_dict())
    stored.to(getattr(torch, dtype)).save_pretrained(folder)
    entries = file_entries(folder, list(walk_files(folder)))
    if probe:
        found = WeightsProbe(PROMPT, model_logprobs(stored, PROMPT), dtype)
        entries.append(write_entry(folder, PROBE_NAME, found.encode()))
    write_manifest(folder, entries, {"weight_version": version})
    return str(folder)


def publish_hashed(root: Path, version: int) -> str:
    """Publish what hashed weights need; the path of the folder."""
    folder = version_path(root, version)
    folder.mkdir(parents=True)
    entry = write_entry(folder, "model.safetensors", f"version {version}".encode())
    write_manifest(folder, [entry], {"weight_version": version})
    return str(folder)
