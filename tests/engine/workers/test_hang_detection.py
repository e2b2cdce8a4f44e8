"""Ranks that are alive but never answer: each is found, reported as lost, and killed. Slow ranks
are left alone.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.engine.workers.group import WorkerGroup
from holdfast.engine.workers.placement import Placement, PlacementRequest, WorkerResources, place
from holdfast.utils.distributed import collective_broke
from holdfast.utils.errors import PeerError, WorkerLost
from holdfast.utils.heartbeat import beat, seconds_since_beat
from tests.limits import stretched
from tests.ray_helpers import Server, UserBugError, Worker, local_ray, running

__all__ = ["local_ray"]
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(120)]

COLLECTIVE_S = 3.0
"""Long enough for a rendezvous on a busy machine."""

StartGroup = Callable[..., WorkerGroup]


@pytest.fixture(scope="module")
def placement(local_ray: None) -> Iterator[Placement]:
    """Three bundles that the tests share, one after the other."""
    group = place(PlacementRequest("hangs", 3, WorkerResources()), 30)
    yield group
    group.remove()


@pytest.fixture
def start(placement: Placement) -> Iterator[StartGroup]:
    """Starts the group of a test, which finds hangs quickly, and ends it."""
    started: list[WorkerGroup] = []

    def start_group(
        world_size: int = 2, stall_timeout_s: float = 1.5, **options: Any
    ) -> WorkerGroup:
        limits = {"stall_timeout_s": stall_timeout_s, **options}
        group = WorkerGroup(
            Worker, args=(10,), world_size=world_size, name="watched", placement=placement, **limits
        )
        started.append(group)
        return group

    yield start_group
    for group in started:
        group.kill()


def assert_lost(
    group: WorkerGroup, ranks: list[int], symptom: str, method: str, *args: object
) -> None:
    """Check that the call ends in a loss of just these ranks within seconds, and that the whole
    group is gone.
    """
    begun = time.monotonic()
    with pytest.raises(WorkerLost, match=symptom) as caught:
        group.call_all(method, *args)
    assert time.monotonic() - begun < stretched(20)
    assert (caught.value.group, caught.value.ranks) == ("watched", ranks)
    assert not any(running(pid) for pid in group.pids())
    with pytest.raises(WorkerLost):
        group.call_all("add")


@pytest.mark.slow
def test_a_stopped_rank_is_lost_with_its_peer_in_a_collective(start: StartGroup) -> None:
    group = start(hang_timeout_s=1.0)
    os.kill(group.pids()[1], signal.SIGSTOP)
    assert_lost(group, [1], r"no answer to a ping within 1 s during reduce\(\)", "reduce")


@pytest.mark.slow
def test_an_endless_loop_is_lost_when_the_others_have_answered(start: StartGroup) -> None:
    assert_lost(start(), [1], r"no progress for 1.5 s during spin\(\)", "spin", 1)


@pytest.mark.slow
def test_an_endless_loop_while_others_wait_in_collectives_ends_the_group(start: StartGroup) -> None:
    assert_lost(start(), [0, 1], r"no progress for 1.5 s during spin\(\)", "spin", 1, True)


@pytest.mark.slow
def test_an_endless_loop_is_named_alone_when_the_collective_times_out_first(
    start: StartGroup,
) -> None:
    group = start(stall_timeout_s=60, process_group_timeout_s=COLLECTIVE_S)
    assert_lost(
        group,
        [1],
        r"others gave up waiting for them in a collective of spin\(\).*Timed out",
        "spin",
        1,
        True,
    )


@pytest.mark.slow
def test_a_collective_that_one_rank_never_joins_is_that_ranks_loss(start: StartGroup) -> None:
    group = start(world_size=3, stall_timeout_s=60, process_group_timeout_s=COLLECTIVE_S)
    assert_lost(group, [2], "others gave up waiting for them in a collective", "reduce_except", 2)


@pytest.mark.slow
def test_a_collective_that_no_rank_can_finish_is_the_loss_of_all(start: StartGroup) -> None:
    group = start(stall_timeout_s=60, process_group_timeout_s=COLLECTIVE_S)
    assert_lost(
        group,
        [0, 1],
        r"nobody could finish a collective of receive_from_peer\(\)",
        "receive_from_peer",
    )


@pytest.mark.slow
def test_a_bug_is_raised_though_others_time_out_waiting_for_it(start: StartGroup) -> None:
    group = start(stall_timeout_s=60, process_group_timeout_s=COLLECTIVE_S)
    with pytest.raises(UserBugError):
        group.call_all("fail_late", 0, COLLECTIVE_S + 0.5)


@pytest.mark.slow
def test_a_hung_server_is_lost_and_its_publishers_live_on(start: StartGroup) -> None:
    trainer = start(stall_timeout_s=60)
    rollout = WorkerGroup(Server, name="rollout", process_group=False, hang_timeout_s=1.0)
    server = rollout.server()
    assert trainer.call_all("publish_together", server, 1) == [1, 1]
    os.kill(rollout.pids()[0], signal.SIGSTOP)
    with pytest.raises(WorkerLost, match="no answer to a ping within 1 s") as caught:
        trainer.call_all("publish_together", server, 2)
    assert (caught.value.group, caught.value.ranks) == ("rollout", [0])
    assert trainer.call_all("reduce") == [2.0, 2.0]
    rollout.kill()
    assert not any(running(pid) for pid in rollout.pids())


@pytest.mark.slow
def test_a_slow_rank_that_beats_lives_on_as_do_its_peers(start: StartGroup) -> None:
    group = start()
    assert group.call_all("nap_and_reduce", 1, 4.0, True) == [2.0, 2.0]
    assert group.call_all("add") == [10, 10]


@pytest.mark.slow
def test_a_rank_without_beats_lives_within_the_timeout_an_idle_one_forever(
    start: StartGroup,
) -> None:
    group = start(stall_timeout_s=4.0)
    assert group.call_all("nap_and_reduce", 1, 2.5, False) == [2.0, 2.0]
    time.sleep(2.0)  # idle: at the first look the last beat is 4.5 s old, but the call only 2.5 s
    assert group.call_all("nap_and_reduce", 1, 2.5, False) == [2.0, 2.0]


@pytest.mark.slow
def test_a_long_computation_lives_on_where_no_peer_waits_for_it(start: StartGroup) -> None:
    group = start(process_group=False)
    assert group.call(0, "compute", 5.0) > 0
    assert group.call_all("add") == [10, 10]


@pytest.mark.slow
def test_a_rank_that_neither_computes_nor_beats_is_lost_unawaited_too(start: StartGroup) -> None:
    assert_lost(
        start(process_group=False), [0, 1], r"no progress for 1.5 s during idle\(\)", "idle"
    )


def test_a_beat_starts_the_clock_anew() -> None:
    beat()
    time.sleep(0.3)
    assert 0.3 <= seconds_since_beat() < stretched(1)
    beat()
    assert seconds_since_beat() < 0.3


def test_errors_of_a_broken_collective_are_told_from_bugs() -> None:
    source = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"
    for text in (
        f"{source}/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to complete",
        f"{source}/pair.cc:534] Connection closed by peer [127.0.0.1]:4321",
        "Application timeout caused pair closure",
        "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 1800000 ms",
    ):
        assert collective_broke(RuntimeError(text))
    assert collective_broke(dist.DistStoreError("wait timeout after 1000ms, keys: /0//cpu//0/1"))
    assert collective_broke(
        dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(...)")
    )
    for bug in (
        RuntimeError(
            f"[enforce fail at {source[1:]}/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"
        ),
        RuntimeError("size mismatch"),
        dist.DistBackendError("NCCL error: ncclInvalidUsage"),
        PeerError("a step", {0: "RuntimeError: Timed out waiting"}),
        ValueError("gloo"),
        None,
    ):
        assert not collective_broke(bug)
