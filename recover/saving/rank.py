"""The part of one rank in a snapshot or an export: capture its state, then write the capture.

A capture holds the generators, the user objects and the engines' counters by value, and the engines' tensors either
live, for a snapshot that is written at once, or as copies in staging buffers, for one that is written in the
background. An export is written from the same tensors, or from the weights alone.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ...engine.api import HFExportOptions, Stateful, export_dtype
from ...engine.dcp.fingerprint import sample_state
from ...engine.dcp.save import DCPSaver
from ...engine.dcp.state import DCPState
from ...engine.fsdp_engine import FSDPEngine
from ...engine.hf.adapter_folder import adapter_tensors, write_adapters
from ...engine.hf.save import exportable_tensors, write_hf
from ...engine.lora.layers import adapted_layers, transformers_model
from ...engine.memory.tensors import flatten
from ...engine.staging.staged_model import staged_model
from ...engine.staging.staged_state import Staging
from ...utils.distributed import all_ranks_succeed, drop_group, get_rank, new_background_group
from ...utils.errors import CheckpointMismatchError, ConfigError
from ...utils.manifest import FileEntry, write_entry
from ...utils.rng import RngState, capture_rng, restore_rng, rng_digest
from ...utils.safe_torch import pack_plain
from ...utils.write_errors import as_write_error
from ..info import rank_state_name
from ..ranks.facts import EngineSample, count_engine, numerical_switches
from ..ranks.target import RankTarget, rank_target


@dataclass(frozen=True)
class RankPart:
    """The part of a generation that one rank wrote.

    Attributes:
        entries: every file, fsynced, with its name relative to the generation.
        versions: engine name -> weight version, for engines that count one.
        samples: engine name -> counters and sampled tensors of this rank.
        switches: see `numerical_switches`.
        rng: digest of this rank's generators.
    """

    entries: list[FileEntry]
    versions: dict[str, int]
    samples: dict[str, EngineSample]
    switches: dict[str, str]
    rng: str


@dataclass(frozen=True)
class ExportRequest:
    """The export that the configuration asks for. ``engine`` is None if there is only one."""

    engine: str | None
    dtype: str | None
    adapters: str
    tokenizer: Any
    processor: Any

    def name(self, target: RankTarget) -> str:
        """Return the name of the engine to export.

        Raises:
            ConfigError: no engine or several could be meant, or its model does not come from transformers.
        """
        names = list(target.engines)
        if self.engine is None and len(names) > 1:
            raise ConfigError(
                f"config key 'recover.hf_engine' is null, but there are several engines: name one of {names}"
            )
        name = names[0] if self.engine is None else self.engine
        if name not in names:
            raise ConfigError(f"config key 'recover.hf_engine' is {name!r}; expected one of {names}")
        model = target.state(name).model
        if not isinstance(transformers_model(model), PreTrainedModel):
            raise ConfigError(
                f"engine {name!r} has a {type(model).__name__}, which is no transformers model and cannot be exported; "
                "name another as recover.hf_engine, or unset recover.hf_freq_steps"
            )
        return name


@dataclass(frozen=True)
class _Snapshot:
    """State of a rank after one step.

    Attributes:
        groups: engine name -> control group.
        values: engine name -> nested tensors as in `DCPState.state_dict`.
        process: name and content of the file of this process.
        part: counters and settings, without files and samples.
    """

    groups: dict[str, dist.ProcessGroup | None]
    values: dict[str, dict[str, Any]]
    process: tuple[str, bytes]
    part: RankPart


@dataclass(frozen=True)
class _Export:
    """Weights of the engine ``name`` after one step, ready for ``write``."""

    name: str
    group: dist.ProcessGroup | None
    model: nn.Module
    options: HFExportOptions
    write: Callable[..., None]


class RankSession:
    """Resources that one rank keeps from one snapshot to the next: staging buffers, plans, a process group.

    All ranks call the same methods in the same order. The first argument ``holder``, passed by `Ranks`, is anything
    that `rank_target` accepts.

    Attributes:
        background_group: gloo group for writing in the background. None if nothing is written there.
        rng: generators of this rank as `RecoverHandler.load` left them.
    """

    def __init__(self, background_group: dist.ProcessGroup | None, request: ExportRequest | None) -> None:
        self.background_group, self.rng = background_group, capture_rng()
        self._request = request
        self._n_threads = torch.get_num_threads()
        self._savers: dict[str, DCPSaver] = {}
        self._stagings: dict[str, tuple[nn.Module, Staging]] = {}
        self._snapshot: _Snapshot | None = None
        self._export: _Export | None = None

    @classmethod
    def open(
        cls, holder: Any, timeout_s: float | None, snapshots: bool, request: ExportRequest | None
    ) -> "RankSession":
        """Open a session and allocate its staging buffers. Collective.

        Args:
            holder: this rank, for `rank_target`.
            timeout_s: how long ranks wait for each other in the background. None if nothing is written there.
            snapshots: whether snapshots are ever due. If not, the buffers hold the exported weights alone.
            request: the export to make, if any.

        Raises:
            ConfigError: see `DCPState.state_dict`.
            OSError, RuntimeError: there is not enough memory for the buffers.
        """
        if timeout_s is None:
            return cls(None, request)
        target = rank_target(holder)
        session = cls(new_background_group(target.group, timeout_s), request)
        try:
            names = list(target.engines) if snapshots else [] if request is None else [request.name(target)]
            for name in names:
                state = target.state(name)
                session._staging_of(name, state).prepare(state, model_only=not snapshots)
        except BaseException:
            session.close()
            raise
        return session

    def capture(self, holder: Any, staged: bool, snapshot: bool, export: bool) -> None:
        """Capture the state for a snapshot, for an export, or for both.

        With ``staged`` the tensors are copied to staging buffers, so that training can change them (`staged_state`).

        Raises:
            ConfigError: the state of a user object could not be read back.
        """
        target, self._snapshot, self._export = rank_target(holder), None, None
        if snapshot:
            self._snapshot = self._capture_snapshot(target, staged)
        if export:
            self._export = self._capture_export(target, staged)

    def _capture_snapshot(self, target: RankTarget, staged: bool) -> _Snapshot:
        states = {name: target.state(name) for name in target.engines}
        counts = {name: count_engine(state) for name, state in states.items()}
        versions = {name: e.get_version() for name, e in target.engines.items() if hasattr(e, "get_version")}
        process, rng = capture_process(target.stateful)
        values = {}
        for name, state in states.items():
            state.rng = rng  # one capture for all engines and for the file of the process
            try:
                values[name] = self._staging_of(name, state).stage(state) if staged else state.state_dict()
            finally:
                state.rng = None
        groups = {name: target.group_of(name) for name in target.engines}
        part = RankPart([], versions, counts, numerical_switches(states), rng_digest(rng))
        name = rank_state_name(get_rank())  # now: a group may be destroyed before the snapshot is written
        return _Snapshot(groups, values, (name, process), part)

    def _capture_export(self, target: RankTarget, staged: bool) -> _Export:
        request = self._request
        assert request is not None, "an export is due, but none was ever to be"
        name = request.name(target)
        state, engine = target.state(name), target.engines[name]
        model = state.model
        if staged:
            values = self._snapshot.values[name] if self._snapshot else None
            values = values or self._staging_of(name, state).stage(state, model_only=True)
            model = staged_model(model, values["model"])
        path, dtype = (engine.model_folder, engine.base_dtype) if isinstance(engine, FSDPEngine) else (None, None)
        base = path if path is not None and path.is_dir() else None
        if request.adapters == "peft":
            dtype = base = None  # adapters keep their dtype, and the files of the base stay with the base
        options = HFExportOptions(export_dtype(request.dtype, dtype), request.tokenizer, request.processor, base)
        write: Any = write_adapters if request.adapters == "peft" else write_hf
        return _Export(name, target.group_of(name), model, options, write)

    def write_snapshot(self, holder: Any, folder: str, in_background: bool) -> RankPart:
        """Write the captured snapshot into the existing ``folder``, which is the same for all ranks. Collective.

        Raises:
            CheckpointWriteError: this rank could not write.
            PeerError: another rank failed.
            TornSnapshotError: a tensor was changed outside of a step before it was copied.
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
            entries = [write_process(folder, *capture.process)]
            self._finish_staging(capture, in_background)
            samples = {
                name: replace(capture.part.samples[name], sample=sample_state(dict(flatten(values))))
                for name, values in capture.values.items()
            }
        for name, values in capture.values.items():
            saver = self._savers.setdefault(name, DCPSaver())
            for entry in saver.write(root / name, values, groups[name]):
                entries.append(FileEntry(f"{name}/{entry.name}", entry.bytes, entry.digest))
        if in_background:  # again: a write that overlapped the copy may show only now (see `Staging.finish`)
            with all_ranks_succeed("finishing the snapshot", group):
                self._finish_staging(capture, in_background)
        return replace(capture.part, entries=entries, samples=samples)

    def write_export(self, holder: Any, folder: str, in_background: bool) -> None:
        """Write the captured export, under the same conditions as `write_snapshot`."""
        capture, self._export = self._export, None
        assert capture is not None, "nothing was captured"
        group, gather_group = capture.group, None
        if in_background:
            group = gather_group = self._enter_background()
            with all_ranks_succeed("preparing the export", group):
                self._stagings[capture.name][1].finish()
        capture.write(capture.model, Path(folder), capture.options, group=group, gather_group=gather_group)

    def restore_rng(self, holder: Any) -> None:
        """Restore this rank's generators to their state when the session was opened. Not collective."""
        restore_rng(self.rng)

    def close(self) -> None:
        """Free the buffers and the group. Not collective."""
        for _, staging in self._stagings.values():
            staging.release()
        drop_group(self.background_group)

    def _enter_background(self) -> dist.ProcessGroup | None:
        torch.set_num_threads(self._n_threads)  # else a new thread takes all cores
        return self.background_group

    def _finish_staging(self, capture: _Snapshot, staged: bool) -> None:
        for name in capture.values if staged else ():
            self._stagings[name][1].finish()

    def _staging_of(self, name: str, state: DCPState) -> Staging:
        """Return the buffers of an engine. Keyed by name: two engines may share a model and not their optimizer."""
        model, staging = self._stagings.get(name, (None, None))
        if staging is None or model is not state.model:
            if staging is not None:
                staging.release()
            staging = Staging(state.model)
            self._stagings[name] = state.model, staging
        return staging


def capture_process(stateful: Mapping[str, Stateful]) -> tuple[bytes, RngState]:
    """Capture the user objects and generators of this process.

    Returns:
        content of the file of this process, which torch can load with ``weights_only``, and the generators in it.

    Raises:
        ConfigError: the state of an object could not be read back. It fails the snapshot, not the recovery.
    """
    user = {key: pack_plain(f"state of {key!r}", thing.state_dict()) for key, thing in stateful.items()}
    rng = capture_rng()
    return pack_plain("generators", {"rng": rng, "user": user}), rng


def write_process(folder: str | os.PathLike[str], name: str, state: bytes) -> FileEntry:
    """Write the bytes from `capture_process` as ``<folder>/<name>``."""
    (Path(folder) / name).parent.mkdir(exist_ok=True)
    return write_entry(folder, name, state)


def check_export(holder: Any, request: ExportRequest) -> None:
    """Raise a `ConfigError` with the reason if this rank cannot make the export. Not collective."""
    target = rank_target(holder)
    name = request.name(target)
    state = target.state(name)
    look: Any = adapter_tensors if request.adapters == "peft" else exportable_tensors
    try:
        look(state.model)
    except CheckpointMismatchError as error:
        other = "; set recover.hf_adapters to 'peft' for a folder of PEFT" if adapted_layers(state.model) else ""
        if request.adapters == "peft":
            other = "; set recover.hf_adapters to 'merged' for all weights"
        raise ConfigError(
            f"engine {name!r} cannot be exported: {error}. Or unset recover.hf_freq_steps{other}"
        ) from error
