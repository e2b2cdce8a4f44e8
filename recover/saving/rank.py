"""What one rank writes into a generation: first it captures its state, then it writes what it captured.

Captured are the generators, the user's objects and what the engines count, as they are, and the engines' tensors: the
live ones, for a snapshot that is written at once, or a copy of them in staging buffers, for one that is written in the
background. A Hugging Face export is written from the same tensors, or from the weights alone.

What lasts from one snapshot to the next (buffers, plans, the group for the background) is kept by a `RankWriter`, in
the process of the rank, under the key of the handler that opened it.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...engine.dcp.fingerprint import sample_state
from ...engine.dcp.save import DCPSaver
from ...engine.dcp.state import DCPState
from ...engine.staging.staged_state import Staging
from ...engine.tensors import flatten
from ...utils.atomic_folder import as_write_error
from ...utils.distributed import all_ranks_succeed, drop_group, get_rank, new_background_group
from ...utils.errors import ConfigError, WorkerLost
from ...utils.logging import get_logger
from ...utils.manifest import FileEntry
from ...utils.rng import capture_rng, restore_rng
from ..consistency import EngineSample, count_engine
from ..coordinator import Ranks, RankTarget, rank_target
from ..process_state import capture_process, rank_state_name, write_process
from .rank_exports import Export, ExportRequest

logger = get_logger(__name__)


@dataclass(frozen=True)
class RankPart:
    """What one rank wrote, and what it says of it.

    Attributes:
        entries: every file, fsynced, named relative to the generation.
        versions: engine name -> weight version, of the engines that count one.
        samples: engine name -> this rank's sample of the state.
        rng: digest of this rank's generators.
    """

    entries: list[FileEntry]
    versions: dict[str, int]
    samples: dict[str, EngineSample]
    rng: str


@dataclass(frozen=True)
class _Capture:
    """A rank's state at one step boundary; ``values`` are nested tensors, as `DCPState.state_dict` has them."""

    target: RankTarget
    rank: int
    values: dict[str, dict[str, Any]]
    counts: dict[str, EngineSample]
    versions: dict[str, int]
    process: bytes
    rng: str


@dataclass(frozen=True)
class _ExportCapture:
    """An export of the engine ``name``, the group of its ranks, and how many threads it computes with."""

    export: Export
    name: str
    group: dist.ProcessGroup | None
    threads: int


class RankWriter:
    """One rank's side of the snapshots of one handler.

    Args:
        background_group: gloo group for snapshots that are written in the background; None when there are none.
        request: what is exported; None: nothing.

    Attributes:
        background_group: see above.
        rng: the generators of this rank as they are now, which is as `load` leaves them.
    """

    def __init__(self, background_group: dist.ProcessGroup | None, request: ExportRequest | None) -> None:
        self.background_group, self._request = background_group, request
        self.rng = capture_rng()
        self._savers: dict[str, DCPSaver] = {}
        self._stagings: dict[str, tuple[nn.Module, Staging]] = {}
        self._capture: _Capture | None = None
        self._export: _ExportCapture | None = None

    def capture(self, target: RankTarget, staged: bool, snapshot: bool, export: bool) -> None:
        """Capture what a snapshot, an export, or both are made of, as it is; with ``staged`` it may change once this
        has returned (see `staged_state`)."""
        self._capture = self._export = None
        if snapshot:
            self._capture = self._capture_snapshot(target, staged)
        if export:
            self._export = self._capture_export(target, staged)

    def _capture_snapshot(self, target: RankTarget, staged: bool) -> _Capture:
        states = {name: target.state(name) for name in target.engines}
        counts = {name: count_engine(state) for name, state in states.items()}
        versions = {name: e.get_version() for name, e in target.engines.items() if hasattr(e, "get_version")}
        process, rng = capture_process(target.stateful)
        if staged:
            values = {name: self._staging_of(name, state).stage(state) for name, state in states.items()}
        else:
            values = {name: state.state_dict() for name, state in states.items()}
        return _Capture(target, get_rank(), values, counts, versions, process, rng)

    def _capture_export(self, target: RankTarget, staged: bool) -> _ExportCapture:
        assert self._request is not None, "an export is due, but none was ever to be"
        name, weights = self._request.name(target), None
        if staged and self._capture is not None:
            weights = self._capture.values[name]["model"]
        elif staged:
            state = target.state(name)
            weights = self._staging_of(name, state).stage(state, weights_only=True)["model"]
        export = Export.of(self._request, target, name, weights)
        return _ExportCapture(export, name, target.group_of(name), torch.get_num_threads())

    def write(self, folder: Path, in_background: bool) -> RankPart:
        """Write what was captured; all ranks call it."""
        capture, self._capture = self._capture, None
        assert capture is not None, "nothing was captured"
        target = capture.target
        group = self.background_group if in_background else target.group_of()
        with all_ranks_succeed("preparing the snapshot", group), as_write_error(folder):  # a collective save needs all
            for name in capture.values:
                (folder / name).mkdir(exist_ok=True)
            entries = [write_process(folder, rank_state_name(capture.rank), capture.process)]
            if in_background:
                for name in capture.values:
                    self._stagings[name][1].finish()
            samples = {
                name: replace(capture.counts[name], sample=sample_state(dict(flatten(values))))
                for name, values in capture.values.items()
            }
        for name, values in capture.values.items():
            saver = self._savers.setdefault(name, DCPSaver())
            writers = self.background_group if in_background else target.group_of(name)
            for entry in saver.write(folder / name, values, writers):
                entries.append(FileEntry(f"{name}/{entry.name}", entry.bytes, entry.digest))
        if in_background:
            with all_ranks_succeed("finishing the snapshot", group):
                for name in capture.values:
                    self._stagings[name][1].finish()
        return RankPart(entries, capture.versions, samples, capture.rng)

    def export(self, folder: Path, in_background: bool) -> None:
        """Write the export that was captured; all ranks call it."""
        capture, self._export = self._export, None
        assert capture is not None, "nothing was captured"
        if not in_background:
            capture.export.write(folder, capture.group)
            return
        torch.set_num_threads(capture.threads)  # else a new thread takes all cores
        with all_ranks_succeed("preparing the export", self.background_group):
            self._stagings[capture.name][1].finish()
        capture.export.write(folder, self.background_group, self.background_group)

    def prepare(self, target: RankTarget, snapshots: bool) -> None:
        """Take the host memory that `capture` will need with ``staged``: of the weights alone without ``snapshots``."""
        names = list(target.engines) if snapshots else [] if self._request is None else [self._request.name(target)]
        for name in names:
            state = target.state(name)
            self._staging_of(name, state).prepare(state, weights_only=not snapshots)

    def _staging_of(self, name: str, state: DCPState) -> Staging:
        """Of this engine's name and no other: two may share a model, and have optimizers of their own."""
        model, staging = self._stagings.get(name, (None, None))
        if staging is None or model is not state.model:
            if staging is not None:
                staging.release()
            staging = Staging(state.model)
            self._stagings[name] = state.model, staging
        return staging

    def close(self) -> None:
        """Give up the buffers and the group."""
        for _, staging in self._stagings.values():
            staging.release()
        drop_group(self.background_group)


_WRITERS: dict[str, RankWriter] = {}


def open_writer(
    holder: Any, key: str, timeout_s: float | None, snapshots: bool, request: ExportRequest | None = None
) -> None:
    """Make this rank's `RankWriter` for the handler ``key``, with the memory it needs; all ranks call it.

    Args:
        holder: see `rank_target`.
        key: unique to the handler.
        timeout_s: how long ranks wait for each other in the background; None when nothing is written there.
        snapshots: whether any is ever due.
        request: what is exported besides; None: nothing.

    Raises:
        ConfigError: see `DCPState.state_dict`.
        OSError, RuntimeError: there is no memory to stage in.
    """
    close_writer(holder, key)
    target = rank_target(holder)
    background_group = None if timeout_s is None else new_background_group(target.group, timeout_s)
    _WRITERS[key] = RankWriter(background_group, request)
    if timeout_s is not None:
        _WRITERS[key].prepare(target, snapshots)


def capture_rank(holder: Any, key: str, staged: bool, snapshot: bool, export: bool) -> None:
    """See `RankWriter.capture`.

    Raises:
        ConfigError: a user object's state could not be read back, or `open_writer` was not called on this rank.
    """
    if key not in _WRITERS:
        raise ConfigError("this rank does not know the handler; call load with the same workers before dump")
    _WRITERS[key].capture(rank_target(holder), staged, snapshot, export)


def write_rank(holder: Any, key: str, folder: str, in_background: bool) -> RankPart:
    """Write this rank's part of a generation, as it was captured; all ranks call it.

    Args:
        holder: see `rank_target`.
        key: as for `capture_rank`.
        folder: that all ranks write into.
        in_background: whether other collectives may go on meanwhile.

    Raises:
        CheckpointWriteError: this rank could not write.
        PeerError: all is well here, but not on another rank.
    """
    return _WRITERS[key].write(Path(folder), in_background)


def export_rank(holder: Any, key: str, folder: str, in_background: bool) -> None:
    """Write this rank's part of an export, as it was captured; else as `write_rank`."""
    _WRITERS[key].export(Path(folder), in_background)


def open_writers(ranks: Ranks, key: str, aside_s: float | None, snapshots: bool, request: ExportRequest | None) -> None:
    """`open_writer` on every rank; none stays open if any fails."""
    with ExitStack() as undo:
        undo.callback(close_writers, ranks, key)
        ranks.run_all(open_writer, key, aside_s, snapshots, request)
        undo.pop_all()


def close_writer(holder: Any, key: str) -> None:
    """Forget the handler ``key``; each rank for itself."""
    if (writer := _WRITERS.pop(key, None)) is not None:
        writer.close()


def close_writers(ranks: Ranks, key: str) -> None:
    """`close_writer` on every rank; those of a group that is lost have nothing left to forget."""
    try:
        if ranks.is_driver:
            ranks.run_all(close_writer, key)
        else:
            close_writer(None, key)
    except WorkerLost as loss:
        logger.warning("%s, after the last snapshot", loss)


def restore_rank_rng(holder: Any, key: str) -> None:
    """Put this rank's generators back to what they were when the handler ``key`` was loaded; each rank for itself."""
    restore_rng(_WRITERS[key].rng)


def writer_group(key: str) -> dist.ProcessGroup | None:
    """The group for the background of a handler in this process."""
    return _WRITERS[key].background_group
