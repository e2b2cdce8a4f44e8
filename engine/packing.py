"""Run a model on a micro-batch, packed into one row or padded, and make sure that packing is safe for this model.

A transformers model sees where a sequence starts from ``position_ids`` alone, and only without a cache. One that does
not look lets sequences attend to each other without an error, so `check_packing` asks the model itself.
"""

import torch
from transformers import PreTrainedModel

from ..utils.errors import ConfigError
from .microbatch import MicroBatch

_TOLERANCE = 0.02
"""Largest change, as a share of the largest output, that rounding may cause; a leak changes outputs by far more."""


def model_output(model: PreTrainedModel, mb: MicroBatch, packed: bool) -> torch.Tensor:
    """``[tokens, vocab]`` logits of an actor, ``[tokens]`` values of a critic (float32), in packed order."""
    if packed:
        ids, positions = mb.data["input_ids"][None], mb.position_ids[None]
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    else:
        padded = mb.padded()
        logits = model(**padded, use_cache=False).logits[padded["attention_mask"].bool()]
    return logits[:, 0].float() if logits.shape[-1] == 1 else logits


@torch.no_grad()
def check_packing(model: PreTrainedModel, device: torch.device) -> None:
    """Raise ConfigError if what precedes a packed sequence changes the model's output for it; all ranks call it."""
    was_training = model.training
    model.eval()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=device)
    vocab = model.config.get_text_config().vocab_size
    outputs = []
    for before in (0, vocab - 1):
        ids = torch.tensor([[before, before // 2, before, 1 % vocab, 0, 1 % vocab]], device=device)
        outputs.append(model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, 3:].float())
    model.train(was_training)
    change = float((outputs[0] - outputs[1]).abs().max())
    if change > _TOLERANCE * float(outputs[0].abs().max()):
        raise ConfigError(
            f"{type(model).__name__} lets packed sequences see each other (outputs change by {change:.3g}); set config "
            "key 'pack_sequences' to false"
        )
