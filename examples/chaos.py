"""Run a GRPO example as a child process, kill parts of it, and read how it recovered."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.utils.metrics import SPEED_STATS, read_stats

GRPO = Path(__file__).with_name("grpo.py")
_TIMED = ("seconds", "time", "goodput", *SPEED_STATS)


def untimed(stats: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return statistics without timings: the part that must be equal in two equal runs."""
    kept = []
    for entry in stats:
        own = dict(entry)
        for key in entry:
            name = key.rpartition("/")[2]  # a critic's are below "critic/"
            if name in _TIMED or name.endswith("_s"):
                del own[key]
        kept.append(own)
    return kept


class GrpoRun:
    """One run of a GRPO example in a folder, across any number of starts.

    Args:
        fileroot: ``fileroot`` of the run.
        overrides: further ``key=value`` arguments.
        script: script of the example, or the name of a module.
        experiment: its ``experiment_name``.
    """

    def __init__(
        self,
        fileroot: Path,
        *overrides: str,
        script: Path | str = GRPO,
        experiment: str = "grpo_copy",
    ) -> None:
        self.fileroot = fileroot
        program = [str(script)] if isinstance(script, Path) else ["-m", script]
        self._command = [sys.executable, *program, f"fileroot={fileroot}", *overrides]
        self._process: subprocess.Popen[bytes] | None = None
        # inherited by all processes that the driver starts
        self._mark = f"HOLDFAST_CHAOS={uuid.uuid4().hex}"
        self.trial_root = fileroot / experiment / "trial0"
        self._stats_folder = self.trial_root / "stats"

    def start(self) -> None:
        """Start the command in the background. Output is appended to ``<fileroot>/output.log``."""
        self.fileroot.mkdir(parents=True, exist_ok=True)
        name, _, value = self._mark.partition("=")
        with open(self.fileroot / "output.log", "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {name: value},
            )

    def exit_code(self) -> int | None:
        """None while the driver runs."""
        assert self._process is not None
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """Return the exit code of the driver. After ``timeout_s``, kill the driver and raise
        TimeoutError.
        """
        self.wait_until(lambda: self.exit_code() is not None, timeout_s)
        code = self.exit_code()
        assert code is not None
        return code

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Poll a condition. If it stays false, kill the driver and raise TimeoutError with the end
        of its log.
        """
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                self.kill("driver")
                raise TimeoutError(
                    f"the run is stuck after {timeout_s} s; its log ends with:\n{self.log_tail()}"
                )
            time.sleep(0.02)

    def log_tail(self) -> str:
        """The last lines of the output."""
        log = (self.fileroot / "output.log").read_text(errors="replace")
        return "\n".join(log.splitlines()[-40:])

    def stats(self) -> Sequence[Mapping[str, Any]]:
        """Return the logged statistics, one entry per step."""
        path = self._stats_folder / "stats.jsonl"
        return read_stats(path) if path.exists() else []

    def last_step(self) -> int:
        """Return the last step with logged statistics, or -1."""
        stats = self.stats()
        return stats[-1]["step"] if stats else -1

    def attempts(self) -> list[dict[str, Any]]:
        """Return the entries of `note_attempt`: one per start of training, over all starts of the
        driver.
        """
        return read_attempts(self._stats_folder)

    def pids(self) -> dict[str, list[int]]:
        """Return the process ids by rank for each role (``driver``, ``trainer``, ``rollout``), as
        last written by the driver.

        The dict has only ``driver`` while the running driver has not written the file yet.
        """
        assert self._process is not None
        driver = self._process.pid
        found = {}
        with contextlib.suppress(FileNotFoundError):
            file = self._stats_folder / "processes.json"
            found = json.loads(file.read_text())
        # An earlier driver may have written the file.
        if found.get("driver") != driver:
            found = {}
        return {**found, "driver": [driver]}

    def kill(self, who: str, rank: int = 0) -> bool:
        """Send SIGKILL to the ``driver``, or to a rank of ``trainer`` or ``rollout``. False if it
        does not exist.
        """
        assert self._process is not None
        if who == "driver":
            self._process.kill()
            self._process.wait()
            return True
        # A worker may be gone, or not be there yet.
        with contextlib.suppress(KeyError, ProcessLookupError):
            pid = self.pids()[who][rank]
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    def stop(self) -> None:
        """Kill the driver, if it runs, and with it all processes that it started."""
        if self._process is not None and self.exit_code() is None:
            self.kill("driver")

    def leftovers(self) -> list[int]:
        """Return running processes that any start of the driver began, including itself (Linux)."""
        found = []
        mark = self._mark.encode()
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                variables = environ.read_bytes().split(b"\0")
                if mark in variables:
                    found.append(int(environ.parent.name))
        return found

    def final_weights(self) -> Path:
        """The safetensors file of the final export."""
        exports = self.trial_root / "hf"
        (export,) = exports.glob("global_step_*")
        return export / "model.safetensors"


def read_attempts(stats_folder: Path) -> list[dict[str, Any]]:
    """Return the entries that `note_attempt` wrote into the folder."""
    path = stats_folder / "attempts.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines]


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def column(entries: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    """Return one number of each entry."""
    return [entry[name] for entry in entries]


def mark_kill(axes: Any, at: float, text: str) -> None:
    """Draw a red line with a text at a place on the x axis."""
    red = "tab:red"
    axes.axvline(at, color=red, linewidth=1)
    axes.annotate(
        text,
        (at, 0.03),
        rotation=90,
        ha="right",
        color=red,
        fontsize=9,
    )
