"""Runs of the Ray examples in which a trainer and then the driver are killed, and undisturbed
runs.
"""

import contextlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.chaos import GrpoRun, sha256, untimed
from holdfast.utils.metrics import read_stats
from tests.limits import stretched

PATIENCE_S = stretched(240.0)


def finish(run: GrpoRun) -> None:
    """Run the command to its end."""
    run.start()
    try:
        assert run.wait(PATIENCE_S) == 0, run.log_tail()
    finally:
        run.stop()


def finish_killed(
    run: GrpoRun, trainer_after: int, driver_after: int, delay_s: float = 0.0
) -> None:
    """Run the command to its end, with a SIGKILL of trainer 1 and, after its recovery, one of the
    driver.

    Args:
        run: a run that has not started yet.
        trainer_after: logged step after which the trainer is killed.
        driver_after: logged step after which the driver is killed.
        delay_s: additional delay, which decides the moment: sampling, training, a snapshot, a
            publication.
    """
    try:
        run.start()
        _wait_for(run, trainer_after, delay_s)
        assert run.kill("trainer", 1), run.log_tail()
        run.wait_until(lambda: len(run.attempts()) == 2 or run.exit_code() is not None, PATIENCE_S)
        _wait_for(run, driver_after, delay_s)
        run.kill("driver")
        run.start()
        assert run.wait(PATIENCE_S) == 0, run.log_tail()
    finally:
        run.stop()
    assert len(run.attempts()) == 3


def _wait_for(run: GrpoRun, step: int, delay_s: float) -> None:
    run.wait_until(lambda: run.last_step() >= step or run.exit_code() is not None, PATIENCE_S)
    time.sleep(delay_s)
    assert run.exit_code() is None, run.log_tail()


def stats_of(run: GrpoRun) -> list[dict[str, Any]]:
    """The statistics without timings."""
    return untimed(read_stats(run.trial_root / "stats" / "stats.jsonl"))


def last_generation(run: GrpoRun, last_step: int) -> dict[str, str]:
    """Map the files of the last generation to digests: engines, ranks and data cursor.

    The driver's files are left out, because its generators have no seed and are not used.
    """
    manifest = json.loads(
        (run.trial_root / "recover" / f"global_step_{last_step}" / "manifest.json").read_text()
    )
    left_out = ("recover_info.json", "state/driver.pt")
    return {
        name: entry["digest"] for name, entry in manifest["files"].items() if name not in left_out
    }


@contextlib.contextmanager
def published_versions(run: GrpoRun) -> Iterator[dict[int, set[str]]]:
    """Version -> SHA-256 of all weights files published as this version, seen by a look every 2
    ms.
    """
    seen: defaultdict[int, set[str]] = defaultdict(set)
    known: set[tuple[Path, int]] = set()
    over = threading.Event()

    def look() -> None:
        for path in (run.trial_root / "weights").glob("v*/model.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # deleted by retention meanwhile
                file = (path, path.stat().st_ino)
                if file not in known:
                    seen[int(path.parent.name[1:])].add(sha256(path))
                    known.add(file)

    def watch() -> None:
        while not over.wait(0.002):
            look()

    thread = threading.Thread(target=watch, name="published versions")
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
        look()
