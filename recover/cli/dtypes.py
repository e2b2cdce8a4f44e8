"""The option ``--dtype``: the words of `EXPORT_DTYPES`, whose module imports torch, which takes ``--help`` too long."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

DTYPES = ("float32", "bfloat16", "float16")


def dtype_option(default: str) -> Callable[[F], F]:
    """The option ``--dtype``, as ``dtype``; ``default`` says what it is without."""
    return click.option("--dtype", type=click.Choice(DTYPES), help=f"Of floating-point weights.  [default: {default}]")
