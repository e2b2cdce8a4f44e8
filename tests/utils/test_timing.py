"""Seconds of the phases of a step."""

import time

import pytest

from holdfast.utils.timing import PhaseTimes, doubled


def test_seconds_are_counted_by_phase_until_they_are_taken_also_of_a_block_that_fails() -> None:
    times = PhaseTimes("sampling", "training")
    for _ in range(2):
        with times.phase("sampling"):
            time.sleep(0.01)
    with pytest.raises(ValueError, match="lost"), times.phase("evaluating"):
        time.sleep(0.01)
        raise ValueError("lost")
    found = times.take()
    assert list(found) == ["sampling_s", "training_s", "evaluating_s"]
    assert (
        found["sampling_s"] >= 0.02 and found["training_s"] == 0.0 and found["evaluating_s"] >= 0.01
    )
    assert times.take() == {"sampling_s": 0.0, "training_s": 0.0}


def test_a_pause_doubles_up_to_its_limit_however_often() -> None:
    assert [doubled(0.5, n, 3.0) for n in (0, 1, 2, 3, 1023, 10**6)] == [0.5, 1.0, 2.0] + [3.0] * 3
    assert doubled(0.0, 10**6, 3.0) == 0.0
