"""Models whose tensors are offloaded: their copies in host memory, and the error of code that needs the tensors.

An offloaded tensor keeps its object, shape and place in the model, but its storage is empty. Reading it on a CPU ends
the process. So what reads values takes the copies (`with_host_copies`), and the rest calls `require_onloaded`.
"""

from collections.abc import Mapping
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...utils.errors import EngineOffloadedError
from .tensors import local_tensor

MODEL = "model."
"""Prefix of the names of parameters and buffers. See `DCPState.state_dict` for the others."""

_copies: WeakKeyDictionary[nn.Module, dict[str, torch.Tensor]] = WeakKeyDictionary()


def host_copies(model: nn.Module) -> dict[str, torch.Tensor]:
    """Dotted name -> copy of each offloaded tensor, sharded like it. Whoever offloads or onloads changes the dict."""
    return _copies.setdefault(model, {})


def weights_on_host(model: nn.Module) -> dict[str, torch.Tensor]:
    """Clean name -> copy of each offloaded parameter and buffer."""
    return {name.removeprefix(MODEL): copy for name, copy in host_copies(model).items() if name.startswith(MODEL)}


def with_host_copies(model: nn.Module, nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``nested`` mappings of tensors of ``model``, with copies in place of offloaded tensors."""
    copies, found = host_copies(model), dict[str, Any]()
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found[key] = with_host_copies(model, value, f"{name}.")
        else:  # another optimizer of the model may have tensors of the same name
            emptied = name in copies and not local_tensor(value).untyped_storage().nbytes()
            found[key] = copies[name] if emptied else value
    return found


def require_onloaded(model: nn.Module) -> None:
    """Raise EngineOffloadedError if a tensor of the model or of its optimizer is offloaded."""
    if host_copies(model):
        refuse()


def refuse(*_: Any) -> NoReturn:
    """Raise EngineOffloadedError. Can be a hook of a module or an optimizer."""
    raise EngineOffloadedError("the engine is offloaded; call onload first")
