"""``holdfast rm``, ``pin``, ``unpin`` and ``resume-from``: choose which generations stay, and which
one resumes.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any

import click

from ...utils.errors import (
    CheckpointCorruptError,
    CheckpointError,
    ConfigError,
    FolderInUseError,
)
from ...utils.files import remove_folder
from ..storage.generations import LOCK_NAME, GenerationStore, stored_bytes
from .folders import Folder
from .in_use import (
    lock_run,
    no_job_option,
    require_unused,
    use_of,
)
from .output import NARROWEST, json_option, print_json, size_text
from .runs import (
    Run,
    find_generation,
    find_step,
    generation_argument,
)
from .verify import find_damage

DamageOf = Callable[[Path], str | None]
"""The first problem of a generation, or None."""

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
    generations: tuple[str, ...],
    force: bool,
    quick: bool,
    yes: bool,
    no_job: bool,
    as_json: bool,
) -> None:
    """Delete generations. Name each by its folder or as RUN@STEP. Copies at the mirror stay.

    A pinned generation is never deleted. The newest sound generation, which a restart resumes from,
    is deleted only with --force, and not while a job uses the run or may use it. Before anything is
    deleted, the generation that stays is compared with its digests, byte by byte (except with
    --quick).
    """
    found = [find_step(text) for text in generations]
    steps: dict[Path, list[int]] = {}
    for store, step in found:
        steps.setdefault(store.root, []).append(step)

    # Refuse all or none. Every byte is read once, also if it is checked again below.
    damage_of = _no_damage if quick else cache(_damage_of)
    for root, gone in steps.items():
        if force:
            require_unused(root.parent, no_job)
        _check(GenerationStore(root), gone, force, damage_of)

    removed = [str(store.path_of(step)) for store, step in found]
    n_bytes = sum(_bytes(store, step) for store, step in found)
    if not yes:
        question = f"Delete {', '.join(removed)} ({size_text(n_bytes)})?"
        click.confirm(question, abort=True, err=True)

    for store, step in found:
        trial_root = store.root.parent
        with ExitStack() as stack:
            # Whoever takes the lock writes its name there. A job that the lock does not keep out
            # would find another holder, and commit nothing more.
            is_unused = no_job or use_of(trial_root).known is False
            may_force = force and is_unused
            # Without the lock it is a copy of a run's folder.
            if is_unused and (trial_root / LOCK_NAME).exists():
                try:
                    stack.enter_context(lock_run(trial_root))
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
    exist only in this folder: a run that was restored from its mirror on a new machine has none.
    """
    _mark(generations, GenerationStore.pin, "pinned", as_json)


@click.command("unpin", short_help="Undo pin.")
@_generations
@json_option
def unpin_command(generations: tuple[str, ...], as_json: bool) -> None:
    """Unpin generations. Those that no retention rule keeps are deleted at the next commit."""
    _mark(generations, GenerationStore.unpin, "unpinned", as_json)


def _mark(
    generations: tuple[str, ...],
    mark: Callable[[GenerationStore, int], Any],
    done: str,
    as_json: bool,
) -> None:
    found = [find_step(text) for text in generations]
    for store, step in found:
        mark(store, step)
    # For the answer, after all of them were marked.
    paths = [str(store.path_of(step)) for store, step in found]
    if as_json:
        print_json({done: paths})
    else:
        click.echo(f"{done} {', '.join(paths)}")


def _check(
    store: GenerationStore,
    steps: list[int],
    force: bool,
    damage_of: DamageOf,
) -> None:
    """Raise `ConfigError` if a step is pinned, or, without ``force``, if the newest sound
    generation would go.
    """
    pinned = sorted(store.pins().intersection(steps))
    if pinned:
        raise ConfigError(f"step {pinned[0]} of {store.root} is pinned; `holdfast unpin` it first")
    if force:
        return

    # The newest comes first. Deleting a damaged generation loses nothing.
    damage: list[str] = []
    for generation in store.generations():
        problem = _problem(store, generation.path, damage_of)
        if problem is not None:
            damage.append(f"step {generation.step} is damaged: {problem}")
            continue
        if generation.step not in steps:
            return
        found = ""
        if damage:
            found = f" ({'; '.join(damage)})"
        raise ConfigError(
            f"step {generation.step} is the newest sound generation of {store.root}{found}, "
            "which a restart resumes from; --force deletes it unless a job uses the run"
        )


def _problem(store: GenerationStore, path: Path, damage_of: DamageOf) -> str | None:
    """What is wrong with a generation: names and sizes of its files first, then their bytes. One
    that the disk cannot read counts as damaged.
    """
    try:
        store.inspect(path)
        return damage_of(path)
    except (CheckpointError, OSError) as error:
        return str(error)


def _damage_of(path: Path) -> str | None:
    problems = _problems_of(Folder(path))
    return problems[0] if problems else None


def _no_damage(path: Path) -> None:
    """Take the bytes for sound."""


def _problems_of(folder: Folder) -> list[str]:
    manifest = folder.manifest()
    return find_damage(folder, manifest["files"])


def _bytes(store: GenerationStore, step: int) -> int:
    try:
        return stored_bytes(store.path_of(step))
    except (CheckpointError, OSError):
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
    problems = _problems_of(folder)
    if problems:
        raise CheckpointCorruptError(f"{folder.where}: {problems[0]}; a start would refuse it")
    found = _how_to_resume(folder)
    if as_json:
        print_json(found)
        return

    click.echo(
        f"{folder.where} is sound: a run that resumes from it goes on with step "
        f"{found['next_step']}."
    )
    first = found["first"]
    newer = found["newer"]
    mirror = found["mirror"]
    if first is None and not newer and mirror is None:
        click.echo(
            "It is the newest: the same command as ever resumes from it, there is nothing to set."
        )
        return

    # Steps before the start, and the reason for the setting.
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
        end_it = _END_IT[found["in_use"]]
        click.echo(f"{end_it}start the same command with\n")

    click.echo(f"  {quote(found['setting'])}\n")
    click.echo(click.wrap_text(_THEN, NARROWEST))


def _how_to_resume(folder: Folder) -> dict[str, Any]:
    """The setting for a start from a generation, and what that start would meet."""
    step = folder.info().last_step_info.global_step
    found: dict[str, Any] = {
        "where": folder.where,
        "step": step,
        "next_step": step + 1,
        "newer": [],
        "mirror": None,
        "setting": f"recover.resume_path=RUN/recover/{folder.name}",
        "first": None,
        "in_use": False,
    }

    # At a URL: the run is not here, and the generation is to be fetched first.
    if folder.path is None:
        mirror = folder.where.rpartition("/")[0]
        found["first"] = f"holdfast mirror pull {quote(mirror)} RUN --step {step}"
        return found

    # On this machine newer generations and a mirror decide what a start loads.
    run = Run(str(folder.path.parent))
    found["setting"] = f"recover.resume_path={folder.path.absolute()}"
    found["newer"] = [other for other in run.steps() if other > step]
    found["mirror"] = run.recorded_mirror()
    found["in_use"] = use_of(run.trial_root).known
    return found
