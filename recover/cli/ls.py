"""``holdfast ls``: list the generations of a run."""

import contextlib
from typing import Any

import click

from ...utils.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    MirrorError,
)
from ..storage.generations import (
    GenerationStore,
    RetentionRules,
    reasons_to_keep,
)
from ..storage.journal import last_start
from .episodes import log_line, newest_logs
from .folders import Folder
from .output import (
    json_option,
    print_json,
    print_table,
    size_text,
    time_text,
)
from .runs import Run, run_argument

Entry = dict[str, Any]
"""Facts about one generation, as in the JSON document."""

_COLUMNS = (
    "step>",
    "epoch, step>",
    "written",
    "size>",
    "ranks>",
    "metrics",
    "kept",
    "mirror",
    "problem",
)
_MOST_METRICS = 2


@click.command("ls", short_help="List the generations of a run.")
@run_argument
@click.option(
    "--mirror",
    metavar="URL",
    help="Show which generations have a copy at URL. 'recorded' stands for the mirror of the run.",
)
@json_option
def ls_command(run: str, mirror: str | None, as_json: bool) -> None:
    """List the generations of RUN, newest first.

    Names and sizes of the files are compared with the manifests. To compare every byte, use
    `holdfast verify`.

    The column "kept" names the retention rules that keep a generation, as configured at the last
    start of the run. A generation kept "by no rule" is deleted at the next commit.
    """
    # A generation that the run deletes meanwhile is left out.
    place = Run(run)
    entries: list[Entry] = []
    for step in place.steps():
        entry = _describe(place, step)
        if entry is not None:
            entries.append(entry)
    if place.store is not None:
        _explain_retention(place.store, entries)
    if mirror is not None:
        _add_copies(place, mirror, entries)
    others = _others(place)
    logs = [] if place.store is None else newest_logs(place.store)
    if as_json:
        described = [vars(log) for log in logs]
        print_json({"run": place.where, "generations": entries, "logs": described, **others})
        return

    if entries:
        rows = [_row(entry) for entry in entries]
        print_table(_COLUMNS, rows, place.where)
    else:
        click.echo(f"{place.where} has no generation yet")

    # Log entries after the newest generation.
    for log in logs:
        click.echo(log_line(log))

    # Folders from which no run can resume.
    for step in others["damaged_steps"]:
        click.echo(f"step {step}: its copy was found damaged")
    for staged in others["being_written"]:
        size = size_text(staged["bytes"])
        click.echo(
            f"step {staged['step']} is being written, or was when its writer was killed: "
            f"{size} so far"
        )
    for name in others["rejected"]:
        click.echo(f"refused at a start: {name}")


def _describe(place: Run, step: int) -> Entry | None:
    """Describe a generation. Return None if the run has deleted it meanwhile."""
    try:
        folder = place.folder(step)
    except CheckpointNotFoundError:
        return None
    entry: Entry = {"step": step, "where": folder.where, "problem": None}
    try:
        _read_facts(folder, entry)
    except MirrorError:
        raise
    except (CheckpointError, OSError) as error:
        if folder.path is not None and not folder.path.is_dir():
            return None
        entry["problem"] = str(error)
    return entry


def _read_facts(folder: Folder, entry: Entry) -> None:
    """Add the facts one by one, so that those before a damaged part are shown."""
    if folder.path is not None:
        manifest_file = folder.path / "manifest.json"
        entry["written"] = manifest_file.stat().st_mtime
    manifest = folder.read_manifest()
    files = manifest["files"].values()
    entry["bytes"] = sum(file["bytes"] for file in files)
    entry["world_size"] = manifest.get("world_size")
    entry["run_id"] = manifest.get("run_id")

    # Compares names and sizes of the files.
    folder.manifest()

    info = folder.info()
    last = info.last_step_info
    entry["epoch"] = last.epoch
    entry["epoch_step"] = last.epoch_step
    entry["steps_per_epoch"] = last.steps_per_epoch
    entry["metrics"] = info.metrics


def _explain_retention(store: GenerationStore, entries: list[Entry]) -> None:
    start = last_start(store.root.parent)
    pins = store.pins()

    # The rules are those of the last start. Damaged generations do not count.
    sound: dict[int, Any] = {}
    for entry in entries:
        if entry["problem"] is None:
            sound[entry["step"]] = entry["metrics"]
    reasons: dict[int, list[str]] = {}
    if start is not None:
        # Another version may have written the journal.
        with contextlib.suppress(TypeError, KeyError, ValueError):
            rules = RetentionRules(**start[1]["keep"])
            reasons = reasons_to_keep(sound, rules)

    for entry in entries:
        step = entry["step"]
        is_pinned = step in pins
        entry["pinned"] = is_pinned
        entry["kept"] = ["pinned"] * is_pinned + reasons.get(step, [])
        entry["rules_known"] = start is not None


def _add_copies(place: Run, mirror: str, entries: list[Entry]) -> None:
    """Add the state of each generation's copy at a mirror."""
    url = None if mirror == "recorded" else mirror
    there = place.open_mirror(url)
    copies = dict.fromkeys(there.steps(damaged=True), "damaged")
    copies |= dict.fromkeys(there.steps(), "copied")
    for entry in entries:
        entry["mirror"] = copies.get(entry["step"], "no copy")


def _others(place: Run) -> dict[str, Any]:
    """Damaged copies, unfinished generations and rejected ones."""
    store = place.store
    if store is None:
        return {"damaged_steps": place.damaged(), "being_written": [], "rejected": []}

    # A staging folder is called .staging-<step>-<unique>.
    numbers: set[str] = set()
    for path in store.root.glob(".staging-*-*"):
        numbers.add(path.name.split("-")[1])
    steps = sorted(int(number) for number in numbers if number.isdigit())
    staged = [{"step": step, "bytes": store.staged_bytes(step)} for step in steps]
    rejected = [path.name for path in store.quarantined()]
    return {"damaged_steps": [], "being_written": staged, "rejected": rejected}


def _row(entry: Entry) -> list[str]:
    place = ""
    if "epoch" in entry:
        place = f"{entry['epoch']}, {entry['epoch_step']}/{entry['steps_per_epoch']}"
    written = ""
    if "written" in entry:
        written = time_text(entry["written"])
    size = ""
    if "bytes" in entry:
        size = size_text(entry["bytes"])

    # The problem without the path, or the reason why it stays.
    kept = ", ".join(entry.get("kept", []))
    problem = entry["problem"]
    if problem is None:
        problem = ""
        if not kept and entry.get("rules_known"):
            kept = "by no rule"
    else:
        problem = problem.replace(entry["where"], "").lstrip(": /")

    return [
        str(entry["step"]),
        place,
        written,
        size,
        str(entry.get("world_size") or ""),
        _metrics_text(entry.get("metrics", {})),
        kept,
        entry.get("mirror", ""),
        problem,
    ]


def _metrics_text(metrics: dict[str, float]) -> str:
    """The first metrics: reward and loss, then the others in their order."""
    known = [name for name in metrics if name in ("reward", "loss")]
    others = [name for name in metrics if name not in known]
    names = known + others
    shown = [f"{name} {metrics[name]:.4g}" for name in names[:_MOST_METRICS]]
    text = ", ".join(shown)
    more = len(names) - _MOST_METRICS
    if more > 0:
        text += f" (+{more})"
    return text
