"""What other people's trainers have in place of an engine: a model, an optimizer and a schedule of their own."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ..engine.dcp.state import DCPState, replicated
from ..engine.hf.load import names_as_in
from ..engine.lora.layers import adapted_layers, base_view, transformers_model
from ..engine.memory.tensors import clean_name
from ..engine.model.model_folder import find_source_folder
from ..utils.compat.torch_private import without_compile
from ..utils.distributed import get_rank
from ..utils.errors import CheckpointError, ConfigError
from ..utils.logging import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class HostEngine:
    """A model and what trains it, seen as an engine.

    Attributes:
        model: whole, in DistributedDataParallel, or sharded with FSDP2.
        optimizer: None: the model is all there is.
        lr_scheduler: or None.
        control_group: gloo group of its ranks; None: that of the handler.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    control_group: dist.ProcessGroup | None = None

    def dcp_state(self, with_optim: bool = True) -> DCPState:
        """All of it, or the model alone; of a model with adapters without the base that its folder has."""
        group = self.control_group
        left_out = names_from_folder(self.model, group) if has_adapters(self.model) else False
        if not with_optim:
            return DCPState(self.model, trainable_only=left_out, group=group)
        return DCPState(self.model, self.optimizer, self.lr_scheduler, trainable_only=left_out, group=group)


_found: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def has_adapters(model: nn.Module) -> bool:
    """Whether a model is of transformers, with adapters of PEFT."""
    model = without_compile(replicated(model))
    base = transformers_model(model)
    return isinstance(base, PreTrainedModel) and (base is not model or bool(adapted_layers(model)))


def names_from_folder(model: nn.Module, group: dist.ProcessGroup | None = None) -> Collection[str]:
    """Names of the frozen parameters of a model with adapters that have, on this rank, the bits of the base's folder.

    The first call for a model reads that folder once, mostly from the page cache. Later calls give the same answer.

    Args:
        model: see `has_adapters`.
        group: its ranks.
    """
    model = without_compile(replicated(model))
    if model not in _found:
        frozen = {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        same = _from_folder(base_view(transformers_model(model)), group)
        _found[model] = frozenset(name for name, param in frozen.items() if id(param) in same)
        if get_rank(group) == 0 and (others := sorted(frozen.keys() - _found[model])):
            logger.warning(
                "%s (%d of %d frozen parameters) does not come from the folder of the base model as it is: snapshots "
                "hold it", others[0], len(others), len(frozen),
            )  # fmt: skip
    return _found[model]


def _from_folder(base: PreTrainedModel, group: dist.ProcessGroup | None) -> set[int]:
    """Ids of the parameters that have the bits of the folder."""
    folder = find_source_folder(base.config)
    if folder is None or getattr(base.config, "quantization_config", None) is not None:
        return set()
    try:
        names = names_as_in(folder, base, group)
    except (CheckpointError, OSError) as error:
        logger.info("the base model cannot be compared with its folder: %s", error)
        return set()
    return {id(param) for name, param in base.named_parameters(remove_duplicate=False) if name in names}


def shows_engine(thing: Any) -> bool:
    """Whether `as_engine` takes it."""
    if isinstance(thing, DCPState) or hasattr(thing, "dcp_state"):
        return True
    if isinstance(thing, Sequence):
        return 0 < len(thing) <= 3 and isinstance(thing[0], nn.Module)
    return isinstance(getattr(thing, "model", None), nn.Module) and hasattr(thing, "optimizer")


def as_engine(thing: Any) -> Any:
    """Something with ``dcp_state`` and ``optimizer``, or a `DCPState`: the thing itself, or a `HostEngine` of it.

    Args:
        thing: an engine, a `DCPState`, a tuple ``(model, optimizer, lr_scheduler)`` whose end may be left out, or an
            object with attributes ``model``, ``optimizer`` and perhaps ``lr_scheduler`` (as transformers' Trainer and
            AReaL's engines have them, and ``control_group`` or, as the latter, ``cpu_group``).

    Raises:
        ConfigError: it is nothing of these.
    """
    if not shows_engine(thing):
        raise ConfigError(
            f"a {type(thing).__name__} cannot be snapshotted; expected an engine, a DCPState, a tuple (model, "
            "optimizer, lr_scheduler), or an object with the attributes 'model' and 'optimizer'"
        )
    if isinstance(thing, DCPState) or hasattr(thing, "dcp_state"):
        return thing
    if isinstance(thing, Sequence):
        return HostEngine(*thing)
    group = getattr(thing, "control_group", None) or getattr(thing, "cpu_group", None)
    return HostEngine(thing.model, thing.optimizer, getattr(thing, "lr_scheduler", None), group)
