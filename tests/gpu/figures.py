"""Figures of a session: on the terminal, as JSON, and as the block for docs/performance.md."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

NOTES, JSON, PAGE = "figures.jsonl", "figures.json", "performance-gpu.md"
BEGIN, END = "<!-- gpu: the block that `make gpu` writes -->", "<!-- end of gpu -->"


@dataclass(frozen=True)
class Figure:
    """One number.

    Attributes:
        name: measured quantity.
        value: the number.
        unit: its unit, ``s``, ``GB/s`` ..., or empty for a ratio.
        of: hardware on which it was measured.
    """

    name: str
    value: float
    unit: str
    of: str

    def cells(self) -> tuple[str, str, str]:
        """A row of the table."""
        return self.name, f"{self.value:.3g} {self.unit}".strip(), self.of


class Figures:
    """All figures of a session, in the order of their measurement.

    Args:
        folder: folder in which each figure is noted at once, for runs that are cut short. None:
            they are not kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self.all: list[Figure] = []
        self._folder = folder

    def add(self, name: str, value: float, unit: str, of: str) -> None:
        """Add a figure (see `Figure`)."""
        self.all.append(Figure(name, value, unit, of))
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / NOTES).open("a") as notes:
                notes.write(json.dumps(asdict(self.all[-1])) + "\n")

    def table(self, title: str) -> Table:
        """Format the table for people."""
        table = Table("figure", "value", "of", title=title)
        for figure in self.all:
            table.add_row(*figure.cells())
        return table

    def page(self, title: str) -> str:
        """The block for docs/performance.md, markers included."""
        rows = [f"| {' | '.join(cells)} |" for cells in [figure.cells() for figure in self.all]]
        return "\n".join(
            [BEGIN, "", title, "", "| figure | value | of |", "|---|---:|---|", *rows, "", END, ""]
        )

    def save(self, title: str, machine: dict[str, Any], outcomes: dict[str, int]) -> None:
        """Write both files."""
        folder = self._folder
        assert folder is not None
        document = {
            "machine": machine,
            "tests": outcomes,
            "figures": [asdict(figure) for figure in self.all],
        }
        (folder / JSON).write_text(json.dumps(document, indent=2) + "\n")
        (folder / PAGE).write_text(self.page(title))
