"""`recover`: from SIGKILL of a trainer to the first new step of the GRPO example, over a cold start
of the same job.

The times come from the product: the supervisor's report of the loss (examples/grpo.py writes it to
``stats/attempts.jsonl``), the log time of the first new step, and the durations in the log. The
other way is the usual reaction of a launcher to a dead worker: kill the driver and run the same
command again.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

from examples.chaos import GrpoRun
from holdfast.utils.metrics import read_stats

from .harness import Figure, Options, over

COLD = "cold start"
SUPERVISOR = "Holdfast supervisor"
AGAIN = "the whole job again"
TIMEOUT_S = 300.0
MOST_ROUNDS = 3  # a round starts the job two or three times
_OVERRIDES = (
    "recover.freq_steps=2",
    "trackers=[]",
    "log_level=INFO",
    "recover.retries=1000",
    "total_steps=100000",
)
_FIRST_STEPS = 4


def recover(options: Options) -> list[Figure]:
    """Measure one kill of a trainer and one of the driver per round."""
    folder = options.scratch / "recover"
    seconds: dict[str, list[float]] = {}
    n_rounds = 1 if options.quick else min(options.rounds, MOST_ROUNDS)
    try:
        for number in range(n_rounds):
            measured = _measure_round(folder / str(number), restart=not options.quick)
            for name, value in measured.items():
                seconds.setdefault(name, []).append(value)
    finally:
        rmtree(folder, ignore_errors=True)

    # The phases are shown in seconds only, and a quick run does not start the whole job again.
    compared = {way: seconds[way] for way in (COLD, SUPERVISOR, AGAIN) if way in seconds}
    return [
        Figure(
            "recover.first_step",
            "SIGKILL to the first new step / cold start of the same job to its first step",
            "lower",
            over(COLD, compared),
            {SUPERVISOR: 1.0},
            seconds,
            note="phases of the supervisor's way in seconds; Ray, two trainers and "
            "a rollout worker of a tiny model",
        )
    ]


def _measure_round(
    folder: Path,
    *,
    restart: bool,
) -> dict[str, float]:
    run = GrpoRun(folder, *_OVERRIDES)
    try:
        # The start of the job, with nothing to recover.
        started = time.time()
        run.start()
        _, first = _next_step(run, 0, started)
        seconds = {COLD: first - started}
        _wait_for_steps(run)

        # A trainer dies, and the supervisor goes on.
        killed = time.time()
        attempts = len(run.attempts())
        log_bytes = _log(run).stat().st_size
        if not run.kill("trainer", rank=1):
            raise RuntimeError(
                f"there was no trainer to kill; the log ends with:\n{run.log_tail()}"
            )
        attempt, first = _next_step(run, attempts, killed)
        seconds[SUPERVISOR] = first - killed

        # Its phases. The log lines of the workers have arrived when a few more steps are done.
        _wait_for_steps(run)
        log = _log(run).read_bytes()[log_bytes:].decode(errors="replace")
        seconds |= _phases(attempt, first, killed, log)

        # The driver dies, and a launcher starts the job again.
        if restart:
            attempts = len(run.attempts())
            killed = time.time()
            run.kill("driver")
            run.start()
            _, first = _next_step(run, attempts, killed)
            seconds[AGAIN] = first - killed
        return seconds
    finally:
        run.stop()


def _log(run: GrpoRun) -> Path:
    return run.fileroot / "output.log"


def _wait_for_steps(run: GrpoRun) -> None:
    """Wait for a step after the first snapshot, so that the kill hits a run in full swing."""
    goal = run.last_step() + _FIRST_STEPS
    _wait(run, lambda: run.last_step() >= goal)


def _next_step(
    run: GrpoRun,
    attempts: int,
    since: float,
) -> tuple[dict[str, Any], float]:
    """Return the start of training after ``attempts`` earlier ones, and the log time of its first
    step.
    """
    _wait(run, lambda: len(run.attempts()) > attempts)
    attempt = run.attempts()[attempts]
    path = run.trial_root / "stats" / "stats.jsonl"

    # An earlier attempt may have logged the same step.
    since = max(since, attempt["time"])

    def done() -> list[dict[str, Any]]:
        if not path.exists():
            return []
        lines = read_stats(path)
        return [line for line in lines if line["step"] == attempt["step"] and line["time"] > since]

    _wait(run, lambda: bool(done()))
    return attempt, done()[0]["time"]


def _wait(run: GrpoRun, condition: Callable[[], bool]) -> None:
    run.wait_until(lambda: condition() or run.exit_code() is not None, TIMEOUT_S)
    if not condition():
        raise RuntimeError(
            f"the run ended with {run.exit_code()}; its log ends with:\n{run.log_tail()}"
        )


def _phases(
    attempt: dict[str, Any],
    first: float,
    killed: float,
    log: str,
) -> dict[str, float]:
    """Split the time into phases. ``start`` is the start of all processes with their imports."""
    # The supervisor reports the loss, and the workers log their own steps.
    loss = attempt["loss"]
    rendezvous_s = _logged(
        r"worker group 'trainer': started in \S+ s, rendezvous in ([\d.]+) s", log
    )
    build_s = _logged(r"initialized \S+ in ([\d.]+) s", log)
    phases = {
        "detect": loss["detected_at"] - killed,
        "tear down": loss["torn_down_s"],
        "start": loss["rebuilt_s"] - loss["torn_down_s"] - rendezvous_s - build_s,
        "rendezvous": rendezvous_s,
        "build the model": build_s,
        "load": _logged(r"resumed at step \d+ from \S+ in ([\d.]+) s", log),
        "publish": _logged(r"published weight version \d+ to \S+ in ([\d.]+) s", log),
    }
    phases["first step and the rest"] = first - killed - sum(phases.values())
    return {f"phase: {name}": value for name, value in phases.items()}


def _logged(pattern: str, log: str) -> float:
    found = re.search(pattern, log)
    if found is None:
        raise RuntimeError(
            f"the log of the run has no line like {pattern!r}; it ends with:\n{log[-2000:]}"
        )
    return float(found[1])
