"""Rounds, ratios and their spread, and the JSON file that keeps them.

All ways run in the same processes on the same model, in turns (A B C, B C A, ...), after one
warm-up round. Each round begins with another way, because the first one may find the machine in
another state. In every round each way is divided by the limit measured in that round, so that a
slow minute of the machine slows both. The median of these ratios is the figure. The first and third
quartile are its spread.
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
"""Prefix of the names of Holdfast's ways."""

Way = Callable[[], Mapping[str, float]]
"""Runs once, and returns measured quantity -> value."""

Times = dict[str, dict[str, list[float]]]
"""Measured quantity -> way -> one value per round."""


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        parameters: lower bound of the size of the model.
        ranks: number of processes that share it.
        rounds: rounds of measurement, after one warm-up round.
        device: ``cpu`` or ``cuda``.
        scratch: folder for all files of the run, removed at the end.
        quick: only check that everything works.
    """

    parameters: int
    ranks: int
    rounds: int
    device: str
    scratch: Path
    quick: bool = False


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over rounds."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> "Spread":
        """Compute the spread of one or more values."""
        # One value has no quartiles.
        if len(values) == 1:
            value = values[0]
            return Spread(value, value, value)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(statistics.median(values), low, high)


@dataclass
class Figure:
    """One measured quantity, for all ways.

    Attributes:
        name: ``<benchmark>.<quantity>``.
        title: numerator and denominator of the ratio.
        better: ``lower`` or ``higher``.
        samples: way -> ratio of every round. The names of Holdfast's ways begin with `OURS`.
        needed: way -> ratio that it has to reach. Other ways have no target.
        seconds: way, limit or phase -> seconds of the slowest rank in every round, from which the
            ratios are computed.
        note: remark for the reader.
    """

    name: str
    title: str
    better: str
    samples: dict[str, list[float]]
    needed: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    note: str = ""

    def spread(self, way: str) -> Spread:
        """Spread of the ratios of one way."""
        return Spread.of(self.samples[way])

    def met(self, way: str) -> bool:
        """Return whether the median of a way reaches its target."""
        median = self.spread(way).median
        limit = self.needed[way]
        if self.better == "lower":
            return median <= limit
        return median >= limit


Benchmark = Callable[[Options], list[Figure]]


def interleave(
    ways: Mapping[str, Way],
    rounds: int,
    prepare: Callable[[], object] | None = None,
) -> Times:
    """Call every way in turn, in one warm-up round and then ``rounds`` rounds, and collect the
    values by round.

    Args:
        prepare: called before each way, and not measured.
    """
    # A round calls every way once, so that a slow minute of the machine slows all of them.
    names = list(ways)
    rows: list[dict[str, Mapping[str, float]]] = []
    for number in range(rounds + 1):
        first = number % len(names)
        row = {}
        for name in names[first:] + names[:first]:
            if prepare is not None:
                prepare()
            row[name] = ways[name]()
        rows.append(row)

    # Without the warm-up round, and in the order of the ways.
    times: Times = {}
    for row in rows[1:]:
        for name in names:
            for what, value in row[name].items():
                times.setdefault(what, {}).setdefault(name, []).append(value)
    return times


def over(
    limit: str,
    seconds: Mapping[str, list[float]],
    *,
    inverse: bool = False,
) -> dict[str, list[float]]:
    """Divide the seconds of every way by those of ``limit`` in the same round.

    With ``inverse``, divide the limit by the way: the share of the limit's speed, if both move the
    same bytes.
    """
    ratios: dict[str, list[float]] = {}
    for way, values in seconds.items():
        if way == limit:
            continue
        # Values of one round belong together.
        ratios[way] = []
        for own_s, limit_s in zip(values, seconds[limit], strict=True):
            ratios[way].append(limit_s / own_s if inverse else own_s / limit_s)
    return ratios


def describe_machine(options: Options) -> dict[str, Any]:
    """Describe the hardware and software that the figures depend on."""
    gpu = None
    if options.device == "cuda":
        gpu = torch.cuda.get_device_name()
    return {
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def save_results(
    path: Path,
    options: Options,
    figures: list[Figure],
    took_s: Mapping[str, float],
) -> dict[str, Any]:
    """Write the figures of a run, and the seconds of each benchmark, to ``path``. Returns the
    document.
    """
    # The scratch folder is gone after the run.
    described = asdict(options)
    del described["scratch"]
    document = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": describe_machine(options),
        "options": described,
        "took_s": dict(took_s),
        "figures": [asdict(figure) for figure in figures],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def read_figures(document: Mapping[str, Any]) -> list[Figure]:
    """Read figures from a document of `save_results`."""
    return [Figure(**figure) for figure in document["figures"]]
