"""``holdfast why``: show how each attempt of a run ended, and how much time that cost."""

import math
from typing import Any, NamedTuple

import click

from .attempts import AttemptRecord, read_attempts
from .in_use import use_of
from .output import (
    json_option,
    print_json,
    print_rich,
    print_table,
    seconds_text,
    time_text,
)
from .runs import Run, run_argument
from .top import FAILED, server_facts

_WIDTH = 64
"""Characters of a picture for all steps."""
_MOST_ROWS = 24
_COLUMNS = (
    "",
    "began",
    "ranks>",
    "from>",
    "to>",
    "redone>",
    "load>",
    "recorded>",
    "back after>",
    "what ended it",
)


@click.command("why", short_help="Show how each attempt of a run ended.")
@run_argument
@json_option
def why_command(run: str, as_json: bool) -> None:
    """Show how each attempt of RUN ended, how long recovery took, and how many steps were trained
    again.

    "back after" is the time from the last step of the previous attempt to the first step of this
    one. The column "load" is the part that the restore took. "recorded" is the number of records of
    unfinished episodes that it has read. The command reads journal.jsonl in the
    folder of the run. Of an inference server that was given up, it prints the end of the log.
    """
    place = Run(run)
    attempts = read_attempts(place.trial_root)
    last = attempts[-1] if attempts else None
    in_use = use_of(place.trial_root, last).known
    verdicts = [one.verdict(one is last, in_use) for one in attempts]

    # Servers that were given up.
    failed = [one for one in server_facts(place.trial_root) if one["state"] == FAILED]

    # Sums over all attempts.
    redone = sum(one.redone for one in attempts)
    gone_s = sum(one.gone_s or 0.0 for one in attempts)
    judged = list(zip(attempts, verdicts, strict=True))
    if as_json:
        print_json(
            {
                "run": place.where,
                "attempts": [{**vars(one), "verdict": verdict} for one, verdict in judged],
                "redone": redone,
                "gone_s": round(gone_s, 3),
                "failed_servers": failed,
            }
        )
        return

    # A table, a picture, and a line in words.
    rows = [_row(one, verdict) for one, verdict in judged]
    print_table(_COLUMNS, rows, place.where)
    print_rich(_picture(attempts))
    ends = [one.last + 1 for one in attempts if one.last is not None]
    plural = "" if len(attempts) == 1 else "s"
    click.echo(
        f"\n{len(attempts)} attempt{plural}, {max(ends, default=0)} steps; {redone} were "
        f"trained again, and {seconds_text(gone_s)} went by between attempts"
    )
    for server in failed:
        click.echo(f"\n{server['name']} on {server['host']} has failed: {server['error']}")
        if server["log_end"] is not None:
            click.echo(f"{server['log']} ends with\n{server['log_end']}")


def _row(one: AttemptRecord, verdict: str) -> list[str]:
    begin = ""
    load = ""
    if one.loaded:
        begin = "fresh" if one.resumed is None else str(one.resumed + 1)
        load = seconds_text(one.load_s)
    end = ""
    if one.last is not None:
        end = str(one.last)
    gone = ""
    if one.gone_s is not None:
        gone = seconds_text(one.gone_s)
    if one.losses > 1:
        verdict += f"; workers were lost {one.losses} times"

    # Zeros are left out.
    return [
        str(one.number),
        time_text(one.began),
        str(one.world_size or ""),
        begin,
        end,
        str(one.redone or ""),
        load,
        str(one.recorded or ""),
        gone,
        verdict,
    ]


class _Bar(NamedTuple):
    """The steps of an attempt: ``[first, new)`` had been trained before, ``[new, end)`` had not."""

    number: int
    first: int
    new: int
    end: int


def _picture(attempts: list[AttemptRecord]) -> Any:
    """Draw one line per attempt, with the steps from left to right."""
    from rich.text import Text

    picture = Text()
    bars = [
        _Bar(one.number, one.first, one.first + one.redone, one.last + 1)
        for one in attempts
        if one.first is not None and one.last is not None
    ]
    if not bars:
        return picture

    bars = bars[-_MOST_ROWS:]
    begin = min(bar.first for bar in bars)
    end = max(bar.end for bar in bars)
    width = min(_WIDTH, end - begin)
    scale = (end - begin) / width  # steps of a character
    for bar in bars:
        # Both kinds of steps get at least one character, also where a character stands for several
        # steps.
        left = int((bar.first - begin) / scale)
        middle = int((bar.new - begin) / scale)
        middle = max(middle, left + (bar.new > bar.first))
        right = math.ceil((bar.end - begin) / scale)
        right = max(right, middle + (bar.end > bar.new))

        picture.append(f"{bar.number:>3} " + " " * left)
        picture.append("▒" * (middle - left), style="yellow")
        picture.append("█" * (right - middle) + "\n", style="green")

    # The first and the last step below the ends of the bars.
    ruler = f"    {begin}".ljust(4 + width)
    picture.append(f"{ruler}{end - 1}\n")
    picture.append("    █ trained  ▒ trained again; steps from left to right, an attempt a line")
    return picture
