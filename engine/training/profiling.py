"""Traces of some training steps, by torch.profiler, for https://ui.perfetto.dev.

A trace has the operators and kernels of one rank in one step, in phases with names: ``publish``,
``sampling`` (the wait for it), ``forward`` (log-probabilities or values), ``update`` and
``snapshot``. Tickets of rollouts of this process are in it, too, see `utils/timeline.py`. An engine
without a profiler pays one ``if`` a call.
"""

import atexit
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ...utils.compat.torch_private import has_profiler, is_profiled
from ...utils.logging import get_logger
from ...utils.timeline import add_lives, timeline
from ..config import ProfileConfig, TrainEngineConfig

P = ParamSpec("P")
T = TypeVar("T")

logger = get_logger(__name__)


class StepProfiler:
    """Writes ``<path>/step_<step>_rank_<rank>.json``, in the Chrome trace format, for each step of
    the configuration.

    A step begins with the first call of the engine at its version of the weights, and ends with the
    first one at another version, or with `close`. So a snapshot after the step is in its trace.

    Args:
        config: which steps, and where to.
        rank: this rank.
        device: of the engine. Kernels are traced on CUDA.
    """

    def __init__(self, config: ProfileConfig, rank: int, device: torch.device) -> None:
        self._steps = set(config.steps)
        self._missing = set(config.steps)
        self._folder = Path(config.path).absolute()
        self._rank = rank
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._step: int | None = None
        self._running: Any = None
        timeline.turn_on(self)

    def at(self, step: int) -> None:
        """Begin the trace of a step, or end the one of the step before it. If another profiler of
        this process runs, the step is not traced, with a warning.
        """
        if step == self._step:
            return
        self._end()
        # Steps before the first one of this process are not missing.
        if self._step is None:
            self._missing = {other for other in self._steps if other > step}
        self._missing.discard(step)
        self._step = step
        if step not in self._steps:
            return

        # torch has one profiler a process. With a second one it dies of a segmentation fault.
        if has_profiler():
            logger.warning("no trace of step %d: another profiler of this process runs", step)
            return
        running = profile(activities=self._activities)
        try:
            running.start()
        except (OSError, RuntimeError) as error:
            logger.warning("no trace of step %d: %s", step, error)
            return
        self._running = running
        timeline.start_trace()
        # An interpreter that ends while a profiler runs dies of the same.
        atexit.register(self._end)

    def close(self) -> None:
        """End and write the trace that runs, if any.

        A trace that cannot be written, and steps that never came, are warnings.
        """
        self._end()
        timeline.turn_off(self)
        if self._missing:
            logger.warning(
                "no traces of steps %s: the last step of this engine was %s, by its set_version",
                sorted(self._missing),
                self._step,
            )

    def _end(self) -> None:
        if self._running is None:
            return
        running = self._running
        self._running = None
        lives = timeline.stop_trace()
        began_ns = time.monotonic_ns()
        atexit.unregister(self._end)
        if not is_profiled():
            logger.warning(
                "no trace of step %d: its profiler was ended by another one, or runs in another "
                "thread",
                self._step,
            )
            return
        path = self._folder / f"step_{self._step}_rank_{self._rank}.json"
        try:
            running.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(path))
            add_lives(path, "rollout tickets", lives, began_ns)
        except (OSError, RuntimeError) as error:
            logger.warning("the trace of step %d cannot be written: %s", self._step, error)
            return
        seconds = (time.monotonic_ns() - began_ns) / 1e9
        logger.info("wrote the trace of step %d to %s in %.2f s", self._step, path, seconds)


def profiler_of(config: TrainEngineConfig, device: torch.device) -> StepProfiler | None:
    """The profiler of this rank. None if it is not traced."""
    traces = config.profile
    if traces is None:
        return None
    rank = dist.get_rank()
    if rank not in traces.ranks:
        return None
    return StepProfiler(traces, rank, device)


def phase(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a method of an engine that has a ``profiler`` and ``counters``: calls are phases of
    this name in a trace, which may begin or end with them.
    """

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def traced(*args: P.args, **kwargs: P.kwargs) -> T:
            engine: Any = args[0]
            if engine.profiler is None:
                return method(*args, **kwargs)
            engine.profiler.at(engine.counters.version)
            with record_function(name):
                return method(*args, **kwargs)

        return traced

    return decorate
