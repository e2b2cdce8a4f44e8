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
from torch import Tensor, nn
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
from ..memory.tensors import WRAPPERS, clean_name, is_expanded, named_tensors

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
    # Every saved value must come back.
    found = _added(model)
    for name, value in found.items():
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
            raise ConfigError(
                f"state of modules: {name} holds a DTensor, which can only be saved as a "
                "parameter or a buffer; make it a buffer, or keep its local tensor"
            )
        owner = _refuses(model, name)
        if owner is not None:
            raise ConfigError(
                f"state of modules: {name} would be saved, but nothing would take it back; give "
                f"{owner} a set_extra_state, a _load_from_state_dict or a load_state_dict pre-hook"
            )
    return found


def pack_module_state(state: Mapping[str, Any]) -> Tensor:
    """Pack the result of `module_state` as uint8: length (8 bytes, little-endian), ``torch.save``
    data, zeros.

    Raises ConfigError if a value could only be loaded by running code.
    """
    data = pack_plain("state of modules", dict(state))
    return pad_bytes(len(data).to_bytes(_LENGTH_BYTES, "little") + data, b"\0")


def unpack_module_state(
    packed: Tensor,
    model: nn.Module,
) -> dict[str, Any]:
    """Unpack the result of `pack_module_state`. Tensors that were on a GPU are put on the device of
    ``model``.

    Raises:
        CheckpointCorruptError: ``packed`` is damaged, or could run code.
        CheckpointMismatchError: nothing in ``model`` would take an entry.
    """
    # The length, then the data. Zeros follow.
    data = packed.cpu().numpy().tobytes()
    n_bytes = int.from_bytes(data[:_LENGTH_BYTES], "little")
    file = io.BytesIO(data[_LENGTH_BYTES : _LENGTH_BYTES + n_bytes])
    state = load_plain(file, "state of modules", _device_of(model))

    # Plain data may be anything.
    if not isinstance(state, dict):
        raise CheckpointCorruptError(
            f"state of modules is a {type(state).__name__}; expected a dict"
        )
    for name in state:
        owner = _refuses(model, name)
        if owner is not None:
            raise CheckpointMismatchError(
                f"the checkpoint has state of modules that nothing here would take: {name}, by a "
                f"{owner}; is it another model?"
            )
    return state


def restore_module_state(
    model: nn.Module,
    saved: Mapping[str, Any],
) -> None:
    """Put back the result of `unpack_module_state`. An entry that ``saved`` lacks stays as it is,
    with a warning.

    Raises:
        CheckpointMismatchError: nothing took an entry.
    """
    # A module may save more than it did when the folder was written.
    missing = sorted(_added(model).keys() - saved.keys())
    if missing:
        logger.warning(
            "the checkpoint has no state of modules for %s (%d such); it stays",
            missing[0],
            len(missing),
        )
    if not saved:
        return

    # The model loads a whole state dict. Its parameters and buffers are copied to themselves,
    # which torch skips.
    state = model.state_dict(keep_vars=True)
    keys = {_locate(model, name).key: value for name, value in saved.items()}
    left = model.load_state_dict({**state, **keys}, strict=False).unexpected_keys
    lost = sorted(keys.keys() & set(left))
    if lost:
        raise CheckpointMismatchError(
            f"{type(model).__name__}.load_state_dict did not take {lost[0]}"
        )


def _added(model: nn.Module) -> dict[str, Any]:
    if not any(map(_adds, model.modules())):
        return {}

    # The state dict comes first: FSDP2 then has its shards for parameters.
    state = model.state_dict(keep_vars=True)
    names = set[str]()
    known = set[int]()
    for name, tensor in named_tensors(model):
        names.add(clean_name(name))
        known.add(id(tensor))

    added = {}
    for key, value in state.items():
        name = clean_name(key)
        if name not in names and id(value) not in known:
            added[name] = value
    return added


def _adds(module: nn.Module) -> bool:
    # Torch's own layers, FSDP2 and activation checkpointing add nothing.
    method, hooks = save_method_and_hooks(module)
    has_extra_state = type(module).get_extra_state is not nn.Module.get_extra_state
    if has_extra_state or _is_own(method) or _is_own(module.state_dict):
        return True
    return any(map(_is_users, hooks))


def _refuses(
    model: nn.Module,
    name: str,
) -> str | None:
    """Class of the module of an entry, if no module on the path to it would take it in
    ``load_state_dict``.
    """
    place = _locate(model, name)
    owner = type(place.modules[-1])
    takes_extra_state = owner.set_extra_state is not nn.Module.set_extra_state
    if place.rest == "_extra_state" and takes_extra_state:
        return None
    for module in place.modules:
        method, hooks = load_method_and_hooks(module)
        if _is_own(method) or _is_own(module.load_state_dict) or any(map(_is_users, hooks)):
            return None
    return owner.__name__


class _Place(NamedTuple):
    """The place of an entry in a state dict."""

    key: str  # in the state dict
    modules: list[nn.Module]  # on the path
    rest: str  # its name in the last module


def _is_own(method: Callable[..., Any]) -> bool:
    """Whether a method is not one of torch's layers."""
    return not method.__module__.startswith("torch.nn.modules.")


def _is_users(hook: Callable[..., Any]) -> bool:
    """Whether a hook is not one of FSDP2 or activation checkpointing, which handle names and
    shards.
    """
    return not getattr(hook, "__module__", "").startswith("torch.distributed.")


def _locate(
    model: nn.Module,
    name: str,
) -> _Place:
    """Locate an entry by its clean name."""
    modules = [model]
    key: list[str] = []
    rest = name.split(".")
    while True:
        # The next module on the path, which may be a wrapper that the clean name leaves out.
        children = children_of(modules[-1])
        steps = [step for step in (rest[0], *WRAPPERS) if step in children]
        child = children[steps[0]] if steps else None
        if child is None:
            return _Place(".".join([*key, *rest]), modules, ".".join(rest))

        modules.append(child)
        if steps[0] == rest[0]:
            key.append(rest.pop(0))
        elif steps[0] == "_orig_mod":  # the others take themselves out of the keys
            key.append("_orig_mod")


def _device_of(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        return parameter.device
    return torch.device("cpu")


# Buffers


class BufferSlot(NamedTuple):
    """The place of a persistent buffer in its module, which may be empty."""

    name: str
    module: nn.Module
    key: str
    buffer: Tensor | None


def persistent_buffers(model: nn.Module) -> Iterator[BufferSlot]:
    """The slots of all buffers in ``model.state_dict()``, under every name in the module."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in buffers_of(module).items():
            if is_persistent(module, key):
                name = f"{prefix}.{key}" if prefix else key
                yield BufferSlot(name, module, key, buffer)


def propose_buffers(
    model: nn.Module,
    names: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> dict[str, Tensor]:
    """Allocate new buffers if a checkpoint cannot be copied into the old ones.

    Takes dotted name -> shape and dtype, and returns dotted name -> tensor, for `adopt_buffers`. A
    buffer of another dtype is not replaced.
    """
    # A buffer that does not exist yet goes to where the parameters are.
    device = _device_of(model)
    proposed: dict[str, Tensor] = {}
    for slot in persistent_buffers(model):
        name = PREFIX + clean_name(slot.name)
        buffer = slot.buffer
        if name not in names or isinstance(buffer, DTensor):
            continue
        shape, dtype = names[name]
        if buffer is None:
            proposed[name] = torch.empty(shape, dtype=dtype, device=device)
        elif buffer.dtype == dtype and (buffer.shape != shape or is_expanded(buffer)):
            proposed[name] = torch.empty(shape, dtype=dtype, device=buffer.device)
    return proposed


def adopt_buffers(
    model: nn.Module,
    proposed: Mapping[str, Tensor],
) -> None:
    """Install the buffers that `propose_buffers` allocated, under every name of the old ones."""
    if not proposed:
        return

    # An empty slot has one name. A buffer may be in several modules, and is known by its id.
    filled: dict[int, Tensor] = {}
    empty = []
    for slot in persistent_buffers(model):
        new = proposed.get(PREFIX + clean_name(slot.name))
        if new is None:
            continue
        if slot.buffer is None:
            empty.append((slot, new))
        else:
            filled[id(slot.buffer)] = new

    for module in model.modules():
        buffers = buffers_of(module)
        for key, buffer in buffers.items():
            buffers[key] = filled.get(id(buffer), buffer)
    for slot, new in empty:
        buffers_of(slot.module)[slot.key] = new
