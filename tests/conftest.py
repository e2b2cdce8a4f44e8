"""What holds for every test."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.limits import stretched

pytest_plugins = ["tests.faults.tally"]

# What a shell starts in its background ignores Ctrl-C, and so would all that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each process that the tests start reads startup/sitecustomize.py.
STARTUP = str(Path(__file__).parent / "startup")
_PATH = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if STARTUP not in _PATH:  # a process of pytest-xdist has it from the first one
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTUP, *_PATH]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Stretch the time limit of every test, its own or that of all."""
    of_all = config.getoption("timeout")
    of_all = float(config.getini("timeout") if of_all is None else of_all)
    for item in items:
        own = item.get_closest_marker("timeout")
        limit_s = of_all if own is None else own.args[0]
        item.add_marker(pytest.mark.timeout(stretched(limit_s)), append=False)


def pytest_collection_finish() -> None:
    """Leave what the imports have made out of all later collections: an engine begins and ends with a full one."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """End the Ray that the modules have shared, in a process that had one."""
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
