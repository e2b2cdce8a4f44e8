"""WorkerGroup on a real Ray with real gloo ranks and real SIGKILLs."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayTaskError

from holdfast.engine.workers.actor import RankActor, device_index
from holdfast.engine.workers.group import WorkerGroup
from holdfast.engine.workers.placement import Placement, PlacementRequest, WorkerResources, place
from holdfast.engine.workers.rank_answers import Answers, headline
from holdfast.utils.errors import ConfigError, HoldfastError, WorkerLost
from tests.limits import stretched
from tests.ray_helpers import (
    ROOT,
    Server,
    SlowToBuild,
    UserBugError,
    Worker,
    kill_after,
    local_ray,
    running,
)

__all__ = ["local_ray"]
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def placement(local_ray: None) -> Iterator[Placement]:
    """Three bundles that most tests share, one after the other."""
    group = place(PlacementRequest("test", 3, WorkerResources()), 30)
    yield group
    group.remove()


@pytest.fixture
def pair(placement: Placement) -> Iterator[WorkerGroup]:
    """A fresh group of two ranks."""
    group = WorkerGroup(Worker, args=(10,), world_size=2, name="pair", placement=placement)
    yield group
    group.kill()


def multiply(worker: Worker, factor: int, offset: int) -> int:
    return worker.base * factor + offset


def wait_for(worker: Worker, file: str, offset: int) -> int:
    while not Path(file).exists():
        time.sleep(0.02)
    return worker.base + offset


def divide_by_zero(worker: Worker) -> float:
    return worker.base / 0


def assert_lost(
    group: WorkerGroup, ranks: list[int], call: Any, moment: list[float], cause: str
) -> None:
    """Check that the call raises WorkerLost within two seconds of the strike, after the end of
    every process.
    """
    with pytest.raises(WorkerLost, match=cause) as caught:
        call()
    assert time.monotonic() - moment[0] < stretched(2)
    assert (caught.value.group, caught.value.ranks) == (group.name, ranks)
    assert not any(running(pid) for pid in group.pids())
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (WorkerLost, str(caught.value))
    start = time.monotonic()
    with pytest.raises(WorkerLost):
        group.call_all("add")
    assert time.monotonic() - start < stretched(0.1)


@pytest.mark.slow
def test_background_calls_run_next_to_other_calls_and_share_their_losses(
    pair: WorkerGroup, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(pair.run_in_background, wait_for, str(tmp_path / "go"), 5)
        assert [pair.call_all("add", 1) for _ in range(3)] == [[11, 11]] * 3
        assert not call.done()
        (tmp_path / "go").touch()
        assert call.result(timeout=20) == [15, 15]
        call = thread.submit(pair.run_in_background, wait_for, str(tmp_path / "never"), 5)
        time.sleep(0.3)
        moment = kill_after(0.2, pair.pids()[1])
        assert_lost(pair, [1], lambda: pair.call_all("idle"), moment, "died during")
        with pytest.raises(WorkerLost):
            call.result(timeout=20)


def test_calls_reach_every_rank_and_user_errors_keep_their_type(placement: Placement) -> None:
    env = {"HOLDFAST_TEST_EXTRA": "here"}
    group = WorkerGroup(
        Worker, world_size=2, name="calls", placement=placement, env=env, kwargs={"base": 10}
    )
    descriptions = group.call_all("describe")
    for rank, described in enumerate(descriptions):
        env_values = [str(rank), "2", str(rank)]
        assert described == {
            "env": env_values, "dist": (rank, 2), "threads": 1, "same_thread": True,
            "gpus": "", "extra": "here"
        }  # fmt: skip
    assert group.call_all("add", 1, per_rank=[(5,), (6,)], times=2) == [32, 34]
    assert group.call(1, "add", 3, times=3) == 39
    assert group.run_all(multiply, 2, per_rank=[(0,), (1,)]) == [20, 21]
    assert group.call_all("reduce") == [2.0, 2.0]
    assert group.ping() == []
    assert len(set(group.pids())) == 2 and all(running(pid) for pid in group.pids())
    assert group.world_size == 2

    with pytest.raises(UserBugError) as caught:
        group.call_all("fail", 1)
    assert type(caught.value) is UserBugError and caught.value.args == ("seven", 1)
    assert isinstance(caught.value.__cause__, RayTaskError)
    assert 'raise UserBugError("seven", dist.get_rank())' in str(caught.value.__cause__)
    with pytest.raises(UserBugError, match=r"seven.*1"):
        group.call_all("fail", 1, peers=True)
    with pytest.raises(ZeroDivisionError):
        group.run_all(divide_by_zero)
    with pytest.raises(AttributeError, match="no_such_method"):
        group.call_all("no_such_method")
    with pytest.raises(ConfigError, match="per_rank has 1 entries"):
        group.call_all("add", per_rank=[(1,)])
    assert group.call_all("reduce") == [2.0, 2.0]

    group.call_all("refuse_to_end")
    start = time.monotonic()
    group.shutdown(timeout_s=0.5)
    group.shutdown()
    assert 0.5 < time.monotonic() - start < stretched(2)
    assert not any(running(pid) for pid in group.pids())
    with pytest.raises(HoldfastError):
        group.call_all("add")


@pytest.mark.slow
def test_a_call_that_only_some_ranks_get_ends_the_group(pair: WorkerGroup) -> None:
    unsendable = (threading.Lock(),)
    with pytest.raises(TypeError):
        pair.call_all("add", per_rank=[unsendable, (1,)])
    assert pair.call_all("reduce") == [2.0, 2.0], "nobody had got the call"
    # rank 0 is in the call now, and rank 1 would answer it with the next one
    with pytest.raises(TypeError):
        pair.call_all("add", per_rank=[(1,), unsendable])
    with pytest.raises(WorkerLost, match=r"\[1\]: add\(\) could not be sent to all ranks"):
        pair.call_all("reduce")


def test_a_rank_killed_in_a_collective_is_lost(pair: WorkerGroup) -> None:
    moment = kill_after(0.5, pair.pids()[1])
    assert_lost(
        pair, [1], lambda: pair.call_all("reduce_forever"), moment, "died during reduce_forever"
    )


@pytest.mark.slow
def test_a_rank_killed_while_idle_is_lost_at_the_next_call(pair: WorkerGroup) -> None:
    os.kill(pair.pids()[0], signal.SIGKILL)
    moment = [time.monotonic()]
    assert_lost(pair, [0], lambda: pair.call_all("reduce"), moment, "died during reduce")


@pytest.mark.slow
def test_ranks_that_hang_far_from_the_dead_one_are_killed(placement: Placement) -> None:
    group = WorkerGroup(Worker, world_size=3, name="ring", placement=placement)
    moment = kill_after(0.5, group.pids()[2])
    # Rank 1 is alive but never joins the collective, so only Ray can tell that rank 2 is dead.
    assert_lost(group, [2], lambda: group.call_all("reduce_except", 1), moment, "died")


@pytest.mark.slow
def test_a_user_error_ends_the_ranks_that_wait_for_it(pair: WorkerGroup) -> None:
    start = time.monotonic()
    with pytest.raises(UserBugError, match="seven"):
        pair.call_all("fail", 0, others_reduce=True)
    assert time.monotonic() - start < stretched(2)
    assert not any(running(pid) for pid in pair.pids())
    with pytest.raises(WorkerLost, match="waited for rank 0, which failed"):
        pair.call_all("add")


@pytest.mark.slow
def test_a_missed_deadline_is_a_loss_even_of_a_stopped_process(pair: WorkerGroup) -> None:
    os.kill(pair.pids()[1], signal.SIGSTOP)
    assert pair.ping(timeout_s=0.3) == [1]
    moment = [time.monotonic()]
    call = lambda: pair.call_all("add", deadline=0.5)  # noqa: E731
    assert_lost(pair, [1], call, moment, r"no answer to add\(\) within 0.5 s")


@pytest.mark.slow
def test_without_a_deadline_a_stopped_rank_is_lost_a_slow_one_not(placement: Placement) -> None:
    group = WorkerGroup(
        Worker, world_size=2, name="watched", placement=placement, hang_timeout_s=1.5
    )
    group.call_all("nap", 3.5)
    os.kill(group.pids()[1], signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(
        WorkerLost, match=r"no answer to a ping within 1.5 s during idle\(\)"
    ) as caught:
        group.call_all("idle")
    assert time.monotonic() - start < stretched(6)
    assert caught.value.ranks == [1]
    assert not any(running(pid) for pid in group.pids())


@pytest.mark.slow
def test_an_error_of_waiting_for_a_stopped_rank_is_a_loss(placement: Placement) -> None:
    group = WorkerGroup(
        Worker, world_size=2, name="watched", placement=placement, hang_timeout_s=1.5
    )
    os.kill(group.pids()[1], signal.SIGSTOP)
    with pytest.raises(WorkerLost, match="no answer to a ping") as caught:
        group.call_all("fail", 0, deadline=60)
    assert caught.value.ranks == [1]
    assert not any(running(pid) for pid in group.pids())


@pytest.mark.slow
def test_building_has_a_bound_of_its_own(placement: Placement, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    bound_s = stretched(2.0)  # its process must start first
    options = {"placement": placement, "process_group": False, "build_timeout_s": bound_s}
    with pytest.raises(WorkerLost, match=rf"no answer to the constructor within {bound_s:g} s"):
        WorkerGroup(SlowToBuild, args=(str(pid_file),), **options)
    assert not running(int(pid_file.read_text()))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the two GPUs of this test are made up")
def test_the_local_rank_is_the_own_gpu_when_ray_shows_all() -> None:
    env = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    resources = WorkerResources(cpus=0.5, gpus=1)
    group = WorkerGroup(Worker, world_size=2, resources=resources, process_group=False, env=env)
    assert sorted(described["env"][2] for described in group.call_all("describe")) == ["0", "1"]
    group.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the two GPUs of this test are made up")
def test_a_trainer_and_a_server_share_each_gpu_if_trainers_take_more_than_half() -> None:
    shares = {"trainer": 0.6, "server": 0.4}
    groups = [
        WorkerGroup(
            Worker,
            world_size=2,
            name=name,
            resources=WorkerResources(cpus=0.5, gpus=share),
            process_group=False,
        )
        for name, share in shares.items()
    ]
    for group in groups:
        assert sorted(described["gpus"] for described in group.call_all("describe")) == ["0", "1"]
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize(("local_rank", "current"), [(0, []), (1, [1])])
def test_a_rank_opens_no_context_on_a_gpu_that_is_current_anyway(
    local_rank: int, current: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append(device.index))
    monkeypatch.setenv("LOCAL_RANK", "")
    actor = RankActor.__new__(RankActor)
    actor.join({"LOCAL_RANK": str(local_rank)}, torch.get_num_threads(), 1, None)
    assert found == current


def test_a_device_index_is_the_place_among_the_visible_gpus() -> None:
    assert device_index([3], None) == 3
    assert device_index(["3"], "3") == 0
    assert device_index(["7", "5"], "4,5,6,7") == 1
    assert device_index(["GPU-b"], "GPU-a,GPU-b") == 1


@pytest.mark.slow
def test_the_answers_of_many_ranks_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray looks at every pending call of a query, so one query per answer would cost the square of
    the ranks.
    """
    wait, asked = ray.wait, list[int]()

    def counting(refs: list[Any], **options: Any) -> Any:
        asked.append(len(refs))
        return wait(refs, **options)

    monkeypatch.setattr(ray, "wait", counting)
    answers = Answers({ray.put(rank): rank for rank in range(500)})
    answers.collect(None)
    assert answers.values == {rank: rank for rank in range(500)} and not answers.pending
    assert sum(asked) <= 10 * 500


def test_an_error_without_a_message_has_a_headline() -> None:
    assert headline(WorkerLost("trainer", [0], "gone\nfor good")).endswith("gone")
    assert (headline(OSError()), headline(None)) == ("OSError", "the process is gone")


@pytest.mark.slow
def test_ctrl_c_while_waiting_reaches_the_caller() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # independent of earlier tests
    group = WorkerGroup(Worker, process_group=False)
    kill_after(0.3, os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        group.call_all("idle")
    start = time.monotonic()
    group.shutdown()
    assert time.monotonic() - start < stretched(1)
    assert not any(running(pid) for pid in group.pids())


@pytest.mark.slow
def test_an_error_in_the_constructor_keeps_its_type(placement: Placement) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        WorkerGroup(Worker, placement=placement, kwargs={"colour": "red"})


class Named:
    """Takes arguments whose names a group uses too."""

    def __init__(self, world_size: int, *, name: str, env: dict[str, str]) -> None:
        self.given = (world_size, name, env)

    def tell(self) -> tuple[int, str, dict[str, str]]:
        return self.given


@pytest.mark.slow
def test_workers_have_arguments_of_the_names_that_a_group_has(placement: Placement) -> None:
    kwargs = {"name": "the worker's", "env": {"key": "value"}}
    group = WorkerGroup(
        Named, args=(7,), kwargs=kwargs, name="named", placement=placement, process_group=False
    )
    assert group.call(0, "tell") == (7, "the worker's", {"key": "value"}) and group.name == "named"
    group.kill()


def test_misplaced_worker_arguments_are_refused_with_their_right_place() -> None:
    where = r"goes apart: WorkerGroup\(Worker, args=\(...\), kwargs=\{...\}, ...\)"
    with pytest.raises(ConfigError, match=rf"takes no 10, colour=...; .* {where}"):
        WorkerGroup(Worker, 10, world_size=2, colour="red")


@pytest.mark.slow
def test_a_remote_server_answers_raises_or_dies_as_its_groups_loss(pair: WorkerGroup) -> None:
    rollout = WorkerGroup(Server, name="rollout", process_group=False)
    server = rollout.server()
    assert pair.call_all("publish", server, "weights/v7", 7) == [7, None]
    with pytest.raises(UserBugError, match="no such folder"):
        server.update_weights_from_disk("raise", 8)
    with pytest.raises(WorkerLost, match=r"within 0.3 s") as timed_out:
        rollout.server(timeout_s=0.3).update_weights_from_disk("hang", 8)
    assert (timed_out.value.group, timed_out.value.ranks) == ("rollout", [0])

    os.kill(rollout.pids()[0], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerLost) as caught:
        pair.call_all("publish", server, "weights/v9", 9)
    assert time.monotonic() - start < stretched(2)
    assert (caught.value.group, caught.value.ranks) == ("rollout", [0])
    assert not any(running(pid) for pid in pair.pids())
    rollout.shutdown()


def test_resources_that_cannot_be_had_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"needs 2 x \{'CPU': 64\}.* more than this Ray has, which the job itself"
    ):
        WorkerGroup(Worker, world_size=2, resources=WorkerResources(cpus=64), start_timeout_s=0.5)
    with pytest.raises(ConfigError, match="expected at least one"):
        WorkerGroup(Worker, world_size=0)


_DRIVER = """
from tests.limits import stretched
from tests.ray_helpers import Server, start_ray
from holdfast.engine.workers.group import WorkerGroup
start_ray(num_cpus=1)
group = WorkerGroup(Server, process_group=False)
print("pids", *group.pids(), flush=True)
group.call(0, "update_weights_from_disk", "hang", 0)
"""


@pytest.mark.slow
def test_workers_die_with_a_driver_that_is_killed() -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    line = next(line for line in driver.stdout if line.startswith("pids"))
    pids = [int(word) for word in line.split()[1:]]
    assert all(running(pid) for pid in pids)
    driver.kill()
    end = time.monotonic() + stretched(0.5)
    while any(running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(running(pid) for pid in pids)
    driver.wait(timeout=5)
    driver.stdout.close()
