"""Supervised steps, then GRPO, judged by items that are held out from both: shared by
`reasoning.py` and `vision.py`.

- The first ``sft_steps`` are supervised, because a model from scratch gives no answers that could
  be rewarded.
- Every ``eval_steps`` the policy answers the held-out items: ``held_out`` in the statistics and in
  ``held_out.png``.

All steps belong to one run. A kill at any step does not change the final weights.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from chaos import column, mark_kill, read_attempts
from grpo import Numbered, Sampler, grpo_step
from grpo_job import GRPOConfig, TrainWorker, split_rows

from holdfast.engine import FinetuneSpec
from holdfast.engine.api import Batch
from holdfast.engine.rl import count_loss_tokens, sft_loss_fn
from holdfast.engine.worker_group import WorkerGroup
from holdfast.utils.config import require_at_least, require_range
from holdfast.utils.errors import ConfigError
from holdfast.utils.metrics import read_stats


@dataclass
class WarmStartConfig(GRPOConfig):
    """Options of the job, in addition to `GRPOConfig`."""

    task: str = ""
    """Name of the task."""
    max_new_tokens: int = 8
    """Number of tokens after which an answer is cut off."""
    sft_steps: int = 0
    """Supervised steps before GRPO. If there are any, the schedule of the learning rate ends with
    them.
    """
    sft_batch_size: int = 128
    """Items of a supervised step, a multiple of ``batch_size``."""
    eval_steps: int = 10
    """Steps between evaluations on the held-out items."""
    n_held_out: int = 200
    """Number of held-out items."""
    model_layers: int = 2
    """Layers of the tiny model."""
    model_width: int = 96
    """Width of the tiny model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("sft_steps", self.sft_steps, low=0, high=self.total_steps)
        require_at_least(self, eval_steps=1, n_held_out=1, max_new_tokens=1)
        # A supervised step takes whole batches from the loader.
        if self.sft_batch_size < 1 or self.sft_batch_size % self.batch_size:
            raise ConfigError(
                f"config key 'sft_batch_size' is {self.sft_batch_size}; expected a multiple of "
                f"batch_size, {self.batch_size}"
            )

    @property
    def lr_spec(self) -> FinetuneSpec:
        """The supervised steps, after which the learning rate stays at its last value. Without any,
        the whole run.
        """
        if not self.sft_steps:
            return super().lr_spec
        return FinetuneSpec(1, self.sft_steps, 1)


class WarmStartWorker(TrainWorker):
    """One rank of the policy."""

    def sft_step(self, batch: Batch) -> dict[str, float]:
        """Run one supervised step on this rank's share of the batch."""
        self.engine.train()
        stats = self.engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
        self.end_step()
        kept = ("loss", "lr", "grad_norm", "update_skipped")
        return {name: stats[name] for name in kept}


def warm_start_step(
    config: WarmStartConfig,
    sampler: Sampler,
    trainer: WorkerGroup,
    batches: Numbered,
    global_step: int,
) -> dict[str, float]:
    """Run a supervised or a GRPO step, then an evaluation if it is due."""
    if global_step < config.sft_steps:
        # A supervised step takes several batches of the data cursor.
        numbers = []
        for _ in range(config.sft_batch_size // config.batch_size):
            numbers += next(batches)
        batch = sampler.ask("demonstrate", numbers, publish=False)
        shares = split_rows(batch, config, trainer.world_size, 1)
        stats = trainer.call_all("sft_step", per_rank=shares)[0]
    else:
        stats = grpo_step(config, sampler, trainer, batches, global_step)

    n_steps = global_step + 1
    # The last step is always evaluated.
    if n_steps % config.eval_steps and n_steps != config.total_steps:
        return stats

    options = (config.n_held_out, config.actor.temperature, config.seed)
    accuracy = sampler.ask("evaluate", *options, phase="evaluating")
    return {**stats, **accuracy}


def draw(config: WarmStartConfig) -> Path:
    """Draw `plot_held_out`. Returns the path of the picture."""
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    plot_held_out(config, axes)
    path = config.recover.trial_root / "held_out.png"
    figure.savefig(path, dpi=130)
    return path


def plot_held_out(config: WarmStartConfig, axes: Any) -> None:
    """Plot accuracy on held-out items over the time of the steps, with restarts marked."""
    # Steps alone, without the time between the starts.
    stats = list(read_stats(config.stats_folder / "stats.jsonl"))
    minutes = {}
    passed = 0.0
    for entry in stats:
        passed += entry["seconds"] / 60
        minutes[entry["step"]] = passed

    # A thick line for all items, thin ones for the items of each name.
    evaluated = [entry for entry in stats if "held_out" in entry]
    times = [minutes[step] for step in column(evaluated, "step")]
    names = [name for name in evaluated[-1] if name.startswith("held_out")]
    for name in sorted(names):
        _, _, part = name.partition("/")
        axes.plot(
            times,
            column(evaluated, name),
            label=part or "held-out items",
            linewidth=1.2 if part else 2.2,
            alpha=0.7 if part else None,
        )

    if config.sft_steps:
        end = minutes[config.sft_steps - 1]
        axes.axvspan(0, end, color="tab:gray", alpha=0.15, label="supervised")
    for attempt in read_attempts(config.stats_folder)[1:]:
        at = minutes.get(attempt["step"] - 1, 0.0)
        mark_kill(axes, at, "back from a kill")
    axes.set(
        xlabel="minutes of steps",
        ylabel="share of right answers",
        ylim=(0, 1.05),
        title=f"GRPO on {config.task}",
    )
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
