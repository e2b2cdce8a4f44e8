"""Supervised fine-tuning on top of an engine: ``engine.train_batch(batch, sft_loss_fn, count_loss_tokens)``."""

from typing import Any

import torch

from ..api import Batch
from ..training.logprobs import token_logprobs
from .losses import sft_loss


def sft_loss_fn(output: Any, micro_batch: Batch) -> torch.Tensor:
    """Mean cross entropy over the loss tokens (a `LossFn`), a scalar; ``output`` as `token_logprobs` takes it."""
    logprobs, _ = token_logprobs(output, micro_batch["input_ids"], micro_batch["cu_seqlens"])
    return sft_loss(logprobs, micro_batch["loss_mask"])
