"""What the fault tests share: the tally of what they inject, and generations to break."""

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
    """Where the tests report what they injected, and what became of it."""
    return pytestconfig.stash[TALLY]


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Show a line of progress at once, captured output or not, where all faults are injected; else with -s."""
    reporter: Any = request.config.pluginmanager.getplugin("terminalreporter")
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")

    def line(text: str) -> None:
        if SHARE == 1 and reporter is not None:  # (a process of pytest-xdist has none)
            with capture.global_and_fixture_disabled():
                reporter.ensure_newline()
                reporter.write_line(f"  {text}")
        else:
            print(text, flush=True)

    return line


@pytest.fixture
def progress(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say`, but at most one line every few seconds: for loops over thousands of cheap faults."""
    last = time.monotonic()

    def line(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= SAY_EVERY_S:
            last = time.monotonic()
            say(text)

    return line


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``recover`` folder of a run of two ranks, with the generations of steps 0 and 1: to copy, not to change."""
    return make_generations(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="session")
def shop() -> Iterator[Workshop]:
    """Two warm ranks, and a folder for what they break."""
    with workshop() as opened:
        yield opened


@pytest.fixture(scope="session")
def recorded(shop: Workshop) -> Callable[[str], Recorded]:
    """A scenario of power cuts, performed once."""
    return cache(partial(record, shop))


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    """A warm process's state to load generations into."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Victim()
    torch.set_num_threads(threads)
