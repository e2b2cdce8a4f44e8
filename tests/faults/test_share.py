"""A share of the faults is an even choice and never empty."""

import pytest

from tests.faults.share import parse_share, pick


@pytest.mark.parametrize(("text", "share"), [("100%", 1.0), ("10%", 0.1), ("0.5%", 0.005)])
def test_a_share_is_a_percentage(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["full", "", "10", "0%", "101%", "-1%"])
def test_an_invalid_percentage_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected the share of faults"):
        parse_share(text)


def test_a_choice_is_even_and_in_order_and_everything_at_100_percent() -> None:
    assert pick(range(1000), 0.01) == list(range(50, 1000, 100))
    assert pick(range(1000), 1.0) == list(range(1000))
    assert pick("abc", 0.5) == ["a", "c"]


def test_a_choice_is_never_empty_unless_there_is_nothing_to_choose() -> None:
    assert pick(["only"], 0.01) == ["only"]
    assert pick([], 0.01) == []
