"""Numbers a step: summed over ranks, and logged to JSON Lines and TensorBoard with each step exactly once.

A run that was killed after its last snapshot has logged steps that it will do again. `StatsLogger.resume_after`
takes those out first, so that the files of a run that was killed are those of one that was not. Lines are flushed
every step: a kill loses none, a power cut may lose the last ones.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash

from .distributed import control_group, gather_numbers, gather_objects, get_world_size
from .errors import PeerError
from .files import replace_atomically
from .logging import get_logger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = get_logger(__name__)

STATS_NAME = "stats.jsonl"


class StatsLogger:
    """Writes ``<folder>/stats.jsonl`` and, if asked to, TensorBoard events under ``<folder>/tensorboard``.

    One process of a run owns a folder: rank 0 under torchrun, the driver under Ray.
    """

    def __init__(self, folder: str | os.PathLike[str], *, tensorboard: bool = False) -> None:
        """Make the folder. What it holds stays until `resume_after` says what to keep.

        Args:
            folder: where the files go.
            tensorboard: also log to TensorBoard; without the ``tensorboard`` package, a warning says that it is not.
        """
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tensorboard, self._purge_step = tensorboard, None
        self._file: IO[bytes] | None = None
        self._writer: SummaryWriter | None = None

    def resume_after(self, step: int | None) -> None:
        """Forget what was logged before of steps after ``step``; of all steps when it is None (a fresh start).

        Call it before the first `log`. The file is replaced atomically; lines torn by a crash go too.
        """
        self.close()
        path = self._folder / STATS_NAME
        kept = [line for line in read_stats(path) if step is not None and line["step"] <= step] if path.exists() else []
        replace_atomically(path, "".join(map(_to_line, kept)).encode())
        self._purge_step = 0 if step is None else step + 1

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        """Append one line, ``{"step": 7, "loss": 0.5, ...}``, and one TensorBoard scalar a name.

        Args:
            step: global step, counted from 0.
            stats: name -> number. Not-a-number and infinity are written as python's json does (``NaN``).

        Raises:
            ValueError: a stat is called ``step``.
        """
        if "step" in stats:
            raise ValueError(f"a stat is called 'step', the name of the step number; found {sorted(stats)}")
        values = {name: float(value) for name, value in stats.items()}
        if self._file is None:
            self._open()
        assert self._file is not None
        self._file.write(_to_line({"step": step, **values}).encode())
        self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        """Close the files. A later `log` opens them again."""
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()
        self._file = self._writer = None

    def _open(self) -> None:
        path = self._folder / STATS_NAME
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = open(path, "ab")  # noqa: SIM115  (close() closes it)
        if torn:
            self._file.write(b"\n")
        if self._tensorboard:
            self._writer = _open_tensorboard(self._folder / "tensorboard", self._purge_step)
            self._purge_step = None


def read_stats(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a ``stats.jsonl``, in the order of the file.

    A line torn by a crash is left out, with a warning unless it is the last one.

    Raises:
        FileNotFoundError: there is no such file.
    """
    lines = Path(path).read_bytes().split(b"\n")
    stats = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line) if line else None
        except ValueError:
            entry = None
        if isinstance(entry, dict) and "step" in entry:
            stats.append(entry)
        elif line and number < len(lines):
            logger.warning("%s: line %d is torn and left out", path, number)
    return stats


def reduce_stats(sums: Mapping[str, float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Sum each named number over the ranks of a group, in float64; every rank gets all sums.

    Costs two small collectives whatever the number of names: one compares a digest of the names, one adds.

    Raises:
        PeerError: ranks have different names; raised on all ranks, and says who differs from rank 0 in what.
    """
    names = sorted(sums)
    if get_world_size(group) == 1:
        return {name: float(sums[name]) for name in names}
    digest = xxhash.xxh3_64_intdigest(json.dumps(names).encode()) >> 11  # 53 bits, as a float64 holds
    if any(theirs != digest for (theirs,) in gather_numbers([digest], group)):
        first, *others = gather_objects(names, group)
        raise PeerError(
            "summing stats over ranks",
            {
                rank: f"names differ from rank 0: lacks {sorted(set(first) - set(theirs))}, "
                f"has besides {sorted(set(theirs) - set(first))}"
                for rank, theirs in enumerate(others, start=1)
                if theirs != first
            },
        )
    totals = torch.tensor([sums[name] for name in names], dtype=torch.float64)
    dist.all_reduce(totals, group=control_group(group))
    return dict(zip(names, totals.tolist(), strict=True))


def _to_line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry) + "\n"


def _open_tensorboard(folder: Path, purge_step: int | None) -> "SummaryWriter | None":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning("tensorboard is not installed: stats go to %s only; pip install tensorboard", STATS_NAME)
        return None
    return SummaryWriter(str(folder), purge_step=purge_step)
