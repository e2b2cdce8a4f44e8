"""``compile: true``: blocks are compiled by torch.compile, in place, so that names and checkpoints
stay as they are.

Only the forward itself is compiled. Hooks of FSDP2 and activation checkpointing stay outside.
Graphs have a dynamic number of tokens, and nothing in them depends on the lengths of sequences (see
`attention`). So their number does not grow with the rows: there are graphs for rows of several
tokens and for a single token (a dummy), each with and without gradients. The passes over logits
(`logprobs`) are compiled, too.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

Class = type[nn.Module]
Function = Callable[..., Any]

_BACKEND = "inductor"


def compile_blocks(model: nn.Module, blocks: tuple[Class, ...]) -> None:
    """Compile the forward of the blocks at its first call. Call it before `shard_model`."""
    # Blocks of one class share a compiled forward.
    classes: dict[Class, Class] = {}
    for module in model.modules():
        if not isinstance(module, blocks):
            continue
        cls = type(module)
        if cls not in classes:
            classes[cls] = _compiled_class(cls)
        module.__class__ = classes[cls]  # type: ignore[assignment]


def _compiled_class(cls: Class) -> Class:
    """Subclass of ``cls`` with a compiled ``forward``, around which transformers puts its
    checkpointing again.

    The checkpointing of ``cls`` is taken off, because it is one function for all classes, and
    torch.compile limits the graphs of each function.
    """
    # The function inside of all wrappers
    forward: Any = cls.forward
    while forward.__code__.co_name == "forward_with_checkpointing":
        forward = forward.__wrapped__
    members = {
        "forward": compiled(forward),
        "__module__": cls.__module__,
    }
    return type(cls.__name__, (cls,), members)


def compiled(function: Function) -> Function:
    """The function, compiled at its first call for any sizes of its tensors."""
    return _compiled(function, _BACKEND)


@cache
def _compiled(function: Function, backend: Any) -> Function:
    return torch.compile(function, dynamic=True, backend=backend)
