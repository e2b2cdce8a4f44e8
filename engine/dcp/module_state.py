"""State of modules: what ``model.state_dict()`` has besides parameters and buffers.

`get_extra_state`, overrides of `_save_to_state_dict` and state-dict hooks put values of any kind there: scales of
quantized layers, counts, tables. They are kept as `torch.save` of plain data, which is read with ``weights_only``, one
uint8 tensor a rank, because ranks may differ; and are put back through the model's own ``load_state_dict``. A model
whose modules add nothing is never asked for its state dict, which takes long.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...utils.compat.torch_private import children_of, loading_of, saving_of, tree_leaves
from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from ...utils.logging import get_logger
from ...utils.safe_torch import load_plain, pack_plain
from ..memory.tensors import WRAPPERS, clean_name

logger = get_logger(__name__)

_LENGTH_BYTES = 8
_BLOCK_BYTES = 4096
"""The tensor is padded to a multiple of it, so that its size stays put when a value takes a byte more."""


def module_state(model: nn.Module) -> dict[str, Any]:
    """Clean name in ``model.state_dict()`` -> value, of what is neither parameter nor buffer; not copied.

    Raises:
        ConfigError: a value is a DTensor, or nothing would take it back in ``load_state_dict``.
    """
    found = _added(model)
    for name, value in found.items():
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
            raise ConfigError(
                f"state of modules: {name} holds a DTensor, which can only be saved as a parameter or a buffer; make it"
                " a buffer, or keep its local tensor"
            )
        _, modules, rest = _locate(model, name)
        if not _takes(modules, rest):
            raise ConfigError(
                f"state of modules: {name} would be saved, but nothing would take it back; give "
                f"{type(modules[-1]).__name__} a set_extra_state, a _load_from_state_dict or a load_state_dict pre-hook"
            )
    return found


def pack_module_state(state: Mapping[str, Any]) -> torch.Tensor:
    """What `module_state` returned, as uint8: length (8 bytes, little-endian), ``torch.save`` of so many, zeros.

    Raises:
        ConfigError: it holds what could only be loaded by running code.
    """
    data = pack_plain("state of modules", dict(state))
    data = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    return torch.frombuffer(
        bytearray(data.ljust(-(-len(data) // _BLOCK_BYTES) * _BLOCK_BYTES, b"\0")), dtype=torch.uint8
    )


def unpack_module_state(packed: torch.Tensor, model: nn.Module) -> dict[str, Any]:
    """What `pack_module_state` packed; tensors that were on a GPU are where ``model`` is.

    Raises:
        CheckpointCorruptError: ``packed`` is damaged, or holds what could run code.
        CheckpointMismatchError: nothing in ``model`` would take an entry.
    """
    data = packed.cpu().numpy().tobytes()
    stop = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    state = load_plain(io.BytesIO(data[_LENGTH_BYTES:stop]), "state of modules", device)
    if not isinstance(state, dict):
        raise CheckpointCorruptError(f"state of modules is a {type(state).__name__}; expected a dict")
    for name in state:
        _, modules, rest = _locate(model, name)
        if not _takes(modules, rest):
            raise CheckpointMismatchError(
                f"the checkpoint has state of modules that nothing here would take: {name}, by a "
                f"{type(modules[-1]).__name__}; is it another model?"
            )
    return state


def restore_module_state(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Put back what `unpack_module_state` returned; an entry that ``saved`` lacks stays as it is, with a warning.

    Raises:
        CheckpointMismatchError: nothing took an entry.
    """
    if missing := sorted(_added(model).keys() - saved.keys()):
        logger.warning("the checkpoint has no state of modules for %s (%d such); it stays", missing[0], len(missing))
    if not saved:
        return
    state = model.state_dict(keep_vars=True)  # parameters and buffers are copied to themselves: torch skips that
    keys = {_locate(model, name)[0]: value for name, value in saved.items()}
    left = model.load_state_dict({**state, **keys}, strict=False).unexpected_keys
    if lost := sorted(keys.keys() & set(left)):
        raise CheckpointMismatchError(f"{type(model).__name__}.load_state_dict did not take {lost[0]}")


def _added(model: nn.Module) -> dict[str, Any]:
    if not any(map(_adds, model.modules())):
        return {}
    state = model.state_dict(keep_vars=True)  # first: FSDP2 then has its shards for parameters
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names, own = {clean_name(name) for name, _ in tensors}, {id(tensor) for _, tensor in tensors}
    found = {clean_name(key): value for key, value in state.items() if id(value) not in own}
    return {name: value for name, value in found.items() if name not in names}


def _adds(module: nn.Module) -> bool:
    """Whether a module may add something of its own to the state dict."""
    method, hooks = saving_of(module)
    return (
        type(module).get_extra_state is not nn.Module.get_extra_state
        or _is_own(method)
        or _is_own(module.state_dict)
        or any(map(_is_users, hooks))
    )


def _takes(modules: Sequence[nn.Module], rest: str) -> bool:
    """Whether one of the modules on the way to an entry, called ``rest`` there, may take it in ``load_state_dict``."""
    if rest == "_extra_state" and type(modules[-1]).set_extra_state is not nn.Module.set_extra_state:
        return True
    return any(
        _is_own(method) or _is_own(module.load_state_dict) or any(map(_is_users, hooks))
        for module, (method, hooks) in zip(modules, map(loading_of, modules), strict=True)
    )


def _is_own(method: Callable[..., Any]) -> bool:
    """Whether a method is not that of torch's layers."""
    return not method.__module__.startswith("torch.nn.modules.")


def _is_users(hook: Callable[..., Any]) -> bool:
    """Whether a hook is not one by which FSDP2 and activation checkpointing see to names and shards."""
    return not getattr(hook, "__module__", "").startswith("torch.distributed.")


def _locate(model: nn.Module, name: str) -> tuple[str, list[nn.Module], str]:
    """Of an entry by its clean name: its key in the state dict, the modules on the way to it, its name in the last."""
    modules, key, rest = [model], list[str](), name.split(".")
    while True:
        children = children_of(modules[-1])
        step = rest[0] if rest[0] in children else next((wrapper for wrapper in WRAPPERS if wrapper in children), None)
        if step is None or (child := children[step]) is None:
            return ".".join([*key, *rest]), modules, ".".join(rest)
        modules.append(child)
        if step == rest[0]:
            key.append(rest.pop(0))
        elif step == "_orig_mod":  # the others take themselves out of the keys
            key.append(step)
