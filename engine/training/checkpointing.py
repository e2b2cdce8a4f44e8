"""Activation checkpointing: blocks that compute their activations again in the backward, or some of
them.

Blocks are not wrapped, so names of parameters stay as they are.
"""

from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...utils.errors import ConfigError

_PRODUCTS = {"mm", "addmm", "_grouped_mm"}
"""Operators of linear layers and experts. Scores of an attention are a ``bmm``, and would take
tokens x tokens.
"""


def checkpoint_activations(model: PreTrainedModel, choice: bool | str) -> None:
    """Set up what ``gradient_checkpointing`` of `TrainEngineConfig` says.

    Raises:
        ConfigError: single blocks of this model cannot be chosen (``every_N``).
    """
    if choice is False:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if choice == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    model.gradient_checkpointing_enable(options)
    if choice is True or choice == "selective":
        return

    # The rest is `every_N`, and transformers has just switched on every block.
    blocks = []
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            blocks.append(module)
    if not blocks:
        raise ConfigError(
            f"config key 'gradient_checkpointing' is {choice!r}, but {type(model).__name__} "
            "has no blocks that can be checkpointed one by one; set it to true or false"
        )
    every = int(choice.removeprefix("every_"))
    for number, block in enumerate(blocks):
        block.gradient_checkpointing = number % every == 0


def keeps_result(operator: Any) -> bool:
    """Whether ``gradient_checkpointing: selective`` keeps the result of an operator."""
    # "mm" of "aten::mm.default"
    _, _, overload = operator.name().partition("::")
    name, _, _ = overload.partition(".")
    return name in _PRODUCTS or "attention" in name or "attn" in name


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if keeps_result(operator):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
