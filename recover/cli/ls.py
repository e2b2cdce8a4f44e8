"""``holdfast ls``: list the generations of a run."""

import contextlib
from typing import Any

import click

from ...utils.errors import CheckpointError, CheckpointNotFoundError, MirrorError
from ..storage.generations import GenerationStore, RetentionRules, reasons_to_keep
from ..storage.journal import last_start
from .output import json_option, print_json, print_table, size_text, time_text
from .runs import Run, run_argument

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
@click.option("--mirror", metavar="URL", help="Show which generations have a copy at URL. 'recorded' stands for the "
              "mirror of the run.")  # fmt: skip
@json_option
def ls_command(run: str, mirror: str | None, as_json: bool) -> None:
    """List the generations of RUN, newest first.

    Names and sizes of the files are compared with the manifests. To compare every byte, use
    `holdfast verify`.

    The column "kept" names the retention rules that keep a generation, as configured at the last
    start of the run. A generation kept "by no rule" is deleted at the next commit.
    """
    place = Run(run)
    entries = [entry for step in place.steps() if (entry := _describe(place, step)) is not None]
    if place.store is not None:
        _explain_retention(place.store, entries)
    if mirror is not None:
        there = place.open_mirror(None if mirror == "recorded" else mirror)
        copies = dict.fromkeys(there.steps(damaged=True), "damaged") | dict.fromkeys(
            there.steps(), "copied"
        )
        for entry in entries:
            entry["mirror"] = copies.get(entry["step"], "no copy")
    others = _others(place)
    if as_json:
        print_json({"run": place.where, "generations": entries, **others})
        return
    if entries:
        print_table(_COLUMNS, [_row(entry) for entry in entries], place.where)
    else:
        click.echo(f"{place.where} has no generation yet")
    for step in others["damaged_steps"]:
        click.echo(f"step {step}: its copy was found damaged")
    for staged in others["being_written"]:
        click.echo(f"step {staged['step']} is being written, or was when its writer was killed: "
                   f"{size_text(staged['bytes'])} so far")  # fmt: skip
    for name in others["rejected"]:
        click.echo(f"refused at a start: {name}")


def _describe(place: Run, step: int) -> dict[str, Any] | None:
    """Describe a generation. Return None if the run has deleted it meanwhile."""
    try:
        folder = place.folder(step)
    except CheckpointNotFoundError:
        return None
    entry: dict[str, Any] = {"step": step, "where": folder.where, "problem": None}
    try:
        if folder.path is not None:
            entry["written"] = (folder.path / "manifest.json").stat().st_mtime
        manifest = folder.read_manifest()
        entry["bytes"] = sum(file["bytes"] for file in manifest["files"].values())
        entry["world_size"], entry["run_id"] = manifest.get("world_size"), manifest.get("run_id")
        folder.manifest()
        info = folder.info()
        last = info.last_step_info
        entry |= {
            "epoch": last.epoch,
            "epoch_step": last.epoch_step,
            "steps_per_epoch": last.steps_per_epoch,
        }
        entry["metrics"] = info.metrics
    except MirrorError:
        raise
    except (CheckpointError, FileNotFoundError) as error:
        if folder.path is not None and not folder.path.is_dir():
            return None
        entry["problem"] = str(error)
    return entry


def _explain_retention(store: GenerationStore, entries: list[dict[str, Any]]) -> None:
    start = last_start(store.root.parent)
    pins = store.pins()
    sound = {entry["step"]: entry["metrics"] for entry in entries if entry["problem"] is None}
    reasons: dict[int, list[str]] = {step: [] for step in sound}
    if start is not None:
        with contextlib.suppress(
            TypeError, KeyError, ValueError
        ):  # another version wrote the journal
            reasons = reasons_to_keep(sound, RetentionRules(**start[1]["keep"]))
    for entry in entries:
        step = entry["step"]
        entry["pinned"] = step in pins
        entry["kept"] = (["pinned"] if step in pins else []) + reasons.get(step, [])
        entry["rules_known"] = start is not None


def _others(place: Run) -> dict[str, Any]:
    """Damaged copies, unfinished generations and rejected ones."""
    if (store := place.store) is None:
        return {"damaged_steps": place.damaged(), "being_written": [], "rejected": []}
    numbers = {path.name.split("-")[1] for path in store.root.glob(".staging-*-*")}
    staged = sorted(int(number) for number in numbers if number.isdigit())
    being_written = [{"step": step, "bytes": store.staged_bytes(step)} for step in staged]
    rejected = [path.name for path in store.quarantined()]
    return {"damaged_steps": [], "being_written": being_written, "rejected": rejected}


def _row(entry: dict[str, Any]) -> list[str]:
    metrics = entry.get("metrics", {})
    first = sorted(
        metrics, key=lambda name: name not in ("reward", "loss")
    )  # the others keep their order
    shown = ", ".join(f"{name} {metrics[name]:.4g}" for name in first[:_MOST_METRICS])
    kept = ", ".join(entry.get("kept", []))
    if not kept and entry.get("rules_known") and entry["problem"] is None:
        kept = "by no rule"
    return [
        str(entry["step"]),
        f"{entry['epoch']}, {entry['epoch_step']}/{entry['steps_per_epoch']}"
        if "epoch" in entry
        else "",
        time_text(entry["written"]) if "written" in entry else "",
        size_text(entry["bytes"]) if "bytes" in entry else "",
        str(entry.get("world_size") or ""),
        shown + (f" (+{len(first) - _MOST_METRICS})" if len(first) > _MOST_METRICS else ""),
        kept,
        entry.get("mirror", ""),
        ""
        if entry["problem"] is None
        else entry["problem"].replace(entry["where"], "").lstrip(": /"),
    ]
