"""Share of all faults to inject: ``HOLDFAST_FAULTS=1%`` (the default), ``10%``, ``100%``.

The choice is even over the faults of each kind, always the same, and never empty.
"""

import math
import os
import re
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def parse_share(text: str) -> float:
    """Parse ``"10%"`` as 0.1.

    Raises:
        ValueError: the text is not a percentage above 0 and up to 100.
    """
    number = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if number is None or not 0 < float(number[1]) <= 100:
        raise ValueError(
            f"HOLDFAST_FAULTS is {text!r}; expected the share of faults to inject, 1% to 100% say"
        )
    return float(number[1]) / 100


SHARE = parse_share(os.environ.get("HOLDFAST_FAULTS", "1%"))
"""Share of all faults that this session injects, 1.0 for all."""


def pick(faults: Sequence[T], share: float) -> list[T]:
    """Choose ``share`` of the faults evenly, rounded up, in their order."""
    n = math.ceil(round(len(faults) * share, 9))
    return [faults[(2 * i + 1) * len(faults) // (2 * n)] for i in range(n)]
