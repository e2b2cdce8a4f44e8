"""Parts of a tier."""

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
    with pytest.raises(ValueError, match=f"HOLDFAST_TEST_PART is '{text}'; expected a part"):
        part_of([], text)
