"""Expensive objects that only the first process of pytest-xdist makes."""

import fcntl
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """Call ``make`` with a new folder in the first process that needs it. The other processes wait
    for the result.

    Args:
        factory: factory of this process.
        name: name of the object, the same in all processes.
        make: function of the folder whose result can be pickled.
    """
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # shared by all processes
    folder, result = base / name, base / f"{name}.pickle"
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a process that failed
            folder.mkdir()
            result.write_bytes(pickle.dumps(make(folder)))
        return pickle.loads(result.read_bytes())
