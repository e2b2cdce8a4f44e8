"""What a generation says of the state it holds, so that a stale snapshot and a wrong restore are noticed.

Bytes that match their digests can still be the wrong bytes: a writer that copied an old staging buffer (NeMo-RL's
asynchronous saves all repeated the first one), a loader that left the moments zero, one rank's generators on all.
Each snapshot therefore counts optimizer steps, names the learning rate, and samples up to 64 elements of every tensor
(see `holdfast.engine.dcp.fingerprint`); the next snapshot must differ, and a restore must give the same.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

import torch
import xxhash
from rich import box
from rich.console import Console
from rich.table import Table

from ..engine.dcp.fingerprint import combine_samples, sample_state
from ..engine.dcp.state import DCPState
from ..engine.memory.tensors import by_clean_name
from ..utils.errors import CheckpointCorruptError, StaleSnapshotError
from ..utils.logging import get_logger
from .info import EngineFacts

logger = get_logger(__name__)

_TABLE_WIDTH = 110


@dataclass(frozen=True)
class EngineSample:
    """One rank's part of an `EngineFacts`: ``sample`` is what `sample_state` returns."""

    optimizer_steps: int | None
    lr: float | None
    schedule_step: float | None
    sample: dict[str, int | bool]


def count_engine(state: DCPState, first_group: int = 0) -> EngineSample:
    """What an engine counts, as it is now, with nothing sampled yet; ``first_group`` is where the rate is looked at."""
    optimizer = state.optimizer
    if optimizer is None:
        return EngineSample(None, None, None, {})
    schedule_step = getattr(state.scheduler, "last_epoch", None)  # torch's ChainedScheduler has none
    return EngineSample(_optimizer_steps(state), float(optimizer.param_groups[first_group]["lr"]), schedule_step, {})


def sample_engine(state: DCPState, first_group: int = 0) -> EngineSample:
    """Count, and sample this rank's part of an engine as it is now."""
    return replace(count_engine(state, first_group), sample=sample_state(state.live_tensors()))


def _optimizer_steps(state: DCPState) -> int:
    """As the engine counts them, which no stale buffer can hide, else as the optimizer does."""
    counters = {} if state.counters is None else state.counters.state_dict()
    if "optimizer_steps" in counters:
        return int(counters["optimizer_steps"])
    assert state.optimizer is not None
    return max((int(entry["step"]) for entry in state.optimizer.state.values() if "step" in entry), default=0)


def combine_ranks(ranks: Sequence[Mapping[str, EngineSample]]) -> dict[str, EngineFacts]:
    """Engine name -> facts, of all ranks' samples."""
    facts = {}
    for name, first in ranks[0].items():
        combined = combine_samples([rank[name].sample for rank in ranks])
        moved = bool(combined["moved"])
        parts = ("model",) if first.optimizer_steps is None else ("model", "optim")
        fingerprints = {part: str(combined[part]) for part in parts}
        facts[name] = EngineFacts(first.optimizer_steps, first.lr, first.schedule_step, fingerprints, moved)
    return facts


def check_fresh(before: Mapping[str, EngineFacts], now: Mapping[str, EngineFacts]) -> None:
    """Refuse a snapshot that repeats the one before.

    After an update the moments have changed, or the parameters have. One of them may stand still (a rate of 0, an
    update below the precision, an accumulator that gradients are too small for), which is only logged.

    Raises:
        StaleSnapshotError: every sampled value is that of the last snapshot although the optimizer has stepped.
    """
    for name in now.keys() & before.keys():
        old, new = before[name], now[name]
        if not new.moved or (new.optimizer_steps or 0) <= (old.optimizer_steps or 0):
            continue
        steps = f"optimizer steps {old.optimizer_steps} and {new.optimizer_steps}"
        still = [part for part, value in new.fingerprints.items() if value == old.fingerprints.get(part)]
        if len(still) == len(new.fingerprints):
            raise StaleSnapshotError(
                f"stale snapshot of {name!r}: fingerprints did not change between {steps}; not committed"
            )
        if still and new.lr:
            logger.warning("the sampled %s of %r is the same at %s", still[0], name, steps)


@dataclass(frozen=True)
class _Row:
    what: str
    saved: Any
    restored: Any


def check_restored(
    what: str,
    saved: tuple[Mapping[str, EngineFacts], Mapping[str, str]],
    restored: tuple[Mapping[str, EngineFacts], Mapping[str, str]],
) -> str:
    """Compare what a generation says of itself with what was restored.

    Args:
        what: names the generation in messages.
        saved: engine name -> facts and process name -> digest of its generators, of the generation.
        restored: the same, of the engines and processes now. A process that the saved run had not is left out.

    Returns:
        a table for the log.

    Raises:
        CheckpointCorruptError: something differs, although every byte that was read matched its digest.
    """
    if unknown := sorted((restored[0].keys() - saved[0].keys()) | (restored[1].keys() - saved[1].keys())):
        raise CheckpointCorruptError(f"{what} was restored, but its recover_info.json says nothing of {unknown[0]!r}")
    rows = list(_rows(saved[0], restored[0]))
    rows += [_Row(f"generators of {name}", saved[1][name], digest) for name, digest in restored[1].items()]
    if wrong := [row for row in rows if not _same(row.saved, row.restored)]:
        row = wrong[0]
        raise CheckpointCorruptError(
            f"{what} was restored, but {row.what} is {row.restored!r}; recover_info.json says {row.saved!r} "
            f"({len(wrong)} of {len(rows)} differ). Do not go on with this run; report it"
        )
    return _render(what, rows)


_SETTINGS = (
    *(f"backends.{unit}.fp32_precision" for unit in ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul")),
    *(f"backends.cuda.matmul.allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")),
    *(f"backends.cuda.{kind}_sdp_enabled" for kind in ("flash", "mem_efficient", "math", "cudnn")),
    *("backends.cudnn.benchmark", "backends.cudnn.deterministic"),
    *("are_deterministic_algorithms_enabled", "get_default_dtype"),
)
"""Attributes and functions of torch. ``allow_tf32`` and ``set_float32_matmul_precision`` set ``fp32_precision``."""


def numerical_switches(states: Mapping[str, DCPState]) -> dict[str, str]:
    """Settings of this process and its engines that decide what a step computes and are no part of the state.

    Args:
        states: engine name -> state.

    Returns:
        name of a setting -> its value as text. "ieee" stands for "none" too, which computes the same.
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


def warn_of_switches(what: str, saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Log one warning that names each setting with another value than in the generation ``what``."""
    if changed := [name for name in saved if name in now and saved[name] != now[name]]:
        logger.warning(
            "%s was saved with other settings, so the run goes on with other numbers than without the restart: %s. Set "
            "them before load as they were, unless the change is meant",
            what, "; ".join(f"{name} was {saved[name]}, is {now[name]}" for name in changed),
        )  # fmt: skip


def _same(saved: Any, restored: Any) -> bool:
    """Equal, where a learning rate that has become NaN equals itself."""
    return saved == restored or (saved != saved and restored != restored)


def _rows(saved: Mapping[str, EngineFacts], restored: Mapping[str, EngineFacts]) -> Iterator[_Row]:
    for name, facts in restored.items():
        before, now = asdict(saved[name]), asdict(facts)
        for key in ("optimizer_steps", "lr", "schedule_step"):
            if now[key] is not None:
                yield _Row(f"{name}: {key}", before[key], now[key])
        for part in facts.fingerprints:
            yield _Row(f"{name}: {part}", before["fingerprints"].get(part), facts.fingerprints[part])


def _render(what: str, rows: Sequence[_Row]) -> str:
    table = Table(title=f"restored from {what}", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("what", "as saved and as restored"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.what, str(row.restored))
    out = io.StringIO()
    Console(file=out, width=_TABLE_WIDTH, color_system=None).print(table)
    return out.getvalue().rstrip()
