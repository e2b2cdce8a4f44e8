"""Cases of a test that represent all of them in the fast tier, and parts of a tier."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def slow_but(fast: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases for ``parametrize``, all marked as slow except those in ``fast``, which represent them.

    A case of several arguments is a plain tuple.
    """
    cases, fast = list(cases), list(fast)
    assert all(case in cases for case in fast), f"{fast} are not all among {cases}"
    values = [case if type(case) is tuple else (case,) for case in cases]
    marks = [() if case in fast else (pytest.mark.slow,) for case in cases]
    return [pytest.param(*one, marks=mark) for one, mark in zip(values, marks, strict=True)]


def part_of(tests: Sequence[T], text: str) -> Sequence[T]:
    """Return one of equal parts of a tier, ``"2/6"`` for the second of six.

    Raises:
        ValueError: the text is something else.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"--part is {text!r}; expected a part of all tests, 2/6 say")
    return tests[int(found[1]) - 1 :: int(found[2])]
