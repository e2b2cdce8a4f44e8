"""Table of injected faults: counted by the tests of this folder, printed and judged at the end of
the session.

Tests report faults to the fixture ``tally``. The session fails unless every injected fault was
survived with nothing lost, nothing undetected and nothing executed. ``HOLDFAST_FAULTS`` sets the
share of faults (share.py), and ``make faults`` injects all of them. The table is also written, as
text and as JSON, to the folder in ``HOLDFAST_FAULTS_OUT``. With pytest-xdist, each process sends
its counts to the first one.
"""

import io
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

from tests.faults.share import SHARE

_SENT = "holdfast_faults"

PROMISED = {
    "SIGKILL at a system call": 750,
    "power loss": 1000,
    "truncated file": 1000,
    "flipped bit": 1000,
    "pickle that runs code": 100,
    "full disk": 50,
    "RLIMIT_FSIZE": 50,
    "ENOSPC": 500,
    "EIO": 500,
    "EDQUOT": 500,
    "EROFS": 500,
    "EMFILE": 500,
    "EACCES": 500,
    "SIGKILL of a random process": 300,
    "SIGSTOP of a random worker": 20,
    "safeguard taken away": 100,
}
"""Kind prefix -> smallest number of faults that all tests of this folder inject, times `SHARE`.

With ``HOLDFAST_FAULTS_WHOLE`` the session fails if it has injected fewer, so that no faults are
left out unnoticed.
"""


@dataclass
class Faults:
    """Outcomes of the faults of one kind.

    Args:
        injected: faults that really happened (not kills that came too late).
        survived: faults after which the oracle of the test held in full.
        lost: faults after which committed data was gone or wrong.
        undetected: damaged files that were loaded, or broken safeguards that no test noticed.
        executed: payloads that ran.
        seconds: wall time of the tests that injected them.
    """

    injected: int = 0
    survived: int = 0
    lost: int = 0
    undetected: int = 0
    executed: int = 0
    seconds: float = 0.0

    def counts(self) -> tuple[int, ...]:
        """All fields without the time, in the order of the table."""
        return self.injected, self.survived, self.lost, self.undetected, self.executed

    @property
    def fine(self) -> bool:
        """Whether all injected faults were survived and nothing bad happened."""
        return self.injected == self.survived and not (
            self.lost or self.undetected or self.executed
        )


class Tally:
    """Counts faults by kind, and their time: the time between two calls of `add` counts for the
    second.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, Faults] = {}
        self._since = time.monotonic()
        self._last: Faults | None = None

    def add(
        self,
        kind: str,
        *,
        injected: int = 0,
        survived: int = 0,
        lost: int = 0,
        undetected: int = 0,
        executed: int = 0,
    ) -> None:
        """Count faults of a kind. Call it after each verdict, also if the test then fails."""
        faults = self.kinds.setdefault(kind, Faults())
        faults.injected += injected
        faults.survived += survived
        faults.lost += lost
        faults.undetected += undetected
        faults.executed += executed
        self._last = faults
        self._charge()

    def merge(self, kinds: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the counts of another process: kind -> fields of `Faults`."""
        for kind, counted in kinds.items():
            faults = self.kinds.setdefault(kind, Faults())
            for name, value in counted.items():
                setattr(faults, name, getattr(faults, name) + value)

    def start_test(self) -> None:
        """Start the time of a test."""
        self._since, self._last = time.monotonic(), None

    def end_test(self) -> None:
        """Count the remaining time of the test for its last kind."""
        self._charge()
        self._last = None

    def total(self) -> Faults:
        """Sum over all kinds."""
        values = [asdict(faults) for faults in self.kinds.values()]
        return Faults(
            **{field.name: sum(value[field.name] for value in values) for field in fields(Faults)}
        )

    @property
    def fine(self) -> bool:
        return all(faults.fine for faults in self.kinds.values())

    def missing(self, share: float) -> list[str]:
        """Kinds with fewer injected faults than this share requires."""
        counts = {
            name: sum(
                faults.injected for kind, faults in self.kinds.items() if kind.startswith(name)
            )
            for name in PROMISED
        }
        # an even choice may contain fewer moments of a kind that counts twice
        evenly = share if share == 1 else 0.8 * share
        floors = {name: max(1, int(least * evenly)) for name, least in PROMISED.items()}
        return [
            f"{name}: {counts[name]} of {least}"
            for name, least in floors.items()
            if counts[name] < least
        ]

    def table(self, title: str) -> Table:
        """Format the table for people."""
        table = Table(title=title)
        table.add_column("kind")
        for name in ("injected", "survived", "lost", "undetected", "executed", "seconds"):
            table.add_column(name, justify="right")
        for kind, faults in self.kinds.items():
            style = "" if faults.fine else "bold red"
            table.add_row(kind, *map(str, faults.counts()), f"{faults.seconds:.1f}", style=style)
        total = self.total()
        table.add_section()
        table.add_row("total", *map(str, total.counts()), f"{total.seconds:.1f}", style="bold")
        return table

    def _charge(self) -> None:
        now = time.monotonic()
        if self._last is not None:
            self._last.seconds += now - self._since
            self._since = now


TALLY = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    """Create one tally per session."""
    config.stash[TALLY] = Tally()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count the time of fixtures for the test that waited for them."""
    tally = item.config.stash[TALLY]
    tally.start_test()
    try:
        return (yield)
    finally:
        tally.end_test()


def _whole() -> bool:
    """Whether all tests of this folder run, as in ``make faults``."""
    return bool(os.environ.get("HOLDFAST_FAULTS_WHOLE"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if the table has losses or too few faults, even if all tests passed."""
    tally = session.config.stash[TALLY]
    output: Any = getattr(session.config, "workeroutput", None)
    if output is not None:  # the first process judges
        output[_SENT] = {kind: asdict(faults) for kind, faults in tally.kinds.items()}
        return
    reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
    lacks = _whole() and bool(tally.missing(SHARE) or (reporter and reporter.stats.get("skipped")))
    if session.exitstatus == pytest.ExitCode.OK and (lacks or not tally.fine):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the counts of a process of pytest-xdist."""
    node.config.stash[TALLY].merge(getattr(node, "workeroutput", {}).get(_SENT, {}))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the table, and write it to ``HOLDFAST_FAULTS_OUT``."""
    tally = config.stash[TALLY]
    if not tally.kinds:
        return
    title = (
        f"faults ({100 * SHARE:g}% of all), Python {platform.python_version()}, torch "
        f"{torch.__version__}"
    )
    text = io.StringIO()
    width = terminalreporter._tw.fullwidth
    Console(file=text, width=max(100, width), force_terminal=bool(terminalreporter.isatty)).print(
        tally.table(title)
    )
    terminalreporter.write_line("")
    terminalreporter.write(text.getvalue())
    if not tally.fine:
        terminalreporter.write_line("the table is not clean: something was not survived", red=True)
    outcomes = {
        name: len(terminalreporter.stats.get(name, ()))
        for name in ("passed", "failed", "error", "skipped")
    }
    if _whole():
        for lack in tally.missing(SHARE):
            terminalreporter.write_line(f"promised and not injected: {lack}", red=True)
        if outcomes["skipped"]:
            terminalreporter.write_line(
                f"{outcomes['skipped']} tests were skipped on this machine", red=True
            )
    if folder := os.environ.get("HOLDFAST_FAULTS_OUT"):
        _keep(tally, title, outcomes, Path(folder))


def _keep(tally: Tally, title: str, outcomes: dict[str, int], folder: Path) -> None:
    """Write ``faults.txt`` and ``faults.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "faults.txt", "w") as file:
        Console(file=file, width=110).print(tally.table(title))
    report = {
        "title": title,
        "fine": tally.fine and not (outcomes["failed"] or outcomes["error"]),
        "tests": outcomes,
        "total": asdict(tally.total()),
        "kinds": {kind: asdict(faults) for kind, faults in tally.kinds.items()},
    }
    (folder / "faults.json").write_text(json.dumps(report, indent=2) + "\n")
