"""Supervisor on a real Ray: workers are killed, jobs come back."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.util import placement_group_table

import holdfast.recover.supervisor
from holdfast.engine.workers.group import WorkerGroup
from holdfast.engine.workers.placement import PlacementRequest, WorkerResources, place
from holdfast.recover import RecoverConfig
from holdfast.recover.storage.journal import Journal
from holdfast.recover.supervisor import Attempt, Supervisor, _Losses
from holdfast.utils.errors import (
    ConfigError,
    FolderInUseError,
    Preempted,
    RetriesExhausted,
    Terminated,
    WorkerLost,
)
from tests.limits import stretched, wait_until
from tests.ray_helpers import (
    ROOT,
    MortalServer,
    Server,
    SlowToBuild,
    UserBugError,
    Worker,
    kill_after,
    local_ray,
    running,
)
from tests.recover.cli.commands import answer
from tests.recover.runs import Tiny, make_handler
from tests.tiers import slow_but

__all__ = ["local_ray"]
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(120)]


class DiesAtStart(Server):
    """Never comes up."""

    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def live_placements() -> int:
    return sum(entry["state"] != "REMOVED" for entry in placement_group_table().values())


def lose(group: WorkerGroup) -> None:
    """Kill the last rank and notice."""
    os.kill(group.pids()[-1], signal.SIGKILL)
    group.call_all("add")


@pytest.mark.slow
def test_a_job_that_loses_workers_runs_again_in_the_same_places() -> None:
    pids: list[int] = []
    placements, numbers, losses, counts = [], [], [], []

    def job(attempt: Attempt) -> int:
        numbers.append(attempt.number)
        losses.append(attempt.last_loss)
        trainer = attempt.worker_group(Worker, name="trainer", world_size=2, kwargs={"base": 5})
        rollout = attempt.worker_group(Server, name="rollout", process_group=False)
        placements.append([trainer.placement.ids(), rollout.placement.ids()])
        counts.append(live_placements())
        assert not any(running(pid) for pid in pids)
        pids.extend(trainer.pids() + rollout.pids())
        with pytest.raises(ConfigError, match="'rollout' already"):
            attempt.worker_group(Server, name="rollout")
        if attempt.number == 0:
            kill_after(0.2, trainer.pids()[1])
            trainer.call_all("reduce_forever")
        return trainer.call_all("publish", rollout.server(), "weights/v3", 3)[0]

    supervisor = Supervisor()
    assert supervisor.run(job) == 3
    assert numbers == [0, 1]
    assert placements[0] == placements[1] and counts == [2, 2]
    assert losses[0] is None and losses[1].ranks == [1]
    (event,) = supervisor.events
    assert (event.group, event.ranks, event.attempt) == ("trainer", [1], 0)
    assert event.cause and 0 <= event.torn_down_s < stretched(2)
    assert event.rebuilt_s is not None and event.torn_down_s < event.rebuilt_s
    assert not any(running(pid) for pid in pids)
    assert live_placements() == 0


@pytest.mark.slow
def test_a_rollout_that_is_lost_is_started_again_alone(tmp_path: Path) -> None:
    lives = tmp_path / "lives"

    def job(attempt: Attempt) -> list[int]:
        trainer = attempt.worker_group(Worker, name="trainer", world_size=2)
        rollout = attempt.worker_group(
            MortalServer, args=(str(lives), ()), name="rollout", process_group=False
        )
        pids, old = trainer.pids(), rollout.pids()
        os.kill(old[0], signal.SIGKILL)
        with pytest.raises(WorkerLost) as lost:
            trainer.call_all("publish_together", rollout.server(), 3)
        with pytest.raises(ConfigError, match="no worker group 'critic'"):
            attempt.restart(WorkerLost("critic", [0], "says who"))

        restarted = attempt.restart(lost.value)
        assert (restarted.name, restarted.placement.ids()) == ("rollout", rollout.placement.ids())
        assert restarted.pids() != old and not running(old[0])
        assert trainer.pids() == pids and all(running(pid) for pid in pids)
        assert live_placements() == 2
        return trainer.call_all("publish_together", restarted.server(), 4)

    supervisor = Supervisor()
    assert supervisor.run(job) == [4, 4]
    (event,) = supervisor.events
    assert (event.group, event.ranks, event.attempt) == ("rollout", [0], 0)
    assert event.rebuilt_s is not None and 0 <= event.torn_down_s < event.rebuilt_s
    assert not any(running(int(pid)) for pid in lives.read_text().split())


@pytest.mark.slow
def test_a_group_that_hangs_is_gone_before_it_is_started_again(tmp_path: Path) -> None:
    def job(attempt: Attempt) -> int:
        rollout = attempt.worker_group(Server, name="rollout", process_group=False)
        os.kill(rollout.pids()[0], signal.SIGSTOP)
        with pytest.raises(WorkerLost, match=r"no answer within 0.5 s") as lost:
            rollout.server(timeout_s=0.5).update_weights_from_disk("weights", 3)
        assert running(rollout.pids()[0])
        restarted = attempt.restart(lost.value)
        assert not running(rollout.pids()[0])
        return restarted.server().update_weights_from_disk("weights", 4)

    assert Supervisor().run(job) == 4


@pytest.mark.slow
def test_a_restart_can_be_retried_and_a_trainers_loss_ends_the_attempt(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    pids: list[int] = []

    def job(attempt: Attempt) -> int:
        trainer = attempt.worker_group(Worker, name="trainer", kwargs={"base": 5})
        rollout = attempt.worker_group(
            MortalServer, args=(str(lives), (1, 2)), name="rollout", process_group=False
        )
        assert not any(running(pid) for pid in pids)
        pids.extend(trainer.pids() + rollout.pids())
        if attempt.number == 1:
            return trainer.call(0, "add", 2)
        os.kill(rollout.pids()[0], signal.SIGKILL)
        lost: WorkerLost | None = WorkerLost("rollout", [0], "killed by the test")
        restarts = 0
        while lost is not None:  # dies twice more during the start
            restarts += 1
            try:
                rollout, lost = attempt.restart(lost), None
            except WorkerLost as again:
                lost = again
        assert restarts == 3
        os.kill(trainer.pids()[0], signal.SIGKILL)
        assert (
            attempt.restart(WorkerLost("rollout", [0], "once more"))
            .server()
            .update_weights_from_disk("", 6)
            == 6
        )
        return trainer.call(0, "add", 1)

    supervisor = Supervisor(RecoverConfig(mode="off", retries=5))
    assert supervisor.run(job) == 7
    assert [(event.group, event.attempt) for event in supervisor.events] == [("rollout", 0)] * 4 + [
        ("trainer", 0)
    ]
    assert [event.rebuilt_s is None for event in supervisor.events] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert not any(running(int(pid)) for pid in [*pids, *lives.read_text().split()])


@pytest.mark.slow
def test_restarts_are_retries() -> None:
    def job(attempt: Attempt) -> None:
        attempt.worker_group(Server, name="rollout", process_group=False)
        for _ in range(2):
            attempt.restart(WorkerLost("rollout", [0], "killed by the test"))

    supervisor = Supervisor(RecoverConfig(mode="off", retries=1))
    with pytest.raises(RetriesExhausted, match="after 1 retries"):
        supervisor.run(job)
    assert len(supervisor.events) == 2
    assert live_placements() == 0


def test_a_preempted_job_leaves_with_its_exit_code_and_no_worker_stays() -> None:
    pids: list[int] = []

    def job(attempt: Attempt) -> None:
        pids.extend(attempt.worker_group(Server, name="rollout", process_group=False).pids())
        raise Preempted("SIGTERM")

    supervisor = Supervisor()
    with pytest.raises(Preempted) as stop:
        supervisor.run(job)
    assert (stop.value.code, stop.value.reason, supervisor.events) == (75, "SIGTERM", [])
    assert not any(running(pid) for pid in pids)
    assert live_placements() == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["load"], ["load", "loss"]))
def test_sigterm_while_workers_start_or_are_lost_is_a_stop_and_no_failure(
    tmp_path: Path, name: str
) -> None:
    config = RecoverConfig("e", "t", fileroot=str(tmp_path))
    rays = signal.getsignal(signal.SIGTERM)
    started = tmp_path / "pid"
    tiny = Tiny()

    def send() -> None:
        wait_until(started.exists)
        os.kill(os.getpid(), signal.SIGTERM)

    def starts(attempt: Attempt) -> None:
        threading.Thread(target=send).start()
        attempt.worker_group(SlowToBuild, args=(str(started),), name="a", process_group=False)

    def loses(attempt: Attempt) -> None:
        group = attempt.worker_group(Worker, name="trainer", process_group=False)
        with make_handler(tmp_path) as handler:
            handler.load((tiny.model, tiny.optimizer, tiny.scheduler))
            os.kill(os.getpid(), signal.SIGTERM)
            lose(group)

    supervisor = Supervisor(config)
    with pytest.raises(SystemExit) as end:
        supervisor.run({"load": starts, "loss": loses}[name])
    assert end.value.code == 143
    assert live_placements() == 0
    assert signal.getsignal(signal.SIGTERM) == rays
    found = answer("status", config.trial_root, code=75)
    assert found["why"].endswith("stopped as asked: SIGTERM")


def test_a_stop_keeps_its_code_after_the_job_has_caught_sigterm() -> None:
    def job(attempt: Attempt) -> None:
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: False)
        raise Preempted("SIGUSR1")

    with pytest.raises(Preempted, match="SIGUSR1"):
        Supervisor().run(job)


_SECOND_JOB = """
import sys
from holdfast.utils.folder_lock import FolderLock
lock = FolderLock(sys.argv[1])
lock.acquire(0)
print("mine", flush=True)
sys.stdin.read()
"""


def second_job(config: RecoverConfig) -> subprocess.Popen[str]:
    """A second process that wants the folder, and holds it until its input ends."""
    command = [sys.executable, "-c", _SECOND_JOB, str(config.lock_path)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_no_other_job_gets_the_folder_of_a_job_that_runs_or_restarts(tmp_path: Path) -> None:
    config = RecoverConfig(fileroot=str(tmp_path), lock_timeout_s=0.2)

    def job(attempt: Attempt) -> str:
        if attempt.number == 0:
            raise WorkerLost("trainer", [0], "says who")
        _, refusal = second_job(config).communicate(timeout=stretched(60))
        return refusal

    assert f"pid {os.getpid()}" in Supervisor(config).run(job)

    holder = second_job(config)
    assert holder.stdout is not None and holder.stdout.readline() == "mine\n"
    with pytest.raises(FolderInUseError, match=f"pid {holder.pid}"):
        Supervisor(config).run(job)
    holder.communicate(timeout=stretched(60))


@pytest.mark.slow
@pytest.mark.parametrize("error", [UserBugError, KeyboardInterrupt])
def test_a_bug_or_ctrl_c_is_raised_and_leaves_nothing_behind(error: type[BaseException]) -> None:
    pids: list[int] = []

    def job(attempt: Attempt) -> None:
        assert not pids, "the job was run again"
        pids.extend(attempt.worker_group(Server, name="rollout", process_group=False).pids())
        raise error("mine")

    supervisor = Supervisor()
    with pytest.raises(error, match="mine"):
        supervisor.run(job)
    assert supervisor.events == [] and len(pids) == 1
    assert not any(running(pid) for pid in pids)
    assert live_placements() == 0


def test_losses_end_the_job_when_too_many_fall_in_one_window() -> None:
    attempts = []

    def job(attempt: Attempt) -> str:
        attempts.append(attempt.number)
        if len(attempts) < 4:
            raise WorkerLost("trainer", [1], f"loss {len(attempts)}")
        return "done"

    strict = Supervisor(RecoverConfig(mode="off", retries=1, retry_window_s=60))
    with pytest.raises(RetriesExhausted, match="after 1 retries within 60 s") as caught:
        strict.run(job)
    assert attempts == [0, 1] and len(strict.events) == 2
    assert (
        isinstance(caught.value.__cause__, WorkerLost) and caught.value.__cause__.cause == "loss 2"
    )

    attempts.clear()

    def slow_job(attempt: Attempt) -> str:
        time.sleep(0.02)
        return job(attempt)

    assert (
        Supervisor(RecoverConfig(mode="off", retries=1, retry_window_s=0.01)).run(slow_job)
        == "done"
    )
    assert attempts == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="retries"):
        RecoverConfig(retries=-1)


@pytest.mark.slow
def test_groups_lost_while_they_start_or_end_are_losses_too() -> None:
    def job(attempt: Attempt) -> int:
        group = attempt.worker_group(Server, name="rollout", process_group=False)
        if attempt.number == 0:
            lose(group)
        os.kill(group.pids()[0], signal.SIGKILL)  # the work is done, so nothing must be repeated
        return attempt.number

    supervisor = Supervisor()
    assert supervisor.run(job) == 1
    assert [event.attempt for event in supervisor.events] == [0]


@pytest.mark.slow
def test_a_group_that_still_starts_in_another_thread_ends_with_the_attempt(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    late: list[Future[WorkerGroup]] = []
    last: list[Attempt] = []

    def job(attempt: Attempt) -> int:
        last.append(attempt)
        starter = ThreadPoolExecutor(2)
        rollout = starter.submit(attempt.worker_group, Server, name="rollout", process_group=False)
        if attempt.number == 0:
            late.append(
                starter.submit(
                    attempt.worker_group, SlowToBuild, args=(str(pid_file),), name="trainer"
                )
            )
            while not (pid_file.exists() and pid_file.read_text()):
                time.sleep(0.05)
            lose(rollout.result())
        trainer = starter.submit(attempt.worker_group, Worker, kwargs={"base": 5}, name="trainer")
        assert not running(int(pid_file.read_text()))
        return trainer.result().call(0, "publish", rollout.result().server(), "weights/v3", 3)

    supervisor = Supervisor()
    assert supervisor.run(job) == 3
    with pytest.raises(WorkerLost, match="killed on request"):
        late[0].result(timeout=stretched(5))
    assert [event.group for event in supervisor.events] == ["rollout"]
    assert live_placements() == 0
    with pytest.raises(WorkerLost, match="the job has ended"):
        last[0].worker_group(Server, name="too late")


@pytest.mark.slow
def test_a_group_lost_for_want_of_progress_may_take_longer_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its calls may be slow, and it would be killed again and again."""
    options: dict[str, Any] = {"name": "rollout", "process_group": False, "stall_timeout_s": 2.0}

    def job(attempt: Attempt) -> int:
        rollout = attempt.worker_group(Worker, **options)
        if attempt.number == 0:
            with pytest.raises(WorkerLost) as lost:
                rollout.call(0, "nap", 7.0)
            rollout = attempt.restart(lost.value)
        rollout.call(0, "nap", 7.0)
        return attempt.number

    supervisor = Supervisor(RecoverConfig(mode="off", retries=4))
    assert supervisor.run(job) == 1
    assert [event.cause for event in supervisor.events] == [
        f"no progress for {limit} s during nap()" for limit in ("2", "4")
    ]
    assert (
        "'rollout' made no progress for its stall_timeout_s; the next one may take 4 times as long"
        in caplog.text
    )


@pytest.mark.parametrize("stalled_s", [0.0, 3600.0], ids=["crashes", "hangs"])
def test_only_work_between_two_losses_lets_a_retry_be_forgotten(
    stalled_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that hangs at the same place would be started again for ever."""
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(holdfast.recover.supervisor, "time", clock)
    config = RecoverConfig(mode="off", retries=2, retry_window_s=1000)
    losses = _Losses(config, Journal(tmp_path))
    group: Any = SimpleNamespace(name="rollout", stalled_s=stalled_s, started_late=False)
    loss = WorkerLost("rollout", [0], "no progress")
    for _ in range(2):
        now += 3700
        losses.spend_retry(loss, group)
    now += 3700
    if stalled_s:
        with pytest.raises(RetriesExhausted, match="after 2 retries"):
            losses.spend_retry(loss, group)
    else:
        losses.spend_retry(loss, group)


def test_a_limit_for_progress_that_was_long_enough_stays(tmp_path: Path) -> None:
    losses = _Losses(RecoverConfig(mode="off", retries=9, retry_window_s=0.0), Journal(tmp_path))
    group: Any = SimpleNamespace(name="rollout", stalled_s=0.001, started_late=False)
    for _ in range(3):
        losses.spend_retry(WorkerLost("rollout", [0], "no progress"), group)
        time.sleep(0.01)
    assert losses.stall_factor("rollout") == 2


@pytest.mark.slow
def test_a_start_that_timed_out_is_repeated_after_a_growing_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(holdfast.recover.supervisor, "BACK_OFF_S", 0.5)
    begun: list[float] = []

    def job(attempt: Attempt) -> int:
        begun.append(time.monotonic())
        timeout_s = 0.01 if attempt.number < 2 else 60.0
        return attempt.worker_group(Worker, name="trainer", start_timeout_s=timeout_s).world_size

    assert Supervisor(RecoverConfig(mode="off", retries=4)).run(job) == 1
    pauses = [later - earlier for earlier, later in pairwise(begun)]
    assert pauses[0] >= 0.5 and pauses[1] >= 1.0
    told = [
        record.getMessage()
        for record in caplog.records
        if "is started again in" in record.getMessage()
    ]
    assert ["in 0.5 s" in told[0], "in 1 s" in told[1], len(told)] == [True, True, 2]


def test_a_group_that_comes_after_its_attempt_is_refused() -> None:
    attempts: list[Attempt] = []

    def job(attempt: Attempt) -> None:
        attempts.append(attempt)
        if attempt.number == 0:
            raise WorkerLost("trainer", [0], "says who")
        with pytest.raises(WorkerLost, match="attempt 0 has ended"):
            attempts[0].worker_group(Server, name="rollout", process_group=False)

    Supervisor().run(job)
    assert live_placements() == 0


def test_an_attempt_that_begins_again_is_no_loss_and_no_retry() -> None:
    numbers: list[tuple[int, WorkerLost | None]] = []

    def job(attempt: Attempt) -> str:
        numbers.append((attempt.number, attempt.last_loss))
        assert not attempt.can_grow()
        if attempt.number < 2:
            attempt.start_again()
        return "done"

    supervisor = Supervisor(RecoverConfig(mode="off", retries=0))
    assert supervisor.run(job) == "done"
    assert numbers == [(0, None), (1, None), (2, None)] and supervisor.events == []


@pytest.mark.slow
def test_a_group_with_too_few_ranks_grows_in_the_next_attempt() -> None:
    blocker = place(PlacementRequest("blocker", 2, WorkerResources()), 60)
    sizes: list[int] = []

    def job(attempt: Attempt) -> list[float]:
        group = attempt.worker_group(Worker, name="trainer", world_size=4, min_world_size=1)
        sizes.append(group.world_size)
        assert group.call_all("reduce") == [float(group.world_size)] * group.world_size
        if attempt.number == 0:
            assert not attempt.can_grow()
            blocker.remove()
            while not attempt.can_grow():
                time.sleep(0.05)
            attempt.start_again()
        return group.call_all("reduce")

    supervisor = Supervisor(RecoverConfig(mode="off", retries=0, shrink_after_s=0.0))
    assert supervisor.run(job) == [4.0] * 4
    assert sizes == [2, 4] and supervisor.events == []
    assert live_placements() == 0


@pytest.mark.slow
def test_the_journal_tells_of_workers_that_never_came_up_and_of_a_job_that_fails_before_it_loads(
    tmp_path: Path,
) -> None:
    config = RecoverConfig(fileroot=str(tmp_path), retries=1)

    def dies(attempt: Attempt) -> None:
        attempt.worker_group(DiesAtStart, name="trainer", process_group=False)

    def misconfigured(attempt: Attempt) -> None:
        raise ConfigError("config key 'path' is empty")

    for job, error in ((dies, RetriesExhausted), (misconfigured, ConfigError)):
        with pytest.raises(error):
            Supervisor(config).run(job)
    Supervisor(config).run(lambda attempt: None)
    first, second, third = (one["verdict"] for one in answer("why", config.trial_root)["attempts"])
    lost = "before it had loaded: worker group 'trainer' lost rank(s) [0]: "
    assert (
        first.startswith(lost)
        and second.startswith(lost)
        and "; given up: RetriesExhausted: " in second
    )
    assert third == "before it had loaded: ConfigError: config key 'path' is empty"
    assert answer("top", config.trial_root)["ended"].startswith("ConfigError")


def test_ray_must_be_running() -> None:
    ray.shutdown()
    with pytest.raises(ConfigError, match=r"call ray.init\(\)"):
        Supervisor().run(lambda attempt: None)
    with pytest.raises(ConfigError, match=r"call ray.init\(\)"):
        WorkerGroup(Server)
