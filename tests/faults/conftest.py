"""Fixtures of the fault tests: the tally of injected faults, and generations to damage."""

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.generations import Victim, make_generations
from tests.faults.power_traces import Recorded, record
from tests.faults.share import SHARE
from tests.faults.tally import TALLY, Tally
from tests.faults.workshop import Workshop, workshop

SAY_EVERY_S = 5.0


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    """The table to which tests report injected faults and their outcomes."""
    return pytestconfig.stash[TALLY]


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line of progress at once, despite captured output, if all faults are injected.
    Otherwise only with -s.
    """
    reporter: Any = request.config.pluginmanager.getplugin("terminalreporter")
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")

    def line(text: str) -> None:
        if SHARE == 1 and reporter is not None:  # a process of pytest-xdist has no reporter
            with capture.global_and_fixture_disabled():
                reporter.ensure_newline()
                reporter.write_line(f"  {text}")
        else:
            print(text, flush=True)

    return line


@pytest.fixture
def progress(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say`, limited to one line every few seconds, for loops over thousands of cheap faults."""
    last = time.monotonic()

    def line(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= SAY_EVERY_S:
            last = time.monotonic()
            say(text)

    return line


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``recover`` folder of a run of two ranks with the generations of steps 0 and 1. Tests
    change only copies.
    """
    return make_generations(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="session")
def shop() -> Iterator[Workshop]:
    """Two warm ranks and a scratch folder."""
    with workshop() as opened:
        yield opened


@pytest.fixture(scope="session")
def recorded(shop: Workshop) -> Callable[[str], Recorded]:
    """A function that performs a scenario for power cuts once."""
    return cache(partial(record, shop))


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    """Engines and other state of a warm process, to load generations into."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Victim()
    torch.set_num_threads(threads)
