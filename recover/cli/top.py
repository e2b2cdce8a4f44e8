"""``holdfast top``: watch a run by reading its files."""

import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from ...utils.errors import CheckpointError, CheckpointNotFoundError
from ...utils.json_lines import read_lines
from ..storage.journal import JOURNAL_NAME, read_journal
from .attempts import EVENTS, last_attempt
from .in_use import use_of
from .output import (
    json_option,
    make_table,
    number_text,
    print_json,
    print_rich,
    seconds_text,
    size_text,
)
from .runs import Run, run_argument

_TAIL_BYTES = 256 << 10
_LAST_STEPS = 20
_SERVERS = "servers_"
_STATS = ("stats/stats.jsonl", "stats.jsonl")


@click.command("top", short_help="Watch a run.")
@run_argument
@click.option("--stats", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Path of the run's "
              "stats.jsonl.  [default: stats/stats.jsonl or stats.jsonl in RUN]")  # fmt: skip
@click.option(
    "-n",
    "--every",
    default=2.0,
    show_default=True,
    type=click.FloatRange(0.1),
    help="Seconds between updates.",
)
@click.option(
    "--once", is_flag=True, help="Print once and exit, as if the output is not a terminal."
)
@json_option
def top_command(run: str, stats: Path | None, every: float, once: bool, as_json: bool) -> None:
    """Show step, reward, time per step, newest generation and failed snapshots of RUN, until
    Ctrl-C.

    Step times come from the journal of the run. Seconds of sampling, training and publishing are
    the values that the run logs with `StatsLogger` under names that end with _s. The states of
    inference servers are logged, too (`ServerFleet.stats`). The run itself is not contacted.
    """
    place = Run(run)
    if as_json:
        print_json(look(place, stats))
        return
    import sys

    if once or not sys.stdout.isatty():
        print_rich(_screen(look(place, stats)))
        return
    from rich.console import Console
    from rich.live import Live

    with (
        suppress(KeyboardInterrupt),
        Live(console=Console(), screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(_screen(look(place, stats)), refresh=True)
            time.sleep(every)


def look(place: Run, stats: Path | None) -> dict[str, Any]:
    """Summarise the current state of a run.

    Raises:
        CheckpointNotFoundError: there is no journal.
        ConfigError: the run is at a URL.
    """
    root, store = place.trial_root, place.require_store()
    if not (root / JOURNAL_NAME).exists():
        raise CheckpointNotFoundError(
            f"there is no {root / JOURNAL_NAME}: the run has not begun, or an older version runs"
        )
    events = list(read_journal(root, EVENTS, last_bytes=_TAIL_BYTES))
    began = max((at for at, event in enumerate(events) if event["event"] == "start"), default=0)
    steps = [event for event in events[began:] if event["event"] == "step"]
    saves = [event for event in events[began:] if event["event"] == "save"]
    recent = steps[-_LAST_STEPS - 1 :]
    seconds = blocked_share = None
    if len(recent) > 1:
        begin, end = recent[0]["time"], recent[-1]["time"]
        seconds = round((end - begin) / (len(recent) - 1), 4)
        blocked_s = sum(save["blocked_s"] for save in saves if begin <= save["time"] <= end)
        blocked_share = round(blocked_s / max(end - begin, 1e-9), 4)
    last = last_attempt(root)
    found = {
        "run": str(root),
        "in_use": use_of(root).known,
        "ended": None
        if last is None or last.ended is None
        else last.error or ("closed" if last.closed else "exited"),
        "step": steps[-1]["step"] if steps else None,
        "step_age_s": round(time.time() - steps[-1]["time"], 1) if steps else None,
        "seconds_a_step": seconds,
        "failed_in_a_row": saves[-1]["failed_in_a_row"] if saves else 0,
        "blocked_s": saves[-1]["blocked_s"] if saves else None,
        "blocked_share": blocked_share,
        "generation": _newest(store),
    }
    return found | _stats_of(root, stats)


def _newest(store: Any) -> dict[str, Any] | None:
    for generation in store.generations():
        try:
            info = store.inspect(generation.path)
            written = (generation.path / "manifest.json").stat().st_mtime
            n_bytes = sum(
                path.stat().st_size for path in generation.path.rglob("*") if path.is_file()
            )
        except (CheckpointError, FileNotFoundError):  # damaged, or deleted by the run meanwhile
            continue
        age_s = round(time.time() - written, 1)
        return {
            "step": generation.step,
            "age_s": age_s,
            "bytes": n_bytes,
            "save_s": round(info.save_s, 3),
        }
    return None


def _stats_of(root: Path, stats: Path | None) -> dict[str, Any]:
    """The last logged values, and the mean seconds of each phase over the recent steps."""
    path = stats or next((root / name for name in _STATS if (root / name).is_file()), None)
    if path is None:
        return {"stats": None, "spent_s": {}}
    lines = list(read_lines(path, "step", last_bytes=_TAIL_BYTES))[-_LAST_STEPS:]
    names = list(dict.fromkeys(name for line in lines for name in line if name.endswith("_s")))
    numbers = {name: [line.get(name, 0.0) for line in lines] for name in names}
    numbers = {
        name: found
        for name, found in numbers.items()
        if all(isinstance(one, int | float) for one in found)
    }
    spent = {name.removesuffix("_s"): round(fmean(found), 4) for name, found in numbers.items()}
    last = (
        {name: value for name, value in lines[-1].items() if name not in names} if lines else None
    )
    return {"stats": last, "spent_s": spent}


def _screen(found: dict[str, Any]) -> Any:
    states = {True: "running", None: "running, or killed: the lock of the run cannot tell"}
    stopped = f"not running ({found['ended'] or 'killed, or its machine was lost'})"
    state = states.get(found["in_use"], stopped)
    rows = [("run", found["run"]), ("state", state)]
    if found["step"] is not None:
        rows.append(("step", f"{found['step']}, {seconds_text(found['step_age_s'])} ago"))
    stats = found["stats"] or {}
    metric = next((name for name in ("reward", "loss") if name in stats), None)
    if metric is not None:
        rows.append((metric, number_text(stats[metric])))
    if servers := _servers_text(stats):
        rows.append(("servers", servers))
    if found["seconds_a_step"] is not None:
        rows.append(("a step takes", seconds_text(found["seconds_a_step"])))
    rows += [(f"  {name}", seconds_text(seconds)) for name, seconds in found["spent_s"].items()]
    if found["blocked_s"] is not None:
        share = (
            "" if found["blocked_share"] is None else f", {found['blocked_share']:.2%} of the time"
        )
        rows.append(
            ("  blocked by saves", f"{seconds_text(found['blocked_s'])} the last one{share}")
        )
    if (newest := found["generation"]) is not None:
        age, size, took = (
            seconds_text(newest["age_s"]),
            size_text(newest["bytes"]),
            seconds_text(newest["save_s"]),
        )
        rows.append(
            ("newest generation", f"step {newest['step']}, {age} ago, {size}, written in {took}")
        )
    rows.append(("failed in a row", str(found["failed_in_a_row"])))
    return make_table(("", ""), rows)


def _servers_text(stats: dict[str, Any]) -> str:
    """``2 serving, 1 asleep`` after the logged `ServerFleet.stats`, or nothing without servers."""
    counts = {
        name.removeprefix(_SERVERS): count
        for name, count in stats.items()
        if name.startswith(_SERVERS)
    }
    return ", ".join(
        f"{count:g} {state}"
        for state, count in counts.items()
        if isinstance(count, int | float) and count
    )
