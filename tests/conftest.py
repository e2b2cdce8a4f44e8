"""Fixtures and hooks for all tests."""

import gc
import multiprocessing
import os
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.limits import stretched
from tests.tiers import part_of

SIMULATED_DEVICES = bool(os.environ.get("HOLDFAST_SIMULATED_CUDA"))

pytest_plugins = [
    "tests.faults.tally",
    *(["tests.simulated_cuda.reports"] if SIMULATED_DEVICES else []),
]

# Processes in a shell's background ignore Ctrl-C, and so would all processes that the tests start
# and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread of torch in each process: more of them wait for each other when all cores are busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each process that the tests start reads startup/sitecustomize.py, and finds the modules that
# examples import from their own folder.
STARTUP = str(Path(__file__).parent / "startup")
EXAMPLES = str(Path(__file__).parents[1] / "examples")
_PATH = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if STARTUP not in _PATH:  # a process of pytest-xdist inherits it from the first one
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTUP, *_PATH, EXAMPLES]))

if SIMULATED_DEVICES:  # this process, too
    import torch  # noqa: F401  (may have the device installed at its import, in a process that read the above)

    from tests.simulated_cuda.device import install

    install()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--part``. It is no variable: a test that starts pytest would hand that on."""
    parser.addoption("--part", help="run one of equal parts, 2/6 say for the second of six")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be off
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let tests of different files that share something go to one process, with ``--dist
    loadfile``.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from tests.scheduling import ByFile  # not every environment has pytest-xdist

    return ByFile(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, if there are any, from all tests but those for GPUs. The others compare with
    values of the CPU.
    """
    selected = re.fullmatch(r"gpu\b.*", config.option.markexpr) is not None
    for_gpus = selected or SIMULATED_DEVICES or os.environ.get("HOLDFAST_SHARED_GPU")
    if Path("/dev/nvidiactl").exists() and not for_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(trylast=True)  # after the choice of a tier
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with the longest time limits first, so that none is left for last. Then choose a
    part, if one is asked for.
    """
    longest = defaultdict[Path, float](float)
    for item in items:
        longest[item.path] = max(longest[item.path], _limit_s(item))
    items.sort(key=lambda item: -longest[item.path])
    part = config.getoption("part")
    if part:
        chosen = part_of(items, part)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout reads the limit
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Stretch the time limit of a test when it begins: the machine may have become busy."""
    item.add_marker(pytest.mark.timeout(stretched(_limit_s(item))), append=False)
    return (yield)


def _limit_s(item: pytest.Item) -> float:
    own = item.get_closest_marker("timeout")
    if own is not None:
        return float(own.args[0])
    of_all = item.config.getoption("timeout")
    return float(item.config.getini("timeout") if of_all is None else of_all)


@pytest.fixture(autouse=True)
def same_folder() -> Iterator[None]:
    """Fail a test that leaves the process in another working folder, as the next ones would."""
    before = os.getcwd()
    yield
    left = os.getcwd()
    os.chdir(before)
    assert left == before, "the test has changed the working folder"


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Take signals back from a recovery handler that a test has not closed."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        owner = getattr(signal.getsignal(number), "__self__", None)
        if type(owner).__module__ == "holdfast.recover.signals" and handler is not None:
            signal.signal(number, handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude imported objects from later garbage collections, because every engine begins and ends
    with one. A process of pytest-xdist also starts the server of `tests.helpers.run_ranks`, before
    a test can start one without the imports of ranks.
    """
    gc.collect()
    gc.freeze()
    if hasattr(session.config, "workerinput"):
        from tests.helpers import PRELOAD  # imports torch, as the tests did meanwhile

        multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
        forkserver.ensure_running()


def pytest_sessionfinish() -> None:
    """End the Ray that the modules share, in a process that has one."""
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
