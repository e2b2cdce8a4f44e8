"""A snapshot is due every N epochs, steps or seconds, and the query does not change the answer."""

import pytest

from holdfast.engine.api import StepInfo
from holdfast.recover.triggers import SnapshotSchedule
from holdfast.utils.errors import ConfigError


class Clock:
    """A clock controlled by the test."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def steps(count: int, steps_per_epoch: int) -> list[StepInfo]:
    info = StepInfo(epoch=0, epoch_step=0, global_step=0, steps_per_epoch=steps_per_epoch)
    infos = [info]
    while len(infos) < count:
        infos.append(infos[-1].next())
    return infos


def due_steps(schedule: SnapshotSchedule, infos: list[StepInfo]) -> list[int]:
    """The due steps, each marked like in the handler."""
    due = []
    for info in infos:
        if schedule.due(info):
            schedule.mark(info)
            due.append(info.global_step)
    return due


def test_steps_are_counted_from_the_runs_start_also_after_a_restart() -> None:
    infos = steps(12, steps_per_epoch=5)
    assert due_steps(SnapshotSchedule(freq_steps=3), infos) == [2, 5, 8, 11]
    assert due_steps(SnapshotSchedule(freq_steps=3), infos[4:]) == [5, 8, 11]
    assert due_steps(SnapshotSchedule(freq_steps=1), infos) == list(range(12))


def test_epochs_are_due_after_their_last_step_only() -> None:
    infos = steps(20, steps_per_epoch=4)
    assert due_steps(SnapshotSchedule(freq_epochs=1), infos) == [3, 7, 11, 15, 19]
    assert due_steps(SnapshotSchedule(freq_epochs=2), infos) == [7, 15]
    assert due_steps(SnapshotSchedule(freq_epochs=1), steps(3, steps_per_epoch=1)) == [0, 1, 2]


def test_any_of_the_frequencies_makes_a_step_due_none_of_them_never() -> None:
    infos = steps(12, steps_per_epoch=4)
    assert due_steps(SnapshotSchedule(freq_epochs=1, freq_steps=5), infos) == [3, 4, 7, 9, 11]
    assert due_steps(SnapshotSchedule(), infos) == []


def test_seconds_run_from_the_last_snapshot_whatever_made_it_due() -> None:
    clock = Clock()
    schedule = SnapshotSchedule(freq_steps=5, freq_secs=10, clock=clock)
    due = []
    for info in steps(12, steps_per_epoch=100):
        clock.now_s += 4
        if schedule.due(info):
            schedule.mark(info)
            due.append(info.global_step)
    # 12 s have passed at step 2. Step 4 is due by count, which restarts the clock. 12 s later step
    # 7. Step 9 by count.
    assert due == [2, 4, 7, 9]


def test_asking_twice_gives_the_same_answer_until_the_step_is_marked() -> None:
    clock = Clock()
    schedule = SnapshotSchedule(freq_epochs=1, freq_steps=2, freq_secs=3, clock=clock)
    for info in steps(8, steps_per_epoch=4):
        clock.now_s += 1
        first = schedule.due(info)
        assert [schedule.due(info) for _ in range(5)] == [first] * 5
        if first:
            schedule.mark(info)
            assert not schedule.due(info)


def test_a_snapshot_that_is_owed_is_due_until_it_is_marked() -> None:
    infos = steps(4, steps_per_epoch=10)
    schedule = SnapshotSchedule(freq_epochs=1)
    schedule.mark(infos[0])
    schedule.owe()
    assert [schedule.due(info) for info in infos] == [False, True, True, True]
    assert due_steps(schedule, infos[2:]) == [2]


def test_a_step_reached_again_after_rolling_back_is_due_again() -> None:
    infos = steps(6, steps_per_epoch=10)
    schedule = SnapshotSchedule(freq_steps=3)
    assert due_steps(schedule, infos) == [2, 5]
    schedule.mark(infos[2])  # the handler restored step 2
    assert due_steps(schedule, infos[3:]) == [5]


@pytest.mark.parametrize(
    ("key", "value"), [("freq_epochs", 0), ("freq_steps", 0), ("freq_secs", -1.0)]
)
def test_frequencies_out_of_range_are_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' is {value}"):
        SnapshotSchedule(**{key: value})  # type: ignore[arg-type]
