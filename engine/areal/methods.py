"""What AReaL's engine offers under other names than `FSDPEngine`, in terms of that; and its statistics.

Per-token results are aligned with the token they are about, whatever AReaL's method of that name does: see
`holdfast.engine.rl.alignment`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ...utils.config import require_range
from ...utils.metrics import reduce_stats
from ..api import PostFn, Trajectories
from ..config import TrainEngineConfig
from ..training.counters import EngineCounters
from ..training.optimizer_step import clip_and_step


class RunningMeans:
    """Means of named numbers since they were last taken, but for what is not finite (norms of skipped steps)."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}

    def add(self, stats: Mapping[str, float]) -> None:
        """Count one more of each."""
        for name, value in stats.items():
            finite = math.isfinite(value)
            self._sums[name] = self._sums.get(name, 0.0) + (value if finite else 0.0)
            self._counts[name] = self._counts.get(name, 0.0) + finite

    def take(self, group: dist.ProcessGroup) -> dict[str, float]:
        """The means over all ranks of ``group``, which call it together; from now on anew."""
        own = {f"sum {name}": value for name, value in self._sums.items()}
        own |= {f"count {name}": value for name, value in self._counts.items()}
        names, totals = list(self._sums), reduce_stats(own, group)
        self._sums, self._counts = {}, {}
        counts = {name: totals[f"count {name}"] for name in names}
        return {name: totals[f"sum {name}"] / count for name, count in counts.items() if count}


class ArealMethods(ABC):
    """Names of AReaL's `TrainEngine`."""

    config: TrainEngineConfig
    counters: EngineCounters
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None
    _model: PreTrainedModel | None
    _train_stats: RunningMeans

    # Groups: no rank shares its data with another one

    @property
    def initialized(self) -> bool:
        """Whether there is a model."""
        return self._model is not None

    @property
    @abstractmethod
    def control_group(self) -> dist.ProcessGroup:
        """Gloo group of all ranks, for agreement."""

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        """`control_group`."""
        return self.control_group

    @property
    @abstractmethod
    def model(self) -> PreTrainedModel:
        """The sharded module."""

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Group of the ranks that see different data, with the backend of the device: the default one."""
        assert self.control_group is not None and dist.group.WORLD is not None
        return dist.group.WORLD

    @property
    def data_parallel_rank(self) -> int:
        """This rank's place among those that see different data."""
        return dist.get_rank(self.control_group)

    @property
    def data_parallel_world_size(self) -> int:
        """How many ranks see different data."""
        return dist.get_world_size(self.control_group)

    def current_data_parallel_head(self) -> int:
        """Rank of the first of those that see this rank's data: its own."""
        return dist.get_rank()

    def is_data_parallel_head(self) -> bool:
        """Whether this rank is the first of those that see its data: always."""
        return True

    # Batches

    @abstractmethod
    def forward_batch(self, batch: Any, post_fn: PostFn | None = None) -> Any:
        """Per-token results in evaluation mode."""

    def forward(self, input_: Trajectories) -> Any:
        """`forward_batch`. Its log-probabilities are about token t where AReaL's are about token t + 1."""
        return self.forward_batch(input_)

    def export_stats(self) -> dict[str, float]:
        """Mean of each number that `train_batch` returned since the last call, over these calls and all ranks.

        Collective; empty when there was no batch. What algorithms count is returned by their updates instead.
        """
        return self._train_stats.take(self.control_group)

    # Optimizer

    @abstractmethod
    def _require_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, or a ConfigError."""

    def optimizer_zero_grad(self) -> None:
        """Drop the gradients."""
        self._require_optimizer().zero_grad()

    def optimizer_step(self) -> dict[str, float]:
        """Clip the gradients that a backward of the caller's left, and update unless they are not finite; collective.

        For training steps of one's own; `train_batch` does all of it. FSDP has averaged the gradients over ranks.

        Returns:
            ``grad_norm`` (before clipping), ``lr``, ``update_skipped`` and ``update_successful`` (0 or 1).
        """
        optimizer = self._require_optimizer()
        lr = float(optimizer.param_groups[0]["lr"])
        nothing = torch.zeros((), dtype=torch.float64, device=next(self.model.parameters()).device)
        _, grad_norm, skipped = clip_and_step(self.model, optimizer, self._max_norm, self.counters, nothing)
        return {"grad_norm": grad_norm, "lr": lr, **success(skipped)}

    @property
    def _max_norm(self) -> float:
        assert self.config.optimizer is not None
        return self.config.optimizer.gradient_clipping

    def set_lr(self, lr: float) -> None:
        """Set the rate of the next step; the schedule sets its own when it advances.

        Raises:
            ConfigError: there is no optimizer, or ``lr`` is negative.
        """
        require_range("lr", lr, low=0.0)
        for group in self._require_optimizer().param_groups:
            group["lr"] = lr

    def lr_scheduler_step(self) -> None:
        """Advance the schedule by one, whether or not there was an update; `step_lr_scheduler` asks for one."""
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
            self.counters.steps_since_schedule = 0


def success(skipped: bool) -> dict[str, float]:
    """Whether an update was made, under Holdfast's name and AReaL's."""
    return {"update_skipped": float(skipped), "update_successful": float(not skipped)}
