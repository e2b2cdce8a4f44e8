"""Statistics of steps: summed over ranks, and logged exactly once per step to JSON Lines and
trackers.

A run that was killed after its last snapshot repeats some steps. `StatsLogger.resume_after` removes
their lines first, so that the files equal those of a run that was never killed. Lines are flushed
at every step, so a kill loses none. A power cut may lose the last ones.
"""

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import xxhash

from .distributed import RankGroup, control_group, gather_numbers, gather_objects, get_world_size
from .errors import PeerError
from .files import StrPath, replace_atomically
from .json_lines import read_lines
from .trackers import TRACKERS, TrackedRun, Tracker, require_trackers

STATS_NAME = "stats.jsonl"
SPEED_STATS = ("tokens_per_second", "mfu")
"""Statistics of a step that differ between two equal steps."""
RUN_ID_NAME = "run_id"
"""Name of the file with the run's id in trackers."""


class StatsLogger:
    """Writer of ``<folder>/stats.jsonl``, which passes the same numbers to trackers.

    The file is the record. When a tracker is opened it receives the steps that it lacks. One
    process per run owns the
    folder: rank 0 under torchrun, the driver under Ray.

    Example:
        >>> stats = StatsLogger("out", trackers=["tensorboard"])
        >>> stats.resume_after(None)
        >>> stats.log(0, {"loss": 0.5})
    """

    def __init__(
        self,
        folder: StrPath,
        trackers: Sequence[str] = (),
        *,
        project: str = "holdfast",
        name: str | None = None,
    ) -> None:
        """Create the folder. Existing contents stay until `resume_after`.

        Args:
            folder: folder of the files.
            trackers: names in `holdfast.utils.trackers.TRACKERS`.
            project: project name in trackers.
            name: run name in trackers. None means the name of the folder.

        Raises:
            ConfigError: a tracker is unknown or not installed.
        """
        require_trackers(trackers)
        self._folder = Path(folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._names = list(trackers)
        self._project = project
        self._name = name or self._folder.resolve().name
        self._logged_step = -1
        self._file: IO[bytes] | None = None
        self._trackers: list[Tracker] = []

    def resume_after(self, step: int | None) -> None:
        """Remove the lines of steps after ``step``, or of all steps if it is None (a fresh start).

        Call it before the first `log`. The file is replaced atomically, without lines that a crash
        has torn. For trackers, a fresh start is a new run.
        """
        self.close()
        lines = self._lines()
        if step is None:
            last = -1
            self._logged_step = -1
            run_id = self._folder / RUN_ID_NAME
            run_id.unlink(missing_ok=True)
        else:
            # Trackers keep what they have, so they need to know the last step ever logged.
            last = step
            logged = [line["step"] for line in lines]
            self._logged_step = max([last, *logged])

        kept = [json.dumps(line) + "\n" for line in lines if line["step"] <= last]
        contents = "".join(kept).encode()
        replace_atomically(self._folder / STATS_NAME, contents)

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        """Append one line, ``{"step": 7, "loss": 0.5, ...}``, and log it to each tracker that lacks
        the step.

        Args:
            step: global step, counted from 0.
            stats: name -> number. NaN and infinity are written as Python's json does (``NaN``).

        Raises:
            ValueError: a stat is called ``step``.
        """
        if "step" in stats:
            raise ValueError(
                f"a stat is called 'step', the name of the step number; found {sorted(stats)}"
            )
        values = {name: float(value) for name, value in stats.items()}

        # The file is the record, so that it gets the line before the trackers.
        if self._file is None:
            self._open()
        assert self._file is not None
        line = json.dumps({"step": step, **values})
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        for tracker in self._trackers:
            _give(tracker, step, values)

    def close(self) -> None:
        """Close the files and the trackers. A later `log` opens them again."""
        if self._file is not None:
            self._file.close()
        for tracker in self._trackers:
            tracker.close()
        self._file = None
        self._trackers = []

    def _lines(self) -> list[dict[str, Any]]:
        path = self._folder / STATS_NAME
        if not path.exists():
            return []
        return read_stats(path)

    def _open(self) -> None:
        path = self._folder / STATS_NAME
        lines = self._lines()

        # The last step in the file, and the last one that any process has logged.
        last = max((line["step"] for line in lines), default=-1)
        logged = max(last, self._logged_step)

        # A line that a crash has torn gets its end, so that the next one starts a new line.
        torn = False
        if path.exists():
            torn = path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = open(path, "ab")  # noqa: SIM115  (close() closes it)
        if torn:
            self._file.write(b"\n")

        # A tracker that cannot be opened fails the next `log`, too.
        if self._names:
            run = TrackedRun(self._folder, self._project, self._name, self._run_id(), last, logged)
            try:
                self._open_trackers(run, lines)
            except BaseException:
                self.close()
                raise
        self._logged_step = -1

    def _open_trackers(self, run: TrackedRun, lines: list[dict[str, Any]]) -> None:
        # Trackers get the steps that they lack.
        for name in self._names:
            tracker = TRACKERS[name](run)
            self._trackers.append(tracker)
            for line in lines:
                values = dict(line)
                step = values.pop("step")
                _give(tracker, step, values)

    def _run_id(self) -> str:
        path = self._folder / RUN_ID_NAME
        if not path.exists():
            replace_atomically(path, uuid.uuid4().hex[:12].encode())
        return path.read_text()


def _give(tracker: Tracker, step: int, values: Mapping[str, float]) -> None:
    if step > tracker.has_step:
        tracker.log(step, values)
        tracker.has_step = step


def read_stats(path: StrPath) -> list[dict[str, Any]]:
    """Read the lines of a ``stats.jsonl`` in file order.

    A line torn by a crash is left out, with a warning unless it is the last one.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    return list(read_lines(path, "step"))


def reduce_stats(sums: Mapping[str, float], group: RankGroup = None) -> dict[str, float]:
    """Sum each named number over the ranks of a group, in float64. Every rank gets all sums.

    Costs two small collectives regardless of the number of names: one compares a digest of the
    names, one adds.

    Raises:
        PeerError: ranks have different names. Raised on all ranks, and lists the differences from
            rank 0.
    """
    names = sorted(sums)
    if get_world_size(group) == 1:
        return {name: float(sums[name]) for name in names}
    # Ranks compare 53 bits of a digest, which a float64 holds.
    encoded = json.dumps(names).encode()
    digest = xxhash.xxh3_64_intdigest(encoded) >> 11
    digests = gather_numbers([digest], group)
    if any(theirs != digest for (theirs,) in digests):
        all_names = gather_objects(names, group)
        raise PeerError("summing stats over ranks", _differences(all_names))

    own = [sums[name] for name in names]
    totals = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(totals, group=control_group(group))
    return dict(zip(names, totals.tolist(), strict=True))


def _differences(names: list[list[str]]) -> dict[int, str]:
    """Say for each rank that has other names than rank 0 what it lacks and has besides."""
    first, *others = map(set, names)
    errors = {}
    for rank, theirs in enumerate(others, start=1):
        lacks = sorted(first - theirs)
        besides = sorted(theirs - first)
        if lacks or besides:
            errors[rank] = f"names differ from rank 0: lacks {lacks}, has besides {besides}"
    return errors


class RunningMeans:
    """Means of named numbers since the last `take`. Infinite numbers and NaN do not count."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}

    def add(self, stats: Mapping[str, float]) -> None:
        """Add one number per name."""
        # A name is there from its first number on, because all ranks must have the same names.
        for name, value in stats.items():
            self._sums.setdefault(name, 0.0)
            self._counts.setdefault(name, 0.0)
            if math.isfinite(value):
                self._sums[name] += value
                self._counts[name] += 1

    def take(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Return the means over all ranks of ``group`` and start again. Collective."""
        names = list(self._sums)
        own = {}
        for name in names:
            own[f"sum {name}"] = self._sums[name]
            own[f"count {name}"] = self._counts[name]
        totals = reduce_stats(own, group)

        # A failed collective keeps the numbers for the next call.
        self._sums = {}
        self._counts = {}

        # A name without a finite number has no mean.
        means = {}
        for name in names:
            count = totals[f"count {name}"]
            if count:
                means[name] = totals[f"sum {name}"] / count
        return means
