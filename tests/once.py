"""What takes long to make is made once, by whichever process of pytest-xdist comes first."""

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
    """What ``make`` returns, called with a new folder in the first process that wants it; the others wait for it.

    Args:
        factory: of this process.
        name: of the thing, which all processes call it by.
        make: called with the folder; its result can be pickled.
    """
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # that of all processes
    folder, result = base / name, base / f"{name}.pickle"
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that failed
            folder.mkdir()
            result.write_bytes(pickle.dumps(make(folder)))
        return pickle.loads(result.read_bytes())
