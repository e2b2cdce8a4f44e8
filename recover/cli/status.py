"""``holdfast status``: tell a job script whether a run is finished, to be continued, or failed."""

import sys
from typing import Any, Literal, NamedTuple

import click

from ...utils.errors import CheckpointNotFoundError, Preempted
from .attempts import AttemptRecord, read_attempts
from .in_use import use_of
from .output import json_option, print_json, time_text
from .runs import Run, run_argument

NO_RUN = 66
"""EX_NOINPUT of sysexits(3): there is no such run, or nothing is known of its attempts."""

State = Literal["finished", "to be continued", "failed"]
_CODES: dict[State, int] = {"finished": 0, "to be continued": Preempted.EXIT_CODE, "failed": 1}
_ADVICE: dict[State, str] = {
    "finished": "nothing is left to do",
    "to be continued": "start the same command again",
    "failed": "look at the log, and start the same command again when the cause is gone",
}


class Judgement(NamedTuple):
    """State of a run, and the reason."""

    state: State
    why: str


@click.command("status", short_help="Tell whether a run is finished, by the exit code.")
@run_argument
@json_option
def status_command(run: str, as_json: bool) -> None:
    """Tell whether RUN is finished (exit code 0), to be continued (75) or failed (1).

    For job scripts, because torchrun ends with 1 in all cases but the first. The command reads
    journal.jsonl in the folder of the run. With no such run the exit code is 66, and with wrong
    arguments 2.

    A run is finished when its handler was closed, and under a supervisor its job returned, without
    an error and without a request to stop.
    """
    try:
        place = Run(run)
        attempts = read_attempts(place.trial_root)
        if not attempts:
            raise CheckpointNotFoundError(f"{place.where}: no attempt has begun")
    except CheckpointNotFoundError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(NO_RUN)

    # What the last attempt did, and what the run can go on from.
    last = attempts[-1]
    in_use = use_of(place.trial_root, last).known
    state, why = judge(last, in_use)
    code = _CODES[state]
    trained = [one.last for one in attempts if one.last is not None]
    newest = max(place.steps(), default=None)
    facts: dict[str, Any] = {
        "run": place.where,
        "state": state,
        "exit_code": code,
        "why": why,
        "last_step": max(trained, default=None),
        "newest_generation": newest,
        "ended": last.ended,
    }
    if as_json:
        print_json(facts)
        sys.exit(code)

    ended = "" if last.ended is None else f" ({time_text(last.ended)})"
    click.echo(f"{state}: {why}{ended}")
    at = "no generation yet" if newest is None else f"newest generation: step {newest}"
    click.echo(f"{at}; {_ADVICE[state]} (exit code {code})")
    sys.exit(code)


def judge(last: AttemptRecord, in_use: bool | None) -> Judgement:
    """Judge a run by its last attempt. ``in_use`` is `Use.known` of the run."""
    why = last.verdict(is_last=True, in_use=in_use)
    if in_use:
        return Judgement("to be continued", f"a job uses it now, whose last attempt {why}")
    if last.returned:
        return Judgement("finished", "the job returned")
    if last.ended is None:
        return Judgement("to be continued", why)

    # An error counts more than a request to stop, after which the last snapshot may have failed.
    error = last.given_up or last.error
    if error is not None:
        return Judgement("failed", error)
    if last.stop is not None:
        return Judgement("to be continued", why)
    if last.supervised:
        return Judgement("to be continued", f"{why}, but the driver ended before its job returned")

    # Without a handler that was closed, only a run that has trained all its steps is finished.
    if last.closed:
        return Judgement("finished", why)
    if last.last is not None and last.last + 1 == last.total_steps:
        return Judgement("finished", f"{why}, after its last step {last.last}")
    return Judgement("failed", why)
