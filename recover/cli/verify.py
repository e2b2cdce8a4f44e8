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

from ...utils.errors import CheckpointError, CheckpointNotFoundError, ConfigError, MirrorError
from ...utils.manifest import DELTA_NAME, MANIFEST_NAME, has_delta, is_delta_alone
from ...utils.processes import MOST_READING_THREADS
from ...utils.remote import FETCH_FIRST
from ..info import INFO_NAME
from .folders import Folder, UrlFolder
from .output import DAMAGED, json_option, print_json, print_table, size_text
from .runs import Run, is_url, local_path, names_generation, read_generation

CONFIG = "config.json"
_CHANGES = f"{DELTA_NAME}/{MANIFEST_NAME}"


@click.command("verify", short_help="Compare every byte with its digest.")
@click.argument("where", metavar="GEN|RUN|HF")
@click.option("--threads", type=click.IntRange(1, 64), help="Number of files to read in parallel.  [default: one per "
              "core]")  # fmt: skip
@json_option
@click.pass_context
def verify_command(ctx: click.Context, where: str, threads: int | None, as_json: bool) -> None:
    """Check a generation GEN, all generations of RUN, or a Hugging Face folder HF for damage.

    Generations and published weights hold a digest of every file, and every byte is compared with
    it. This includes versions that hold only the changes from the one before. Other Hugging Face
    folders have no digests: only the headers of the weight files are compared with the files and
    the index.

    The exit code is 1 if anything is damaged.
    """
    reports = _reports(where, threads)
    if as_json:
        print_json({"folders": reports})
    else:
        parent = reports[0]["where"].rpartition("/")[0] if reports else ""
        print_table(
            ("folder", "files>", "size>", "rate>", "verdict"),
            [_row(report) for report in reports],
            parent or None,
        )
    if any(report["problems"] for report in reports):
        ctx.exit(DAMAGED)


def _reports(where: str, threads: int | None) -> list[dict[str, Any]]:
    if names_generation(where):
        return [read_generation(where, partial(_verify, threads=threads))]
    if is_url(where) or any((local_path(where) / name).is_file() for name in (CONFIG, _CHANGES)):
        folder = UrlFolder(where.rstrip("/")) if is_url(where) else Folder(local_path(where))
        if folder.path is not None or folder.has(CONFIG) or folder.has(_CHANGES):
            return [_verify(folder, threads)]
    run = Run(where)
    if not (steps := run.steps()):
        raise CheckpointNotFoundError(f"{run.where} has no generation to verify")
    reports = []
    for step in steps:
        with contextlib.suppress(CheckpointNotFoundError):  # the run has deleted it meanwhile
            reports.append(_verify(run.folder(step), threads))
    return reports


def _verify(folder: Folder, threads: int | None) -> dict[str, Any]:
    """Report on one folder. Raises `CheckpointNotFoundError` if the run has deleted it meanwhile."""
    started = time.monotonic()
    report: dict[str, Any] = {
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
    except (
        CheckpointError,
        OSError,
    ) as error:  # a disk that cannot read one file may well read the others
        if folder.path is not None and not folder.path.is_dir():
            raise CheckpointNotFoundError(
                f"{folder.where} was deleted while it was read"
            ) from error
        report["problems"].append(str(error).replace(f"{folder.where}: ", ""))
    report["seconds"] = round(time.monotonic() - started, 4)
    return report


def find_damage(folder: Folder, files: Mapping[str, Any], threads: int | None = None) -> list[str]:
    """Compare every byte of the files in a manifest with their digests. Return the problems as
    text.
    """
    by_size = sorted(
        files, key=lambda name: -files[name]["bytes"]
    )  # largest first, so that no thread ends with it

    def check(name: str) -> str | None:
        found = folder.digest(name, files[name])
        return (
            None
            if found == files[name]["digest"]
            else f"{name} has digest {found}, not {files[name]['digest']}"
        )

    with ThreadPoolExecutor(
        threads or min(len(os.sched_getaffinity(0)), MOST_READING_THREADS)
    ) as pool:
        return [problem for problem in pool.map(check, by_size) if problem is not None]


def _verify_digests(folder: Folder, threads: int | None, report: dict[str, Any]) -> None:
    manifest, sizes = folder.read_manifest(), folder.sizes()
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
    if INFO_NAME in files and not report["problems"]:
        step = folder.info().last_step_info.global_step
        if folder.name.startswith("global_step_") and folder.name != f"global_step_{step}":
            report["problems"].append(f"it was renamed: it holds step {step}")


def _compare(
    folder: Folder, files: Mapping[str, Any], threads: int | None, report: dict[str, Any]
) -> list[str]:
    report["files"] += len(files)
    report["bytes"] += sum(entry["bytes"] for entry in files.values())
    return find_damage(folder, files, threads)


def _verify_export(folder: Folder, report: dict[str, Any]) -> None:
    from ...engine.hf.weight_files import WeightReader

    if folder.path is None:
        raise ConfigError(
            f"{folder.where} has no digests to verify; {FETCH_FIRST}, then what its files say is "
            "compared"
        )
    with WeightReader(folder.path) as weights:
        weights.layout()
    sizes = folder.sizes()
    report |= {"digests": False, "files": len(sizes), "bytes": sum(sizes.values())}


def _row(report: dict[str, Any]) -> list[str]:
    rate = report["bytes"] / max(report["seconds"], 1e-9)
    sound = "sound" if report["digests"] else "whole (it has no digests)"
    if base := report.get("changes_from"):
        sound += f", holds the changes from version {base.partition('-')[0]}"
    problems = [
        re.sub(r" has digest .*", " is not what was written", problem)
        for problem in report["problems"]
    ]
    return [
        report["where"].rpartition("/")[2],
        str(report["files"]),
        size_text(report["bytes"]),
        f"{size_text(int(rate))}/s" if report["digests"] and report["bytes"] else "",
        sound if not report["problems"] else "DAMAGED: " + "; ".join(problems),
    ]
