"""What one rank writes into a generation: first it captures its state, then it writes what it captured.

Captured are the generators, the user's objects and what the engines count, as they are, and the engines' tensors: the
live ones, for a snapshot that is written at once, or a copy of them in staging buffers, for one that is written in the
background. What lasts from one snapshot to the next (buffers, plans, the group for the background) is kept by a
`RankWriter`, in the process of the rank, under the key of the handler that opened it.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ..engine.dcp_fingerprint import sample_state
from ..engine.dcp_saver import DCPSaver
from ..engine.dcp_staging import Staging
from ..engine.dcp_state import DCPState, flatten
from ..utils.distributed import all_ranks_succeed, drop_group, get_rank, new_group_aside
from ..utils.errors import ConfigError
from ..utils.manifest import FileEntry
from ..utils.staging import as_write_error
from .facts import EngineSample, count_engine
from .process_state import capture_process, rank_state_name, write_process
from .ranks import RankTarget, rank_target


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


class RankWriter:
    """One rank's side of the snapshots of one handler.

    Args:
        aside: gloo group for snapshots that are written in the background; None when there are none.

    Attributes:
        aside: the same.
    """

    def __init__(self, aside: dist.ProcessGroup | None) -> None:
        self.aside = aside
        self._savers: dict[str, DCPSaver] = {}
        self._stagings: dict[str, tuple[nn.Module, Staging]] = {}
        self._capture: _Capture | None = None

    def capture(self, target: RankTarget, staged: bool) -> None:
        """Take down the state as it is; with ``staged`` it may change once this has returned (see `dcp_staging`)."""
        self._capture = None
        states = {name: target.state(name) for name in target.engines}
        counts = {name: count_engine(state) for name, state in states.items()}
        versions = {name: e.get_version() for name, e in target.engines.items() if hasattr(e, "get_version")}
        process, rng = capture_process(target.stateful)
        if staged:
            values = {name: self._staging_of(name, state).stage(state) for name, state in states.items()}
        else:
            values = {name: state.state_dict() for name, state in states.items()}
        self._capture = _Capture(target, get_rank(), values, counts, versions, process, rng)

    def write(self, folder: Path, in_background: bool) -> RankPart:
        """Write what was captured; all ranks call it."""
        capture, self._capture = self._capture, None
        assert capture is not None, "nothing was captured"
        target = capture.target
        group = self.aside if in_background else target.group_of()
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
            for entry in saver.write(folder / name, values, self.aside if in_background else target.group_of(name)):
                entries.append(FileEntry(f"{name}/{entry.name}", entry.bytes, entry.digest))
        return RankPart(entries, capture.versions, samples, capture.rng)

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
        drop_group(self.aside)


_WRITERS: dict[str, RankWriter] = {}


def open_writer(holder: Any, key: str, timeout_s: float | None) -> None:
    """Make this rank's `RankWriter` for the handler ``key``; all ranks call it.

    Args:
        holder: see `rank_target`.
        key: unique to the handler.
        timeout_s: how long ranks wait for each other in the background; None when nothing is written there.
    """
    close_writer(holder, key)
    _WRITERS[key] = RankWriter(None if timeout_s is None else new_group_aside(rank_target(holder).group, timeout_s))


def capture_rank(holder: Any, key: str, staged: bool) -> None:
    """See `RankWriter.capture`.

    Raises:
        ConfigError: a user object's state could not be read back, or `open_writer` was not called on this rank.
    """
    if key not in _WRITERS:
        raise ConfigError("this rank does not know the handler; call load with the same workers before dump")
    _WRITERS[key].capture(rank_target(holder), staged)


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


def close_writer(holder: Any, key: str) -> None:
    """Forget the handler ``key``; each rank for itself."""
    if (writer := _WRITERS.pop(key, None)) is not None:
        writer.close()


def writer_group(key: str) -> dist.ProcessGroup | None:
    """The group for the background of a handler in this process."""
    return _WRITERS[key].aside
