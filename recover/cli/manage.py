"""``holdfast rm``, ``pin`` and ``unpin``: which generations of a run stay."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import click

from ...utils.errors import CheckpointError, ConfigError, FolderInUseError
from ...utils.files import remove_folder
from ...utils.folder_lock import FolderLock
from ...utils.manifest import read_manifest
from ..storage.generations import GenerationStore
from .folders import LocalFolder
from .in_use import no_job_option, require_unused
from .output import json_option, print_json, size_text
from .places import LOCK_NAME, find_step

_generations = click.argument("generations", metavar="GEN...", nargs=-1, required=True)


@click.command("rm", short_help="Delete generations.")
@_generations
@click.option("--force", is_flag=True, help="Also the newest sound one, which a restart would resume from.")
@click.option("--quick", is_flag=True, help="Judge what stays by names and sizes, and read none of it.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@no_job_option
@json_option
def rm_command(generations: tuple[str, ...], force: bool, quick: bool, yes: bool, no_job: bool, as_json: bool) -> None:
    """Delete generations, each named by its folder or as RUN@STEP.

    Pinned ones are refused, and without --force those that leave no newer sound one, which a restart resumes from:
    before anything is deleted the one that stays is compared with its digests, every byte. While a job uses the run, or
    may, the newest is refused with --force too. Each vanishes at once, before its files are deleted; a copy at the
    mirror stays.
    """
    found = [find_step(text) for text in generations]
    steps = {root: [step for store, step in found if store.root == root] for root in {store.root for store, _ in found}}
    judge = _Judge(quick)
    for root, gone in steps.items():
        if force:
            require_unused(root.parent, no_job)
        _check(GenerationStore(root), gone, force, judge)
    sizes = [_bytes(store, step) for store, step in found]
    if not yes:
        names = ", ".join(str(store.path_of(step)) for store, step in found)
        click.confirm(f"Delete {names} ({size_text(sum(sizes))})?", abort=True, err=True)
    for store, step in found:
        with _locked(store.root.parent) as free:
            # Again: it may have been pinned, or become the newest, while the question was open.
            _check(store, [step], force and free, judge)
            remove_folder(store.path_of(step))
    removed = [str(store.path_of(step)) for store, step in found]
    if as_json:
        print_json({"removed": removed, "bytes": sum(sizes)})
    else:
        click.echo(f"deleted {', '.join(removed)}: {size_text(sum(sizes))}")


@click.command("pin", short_help="Have generations stay for good.")
@_generations
@json_option
def pin_command(generations: tuple[str, ...], as_json: bool) -> None:
    """Keep generations whatever the rules of retention say, each named by its folder or as RUN@STEP.

    A run that goes on honours it from its next commit on. Copies at the mirror stay too, as long as the run copies
    from this folder: pins are in it alone, so a run that came back from its mirror on a new machine has none.
    """
    _mark(generations, GenerationStore.pin, "pinned", as_json)


@click.command("unpin", short_help="Leave generations to the rules again.")
@_generations
@json_option
def unpin_command(generations: tuple[str, ...], as_json: bool) -> None:
    """Leave pinned generations to the rules of retention again; one that no rule wants goes with the next commit."""
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


class _Judge:
    """What is wrong with generations, in words: by names and sizes of their files and, unless ``quick``, every byte.

    Bytes are read once.
    """

    def __init__(self, quick: bool) -> None:
        self._damage_of = (lambda path: None) if quick else cache(_damage_of)

    def __call__(self, store: GenerationStore, path: Path) -> str | None:
        """None: it is sound."""
        try:
            store.inspect(path)
        except CheckpointError as error:
            return str(error)
        return self._damage_of(path)


def _check(store: GenerationStore, steps: list[int], force: bool, judge: _Judge) -> None:
    """Refuse what must stay.

    Args:
        store: of the run.
        steps: what would go.
        force: all but what is pinned may go.
        judge: of generations.

    Raises:
        ConfigError: a step is pinned, or a sound one would go that is newer than all sound ones that stay.
    """
    if pinned := sorted(store.pins().intersection(steps)):
        raise ConfigError(f"step {pinned[0]} of {store.root} is pinned; `holdfast unpin` it first")
    if force:
        return
    damage: list[str] = []
    for generation in store.generations():  # newest first
        problem = judge(store, generation.path)
        if problem is None and generation.step not in steps:
            return
        if problem is None:
            found = f" ({'; '.join(damage)})" if damage else ""
            raise ConfigError(
                f"step {generation.step} is the newest sound generation of {store.root}{found}, which a restart "
                "resumes from; --force deletes it unless a job uses the run"
            )
        damage.append(f"step {generation.step} is damaged: {problem}")


def _damage_of(path: Path) -> str | None:
    from .verify import find_damage

    folder = LocalFolder(path)
    return next(iter(find_damage(folder, folder.manifest()["files"])), None)


def _bytes(store: GenerationStore, step: int) -> int:
    try:
        return sum(entry["bytes"] for entry in read_manifest(store.path_of(step))["files"].values())
    except CheckpointError:
        return 0


@contextmanager
def _locked(trial_root: Path) -> Iterator[bool]:
    """Hold the lock of a run, if no job does; whether it is held here."""
    lock = FolderLock(trial_root / LOCK_NAME)
    if not lock.path.exists():  # no run's folder, but a copy of one
        yield True
        return
    try:
        lock.acquire(0.0)
    except FolderInUseError:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
