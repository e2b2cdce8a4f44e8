"""``holdfast why``: show how each attempt of a run ended, and how much time that cost."""

import math
from typing import Any

import click

from .attempts import AttemptRecord, read_attempts
from .in_use import use_of
from .output import json_option, print_json, print_rich, print_table, seconds_text, time_text
from .runs import Run, run_argument

_WIDTH, _MOST_ROWS = 64, 24


@click.command("why", short_help="Show how each attempt of a run ended.")
@run_argument
@json_option
def why_command(run: str, as_json: bool) -> None:
    """Show how each attempt of RUN ended, how long recovery took, and how many steps were trained
    again.

    "back after" is the time from the last step of the previous attempt to the first step of this
    one. The column "load" is the part that the restore took. The command reads journal.jsonl in the
    folder of the run.
    """
    place = Run(run)
    attempts = read_attempts(place.trial_root)
    in_use = use_of(place.trial_root, attempts[-1] if attempts else None).known
    verdicts = [one.verdict(one is attempts[-1], in_use) for one in attempts]
    redone, gone_s = sum(one.redone for one in attempts), sum(one.gone_s or 0.0 for one in attempts)
    if as_json:
        rows = [
            vars(one) | {"verdict": verdict}
            for one, verdict in zip(attempts, verdicts, strict=True)
        ]
        print_json(
            {"run": place.where, "attempts": rows, "redone": redone, "gone_s": round(gone_s, 3)}
        )
        return
    columns = (
        "",
        "began",
        "ranks>",
        "from>",
        "to>",
        "redone>",
        "load>",
        "back after>",
        "what ended it",
    )
    print_table(
        columns,
        [_row(one, verdict) for one, verdict in zip(attempts, verdicts, strict=True)],
        place.where,
    )
    print_rich(_picture(attempts))
    steps = max((one.last + 1 for one in attempts if one.last is not None), default=0)
    click.echo(
        f"\n{len(attempts)} attempt{'s' * (len(attempts) != 1)}, {steps} steps; {redone} were "
        f"trained again, and {seconds_text(gone_s)} went by between attempts"
    )


def _row(one: AttemptRecord, verdict: str) -> list[str]:
    return [
        str(one.number),
        time_text(one.began),
        str(one.world_size or ""),
        "" if not one.loaded else "fresh" if one.resumed is None else str(one.resumed + 1),
        "" if one.last is None else str(one.last),
        str(one.redone or ""),
        seconds_text(one.load_s) if one.loaded else "",
        "" if one.gone_s is None else seconds_text(one.gone_s),
        verdict + (f"; workers were lost {one.losses} times" if one.losses > 1 else ""),
    ]


def _picture(attempts: list[AttemptRecord]) -> Any:
    """Draw one line per attempt, with the steps from left to right."""
    from rich.text import Text

    trained = [one for one in attempts if one.first is not None and one.last is not None]
    shown, picture = trained[-_MOST_ROWS:], Text()
    if not shown:
        return picture
    begin, end = min(one.first or 0 for one in shown), max(one.last or 0 for one in shown) + 1
    scale = (end - begin) / min(_WIDTH, end - begin)
    reached = -1
    for one in trained:
        first, last = one.first or 0, one.last or 0
        again, reached = min(reached + 1, last + 1), max(reached, last)
        if one not in shown:
            continue
        # Both kinds of steps get at least one character, also where a character stands for several
        # steps.
        left = int((first - begin) / scale)
        middle = max(int((again - begin) / scale), left + (again > first))
        right = max(math.ceil((last + 1 - begin) / scale), middle + (last >= again))
        picture.append(f"{one.number:>3} " + " " * left)
        picture.append("▒" * (middle - left), style="yellow")
        picture.append("█" * (right - middle) + "\n", style="green")
    picture.append(f"    {begin}".ljust(4 + min(_WIDTH, end - begin)) + f"{end - 1}\n")
    picture.append("    █ trained  ▒ trained again; steps from left to right, an attempt a line")
    return picture
