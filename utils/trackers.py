"""Experiment trackers beside ``stats.jsonl``: TensorBoard, Weights & Biases, trackio, behind one small interface.

Each is its own library, imported when it is first opened. Those that keep runs under an id get the run's, so that a run
that is resumed goes on in the same place. What a tracker has already, it is not given again: see
`holdfast.utils.metrics.StatsLogger`.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .compat.trackio_private import steps_of
from .errors import ConfigError


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told when it is opened.

    Attributes:
        folder: where those that write files write them.
        project: groups runs.
        name: of the run, for people.
        run_id: of the run, the same in all of its lives.
        last_step: the last step that is part of the run; -1 before the first. What was logged after it, in a life that
            was killed, is done again.
        logged_step: the last step that any life of the run has logged; -1 for none.
    """

    folder: Path
    project: str
    name: str
    run_id: str
    last_step: int
    logged_step: int


class Tracker(Protocol):
    """Takes one row of numbers a step.

    Attributes:
        has_step: the last step that it has; -1 for none.
    """

    has_step: int

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the row of a step, higher than all before."""
        ...

    def close(self) -> None:
        """Hand over all that is left, and end."""
        ...


class _TensorBoard:
    """Event files under ``tensorboard/``. The viewer drops what they have after ``last_step`` (``purge_step``)."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        self.has_step = run.last_step if folder.exists() else -1
        self._writer = SummaryWriter(str(folder), purge_step=run.last_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A run of Weights & Biases; ``WANDB_MODE=offline`` writes it under ``wandb/``, for ``wandb sync`` (each life is a
    folder of its own, with the same id).

    A row that was logged cannot be taken back: steps that are done again are left as they were. Only a server says
    which it has; offline, these are all that were logged.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        known = any(run.folder.glob(f"wandb/*-{run.run_id}"))
        named: dict[str, Any] = {"project": run.project, "name": run.name, "id": run.run_id}
        self._run = wandb.init(**named, resume="allow", dir=str(run.folder))
        self.has_step = self._run.step - 1 if self._run.resumed else run.logged_step if known else -1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step, commit=True)  # else the row waits for the next one

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """A run of trackio, in its database on this machine (``TRACKIO_DIR``) or where ``TRACKIO_SPACE_ID`` says.

    It knows runs by their name, which therefore ends with the id. Steps that are done again are left as they were.
    """

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        name = f"{run.name}-{run.run_id}"
        quiet: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(run.project, name, resume="allow", **quiet)
        steps = steps_of(self._run)
        self.has_step = run.logged_step if steps is None else steps - 1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "trackio": _Trackio,
}
"""Name, which is that of its package and of the extra that installs it -> what opens it."""


def require_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError unless every name is a tracker whose package is installed; nothing is imported."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(
                f"config key 'trackers' names {name!r}; expected some of {', '.join(map(repr, TRACKERS))}"
            )
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"config key 'trackers' names {name!r}, which is not installed; run pip install 'holdfast[{name}]', or "
                "leave it out"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"config key 'trackers' is {list(names)}; expected each once")
