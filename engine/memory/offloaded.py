"""Models whose tensors are offloaded: their copies in host memory, and the error of code that needs
the tensors.

An offloaded tensor keeps its object, shape and place in the model, but its storage is empty, or not
filled yet. Reading an empty one on a CPU ends the process. So what reads values takes the copies
(`with_host_copies`), and the rest calls `require_onloaded`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from ...utils.compat.torch_private import storage_id
from ...utils.errors import EngineOffloadedError
from .per_model import PerModel
from .tensors import local_tensor

MODEL = "model."
"""Prefix of the names of parameters and buffers. See `DCPState.state_dict` for the others."""


@dataclass(frozen=True)
class Away:
    """An offloaded tensor. Its value is in ``copy``, whatever its storage has.

    Attributes:
        local: has the storage of the tensor, and its own count of writes.
        n_bytes: size of the storage before it was emptied.
        copy: the value in host memory, sharded like the tensor.
    """

    local: Tensor
    n_bytes: int
    copy: Tensor


_away = PerModel[dict[str, Away]](
    "tensors_away",
    "Offloaded tensors by dotted name. `Offload` fills it when it empties storages, and empties it "
    "at the last onload.",
)


def tensors_away(model: nn.Module) -> dict[str, Away]:
    """Dotted name -> each offloaded tensor. Whoever offloads or onloads changes the dict."""
    found = _away.of(model)
    if found is None:
        found = _away.set(model, {})
    return found


def host_copies(model: nn.Module) -> dict[str, Tensor]:
    """Dotted name -> copy of each offloaded tensor."""
    return {name: one.copy for name, one in tensors_away(model).items()}


def weights_on_host(model: nn.Module) -> dict[str, Tensor]:
    """Clean name -> copy of each offloaded parameter and buffer."""
    return {
        name.removeprefix(MODEL): copy
        for name, copy in host_copies(model).items()
        if name.startswith(MODEL)
    }


def with_host_copies(
    model: nn.Module,
    nested: Mapping[str, Any],
    prefix: str,
) -> dict[str, Any]:
    """``nested`` mappings of tensors of ``model``, with copies in place of offloaded tensors."""
    away = tensors_away(model)
    found = dict[str, Any]()
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found[key] = with_host_copies(model, value, f"{name}.")
        elif name in away and storage_id(local_tensor(value)) == storage_id(away[name].local):
            found[key] = away[name].copy
        # Here, or of another optimizer of the model, which may have tensors of the same name.
        else:
            found[key] = value
    return found


def require_onloaded(model: nn.Module) -> None:
    """Raise EngineOffloadedError if a tensor of the model or of its optimizer is offloaded."""
    if tensors_away(model):
        refuse()


def refuse() -> NoReturn:
    """Raise EngineOffloadedError."""
    raise EngineOffloadedError("the engine is offloaded; call onload first")
