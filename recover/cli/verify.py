"""``holdfast verify``: compare every byte with the digest that was taken when it was written."""

import contextlib
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import click

from ...utils.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    MirrorError,
)
from ...utils.manifest import (
    DELTA_NAME,
    MANIFEST_NAME,
    has_delta,
    is_delta_alone,
)
from ...utils.processes import MOST_READING_THREADS
from ...utils.remote import FETCH_FIRST
from ..info import INFO_NAME
from .episodes import LogFacts, whole_logs
from .folders import Folder, UrlFolder
from .output import (
    DAMAGED,
    json_option,
    print_json,
    print_table,
    size_text,
)
from .runs import (
    Run,
    is_url,
    local_path,
    names_generation,
    read_generation,
)

Report = dict[str, Any]
"""Findings in one folder, as in the JSON document."""

CONFIG = "config.json"
_CHANGES = f"{DELTA_NAME}/{MANIFEST_NAME}"
_COLUMNS = ("folder", "files>", "size>", "rate>", "verdict")


@click.command("verify", short_help="Compare every byte with its digest.")
@click.argument("where", metavar="GEN|RUN|HF")
@click.option(
    "--threads",
    type=click.IntRange(1, 64),
    help="Number of files to read in parallel.  [default: one per core]",
)
@json_option
@click.pass_context
def verify_command(
    ctx: click.Context,
    where: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Check a generation GEN, all generations of RUN, or a Hugging Face folder HF for damage.

    Generations and published weights hold a digest of every file, and every byte is compared with
    it. This includes versions that hold only the changes from the one before. Other Hugging Face
    folders have no digests: only the headers of the weight files are compared with the files and
    the index. The records of unfinished episodes of RUN are compared with their digests too. A
    torn end of their files is what a kill leaves, and no damage.

    The exit code is 1 if anything is damaged.
    """
    reports = _reports(where, threads)
    if as_json:
        print_json({"folders": reports})
    else:
        # The folder that all of them are in.
        parent = ""
        if reports:
            parent = reports[0]["where"].rpartition("/")[0]
        rows = [_row(report) for report in reports]
        print_table(_COLUMNS, rows, parent or None)
    if any(report["problems"] for report in reports):
        ctx.exit(DAMAGED)


def _reports(where: str, threads: int | None) -> list[Report]:
    if names_generation(where):
        report = read_generation(where, partial(_verify, threads=threads))
        return [report]
    folder = _find_export(where)
    if folder is not None:
        return [_verify(folder, threads)]

    # All generations of a run.
    run = Run(where)
    steps = run.steps()
    logs = [] if run.store is None else whole_logs(run.store)
    if not steps and not logs:
        raise CheckpointNotFoundError(f"{run.where} has no generation to verify")
    reports: list[Report] = []
    for step in steps:
        # The run may have deleted it meanwhile.
        with contextlib.suppress(CheckpointNotFoundError):
            reports.append(_verify(run.folder(step), threads))
    return reports + [_report_log(run, log) for log in logs]


def _report_log(run: Run, log: LogFacts) -> Report:
    problems = list(log.problems)
    if log.damaged:
        plural = "" if log.damaged == 1 else "s"
        problems.insert(
            0, f"{log.damaged} damaged record{plural} (their requests will be asked again)"
        )
    return {
        "where": f"{run.where}/{log.where}",
        "name": log.where,
        "files": log.files,
        "bytes": log.bytes,
        "digests": True,
        "problems": problems,
        "torn": log.torn,
        "seconds": log.seconds,
    }


def _find_export(where: str) -> Folder | None:
    """An export or a published version: a folder with a config, or with changes alone."""
    if is_url(where):
        folder = UrlFolder(where.rstrip("/"))
        is_export = folder.has(CONFIG) or folder.has(_CHANGES)
        return folder if is_export else None
    path = local_path(where)
    is_export = (path / CONFIG).is_file() or (path / _CHANGES).is_file()
    return Folder(path) if is_export else None


def _verify(folder: Folder, threads: int | None) -> Report:
    """Report on a folder. Raises `CheckpointNotFoundError` if the run has deleted it meanwhile."""
    started = time.monotonic()
    report: Report = {
        "where": folder.where,
        "files": 0,
        "bytes": 0,
        "digests": True,
        "problems": [],
    }
    try:
        if folder.has(MANIFEST_NAME) or not folder.has(CONFIG):
            _verify_digests(folder, threads, report)
        else:
            _verify_export(folder, report)
    except (MirrorError, ConfigError):
        raise
    except (CheckpointError, OSError) as error:
        # An OSError, too: a disk that cannot read one file may well read the others.
        if folder.path is not None and not folder.path.is_dir():
            raise CheckpointNotFoundError(
                f"{folder.where} was deleted while it was read"
            ) from error
        problem = str(error).replace(f"{folder.where}: ", "")
        report["problems"].append(problem)
    report["seconds"] = round(time.monotonic() - started, 4)
    return report


def find_damage(
    folder: Folder,
    files: Mapping[str, Any],
    threads: int | None = None,
) -> list[str]:
    """Compare every byte of the files in a manifest with their digests. Return the problems as
    text.
    """

    def check(name: str) -> str | None:
        found = folder.digest(name, files[name])
        expected = files[name]["digest"]
        if found == expected:
            return None
        return f"{name} has digest {found}, not {expected}"

    # The largest first, so that no thread ends with it.
    by_size = sorted(files, key=lambda name: -files[name]["bytes"])
    if threads is None:
        threads = min(len(os.sched_getaffinity(0)), MOST_READING_THREADS)
    with ThreadPoolExecutor(threads) as pool:
        problems = list(pool.map(check, by_size))
    return [problem for problem in problems if problem is not None]


def _verify_digests(folder: Folder, threads: int | None, report: Report) -> None:
    manifest = folder.read_manifest()
    sizes = folder.sizes()

    # The changes from the version before have a manifest of their own, and may be all there is.
    if has_delta(manifest, sizes):
        changes = folder.inside(DELTA_NAME)
        facts = changes.manifest()
        problems = _compare(changes, facts["files"], threads, report)
        report["problems"] += [f"{DELTA_NAME}/{problem}" for problem in problems]
        if is_delta_alone(manifest, sizes):
            report["changes_from"] = facts["base"]["label"]
            return

    files = folder.manifest()["files"]
    report["problems"] += _compare(folder, files, threads, report)

    # A generation says which step it holds.
    if INFO_NAME in files and not report["problems"]:
        step = folder.info().last_step_info.global_step
        expected = f"global_step_{step}"
        if folder.name.startswith("global_step_") and folder.name != expected:
            report["problems"].append(f"it was renamed: it holds step {step}")


def _compare(
    folder: Folder,
    files: Mapping[str, Any],
    threads: int | None,
    report: Report,
) -> list[str]:
    report["files"] += len(files)
    report["bytes"] += sum(entry["bytes"] for entry in files.values())
    return find_damage(folder, files, threads)


def _verify_export(folder: Folder, report: Report) -> None:
    """Check a folder without digests: the weight files have what their headers and index say."""
    from ...engine.hf.weight_files import WeightReader

    if folder.path is None:
        raise ConfigError(
            f"{folder.where} has no digests to verify; {FETCH_FIRST}, then what its files say is "
            "compared"
        )
    with WeightReader(folder.path) as weights:
        weights.layout()
    sizes = folder.sizes()
    report["digests"] = False
    report["files"] = len(sizes)
    report["bytes"] = sum(sizes.values())


def _row(report: Report) -> list[str]:
    verdict = "sound"
    if not report["digests"]:
        verdict = "whole (it has no digests)"
    base = report.get("changes_from")
    if base:
        verdict += f", holds the changes from version {base.partition('-')[0]}"
    torn = report.get("torn")
    if torn:
        verdict += f", {torn} torn end{'' if torn == 1 else 's'}"
    if report["problems"]:
        # The digests themselves are in the JSON.
        problems = "; ".join(map(_without_digests, report["problems"]))
        verdict = f"DAMAGED: {problems}"

    # Headers alone are read at no rate.
    rate = ""
    if report["digests"] and report["bytes"]:
        per_second = report["bytes"] / max(report["seconds"], 1e-9)
        rate = f"{size_text(int(per_second))}/s"
    return [
        report.get("name") or report["where"].rpartition("/")[2],
        str(report["files"]),
        size_text(report["bytes"]),
        rate,
        verdict,
    ]


def _without_digests(problem: str) -> str:
    return re.sub(r" has digest .*", " is not what was written", problem)
