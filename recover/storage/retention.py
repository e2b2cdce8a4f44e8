"""Which generations stay: the union of a few rules, applied to the generations that are on disk.

No state is needed between calls. If a rule would keep a generation given the whole history, the same rule also kept it
at every earlier moment. So applying the rules after every commit never removes it too early.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import RecoverConfig


@dataclass(frozen=True)
class RetentionRules:
    """A generation stays if any rule keeps it."""

    last: int | None
    """Number of newest generations. None keeps all."""
    every_steps: int | None = None
    """Keep every N-th step. With 100: steps 99, 199, 299 ..."""
    best: int | None = None
    """Number of best generations by ``metric``."""
    metric: str | None = None
    """Name of one of a generation's metrics."""
    mode: str = "max"
    """Whether the ``max`` or the ``min`` of ``metric`` is best."""

    @classmethod
    def from_config(cls, config: "RecoverConfig") -> "RetentionRules":
        """Rules for the run's own folder."""
        return cls(
            last=config.max_ckpt_to_keep,
            every_steps=config.keep_every_steps,
            best=config.keep_best,
            metric=config.best_metric,
            mode=config.best_mode,
        )


def steps_to_keep(generations: Mapping[int, Mapping[str, float]], rules: RetentionRules) -> set[int]:
    """Steps of the generations that stay. The newest one always does.

    Args:
        generations: step -> metrics of every usable generation.
        rules: the rules.
    """
    return {step for step, reasons in reasons_to_keep(generations, rules).items() if reasons}


def reasons_to_keep(generations: Mapping[int, Mapping[str, float]], rules: RetentionRules) -> dict[int, list[str]]:
    """Step -> names of the rules that keep it. Without a rule, the generation is deleted at the next commit."""
    newest_first = sorted(generations, reverse=True)
    wanted = {"newest": newest_first[:1], f"last {rules.last}" if rules.last else "all": newest_first[: rules.last]}
    if rules.every_steps is not None:
        every = [step for step in newest_first if (step + 1) % rules.every_steps == 0]
        wanted[f"every {rules.every_steps} steps"] = every
    if rules.best is not None and rules.metric is not None:
        best = _best_first(generations, rules.metric, rules.mode)[: rules.best]
        wanted[f"best {rules.best} by {rules.metric}"] = best
    return {step: [rule for rule, steps in wanted.items() if step in steps] for step in newest_first}


def _best_first(generations: Mapping[int, Mapping[str, float]], metric: str, mode: str) -> list[int]:
    """Steps by ``metric``, newer first if equal. Steps whose metric is missing or NaN are left out."""
    sign = 1 if mode == "max" else -1
    values = {step: metrics.get(metric, math.nan) for step, metrics in generations.items()}
    ranked = [(sign * value, step) for step, value in values.items() if not math.isnan(value)]
    return [step for _, step in sorted(ranked, reverse=True)]
