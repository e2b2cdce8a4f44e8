"""``holdfast resume-from``: how to go back to a generation."""

from typing import Any

import click

from ...utils.errors import CheckpointCorruptError
from .in_use import use_of
from .mirror import recorded_mirror
from .output import NARROWEST, json_option, print_json
from .places import Run, find_generation, generation_argument, is_url

_THEN = (
    "Then, at that start, the newer ones are renamed to .rejected-global_step_... and kept for you, and their "
    "copies at the mirror are removed. Leave the setting in place: with it a restart goes on from what the run "
    "has written since, not from this generation again."
)
_END_IT = {
    True: "A job uses the run: end it, and ",
    False: "No job uses the run: ",
    None: "Whether a job uses the run cannot be known here: see to it that none does, and ",
}


@click.command("resume-from", short_help="How to go back to a generation.")
@generation_argument
@json_option
def resume_from_command(generation: str, as_json: bool) -> None:
    """Say what to do so that the run goes on from GEN rather than from its newest generation. Changes nothing.

    Every byte of GEN is compared with its digest first.
    """
    from .verify import find_damage

    folder = find_generation(generation)
    if problems := find_damage(folder, folder.manifest()["files"]):
        raise CheckpointCorruptError(f"{folder.where}: {problems[0]}; a start would refuse it")
    step = folder.info().last_step_info.global_step
    newer: list[int] = []
    mirror = first = None
    if is_url(folder.where):
        root = folder.where.rpartition("/")[0]
        setting = f"recover.resume_path=RUN/recover/{folder.name}"
        first = f"holdfast mirror pull {root} RUN --step {step}"
    else:
        assert folder.path is not None
        run = Run(str(folder.path.parent))
        newer = [other for other in run.steps() if other > step]
        mirror = recorded_mirror(run)
        setting = f"recover.resume_path={folder.path.absolute()}"
    found: dict[str, Any] = {"where": folder.where, "step": step, "next_step": step + 1, "newer": newer}
    in_use = False if first is not None else use_of(run.trial_root).known
    found |= {"mirror": mirror, "setting": setting, "first": first, "in_use": in_use}
    if as_json:
        print_json(found)
        return
    click.echo(f"{folder.where} is sound: a run that resumes from it goes on with step {step + 1}.")
    if first is None and not newer and mirror is None:
        click.echo("It is the newest: the same command as ever resumes from it, there is nothing to set.")
        return
    if first is not None:
        click.echo(f"It is at a URL. End the job, fetch it, with the run's folder for RUN,\n\n  {first}\n")
        click.echo("and start the same command with\n")
    else:
        if newer:
            click.echo(f"Newer ones are there: {', '.join(map(str, newer))}.")
        if mirror is not None:
            click.echo(f"The mirror {mirror} may have newer ones, which a start would fetch.")
        click.echo(f"{_END_IT[in_use]}start the same command with\n")
    click.echo(f"  {setting}\n")
    click.echo(click.wrap_text(_THEN, NARROWEST))
