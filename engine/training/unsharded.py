"""A model as it was before FSDP2 replaced the classes of its modules, and before activation
checkpointing wrapped them.
"""

from typing import TypeVar
from weakref import ref

from torch import nn
from transformers import PreTrainedModel

from ...utils.compat.torch_private import children_of, replace_members
from ..memory.per_model import PerModel
from ..memory.tensors import CHECKPOINTED

M = TypeVar("M", bound=nn.Module)


def unsharded_class(model: nn.Module) -> type[nn.Module]:
    """The class of a module before `fully_shard` or `replicate` gave it a generated subclass.

    torch generates ``FSDPLinear(FSDPModule, Linear)``, ``DDPLinear(DDP, Linear)`` or
    ``ReplicateLinear(ReplicateModule, Linear)``: the first base is a mixin of torch.distributed
    that is not a module itself.
    """
    cls = type(model)
    while _is_mixin(cls.__bases__[0]):
        cls = cls.__bases__[-1]
    return cls


def _is_mixin(base: type) -> bool:
    is_distributed = base.__module__.startswith("torch.distributed.")
    return is_distributed and not issubclass(base, nn.Module)


def unsharded_view(model: M) -> M:
    """The same modules, parameters and attributes under their classes from before `fully_shard` or
    `replicate`.

    Modules inside of ``checkpoint_wrapper`` or ``offload_wrapper`` take the place of these, so that
    all names are those in the ``state_dict`` of the model. transformers looks conversions up by
    class name and module. Use the view only to inspect the model. Do not call or change it.
    """
    # Objects without a call of their constructor, which would make new members.
    views = {}
    for module in model.modules():
        cls = unsharded_class(module)
        views[module] = object.__new__(cls)

    # A view shares everything with its module but the children, which are views in turn.
    for module, view in views.items():
        view.__dict__.update(module.__dict__)
        children = {}
        for name, child in children_of(module).items():
            if child is not None:
                child = views[_inside_wrappers(child)]
            children[name] = child
        replace_members(view, children=children)
        if isinstance(module, PreTrainedModel):
            _originals.set(view, ref(original_of(module)))
    return views[model]  # type: ignore[return-value]


def _inside_wrappers(module: nn.Module) -> nn.Module:
    """The module that activation checkpointing or offload wraps, or the module itself."""
    while True:
        inner = children_of(module).get(CHECKPOINTED)
        if inner is None:
            return module
        module = inner


_originals = PerModel["ref[nn.Module]"](
    "original",
    "The transformers model that a view of it shows. Set by `unsharded_view`, ends with the view.",
)


def original_of(model: M) -> M:
    """The model that a view shows, or ``model`` itself: the owner of state that belongs to it."""
    shown = _originals.of(model)
    original = shown and shown()
    return model if original is None else original  # type: ignore[return-value]
