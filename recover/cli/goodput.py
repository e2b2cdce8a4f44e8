"""``holdfast goodput``: show what the wall time of a run was spent on."""

import os
from pathlib import Path

import click

from ...utils.errors import CheckpointNotFoundError
from ...utils.files import open_regular
from ...utils.json_lines import read_lines
from ..storage.journal import JOURNAL_NAME
from ..storage.wall_time import (
    LABELS,
    LOST,
    RunningTime,
    WallTime,
)
from .output import (
    json_option,
    print_json,
    print_table,
    seconds_text,
)
from .runs import Run, run_argument, stats_file, stats_option

# Seconds of the whole run, of the start of a server, and of the delay of the log.
_OF_NO_STEP = (LOST, "server_start_s", "log_lag_s")


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
    os.close(open_regular(path))  # one that cannot be read would count as an empty one
    spent = RunningTime(place.trial_root).read()
    phases = phases_of(place.trial_root, stats)
    if as_json:
        seconds = {kind: round(took, 3) for kind, took in spent.seconds.items()}
        print_json(
            {
                "run": place.where,
                **spent.statistics(),
                "total_s": round(spent.total_s, 3),
                "seconds": seconds,
                "n_attempts": spent.n_attempts,
                "n_steps": spent.n_steps,
                "n_again": spent.n_again,
                "phases": phases,
            }
        )
        return

    print_table(("", "time>", "share>"), _rows(spent, phases), place.where)
    lost = seconds_text(spent.lost_s)
    click.echo(
        f"goodput {spent.goodput:.1%}: {spent.n_steps} steps count, {spent.n_again} were trained "
        f"again, attempts that loaded: {spent.n_attempts}; starts and kills cost {lost}"
    )


def _rows(spent: WallTime, phases: dict[str, float]) -> list[list[str]]:
    # Phases are parts of the steps, so they stand below them.
    parts: list[tuple[str, float]] = []
    for kind, label in LABELS.items():
        took = spent.seconds[kind]
        if took or kind == "steps":
            parts.append((label, took))
        if kind == "steps":
            parts += [(f"  {phase}", took) for phase, took in phases.items()]
    parts.append(("all", spent.total_s))

    rows: list[list[str]] = []
    for label, took in parts:
        share = took / max(spent.total_s, 1e-9)
        time = seconds_text(took)
        rows.append([label, time, f"{share:.1%}"])
    return rows


def is_phase(name: str) -> bool:
    """Whether a logged number is the seconds of a phase of a step."""
    return name.endswith("_s") and name.rpartition("/")[2] not in _OF_NO_STEP


def phases_of(root: Path, stats: Path | None) -> dict[str, float]:
    """Seconds of each phase, over the steps that are in the run's log. Empty without a log."""
    path = stats_file(root, stats)
    if path is None:
        return {}
    spent: dict[str, float] = {}
    for line in read_lines(path, "step"):
        for name, seconds in line.items():
            if not is_phase(name) or not isinstance(seconds, int | float):
                continue
            phase = name.removesuffix("_s")
            before = spent.get(phase, 0.0)
            spent[phase] = before + seconds
    return {phase: round(seconds, 3) for phase, seconds in spent.items()}
