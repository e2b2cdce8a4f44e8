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
from ..storage.generations import (
    Generation,
    GenerationStore,
    stored_bytes,
)
from .folders import open_mirror
from .in_use import lock_run, no_job_option, require_unused
from .output import (
    json_option,
    print_json,
    print_table,
    seconds_text,
    size_text,
)
from .runs import (
    Run,
    holds_run,
    is_url,
    local_path,
    names_mirror,
    recover_root,
    run_argument,
)

if TYPE_CHECKING:
    from ..storage.mirror import Mirror

Report = dict[str, Any]
"""Copied generations, as in the JSON document."""

_LONGEST_S = 7 * 86400.0

_to = click.option(
    "--url",
    help="URL of the copies.  [default: the mirror in the last start of the run]",
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
    here: set[int] = set()
    if url is None and names_mirror(run):
        there = open_mirror(run)
    else:
        place = Run(run)
        there = place.open_mirror(url)
        if place.store is not None:
            here.update(place.steps())

    states: dict[int, str] = dict.fromkeys(here, "no copy")
    states.update(there.states())

    # The newest first.
    copies: list[Report] = []
    cells: list[tuple[str, str, str]] = []
    for step in sorted(states, reverse=True):
        is_here = step in here
        copies.append({"step": step, "copy": states[step], "here": is_here})
        cells.append((str(step), states[step], "yes" if is_here else ""))
    if as_json:
        print_json({"url": there.url, "copies": copies})
    else:
        print_table(("step>", "copy", "here"), cells, there.url)


@mirror_command.command("push")
@run_argument
@_to
@click.option(
    "--step",
    "steps",
    type=int,
    multiple=True,
    help="Step to copy. Can be given several times.  [default: the newest]",
)
@click.option("--all", "everything", is_flag=True, help="Copy all generations.")
@no_job_option
@json_option
def mirror_push(
    run: str,
    url: str | None,
    steps: tuple[int, ...],
    everything: bool,
    no_job: bool,
    as_json: bool,
) -> None:
    """Copy generations of RUN to its mirror, or to another URL. Nothing is deleted there.

    Use a separate URL for each run. If the URL has a different generation of the same step, nothing
    is copied. A job copies to its own mirror by itself, so copying there is refused while a job
    uses the run or may use it.
    """
    place = Run(run)
    store = place.require_store()
    there = place.open_mirror(url)
    _refuse_run_folder(there)

    # The steps to copy: those that are named, all, or the newest.
    here = {generation.step: generation for generation in store.generations()}
    missing = sorted(set(steps) - here.keys())
    if missing:
        raise CheckpointNotFoundError(f"{store.root} has no generation of step {missing[0]}")
    wanted = sorted(here)
    if steps and not everything:
        wanted = list(steps)
    elif not everything:
        wanted = wanted[-1:]
    if not wanted:
        raise CheckpointNotFoundError(f"{store.root} has no generation yet")

    with ExitStack() as stack:
        # A job copies to its own mirror by itself.
        if there.url == place.recorded_mirror():
            require_unused(place.trial_root, no_job)
            stack.enter_context(lock_run(place.trial_root))
        # Check all before the first is copied.
        for step in wanted:
            _refuse_to_replace(there, here[step])
        done = [_push(there, here[step]) for step in wanted]
    _tell(done, "copied", there.url, as_json)


@mirror_command.command(
    "pull",
    short_help="Fetch a generation from a mirror into the folder of RUN.",
)
@click.argument("source", metavar="URL")
@click.argument("target", metavar="RUN", type=click.Path(file_okay=False))
@click.option("--step", type=int, help="Step to fetch.  [default: the newest sound one]")
@no_job_option
@json_option
def mirror_pull(
    source: str,
    target: str,
    step: int | None,
    no_job: bool,
    as_json: bool,
) -> None:
    """Fetch a generation from the mirror at URL into the folder of RUN, which is created if it is
    missing.

    Every byte is compared with its digest. The generation appears in RUN only when it is complete
    and sound. A generation of another run is refused, unless RUN never held one.
    """
    folder = local_path(target)
    require_outside_commits(folder)
    there = open_mirror(source)
    if step is None:
        steps = there.steps()
        if not steps:
            raise CheckpointNotFoundError(f"{there.url} has no complete copy")
        step = steps[0]
    if step not in there.traces():
        raise CheckpointNotFoundError(f"{there.url} has no complete copy of step {step}")

    # The job must not begin with fewer generations than it will find.
    started = time.monotonic()
    store = GenerationStore(_root_to_fill(folder))
    trial_root = store.root.parent
    require_unused(trial_root, no_job)
    with lock_run(trial_root):
        generation = there.fetch(step, store)
    n_bytes = stored_bytes(generation.path)
    done = _report(generation, n_bytes, time.monotonic() - started)
    _tell([done], "fetched", str(store.root), as_json)


def _root_to_fill(target: Path) -> Path:
    """Folder of generations of RUN, which may be missing. RUN may also name the folder of
    generations itself.
    """
    try:
        return recover_root(target)
    except CheckpointNotFoundError:
        if target.name == "recover":
            return target
        return target / "recover"


def _refuse_run_folder(there: "Mirror") -> None:
    """Refuse a target on this machine that is the folder of a run, or in a generation."""
    if is_url(there.url):
        return
    folder = local_path(there.url)
    require_outside_commits(folder)
    # A mirror has the form of a folder of generations, and would be taken for one.
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


def _push(there: "Mirror", generation: Generation) -> Report:
    started = time.monotonic()
    with _unless_gone(generation, there):
        n_bytes = stored_bytes(generation.path)
        there.submit(generation)
        there.wait(_LONGEST_S)
        if there.last_error is not None:
            raise MirrorError(f"no copy of {generation.path} at {there.url}: {there.last_error}")
        # The mirror leaves out a generation that is gone, without an error.
        is_gone = not generation.path.is_dir()
        if is_gone and generation.step not in there.steps():
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


def _report(generation: Generation, n_bytes: int, seconds: float) -> Report:
    return {
        "step": generation.step,
        "bytes": n_bytes,
        "seconds": round(seconds, 3),
    }


def _tell(
    done: list[Report],
    verb: str,
    where: str,
    as_json: bool,
) -> None:
    if as_json:
        print_json({verb: done, "where": where})
        return
    for one in done:
        size = size_text(one["bytes"])
        took = seconds_text(one["seconds"])
        click.echo(f"{verb} step {one['step']} to {where}: {size} in {took}")
