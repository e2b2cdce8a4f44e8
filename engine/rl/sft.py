"""Supervised fine-tuning on top of an engine: ``engine.train_batch(batch, sft_loss_fn, count_loss_tokens)``."""

import torch

from ..api import Batch
from .logprobs import token_logprobs
from .losses import sft_loss


def sft_loss_fn(logits: torch.Tensor, micro_batch: Batch) -> torch.Tensor:
    """Mean cross entropy over the loss tokens (a `LossFn`): ``logits`` is ``[T, V]``, the result a scalar."""
    logprobs, _ = token_logprobs(logits, micro_batch["input_ids"], micro_batch["cu_seqlens"])
    return sft_loss(logprobs, micro_batch["loss_mask"])
