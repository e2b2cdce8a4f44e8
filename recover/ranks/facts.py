"""Facts about the engines of a rank. They reveal a stale snapshot and a wrong restore.

Bytes that match their digests can still be the wrong bytes: a writer that copied an old staging buffer (NeMo-RL's
asynchronous saves all repeated the first one), a loader that left the moments at zero, the generators of one rank on
all ranks. Each snapshot therefore counts optimizer steps, records the learning rate, and samples up to 64 elements of
every tensor (see `holdfast.engine.dcp.fingerprint`). The next snapshot must differ, and a restore must match.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import torch
import xxhash

from ...engine.dcp.fingerprint import combine_samples, sample_state
from ...engine.dcp.state import DCPState
from ...engine.memory.tensors import by_clean_name
from ...engine.training.counters import EngineCounters
from ..info import EngineFacts


@dataclass(frozen=True)
class EngineSample:
    """The part of `EngineFacts` that one rank knows, and the mesh of an `FSDPEngine`. ``sample`` comes from
    `sample_state`."""

    optimizer_steps: int | None
    lr: float | None
    schedule_step: float | None
    sample: dict[str, int | bool]
    mesh: dict[str, int] = field(default_factory=dict)


def count_engine(state: DCPState, first_group: int = 0) -> EngineSample:
    """Read the counters of an engine, with an empty sample. The learning rate is taken from group ``first_group``."""
    optimizer = state.optimizer
    if optimizer is None:
        return EngineSample(None, None, None, {})
    schedule_step = getattr(state.scheduler, "last_epoch", None)  # torch's ChainedScheduler has none
    lr = float(optimizer.param_groups[first_group]["lr"])
    mesh = state.counters.mesh if isinstance(state.counters, EngineCounters) else {}
    return EngineSample(_optimizer_steps(state), lr, schedule_step, {}, mesh)


def sample_engine(state: DCPState, first_group: int = 0) -> EngineSample:
    """Read the counters of an engine, and sample the tensors of this rank."""
    return replace(count_engine(state, first_group), sample=sample_state(state.live_tensors()))


def _optimizer_steps(state: DCPState) -> int:
    """Return the engine's own count, which no stale buffer can hide, else the optimizer's."""
    counters = {} if state.counters is None else state.counters.state_dict()
    if "optimizer_steps" in counters:
        return int(counters["optimizer_steps"])
    assert state.optimizer is not None
    return max((int(entry["step"]) for entry in state.optimizer.state.values() if "step" in entry), default=0)


def combine_ranks(ranks: Sequence[Mapping[str, EngineSample]]) -> dict[str, EngineFacts]:
    """Combine the samples of all ranks into one `EngineFacts` for each engine name."""
    facts = {}
    for name, first in ranks[0].items():
        combined = combine_samples([rank[name].sample for rank in ranks])
        moved = bool(combined["moved"])
        parts = ("model",) if first.optimizer_steps is None else ("model", "optim")
        fingerprints = {part: str(combined[part]) for part in parts}
        facts[name] = EngineFacts(first.optimizer_steps, first.lr, first.schedule_step, fingerprints, moved)
    return facts


_SETTINGS = (
    *(f"backends.{unit}.fp32_precision" for unit in ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul")),
    *(f"backends.cuda.matmul.allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")),
    *(f"backends.cuda.{kind}_sdp_enabled" for kind in ("flash", "mem_efficient", "math", "cudnn")),
    *("backends.cudnn.benchmark", "backends.cudnn.deterministic"),
    *("are_deterministic_algorithms_enabled", "get_default_dtype"),
)
"""Attributes and functions of torch. ``allow_tf32`` and ``set_float32_matmul_precision`` set ``fp32_precision``."""


def numerical_switches(states: Mapping[str, DCPState]) -> dict[str, str]:
    """Collect settings that change the numbers a step computes and are not part of the state.

    Args:
        states: engine name -> state.

    Returns:
        name of a setting -> value as text. "none" is reported as "ieee", because both compute the same.
    """
    values = {name: attrgetter(name)(torch) for name in _SETTINGS}
    found = {f"torch.{name}": str(value() if callable(value) else value) for name, value in values.items()}
    found = {name: "ieee" if value == "none" else value for name, value in found.items()}
    for engine, state in states.items():
        params = by_clean_name(state.model.named_parameters())
        trained = sorted(name for name, param in params.items() if param.requires_grad)
        names = xxhash.xxh3_64_hexdigest("\n".join(trained).encode())
        found[f"trained parameters of {engine}"] = f"{len(trained)} of {len(params)} (names {names})"
    return found
