"""A snapshot: captured on every rank, written by every rank, committed by the leader.

A capture holds the generators, the user objects and the engines' counters by value. The engines'
tensors are live for a snapshot that is written at once, or copies in staging buffers for one that
is written in the background. The files are written into a hidden staging folder, fsynced by every
rank, and become visible by one rename.
"""

import platform
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from torch.profiler import record_function

from ...engine.api import Stateful, StepInfo
from ...engine.dcp.fingerprint import sample_state
from ...engine.dcp.load import check_loads_again
from ...engine.dcp.save import DCPSaver
from ...engine.dcp.state import DCPState
from ...engine.memory.tensors import flatten
from ...engine.staging.staged_state import Staging
from ...utils.distributed import (
    RankGroup,
    all_ranks_succeed,
    drop_group,
    get_rank,
    new_background_group,
)
from ...utils.errors import CheckpointError, CheckpointWriteError, FolderInUseError
from ...utils.files import StrPath, as_write_error, require_free_space
from ...utils.logging import get_logger
from ...utils.manifest import FileEntry, write_entry
from ...utils.plain_values import pack_nested, pack_plain
from ...utils.rng import RngState, capture_rng, restore_rng, rng_digest
from ..data.capture import DATA_STATE, capture_data
from ..engines import (
    EngineSample,
    RankEngines,
    check_fresh,
    combine_ranks,
    count_engine,
    engines_of,
    numerical_switches,
)
from ..info import (
    DRIVER_STATE,
    INFO_NAME,
    SHARED,
    EngineFacts,
    RecoverInfo,
    finite_numbers,
    rank_state_name,
)
from ..ranks import Ranks
from ..storage.generations import Generation
from ..storage.run_folder import RunFolder
from .exports import ExportCapture, ExportRequest, capture_export
from .model_files import model_files_name, pack_model_files

logger = get_logger(__name__)


class TrainedStep(NamedTuple):
    """A step that was just trained or restored, and what a save of it needs."""

    ranks: Ranks
    info: StepInfo
    dataloader: Stateful | None = None
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Capture:
    """A step as the calling process captured it. The ranks keep their own captures in their
    sessions.
    """

    step_info: StepInfo
    in_background: bool
    began_s: float  # start of the save, on the monotonic clock
    metrics: Mapping[str, float]
    data: bytes | None  # state of the dataloaders
    # state of the driver and digest of its generators. None if ranks call the handler
    driver: tuple[bytes, str] | None
    logs: Mapping[str, str]  # registered name -> id of the file that follows, in the leader


@dataclass(eq=False)
class SnapshotWriter:
    """Captures the steps of one run, and writes and commits its snapshots."""

    folder: RunFolder
    run_id: str  # recorded in every generation
    stateful: Mapping[str, Stateful]  # registered objects of this process
    # resume_path and its digest, in the leader
    resumed_from: tuple[str | None, str | None] = (None, None)
    # facts of the last generation, by engine name
    last_facts: Mapping[str, EngineFacts] = field(default_factory=dict)

    def capture(self, trained: TrainedStep, kinds: Collection[str], in_background: bool) -> Capture:
        """Capture a step on all ranks, for a ``snapshot``, an ``export`` or both. Collective over
        the callers.

        With ``in_background`` every rank copies its state, so that training can change it before it
        is written.

        Raises:
            ConfigError: the state of a user object or a dataloader could not be read back.
        """
        began_s = time.monotonic()
        ranks = trained.ranks
        snapshot = "snapshot" in kinds

        # Records from now on belong to the next generation. Those before are in the states below.
        logs: dict[str, str] = {}
        if snapshot and ranks.is_leader:
            logs = self.folder.logs.rotate()

        data = None
        if snapshot:  # before the generators: torchdata's loader may draw a number
            data = capture_data(ranks, trained.dataloader)
        ranks.run_sessions(RankSession.capture, in_background, snapshot, "export" in kinds)
        driver = None
        if snapshot and ranks.is_driver:
            state, rng = capture_process(self.stateful)
            driver = state, rng_digest(rng)
        metrics = finite_numbers(trained.metrics or {})
        return Capture(trained.info, in_background, began_s, metrics, data, driver, logs)

    def write(self, ranks: Ranks, capture: Capture) -> float:
        """Write and commit a captured snapshot. Collective over the callers. Returns seconds since
        the save began.

        After an error nothing became visible (see `GenerationStore.commit`).
        """
        try:
            staging = ranks.decide(partial(self._open_staging, capture.step_info.global_step))
        except CheckpointWriteError:  # in every caller
            ranks.run_sessions(RankSession.give_up_snapshot)
            raise
        with ExitStack() as undo:
            if ranks.is_leader:
                undo.callback(self.folder.generations.discard, staging)
            parts = ranks.run_sessions(
                RankSession.write_snapshot, str(staging), capture.in_background
            )
            assert len(parts) == ranks.world_size, (
                "a generation without a rank's shards would be no generation"
            )
            facts = combine_ranks([part.samples for part in parts])
            commit = partial(self._commit, staging, capture, parts, facts)
            generation, n_bytes = ranks.decide(commit)
            undo.pop_all()
        self.last_facts = facts
        seconds = time.monotonic() - capture.began_s
        logger.info(
            "step %d: committed %s, %d bytes in %.3f s",
            generation.step,
            generation.path,
            n_bytes,
            seconds,
        )
        ranks.decide(partial(self._copy_and_delete, generation, capture.logs))
        return seconds

    def _open_staging(self, step: int) -> Path:
        with self.folder.committing():
            self.folder.delete_old()
        store = self.folder.generations
        with as_write_error(store.root):
            require_free_space(store.root, store.newest_bytes())
        return store.open_staging(step)

    def _commit(
        self,
        staging: Path,
        capture: Capture,
        parts: "list[RankPart]",
        facts: dict[str, EngineFacts],
    ) -> tuple[Generation, int]:
        check_fresh(self.last_facts, facts)
        entries = [entry for part in parts for entry in part.entries]
        first = parts[0]

        # Digests of generators, by process.
        rng = {}
        for rank, part in enumerate(parts):
            rng[Path(rank_state_name(rank)).stem] = part.rng
        driver_state = None
        if capture.driver is not None:
            driver_state, rng[Path(DRIVER_STATE).stem] = capture.driver

        info = RecoverInfo(
            capture.step_info,
            self.run_id,
            len(parts),
            first.versions,
            *self.resumed_from,
            save_s=time.monotonic() - capture.began_s,
            metrics=dict(capture.metrics),
            engines=facts,
            rng=rng,
            switches=first.switches,
            meshes={name: sample.mesh for name, sample in first.samples.items() if sample.mesh},
            logs=dict(capture.logs),
        )

        # The leader's own files, then the rename.
        with self.folder.committing():
            with as_write_error(staging):
                if driver_state is not None:
                    entries.append(write_process(staging, DRIVER_STATE, driver_state))
                entries.append(write_entry(staging, INFO_NAME, info.to_json()))
                if capture.data is not None:
                    entries.append(write_entry(staging, DATA_STATE, capture.data))
            step = capture.step_info.global_step
            generation = self.folder.generations.commit(
                staging, step, entries, manifest_facts(info)
            )
        return generation, sum(entry.bytes for entry in entries)

    def _copy_and_delete(self, generation: Generation, logs: Mapping[str, str]) -> None:
        # A failure here does not undo the commit. RuntimeError: no thread can be started at the
        # very end.
        try:
            with self.folder.committing():
                self.folder.keep(generation, logs)
        except FolderInUseError:
            raise
        except (CheckpointError, OSError, RuntimeError) as error:
            logger.error("step %d: committed, but what follows failed: %s", generation.step, error)


@dataclass(frozen=True)
class RankPart:
    """The part of a generation that one rank wrote. The keys of ``versions`` and ``samples`` are
    names of engines.
    """

    entries: list[FileEntry]  # every file, fsynced, with its name relative to the generation
    versions: dict[str, int]  # weight version, for engines that count one
    samples: dict[str, EngineSample]  # counters and sampled tensors of this rank
    switches: dict[str, str]  # see `numerical_switches`
    rng: str  # digest of this rank's generators


@dataclass(frozen=True)
class RankCapture:
    """State of a rank after a step. The keys of ``groups`` and ``values`` are names of engines."""

    groups: dict[str, RankGroup]  # control groups
    values: dict[str, dict[str, Any]]  # nested tensors as in `DCPState.state_dict`
    process: tuple[str, bytes]  # name and content of the file of this process
    part: RankPart  # counters and settings, without files and samples


class RankSession:
    """Resources that one rank keeps from one snapshot to the next: staging buffers, plans, a
    process group.

    All ranks call the same methods in the same order. The first argument ``holder``, passed by
    `Ranks`, is anything that `engines_of` accepts.
    """

    def __init__(self, background_group: RankGroup, request: ExportRequest | None) -> None:
        self.background_group = background_group
        self.request = request
        self.rng = capture_rng()  # as `RecoverHandler.load` left them
        self.snapshot: RankCapture | None = None  # captured and not yet written
        self.export: ExportCapture | None = None  # captured and not yet written
        self._n_threads = torch.get_num_threads()

        # Keyed by the name of the engine.
        self._savers: dict[str, DCPSaver] = {}
        self._checked: dict[str, Any] = {}  # shapes and dtypes of the tensors
        self._stagings: dict[str, tuple[nn.Module, Staging]] = {}
        self._models: dict[str, nn.Module] = {}  # in rank 0
        self._model_files: dict[str, bytes | None] = {}  # read once

    @classmethod
    def open(
        cls, holder: Any, timeout_s: float | None, snapshots: bool, request: ExportRequest | None
    ) -> "RankSession":
        """Open a session and allocate its staging buffers. Collective.

        Args:
            holder: this rank, for `engines_of`.
            timeout_s: how long ranks wait for each other in the background. None if nothing is
                written there.
            snapshots: whether snapshots are ever due. If not, the buffers hold the exported weights
                alone.
            request: the export to make, if any.

        Raises ConfigError if a snapshot of the state could not be loaded again, as far as that is
        known now.
        """
        target = engines_of(holder)
        group = None if timeout_s is None else new_background_group(target.group, timeout_s)
        session = cls(group, request)
        try:
            names = []
            if snapshots:
                names = list(target.engines)
            elif request is not None:
                names = [request.name(target)]
            for name, state in target.agreed_states(names).items():
                if timeout_s is not None:
                    session.staging_of(name, state).prepare(state, model_only=not snapshots)
                if snapshots:
                    session.check_loads_again(name, state, state.state_dict())
        except BaseException:
            session.close()
            raise
        return session

    @record_function("snapshot")
    def capture(self, holder: Any, staged: bool, snapshot: bool, export: bool) -> None:
        """Capture the state of this rank. ``staged`` copies the tensors, so that training can
        change them.
        """
        target = engines_of(holder)
        self.snapshot = None
        self.export = None
        # All collectives come first.
        names = list(target.engines)
        if not snapshot and self.request is not None:
            names = [self.request.name(target)]
        states = target.agreed_states(names)
        if snapshot:
            self.snapshot = self._capture_snapshot(target, states, staged)
        if export:
            self.export = capture_export(self, target, states, staged)

    def _capture_snapshot(
        self, target: RankEngines, states: Mapping[str, DCPState], staged: bool
    ) -> RankCapture:
        # Counters, user objects and generators, by value.
        counts = {name: count_engine(state) for name, state in states.items()}
        versions = {}
        for name, engine in target.engines.items():
            if hasattr(engine, "get_version"):
                versions[name] = engine.get_version()
        process, rng = capture_process(target.stateful, target.ranks_with_same_data)

        # Tensors, with one capture of the generators for all engines and the file of the process.
        values = {}
        for name, state in states.items():
            self._savers.setdefault(name, DCPSaver(state.ranks_with_same_data))
            state = state.with_rng(rng)
            if staged:
                values[name] = self.staging_of(name, state).stage(state)
            else:
                values[name] = state.state_dict()
            self.check_loads_again(name, state, values[name])

        # The groups and the number of the rank, because a group may be destroyed before the write.
        groups = {name: target.group_of(name) for name in target.engines}
        rank = get_rank(target.group)
        if rank == 0:
            self._models = {name: state.model for name, state in states.items()}
        switches = numerical_switches(states, target.engines)
        part = RankPart([], versions, counts, switches, rng_digest(rng))
        return RankCapture(groups, values, (rank_state_name(rank), process), part)

    def check_loads_again(self, name: str, state: DCPState, values: Mapping[str, Any]) -> None:
        """Check that ``values`` of an engine can be loaded again, unless tensors like these were
        checked before.
        """
        # What can be loaded depends on names, shapes and dtypes alone.
        described = {dotted: (tensor.shape, tensor.dtype) for dotted, tensor in flatten(values)}
        if self._checked.get(name) != described:
            check_loads_again(state, values)
            self._checked[name] = described

    def write_snapshot(self, holder: Any, folder: str, in_background: bool) -> RankPart:
        """Write the captured snapshot into the existing ``folder``, which is the same for all
        ranks. Collective.

        Raises:
            CheckpointWriteError: this rank could not write.
            PeerError: another rank failed.
            TornSnapshotError: a tensor was changed outside of a step before it was copied.
        """
        capture = self.snapshot
        self.snapshot = None
        assert capture is not None, "nothing was captured"
        try:
            return self._write(capture, folder, in_background)
        finally:
            self.written()

    def _write(self, capture: RankCapture, folder: str, in_background: bool) -> RankPart:
        root = Path(folder)
        groups = capture.groups
        staged: Iterable[str] = ()
        if in_background:
            groups = dict.fromkeys(groups, self.enter_background())
            staged = capture.values
        group = next(iter(groups.values()))

        # Step 1: the part in which a rank can fail alone. The next one is collective.
        with all_ranks_succeed("preparing the snapshot", group), as_write_error(folder):
            for name in capture.values:
                (root / name).mkdir(exist_ok=True)
            entries = [write_process(folder, *capture.process)]
            entries += self._write_model_files(folder)
            self.finish_staging(staged)
            samples = {}
            for name, values in capture.values.items():
                sample = sample_state(dict(flatten(values)), groups[name])
                samples[name] = replace(capture.part.samples[name], sample=sample)

        # Step 2: the shards.
        for name, values in capture.values.items():
            for entry in self._savers[name].write(root / name, values, groups[name]):
                entries.append(FileEntry(f"{name}/{entry.name}", entry.bytes, entry.digest))

        # Step 3: a change that overlapped the copy may show only now (see `Staging.finish`).
        if in_background:
            with all_ranks_succeed("finishing the snapshot", group):
                self.finish_staging(staged)
        return replace(capture.part, entries=entries, samples=samples)

    def give_up_snapshot(self, holder: Any) -> None:
        """Free the buffers of the captured snapshot, which will not be written. Not collective."""
        self.snapshot = None
        self.written()

    def _write_model_files(self, folder: str) -> list[FileEntry]:
        """Write the small files of every engine's model, in rank 0."""
        entries = []
        for name, model in self._models.items():
            if name not in self._model_files:
                self._model_files[name] = pack_model_files(model)
            packed = self._model_files[name]
            if packed is not None:
                entries.append(write_entry(folder, model_files_name(name), packed))
        return entries

    def restore_rng(self, holder: Any) -> None:
        """Restore this rank's generators to their state when the session was opened. Not
        collective.
        """
        restore_rng(self.rng)

    def close(self) -> None:
        """Free the buffers and the group. Not collective."""
        for _, staging in self._stagings.values():
            staging.release()
        drop_group(self.background_group)

    def enter_background(self) -> RankGroup:
        """Prepare the thread that writes in the background. Returns its group."""
        torch.set_num_threads(self._n_threads)  # else a new thread takes all cores
        return self.background_group

    def staging_of(self, name: str, state: DCPState) -> Staging:
        """Return the buffers of an engine. Keyed by name: two engines may share a model and not
        their optimizer.
        """
        # The buffers fit the model that they were made for.
        known = self._stagings.get(name)
        if known is not None:
            model, staging = known
            if model is state.model:
                return staging
            staging.release()
        staging = Staging(state.model)
        self._stagings[name] = (state.model, staging)
        return staging

    def staged_weights(self, name: str, state: DCPState) -> Mapping[str, torch.Tensor]:
        """Return the weights of an engine in its buffers: the copies for the captured snapshot, or
        new ones.
        """
        if self.snapshot is not None:
            return self.snapshot.values[name]["model"]
        return self.staging_of(name, state).stage(state, model_only=True)["model"]

    def finish_staging(self, names: Iterable[str]) -> None:
        """Wait until the copies of these engines are complete, and check that nothing changed
        meanwhile.
        """
        for name in names:
            self._stagings[name][1].finish()

    def written(self) -> None:
        """Tell that a capture was written, or failed. After the last one nothing reads the staging
        buffers.
        """
        if self.snapshot is None and self.export is None:
            for _, staging in self._stagings.values():
                staging.done()


def capture_process(
    stateful: Mapping[str, Stateful], ranks_with_same_data: int = 1
) -> tuple[bytes, RngState]:
    """Capture the user objects and generators of this process: the content of its file, and the
    generators in it.

    The file of a rank also names the number of ranks with the same data, if it is not 1.

    Raises:
        ConfigError: the state of an object could not be read back. It fails the snapshot, not the
            recovery.
    """
    # User objects first: their state_dict may draw numbers.
    user = {}
    for key, thing in stateful.items():
        user[key] = pack_nested(f"state of {key!r}", thing.state_dict())
    rng = capture_rng()
    contents = {"rng": rng, "user": user}
    if ranks_with_same_data > 1:
        contents[SHARED] = ranks_with_same_data
    return pack_plain("generators", contents), rng


def write_process(folder: StrPath, name: str, state: bytes) -> FileEntry:
    """Write the bytes from `capture_process` as ``<folder>/<name>``."""
    (Path(folder) / name).parent.mkdir(exist_ok=True)
    return write_entry(folder, name, state)


def manifest_facts(info: RecoverInfo) -> Mapping[str, Any]:
    """Return the entries of a generation's manifest other than its files."""
    return {
        "run_id": info.run_id,
        "step": info.last_step_info.global_step,
        "step_info": asdict(info.last_step_info),
        "weight_versions": info.weight_versions,
        "world_size": info.world_size,
        "mesh": info.meshes,
        "libraries": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
