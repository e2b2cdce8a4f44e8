"""Which generations stay: the union of a few rules, from what is on disk now, so that it survives restarts.

Nothing is remembered between calls, and nothing needs to be: a generation that a rule wants in view of the whole
history was wanted by the same rule at every moment before, so applying the rules after every commit never removes it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import RecoverConfig


@dataclass(frozen=True)
class RetentionRules:
    """A generation stays when any rule wants it."""

    last: int | None
    """How many of the newest; None: all of them."""
    every_steps: int | None = None
    """Those of every so many steps: 100 means steps 99, 199, 299 ..."""
    best: int | None = None
    """How many of the best by ``metric``."""
    metric: str | None = None
    """A name among a generation's metrics."""
    mode: str = "max"
    """Whether the ``max`` or the ``min`` of ``metric`` is best."""

    @classmethod
    def from_config(cls, config: "RecoverConfig") -> "RetentionRules":
        """The rules of the run's own folder."""
        return cls(
            last=config.max_ckpt_to_keep,
            every_steps=config.keep_every_steps,
            best=config.keep_best,
            metric=config.best_metric,
            mode=config.best_mode,
        )


def steps_to_keep(generations: Mapping[int, Mapping[str, float]], rules: RetentionRules) -> set[int]:
    """The steps of the generations that stay; the newest of all always does.

    Args:
        generations: step -> metrics of every usable generation.
        rules: what to keep.
    """
    return {step for step, reasons in reasons_to_keep(generations, rules).items() if reasons}


def reasons_to_keep(generations: Mapping[int, Mapping[str, float]], rules: RetentionRules) -> dict[int, list[str]]:
    """Step -> which rules want it, in words; none for one that goes with the next commit. See `steps_to_keep`."""
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
    """Steps by ``metric``, of equals the newer first; those without it, or with NaN, are not in it."""
    sign = 1 if mode == "max" else -1
    values = {step: metrics.get(metric, math.nan) for step, metrics in generations.items()}
    ranked = [(sign * value, step) for step, value in values.items() if not math.isnan(value)]
    return [step for _, step in sorted(ranked, reverse=True)]
