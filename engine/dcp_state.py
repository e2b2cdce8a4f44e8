"""`DCPState`: model, optimizer and everything else a training step depends on, as tensors under stable names.

The names are those AReaL writes (``{"dcp": DCPState}`` with ``model`` and ``optim`` inside), so its folders load here
and torch's own reader reads ours. Three things differ from torch's ``get_state_dict``:

- it takes no optimizer step to make the optimizer's state (see `optimizer.materialize_state`);
- a tensor that is tied to another is stored once, under the first of its names;
- what is not a tensor (schedule, counters, hyperparameters) is JSON in a uint8 tensor, so that no byte of the folder
  has to be unpickled. JSON keeps every bit of a float and pads with spaces, so that its size stays put.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful as TorchStateful
from torch.distributed.tensor import DTensor

from ..utils.distributed import get_rank
from ..utils.errors import CheckpointMismatchError
from ..utils.logging import get_logger
from ..utils.rng import capture_rng, derive_rng, restore_rng
from .api import Stateful
from .optimizer import materialize_state

logger = get_logger(__name__)

_JSON_BLOCK_BYTES = 4096
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def pack_json(value: Any) -> torch.Tensor:
    """JSON text of ``value`` as ``[n]`` uint8, padded with spaces to a multiple of 4096."""
    data = json.dumps(value).encode()
    return torch.frombuffer(
        bytearray(data.ljust(-(-len(data) // _JSON_BLOCK_BYTES) * _JSON_BLOCK_BYTES)), dtype=torch.uint8
    )


def unpack_json(tensor: torch.Tensor) -> Any:
    """The value that `pack_json` packed."""
    return json.loads(tensor.cpu().numpy().tobytes())


def flatten(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """``(dotted name, tensor)`` of nested mappings, as torch's DCP names them."""
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class DCPState(TorchStateful):
    """A `torch.distributed.checkpoint` Stateful over any (FSDP2) module, with or without its training state.

    Args:
        model: the module; parameters and persistent buffers are taken.
        optimizer: None leaves out everything but the model: a model-only checkpoint.
        scheduler: learning-rate scheduler, built before any load.
        counters: any `Stateful` whose state is JSON-able (step counts, weight version ...).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        counters: Stateful | None = None,
    ) -> None:
        self.model, self.optimizer, self.scheduler, self.counters = model, optimizer, scheduler, counters

    def state_dict(self) -> dict[str, Any]:
        """Live tensors, nested: ``model``, and with an optimizer ``optim``, ``param_groups``, ``rng``, ``scheduler``,
        ``counters``. The generators' state is this rank's, under this rank's name."""
        state: dict[str, Any] = {"model": self._model_tensors()}
        if self.optimizer is None:
            return state
        materialize_state(self.optimizer)
        state["optim"] = {"state": self._optimizer_tensors(self.optimizer)}
        state["param_groups"] = pack_json([_hyperparameters(group) for group in self.optimizer.param_groups])
        state["rng"] = {rng_key(get_rank()): capture_rng()}
        if self.scheduler is not None:
            state["scheduler"] = pack_json(self.scheduler.state_dict())
        if self.counters is not None:
            state["counters"] = pack_json(self.counters.state_dict())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put a state back: copies tensors into the live ones, then schedule, counters and generators.

        Tensors may be whole DTensors or this rank's parts. Everything must have been checked before.

        Raises:
            CheckpointMismatchError: a tensor of this model or optimizer is missing, or the optimizer's groups differ.
        """
        given = {name: local_tensor(tensor) for name, tensor in flatten(state_dict)}
        live = self.live_tensors()
        self._check_groups(given)
        if missing := sorted(live.keys() - given.keys()):
            raise CheckpointMismatchError(f"the state has no {missing[0]!r} ({len(missing)} missing)")
        with torch.no_grad():
            for name, target in live.items():
                local_tensor(target).copy_(given[name])
        if self.optimizer is not None:
            self._load_training_state(self.optimizer, given)

    def _check_groups(self, given: Mapping[str, torch.Tensor]) -> None:
        if self.optimizer is not None and "param_groups" in given:
            saved, own = len(unpack_json(given["param_groups"])), len(self.optimizer.param_groups)
            if saved != own:
                raise CheckpointMismatchError(f"the checkpoint has {saved} parameter groups, the optimizer {own}")

    def _load_training_state(self, optimizer: torch.optim.Optimizer, given: Mapping[str, torch.Tensor]) -> None:
        if "param_groups" in given:
            for group, saved in zip(optimizer.param_groups, unpack_json(given["param_groups"]), strict=True):
                group.update({key: saved[key] for key in ("lr", "initial_lr") if key in saved})
        for name, target in (("scheduler", self.scheduler), ("counters", self.counters)):
            if target is not None and name in given:
                target.load_state_dict(unpack_json(given[name]))
            elif target is not None:
                logger.warning("the checkpoint has no %s; it starts anew", name)
        restore_rank_rng(given)

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """Dotted name -> live (sharded) tensor of everything that is loaded in place: model and optimizer state."""
        live = {f"model.{name}": tensor for name, tensor in self._model_tensors().items()}
        if self.optimizer is not None:
            materialize_state(self.optimizer)
            live.update(flatten(self._optimizer_tensors(self.optimizer), "optim.state."))
        return live

    def aliases(self) -> set[str]:
        """Dotted names under which a naive writer stores tied tensors a second time."""
        every = {f"model.{_clean(name)}" for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return every - {f"model.{name}" for name in self._model_tensors()}

    def adopt_optimizer_state(self, names: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Make zeroed state for an optimizer this module cannot materialise, from what a checkpoint holds.

        Args:
            names: dotted name (``optim.state.<parameter>.<entry>``) -> shape and dtype. An entry of the parameter's
                shape is sharded like the parameter, any other is a plain tensor.
        """
        if self.optimizer is None:
            return
        for fqn, param in self._parameters():
            if param.requires_grad and not self.optimizer.state.get(param):
                prefix = f"optim.state.{fqn}."
                for name, (shape, dtype) in names.items():
                    if name.startswith(prefix) and "." not in name.removeprefix(prefix):
                        like = shape == param.shape
                        value = torch.zeros_like(param, dtype=dtype) if like else torch.zeros(shape, dtype=dtype)
                        self.optimizer.state[param][name.removeprefix(prefix)] = value.detach()

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(_clean(name), param) for name, param in self.model.named_parameters()]

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        persistent = {_clean(name) for name in self.model.state_dict()}
        buffers = {_clean(name): buffer for name, buffer in self.model.named_buffers()}
        tensors = {name: param.detach() for name, param in self._parameters()}
        return tensors | {name: buffer for name, buffer in buffers.items() if name in persistent}

    def _optimizer_tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for fqn, param in self._parameters():
            entries = optimizer.state.get(param, {})
            if entries:
                tensors[fqn] = {k: v for k, v in entries.items() if isinstance(v, torch.Tensor)}
        return tensors


def rng_key(rank: int) -> str:
    """The key of a rank's generators: ``rank_00001``."""
    return f"rank_{rank:05d}"


def restore_rank_rng(given: Mapping[str, torch.Tensor]) -> None:
    """Restore this rank's generators from dotted names ``rng.rank_<r>.<generator>``, if there are any.

    A rank that the saved run did not have derives its generators from those of rank 0 (see `derive_rng`).
    """
    rank = get_rank()
    own, first = (
        {n.split(".", 2)[2]: t for n, t in given.items() if n.startswith(f"rng.{rng_key(r)}.")} for r in (rank, 0)
    )
    if own or first:
        restore_rng(own or derive_rng(first, rank))


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None))
    values = {
        key: list(value) if isinstance(value, tuple) else value for key, value in group.items() if key != "params"
    }
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, plain) or (isinstance(value, list) and all(isinstance(item, plain) for item in value))
    }


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
