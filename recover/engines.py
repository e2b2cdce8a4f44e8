"""The engines of one rank: find them, adapt those of other trainers, and state facts about them.

The facts reveal a stale snapshot and a wrong restore.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
import xxhash
from torch import nn
from transformers import PreTrainedModel

from ..engine.api import Stateful
from ..engine.config import TrainEngineConfig
from ..engine.dcp.configured import describe_schedule, require_own_schedule
from ..engine.dcp.fingerprint import combine_samples
from ..engine.dcp.state import DCPState, replicated
from ..engine.hf.load import names_as_in
from ..engine.lora.adapters import adapted_layers, base_view, transformers_model
from ..engine.memory.per_model import PerModel
from ..engine.memory.tensors import by_clean_name, clean_name, reshard
from ..engine.model_folder import find_source_folder
from ..engine.training.counters import EngineCounters
from ..utils.compat.torch_private import without_compile
from ..utils.distributed import RankGroup, get_rank, get_world_size
from ..utils.errors import CheckpointError, ConfigError, StaleSnapshotError
from ..utils.logging import get_logger
from .info import EngineFacts

logger = get_logger(__name__)


@dataclass
class RankEngines:
    """Engines and user objects of one rank, by name. The name of an engine becomes a folder of the
    generation.
    """

    engines: dict[str, Any]  # as `as_engine` accepts them
    stateful: dict[str, Stateful] = field(default_factory=dict)
    # for engines without a group. None means the default group
    group: RankGroup = None

    def __post_init__(self) -> None:
        if not self.engines:
            raise ConfigError("there is no engine to snapshot; pass at least one")
        # The name becomes a folder, and ``state`` is taken.
        for name in self.engines:
            if name == "state" or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                raise ConfigError(
                    f"engine name {name!r} cannot be used; expected letters, digits, _ and -, not "
                    "'state'"
                )
        self.engines = {name: self._in_group(engine) for name, engine in self.engines.items()}

    def _in_group(self, thing: Any) -> Any:
        engine = as_engine(thing)
        if isinstance(engine, HostEngine) and engine.control_group is None:
            return replace(engine, control_group=self.group)
        return engine

    @property
    def ranks_with_same_data(self) -> int:
        """Number of consecutive ranks with the same data, generators and dataloader. 1 if every
        rank has its own.

        Raises:
            ConfigError: the engines have different numbers.
        """
        found = {}
        for name, engine in self.engines.items():
            found[name] = _ranks_with_same_data(engine, self.group_of(name))
        if len(set(found.values())) > 1:
            raise ConfigError(
                "the engines of one handler share their data among different numbers of ranks: "
                f"{found}; give them the same sizes of c times t (config key 'backend'), or a "
                "handler each"
            )
        return next(iter(found.values()))

    def state(self, name: str) -> DCPState:
        """Return the state of an engine that is saved and restored."""
        engine = self.engines[name]
        if isinstance(engine, DCPState):
            state = engine
        elif engine.optimizer is None:
            state = engine.dcp_state(with_optim=False)
        else:
            state = engine.dcp_state()
        if state.group is None:
            state.group = self.group_of(name)
        return state

    def agreed_states(self, names: Iterable[str]) -> dict[str, DCPState]:
        """Return the states of engines whose `state_dict` is not collective. All ranks call it,
        before anything that may fail on one of them alone.
        """
        return {name: self.state(name).with_agreed_base() for name in names}

    def group_of(self, name: str | None = None) -> RankGroup:
        """Return the control group (gloo) of an engine. Without a name, of the first engine."""
        if name is None:
            name = next(iter(self.engines))
        return getattr(self.engines[name], "control_group", None) or self.group


def _ranks_with_same_data(engine: Any, group: RankGroup) -> int:
    if isinstance(engine, DCPState | HostEngine):
        return engine.ranks_with_same_data
    # A custom engine may not have the attribute.
    data_ranks = getattr(engine, "data_parallel_world_size", None)
    return 1 if data_ranks is None else get_world_size(group) // data_ranks


def engines_of(holder: Any) -> RankEngines:
    """Find the engines of ``holder``, or raise `ConfigError` if it has none.

    Args:
        holder: a `RankEngines`, a dict of engines, anything that `as_engine` accepts, or a worker
            object with an attribute ``engines`` (a dict) or ``engine``, and optionally ``stateful``
            (a dict of user objects).
    """
    if isinstance(holder, RankEngines):
        return holder
    if isinstance(holder, Mapping):
        return RankEngines(dict(holder))
    # A worker names its engines, or it has one, or it is one.
    engines = getattr(holder, "engines", None) or {"default": getattr(holder, "engine", None)}
    if None not in engines.values():
        return RankEngines(dict(engines), dict(getattr(holder, "stateful", {})))
    engine = _engine_of(holder)
    if engine is not None:
        return RankEngines({"default": engine})
    raise ConfigError(
        f"{type(holder).__name__} has neither 'engines' nor 'engine', nor 'model' and "
        "'optimizer'; the handler cannot snapshot it"
    )


@dataclass(frozen=True)
class HostEngine:
    """The model, optimizer and schedule of another trainer, seen as an engine."""

    model: nn.Module  # unsharded, in DistributedDataParallel, or sharded with FSDP2
    optimizer: torch.optim.Optimizer | None = None  # None saves the model alone
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    # gloo group of the ranks. None means the group of the handler
    control_group: RankGroup = None
    ranks_with_same_data: int = 1  # see `DCPState`
    # of the trainer, see `numerical_switches`
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_own_schedule(self.optimizer, self.lr_scheduler)

    def dcp_state(self, with_optim: bool = True) -> DCPState:
        """Return the state to save. For a model with adapters, without the base weights found in
        its folder.
        """
        group = self.control_group
        optimizer, scheduler = (self.optimizer, self.lr_scheduler) if with_optim else (None, None)
        state = DCPState(
            self.model,
            optimizer,
            scheduler,
            trainable_only=has_adapters(self.model) and names_from_folder(self.model, group),
            group=group,
            ranks_with_same_data=self.ranks_with_same_data,
        )
        state.record_frozen_base()
        return state


def as_engine(thing: Any) -> Any:
    """Return ``thing`` itself if it is an engine or a `DCPState`, else a `HostEngine` for it.

    Args:
        thing: an engine, a `DCPState`, a tuple ``(model, optimizer, lr_scheduler)`` whose last
            entries are optional, or an object with the attributes ``model`` and ``optimizer``, as
            transformers' Trainer and AReaL's engines have them. Its ``lr_scheduler`` and its
            ``control_group`` (AReaL: ``cpu_group``) are used if present.

    Raises:
        ConfigError: ``thing`` is none of these, or its schedule belongs to another optimizer.
    """
    engine = _engine_of(thing)
    if engine is None:
        raise ConfigError(
            f"a {type(thing).__name__} cannot be snapshotted; expected an engine, a DCPState, a "
            "tuple (model, optimizer, lr_scheduler), or an object with the attributes 'model' and "
            "'optimizer'"
        )
    return engine


def _engine_of(thing: Any) -> Any:
    if isinstance(thing, DCPState) or hasattr(thing, "dcp_state"):
        return thing
    # Parts of another trainer, in a tuple or as attributes.
    if isinstance(thing, Sequence):
        fits = 0 < len(thing) <= 3 and isinstance(thing[0], nn.Module)
        return HostEngine(*thing) if fits else None
    if isinstance(getattr(thing, "model", None), nn.Module) and hasattr(thing, "optimizer"):
        scheduler = getattr(thing, "lr_scheduler", None)
        group = getattr(thing, "control_group", None) or getattr(thing, "cpu_group", None)
        return HostEngine(thing.model, thing.optimizer, scheduler, group)
    return None


_from_base = PerModel[frozenset[str]](
    "names_from_folder",
    "Frozen parameters that equal the base model's folder. `names_from_folder` sets it, once.",
)


def has_adapters(model: nn.Module) -> bool:
    """Whether ``model`` is a transformers model with PEFT adapters."""
    model = without_compile(replicated(model))
    base = transformers_model(model)
    return isinstance(base, PreTrainedModel) and (base is not model or bool(adapted_layers(model)))


def names_from_folder(model: nn.Module, group: RankGroup) -> Collection[str]:
    """Find the frozen parameters that equal the base model's folder bit for bit on this rank.

    ``model`` is one for which `has_adapters` is true, on the ranks of ``group``. Its first call
    reads the folder.
    """
    model = without_compile(replicated(model))
    known = _from_base.of(model)
    if known is not None:
        return known
    reshard(model)
    frozen = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if not param.requires_grad:
            frozen[clean_name(name)] = param
    # Parameters of the base are compared under the names that the folder has for them.
    same = _from_folder(base_view(transformers_model(model)), group)
    found = frozenset(name for name, param in frozen.items() if id(param) in same)
    others = sorted(frozen.keys() - found)
    if others and get_rank(group) == 0:
        logger.warning(
            "%s (%d of %d frozen parameters) does not come from the folder of the base model as "
            "it is: snapshots hold it",
            others[0],
            len(others),
            len(frozen),
        )
    return _from_base.set(model, found)


def _from_folder(base: PreTrainedModel, group: RankGroup) -> set[int]:
    # The ids of the parameters, because `base` calls them otherwise than the model with adapters.
    folder = find_source_folder(base.config)
    if folder is None or getattr(base.config, "quantization_config", None) is not None:
        return set()
    try:
        names = names_as_in(folder, base, group)
    except (CheckpointError, OSError) as error:
        logger.info("the base model cannot be compared with its folder: %s", error)
        return set()
    params = base.named_parameters(remove_duplicate=False)
    return {id(param) for name, param in params if name in names}


@dataclass(frozen=True)
class EngineSample:
    """The part of `EngineFacts` that one rank knows, and the mesh of an `FSDPEngine`. ``sample``:
    see `sample_state`.

    Bytes that match their digests can still be the wrong bytes: a writer that copied an old staging
    buffer (NeMo-RL's asynchronous saves all repeated the first one), a loader that left the moments
    at zero. Each snapshot therefore counts optimizer steps, records the learning rate, and samples
    up to 64 elements of every tensor. The next snapshot must differ, and a restore must match.
    """

    optimizer_steps: int | None
    lr: float | None
    schedule_step: float | None
    sample: dict[str, int | bool]
    mesh: dict[str, int] = field(default_factory=dict)


def count_engine(state: DCPState, first_group: int = 0) -> EngineSample:
    """Read the counters of an engine. The learning rate is taken from group ``first_group``."""
    optimizer = state.optimizer
    if optimizer is None:
        return EngineSample(None, None, None, {})
    lr = float(optimizer.param_groups[first_group]["lr"])
    # torch's ChainedScheduler counts nothing.
    schedule_step = getattr(state.scheduler, "last_epoch", None)
    mesh = state.counters.mesh if isinstance(state.counters, EngineCounters) else {}
    return EngineSample(_optimizer_steps(state), lr, schedule_step, {}, mesh)


def _optimizer_steps(state: DCPState) -> int:
    # The engine's own count, which no stale buffer can hide, else the optimizer's.
    counters = {} if state.counters is None else state.counters.state_dict()
    if "optimizer_steps" in counters:
        return int(counters["optimizer_steps"])
    assert state.optimizer is not None
    moments = state.optimizer.state.values()
    return max((int(entry["step"]) for entry in moments if "step" in entry), default=0)


def combine_ranks(ranks: Sequence[Mapping[str, EngineSample]]) -> dict[str, EngineFacts]:
    """Combine the samples of all ranks: engine name -> facts."""
    facts = {}
    for name, first in ranks[0].items():
        combined = combine_samples([rank[name].sample for rank in ranks])
        fingerprints = {"model": str(combined["model"])}
        if first.optimizer_steps is not None:
            fingerprints["optim"] = str(combined["optim"])
        facts[name] = EngineFacts(
            first.optimizer_steps,
            first.lr,
            first.schedule_step,
            fingerprints,
            moved=bool(combined["moved"]),
        )
    return facts


def check_fresh(before: Mapping[str, EngineFacts], now: Mapping[str, EngineFacts]) -> None:
    """Raise `StaleSnapshotError` if every sampled value is as ``before``, although the optimizer
    has stepped.

    After an update the moments or the parameters have changed. If only one changed (a rate of 0, an
    update below the precision, gradients too small for an accumulator), a warning is logged.
    """
    for name in now.keys() & before.keys():
        old = before[name]
        new = now[name]
        has_stepped = (new.optimizer_steps or 0) > (old.optimizer_steps or 0)
        # All values were the same already.
        if not new.moved or not has_stepped:
            continue
        steps = f"optimizer steps {old.optimizer_steps} and {new.optimizer_steps}"
        parts = new.fingerprints
        still = [part for part in parts if parts[part] == old.fingerprints.get(part)]
        if len(still) == len(parts):
            raise StaleSnapshotError(
                f"stale snapshot of {name!r}: fingerprints did not change between {steps}; not "
                "committed"
            )
        if still and new.lr:
            logger.warning("the sampled %s of %r is the same at %s", still[0], name, steps)


_SETTINGS = (
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.flash_sdp_enabled",
    "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.math_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "are_deterministic_algorithms_enabled",
    "get_default_dtype",
)
"""Attributes and functions of torch. ``allow_tf32`` and ``set_float32_matmul_precision`` set
``fp32_precision``.
"""

_OTHER_KEYS = {
    "experiment_name",
    "trial_name",
    "path",
    "revision",
    "trust_remote_code",
    "init_from_scratch",
    "seed",
    "is_critic",
    "train_vision",
    "freeze_vision_tower",
    "use_lora",
    "lora_rank",
    "lora_alpha",
    "target_modules",
    "peft_type",
    "device",
    "backend",
    "timeout_s",
    "gradient_checkpointing",
    "logprobs_chunk_size",
}
"""Keys of the engine's config that a load compares elsewhere, or that do not change the numbers of
a step.
"""
_OPTIMIZER_KEYS = {"optimizer.gradient_clipping", "optimizer.implementation"}
"""Keys of the optimizer that a load does not bring back. The schedule is described as a whole."""


def numerical_switches(
    states: Mapping[str, DCPState], engines: Mapping[str, Any]
) -> dict[str, str]:
    """Collect settings that change the numbers of a step and are not part of the state: name ->
    value as text.

    "none" is reported as "ieee", because both compute the same.
    """
    found = {}

    # Settings of torch, for all engines.
    for name in _SETTINGS:
        value = attrgetter(name)(torch)
        text = str(value() if callable(value) else value)
        found[f"torch.{name}"] = "ieee" if text == "none" else text

    for name, state in states.items():
        # The names of the trained parameters are many, so they are a digest.
        params = by_clean_name(state.model.named_parameters())
        trained = sorted(key for key, param in params.items() if param.requires_grad)
        digest = xxhash.xxh3_64_hexdigest("\n".join(trained).encode())
        found[f"trained parameters of {name}"] = f"{len(trained)} of {len(params)} (names {digest})"
        if state.optimizer is not None and state.scheduler is not None:
            found[f"schedule of {name}"] = describe_schedule(state.scheduler)

        # The configuration of Holdfast's engines, and the settings of other trainers.
        engine = engines[name]
        config = getattr(engine, "config", None)
        settings: dict[str, Any] = {}
        if isinstance(config, TrainEngineConfig):
            settings |= _numerical_keys(asdict(config))
        if isinstance(engine, HostEngine):
            settings |= engine.settings
        for key, value in settings.items():
            found[f"{key} of {name}"] = str(value)
    return found


def _numerical_keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        key = prefix + name
        is_other = key in _OTHER_KEYS or key.startswith(("optimizer", "fsdp."))
        if isinstance(value, Mapping):
            yield from _numerical_keys(value, f"{key}.")
        elif key in _OPTIMIZER_KEYS or not is_other:
            yield key, value
