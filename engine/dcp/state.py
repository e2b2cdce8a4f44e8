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
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful as TorchStateful
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...utils.compat.torch_private import storage_id, without_compile
from ...utils.distributed import RankGroup, all_ranks_succeed, get_rank
from ...utils.errors import CheckpointMismatchError, ConfigError
from ...utils.logging import get_logger
from ...utils.plain_values import pack_json, unpack_json
from ...utils.rng import RngState, capture_rng, check_rng, derive_rng, restore_rng
from ..api import StateDict, Stateful
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
    reshard,
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
    frozen_bases,
    sample_base,
)
from .configured import Configured, require_own_schedule, warn_of_settings
from .format import Tensors, rank_key
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


@dataclass
class SavedValues:
    """Values of a folder besides live tensors, checked and parsed by `DCPState.check_values`."""

    module_state: dict[str, Any]
    adapters: dict[str, Any]  # settings. Empty without adapters
    param_groups: list[dict[str, Any]] | None = None  # in the order of this optimizer's groups
    # number of the saved group for each group here
    group_order: list[int] = field(default_factory=lambda: [0])
    optim_plain: dict[str, dict[str, Any]] = field(default_factory=dict)
    optim_local: dict[str, list[str]] = field(default_factory=dict)
    scheduler: dict[str, Any] | None = None  # its lists of groups in the order of the groups here
    counters: dict[str, Any] | None = None
    generators: RngState = field(default_factory=dict)  # of this data rank, or of the first
    are_own_generators: bool = True  # False: of the first, because there are none of this one


def replicated(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, also behind torch.compile. Any other module is
    returned as it is.
    """
    inner = without_compile(model)
    if isinstance(inner, DistributedDataParallel):
        return inner.module
    return model


class DCPState(TorchStateful):
    """A `torch.distributed.checkpoint` Stateful of any (FSDP2) module, with or without its training
    state.

        state = DCPState(model, optimizer, scheduler)
        save_dcp("runs/step_100", state)  # on all ranks
        load_dcp("runs/step_100", state)  # on any number of ranks
        dcp.save({"dcp": state}, checkpoint_id="runs/step_101")  # torch's own functions work too

    Torch's ``dcp.load`` reads only optimizer state that is there already. Most optimizers other
    than Adam, AdamW and Holdfast's make theirs in the first step. Before that, ``dcp.load`` into
    them is refused: use `load_dcp`.

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
            parameter is stored if it has changed since `record_frozen_base`, or if ``optimizer``
            has state for it. A load takes all parameters of the folder, whatever this argument
            says.
        base: source of the frozen parameters, for messages. None takes the one that a transformers
            model names.
        group: control group of the ranks that hold the model and agree on the parameters to leave
            out. None: the group of the save or load, which are all ranks unless it is told. Values
            that each rank has of its own are numbered in it.
        changes_only_in_step: promise that only ``optimizer.step`` and code in `changing_weights`
            change parameters and optimizer state. A snapshot may then still be copying them during
            the next forward and backward (see `staged_state`). If they change nevertheless, the
            snapshot fails.
        ranks_with_same_data: number of consecutive ranks with the same data, and so the same
            generators.
        rng: generators for `state_dict`, instead of those of this process at the time.

    Raises:
        ConfigError: ``scheduler`` changes the rates of another optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        counters: Stateful | None = None,
        *,
        trainable_only: bool | Collection[str] = False,
        base: BaseFolder | None = None,
        group: RankGroup = None,
        changes_only_in_step: bool = False,
        ranks_with_same_data: int = 1,
        rng: RngState | None = None,
    ) -> None:
        require_own_schedule(optimizer, scheduler)
        self.model = replicated(model)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.counters = counters
        self.group = group
        self.changes_only_in_step = changes_only_in_step
        self.ranks_with_same_data = ranks_with_same_data
        self._trainable_only = trainable_only
        self._base = base
        self._rng = rng

        # Views of a state differ in these. Parameter, by id -> what stands for it (see `at_start`).
        self._twins: Mapping[int, nn.Parameter] = {}
        self._trained_by = optimizer
        self._stored: Collection[str] | None = None  # names in the folder that is loaded
        self._agreed = False  # whether the ranks have agreed on the frozen parameters to store

    def record_frozen_base(self) -> None:
        """Note the bits of the frozen parameters that checkpoints may leave out. Not collective.

            state = DCPState(model, optimizer, trainable_only=True)
            state.record_frozen_base()

        Call it when the start of the job has made the parameters, before anything changes them. A
        parameter that differs later is stored. Only the first call for a model notes anything, also
        by another state. The first use of a state calls it, if nobody has.
        """
        if self._trainable_only is False or frozen_bases.of(self.model) is not None:
            return
        # Offloaded parameters have their bits in host memory.
        left_out = self._frozen()
        if self._trainable_only is not True:
            chosen = set(self._trainable_only)
            left_out = {name: param for name, param in left_out.items() if name in chosen}
        copies = with_host_copies(self.model, left_out, MODEL)
        frozen_bases.set(self.model, FrozenBase(copies))

    @property
    def rank(self) -> int:
        """Index of this rank in ``group``. It numbers the values that each rank has of its own."""
        return get_rank(self.group)

    @property
    def data_rank(self) -> int:
        """Index of this rank among the ranks with different data. It numbers the generators of a
        checkpoint.
        """
        return self.rank // self.ranks_with_same_data

    @property
    def base(self) -> BaseFolder:
        """Source of the frozen parameters."""
        return self._base or BaseFolder.of(self.model)

    def model_only(self) -> "DCPState":
        """The same state without optimizer, scheduler and counters."""
        state = copy.copy(self)
        state.optimizer = None
        state.scheduler = None
        state.counters = None
        return state

    def with_rng(self, rng: RngState) -> "DCPState":
        """The same state with captured generators, which `state_dict` returns."""
        state = copy.copy(self)
        state._rng = rng
        return state

    @normal_tensors()
    def with_agreed_base(self) -> "DCPState":
        """The same state after the ranks have agreed on the frozen parameters to store, so that its
        `state_dict` is not collective.

        All ranks call it, before anything that may fail on one of them alone. A failure in one is
        raised in all. Without parameters to leave out, it does nothing.
        """
        if self._trainable_only is False or self._stored is not None or self._agreed:
            return self
        with all_ranks_succeed("looking for changes of frozen parameters", self.group):
            base = self._watched()
            assert base is not None, "`record_frozen_base` has made it"
            frozen = with_host_copies(self.model, self._frozen(), MODEL)
            to_store = base.changed(frozen)
        base.drop(frozen.keys(), to_store, self.group)
        state = copy.copy(self)
        state._agreed = True
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
        # The twins have the shapes of the parameters and no values.
        state = copy.copy(self)
        if self.optimizer is not None:
            params = self._parameters().values()
            state._twins = {id(param): optim.on_meta(param) for param in params}
            state.optimizer = UnsteppedOptimizer(self.optimizer, state._twins)
        return state

    @normal_tensors()
    def state_dict(self) -> StateDict:
        """Live tensors, or the host copies of offloaded ones, nested, under these names:

        - ``model``, and ``module_state`` if there is any (see `module_state`).
        - ``adapters``, if PEFT has put some in (see `lora.adapters`).
        - ``base`` and ``base_sample``, if frozen parameters are left out (see `base_model`).
        - With an optimizer: ``optim``, ``param_groups``, ``optim_plain`` (values per parameter that
          are not tensors), ``optim_local`` (names of plain tensors of the local shard), ``rng``,
          ``scheduler`` and ``counters``.

        State of modules is under this rank's name, generators are under the name of its data rank.
        If parameters may be left out, all ranks call it, because they agree on the parameters that
        changed (see `with_agreed_base`).

        Raises:
            ConfigError: a value cannot be saved so that it comes back unchanged.
        """
        # Which frozen parameters are stored, all ranks decide.
        self.with_agreed_base()
        base = self._watched() if self._stored is None else None

        # The model.
        tensors = {name: tensor.detach() for name, tensor in self._model_tensors().items()}
        state: dict[str, Any] = {"model": with_host_copies(self.model, tensors, MODEL)}
        own = module_state(self.model)
        if own:
            state["module_state"] = {rank_key(self.rank): pack_module_state(own)}
        settings = adapter_settings(self.model)
        if settings:
            state[ADAPTERS] = pack_json(settings, ADAPTERS)

        # Its base, if that is left out.
        left_out = self.frozen_parameters()
        if left_out:
            share = sample_base(with_host_copies(self.model, left_out, MODEL), self.group, base)
            state[BASE] = describe_base(
                left_out, self.base, self.group, describe_adapters(self.model)
            )
            state[BASE_SAMPLE] = {rank_key(self.rank): share}
        if self.optimizer is not None:
            state |= self._training_state(self.optimizer)
        return state

    def _training_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The part of `state_dict` that a state with an optimizer has."""
        # State exists before the first step, so that every folder has the same names.
        materialize_state(optimizer)
        params = self._parameters()
        optim.check_entries(optimizer, params)
        entries = optim.tensor_entries(optimizer, params)
        state: dict[str, Any] = {
            "optim": {"state": with_host_copies(self.model, entries, optim.PREFIX)},
            "param_groups": pack_json(optim.describe_groups(optimizer, params), "param_groups"),
        }
        plain = optim.plain_entries(optimizer, params)
        if plain:
            state["optim_plain"] = pack_json(plain, "optimizer state")
        local = optim.local_entries(optimizer, params)
        if local:
            state["optim_local"] = pack_json(local, "optim_local")

        # Generators, schedule and counters.
        state[GENERATORS] = {rank_key(self.data_rank): self._rng or capture_rng()}
        if self.scheduler is not None:
            state["scheduler"] = pack_json(self.scheduler.state_dict(), "scheduler")
        if self.counters is not None:
            state["counters"] = pack_json(self.counters.state_dict(), "counters")
        return state

    @normal_tensors()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a state: copy tensors into the live ones, then restore schedule, counters and
        generators.

        Tensors may be whole DTensors or this rank's parts. Their shapes must have been checked
        before. Optimizer state that is not there yet is created. If torch's ``dcp.load`` has read
        into a live tensor, that one is not copied.

        Raises:
            CheckpointError: see `check_values`. Also if a tensor is missing, the optimizer does not
                have a tensor of the state, ``dcp.load`` has missed its state, or the frozen
                parameters that were left out differ here (only detected at the world size of the
                save). Nothing was changed.
        """
        self.record_frozen_base()

        # All checks come before the first change.
        tensors = dict(flatten(state_dict))
        given = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        stored = self.as_stored(given.keys())
        proposed = stored.propose_state(optim.describe_entries(tensors, self._parameters()))
        live = stored.live_tensors() | proposed
        missing = sorted(live.keys() - given.keys())
        if missing:
            raise CheckpointMismatchError(
                f"the state has no {missing[0]!r} ({len(missing)} missing)"
            )
        values = stored.check_values(given)
        own_share = f"{BASE_SAMPLE}.{rank_key(self.rank)}"
        check_own_base(given, stored.frozen_parameters(), self.base, own_share, self.group)

        # A tensor that torch has read into is itself. An empty one has a storage but no address.
        others = {}
        for name, target in live.items():
            local = local_tensor(target)
            is_same_storage = storage_id(local) == storage_id(given[name])
            if not is_same_storage or local.data_ptr() != given[name].data_ptr():
                others[name] = local
        if self.optimizer is not None:
            optim.check_given(self.optimizer, given.keys() - live.keys(), read_in_place=not others)

        # From here on the state changes.
        stored.adopt_state(proposed, values)
        for name, local in others.items():
            local.copy_(given[name])
        configured = self.configured(values)
        stored.restore(values)
        settled = configured.settle()
        if self.rank == 0:
            warn_of_settings("the checkpoint", *settled)

    def configured(self, values: SavedValues) -> Configured:
        """Note what this process was configured with, before `restore` is given ``values``."""
        return Configured(self.optimizer, self.scheduler, values.scheduler is not None)

    def restore(self, values: SavedValues) -> None:
        """Restore everything but live tensors. ``values`` is the result of `check_values`."""
        restore_module_state(self.model, values.module_state)
        restore_merged(self.model, values.adapters)
        if self.optimizer is None:
            return

        # Hyperparameters of the groups.
        saved_groups = values.param_groups or []
        for group, saved in zip(self.optimizer.param_groups, saved_groups, strict=False):
            group.update(optim.hyperparameters(saved))
        if len(saved_groups) > 1 and not optim.are_named(saved_groups):
            logger.warning(
                "the checkpoint does not name the parameters of its groups; they were matched by "
                "position"
            )

        # State of the optimizer that is not a tensor.
        params = self._parameters()
        for fqn in self._untrained_there():
            self.optimizer.state.pop(params[fqn], None)
        for fqn, entries in values.optim_plain.items():
            self.optimizer.state[params[fqn]].update(entries)

        if self.scheduler is not None and values.scheduler is not None:
            self.scheduler.load_state_dict(values.scheduler)
        if self.counters is not None:
            if values.counters is None:
                logger.warning("the checkpoint has no counters; they start anew")
            else:
                self.counters.load_state_dict(values.counters)

        # A new data rank has other generators than the first.
        if values.generators:
            rng = values.generators
            if not values.are_own_generators:
                rng = derive_rng(rng, self.data_rank)
            restore_rng(rng)

    def check_values(self, given: Tensors) -> SavedValues:
        """Check and parse a whole state but the live tensors, which may be missing in ``given``.
        Nothing changes.

        Raises:
            CheckpointMismatchError: a counter or scheduler entry is missing, the optimizer is
                another one, or adapters were scaled differently.
            CheckpointCorruptError: a value is not the JSON that it should be.
        """
        # A rank that the saved run did not have takes the state of rank 0.
        modules = {}
        for rank in (self.rank, 0):
            packed = given.get(f"module_state.{rank_key(rank)}")
            if packed is not None:
                modules = unpack_module_state(packed, self.model)
                break
        adapters = {}
        if ADAPTERS in given:
            adapters = unpack_json(given[ADAPTERS], ADAPTERS)
        check_settings(self.model, adapters)
        if self.optimizer is None:
            return SavedValues(modules, adapters)

        # All JSON is parsed first.
        parts: dict[str, Any] = {}
        for name in PACKED:
            if name in given:
                parts[name] = unpack_json(given[name], name)
        values = SavedValues(modules, adapters, **parts)
        self._check_optimizer(self.optimizer, values)

        # Schedule and counters must have all entries that they have here.
        for name, target in (("scheduler", self.scheduler), ("counters", self.counters)):
            if target is not None and name in parts:
                optional = getattr(target, "OPTIONAL", ())
                own = target.state_dict()
                needed = {key: value for key, value in own.items() if key not in optional}
                _check_keys(name, getattr(values, name), needed)
                check = getattr(target, "check_state_dict", None)
                if check is not None:
                    check(getattr(values, name))

        # A new data rank derives its generators from the first data rank.
        values.generators = _rng_of(given, self.data_rank)
        if not values.generators:
            values.generators = _rng_of(given, 0)
            values.are_own_generators = False
        if values.generators:
            check_rng(values.generators)
        return values

    def _check_optimizer(
        self,
        optimizer: Optimizer,
        values: SavedValues,
    ) -> None:
        """Check the values of the optimizer, and bring saved groups to the order of its groups."""
        params = self._parameters()
        untrained = self._untrained_there()
        groups = values.param_groups
        if groups is not None:
            without_state = {name: params[name] for name in untrained}
            optim.check_untrained(optimizer, without_state, groups)
            values.group_order = optim.match_groups(optimizer, params, groups)
            values.param_groups = [groups[number] for number in values.group_order]
            if values.scheduler is not None and self.scheduler is not None:
                _check_keys("scheduler", values.scheduler, {})
                values.scheduler = optim.reorder_schedule(values.scheduler, values.group_order)

        # State that is not a tensor.
        plain = values.optim_plain
        _check_keys("optim_plain", plain, {})
        strangers = sorted(plain.keys() - params.keys())
        if strangers:
            raise CheckpointMismatchError(
                f"the checkpoint has optimizer state of {strangers[0]!r}, unknown here"
            )
        for fqn, entries in optim.plain_entries(optimizer, params).items():
            if fqn not in untrained:
                _check_keys(f"optimizer state of {fqn}", plain.get(fqn, {}), entries)

    def live_tensors(self, *, readable: bool = True) -> dict[str, Tensor]:
        """Dotted name -> tensor that is loaded in place. EngineOffloadedError if it must be
        ``readable`` and is not.
        """
        if readable:
            require_onloaded(self.model)
        live = {f"model.{name}": tensor for name, tensor in self._model_tensors().items()}
        if self.optimizer is None:
            return live
        # A parameter without state in the folder begins without state here.
        materialize_state(self.optimizer)
        entries = optim.tensor_entries(self.optimizer, self._parameters())
        for name in self._untrained_there():
            entries.pop(name, None)
        live.update(flatten(entries, optim.PREFIX))
        return live

    def is_kept_from_optimizer(self, name: str) -> bool:
        """Whether a dotted name is of optimizer state for a parameter of the model that the
        optimizer does not have.
        """
        param = self._parameters().get(_parameter_of(name))
        if self.optimizer is None or param is None or not _is_state(name):
            return False
        for group in self.optimizer.param_groups:
            if any(param is own for own in group["params"]):
                return False
        return True

    def _untrained_there(self) -> set[str]:
        """Parameters without optimizer state in the folder that is loaded, if Holdfast wrote it:
        they never had any.

        They were frozen then. Here they begin without state too, although they may be trained by
        now.
        """
        if self._stored is None or "param_groups" not in self._stored:
            return set()
        trained = {_parameter_of(name) for name in self._stored if _is_state(name)}
        if not trained:
            return set()
        return self._parameters().keys() - trained

    def changed_in_step(self, tensors: Tensors) -> dict[str, Tensor]:
        """The live tensors that only ``optimizer.step`` changes. Empty without the promise
        ``changes_only_in_step``.

        ``tensors`` is the flattened `state_dict`, whose parameters are other tensors over the same
        memory.
        """
        if self.optimizer is None or not self.changes_only_in_step:
            return {}
        # The promise holds for trained parameters and the state of the optimizer.
        params = {}
        for name, param in self.model.named_parameters():
            params[f"model.{clean_name(name)}"] = param
        changed = {}
        for name, tensor in tensors.items():
            live = params.get(name, tensor)
            if live.requires_grad or _is_state(name):
                changed[name] = live
        return changed

    def aliases(self) -> dict[str, str]:
        """Other dotted names of tied tensors, which a naive writer stores again -> the name in
        `live_tensors`.
        """
        # The first name of a parameter is its own.
        first: dict[int, str] = {}
        aliases = {}
        for name, param in by_clean_name(self._named_parameters()).items():
            canonical = first.setdefault(id(param), name)
            if canonical != name:
                aliases[f"model.{name}"] = f"model.{canonical}"
        return aliases

    def propose_state(
        self, names: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> dict[str, Tensor]:
        """Allocate tensors for entries of a checkpoint for which this state has no tensor of that
        shape or dtype.

        Takes the dotted name -> shape and dtype of a whole checkpoint. `adopt_state` puts the
        result into this state.
        """
        proposed = propose_buffers(self.model, names)
        if self.optimizer is not None:
            entries = {name: value for name, value in names.items() if _is_state(name)}
            proposed |= optim.propose_state(self.optimizer, self._parameters(), entries)
        return proposed

    def adopt_state(
        self,
        proposed: Tensors,
        values: SavedValues,
    ) -> None:
        """Install the tensors that `propose_state` allocated. ``values`` is the result of
        `check_values`.
        """
        entries = {}
        buffers = {}
        for name, tensor in proposed.items():
            part = entries if _is_state(name) else buffers
            part[name] = tensor
        adopt_buffers(self.model, buffers)
        if self.optimizer is not None and entries:
            optim.adopt_state(self.optimizer, self._parameters(), entries, values.optim_local)

    def _parameters(self) -> dict[str, nn.Parameter]:
        params = first_names(by_clean_name(self._named_parameters()))
        if not self._twins:
            return params
        for name, param in params.items():
            params[name] = self._twins.get(id(param), param)
        return params

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        reshard(self.model)
        return self.model.named_parameters(remove_duplicate=False)

    def _model_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers. ``model.state_dict()`` has them too, but is slow: it
        copies every name.
        """
        buffers = []
        for slot in persistent_buffers(self.model):
            if slot.buffer is not None:
                buffers.append((slot.name, slot.buffer))
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
        frozen = self._frozen()
        return {name: param for name, param in frozen.items() if self._is_left_out(name, param)}

    def _watched(self) -> FrozenBase | None:
        """The frozen parameters that a save may leave out. None if it stores all."""
        if self._trainable_only is False:
            return None
        self.record_frozen_base()
        return frozen_bases.of(self.model)

    def _frozen(self) -> dict[str, nn.Parameter]:
        params = self._parameters()
        return {name: param for name, param in params.items() if not param.requires_grad}

    def _is_left_out(
        self,
        name: str,
        tensor: Tensor,
    ) -> bool:
        if not isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            return False

        # A load follows the folder.
        if self._stored is not None:
            return BASE in self._stored and f"model.{name}" not in self._stored

        # A save leaves out unchanged parameters without state in the optimizer.
        base = self._watched()
        if base is None or name not in base.sums:
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


def _parameter_of(name: str) -> str:
    """The parameter that an entry of optimizer state belongs to."""
    return name.removeprefix(optim.PREFIX).rpartition(".")[0]


def _check_keys(
    name: str,
    saved: Any,
    own: Mapping[str, Any],
) -> None:
    if not isinstance(saved, dict):
        raise CheckpointMismatchError(
            f"{name} in the checkpoint is a {type(saved).__name__}; expected a dict"
        )
    # It may have more entries, of a newer version.
    missing = sorted(map(str, own.keys() - saved.keys()))
    if missing:
        raise CheckpointMismatchError(
            f"{name} in the checkpoint has no {missing[0]!r} ({len(missing)} missing): it is "
            f"another's; it has {sorted(map(str, saved))[:8]}"
        )

    # Schedules inside of a schedule, which torch would match by position without a look.
    here = own.get("_schedulers")
    if not isinstance(here, list):
        return
    there = saved["_schedulers"]
    n_there = len(there) if isinstance(there, list) else 0
    if not isinstance(there, list) or n_there != len(here):
        raise CheckpointMismatchError(
            f"{name} in the checkpoint has {n_there} schedules inside, this one has "
            f"{len(here)}; build it as the saved run did"
        )
    for number, (saved_one, own_one) in enumerate(zip(there, here, strict=True)):
        _check_keys(f"{name}[{number}]", saved_one, own_one)


def _rng_of(
    given: Tensors,
    rank: int,
) -> RngState:
    prefix = f"{GENERATORS}.{rank_key(rank)}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in given.items()
        if name.startswith(prefix)
    }
