"""Jobs of the scripts in examples/slurm, and what a test may do to them."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests.limits import stretched
from tests.slurm.cluster import Cluster, ask, until

ROOT = Path(__file__).parents[2]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED")
"""States of a job that has left the queue for good."""


@dataclass(frozen=True)
class Script:
    """A script with the arguments of a short job.

    Attributes:
        path: the file in ``examples/slurm``.
        program: the Python file that a rank or the driver runs.
        arguments: keys of the job. ``{run}`` stands for the folder of the run.
        stats: the log of steps below that folder.
        export: the trained model below it.
        resumed: the beginning of a line that each life prints which continues from a snapshot.
    """

    path: str
    program: str
    arguments: tuple[str, ...]
    stats: str
    export: str
    resumed: str


SFT = Script(
    path="examples/slurm/sft.sbatch",
    program="examples/sft.py",
    arguments=("trainer.default_local_dir={run}", "trainer.trackers=[]", "trainer.save_freq=1000"),
    stats="stats.jsonl",
    export="hf/global_step_99",
    resumed="restored from global_step_",
)
"""Two ranks on one node. 100 steps, of which only the last one takes a snapshot by itself."""
GRPO = Script(
    path="examples/slurm/grpo.sbatch",
    program="examples/grpo.py",
    arguments=(
        "fileroot={run}",
        "strategy=SPREAD",
        "total_steps=20",
        "batch_size=8",
        "n_samples=8",
        "trackers=[]",
        "recover.freq_steps=1000",
    ),
    stats="grpo_copy/trial0/stats/stats.jsonl",
    export="grpo_copy/trial0/hf/global_step_19",
    resumed="resumed: step ",
)
"""A driver, and a trainer on each of two nodes. As few snapshots."""


class Job:
    """A job in the queue, or one that has left it.

    Args:
        cluster: the SLURM.
        script: what it runs.
        run: folder of the run. Jobs with the same folder continue each other.
        options: those of sbatch.
        arguments: further keys of the job.
    """

    def __init__(
        self, cluster: Cluster, script: Script, run: Path, *options: str, arguments: tuple = ()
    ) -> None:
        self.cluster = cluster
        self.script = script
        self.run = run
        self._frozen: list[int] = []
        run.mkdir(parents=True, exist_ok=True)
        keys = [key.format(run=run) for key in (*script.arguments, *arguments)]
        output = f"--output={run}/%j.log"
        done = subprocess.run(
            ["sbatch", "--parsable", output, *options, script.path, *keys],
            cwd=ROOT,
            env={**os.environ, "VENV": sys.prefix},
            capture_output=True,
            text=True,
            timeout=stretched(60),
        )
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()

    # What SLURM and the job say

    @property
    def fields(self) -> dict[str, str]:
        """What ``scontrol show job`` prints."""
        words = ask("scontrol", "show", "job", "--oneliner", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def state(self) -> str:
        return self.fields["JobState"]

    @property
    def restarts(self) -> int:
        return int(self.fields["Restarts"])

    @property
    def seconds(self) -> int:
        """Seconds for which the job has run in this life."""
        *days, clock = self.fields["RunTime"].split("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        return sum(map(int, days)) * 86400 + hours * 3600 + minutes * 60 + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit."""
        end = datetime.fromisoformat(self.fields["EndTime"])
        return (end - datetime.now()).total_seconds()

    @property
    def code(self) -> str:
        """Exit code of the script and the signal that ended it, as ``75:0``."""
        return self.fields["ExitCode"]

    @property
    def log(self) -> str:
        """Output of all lives of the job."""
        path = self.run / f"{self.id}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def last_step(self) -> int:
        """The newest step in the run's statistics. -1 before the first one."""
        path = self.run / self.script.stats
        if not path.exists():
            return -1
        steps = [-1]
        for line in path.read_text().splitlines():
            try:
                steps.append(json.loads(line)["step"])
            except ValueError:  # a line that is being written
                continue
        return steps[-1]

    @property
    def resumes(self) -> int:
        """Number of lives that continued from a snapshot."""
        return self.log.count(self.script.resumed)

    @property
    def snapshots(self) -> list[int]:
        """Steps of the committed snapshots."""
        found = self.run.glob("**/global_step_*/manifest.json")
        return sorted(int(path.parent.name.rpartition("_")[2]) for path in found)

    @property
    def ranks(self) -> list[int]:
        """Process ids of the ranks (of the driver under Ray) in this process's namespace."""
        mine = f"SLURM_JOB_ID={self.id}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended
                continue
            runs = self.script.program.encode() in words and b"python" in words[0]
            starts_ranks = any(word.endswith(b"torchrun") for word in words)
            if runs and not starts_ranks and mine in environment:
                found.append(int(folder.name))
        return found

    def digest(self) -> str:
        """sha256 of the trained model."""
        digest = hashlib.sha256()
        files = sorted((self.run / self.script.export).iterdir())
        assert any(file.suffix == ".safetensors" for file in files), files
        for file in files:
            digest.update(file.name.encode())
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """Everything that helps after a failure."""
        shown = ask("scontrol", "show", "job", self.id)
        return f"{shown}\n{self.log[-5000:]}\n{self.cluster.logs()}"

    # Waits

    def wait_for_ranks(self, n_ranks: int) -> list[int]:
        """Wait until the ranks are processes. They still have to import everything. Return their
        ids.
        """
        self._until(lambda: len(self.ranks) == n_ranks, f"{n_ranks} ranks")
        return self.ranks

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is in the run's statistics."""
        self._until(lambda: self.last_step >= step, f"step {step}")

    def wait_for_restart(self, restarts: int) -> None:
        """Wait until the job was requeued this many times and runs again."""

        def runs_again() -> bool:
            self._start_now()
            return self.restarts >= restarts and self.state == "RUNNING"

        self._until(runs_again, f"restart {restarts}")

    def wait_for_pending(self, name: str) -> None:
        """Wait until a signal has come to all ranks. It is pending in a frozen rank, and a rank
        that has ended had it.
        """
        bit = 1 << (signal.Signals[f"SIG{name}"] - 1)

        def has_come_to(pid: int) -> bool:
            try:
                return bool(pending_signals(pid) & bit)
            except FileNotFoundError:
                return True

        def has_come() -> bool:
            return all(map(has_come_to, self._frozen))

        self._until(has_come, f"{name} to come to the ranks")

    def finish(self) -> None:
        """Wait until the job has left the queue for good, and check that it ended with 0."""
        self.end()
        assert (self.state, self.code) == ("COMPLETED", "0:0"), self.describe()

    def end(self) -> None:
        """Wait until the job has left the queue for good."""

        def has_ended() -> bool:
            self._start_now()
            return self.state in ENDED

        self._until(has_ended, f"the end of job {self.id}", timeout_s=300)

    def _start_now(self) -> None:
        # A job that was requeued waits two minutes, so that no node takes its new credentials for
        # the revoked ones, which it knows by the second in which they were made.
        fields = self.fields
        if fields["JobState"] == "PENDING" and fields["Reason"] == "BeginTime":
            time.sleep(2)
            ask("scontrol", "update", f"JobId={self.id}", "StartTime=now")

    def _until(self, condition: Callable[[], object], what: str, timeout_s: float = 120) -> None:
        until(condition, what, self.describe, timeout_s)

    # What a test does to it

    def freeze_at(self, step: int) -> None:
        """Stop the ranks after a step, as one that takes long. SLURM still counts the time."""
        self.wait_for_step(step)
        self.freeze()

    def freeze(self) -> None:
        """SIGSTOP the ranks. SLURM ends a job with SIGCONT and SIGTERM, which they see."""
        self._frozen = self.ranks
        assert self._frozen, f"job {self.id} has no ranks"
        for pid in self._frozen:
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT the ranks."""
        for pid in self.ranks:
            os.kill(pid, signal.SIGCONT)

    def limit_minutes(self, minutes: int) -> None:
        """Change the time limit of the running job."""
        ask("scontrol", "update", f"JobId={self.id}", f"TimeLimit={minutes}")


def pending_signals(pid: int) -> int:
    """Signals that wait for a process, one bit each."""
    status = Path(f"/proc/{pid}/status").read_text()
    lines = [line.split() for line in status.splitlines()]
    masks = {line[0]: line[1] for line in lines if len(line) == 2}
    return int(masks["ShdPnd:"], 16)
