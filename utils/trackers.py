"""Experiment trackers next to ``stats.jsonl``: TensorBoard, Weights & Biases, trackio, Prometheus
and the metrics of Ray.

Each library is imported when its tracker is opened. Trackers that identify runs by an id receive
the run's id, so that a resumed run continues in the same place. A tracker does not receive steps
that it already has (see `StatsLogger`).
"""

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .compat.trackio_private import steps_of
from .errors import ConfigError

PROMETHEUS_ADDRESS = "HOLDFAST_PROMETHEUS"
"""Environment variable with the ``host:port`` that a Prometheus server scrapes."""


@dataclass(frozen=True)
class TrackedRun:
    """Run that a tracker opens."""

    folder: Path  # folder for trackers that write files
    project: str  # project name, which groups runs
    name: str  # name for people
    run_id: str  # id of the run, which survives restarts
    last_step: int  # last step of the run so far, or -1. Steps logged after it will be repeated
    logged_step: int  # last step that any process of the run has logged, or -1


class Tracker(Protocol):
    """Receiver of one row of numbers per step."""

    has_step: int  # last step that the tracker has, or -1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the row of a step, which is higher than all before."""
        ...

    def close(self) -> None:
        """Send all remaining rows and end."""
        ...


class _TensorBoard:
    """Event files under ``tensorboard/``. The viewer drops steps after ``last_step``
    (``purge_step``).
    """

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # The folder has the steps of earlier processes, if there were any.
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
    """Run of Weights & Biases. ``WANDB_MODE=offline`` writes it under ``wandb/`` for ``wandb
    sync``, in one folder per process.

    Logged rows cannot be removed, so repeated steps keep their first row. Only a server reports the
    rows that it has. Offline these are all rows that were logged.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        known = any(run.folder.glob(f"wandb/*-{run.run_id}"))
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.folder),
        )

        # A server counts the rows. Offline, earlier processes have left their folders.
        self.has_step = -1
        if self._run.resumed:
            self.has_step = self._run.step - 1
        elif known:
            self.has_step = run.logged_step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # Without commit the row waits for the next one.
        self._run.log(dict(values), step=step, commit=True)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """Run of trackio, in its local database (``TRACKIO_DIR``) or at ``TRACKIO_SPACE_ID``.

    trackio identifies runs by name, so the name ends with the id. Repeated steps keep their first
    row.
    """

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        # Only the numbers of the steps.
        self._run: Any = trackio.init(
            run.project,
            f"{run.name}-{run.run_id}",
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        steps = steps_of(self._run)
        self.has_step = run.logged_step
        if steps is not None:
            self.has_step = steps - 1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Gauges:
    """Gauges with the last value of each name. A subclass makes them."""

    def __init__(self, run: TrackedRun) -> None:
        self.has_step = run.last_step - 1  # a resumed run shows its last step at once
        self._run_name = run.name
        self._gauges: dict[str, Any] = {}

    def _gauge(self, metric: str, about: str) -> Any:
        raise NotImplementedError

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in {"step": step, **values}.items():
            metric = "holdfast_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            if metric not in self._gauges:
                self._gauges[metric] = self._gauge(metric, f"{name}, its last value")
            self._gauges[metric].set(value)


class _Prometheus(_Gauges):
    """Gauges for a Prometheus server to scrape, at ``http://127.0.0.1:9464/metrics`` or the
    ``host:port`` in ``HOLDFAST_PROMETHEUS``.
    """

    def __init__(self, run: TrackedRun) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        super().__init__(run)
        self._registry = CollectorRegistry()
        host, port = _prometheus_address()
        try:
            self._server, _ = start_http_server(port, host, self._registry)
        except OSError as error:
            raise ConfigError(
                f"no server for Prometheus can be started at {host}:{port}: {error}; set "
                f"{PROMETHEUS_ADDRESS} to another host:port"
            ) from error

    def _gauge(self, metric: str, about: str) -> Any:
        from prometheus_client import Gauge

        gauge = Gauge(metric, about, ["run"], registry=self._registry)
        return gauge.labels(self._run_name)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _RayMetrics(_Gauges):
    """Gauges that the node of this process exports, with all other metrics of Ray, as
    ``ray_holdfast_<name>``, as long as this process lives.
    """

    def __init__(self, run: TrackedRun) -> None:
        import ray

        if not ray.is_initialized():
            raise ConfigError(
                "config key 'trackers' names 'ray_metrics', but this process is not connected to "
                "Ray; call ray.init() first, or use 'prometheus'"
            )
        super().__init__(run)

    def _gauge(self, metric: str, about: str) -> Any:
        from ray.util.metrics import Gauge

        gauge = Gauge(metric, about, ("run",))
        gauge.set_default_tags({"run": self._run_name})
        return gauge

    def close(self) -> None:
        pass  # a gauge of Ray cannot be taken back


def _prometheus_address() -> tuple[str, int]:
    address = os.environ.get(PROMETHEUS_ADDRESS, "127.0.0.1:9464")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{PROMETHEUS_ADDRESS} is {address!r}; expected host:port")
    return host.strip("[]"), int(port)


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "trackio": _Trackio,
    "prometheus": _Prometheus,
    "ray_metrics": _RayMetrics,
}
"""Maps the name of a tracker, which is also that of its extra, to its class."""
_PACKAGES = {"prometheus": ["prometheus_client"], "ray_metrics": ["ray", "opencensus"]}
"""Packages of trackers with other names. Without opencensus, Ray exports no gauge."""


def require_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError unless every name is a known and installed tracker. Imports nothing."""
    for name in names:
        if name not in TRACKERS:
            known = ", ".join(map(repr, TRACKERS))
            raise ConfigError(f"config key 'trackers' names {name!r}; expected some of {known}")

        packages = _PACKAGES.get(name, [name])
        if not all(importlib.util.find_spec(package) for package in packages):
            raise ConfigError(
                f"config key 'trackers' names {name!r}, which is not installed; run pip install "
                f"'holdfast[{name}]', or leave it out"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"config key 'trackers' is {list(names)}; expected each once")
