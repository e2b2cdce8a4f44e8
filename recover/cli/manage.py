"""``holdfast rm``, ``pin``, ``unpin`` and ``resume-from``: choose which generations stay, and which
one resumes.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import click

from ...utils.errors import CheckpointCorruptError, CheckpointError, ConfigError, FolderInUseError
from ...utils.files import remove_folder
from ..storage.generations import LOCK_NAME, GenerationStore, stored_bytes
from .folders import Folder
from .in_use import lock_run, no_job_option, require_unused, use_of
from .output import NARROWEST, json_option, print_json, size_text
from .runs import Run, find_generation, find_step, generation_argument
from .verify import find_damage

_THEN = (
    "Then, at that start, the newer ones are renamed to .rejected-global_step_... and kept for "
    "you, and their copies at the mirror are removed. Leave the setting in place: with it a "
    "restart goes on from what the run has written since, not from this generation again."
)
_END_IT = {
    True: "A job uses the run: end it, and ",
    False: "No job uses the run: ",
    None: "Whether a job uses the run cannot be known here: see to it that none does, and ",
}

_generations = click.argument("generations", metavar="GEN...", nargs=-1, required=True)


@click.command("rm", short_help="Delete generations.")
@_generations
@click.option(
    "--force",
    is_flag=True,
    help="Also delete the newest sound generation, which a restart would resume from.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Check the generations that stay by names and sizes only, without reading them.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@no_job_option
@json_option
def rm_command(
    generations: tuple[str, ...], force: bool, quick: bool, yes: bool, no_job: bool, as_json: bool
) -> None:
    """Delete generations. Name each by its folder or as RUN@STEP. Copies at the mirror stay.

    A pinned generation is never deleted. The newest sound generation, which a restart resumes from,
    is deleted only with --force, and not while a job uses the run or may use it. Before anything is
    deleted, the generation that stays is compared with its digests, byte by byte (except with
    --quick).
    """
    found = [find_step(text) for text in generations]
    steps = {
        root: [step for store, step in found if store.root == root]
        for root in {store.root for store, _ in found}
    }
    damage_of = (lambda path: None) if quick else cache(_damage_of)  # reads every byte once
    for root, gone in steps.items():
        if force:
            require_unused(root.parent, no_job)
        _check(GenerationStore(root), gone, force, damage_of)
    removed = [str(store.path_of(step)) for store, step in found]
    n_bytes = sum(_bytes(store, step) for store, step in found)
    if not yes:
        click.confirm(f"Delete {', '.join(removed)} ({size_text(n_bytes)})?", abort=True, err=True)
    for store, step in found:
        with ExitStack() as stack:
            may_force = force
            if (store.root.parent / LOCK_NAME).exists():  # else a copy of a run's folder
                try:
                    stack.enter_context(lock_run(store.root.parent))
                except FolderInUseError:
                    may_force = False
            # Check again: it may have been pinned, or become the newest, while the user was asked.
            _check(store, [step], may_force, damage_of)
            remove_folder(store.path_of(step))
    if as_json:
        print_json({"removed": removed, "bytes": n_bytes})
    else:
        click.echo(f"deleted {', '.join(removed)}: {size_text(n_bytes)}")


@click.command("pin", short_help="Keep generations for good.")
@_generations
@json_option
def pin_command(generations: tuple[str, ...], as_json: bool) -> None:
    """Keep generations regardless of the retention rules. Name each by its folder or as RUN@STEP.

    A running job respects the pin from its next commit on. Copies at the mirror stay as well. Pins
    exist only in this
    folder: a run that was restored from its mirror on a new machine has none.
    """
    _mark(generations, GenerationStore.pin, "pinned", as_json)


@click.command("unpin", short_help="Undo pin.")
@_generations
@json_option
def unpin_command(generations: tuple[str, ...], as_json: bool) -> None:
    """Unpin generations. Those that no retention rule keeps are deleted at the next commit."""
    _mark(generations, GenerationStore.unpin, "unpinned", as_json)


def _mark(generations: tuple[str, ...], mark: Any, done: str, as_json: bool) -> None:
    found = [find_step(text) for text in generations]
    for store, step in found:
        mark(store, step)
    paths = [str(store.path_of(step)) for store, step in found]
    if as_json:
        print_json({done: paths})
    else:
        click.echo(f"{done} {', '.join(paths)}")


def _check(
    store: GenerationStore, steps: list[int], force: bool, damage_of: Callable[[Path], str | None]
) -> None:
    """Raise `ConfigError` if a step is pinned, or, without ``force``, if the newest sound
    generation would go.
    """
    if pinned := sorted(store.pins().intersection(steps)):
        raise ConfigError(f"step {pinned[0]} of {store.root} is pinned; `holdfast unpin` it first")
    if force:
        return
    damage: list[str] = []
    for generation in store.generations():  # newest first
        try:
            store.inspect(generation.path)
        except CheckpointError as error:
            problem = str(error)
        else:
            problem = damage_of(generation.path)
        if problem is None and generation.step not in steps:
            return
        if problem is None:
            found = f" ({'; '.join(damage)})" if damage else ""
            raise ConfigError(
                f"step {generation.step} is the newest sound generation of {store.root}{found}, "
                "which a restart resumes from; --force deletes it unless a job uses the run"
            )
        damage.append(f"step {generation.step} is damaged: {problem}")


def _damage_of(path: Path) -> str | None:
    folder = Folder(path)
    return next(iter(find_damage(folder, folder.manifest()["files"])), None)


def _bytes(store: GenerationStore, step: int) -> int:
    try:
        return stored_bytes(store.path_of(step))
    except CheckpointError:
        return 0


@click.command("resume-from", short_help="Show how to go back to a generation.")
@generation_argument
@json_option
def resume_from_command(generation: str, as_json: bool) -> None:
    """Print what to set so that the run resumes from GEN instead of its newest generation. Nothing
    is changed.

    Every byte of GEN is compared with its digest first.
    """
    folder = find_generation(generation)
    if problems := find_damage(folder, folder.manifest()["files"]):
        raise CheckpointCorruptError(f"{folder.where}: {problems[0]}; a start would refuse it")
    step = folder.info().last_step_info.global_step
    newer, mirror, first, in_use = [], None, None, False
    if folder.path is None:
        setting = f"recover.resume_path=RUN/recover/{folder.name}"
        first = f"holdfast mirror pull {folder.where.rpartition('/')[0]} RUN --step {step}"
    else:
        setting, run = f"recover.resume_path={folder.path.absolute()}", Run(str(folder.path.parent))
        newer = [other for other in run.steps() if other > step]
        mirror, in_use = run.recorded_mirror(), use_of(run.trial_root).known
    if as_json:
        found = {
            "where": folder.where,
            "step": step,
            "next_step": step + 1,
            "newer": newer,
            "mirror": mirror,
        }
        print_json(found | {"setting": setting, "first": first, "in_use": in_use})
        return
    click.echo(f"{folder.where} is sound: a run that resumes from it goes on with step {step + 1}.")
    if first is None and not newer and mirror is None:
        click.echo(
            "It is the newest: the same command as ever resumes from it, there is nothing to set."
        )
        return
    if first is not None:
        click.echo(
            f"It is at a URL. End the job, fetch it, with the run's folder for RUN,\n\n  {first}\n"
        )
        click.echo("and start the same command with\n")
    else:
        if newer:
            click.echo(f"Newer ones are there: {', '.join(map(str, newer))}.")
        if mirror is not None:
            click.echo(f"The mirror {mirror} may have newer ones, which a start would fetch.")
        click.echo(f"{_END_IT[in_use]}start the same command with\n")
    click.echo(f"  {setting}\n")
    click.echo(click.wrap_text(_THEN, NARROWEST))
