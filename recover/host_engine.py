"""What other people's trainers have in place of an engine: a model, an optimizer and a schedule of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..engine.dcp.state import DCPState
from ..utils.errors import ConfigError


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
        """All of it, or the model alone."""
        return DCPState(self.model, self.optimizer, self.lr_scheduler) if with_optim else DCPState(self.model)


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
