"""``holdfast mirror``: list, make and fetch copies of generations at a URL."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...utils.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigError,
    MirrorError,
)
from ...utils.manifest import require_outside_commits
from ..storage.generations import Generation, GenerationStore, stored_bytes
from .folders import open_mirror
from .in_use import lock_run, no_job_option, require_unused
from .output import json_option, print_json, print_table, seconds_text, size_text
from .runs import Run, holds_run, is_url, local_path, recover_root, run_argument

if TYPE_CHECKING:
    from ..storage.mirror import Mirror

_LONGEST_S = 7 * 86400.0

_to = click.option(
    "--url", help="URL of the copies.  [default: the mirror in the last start of the run]"
)


@click.group("mirror", short_help="List, make and fetch copies of generations at a URL.")
def mirror_command() -> None:
    """List, make and fetch copies of generations at an fsspec URL, for the case that the folder of
    a run is lost.

    A run with recover.mirror_url makes its copies by itself, and fetches them when it starts. These
    commands do the same by hand.
    """


@mirror_command.command("ls")
@run_argument
@_to
@json_option
def mirror_ls(run: str, url: str | None, as_json: bool) -> None:
    """List the copies of RUN at its mirror. RUN may also be the URL of the mirror."""
    place = Run(run)
    there = place.open_mirror(url)
    here = set(place.steps()) if place.store is not None else set()
    sound, damaged = there.steps(), there.steps(damaged=True)
    states = {step: "complete" if step in sound else "damaged" if step in damaged else "incomplete"
              for step in sorted({*there.traces(), *here}, reverse=True)}  # fmt: skip
    states |= dict.fromkeys(here - set(there.traces()), "no copy")
    rows = [{"step": step, "copy": state, "here": step in here} for step, state in states.items()]
    if as_json:
        print_json({"url": there.url, "copies": rows})
    else:
        cells = [(str(row["step"]), row["copy"], "yes" if row["here"] else "") for row in rows]
        print_table(("step>", "copy", "here"), cells, there.url)


@mirror_command.command("push")
@run_argument
@_to
@click.option("--step", "steps", type=int, multiple=True, help="Step to copy. Can be given several times.  [default: "
              "the newest]")  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="Copy all generations.")
@no_job_option
@json_option
def mirror_push(
    run: str, url: str | None, steps: tuple[int, ...], everything: bool, no_job: bool, as_json: bool
) -> None:
    """Copy generations of RUN to its mirror, or to another URL. Nothing is deleted there.

    Use a separate URL for each run. If the URL has a different generation of the same step, nothing
    is copied. A job copies to its own mirror by itself, so copying there is refused while a job
    uses the run or may use it.
    """
    place = Run(run)
    store, there = place.require_store(), place.open_mirror(url)
    _refuse_run_folder(there)
    here = {generation.step: generation for generation in store.generations()}
    if missing := sorted(set(steps) - here.keys()):
        raise CheckpointNotFoundError(f"{store.root} has no generation of step {missing[0]}")
    wanted = sorted(here) if everything else list(steps) or sorted(here)[-1:]
    if not wanted:
        raise CheckpointNotFoundError(f"{store.root} has no generation yet")
    with ExitStack() as stack:
        if there.url == place.recorded_mirror():
            require_unused(place.trial_root, no_job)
            stack.enter_context(lock_run(place.trial_root))
        for step in wanted:  # check all before the first is copied
            _refuse_to_replace(there, here[step])
        done = [_push(there, here[step]) for step in wanted]
    _tell(done, "copied", there.url, as_json)


@mirror_command.command(
    "pull", short_help="Fetch a generation from a mirror into the folder of RUN."
)
@click.argument("source", metavar="URL")
@click.argument("target", metavar="RUN", type=click.Path(file_okay=False))
@click.option("--step", type=int, help="Step to fetch.  [default: the newest sound one]")
@no_job_option
@json_option
def mirror_pull(source: str, target: str, step: int | None, no_job: bool, as_json: bool) -> None:
    """Fetch a generation from the mirror at URL into the folder of RUN, which is created if it is
    missing.

    Every byte is compared with its digest. The generation appears in RUN only when it is complete
    and sound. A generation of another run is refused, unless RUN never held one.
    """
    require_outside_commits(local_path(target))
    there = open_mirror(source)
    if step is None:
        step = next(iter(there.steps()), None)
    if step is None or step not in there.traces():
        raise CheckpointNotFoundError(
            f"{there.url} has no complete copy{'' if step is None else f' of step {step}'}"
        )
    started, store = time.monotonic(), GenerationStore(_root_to_fill(local_path(target)))
    require_unused(store.root.parent, no_job)
    with lock_run(store.root.parent):
        generation = there.fetch(step, store)
    done = _report(generation, stored_bytes(generation.path), time.monotonic() - started)
    _tell([done], "fetched", str(store.root), as_json)


def _root_to_fill(target: Path) -> Path:
    """Folder of generations of RUN, which may be missing. RUN may also name the folder of
    generations itself.
    """
    try:
        return recover_root(target)
    except CheckpointNotFoundError:
        return target if target.name == "recover" else target / "recover"


def _refuse_run_folder(there: "Mirror") -> None:
    if is_url(there.url):
        return
    folder = local_path(there.url)
    require_outside_commits(folder)
    if holds_run(folder):
        raise ConfigError(
            f"{there.url} is where the run in {folder.parent} keeps its own generations: a copy "
            "there would become one of them. Choose another --url; `holdfast mirror pull` brings "
            "a copy into the folder of a run"
        )


def _refuse_to_replace(there: "Mirror", generation: Generation) -> None:
    with _unless_gone(generation, there):
        other = there.has_other(generation)
    if other:
        raise ConfigError(
            f"{there.url} has a copy of step {generation.step} that is of another generation than "
            f"{generation.path}: of another run, or from before this one went back. Nothing was "
            "copied; choose another --url, as s3://bucket/backup/experiment/trial, or delete that "
            "copy yourself"
        )


def _push(there: "Mirror", generation: Generation) -> dict[str, Any]:
    started = time.monotonic()
    with _unless_gone(generation, there):
        n_bytes = stored_bytes(generation.path)
        there.submit(generation)
        there.wait(_LONGEST_S)
        if there.last_error is not None:
            raise MirrorError(f"no copy of {generation.path} at {there.url}: {there.last_error}")
        if not generation.path.is_dir() and generation.step not in there.steps():
            raise FileNotFoundError(generation.path)
    return _report(generation, n_bytes, time.monotonic() - started)


@contextmanager
def _unless_gone(generation: Generation, there: "Mirror") -> Iterator[None]:
    """Raise `CheckpointNotFoundError` if the block fails because the run has removed the
    generation.
    """
    try:
        yield
    except (FileNotFoundError, CheckpointCorruptError):
        if generation.path.is_dir():
            raise
        raise CheckpointNotFoundError(
            f"no copy of {generation.path} at {there.url}: the run removed it meanwhile; "
            "`holdfast pin` keeps one for as long as it takes"
        ) from None


def _report(generation: Generation, n_bytes: int, seconds: float) -> dict[str, Any]:
    return {"step": generation.step, "bytes": n_bytes, "seconds": round(seconds, 3)}


def _tell(done: list[dict[str, Any]], verb: str, where: str, as_json: bool) -> None:
    if as_json:
        print_json({verb: done, "where": where})
        return
    for one in done:
        click.echo(
            f"{verb} step {one['step']} to {where}: {size_text(one['bytes'])} in "
            f"{seconds_text(one['seconds'])}"
        )
