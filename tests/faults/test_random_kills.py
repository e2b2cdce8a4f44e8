"""The GRPO example under random signals ends with the bytes of an undisturbed run.

SIGKILL to a random process (driver, trainers, rollout worker, also while they start), SIGSTOP to a
random worker, SIGTERM to the driver, in random order at random moments, recoveries included.
Meanwhile a watcher verifies every visible generation. ``HOLDFAST_KILLS=50 HOLDFAST_SEED=7 pytest -m
slow -s tests/faults/test_random_kills.py`` runs another sequence of signals.
"""

import math
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.chaos import GrpoRun, sha256, untimed
from holdfast.engine.workers.actor import RankActor
from holdfast.recover.storage.generations import Generation, GenerationStore
from holdfast.utils.errors import CheckpointError, Preempted
from holdfast.utils.metrics import read_stats
from tests.faults.share import SHARE
from tests.faults.tally import Tally
from tests.limits import stretched

AMOUNTS = {
    "SIGKILL": int(os.environ.get("HOLDFAST_KILLS", math.ceil(300 * SHARE))),
    "SIGSTOP": int(os.environ.get("HOLDFAST_STOPS", math.ceil(20 * SHARE))),
    "SIGTERM": int(os.environ.get("HOLDFAST_TERMS", math.ceil(20 * SHARE))),
}
KINDS = {
    "SIGKILL": "SIGKILL of a random process",
    "SIGSTOP": "SIGSTOP of a random worker",
    "SIGTERM": "SIGTERM to the driver",
}
SEED = int(os.environ.get("HOLDFAST_SEED", "0"))

STEPS = 40
# An epoch has 15 steps, so the run reshuffles twice. Every other step has a snapshot, so kills
# often hit one.
SETTINGS = (
    f"total_steps={STEPS}",
    "n_prompts=60",
    "batch_size=4",
    "n_samples=4",
    "trackers=[]",
    "hang_timeout_s=3",
    "recover.freq_steps=2",
    "recover.retries=1000",
)
MESHES = {
    "fsdp": (),
    "r2": ("backend=fsdp:d2", "actor.fsdp.replicate_size=2"),
}
"""Settings of each mesh of two trainers. The first one gets all signals, each other one a tenth."""
LONGEST_WAIT_S = 5.0
PATIENCE_S = stretched(300.0)
GONE_S = stretched(90.0)  # Ray's agents outlive a killed raylet by half a minute


_NONE = Generation(-1, Path())
_WORKER = f"ray::{RankActor.__name__}"
"""Name of Ray's processes of ranks."""


class Watcher:
    """Verifies every visible generation and every resumption until it is stopped.

    Attributes:
        verified: number of generations.
        problems: violations.
    """

    def __init__(self, run: GrpoRun) -> None:
        self._run, self._store = run, GenerationStore(run.trial_root / "recover")
        self._newest, self._n_attempts = -1, 0
        self._ended = threading.Event()
        self._seen: set[tuple[str, int]] = set()
        self.verified, self.problems = 0, list[str]()

    @contextmanager
    def watching(self) -> Iterator["Watcher"]:
        """Watch in a separate thread during the block."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            try:
                self._look()
            except Exception as error:  # silence would look like success
                self.problems.append(f"the watcher failed: {type(error).__name__}: {error}")
                return

    def _look(self) -> None:
        newest = max(
            generation.step for _ in range(3) for generation in self._store.generations() or [_NONE]
        )
        if newest < self._newest:  # one listing can miss a rename, three cannot
            self.problems.append(
                f"step {self._newest} was committed, and now the newest is {newest}"
            )
        attempts = self._run.attempts()
        for attempt in attempts[self._n_attempts :]:
            # A generation visible at the last look was committed before this attempt searched for
            # one.
            if attempt["step"] <= self._newest:
                self.problems.append(
                    f"step {self._newest} was committed, but step {attempt['step']} is trained "
                    "again"
                )
        self._newest, self._n_attempts = newest, len(attempts)
        for generation in self._store.generations():
            try:
                identity = generation.path.name, generation.path.stat().st_ino
                if identity not in self._seen:
                    self._store.verify(generation.path)
                    self._seen.add(identity)
                    self.verified += 1
            except (CheckpointError, OSError) as error:
                if generation.path.exists():  # otherwise it was deleted while it was read
                    self.problems.append(f"visible, but bad: {error}")
        if rejected := [path.name for path in self._store.quarantined()]:
            self.problems.append(f"quarantined: {rejected}")


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _gone(pid: int) -> bool:
    return not _alive(pid)


def workers(run: GrpoRun) -> dict[int, str]:
    """Process id -> role of every living rank, including groups that still start."""
    pids = run.pids()
    roles = {pid: f"{who} {rank}" for who, ranks in pids.items() for rank, pid in enumerate(ranks)}
    found = {}
    with suppress(psutil.NoSuchProcess):  # the driver has ended
        for process in psutil.Process(pids["driver"][0]).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE and process.name().startswith(_WORKER):
                    found[process.pid] = roles.get(process.pid, "a starting worker")
    return found


def _trains(run: GrpoRun) -> bool:
    """Whether all workers that the driver named last are running."""
    pids = run.pids()
    return "trainer" in pids and all(_alive(pid) for pid in (*pids["trainer"], *pids["rollout"]))


class Storm:
    """Sends signals to one run, at times and to processes chosen by ``dice``.

    Args:
        run: a started run.
        dice: the random numbers.
    """

    def __init__(self, run: GrpoRun, dice: random.Random) -> None:
        self.run, self._dice = run, dice

    def strike(self, kind: str) -> str | None:
        """Send one signal at a random moment and name its target. None if the run ended before."""
        self._wait_for_a_moment()
        if self.run.exit_code() is None:
            return {"SIGKILL": self._kill, "SIGSTOP": self._stop, "SIGTERM": self._terminate}[
                kind
            ]()
        return None

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Return False if the run ended instead."""
        self.run.wait_until(lambda: self.run.exit_code() is not None or condition(), PATIENCE_S)
        return self.run.exit_code() is None

    def _wait_for_a_moment(self) -> None:
        """Choose the next moment: at once, at a random time (usually during recovery), or some
        steps later.
        """
        if (draw := self._dice.random()) < 2 / 3:
            time.sleep(self._dice.uniform(0.0, 0.3 if draw < 1 / 3 else LONGEST_WAIT_S))
            return
        attempts, steps = len(self.run.attempts()), self._dice.randrange(6)
        goal = min(self.run.last_step() + steps, STEPS - 1)
        self._wait(lambda: self.run.last_step() >= goal or len(self.run.attempts()) > attempts + 2)
        time.sleep(self._dice.uniform(0.0, 0.5))

    def _kill(self) -> str | None:
        """Kill a process: the driver, which takes longest to come back, one time in five or if it
        is alone.
        """
        while self.run.exit_code() is None:
            others = workers(self.run)
            if not others or self._dice.random() < 0.2:
                self.run.kill("driver")
                self.run.start()
                return "the driver"
            pid = self._dice.choice(sorted(others))
            with suppress(
                ProcessLookupError
            ):  # it has just ended by itself, for example after the death of another
                os.kill(pid, signal.SIGKILL)
                return others[pid]
        return None

    def _stop(self) -> str | None:
        """Stop a worker of a group that is up (starting has a longer timeout), and wait until it is
        killed.
        """
        while self._wait(lambda: _trains(self.run)):
            pids = self.run.pids()
            pid = self._dice.choice([*pids["trainer"], *pids["rollout"]])
            role = workers(self.run).get(pid)
            with suppress(ProcessLookupError):
                if role is not None:
                    os.kill(pid, signal.SIGSTOP)
                    self._wait(partial(_gone, pid))
                    return role
        return None

    def _terminate(self) -> str | None:
        """Terminate the driver during training. It must snapshot the current step and exit with the
        right code.
        """
        goal = self.run.last_step() + 2
        if not self._wait(lambda: self.run.last_step() >= goal and _trains(self.run)):
            return None
        os.kill(self.run.pids()["driver"][0], signal.SIGTERM)
        code, step = self.run.wait(PATIENCE_S), self.run.last_step()
        if code == 0 and step == STEPS - 1:
            return None
        newest = GenerationStore(self.run.trial_root / "recover").generations()[0].step
        # After the last snapshot no step handles the signal. It is passed on to Ray's handler.
        codes = {Preempted.EXIT_CODE} | (
            {signal.SIGTERM, -signal.SIGTERM} if step == STEPS - 1 else set()
        )
        assert code in codes and newest == step, f"{code}, {newest}, {step}: {self.run.log_tail()}"
        self.run.start()
        return "the driver"


def numbers(run: GrpoRun) -> list[dict[str, Any]]:
    """Logged numbers of each step, in order, without times."""
    return untimed(read_stats(run.trial_root / "stats" / "stats.jsonl"))


def flaws(run: GrpoRun, reference: GrpoRun) -> list[str]:
    """Differences between a finished run and the undisturbed one."""
    found = []
    if code := run.exit_code():
        return [f"it ended with {code}:\n{run.log_tail()}"]
    if sha256(run.final_weights()) != sha256(reference.final_weights()):
        found.append("the final weights are others")
    ours, theirs = numbers(run), numbers(reference)
    if [entry["step"] for entry in ours] != list(range(STEPS)):
        found.append(f"steps are lost or logged twice: {[entry['step'] for entry in ours]}")
    found += [
        f"step {one['step']} has other numbers"
        for one, other in zip(ours, theirs, strict=False)
        if one != other
    ]
    hidden = [path.name for path in run.trial_root.glob("*/.*")]
    found += [
        f"{name} was left"
        for name in hidden
        if not name.startswith((".staging-", ".retired-", ".lock"))
    ]
    end = time.monotonic() + GONE_S
    while (left := run.leftovers()) and time.monotonic() < end:
        time.sleep(0.1)
    return found + ([f"processes {left} were left"] if left else [])


@pytest.mark.slow
@pytest.mark.timeout(900 + 60 * sum(AMOUNTS.values()))
@pytest.mark.parametrize("mesh", MESHES)
def test_whatever_is_killed_or_stopped_the_run_ends_with_equal_bytes(
    tmp_path: Path, tally: Tally, say: Callable[[str], None], mesh: str
) -> None:
    settings, share = (*SETTINGS, *MESHES[mesh]), 1.0 if mesh == "fsdp" else 0.1
    reference = GrpoRun(tmp_path / "reference", *settings, "recover.mode=off")
    reference.start()
    assert reference.wait(PATIENCE_S) == 0, reference.log_tail()
    dice, n_runs, n_verified = random.Random(SEED), 0, 0
    struck = Counter[bool]()  # whether the driver was hit
    signals = [kind for kind, amount in AMOUNTS.items() for _ in range(math.ceil(amount * share))]
    dice.shuffle(signals)
    n_signals = len(signals)
    while signals:
        run, sent = GrpoRun(tmp_path / f"run_{n_runs}", *settings), Counter[str]()
        run.start()
        storm = Storm(run, dice)
        with Watcher(run).watching() as watcher:
            try:
                started = time.monotonic()
                while signals and (who := storm.strike(signals[-1])) is not None:
                    kind = signals.pop()
                    struck[who == "the driver"] += 1
                    sent[kind] += 1
                    tally.add(KINDS[kind], injected=1)
                    took_s, step = time.monotonic() - started, run.last_step()
                    started = time.monotonic()
                    number = n_signals - len(signals)
                    say(
                        f"{number} of {n_signals}: {kind} to {who} after step {step} of run "
                        f"{n_runs}, {took_s:.1f} s"
                    )
                run.wait(PATIENCE_S)
            finally:
                run.stop()
        problems = watcher.problems[:5] + flaws(run, reference)
        for kind, amount in sent.items():
            tally.add(KINDS[kind], **{"lost" if problems else "survived": amount})
        assert not problems, f"run {n_runs}, after {dict(sent)} (seed {SEED}):\n" + "\n".join(
            problems
        )
        n_runs, n_verified = n_runs + 1, n_verified + watcher.verified
        say(
            f"run {n_runs - 1} ended well after {dict(sent)}; {n_verified} generations verified "
            "so far"
        )
    assert n_verified >= n_runs * STEPS // 4, "the watcher has seen hardly any generation"
    assert struck[False], "no worker was ever found to send a signal to"
