"""Rounds, ratios and their spread, and the JSON they are kept in.

Everything that is compared runs in the same processes on the same model, one after the other in every round (A B C
A B C ...), after one round that only warms up. What is reported is a ratio: in every round each way is divided by the
limit measured in that round, so that a machine that is slow for a minute slows both. The median of these ratios is the
figure, the first and the third quartile are its spread.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

OURS = "Holdfast"
"""What the names of our own ways begin with."""

Times = dict[str, dict[str, list[float]]]
"""What is measured -> way -> one value a round."""


@dataclass(frozen=True)
class Options:
    """What a run was asked for.

    Attributes:
        parameters: of the model, at least.
        ranks: processes that share it.
        rounds: how often everything is measured, after one round of warming up.
        device: ``cpu`` or ``cuda``.
        scratch: folder for everything that is written; removed at the end.
        quick: a run that only shows that everything works.
    """

    parameters: int
    ranks: int
    rounds: int
    device: str
    scratch: Path
    quick: bool = False


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some rounds."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> "Spread":
        """The spread of one value or more."""
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(statistics.median(values), low, high)


@dataclass
class Figure:
    """One thing that is measured, of all ways side by side.

    Attributes:
        name: ``<benchmark>.<what>``.
        title: what is divided by what.
        better: ``lower`` or ``higher``.
        samples: way -> ratio of every round. The names of our own begin with `OURS`.
        needed: way -> the ratio it has to reach, of those that have to.
        seconds: way, limit or phase -> seconds of every round, of the slowest rank; what the ratios come from.
        note: what a reader has to know.
    """

    name: str
    title: str
    better: str
    samples: dict[str, list[float]]
    needed: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    note: str = ""

    def spread(self, way: str) -> Spread:
        """Of one way's ratios."""
        return Spread.of(self.samples[way])

    def met(self, way: str) -> bool:
        """Whether the median of a way is what is needed of it."""
        median, limit = self.spread(way).median, self.needed[way]
        return median <= limit if self.better == "lower" else median >= limit


Benchmark = Callable[[Options], list[Figure]]


def interleave(ways: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int) -> Times:
    """Call every way in turn, ``rounds`` times over after a round of warming up; what each measured, by round."""
    times: Times = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            measured = way()
            for what, value in measured.items() if number else ():
                times.setdefault(what, {}).setdefault(name, []).append(value)
    return times


def over(limit: str, seconds: Mapping[str, list[float]], *, inverse: bool = False) -> dict[str, list[float]]:
    """Every other way's seconds over those of ``limit`` in the same round; ``inverse``: the limit's over theirs, which
    is the share of the limit's speed that is reached when the bytes are the same."""
    return {
        way: [b / a if inverse else a / b for a, b in zip(values, seconds[limit], strict=True)]
        for way, values in seconds.items()
        if way != limit
    }


def describe_machine(options: Options) -> dict[str, Any]:
    """What the figures depend on besides the code."""
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    return {
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def save_results(path: Path, options: Options, figures: list[Figure], took_s: Mapping[str, float]) -> dict[str, Any]:
    """Write the figures of a run, and how long each benchmark took, to ``path``; the document."""
    document = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": describe_machine(options),
        "options": {k: v for k, v in asdict(options).items() if k != "scratch"},
        "took_s": dict(took_s),
        "figures": [asdict(figure) for figure in figures],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def read_figures(document: Mapping[str, Any]) -> list[Figure]:
    """The figures of a document that `save_results` wrote."""
    return [Figure(**figure) for figure in document["figures"]]
