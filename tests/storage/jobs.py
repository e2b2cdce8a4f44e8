"""A training job with a mirror, in a process of its own that tests can kill."""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.recover.storage.mirror import CopyState, Mirror
from holdfast.utils.errors import MirrorError
from holdfast.utils.logging import configure_logging
from holdfast.utils.remote import RemoteFolder
from holdfast.utils.rng import seed_rng
from tests.limits import stretched
from tests.recover import mirrors
from tests.recover.runs import Job, make_handler, make_loader, stream, train_steps

STEPS = 12
"""Steps of a whole run, with a snapshot and a copy after every second one."""


class Record(NamedTuple):
    """One step of a job: everything that tests compare, as text."""

    step: int
    result: str


class JobProcess:
    """A job on one rank. Each start trains until ``steps``, then waits for its copies and ends.

    Attributes:
        folder: folder of its runs, which a test may remove.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        url: str | None,
        environment: dict[str, str],
        steps: int = STEPS,
    ) -> None:
        self.folder = folder / "runs"
        self._records = folder / "records.jsonl"
        self._log = folder / "job.log"
        self._args = (str(model), str(self.folder), url, steps, str(self._records), str(self._log))
        self._environment = environment
        self._process: Any = None

    def start(self) -> None:
        self._records.unlink(missing_ok=True)
        self._process = mirrors.start(_train, self._environment, *self._args)

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()
        self._process.join()

    def wait(self, limit_s: float = 120.0) -> list[Record]:
        """Wait for its end and return the steps since its start."""
        self._process.join(stretched(limit_s))
        if self._process.exitcode != 0:
            self.kill()
            raise AssertionError(f"exit code {self._process.exitcode}\n{self.log()[-6000:]}")
        return self.records()

    def records(self) -> list[Record]:
        """Steps since its start."""
        lines = self._records.read_text().splitlines()
        return [Record(*json.loads(line)) for line in lines]

    def log(self) -> str:
        """What it logged in all its starts."""
        return self._log.read_text()


def run_undisturbed(model: Path, folder: Path) -> list[Record]:
    """Run a whole job without copies."""
    job = JobProcess(model, folder, None, {})
    job.start()
    return job.wait()


def _train(model: str, folder: str, url: str | None, steps: int, records: str, log: str) -> None:
    # Everything that it prints is for the log.
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    configure_logging()
    seed_rng(1, 0)
    job = Job(model)
    loader = make_loader("own", 0, 1)
    with make_handler(
        folder, freq_steps=2, max_ckpt_to_keep=2, mirror_url=url, mirror_max_to_keep=2
    ) as handler:
        first = handler.first_step(handler.load(job.engine, loader)).global_step
        for step, found in train_steps(job, stream(loader), first, steps - first):
            handler.dump(job.engine, step, loader)
            del found["meter"]  # an object of a user, which this job does not save
            with open(records, "a") as file:
                json.dump([step.global_step, repr(found)], file)
                file.write("\n")
            # Each snapshot gets its copy, however slow the storage is.
            mirror = handler._folder.mirror
            if mirror is not None:
                mirror.wait(stretched(60))
    sys.stdout.flush()


def mirror_of(url: str) -> Mirror:
    """The mirror of the job."""
    return Mirror(f"{url}/e/t", None)


def copies_at(url: str) -> dict[int, CopyState]:
    """States of the copies of the job. SeaweedFS keeps folders of removed objects for a while."""
    states = mirror_of(url).states()
    return {step: state for step, state in states.items() if state != "empty"}


def wait_for_a_copy(url: str, job: JobProcess, after: int) -> None:
    """`wait_for_marker` at the mirror of a job, which must not end before."""
    wait_for_marker(f"{url}/e/t", after, still=lambda: job.is_running)


def wait_for_marker(url: str, after: int, still: Callable[[], bool]) -> None:
    """Wait until the copy of a step after this one has begun and is not finished, as long as its
    process is ``still`` there.
    """
    remote = RemoteFolder(url, setting="the URL", error=MirrorError)
    deadline = time.monotonic() + stretched(120)
    while not any(_copied_step(name) > after for name in remote.names()):
        assert still() and time.monotonic() < deadline, f"no copy was seen at {url}"
        time.sleep(0.01)


def _copied_step(name: str) -> int:
    found = re.fullmatch(r"\.copying-global_step_(\d+)", name)
    return -1 if found is None else int(found[1])
