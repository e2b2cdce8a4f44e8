"""``holdfast ls``: the generations of a run."""

import contextlib
from typing import Any

import click

from ...utils.errors import CheckpointError, CheckpointNotFoundError, MirrorError
from ..storage.generations import GenerationStore
from ..storage.journal import last_start
from ..storage.retention import RetentionRules, reasons_to_keep
from .output import json_option, print_json, print_table, size_text, time_text
from .places import Run, run_argument

_COLUMNS = ("step>", "epoch>", "written", "size>", "ranks>", "metrics", "kept", "mirror", "problem")
_MOST_METRICS = 2


@click.command("ls", short_help="List the generations of a run.")
@run_argument
@click.option("--mirror", metavar="URL", help="Say which have a copy there; 'recorded': at the run's own mirror.")
@json_option
def ls_command(run: str, mirror: str | None, as_json: bool) -> None:
    """List the generations of RUN, newest first.

    Names and sizes of their files are compared with the manifests; the bytes are `holdfast verify`'s business. The
    column "kept" says which rules want a generation, by the rules that the run was started with last; one that is kept
    by none goes when the next is committed.
    """
    place = Run(run)
    entries = [entry for step in place.steps() if (entry := _describe(place, step)) is not None]
    if place.store is not None:
        _explain_retention(place.store, entries)
    if mirror is not None:
        _look_at_mirror(place, mirror, entries)
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
    """What there is to say of a generation; None of one that a run that goes on has deleted meanwhile."""
    with contextlib.suppress(CheckpointNotFoundError):
        folder = place.folder(step)
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
            entry |= {"epoch": last.epoch, "epoch_step": last.epoch_step, "metrics": info.metrics}
        except MirrorError:
            raise
        except (CheckpointError, FileNotFoundError) as error:
            if folder.path is not None and not folder.path.is_dir():
                return None
            entry["problem"] = str(error)
        return entry
    return None


def _explain_retention(store: GenerationStore, entries: list[dict[str, Any]]) -> None:
    start = last_start(store.root.parent)
    pins = store.pins()
    sound = {entry["step"]: entry["metrics"] for entry in entries if entry["problem"] is None}
    reasons: dict[int, list[str]] = {step: [] for step in sound}
    if start is not None:
        with contextlib.suppress(TypeError, KeyError, ValueError):  # of another version
            reasons = reasons_to_keep(sound, RetentionRules(**start[1]["keep"]))
    for entry in entries:
        step = entry["step"]
        entry["pinned"] = step in pins
        entry["kept"] = (["pinned"] if step in pins else []) + reasons.get(step, [])
        entry["rules_known"] = start is not None


def _look_at_mirror(place: Run, mirror: str, entries: list[dict[str, Any]]) -> None:
    from .mirror import mirror_of

    there, damaged = mirror_of(place, None if mirror == "recorded" else mirror), "damaged"
    sound, wrong = set(there.steps()), set(there.steps(damaged=True))
    for entry in entries:
        entry["mirror"] = "copied" if entry["step"] in sound else damaged if entry["step"] in wrong else "no copy"


def _others(place: Run) -> dict[str, Any]:
    """What is not a generation."""
    if place.store is None:
        return {"damaged_steps": place.damaged(), "being_written": [], "rejected": []}
    store = place.store
    staged = sorted(
        {
            int(name.split("-")[1])
            for path in store.root.glob(".staging-*-*")
            if (name := path.name).split("-")[1].isdigit()
        }
    )
    being_written = [{"step": step, "bytes": store.staged_bytes(step)} for step in staged]
    return {
        "damaged_steps": [],
        "being_written": being_written,
        "rejected": [path.name for path in store.quarantined()],
    }


def _row(entry: dict[str, Any]) -> list[str]:
    metrics = entry.get("metrics", {})
    first = sorted(metrics, key=lambda name: name not in ("reward", "loss"))  # others as they were given
    shown = [f"{name} {metrics[name]:.4g}" for name in first]
    kept = ", ".join(entry.get("kept", []))
    if not kept and entry.get("rules_known") and entry["problem"] is None:
        kept = "by no rule"
    return [
        str(entry["step"]),
        f"{entry['epoch']}.{entry['epoch_step']}" if "epoch" in entry else "",
        time_text(entry["written"]) if "written" in entry else "",
        size_text(entry["bytes"]) if "bytes" in entry else "",
        str(entry.get("world_size") or ""),
        ", ".join(shown[:_MOST_METRICS]) + (f" (+{len(shown) - _MOST_METRICS})" if len(shown) > _MOST_METRICS else ""),
        kept,
        entry.get("mirror", ""),
        "" if entry["problem"] is None else entry["problem"].replace(entry["where"], "").lstrip(": /"),
    ]
