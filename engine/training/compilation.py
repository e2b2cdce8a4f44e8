"""``compile: true``: blocks are compiled by torch.compile, in place, so that names and checkpoints stay as they are.

Only the forward itself is compiled. Hooks of FSDP2 and activation checkpointing stay outside. Graphs have a dynamic
number of tokens, and attention on packed rows is not part of them, because every row has sequences of other lengths. So
the number of graphs does not grow with the rows: there is a set for rows of several tokens and one for a single token
(a dummy), each with and without gradients.
"""

from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from ..config import PACKED_ATTENTION

_BACKEND = "inductor"


def compile_blocks(model: nn.Module, blocks: tuple[type[nn.Module], ...]) -> None:
    """Compile the forward of the blocks at its first call. Call it before `shard_model`."""
    _keep_attention_out()
    compiled: dict[type[nn.Module], type[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, blocks):
            cls = type(module)
            if cls not in compiled:
                compiled[cls] = _compiled_class(cls)
            module.__class__ = compiled[cls]  # type: ignore[assignment]


@cache
def _keep_attention_out() -> None:
    attention = AttentionInterface()[PACKED_ATTENTION]
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(attention))


def _compiled_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Subclass of ``cls`` with a compiled ``forward``, around which transformers puts its checkpointing again.

    The checkpointing of ``cls`` is taken off, because it is one function for all classes, and torch.compile limits the
    graphs of each function.
    """
    forward: Any = cls.forward
    while forward.__code__.co_name == "forward_with_checkpointing":
        forward = forward.__wrapped__
    compiled = torch.compile(forward, dynamic=True, backend=_BACKEND)
    return type(cls.__name__, (cls,), {"forward": compiled, "__module__": cls.__module__})
