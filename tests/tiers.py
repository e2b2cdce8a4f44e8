"""Cases of a test that represent all of them in the fast tier."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(fast: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases for ``parametrize``, all marked as slow except those in ``fast``, which represent them.

    A case of several arguments is a plain tuple.
    """
    cases, fast = list(cases), list(fast)
    assert all(case in cases for case in fast), f"{fast} are not all among {cases}"
    values = [case if type(case) is tuple else (case,) for case in cases]
    marks = [() if case in fast else (pytest.mark.slow,) for case in cases]
    return [pytest.param(*one, marks=mark) for one, mark in zip(values, marks, strict=True)]
