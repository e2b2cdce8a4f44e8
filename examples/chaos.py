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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.utils.metrics import read_stats

GRPO = Path(__file__).with_name("grpo.py")


def untimed(stats: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return statistics without timings: the part that must be equal in two equal runs."""
    clock = ("seconds", "time")
    return [
        {key: entry[key] for key in entry if key not in clock and not key.endswith("_s")}
        for entry in stats
    ]


class GrpoRun:
    """One run of a GRPO example in a folder, across any number of starts.

    Args:
        fileroot: ``fileroot`` of the run.
        overrides: further ``key=value`` arguments.
        script: script of the example.
        experiment: its ``experiment_name``.
    """

    def __init__(
        self, fileroot: Path, *overrides: str, script: Path = GRPO, experiment: str = "grpo_copy"
    ) -> None:
        self.fileroot = fileroot
        self._command = [sys.executable, str(script), f"fileroot={fileroot}", *overrides]
        self._process: subprocess.Popen[bytes] | None = None
        # inherited by all processes that the driver starts
        self._mark = f"HOLDFAST_CHAOS={uuid.uuid4().hex}"
        self.trial_root = fileroot / experiment / "trial0"

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
        return "\n".join(
            (self.fileroot / "output.log").read_text(errors="replace").splitlines()[-40:]
        )

    def last_step(self) -> int:
        """Return the last step with logged statistics, or -1."""
        path = self.trial_root / "stats" / "stats.jsonl"
        stats = read_stats(path) if path.exists() else []
        return stats[-1]["step"] if stats else -1

    def attempts(self) -> list[dict[str, Any]]:
        """Return the entries of `note_attempt`: one per start of training, over all starts of the
        driver.
        """
        return read_attempts(self.trial_root / "stats")

    def pids(self) -> dict[str, list[int]]:
        """Return the process ids by rank for each role (``driver``, ``trainer``, ``rollout``), as
        last written by the driver.

        The dict has only ``driver`` while the running driver has not written the file yet.
        """
        assert self._process is not None
        with contextlib.suppress(FileNotFoundError):
            processes = json.loads((self.trial_root / "stats" / "processes.json").read_text())
            if processes["driver"] == self._process.pid:
                return processes | {"driver": [self._process.pid]}
        return {"driver": [self._process.pid]}

    def kill(self, who: str, rank: int = 0) -> bool:
        """Send SIGKILL to the ``driver``, or to a rank of ``trainer`` or ``rollout``. False if it
        does not exist.
        """
        assert self._process is not None
        if who == "driver":
            self._process.kill()
            self._process.wait()
            return True
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(self.pids()[who][rank], signal.SIGKILL)
            return True
        return False

    def stop(self) -> None:
        """Kill the driver, if it runs, and with it all processes that it started."""
        if self._process is not None and self.exit_code() is None:
            self.kill("driver")

    def leftovers(self) -> list[int]:
        """Return running processes that any start of the driver began, including itself (Linux)."""
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if self._mark.encode() in environ.read_bytes().split(b"\0"):
                    found.append(int(environ.parent.name))
        return found

    def final_weights(self) -> Path:
        """The safetensors file of the final export."""
        (export,) = (self.trial_root / "hf").glob("global_step_*")
        return export / "model.safetensors"


def read_attempts(stats_folder: Path) -> list[dict[str, Any]]:
    """Return the entries that `note_attempt` wrote into the folder."""
    path = stats_folder / "attempts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
