"""A model with the weights that were staged or offloaded: the source of an export.

It is the `unsharded_view` of the model with buffers in host memory as parameters and buffers, so
that training does not change it. A frozen base is left out of checkpoints and is read from the live
model (see `dcp.base_model`), so it must not change. When it is offloaded, its copies take its
place, but never during an export that reads it.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...utils.compat.torch_private import buffers_of, parameters_of, replace_members
from ..hf.dtypes import own_dtypes
from ..lora.adapters import transformers_model
from ..memory.offloaded import weights_on_host
from ..memory.per_model import PerModel
from ..memory.tensors import clean_name
from ..training.unsharded import unsharded_view

M = TypeVar("M", bound=nn.Module)

_base_locks = PerModel[Lock](
    "base_lock",
    "Lock of a view with frozen parameters of a live model, held while the view is exported. "
    "`staged_model` sets it. It ends with the view.",
)


@torch.no_grad()
def staged_model(
    model: M,
    weights: Mapping[str, Tensor],
) -> M:
    """A view of ``model``, of transformers or PEFT, with staged weights as its parameters and
    buffers, for an export.

    ``weights`` is the entry ``model`` of the result of `Staging.stage`, read by the export later.
    ``model`` must not have computed anything since the staging.
    """
    own_dtypes(transformers_model(model))  # learned now, not during training
    weights = {**weights_on_host(model), **weights}

    # The staged tensor in place of each live one.
    staged = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        name = clean_name(name)
        if name in weights:
            staged[id(tensor)] = weights[name]
    view = unsharded_view(model)
    _replace_tensors(view, staged)
    if any(id(param) not in staged for param in model.parameters()):
        _base_locks.set(view, Lock())

    # Training may change the configuration.
    inner = transformers_model(view).__dict__
    for name in ("config", "generation_config"):
        config = copy.deepcopy(inner.get(name))
        if config is not None:
            inner[name] = config
    return view


def exportable_model(model: M) -> M:
    """The model for an export that is written at once: a `staged_model` if ``model`` is offloaded,
    else itself.
    """
    if weights_on_host(model):
        return staged_model(model, {})
    return model


@contextmanager
def reading_base(view: nn.Module) -> Iterator[None]:
    """Wrap the export of a `staged_model`. An offload of its base waits for the end."""
    with _base_locks.of(view) or nullcontext():
        yield


def offload_base(
    copies: Mapping[int, Tensor],
    reader: Callable[[object], None],
) -> None:
    """Give every view the copy of each frozen parameter of its base. Call it before the base is
    freed.

    Args:
        copies: id of a live tensor -> copy in host memory.
        reader: called with each view, which reads the copies as long as it lives.
    """
    for view, lock in _base_locks.items():
        # A view of another model.
        if not any(id(param) in copies for param in view.parameters()):
            continue
        with lock:
            reader(view)
            _replace_tensors(view, copies)


def _replace_tensors(
    view: nn.Module,
    of_id: Mapping[int, Tensor],
) -> None:
    for module in view.modules():
        parameters = _replaced(parameters_of(module), of_id)
        buffers = _replaced(buffers_of(module), of_id)
        replace_members(module, parameters=parameters, buffers=buffers)


def _replaced(
    members: Mapping[str, Any],
    of_id: Mapping[int, Tensor],
) -> dict[str, Any]:
    return {name: of_id.get(id(tensor), tensor) for name, tensor in members.items()}
