"""The start time of a process is the one of the operating system, not the time of the first
query.
"""

import time

import psutil

from holdfast.utils.processes import process_started_at


def test_the_start_is_what_the_operating_system_says() -> None:
    assert abs(process_started_at() - psutil.Process().create_time()) < 1
    assert process_started_at() < time.time()


def test_the_start_is_the_same_at_every_call() -> None:
    assert len({process_started_at() for _ in range(100)}) == 1
