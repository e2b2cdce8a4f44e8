"""The job of `test_episode_kills` as a driver on Ray, whose trainer and driver are killed in turns.

When a trainer is lost, the `Supervisor` runs the job again in the same process.
"""

import os
import signal
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import ray

from holdfast.recover import RecoverConfig
from holdfast.recover.supervisor import Attempt, Supervisor
from tests.engine.servers.fakes import FakeServer
from tests.integration.episode_job import (
    BATCH_SIZE,
    EpisodeJob,
    Trainer,
    Trainers,
    drive,
    wait_for_tokens,
)
from tests.integration.test_episode_kills import (
    TOKENS_PER_TICKET,
    Known,
    Run,
    check_equal,
    check_life,
    check_ratio,
    check_trained,
    recorded,
)
from tests.integration.test_episode_kills import drive as drive_killed
from tests.limits import stretched, wait_until
from tests.ray_helpers import local_ray, worker_environment

__all__ = ["local_ray"]
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(300)]

TRAINERS = "trainers"
GO = "go"
VICTIMS = ("trainer", "driver", "trainer", "driver")


def drive_on_ray(job: EpisodeJob, address: str) -> None:
    """Run the driver."""
    ray.init(address, log_to_driver=False, runtime_env=worker_environment())
    Supervisor(RecoverConfig("e", "t", fileroot=job.root)).run(partial(attempt_job, job))


def attempt_job(job: EpisodeJob, attempt: Attempt) -> None:
    """Name the trainers of an attempt in a file, wait for the test, and run it."""
    group = attempt.worker_group(Trainer, name="trainer", world_size=job.ranks)
    file = Path(job.root) / TRAINERS
    file.with_suffix(".new").write_text(" ".join(map(str, group.pids())))
    file.with_suffix(".new").replace(file)
    go = file.with_name(GO)
    wait_until(go.exists, 60)
    go.unlink()
    drive(job, Trainers(group))


class Driver:
    """A driver in a process of its own."""

    def __init__(self, job: EpisodeJob) -> None:
        self._trainers = Path(job.root) / TRAINERS
        self._trainers.unlink(missing_ok=True)
        address = ray.get_runtime_context().gcs_address
        # The fork server began before this Ray, which has set variables with which it asks for a
        # token.
        context = get_context("spawn")
        self.process: Any = context.Process(target=drive_on_ray, args=(job, address))
        self.process.start()

    def wait_for_attempt(self) -> None:
        """Wait until an attempt waits for `begin`."""
        wait_until(lambda: self._trainers.exists() or not self.process.is_alive(), 60)
        assert self.process.is_alive()
        self._pids = [int(pid) for pid in self._trainers.read_text().split()]
        self._trainers.unlink()

    def begin(self) -> None:
        """Let the attempt begin."""
        self._trainers.with_name(GO).touch()

    def kill_trainer(self) -> None:
        os.kill(self._pids[-1], signal.SIGKILL)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(stretched(20))


@pytest.mark.slow
def test_a_driver_whose_trainers_are_lost_samples_no_recorded_answer_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 10, "ahead": 2, "freq_steps": 3, "ranks": 2}
    untouched = drive_killed(tmp_path / "untouched", 0, **options)
    root = tmp_path / "killed"
    root.mkdir()
    with FakeServer("vllm", root, token_s=0.005, of_version=False) as server:
        job = EpisodeJob(str(root), server.url, **options)
        (record,) = root.glob("vllm-*.jsonl")
        share = job.steps * BATCH_SIZE * TOKENS_PER_TICKET // (len(VICTIMS) + 1)
        known = recorded(root, server)
        driver = Driver(job)
        try:
            for victim in VICTIMS:
                known = next_attempt(driver, root, server, known)
                wait_for_tokens(record, share, driver.process.is_alive)
                assert driver.process.is_alive()
                if victim == "trainer":
                    driver.kill_trainer()
                else:
                    driver.kill()
                    driver = Driver(job)
            known = next_attempt(driver, root, server, known)
            driver.process.join(stretched(120))
            assert driver.process.exitcode == 0
        finally:
            driver.kill()
        check_life(server, known, may_drop=False)
        killed = Run(job, server.record())
    check_trained(killed, len(VICTIMS))
    check_equal(untouched, killed)
    check_ratio(killed, len(VICTIMS))


def next_attempt(driver: Driver, root: Path, server: FakeServer, known: Known) -> Known:
    """Check the attempt that has ended, whose records were ``known``. Let the next one begin, and
    return its records.
    """
    driver.wait_for_attempt()
    check_life(server, known, may_drop=False)
    known = recorded(root, server)
    driver.begin()
    return known
