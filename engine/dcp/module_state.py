"""State of modules besides parameters: persistent buffers, and extra state in
``model.state_dict()``.

Extra state: `get_extra_state`, overrides of `_save_to_state_dict` and state-dict hooks may add
values of any kind: scales of quantized layers, counts, tables. They are stored as `torch.save` of
plain data, read with ``weights_only``. Each rank has one uint8 tensor, because ranks may differ.
The model's own ``load_state_dict`` puts the values back. A model whose modules add nothing is never
asked for its state dict, which is slow.

Buffers: a load has to replace a buffer that has grown since the model was built, was made only
later, or is expanded, so that several elements share one place, which torch refuses to write to.
Parameters are never replaced, because optimizers and FSDP2 hold them.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...utils.compat.torch_private import (
    buffers_of,
    children_of,
    is_persistent,
    load_method_and_hooks,
    save_method_and_hooks,
    tree_leaves,
)
from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from ...utils.logging import get_logger
from ...utils.plain_values import load_plain, pack_plain, pad_bytes
from ..memory.tensors import WRAPPERS, clean_name, is_expanded

logger = get_logger(__name__)

PREFIX = "model."
"""Prefix of the dotted names ``model.<buffer>``."""

_LENGTH_BYTES = 8


def module_state(model: nn.Module) -> dict[str, Any]:
    """Clean name in ``model.state_dict()`` -> value that is neither parameter nor buffer. Nothing
    is copied.

    Raises ConfigError if a value is a DTensor, or if nothing would take it back in
    ``load_state_dict``.
    """
    found = _added(model)
    for name, value in found.items():
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
            raise ConfigError(
                f"state of modules: {name} holds a DTensor, which can only be saved as a "
                "parameter or a buffer; make it a buffer, or keep its local tensor"
            )
        if (owner := _refuses(model, name)) is not None:
            raise ConfigError(
                f"state of modules: {name} would be saved, but nothing would take it back; give "
                f"{owner} a set_extra_state, a _load_from_state_dict or a load_state_dict pre-hook"
            )
    return found


def pack_module_state(state: Mapping[str, Any]) -> torch.Tensor:
    """Pack the result of `module_state` as uint8: length (8 bytes, little-endian), ``torch.save``
    data, zeros.

    Raises ConfigError if a value could only be loaded by running code.
    """
    data = pack_plain("state of modules", dict(state))
    return pad_bytes(len(data).to_bytes(_LENGTH_BYTES, "little") + data, b"\0")


def unpack_module_state(packed: torch.Tensor, model: nn.Module) -> dict[str, Any]:
    """Unpack the result of `pack_module_state`. Tensors that were on a GPU are put on the device of
    ``model``.

    Raises:
        CheckpointCorruptError: ``packed`` is damaged, or could run code.
        CheckpointMismatchError: nothing in ``model`` would take an entry.
    """
    data = packed.cpu().numpy().tobytes()
    stop = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    state = load_plain(io.BytesIO(data[_LENGTH_BYTES:stop]), "state of modules", _device_of(model))
    if not isinstance(state, dict):
        raise CheckpointCorruptError(
            f"state of modules is a {type(state).__name__}; expected a dict"
        )
    for name in state:
        if (owner := _refuses(model, name)) is not None:
            raise CheckpointMismatchError(
                f"the checkpoint has state of modules that nothing here would take: {name}, by a "
                f"{owner}; is it another model?"
            )
    return state


def restore_module_state(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Put back the result of `unpack_module_state`. An entry that ``saved`` lacks stays as it is,
    with a warning.

    Raises:
        CheckpointMismatchError: nothing took an entry.
    """
    if missing := sorted(_added(model).keys() - saved.keys()):
        logger.warning(
            "the checkpoint has no state of modules for %s (%d such); it stays",
            missing[0],
            len(missing),
        )
    if not saved:
        return
    state = model.state_dict(
        keep_vars=True
    )  # parameters and buffers are copied to themselves: torch skips that
    keys = {_locate(model, name)[0]: value for name, value in saved.items()}
    left = model.load_state_dict({**state, **keys}, strict=False).unexpected_keys
    if lost := sorted(keys.keys() & set(left)):
        raise CheckpointMismatchError(
            f"{type(model).__name__}.load_state_dict did not take {lost[0]}"
        )


def _added(model: nn.Module) -> dict[str, Any]:
    if not any(map(_adds, model.modules())):
        return {}
    state = model.state_dict(keep_vars=True)  # first: FSDP2 then has its shards for parameters
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    names, own = {clean_name(name) for name, _ in tensors}, {id(tensor) for _, tensor in tensors}
    found = {clean_name(key): value for key, value in state.items() if id(value) not in own}
    return {name: value for name, value in found.items() if name not in names}


def _adds(module: nn.Module) -> bool:
    method, hooks = save_method_and_hooks(module)
    return (
        type(module).get_extra_state is not nn.Module.get_extra_state
        or _is_own(method)
        or _is_own(module.state_dict)
        or any(map(_is_users, hooks))
    )


def _refuses(model: nn.Module, name: str) -> str | None:
    """Class of the module of an entry, if no module on the path to it would take it in
    ``load_state_dict``.
    """
    _, modules, rest = _locate(model, name)
    if (
        rest == "_extra_state"
        and type(modules[-1]).set_extra_state is not nn.Module.set_extra_state
    ):
        return None
    for module in modules:
        method, hooks = load_method_and_hooks(module)
        if _is_own(method) or _is_own(module.load_state_dict) or any(map(_is_users, hooks)):
            return None
    return type(modules[-1]).__name__


def _is_own(method: Callable[..., Any]) -> bool:
    """Whether a method is not one of torch's layers."""
    return not method.__module__.startswith("torch.nn.modules.")


def _is_users(hook: Callable[..., Any]) -> bool:
    """Whether a hook is not one of FSDP2 or activation checkpointing, which handle names and
    shards.
    """
    return not getattr(hook, "__module__", "").startswith("torch.distributed.")


def _locate(model: nn.Module, name: str) -> tuple[str, list[nn.Module], str]:
    """Locate an entry by its clean name: its key in the state dict, the modules on the path, its
    name in the last.
    """
    modules, key, rest = [model], list[str](), name.split(".")
    while True:
        children = children_of(modules[-1])
        step = (
            rest[0]
            if rest[0] in children
            else next((wrapper for wrapper in WRAPPERS if wrapper in children), None)
        )
        if step is None or (child := children[step]) is None:
            return ".".join([*key, *rest]), modules, ".".join(rest)
        modules.append(child)
        if step == rest[0]:
            key.append(rest.pop(0))
        elif step == "_orig_mod":  # the others take themselves out of the keys
            key.append(step)


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


# Buffers


class BufferSlot(NamedTuple):
    """The place of a persistent buffer in its module, which may be empty."""

    name: str
    module: nn.Module
    key: str
    buffer: torch.Tensor | None


def persistent_buffers(model: nn.Module) -> Iterator[BufferSlot]:
    """The slots of all buffers in ``model.state_dict()``, under every name in the module."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in buffers_of(module).items():
            if is_persistent(module, key):
                yield BufferSlot(f"{prefix}.{key}" if prefix else key, module, key, buffer)


def propose_buffers(
    model: nn.Module, names: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, torch.Tensor]:
    """Allocate new buffers if a checkpoint cannot be copied into the old ones.

    Takes dotted name -> shape and dtype, and returns dotted name -> tensor, for `adopt_buffers`. A
    buffer of another dtype is not replaced.
    """
    device = _device_of(model)
    proposed: dict[str, torch.Tensor] = {}
    for slot in persistent_buffers(model):
        name, buffer = PREFIX + clean_name(slot.name), slot.buffer
        if name not in names or isinstance(buffer, DTensor):
            continue
        shape, dtype = names[name]
        if buffer is None:
            proposed[name] = torch.empty(shape, dtype=dtype, device=device)
        elif buffer.dtype == dtype and (buffer.shape != shape or is_expanded(buffer)):
            proposed[name] = torch.empty(shape, dtype=dtype, device=buffer.device)
    return proposed


def adopt_buffers(model: nn.Module, proposed: Mapping[str, torch.Tensor]) -> None:
    """Install the buffers that `propose_buffers` allocated, under every name of the old ones."""
    slots = (
        [(PREFIX + clean_name(slot.name), slot) for slot in persistent_buffers(model)]
        if proposed
        else []
    )
    new = {
        id(slot.buffer): proposed[name]
        for name, slot in slots
        if name in proposed and slot.buffer is not None
    }
    for module in model.modules() if new else ():
        for key, buffer in buffers_of(module).items():
            buffers_of(module)[key] = new.get(id(buffer), buffer)
    for name, slot in slots:
        if slot.buffer is None and name in proposed:
            buffers_of(slot.module)[slot.key] = proposed[name]
