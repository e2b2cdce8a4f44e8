"""``python -m benchmarks.goodput``: what kills cost a GRPO job, by the way of its recovery.

The job is examples/grpo_servers.py on CPUs: a driver, two trainers, and two servers that sample one
step ahead. They are the stand-ins for vLLM of the tests, with the real tiny model. Processes are
killed at moments of an exponential clock with a fixed seed, which starts with the first step, so
that each way meets the same moments and the same kinds of faults:

- ``trainer``, ``server``: one of these processes
- ``driver``: the process that a launcher has started
- ``job``: all processes of the job at once

The ways:

- ``holdfast``: snapshots in the background every few steps. A dead server or trainer is replaced
  while the driver goes on. After the death of the driver, a launcher starts the job again.
- ``blocking``: the same with snapshots that training waits for.
- ``areal``: snapshots that training waits for, without the prompts in flight. After the death of
  any process a launcher ends all of them, and starts the job again.

The launcher is this process. It starts the job at once, where a real one takes longer. A fault
whose process does not exist, because it is just being started, strikes as soon as it does.
"""

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from examples.chaos import GrpoRun, sha256
from examples.tiny_models import EOS_ID
from holdfast.recover.storage.wall_time import RunningTime
from holdfast.utils.errors import HoldfastError
from tests.engine.launch.stand_in import ROOT, stand_in_environment

from .harness import Options, describe_machine

KINDS = ("trainer", "server", "driver", "job")
WAYS: dict[str, tuple[str, ...]] = {
    "holdfast": (),
    "blocking": ("recover.async_save=false",),
    "areal": ("recover.async_save=false", "keeps_rollouts=false"),
}
"""Settings of the job, by way."""
WHOLE = "areal"
"""The way in which every fault ends the whole job."""
ANSWER_TOKENS = 5
"""Most tokens of an answer in examples/copy_task.py."""
SEED = 6
"""With it the first four faults are of all four kinds, beginning with a trainer and the driver."""
_LAST_STEPS = 10
_POLL_S = 0.02
_GONE_S = 10.0
_TRAINER = "ray::RankActor"
_SERVER = ["-m", "vllm.entrypoints.openai.api_server"]


@dataclass(frozen=True)
class Size:
    """Length of the runs, and how often they are struck."""

    steps: int
    batch_size: int  # prompts per step
    n_samples: int  # answers to each prompt
    freq_steps: int  # steps between two snapshots
    means_s: tuple[float, ...]  # mean time between faults
    most_faults: int  # of a run
    limit_s: float  # time after which a run is given up


FULL = Size(200, 8, 4, 5, (60.0, 40.0, 20.0), 1000, 600.0)
QUICK = Size(12, 2, 2, 2, (1.0,), 2, 600.0)


class RunFailed(HoldfastError, RuntimeError):
    """A run has ended with an error, or a process did not die."""


@dataclass(frozen=True)
class Fault:
    """A kill: of which process, and how many seconds after the first step."""

    kind: str
    at_s: float


@dataclass(frozen=True)
class Struck:
    """A fault that was seen to happen: a process that existed is gone."""

    kind: str
    planned_s: float
    struck_s: float
    pid: int
    created: float  # start of the process, in seconds since the epoch


def draw_faults(count: int, mean_s: float) -> list[Fault]:
    """Faults at the times of a Poisson process with this mean distance."""
    dice = random.Random(SEED)
    at_s = 0.0
    faults: list[Fault] = []
    for _ in range(count):
        at_s += dice.expovariate(1 / mean_s)
        kind = dice.choice(KINDS)
        faults.append(Fault(kind, at_s))
    return faults


class Launcher:
    """Runs a job to its end, strikes it, and starts it again when it ended because of that.

    Attributes:
        struck: the faults so far.
        exits: how often the driver has ended with an error, though no fault had killed it.
        wall_s: seconds from the first start to the end.
    """

    def __init__(self, run: GrpoRun, faults: Sequence[Fault], whole: bool) -> None:
        self.struck: list[Struck] = []
        self.exits = 0
        self.wall_s = 0.0
        self._run = run
        self._faults = faults
        self._whole = whole
        self._killed = False  # whether a fault has killed the driver since its last start
        self._first_step_s: float | None = None
        self._clock_s = 0.0
        self._dice = random.Random(SEED)

    def finish(self, limit_s: float) -> bool:
        """Run to the end. False if that takes longer than ``limit_s``.

        Raises:
            RunFailed: the job has ended with an error, though nothing had struck it.
        """
        started_s = time.monotonic()
        self._run.start()
        n_before = 0  # faults before the last start
        try:
            while True:
                self.wall_s = time.monotonic() - started_s
                self._read_clock()
                code = self._run.exit_code()
                if code == 0:
                    return True
                if self.wall_s > limit_s:
                    return False

                # The driver was killed, or gave up: no server may die before all are up.
                if code is not None:
                    self.exits += not self._killed
                    self._killed = False
                    if len(self.struck) == n_before:
                        raise RunFailed(f"the job ended with {code}:\n{self._run.log_tail()}")
                    n_before = len(self.struck)
                    self._run.start()
                elif self._is_due():
                    self._strike(self._faults[len(self.struck)])
                time.sleep(_POLL_S)
        finally:
            self._end_all()

    def _read_clock(self) -> None:
        # The clock of the faults goes on while the job is started again.
        if self._first_step_s is None and self._run.last_step() >= 0:
            self._first_step_s = self.wall_s
        if self._first_step_s is not None:
            self._clock_s = self.wall_s - self._first_step_s

    def _is_due(self) -> bool:
        n_struck = len(self.struck)
        return n_struck < len(self._faults) and self._faults[n_struck].at_s <= self._clock_s

    def _strike(self, fault: Fault) -> None:
        """Kill what a fault names, if it exists now."""
        try:
            target = self._target(fault.kind)
            if target is None:
                return
            # The start tells this process from a later one with its number.
            created = target.create_time()
            if fault.kind == "job" or self._whole:
                self._end_all()
            elif fault.kind == "driver":
                self._run.kill("driver")
            else:
                target.kill()
        except psutil.NoSuchProcess:
            return  # it has ended by itself, and the fault waits for its successor

        # Only a fault that was seen to happen counts.
        _require_gone(target)
        self._killed = self._whole or fault.kind in ("driver", "job")
        struck_s = round(self._clock_s, 2)
        self.struck.append(
            Struck(fault.kind, round(fault.at_s, 2), struck_s, target.pid, round(created, 2))
        )

    def _target(self, kind: str) -> psutil.Process | None:
        """A process that a fault of this kind kills. None: there is none now."""
        driver = psutil.Process(self._run.pids()["driver"][0])
        if driver.status() == psutil.STATUS_ZOMBIE:
            return None  # it has ended by itself
        if kind in ("driver", "job"):
            return driver
        found = [process for process, name in _workers(driver) if name == kind]
        return self._dice.choice(found) if found else None

    def _end_all(self) -> None:
        """Kill all processes of the job. The driver comes first, so that it replaces none."""
        if self._run.exit_code() is not None:
            return
        driver = psutil.Process(self._run.pids()["driver"][0])
        others = driver.children(recursive=True)
        self._run.kill("driver")
        for process in others:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process in others:
            _require_gone(process)


def _workers(driver: psutil.Process) -> Iterator[tuple[psutil.Process, str]]:
    """The trainers and servers below a driver, and their kinds."""
    for process in driver.children(recursive=True):
        # It may end meanwhile. The guard of a server has its command as arguments, too.
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.name().startswith(_TRAINER):
                yield process, "trainer"
            elif process.cmdline()[1:3] == _SERVER:
                yield process, "server"


def _require_gone(process: psutil.Process) -> None:
    end_s = time.monotonic() + _GONE_S
    while time.monotonic() < end_s:
        try:
            # A zombie is dead, too.
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(_POLL_S)
    raise RunFailed(f"process {process.pid} is there {_GONE_S:g} s after its kill")


def count_answers(record: Path) -> int:
    """Complete answers that the servers have sampled, by the record of each of their tokens."""
    n_answers = 0
    for file in record.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            # A kill may tear the last line.
            with suppress(ValueError):
                entry = json.loads(line)
                is_last = entry.get("position") == ANSWER_TOKENS - 1
                n_answers += is_last or entry.get("token") == EOS_ID
    return n_answers


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        way: one of `WAYS`, or ``undisturbed``.
        mean_s: mean time between faults. None: there were none.
        struck: the faults that happened.
        finished: whether it ended within the limit, and without an error.
        wall_s: seconds from the first start to the end.
        goodput: share of the run's wall time on steps that count (`holdfast goodput`).
        again: steps that were done again.
        samples_lost: answers that were sampled, and are in no step that counts.
        reward: mean over the last steps.
        weights: SHA-256 of the final weights.
        exits: of the driver with an error, though no fault had killed it.
        reason: the error with which the run has failed.
    """

    way: str
    mean_s: float | None
    struck: list[Struck]
    finished: bool
    wall_s: float
    goodput: float
    again: int
    samples_lost: int
    reward: float
    weights: str | None
    exits: int = 0
    reason: str | None = None


def measure(folder: Path, way: str, size: Size, mean_s: float | None) -> Row:
    """Run the job once in a new folder, and strike it unless ``mean_s`` is None."""
    # The servers find the stand-in for vLLM, and record each token that they sample.
    record = folder / "record"
    record.mkdir(parents=True)
    os.environ |= stand_in_environment(FAKE_VLLM_RECORD=str(record))
    os.environ["PYTHONPATH"] += os.pathsep + str(ROOT / "examples")

    # The supervisor of the job never gives up. It has no effect if every fault ends the job.
    run = GrpoRun(
        folder / "run",
        f"total_steps={size.steps}",
        f"batch_size={size.batch_size}",
        f"n_samples={size.n_samples}",
        f"recover.freq_steps={size.freq_steps}",
        f"python={sys.executable}",
        "recover.retries=100000",
        "trackers=[]",
        *WAYS.get(way, ()),
        script="benchmarks.goodput_job",
        experiment="grpo_servers",
    )

    # The same faults for each way. The undisturbed run has none.
    faults: list[Fault] = []
    if mean_s is not None:
        faults = draw_faults(size.most_faults, mean_s)
    launcher = Launcher(run, faults, whole=way == WHOLE)
    finished = False
    reason = None
    try:
        finished = launcher.finish(size.limit_s)
    except (RunFailed, psutil.Error) as error:
        reason = str(error)

    # The figures come from the files that the run and the servers have left.
    spent = RunningTime(run.trial_root).read()
    rewards = [line["reward"] for line in run.stats()[-_LAST_STEPS:]]
    answers = size.batch_size * size.n_samples
    return Row(
        way=way if mean_s is not None else "undisturbed",
        mean_s=mean_s,
        struck=launcher.struck,
        finished=finished,
        wall_s=round(launcher.wall_s, 1),
        goodput=round(spent.goodput, 4),
        again=spent.n_again,
        samples_lost=count_answers(record) - answers * spent.n_steps,
        reward=round(fmean(rewards), 3) if rewards else 0.0,
        weights=sha256(run.final_weights()) if finished else None,
        exits=launcher.exits,
        reason=reason,
    )


def table(rows: Sequence[Row], machine: dict[str, Any], size: Size) -> str:
    """The rows in Markdown. The first one is the undisturbed run."""
    lines = [
        f"{size.steps} steps of {size.batch_size} prompts and {size.n_samples} answers to each, a "
        f"snapshot every {size.freq_steps} steps; {machine['cores']} cores, load average "
        f"{machine['load_average']:.1f} at the end.",
        "",
        "| way | mean s between faults | faults | other exits | wall s | goodput "
        "| steps done again | samples lost | reward | weights |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    # Weights are compared with the first run.
    undisturbed = rows[0].weights
    for row in rows:
        kinds = Counter(one.kind for one in row.struck)
        faults = "none"
        if kinds:
            of_kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            faults = f"{len(row.struck)}: {of_kinds}"
        weights = "not finished"
        if row.reason is not None:
            weights = f"failed: {row.reason.splitlines()[0]}"
        elif row.finished and undisturbed is None:
            weights = "not compared"
        elif row.finished:
            weights = "equal" if row.weights == undisturbed else "others"
        mean = "" if row.mean_s is None else f"{row.mean_s:g}"
        lines.append(
            f"| {row.way} | {mean} | {faults} | {row.exits} | {row.wall_s:.0f} "
            f"| {row.goodput:.1%} | {row.again} | {row.samples_lost} | {row.reward:.3f} "
            f"| {weights} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ways, and write ``goodput.json`` and ``goodput.md`` after each run.

    Returns:
        1 if a run has failed.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, to test the benchmark")
    parser.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the results")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument(
        "--means", nargs="+", type=float, help="mean seconds between faults (default: all three)"
    )
    given = parser.parse_args(argv)
    size = QUICK if given.quick else FULL
    means_s = given.means or size.means_s
    given.out.mkdir(parents=True, exist_ok=True)
    scratch = (given.out / "goodput-scratch").absolute()

    # The moments depend on the mean, and not on the way.
    runs: list[tuple[str, float | None]] = [("holdfast", None)]
    for mean_s in means_s:
        runs += [(way, mean_s) for way in given.ways]
    rows: list[Row] = []
    for number, (way, mean_s) in enumerate(runs):
        shutil.rmtree(scratch, ignore_errors=True)
        row = measure(scratch / str(number), way, size, mean_s)
        rows.append(row)

        # Written after each run, so that a later failure loses nothing.
        machine = describe_machine(Options(0, 2, 1, "cpu", scratch))
        document = {
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "machine": machine,
            "size": asdict(size),
            "rows": [asdict(each) for each in rows],
        }
        (given.out / "goodput.json").write_text(json.dumps(document, indent=1) + "\n")
        (given.out / "goodput.md").write_text(table(rows, machine, size))
        print(table(rows, machine, size).splitlines()[-1], flush=True)
    shutil.rmtree(scratch, ignore_errors=True)
    print(f"{given.out / 'goodput.md'}, goodput.json next to it")
    return int(any(row.reason is not None for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
