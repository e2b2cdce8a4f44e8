"""Parts of a tier."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import part_of


def test_the_parts_of_a_tier_are_about_equal_and_hold_each_test_once() -> None:
    tests = range(20)
    parts = [part_of(tests, f"{number}/6") for number in range(1, 7)]
    assert sorted(test for part in parts for test in part) == list(tests)
    assert {len(part) for part in parts} == {3, 4}
    assert list(part_of(tests, "1/1")) == list(tests)


@pytest.mark.parametrize("text", ["0/6", "7/6", "2", "a/b", "-1/6", "1/0", "1/6/2"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"--part is '{text}'; expected a part"):
        part_of([], text)


def collected(*options: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", __file__, *options]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_pytest_runs_one_part_of_its_tests_and_a_session_without_the_option_all() -> None:
    every = collected()
    assert collected("--part=2/3") == every[1::3]
