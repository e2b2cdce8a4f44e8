"""``holdfast top``: watch a run by reading its files."""

import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from ...engine.launch.records import SERVERS, Record, known_format, log_tail, read_records
from ...utils.errors import CheckpointError, CheckpointNotFoundError
from ...utils.json_lines import read_lines
from ..storage.generations import GenerationStore
from ..storage.journal import EVENTS, JOURNAL_NAME, Event, read_journal
from ..storage.wall_time import LOST, RunningTime
from .attempts import AttemptRecord, last_attempt
from .goodput import is_phase
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
from .runs import Run, run_argument, stats_file, stats_option

Facts = dict[str, Any]
"""A part of the JSON document."""

_TAIL_BYTES = 256 << 10
_LAST_STEPS = 20
_SERVERS = "servers_"
_SILENCE_S = 60.0
FAILED = "failed"
"""State of a server that has used up its restarts."""


@click.command("top", short_help="Watch a run.")
@run_argument
@stats_option
@click.option(
    "-n",
    "--every",
    default=2.0,
    show_default=True,
    type=click.FloatRange(0.1),
    help="Seconds between updates.",
)
@click.option(
    "--once",
    is_flag=True,
    help="Print once and exit, as if the output is not a terminal.",
)
@json_option
def top_command(
    run: str,
    stats: Path | None,
    every: float,
    once: bool,
    as_json: bool,
) -> None:
    """Show step, reward, goodput, time per step, newest generation and failed snapshots of RUN,
    until Ctrl-C.

    Goodput is that of `holdfast goodput`. Step times come from the journal of the run. Seconds of
    sampling, training and publishing are the values that the run logs with `StatsLogger` under
    names that end with _s. The states of inference servers are logged, too (`ServerFleet.stats`).
    The run itself is not contacted.
    """
    # One look, or one after the other.
    place = Run(run)
    spent = RunningTime(place.trial_root)
    if as_json:
        print_json(look(place, stats, spent))
        return
    if once or not sys.stdout.isatty():
        print_rich(_screen(look(place, stats, spent)))
        return

    from rich.console import Console
    from rich.live import Live

    with (
        suppress(KeyboardInterrupt),
        Live(console=Console(), screen=True, auto_refresh=False) as live,
    ):
        while True:
            screen = _screen(look(place, stats, spent))
            live.update(screen, refresh=True)
            time.sleep(every)


def look(place: Run, stats: Path | None, spent: RunningTime) -> Facts:
    """Summarise the current state of a run. ``spent`` is kept from one look to the next.

    Raises:
        CheckpointNotFoundError: there is no journal.
        ConfigError: the run is at a URL.
        OSError: the journal cannot be read.
    """
    root = place.trial_root
    store = place.require_store()
    if not (root / JOURNAL_NAME).exists():
        raise CheckpointNotFoundError(
            f"there is no {root / JOURNAL_NAME}: the run has not begun, or an older version runs"
        )

    # Only what has happened since the last start, as far as the end of the journal tells.
    steps: list[Event] = []
    saves: list[Event] = []
    for event in read_journal(root, EVENTS, last_bytes=_TAIL_BYTES, must_read=True):
        match event["event"]:
            case "start":
                steps.clear()
                saves.clear()
            case "step":
                steps.append(event)
            case "save":
                saves.append(event)

    attempt = last_attempt(root)
    found: Facts = {
        "run": str(root),
        "in_use": use_of(root, attempt).known,
        "ended": _ending(attempt),
        "step": None,
        "step_age_s": None,
        **_pace(steps, saves),
        **spent.read().statistics(),
        "generation": _newest(store),
        "servers": server_facts(root),
        **_stats_of(root, stats),
    }
    if steps:
        last = steps[-1]
        found["step"] = last["step"]
        found["step_age_s"] = round(time.time() - last["time"], 1)
    return found


def server_facts(root: Path) -> list[Facts]:
    """The servers of a run that `ServerProcesses` or `holdfast serve` keeps, without their keys.
    ``log_end`` is the end of the log of a failed one. Raises `ConfigError` if another version
    keeps them.
    """
    folder = root / SERVERS
    found: list[Facts] = []
    for host, record in read_records(folder).items():
        with known_format(folder, host):
            found += [_describe_server(host, record, server) for server in record["servers"]]
    return found


def _describe_server(host: str, record: Record, server: Record) -> Facts:
    # The keeper of a host writes its record every few seconds.
    state = server["state"]
    silent = time.time() - record["beat"] > _SILENCE_S
    if state != FAILED and (record["closed"] or silent):
        state = "ended with its keeper"
    log_end = None
    if state == FAILED and server["log"] is not None:
        keys = [server[name] for name in ("api_key", "admin_key") if server[name]]
        log_end = log_tail(Path(server["log"]), keys)
    return {
        "name": server["name"],
        "host": host,
        "state": state,
        "version": server["version"],
        "restarts": server["restarts"],
        "since_s": round(time.time() - server["since"], 1),
        "error": server["error"],
        "log": server["log"],
        "log_end": log_end,
    }


def _ending(last: AttemptRecord | None) -> str | None:
    """Why the last attempt ended. None if no end was noted."""
    if last is None or last.ended is None:
        return None
    if last.error:
        return last.error
    return "closed" if last.closed else "exited"


def _pace(steps: list[Event], saves: list[Event]) -> Facts:
    """Time per step, and the share of it that snapshots take."""
    found: Facts = {
        "seconds_a_step": None,
        "failed_in_a_row": 0,
        "blocked_s": None,
        "blocked_share": None,
    }
    if saves:
        found["failed_in_a_row"] = saves[-1]["failed_in_a_row"]
        found["blocked_s"] = saves[-1]["blocked_s"]

    # Over the recent steps. The time of an event is that of the end of its step.
    recent = steps[-_LAST_STEPS - 1 :]
    if len(recent) > 1:
        begin = recent[0]["time"]
        end = recent[-1]["time"]
        took = end - begin
        blocked = [save["blocked_s"] for save in saves if begin <= save["time"] <= end]
        found["seconds_a_step"] = round(took / (len(recent) - 1), 4)
        found["blocked_share"] = round(sum(blocked) / max(took, 1e-9), 4)
    return found


def _newest(store: GenerationStore) -> Facts | None:
    """The newest sound generation, by names and sizes of its files."""
    for generation in store.generations():
        try:
            info = store.inspect(generation.path)
            manifest_file = generation.path / "manifest.json"
            written = manifest_file.stat().st_mtime
            files = [path for path in generation.path.rglob("*") if path.is_file()]
            n_bytes = sum(path.stat().st_size for path in files)
        except (CheckpointError, OSError):  # damaged, or deleted by the run meanwhile
            continue
        return {
            "step": generation.step,
            "age_s": round(time.time() - written, 1),
            "bytes": n_bytes,
            "save_s": round(info.save_s, 3),
        }
    return None


def _stats_of(root: Path, stats: Path | None) -> Facts:
    """The last logged values, and the mean seconds of each phase over the recent steps."""
    path = stats_file(root, stats)
    if path is None:
        return {"stats": None, "spent_s": {}}
    lines = list(read_lines(path, "step", last_bytes=_TAIL_BYTES))
    lines = lines[-_LAST_STEPS:]

    # The names of phases end with _s. A step without a phase has spent no time in it.
    spent: dict[str, float] = {}
    phases = dict.fromkeys(name for line in lines for name in line if is_phase(name))
    for phase in phases:
        seconds = [line.get(phase, 0.0) for line in lines]
        if all(isinstance(one, int | float) for one in seconds):
            spent[phase.removesuffix("_s")] = round(fmean(seconds), 4)

    last: Facts | None = None
    if lines:
        last = {name: value for name, value in lines[-1].items() if name not in phases}
    return {"stats": last, "spent_s": spent}


def _screen(found: Facts) -> Any:
    rows = [("run", found["run"]), ("state", _state_text(found))]
    if found["step"] is not None:
        age = seconds_text(found["step_age_s"])
        rows.append(("step", f"{found['step']}, {age} ago"))

    lost = seconds_text(found[LOST])
    rows.append(("goodput", f"{found['goodput']:.1%}, starts and kills cost {lost}"))

    # Lines about one metric and the servers, as the run has logged them.
    stats = found["stats"] or {}
    for name in ("reward", "loss"):
        if name in stats:
            rows.append((name, number_text(stats[name])))
            break
    servers = _servers_text(stats)
    if servers:
        rows.append(("servers", servers))
    for server in found["servers"]:
        name = f"  {server['name']} on {server['host']}"
        rows.append((name, _server_text(server)))

    # Shares of the time.
    if found["seconds_a_step"] is not None:
        rows.append(("a step takes", seconds_text(found["seconds_a_step"])))
    for name, seconds in found["spent_s"].items():
        rows.append((f"  {name}", seconds_text(seconds)))
    if found["blocked_s"] is not None:
        blocked = f"{seconds_text(found['blocked_s'])} the last one"
        if found["blocked_share"] is not None:
            blocked += f", {found['blocked_share']:.2%} of the time"
        rows.append(("  blocked by saves", blocked))

    # The generation that a restart would resume.
    newest = found["generation"]
    if newest is not None:
        age = seconds_text(newest["age_s"])
        size = size_text(newest["bytes"])
        took = seconds_text(newest["save_s"])
        text = f"step {newest['step']}, {age} ago, {size}, written in {took}"
        rows.append(("newest generation", text))
    rows.append(("failed in a row", str(found["failed_in_a_row"])))
    return make_table(("", ""), rows)


def _state_text(found: Facts) -> str:
    if found["in_use"] is None:
        return "running, or killed: the lock of the run cannot tell"
    if found["in_use"]:
        return "running"
    ending = found["ended"] or "killed, or its machine was lost"
    return f"not running ({ending})"


def _server_text(server: Facts) -> str:
    parts = [f"{server['state']} for {seconds_text(server['since_s'])}"]
    if server["version"] is not None:
        parts.append(f"version {server['version']}")
    if server["restarts"]:
        parts.append(f"restarted {server['restarts']} times")
    if server["error"]:
        parts.append(server["error"])
    return ", ".join(parts)


def _servers_text(stats: Facts) -> str:
    """``2 serving, 1 asleep`` after the logged `ServerFleet.stats`, or nothing without servers."""
    # States without a server are left out.
    parts: list[str] = []
    for name, count in stats.items():
        if name.startswith(_SERVERS) and isinstance(count, int | float) and count:
            state = name.removeprefix(_SERVERS)
            parts.append(f"{count:g} {state}")
    return ", ".join(parts)
