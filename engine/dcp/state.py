"""`DCPState`: everything that a training step depends on, as tensors under stable names.

The names are AReaL's (``{"dcp": DCPState}`` with ``model`` and ``optim`` inside), so AReaL's
folders load here, and torch's own reader reads Holdfast's. Four things differ from torch's
``get_state_dict``:

- No optimizer step is taken to create the optimizer's state (see
  `training.optimizer.materialize_state`).
- A tied tensor is stored once, under the first of its names.
- Frozen parameters that every start makes again, like the base under LoRA, may be left out (see
  `base_model`).
- Values other than tensors (schedule, counters, hyperparameters) are JSON in a uint8 tensor, so no
  byte of the folder has to be unpickled (see `plain_values`).
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
from ...utils.plain_values import pack_json, unpack_json
from ...utils.rng import RngState, capture_rng, check_rng, derive_rng, restore_rng
from ..api import Stateful
from ..lora.adapters import adapter_settings, check_settings, describe_adapters, restore_merged
from ..memory.offloaded import MODEL, require_onloaded, with_host_copies
from ..memory.tensors import (
    by_clean_name,
    clean_name,
    first_names,
    flatten,
    is_expanded,
    local_tensor,
    normal_tensors,
)
from ..training.optimizer import UnsteppedOptimizer, materialize_state
from . import optimizer_state as optim
from .base_model import (
    BASE,
    BASE_SAMPLE,
    BaseFolder,
    FrozenBase,
    check_own_base,
    describe_base,
    sample_base,
)
from .configured import Configured, require_own_schedule, warn_of_settings
from .module_state import (
    adopt_buffers,
    module_state,
    pack_module_state,
    persistent_buffers,
    propose_buffers,
    restore_module_state,
    unpack_module_state,
)

logger = get_logger(__name__)

ROOT = "dcp"
"""The key above all names of a folder, as in AReaL's ``dcp.save({"dcp": DCPState(...)})``."""

PACKED = ("param_groups", "optim_plain", "optim_local", "scheduler", "counters")
"""Names of the tensors that hold JSON in a training state."""

ADAPTERS = "adapters"
"""Name of the tensor that holds the settings of adapters as JSON."""

GENERATORS = "rng"
"""Name of the part that ranks with the same data share. It is under the `rank_key` of their data
rank.
"""

RANK_KEYED = ("module_state", GENERATORS, BASE_SAMPLE)
"""Names of the parts that each rank has under its own `rank_key`."""


def replicated(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, also behind torch.compile. Any other module is
    returned as it is.
    """
    inner = without_compile(model)
    return inner.module if isinstance(inner, DistributedDataParallel) else model


class DCPState(TorchStateful):
    """A `torch.distributed.checkpoint` Stateful of any (FSDP2) module, with or without its training
    state.

        state = DCPState(model, optimizer, scheduler)
        save_dcp("runs/step_100", state)  # on all ranks
        load_dcp("runs/step_100", state)  # on any number of ranks
        dcp.save({"dcp": state}, checkpoint_id="runs/step_101")  # torch's own functions work too

    A load brings back every hyperparameter of the optimizer's groups, as torch's
    ``Optimizer.load_state_dict`` does, because schedules change more than the rate (OneCycleLR
    cycles ``betas``). A warning names those that were built with another value (see `configured`).
    To change ``weight_decay``, set it after the load. Only the choice of implementation
    (``foreach``, ``fused``, ``capturable``, ``differentiable``) and ``maximize`` stay as they are.

    Args:
        model: the module. Parameters and persistent buffers are saved, under the names without
            DistributedDataParallel.
        optimizer: None makes a checkpoint of the model alone.
        scheduler: learning-rate scheduler, built before any load.
        counters: any `Stateful` whose state is a dict of plain values (step counts, weight version
            ...).
        trainable_only: leave out frozen parameters (``requires_grad`` false) that every start of
            the job makes again: True for all, or a collection of names. A checkpoint holds their
            digest instead, and a load on other parameters is refused (see `base_model`). A
            parameter is stored if it has changed since the first `DCPState` of the model, or if
            ``optimizer`` has state for it. A load takes all parameters of the folder, whatever this
            argument says.
        base: source of the frozen parameters, for messages. None takes the one that a transformers
            model names.
        group: control group of the ranks that hold the model and agree on the parameters to leave
            out. None: all ranks.
        changes_only_in_step: promise that only ``optimizer.step`` and code in `changing_weights`
            change parameters and optimizer state. A snapshot may then still be copying them during
            the next forward and backward (see `staged_state`). If they change nevertheless, the
            snapshot fails.
        ranks_with_same_data: number of consecutive ranks with the same data, and so the same
            generators.

    Raises:
        ConfigError: ``scheduler`` changes the rates of another optimizer.
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
        ranks_with_same_data: int = 1,
    ) -> None:
        require_own_schedule(optimizer, scheduler)
        self.model, self.optimizer, self.scheduler, self.counters = (
            replicated(model),
            optimizer,
            scheduler,
            counters,
        )
        self.group, self._base = group, base
        self.changes_only_in_step, self.ranks_with_same_data = (
            changes_only_in_step,
            ranks_with_same_data,
        )
        self._twins: Mapping[
            int, nn.Parameter
        ] = {}  # parameter, by id -> the one that stands for it (see `at_start`)
        self._frozen_base: FrozenBase | None = None
        if trainable_only is not False:
            frozen = {
                n: p
                for n, p in self._frozen().items()
                if trainable_only is True or n in trainable_only
            }
            self._frozen_base = FrozenBase.of(self.model, frozen)
        self.rng: RngState | None = (
            None  # generators that `state_dict` returns instead of capturing its own
        )
        self._trained_by = optimizer
        self._stored: Collection[str] | None = None  # names in the folder that is loaded

    @property
    def data_rank(self) -> int:
        """Index of this rank among the ranks with different data. It numbers the generators of a
        checkpoint.
        """
        return get_rank() // self.ranks_with_same_data

    @property
    def base(self) -> BaseFolder:
        """Source of the frozen parameters."""
        return self._base or BaseFolder.of(self.model)

    def model_only(self) -> "DCPState":
        """The same state without optimizer, scheduler and counters."""
        state = copy.copy(self)
        state.optimizer = state.scheduler = state.counters = None
        return state

    def as_stored(self, names: Collection[str]) -> "DCPState":
        """The same state with the parameters of a folder, given the dotted names in that folder."""
        state = copy.copy(self)
        state._stored = frozenset(names)
        return state

    @normal_tensors()
    def at_start(self) -> "DCPState":
        """The same state as the next start of the job finds it: with an optimizer that has not
        stepped.

        Takes no memory for state, which belongs to twins of the parameters on the meta device. It
        is there to be compared with a folder, not to be loaded.
        """
        state = copy.copy(self)
        if self.optimizer is not None:
            state._twins = {
                id(param): optim.on_meta(param) for param in self._parameters().values()
            }
            state.optimizer = UnsteppedOptimizer(self.optimizer, state._twins)
        return state

    @normal_tensors()
    def state_dict(self) -> dict[str, Any]:
        """Live tensors, or the host copies of offloaded ones, nested, under these names:

        - ``model``, and ``module_state`` if there is any (see `module_state`).
        - ``adapters``, if PEFT has put some in (see `lora.adapters`).
        - ``base`` and ``base_sample``, if frozen parameters are left out (see `base_model`).
        - With an optimizer: ``optim``, ``param_groups``, ``optim_plain`` (values per parameter that
          are not tensors), ``optim_local`` (names of plain tensors of the local shard), ``rng``,
          ``scheduler`` and ``counters``.

        State of modules is under this rank's name, generators are under the name of its data rank.
        If parameters may be left out, all ranks call it, because they agree on the parameters that
        changed.

        Raises:
            ConfigError: a value cannot be saved so that it comes back unchanged.
        """
        if self._frozen_base is not None and self._stored is None:
            self._frozen_base.drop_changed(
                with_host_copies(self.model, self._frozen(), MODEL), self.group
            )
        tensors = {name: tensor.detach() for name, tensor in self._model_tensors().items()}
        state: dict[str, Any] = {"model": with_host_copies(self.model, tensors, MODEL)}
        if own := module_state(self.model):
            state["module_state"] = {rank_key(get_rank()): pack_module_state(own)}
        if settings := adapter_settings(self.model):
            state[ADAPTERS] = pack_json(settings, ADAPTERS)
        if frozen := self.frozen_parameters():
            sums = (
                None
                if self._frozen_base is None or self._stored is not None
                else self._frozen_base.sums
            )
            state[BASE] = describe_base(frozen, self.base, describe_adapters(self.model))
            state[BASE_SAMPLE] = {
                rank_key(get_rank()): sample_base(with_host_copies(self.model, frozen, MODEL), sums)
            }
        if self.optimizer is None:
            return state
        materialize_state(self.optimizer)
        params = self._parameters()
        optim.check_entries(self.optimizer, params)
        entries = with_host_copies(
            self.model, optim.tensor_entries(self.optimizer, params), optim.PREFIX
        )
        state["optim"] = {"state": entries}
        state["param_groups"] = pack_json(
            optim.describe_groups(self.optimizer, params), "param_groups"
        )
        if plain := optim.plain_entries(self.optimizer, params):
            state["optim_plain"] = pack_json(plain, "optimizer state")
        if local := optim.local_entries(self.optimizer, params):
            state["optim_local"] = pack_json(local, "optim_local")
        state[GENERATORS] = {rank_key(self.data_rank): self.rng or capture_rng()}
        if self.scheduler is not None:
            state["scheduler"] = pack_json(self.scheduler.state_dict(), "scheduler")
        if self.counters is not None:
            state["counters"] = pack_json(self.counters.state_dict(), "counters")
        return state

    @normal_tensors()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state: copy tensors into the live ones, then restore schedule, counters and
        generators.

        Tensors may be whole DTensors or this rank's parts. Their shapes must have been checked
        before. If torch's ``dcp.load`` has read into a live tensor, that one is not copied.

        Raises:
            CheckpointError: see `check_values`. Also if a tensor is missing, or the frozen
                parameters that were left out differ here (only detected at the world size of the
                save). Nothing was changed.
        """
        given = {name: local_tensor(tensor) for name, tensor in flatten(state_dict)}
        stored = self.as_stored(given.keys())
        live = stored.live_tensors()
        if missing := sorted(live.keys() - given.keys()):
            raise CheckpointMismatchError(
                f"the state has no {missing[0]!r} ({len(missing)} missing)"
            )
        values = stored.check_values(given)
        check_own_base(
            given, stored.frozen_parameters(), self.base, f"{BASE_SAMPLE}.{rank_key(get_rank())}"
        )
        for name, target in live.items():
            local = local_tensor(target)
            if local.data_ptr() != given[name].data_ptr():
                local.copy_(given[name])
        configured = self.configured(values)
        stored.restore(values, given)
        settled = configured.settle()
        if get_rank() == 0:
            warn_of_settings("the checkpoint", *settled)

    def configured(self, values: Mapping[str, Any]) -> Configured:
        """Note what this process was configured with, before `restore` is given ``values``."""
        return Configured(self.optimizer, self.scheduler, "scheduler" in values)

    def restore(self, values: Mapping[str, Any], given: Mapping[str, torch.Tensor]) -> None:
        """Restore everything but live tensors. ``values`` is the result of `check_values` for
        ``given``.
        """
        restore_module_state(self.model, values["module_state"])
        restore_merged(self.model, values[ADAPTERS])
        if self.optimizer is None:
            return
        saved_groups = values.get("param_groups", ())
        for group, saved in zip(self.optimizer.param_groups, saved_groups, strict=False):
            group.update(optim.hyperparameters(saved))
        if len(saved_groups) > 1 and not optim.are_named(saved_groups):
            logger.warning(
                "the checkpoint does not name the parameters of its groups; they were matched by "
                "position"
            )
        params = self._parameters()
        for fqn in self._untrained_there():
            self.optimizer.state.pop(params[fqn], None)
        for fqn, entries in values.get("optim_plain", {}).items():
            self.optimizer.state[params[fqn]].update(entries)
        for name, target in (("scheduler", self.scheduler), ("counters", self.counters)):
            if target is not None and name in values:
                target.load_state_dict(values[name])
            elif target is self.counters and target is not None:
                logger.warning("the checkpoint has no counters; they start anew")
        own, first = (_rng_of(given, rank) for rank in (self.data_rank, 0))
        if (
            own or first
            # a data rank that the saved run did not have derives its generators from those of data rank
            # 0
        ):
            restore_rng(own or derive_rng(first, self.data_rank))

    def check_values(self, given: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Check and parse a whole state but the live tensors, which may be missing in ``given``.
        Nothing changes.

        Returns ``module_state``, ``adapters``, and the value of each name in `PACKED` that is
        there. Groups and schedule are in the order of this optimizer's groups. ``group_order`` has
        the number of the saved group for each.

        Raises:
            CheckpointMismatchError: a counter or scheduler entry is missing, the optimizer is
                another one, or adapters were scaled differently.
            CheckpointCorruptError: a value is not the JSON that it should be.
        """
        own = given.get(
            f"module_state.{rank_key(get_rank())}", given.get(f"module_state.{rank_key(0)}")
        )
        values: dict[str, Any] = {
            "module_state": {} if own is None else unpack_module_state(own, self.model)
        }
        values[ADAPTERS] = unpack_json(given[ADAPTERS], ADAPTERS) if ADAPTERS in given else {}
        check_settings(self.model, values[ADAPTERS])
        if self.optimizer is None:
            return values
        values |= {name: unpack_json(given[name], name) for name in PACKED if name in given}
        params, untrained = self._parameters(), self._untrained_there()
        if (groups := values.get("param_groups")) is not None:
            optim.check_untrained(
                self.optimizer, {name: params[name] for name in untrained}, groups
            )
            order = values["group_order"] = optim.match_groups(self.optimizer, params, groups)
            values["param_groups"] = [groups[number] for number in order]
            if "scheduler" in values and self.scheduler is not None:
                _check_keys("scheduler", values["scheduler"], {})
                values["scheduler"] = optim.reorder_schedule(values["scheduler"], order)
        plain = values.get("optim_plain", {})
        _check_keys("optim_plain", plain, {})
        if strangers := sorted(plain.keys() - params.keys()):
            raise CheckpointMismatchError(
                f"the checkpoint has optimizer state of {strangers[0]!r}, unknown here"
            )
        for fqn, entries in optim.plain_entries(self.optimizer, params).items():
            if fqn not in untrained:
                _check_keys(f"optimizer state of {fqn}", plain.get(fqn, {}), entries)
        for name, target in (("scheduler", self.scheduler), ("counters", self.counters)):
            if target is not None and name in values:
                optional = getattr(target, "OPTIONAL", ())
                own = {
                    key: value for key, value in target.state_dict().items() if key not in optional
                }
                _check_keys(name, values[name], own)
        if rng := _rng_of(given, self.data_rank) or _rng_of(given, 0):
            check_rng(rng)
        return values

    def live_tensors(self, *, readable: bool = True) -> dict[str, torch.Tensor]:
        """Dotted name -> tensor that is loaded in place. EngineOffloadedError if it must be
        ``readable`` and is not.
        """
        if readable:
            require_onloaded(self.model)
        live = {f"model.{name}": tensor for name, tensor in self._model_tensors().items()}
        if self.optimizer is not None:
            materialize_state(self.optimizer)
            untrained = self._untrained_there()
            entries = optim.tensor_entries(self.optimizer, self._parameters())
            found = {name: tensors for name, tensors in entries.items() if name not in untrained}
            live.update(flatten(found, optim.PREFIX))
        return live

    def is_kept_from_optimizer(self, name: str) -> bool:
        """Whether a dotted name is of optimizer state for a parameter of the model that the
        optimizer does not have.
        """
        param = self._parameters().get(name.removeprefix(optim.PREFIX).rpartition(".")[0])
        if self.optimizer is None or param is None or not _is_state(name):
            return False
        return not any(
            param is own for group in self.optimizer.param_groups for own in group["params"]
        )

    def _untrained_there(self) -> set[str]:
        """Parameters without optimizer state in the folder that is loaded, if Holdfast wrote it:
        they never had any.

        They were frozen then. Here they begin without state too, although they may be trained by
        now.
        """
        if self._stored is None or "param_groups" not in self._stored:
            return set()
        trained = {
            name.removeprefix(optim.PREFIX).rpartition(".")[0]
            for name in self._stored
            if _is_state(name)
        }
        return self._parameters().keys() - trained if trained else set()

    def changed_in_step(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The live tensors that only ``optimizer.step`` changes. Empty without the promise
        ``changes_only_in_step``.

        ``tensors`` is the flattened `state_dict`, whose parameters are other tensors over the same
        memory.
        """
        if self.optimizer is None or not self.changes_only_in_step:
            return {}
        params = {
            f"model.{clean_name(name)}": param for name, param in self.model.named_parameters()
        }
        live = {name: params.get(name, tensor) for name, tensor in tensors.items()}
        return {
            name: tensor
            for name, tensor in live.items()
            if tensor.requires_grad or name.startswith(optim.PREFIX)
        }

    def aliases(self) -> dict[str, str]:
        """Other dotted names of tied tensors, which a naive writer stores again -> the name in
        `live_tensors`.
        """
        first: dict[int, str] = {}
        named = by_clean_name(self._named_parameters())
        every = {
            f"model.{name}": first.setdefault(id(param), f"model.{name}")
            for name, param in named.items()
        }
        return {name: canonical for name, canonical in every.items() if name != canonical}

    def propose_state(
        self, names: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> dict[str, torch.Tensor]:
        """Allocate tensors for entries of a checkpoint for which this state has no tensor of that
        shape or dtype.

        Takes the dotted name -> shape and dtype of a whole checkpoint. `adopt_state` puts the
        result into this state.
        """
        proposed = propose_buffers(self.model, names)
        if self.optimizer is not None:
            entries = {
                name: shape for name, shape in names.items() if name.startswith(optim.PREFIX)
            }
            proposed |= optim.propose_state(self.optimizer, self._parameters(), entries)
        return proposed

    def adopt_state(
        self, proposed: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> None:
        """Install the tensors that `propose_state` allocated. ``given`` is the argument of
        `check_values`.
        """
        entries = {
            name: tensor for name, tensor in proposed.items() if name.startswith(optim.PREFIX)
        }
        adopt_buffers(
            self.model, {name: tensor for name, tensor in proposed.items() if name not in entries}
        )
        if self.optimizer is not None and entries:
            local = (
                unpack_json(given["optim_local"], "optim_local") if "optim_local" in given else {}
            )
            optim.adopt_state(self.optimizer, self._parameters(), entries, local)

    def _parameters(self) -> dict[str, nn.Parameter]:
        params = first_names(by_clean_name(self._named_parameters()))
        return (
            {name: self._twins.get(id(param), param) for name, param in params.items()}
            if self._twins
            else params
        )

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                # a forward without a backward may leave gathered ones, which are other tensors
                module.reshard()
        return self.model.named_parameters(remove_duplicate=False)

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers. ``model.state_dict()`` has them too, but is slow: it
        copies every name.
        """
        buffers = [
            (slot.name, slot.buffer)
            for slot in persistent_buffers(self.model)
            if slot.buffer is not None
        ]
        tensors = first_names(by_clean_name(chain(self._named_parameters(), buffers)))
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter) and is_expanded(tensor):
                raise ConfigError(
                    f"parameter {name} is expanded: several of its elements are one place in "
                    "memory, which no checkpoint can be loaded into; make it contiguous"
                )
        return {
            name: tensor for name, tensor in tensors.items() if not self._is_left_out(name, tensor)
        }

    def frozen_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are left out, by the first of their names."""
        return {
            name: param for name, param in self._frozen().items() if self._is_left_out(name, param)
        }

    def _frozen(self) -> dict[str, nn.Parameter]:
        return {
            name: param for name, param in self._parameters().items() if not param.requires_grad
        }

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
    """A copy of `DCPState.state_dict`, which `save_dcp` takes in place of the state itself."""

    values: Mapping[str, Any]  # tensors of the copy, under the names of the live ones
    finish: Callable[[], None]  # waits for the copy, and raises its error if there was one
    ranks_with_same_data: int = 1  # see `DCPState`

    def state_dict(self) -> Mapping[str, Any]:
        """Wait for the copy and return its values."""
        self.finish()
        return self.values


def _is_state(name: str) -> bool:
    return name.startswith(optim.PREFIX)


def _check_keys(name: str, saved: Any, own: Mapping[str, Any]) -> None:
    if not isinstance(saved, dict):
        raise CheckpointMismatchError(
            f"{name} in the checkpoint is a {type(saved).__name__}; expected a dict"
        )
    if missing := sorted(map(str, own.keys() - saved.keys())):
        raise CheckpointMismatchError(
            f"{name} in the checkpoint has no {missing[0]!r} ({len(missing)} missing): it is "
            f"another's; it has {sorted(map(str, saved))[:8]}"
        )
    # Schedules inside of a schedule, which torch would match by position without a look.
    if isinstance(own_nested := own.get("_schedulers"), list):
        nested = saved["_schedulers"]
        if not isinstance(nested, list) or len(nested) != len(own_nested):
            n_saved = len(nested) if isinstance(nested, list) else 0
            raise CheckpointMismatchError(
                f"{name} in the checkpoint has {n_saved} schedules inside, this one has "
                f"{len(own_nested)}; build it as the saved run did"
            )
        for number, (there, here) in enumerate(zip(nested, own_nested, strict=True)):
            _check_keys(f"{name}[{number}]", there, here)


def rank_key(rank: int) -> str:
    """The key of a rank's own values: ``rank_00001``."""
    return f"rank_{rank:05d}"


def _rng_of(given: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {
        n.split(".", 2)[2]: t
        for n, t in given.items()
        if n.startswith(f"{GENERATORS}.{rank_key(rank)}.")
    }
