"""``holdfast goodput``: show what the wall time of a run was spent on.

Every second of the run, from the start of its first process to the last line of its journal, is
counted once. The terms are those of Google's ml-goodput-measurement: goodput is the time of steps
that count, all other time is badput.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import click

from ...utils.errors import CheckpointNotFoundError
from ...utils.json_lines import read_lines
from ..storage.journal import JOURNAL_NAME, read_journal
from .attempts import EVENTS, Event
from .output import json_option, print_json, print_table, seconds_text
from .runs import Run, run_argument, stats_file, stats_option

Kind = Literal["steps", "again", "blocked", "resources", "processes", "load", "ending", "down"]

_LABELS: dict[Kind, str] = {
    "steps": "steps that count",
    "again": "steps that were trained again",
    "blocked": "snapshots that blocked",
    "resources": "waiting for resources",
    "processes": "start of processes",
    "load": "load",
    "ending": "after the last step",
    "down": "down, or a step that was cut off",
}


def _no_time() -> dict[Kind, float]:
    return dict.fromkeys(_LABELS, 0.0)


@dataclass
class WallTime:
    """Wall time of a run in seconds, by what it was spent on. ``seconds`` adds up to `total_s`."""

    seconds: dict[Kind, float] = field(default_factory=_no_time)
    n_attempts: int = 0  # that have loaded
    n_steps: int = 0  # that count
    n_again: int = 0  # steps that an attempt trained and a later one had to train again

    @property
    def total_s(self) -> float:
        """Wall time of the run, without the time since the last line of its journal."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Share of the time that was spent on steps that count, 0 to 1."""
        return self.seconds["steps"] / max(self.total_s, 1e-9)

    @property
    def lost_s(self) -> float:
        """Time that starts and kills have cost: steps trained again, and until `load` returned."""
        kinds: tuple[Kind, ...] = ("again", "resources", "processes", "load", "down")
        return sum(self.seconds[kind] for kind in kinds)


def measure(events: Iterable[Event]) -> WallTime:
    """Add up the events of a journal, oldest first.

    Args:
        events: of the kinds `EVENTS`. Where lines are missing, their time goes to what the next
            line ends. If the clock was set back, the interval in which that happened is lost.
    """
    account = _Account()
    for event in events:
        account.add(event)
    return account.spent


class _Step(NamedTuple):
    step: int
    seconds: float


class _Account:
    """Adds up events. All time up to the cursor has been spent on something."""

    def __init__(self) -> None:
        self.spent = WallTime()
        self._cursor: float | None = None
        self._steps: list[_Step] = []  # that count so far
        self._asked_at: float | None = None  # when a supervisor began the next attempt
        self._began_at: float | None = None  # when the next attempt began
        self._training = False  # whether an attempt has loaded and has not ended

    def add(self, event: Event) -> None:
        time = event["time"]
        if self._cursor is not None and time < self._cursor:
            self._cursor = time  # the clock was set back
        match event["event"]:
            case "attempt":
                self._begin_attempt(time, bool(event.get("supervised")))
            case "start":
                self._start(event)
            case "step":
                self._spend_step(event["step"], time)
            case "save":
                self._spend("blocked", time)
            case "end" | "failed" | "returned" if self._training:
                self._spend("ending", time)
                self._training = False
            case "loss" | "failed" if not self._training:
                # The start of an attempt that did not get as far as its first step.
                if self._began_at is not None:
                    self._spend("down", self._began_at)
                self._spend("processes", time)
                self._asked_at = None
                self._began_at = None
            case "loss":
                self._spend("down", time)
                self._training = False

    def _begin_attempt(self, time: float, supervised: bool) -> None:
        # Time up to here is spent when `start` says when the process began.
        self._training = False
        if self._began_at is None:
            self._began_at = time
        if supervised:
            self._asked_at = time
        if self._cursor is None and supervised:
            self._cursor = time

    def _start(self, event: Event) -> None:
        """Spend the time since the previous attempt, and take back the steps that were lost."""
        time = event["time"]
        load_at = time - (event.get("load_s") or 0.0)
        process_at = event.get("process_started") or load_at
        begin = process_at
        if self._asked_at is not None:
            begin = self._asked_at
        if self._cursor is None:
            self._cursor = begin

        # In the order of their ends. What has begun before the cursor is counted from there.
        self._spend("down", begin)
        self._spend("resources", process_at)
        self._spend("processes", load_at)
        self._spend("load", time)
        self._asked_at = None
        self._began_at = None
        self._training = True
        self.spent.n_attempts += 1

        # All steps after the resumed one are lost.
        resumed = event.get("step")
        last = -1 if resumed is None else resumed
        while self._steps and self._steps[-1].step > last:
            seconds = self._steps.pop().seconds
            self.spent.seconds["steps"] -= seconds
            self.spent.seconds["again"] += seconds
            self.spent.n_steps -= 1
            self.spent.n_again += 1

    def _spend_step(self, step: int, time: float) -> None:
        seconds = self._spend("steps", time)
        self._steps.append(_Step(step, seconds))
        self.spent.n_steps += 1
        self._training = True

    def _spend(self, kind: Kind, until: float) -> float:
        """Spend the time from the cursor to a moment. Returns its seconds."""
        if self._cursor is None:
            self._cursor = until
        seconds = max(0.0, until - self._cursor)
        self._cursor += seconds
        self.spent.seconds[kind] += seconds
        return seconds


@click.command("goodput", short_help="Show what the wall time of a run was spent on.")
@run_argument
@stats_option
@json_option
def goodput_command(run: str, stats: Path | None, as_json: bool) -> None:
    """Show what the wall time of RUN was spent on, over all its attempts.

    Goodput is the share of steps that count. The parts add up to the time from the start of the
    first process to the last line of the run's journal.jsonl. Phases of steps are those that the
    run logs with names that end with _s.
    """
    place = Run(run)
    path = place.trial_root / JOURNAL_NAME
    if not path.exists():
        raise CheckpointNotFoundError(f"there is no {path}: the time of this run is not known")
    spent = measure(read_journal(place.trial_root, EVENTS))
    phases = phases_of(place.trial_root, stats)
    if as_json:
        print_json(
            {
                "run": place.where,
                "goodput": round(spent.goodput, 4),
                "lost_s": round(spent.lost_s, 3),
                "total_s": round(spent.total_s, 3),
                "seconds": {kind: round(took, 3) for kind, took in spent.seconds.items()},
                "n_attempts": spent.n_attempts,
                "n_steps": spent.n_steps,
                "n_again": spent.n_again,
                "phases": phases,
            }
        )
        return

    # Phases are parts of the steps, so they stand below them.
    rows: list[list[str]] = []
    for kind, label in _LABELS.items():
        if spent.seconds[kind] or kind == "steps":
            rows.append(_row(label, spent.seconds[kind], spent.total_s))
        if kind != "steps":
            continue
        for phase, took in phases.items():
            rows.append(_row(f"  {phase}", took, spent.total_s))
    rows.append(_row("all", spent.total_s, spent.total_s))
    print_table(("", "time>", "share>"), rows, place.where)
    lost = seconds_text(spent.lost_s)
    click.echo(
        f"goodput {spent.goodput:.1%}: {spent.n_steps} steps count, {spent.n_again} were trained "
        f"again, attempts that loaded: {spent.n_attempts}; starts and kills cost {lost}"
    )


def _row(label: str, seconds: float, total_s: float) -> list[str]:
    share = seconds / max(total_s, 1e-9)
    return [label, seconds_text(seconds), f"{share:.1%}"]


def phases_of(root: Path, stats: Path | None) -> dict[str, float]:
    """Seconds of each phase, over the steps that are in the run's log. Empty without a log."""
    path = stats_file(root, stats)
    if path is None:
        return {}
    spent: dict[str, float] = {}
    for line in read_lines(path, "step"):
        for name, seconds in line.items():
            if name.endswith("_s") and isinstance(seconds, int | float):
                phase = name.removesuffix("_s")
                spent[phase] = spent.get(phase, 0.0) + seconds
    return {phase: round(seconds, 3) for phase, seconds in spent.items()}
