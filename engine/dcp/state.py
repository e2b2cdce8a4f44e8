"""`DCPState`: model, optimizer and everything else a training step depends on, as tensors under stable names.

The names are those AReaL writes (``{"dcp": DCPState}`` with ``model`` and ``optim`` inside), so its folders load here
and torch's own reader reads ours. Four things differ from torch's ``get_state_dict``:

- it takes no optimizer step to make the optimizer's state (see `training.optimizer.materialize_state`);
- a tensor that is tied to another is stored once, under the first of its names;
- frozen parameters that every start makes again, as the base under LoRA, may be left out (see `base_model`);
- what is not a tensor (schedule, counters, hyperparameters) is JSON in a uint8 tensor, so that no byte of the folder
  has to be unpickled (see `safe_json`).
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful as TorchStateful
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ...utils.compat.torch_private import without_compile
from ...utils.distributed import get_rank
from ...utils.errors import CheckpointMismatchError, ConfigError
from ...utils.logging import get_logger
from ...utils.rng import RngState, capture_rng
from ...utils.safe_json import pack_json, unpack_json
from ..api import Stateful
from ..lora.description import adapter_settings, check_settings, describe_adapters, restore_merged
from ..memory.tensors import by_clean_name, clean_name, first_names, flatten, local_tensor, normal_tensors
from ..training.optimizer import materialize_state
from .base_model import BASE, BASE_SAMPLE, BaseFolder, FrozenBase, check_own_base, describe_base, sample_base
from .buffers import adopt_buffers, is_expanded, persistent_buffers, propose_buffers
from .module_state import module_state, pack_module_state, restore_module_state, unpack_module_state
from .optimizer_state import (
    PREFIX,
    Parameters,
    adopt_state,
    check_entries,
    local_entries,
    plain_entries,
    propose_state,
    tensor_entries,
)
from .param_groups import are_named, describe_groups, hyperparameters, match_groups, reorder_schedule
from .rank_rng import check_rank_rng, rank_key, restore_rank_rng

logger = get_logger(__name__)

ROOT = "dcp"
"""The key all names of a folder stand under, as in AReaL's ``dcp.save({"dcp": DCPState(...)})``."""

PACKED = ("param_groups", "optim_plain", "optim_local", "scheduler", "counters")
"""Names of the tensors of a training state that hold JSON."""

ADAPTERS = "adapters"
"""Name of the tensor that holds the settings of adapters as JSON."""

RANK_KEYED = ("module_state", "rng", BASE_SAMPLE)
"""Names of what each rank has of its own, under its `rank_key`."""


def replicated(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, also behind torch.compile; another module itself."""
    inner = without_compile(model)
    return inner.module if isinstance(inner, DistributedDataParallel) else model


class DCPState(TorchStateful):
    """A `torch.distributed.checkpoint` Stateful over any (FSDP2) module, with or without its training state.

    Args:
        model: the module; parameters and persistent buffers are taken. DistributedDataParallel around it is left out,
            so that the names are those of the model alone.
        optimizer: None leaves out everything but the model: a model-only checkpoint.
        scheduler: learning-rate scheduler, built before any load.
        counters: any `Stateful` whose state is a dict of plain values (step counts, weight version ...).
        trainable_only: leave out frozen parameters (``requires_grad`` false), because every start of the job makes them
            again: True for all of them, or the names of some. A checkpoint holds a digest of them instead, and a load
            on others is refused (see `base_model`). One that changes after the first `DCPState` of the model was made,
            or that ``optimizer`` has state of, is stored. A load takes what the folder has, whatever is said here.
        base: where the frozen parameters come from, for messages; None: what a transformers model says.
        group: control group of the ranks that hold the model, which agree on what is left out; None: all ranks.
        changes_only_in_step: nothing but ``optimizer.step``, and code in `changing_weights`, changes parameters and
            optimizer state, so that a snapshot may still be copying them while the next forward and backward run (see
            `staged_state`). A snapshot during which they change nevertheless fails.

    A load brings back every hyperparameter of the optimizer's groups, as torch's own ``Optimizer.load_state_dict``
    does: schedules change more than the rate (OneCycleLR cycles ``betas``). A ``weight_decay`` that was changed between
    save and load is therefore the saved one afterwards; set it after the load. Only the choice of implementation
    (``foreach``, ``fused``, ``capturable``, ``differentiable``) and ``maximize`` stay this optimizer's own.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        counters: Stateful | None = None,
        *,
        trainable_only: bool | Collection[str] = False,
        base: BaseFolder | None = None,
        group: dist.ProcessGroup | None = None,
        changes_only_in_step: bool = False,
    ) -> None:
        self.model, self.optimizer, self.scheduler, self.counters = replicated(model), optimizer, scheduler, counters
        self.base, self.group = base or BaseFolder.of(self.model), group
        self.changes_only_in_step = changes_only_in_step
        self._frozen_base: FrozenBase | None = None
        if trainable_only is not False:
            frozen = {n: p for n, p in self._frozen().items() if trainable_only is True or n in trainable_only}
            self._frozen_base = FrozenBase.of(self.model, frozen, self.base)
        self.rng: RngState | None = None  # generators that `state_dict` returns instead of capturing its own
        self._trained_by = optimizer
        self._stored: Collection[str] | None = None  # what the folder holds that is loaded

    def model_only(self) -> "DCPState":
        """The same of the model alone."""
        state = copy.copy(self)
        state.optimizer = state.scheduler = state.counters = None
        return state

    def as_stored(self, names: Collection[str]) -> "DCPState":
        """The same with the parameters that a folder holds; ``names`` are the dotted names in it."""
        state = copy.copy(self)
        state._stored = frozenset(names)
        return state

    @normal_tensors()
    def state_dict(self) -> dict[str, Any]:
        """Live tensors, nested, under these names:

        - ``model``, and ``module_state`` if there is any (see `module_state`).
        - ``adapters``, if PEFT has put some in (see `lora.description`).
        - ``base`` and ``base_sample``, if frozen parameters are left out (see `base_model`).
        - With an optimizer: ``optim``, ``param_groups``, ``optim_plain`` (what an optimizer keeps per parameter besides
          tensors), ``optim_local`` (which tensors are plain ones of the local shard), ``rng``, ``scheduler`` and
          ``counters``.

        The state of modules and generators is this rank's, under this rank's name. If parameters may be left out all
        ranks call it: they agree on which ones changed.

        Raises:
            ConfigError: something here cannot be saved so that it comes back as it is.
        """
        if self._frozen_base is not None and self._stored is None:
            self._frozen_base.drop_changed(self._frozen(), self.group)
        tensors = self._model_tensors()
        state: dict[str, Any] = {"model": {name: tensor.detach() for name, tensor in tensors.items()}}
        if own := module_state(self.model):
            state["module_state"] = {rank_key(get_rank()): pack_module_state(own)}
        if settings := adapter_settings(self.model):
            state[ADAPTERS] = pack_json(settings, ADAPTERS)
        if frozen := self.frozen_parameters():
            sums = None if self._frozen_base is None or self._stored is not None else self._frozen_base.sums
            state[BASE] = describe_base(frozen, self.base, describe_adapters(self.model))
            state[BASE_SAMPLE] = {rank_key(get_rank()): sample_base(frozen, sums)}
        if self.optimizer is None:
            return state
        materialize_state(self.optimizer)
        params = self._parameters()
        check_entries(self.optimizer, params)
        state["optim"] = {"state": tensor_entries(self.optimizer, params)}
        state["param_groups"] = pack_json(describe_groups(self.optimizer, params), "param_groups")
        if plain := plain_entries(self.optimizer, params):
            state["optim_plain"] = pack_json(plain, "optimizer state")
        if local := local_entries(self.optimizer, params):
            state["optim_local"] = pack_json(local, "optim_local")
        state["rng"] = {rank_key(get_rank()): self.rng or capture_rng()}
        if self.scheduler is not None:
            state["scheduler"] = pack_json(self.scheduler.state_dict(), "scheduler")
        if self.counters is not None:
            state["counters"] = pack_json(self.counters.state_dict(), "counters")
        return state

    @normal_tensors()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state: copies tensors into the live ones, then schedule, counters and generators.

        Tensors may be whole DTensors or this rank's parts; their shapes must have been checked before. One that is the
        live tensor itself, as torch's ``dcp.load`` has read into it, has its values already.

        Raises:
            CheckpointMismatchError: a tensor is missing, or frozen parameters that were left out are others here (seen
                at the world size of the save only); nothing was changed.
            CheckpointError: see `check_values`; likewise.
        """
        given = {name: local_tensor(tensor) for name, tensor in flatten(state_dict)}
        stored = self.as_stored(given.keys())
        live = stored.live_tensors()
        if missing := sorted(live.keys() - given.keys()):
            raise CheckpointMismatchError(f"the state has no {missing[0]!r} ({len(missing)} missing)")
        values = self.check_values(given)
        check_own_base(given, stored.frozen_parameters(), self.base, f"{BASE_SAMPLE}.{rank_key(get_rank())}")
        for name, target in live.items():
            local = local_tensor(target)
            if local.data_ptr() != given[name].data_ptr():
                local.copy_(given[name])
        self.restore(values, given)

    def restore(self, values: Mapping[str, Any], given: Mapping[str, torch.Tensor]) -> None:
        """Restore all but the live tensors: state of modules, groups, schedule, counters, generators.

        Args:
            values: what `check_values` returned.
            given: what it was given.
        """
        restore_module_state(self.model, values["module_state"])
        restore_merged(self.model, values[ADAPTERS])
        if self.optimizer is not None:
            self._load_training_state(self.optimizer, values)
            restore_rank_rng(given)

    def check_values(self, given: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Raise what `load_state_dict` would raise of everything but the live tensors; changes nothing.

        Args:
            given: dotted name -> tensor, of a whole state; live tensors may be left out.

        Returns:
            ``module_state``, ``adapters``, and name in `PACKED` -> value, of those that are there; groups and schedule
            in the order of this optimizer's groups, and as ``group_order`` the number of the saved group for each.

        Raises:
            CheckpointMismatchError: a counter or scheduler entry is missing, it is another optimizer's, or adapters
                were scaled otherwise.
            CheckpointCorruptError: what should be JSON is not.
        """
        own = given.get(f"module_state.{rank_key(get_rank())}", given.get(f"module_state.{rank_key(0)}"))
        values: dict[str, Any] = {"module_state": {} if own is None else unpack_module_state(own, self.model)}
        values[ADAPTERS] = unpack_json(given[ADAPTERS], ADAPTERS) if ADAPTERS in given else {}
        check_settings(self.model, values[ADAPTERS])
        if self.optimizer is None:
            return values
        values |= {name: unpack_json(given[name], name) for name in PACKED if name in given}
        params = self._parameters()
        if (groups := values.get("param_groups")) is not None:
            order = values["group_order"] = match_groups(self.optimizer, params, groups)
            values["param_groups"] = [groups[number] for number in order]
            if "scheduler" in values and self.scheduler is not None:
                _check_keys("scheduler", values["scheduler"], {})
                values["scheduler"] = reorder_schedule(values["scheduler"], order)
        self._check_plain(self.optimizer, params, values.get("optim_plain", {}))
        for name, target in (("scheduler", self.scheduler), ("counters", self.counters)):
            if target is not None and name in values:
                optional = getattr(target, "OPTIONAL", ())
                own = {key: value for key, value in target.state_dict().items() if key not in optional}
                _check_keys(name, values[name], own)
        check_rank_rng(given)
        return values

    def _check_plain(
        self, optimizer: torch.optim.Optimizer, params: Parameters, saved: Mapping[str, Mapping[str, Any]]
    ) -> None:
        _check_keys("optim_plain", saved, {})
        if strangers := sorted(saved.keys() - params.keys()):
            raise CheckpointMismatchError(f"the checkpoint has optimizer state of {strangers[0]!r}, unknown here")
        for fqn, entries in plain_entries(optimizer, params).items():
            _check_keys(f"optimizer state of {fqn}", saved.get(fqn, {}), entries)

    def _load_training_state(self, optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
        saved_groups = values.get("param_groups", ())
        for group, saved in zip(optimizer.param_groups, saved_groups, strict=False):
            group.update(hyperparameters(saved))
        if len(saved_groups) > 1 and not are_named(saved_groups):
            logger.warning("the checkpoint does not name the parameters of its groups; they were matched by position")
        params = self._parameters()
        for fqn, entries in values.get("optim_plain", {}).items():
            optimizer.state[params[fqn]].update(entries)
        for name, target in (("scheduler", self.scheduler), ("counters", self.counters)):
            if target is not None and name in values:
                target.load_state_dict(values[name])
            elif target is not None:
                logger.warning("the checkpoint has no %s; it starts anew", name)

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """Dotted name -> live (sharded) tensor of everything that is loaded in place: model (its parameters themselves)
        and optimizer state."""
        live = {f"model.{name}": tensor for name, tensor in self._model_tensors().items()}
        if self.optimizer is not None:
            materialize_state(self.optimizer)
            live.update(flatten(tensor_entries(self.optimizer, self._parameters()), PREFIX))
        return live

    def changed_in_step(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Dotted name -> live tensor, of those that only ``optimizer.step`` changes; none without the promise.

        Args:
            tensors: what `state_dict` returned, flattened: of parameters it has other tensors over the same memory.
        """
        if self.optimizer is None or not self.changes_only_in_step:
            return {}
        params = {f"model.{clean_name(name)}": param for name, param in self.model.named_parameters()}
        live = {name: params.get(name, tensor) for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in live.items() if tensor.requires_grad or name.startswith(PREFIX)}

    def aliases(self) -> dict[str, str]:
        """Dotted name under which a naive writer stores a tied tensor again -> the name it has in `live_tensors`."""
        first: dict[int, str] = {}
        named = by_clean_name(self._named_parameters())
        every = {f"model.{name}": first.setdefault(id(param), f"model.{name}") for name, param in named.items()}
        return {name: canonical for name, canonical in every.items() if name != canonical}

    def propose_state(self, names: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, torch.Tensor]:
        """Allocate tensors for what a checkpoint holds and this state has no tensor of that shape or dtype for.

        Args:
            names: dotted name -> shape and dtype, of a whole checkpoint.

        Returns:
            dotted name -> tensor, for `adopt_state`; this state is as it was.
        """
        proposed = propose_buffers(self.model, names)
        if self.optimizer is not None:
            entries = {name: shape for name, shape in names.items() if name.startswith(PREFIX)}
            proposed |= propose_state(self.optimizer, self._parameters(), entries)
        return proposed

    def adopt_state(self, proposed: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> None:
        """Install the tensors that `propose_state` allocated, in the module and in the optimizer.

        Args:
            proposed: what it returned.
            given: what `check_values` was given.
        """
        entries = {name: tensor for name, tensor in proposed.items() if name.startswith(PREFIX)}
        adopt_buffers(self.model, {name: tensor for name, tensor in proposed.items() if name not in entries})
        if self.optimizer is not None and entries:
            local = unpack_json(given["optim_local"], "optim_local") if "optim_local" in given else {}
            adopt_state(self.optimizer, self._parameters(), entries, local)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return first_names(by_clean_name(self._named_parameters()))

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Under every name it has."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward without a backward may leave gathered ones, which are other tensors
        return self.model.named_parameters(remove_duplicate=False)

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, and the buffers that ``model.state_dict()`` has, which is slow to ask: it copies every name."""
        buffers = [(slot.name, slot.buffer) for slot in persistent_buffers(self.model) if slot.buffer is not None]
        tensors = first_names(by_clean_name(chain(self._named_parameters(), buffers)))
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter) and is_expanded(tensor):
                raise ConfigError(
                    f"parameter {name} is expanded: several of its elements are one place in memory, which no "
                    "checkpoint can be loaded into; make it contiguous"
                )
        return {name: tensor for name, tensor in tensors.items() if not self._is_left_out(name, tensor)}

    def frozen_parameters(self) -> dict[str, nn.Parameter]:
        """Those that are left out, by the first of their names."""
        return {name: param for name, param in self._frozen().items() if self._is_left_out(name, param)}

    def _frozen(self) -> dict[str, nn.Parameter]:
        return {name: param for name, param in self._parameters().items() if not param.requires_grad}

    def _is_left_out(self, name: str, tensor: torch.Tensor) -> bool:
        if not isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            return False
        if self._stored is not None:
            return BASE in self._stored and f"model.{name}" not in self._stored
        if self._frozen_base is None or name not in self._frozen_base.sums:
            return False
        return self._trained_by is None or not self._trained_by.state.get(tensor)


@dataclass(frozen=True)
class StagedState:
    """A copy of what `DCPState.state_dict` returned, for `save_dcp` in the place of the state itself.

    Attributes:
        values: tensors of the copy, under the names of the live ones.
        finish: waits until all values are there; raises what went wrong with that.
    """

    values: Mapping[str, Any]
    finish: Callable[[], None]

    def state_dict(self) -> Mapping[str, Any]:
        """The values, once they are all there; raises what went wrong with that."""
        self.finish()
        return self.values


def _check_keys(name: str, saved: Any, own: Mapping[str, Any]) -> None:
    if not isinstance(saved, dict):
        raise CheckpointMismatchError(f"{name} in the checkpoint is a {type(saved).__name__}; expected a dict")
    if missing := sorted(map(str, own.keys() - saved.keys())):
        raise CheckpointMismatchError(
            f"{name} in the checkpoint has no {missing[0]!r} ({len(missing)} missing): it is another's; it has "
            f"{sorted(map(str, saved))[:8]}"
        )
