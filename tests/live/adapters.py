"""Log-probabilities of adapters, by the trainer and by PEFT."""

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from holdfast.engine import FSDPEngine
from holdfast.engine.servers.api import ModelResponse

RANK = 8


def error_of(response: ModelResponse, expected: Sequence[float]) -> float:
    """Largest difference to ``expected``, the log-probabilities of prompt and completion."""
    start = len(response.input_tokens)
    return max(abs(a - b) for a, b in zip(response.output_logprobs, expected[start:], strict=True))


def trainers_logprobs(engine: FSDPEngine, response: ModelResponse) -> list[float]:
    """Log-probabilities of the trainer's own forward, with adapters."""
    ids = torch.tensor([response.input_tokens + response.output_tokens])
    return engine.forward_batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)})[
        0
    ].tolist()


@torch.no_grad()
def adapter_logprobs(base: Path, adapters: Path, response: ModelResponse) -> list[float]:
    """Log-probabilities of transformers and PEFT, from the folders."""
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapters
    ).eval()
    ids = response.input_tokens + response.output_tokens
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return [0.0, *logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].tolist()]
