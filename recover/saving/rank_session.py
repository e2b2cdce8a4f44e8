"""`RankSession`: one rank's side of the snapshots and exports of one handler.

First it captures its state, then it writes what it captured. Captured are the generators, the user's objects and what
the engines count, as they are, and the engines' tensors: the live ones, for a snapshot that is written at once, or a
copy of them in staging buffers, for one that is written in the background. A Hugging Face export is written from the
same tensors, or from the weights alone.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...engine.dcp.fingerprint import sample_state
from ...engine.dcp.save import DCPSaver
from ...engine.dcp.state import DCPState
from ...engine.memory.tensors import flatten
from ...engine.staging.staged_state import Staging
from ...utils.distributed import all_ranks_succeed, drop_group, get_rank, new_background_group
from ...utils.manifest import FileEntry
from ...utils.rng import capture_rng, restore_rng
from ...utils.write_errors import as_write_error
from ..consistency import EngineSample, count_engine, numerical_switches
from ..coordinator import RankTarget, rank_target
from ..process_state import capture_process, rank_state_name, write_process
from .rank_exports import Export, ExportRequest


@dataclass(frozen=True)
class RankPart:
    """What one rank wrote of a generation, and what it says of it.

    Attributes:
        entries: every file, fsynced, named relative to the generation.
        versions: engine name -> weight version, of the engines that count one.
        samples: engine name -> this rank's counts and fingerprint.
        switches: see `numerical_switches`.
        rng: digest of this rank's generators.
    """

    entries: list[FileEntry]
    versions: dict[str, int]
    samples: dict[str, EngineSample]
    switches: dict[str, str]
    rng: str


@dataclass(frozen=True)
class _RankCapture:
    """A rank's state at one step boundary.

    Attributes:
        rank: which it is.
        groups: engine name -> control group of its ranks.
        values: engine name -> nested tensors, as `DCPState.state_dict` has them.
        counts: engine name -> what the engine counts; nothing sampled yet.
        versions: engine name -> weight version, of the engines that count one.
        switches: see `numerical_switches`.
        process: generators and user objects, as a file holds them.
        rng: digest of the generators.
    """

    rank: int
    groups: dict[str, dist.ProcessGroup | None]
    values: dict[str, dict[str, Any]]
    counts: dict[str, EngineSample]
    versions: dict[str, int]
    switches: dict[str, str]
    process: bytes
    rng: str


@dataclass(frozen=True)
class _ExportCapture:
    """Weights of the engine ``name`` at one step boundary, and the group of its ranks."""

    name: str
    export: Export
    group: dist.ProcessGroup | None


class RankSession:
    """What one rank keeps from one snapshot of a handler to the next: staging buffers, plans, a process group.

    All ranks call the same methods in the same order. The first
    argument, ``holder``, is anything that `rank_target` takes; `Ranks` passes it.

    Attributes:
        background_group: gloo group for what is written in the background; None when nothing is.
        rng: the generators of this rank as `RecoverHandler.load` left them.
    """

    def __init__(self, background_group: dist.ProcessGroup | None, request: ExportRequest | None) -> None:
        self.background_group, self.rng = background_group, capture_rng()
        self._request = request
        self._n_threads = torch.get_num_threads()
        self._savers: dict[str, DCPSaver] = {}
        self._stagings: dict[str, tuple[nn.Module, Staging]] = {}
        self._snapshot: _RankCapture | None = None
        self._export: _ExportCapture | None = None

    @classmethod
    def open(
        cls, holder: Any, timeout_s: float | None, snapshots: bool, request: ExportRequest | None
    ) -> "RankSession":
        """A session with the memory that it needs; all ranks call it.

        Args:
            holder: whose state.
            timeout_s: how long ranks wait for each other in the background; None when nothing is written there.
            snapshots: whether any is ever due.
            request: what is exported besides; None: nothing.

        Raises:
            ConfigError: see `DCPState.state_dict`.
            OSError, RuntimeError: there is no memory to stage in.
        """
        if timeout_s is None:
            return cls(None, request)
        target = rank_target(holder)
        session = cls(new_background_group(target.group, timeout_s), request)
        try:
            session._make_buffers(target, snapshots)
        except BaseException:
            session.close()
            raise
        return session

    def capture(self, holder: Any, staged: bool, snapshot: bool, export: bool) -> None:
        """Capture what a snapshot, an export, or both are made of; with ``staged`` it may change once this has returned
        (see `staged_state`).

        Raises:
            ConfigError: a user object's state could not be read back.
        """
        target, self._snapshot, self._export = rank_target(holder), None, None
        if snapshot:
            self._snapshot = self._capture_snapshot(target, staged)
        if export:
            self._export = self._capture_export(target, staged)

    def write_snapshot(self, holder: Any, folder: str, in_background: bool) -> RankPart:
        """Write what was captured into the existing ``folder`` of all ranks; ``in_background`` with other collectives
        going on meanwhile.

        Raises:
            CheckpointWriteError: this rank could not write.
            PeerError: another rank failed.
            TornSnapshotError: what was being staged was changed outside of a step.
        """
        capture, self._snapshot = self._snapshot, None
        assert capture is not None, "nothing was captured"
        root, groups = Path(folder), capture.groups
        if in_background:
            groups = dict.fromkeys(groups, self._enter_background())
        group = next(iter(groups.values()))
        with all_ranks_succeed("preparing the snapshot", group), as_write_error(folder):  # a collective save needs all
            for name in capture.values:
                (root / name).mkdir(exist_ok=True)
            entries = [write_process(folder, rank_state_name(capture.rank), capture.process)]
            self._finish_staging(capture, in_background)
            samples = {
                name: replace(capture.counts[name], sample=sample_state(dict(flatten(values))))
                for name, values in capture.values.items()
            }
        for name, values in capture.values.items():
            saver = self._savers.setdefault(name, DCPSaver())
            for entry in saver.write(root / name, values, groups[name]):
                entries.append(FileEntry(f"{name}/{entry.name}", entry.bytes, entry.digest))
        if in_background:  # again: a write that overlapped the copy may show only now (see `Staging.finish`)
            with all_ranks_succeed("finishing the snapshot", group):
                self._finish_staging(capture, in_background)
        return RankPart(entries, capture.versions, samples, capture.switches, capture.rng)

    def write_export(self, holder: Any, folder: str, in_background: bool) -> None:
        """Write the export that was captured; else as `write_snapshot`."""
        capture, self._export = self._export, None
        assert capture is not None, "nothing was captured"
        if not in_background:
            capture.export.write(Path(folder), capture.group)
            return
        group = self._enter_background()
        with all_ranks_succeed("preparing the export", group):
            self._stagings[capture.name][1].finish()
        capture.export.write(Path(folder), group, group)

    def restore_rng(self, holder: Any) -> None:
        """Put this rank's generators back to what they were when the session was opened; each rank for itself."""
        restore_rng(self.rng)

    def close(self) -> None:
        """Give up the buffers and the group; each rank for itself."""
        for _, staging in self._stagings.values():
            staging.release()
        drop_group(self.background_group)

    def _enter_background(self) -> dist.ProcessGroup | None:
        """Set this thread's number of threads; the group of the background."""
        torch.set_num_threads(self._n_threads)  # else a new thread takes all cores
        return self.background_group

    def _capture_snapshot(self, target: RankTarget, staged: bool) -> _RankCapture:
        states = {name: target.state(name) for name in target.engines}
        counts = {name: count_engine(state) for name, state in states.items()}
        versions = {name: e.get_version() for name, e in target.engines.items() if hasattr(e, "get_version")}
        process, rng = capture_process(target.stateful)
        if staged:
            values = {name: self._staging_of(name, state).stage(state) for name, state in states.items()}
        else:
            values = {name: state.state_dict() for name, state in states.items()}
        groups = {name: target.group_of(name) for name in target.engines}
        switches = numerical_switches(states)
        return _RankCapture(get_rank(), groups, values, counts, versions, switches, process, rng)

    def _capture_export(self, target: RankTarget, staged: bool) -> _ExportCapture:
        assert self._request is not None, "an export is due, but none was ever to be"
        name, weights = self._request.name(target), None
        if staged and self._snapshot is not None:
            weights = self._snapshot.values[name]["model"]
        elif staged:
            state = target.state(name)
            weights = self._staging_of(name, state).stage(state, model_only=True)["model"]
        return _ExportCapture(name, Export.of(self._request, target, name, weights), target.group_of(name))

    def _finish_staging(self, capture: _RankCapture, staged: bool) -> None:
        for name in capture.values if staged else ():
            self._stagings[name][1].finish()

    def _make_buffers(self, target: RankTarget, snapshots: bool) -> None:
        """Take the host memory that `capture` will need with ``staged``: of the weights alone without ``snapshots``."""
        names = list(target.engines) if snapshots else [] if self._request is None else [self._request.name(target)]
        for name in names:
            state = target.state(name)
            self._staging_of(name, state).prepare(state, model_only=not snapshots)

    def _staging_of(self, name: str, state: DCPState) -> Staging:
        """Of this engine's name and no other: two may share a model, and have optimizers of their own."""
        model, staging = self._stagings.get(name, (None, None))
        if staging is None or model is not state.model:
            if staging is not None:
                staging.release()
            staging = Staging(state.model)
            self._stagings[name] = state.model, staging
        return staging
