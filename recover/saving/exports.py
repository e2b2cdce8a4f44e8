"""Hugging Face exports of a run: when they are due, and how they are captured, written, committed
and deleted.

An export is written from the tensors of the snapshot of the same step, or from the weights alone.
"""

import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

from ...engine.api import HFExportOptions, export_dtype
from ...engine.dcp.state import DCPState
from ...engine.fsdp_engine import FSDPEngine
from ...engine.hf.adapter_folder import adapter_tensors, write_adapters
from ...engine.hf.save import exportable_tensors, write_hf
from ...engine.lora.adapters import adapted_layers, transformers_model
from ...engine.staging.staged_model import copy_base, exportable_model, reading_base, staged_model
from ...utils.distributed import RankGroup, all_ranks_succeed
from ...utils.errors import CheckpointMismatchError, CheckpointWriteError, ConfigError
from ...utils.files import as_write_error, commit_folder, remove_or_log
from ...utils.logging import get_logger
from ..config import RecoverConfig
from ..engines import RankEngines, engines_of
from ..ranks import Ranks
from ..storage.run_folder import RunFolder

if TYPE_CHECKING:
    from .snapshot import Capture, RankSession

logger = get_logger(__name__)


@dataclass(frozen=True)
class ExportRequest:
    """The export that the configuration asks for. ``engine`` is None if there is only one."""

    engine: str | None
    dtype: str | None
    adapters: str
    tokenizer: Any
    processor: Any

    def __post_init__(self) -> None:
        # A text instead of an object is an error now, and not at the first export.
        HFExportOptions(tokenizer=self.tokenizer, processor=self.processor)

    def name(self, target: RankEngines) -> str:
        """Return the name of the engine to export. Raises `ConfigError` if none or several could be
        meant.
        """
        # The engine that is meant.
        names = list(target.engines)
        if self.engine is None and len(names) > 1:
            raise ConfigError(
                "config key 'recover.hf_engine' is null, but there are several engines: name one "
                f"of {names}"
            )
        name = names[0] if self.engine is None else self.engine
        if name not in names:
            raise ConfigError(
                f"config key 'recover.hf_engine' is {name!r}; expected one of {names}"
            )
        # Only a model of transformers has the names of a Hugging Face folder.
        model = target.state(name).model
        if not isinstance(transformers_model(model), PreTrainedModel):
            raise ConfigError(
                f"engine {name!r} has a {type(model).__name__}, which is no transformers model "
                "and cannot be exported; name another as recover.hf_engine, or unset "
                "recover.hf_freq_steps"
            )
        return name


class Exports:
    """The exports of one run, in the process that calls the handler. ``request`` is None if there
    are none.
    """

    def __init__(
        self, config: RecoverConfig, folder: RunFolder, tokenizer: Any, processor: Any
    ) -> None:
        self.request: ExportRequest | None = None
        if config.hf_freq_steps is not None:
            self.request = ExportRequest(
                config.hf_engine, config.hf_dtype, config.hf_adapters, tokenizer, processor
            )
        # the last export that was begun. It is never due twice, even if it fails
        self.last_step: int | None = None
        self._every = config.hf_freq_steps
        self._keep = config.hf_max_to_keep
        self._folder = folder
        self._store = folder.exports

    def check(self, ranks: Ranks) -> None:
        """Raise `ConfigError` on all ranks unless all can make the export. Collective over the
        callers.
        """
        if self.request is not None:
            ranks.run_all(_check_export, self.request)

    def due(self, step: int) -> bool:
        """Whether to export the weights after ``step``. Called in the leader."""
        if self._every is None or (step + 1) % self._every != 0 or step == self.last_step:
            return False
        return not os.path.lexists(self._store.path_of(step))

    def write(self, ranks: Ranks, capture: "Capture") -> float:
        """Write and commit the captured export of a step. Collective over the callers.

        Returns seconds since the save began. After an error nothing became visible.
        """
        step = capture.step_info.global_step
        final = self._store.path_of(step)

        def commit() -> None:
            with self._folder.committing(), as_write_error(final):
                commit_folder(staging, final)
                self._delete_old()

        # Every rank writes its part, then the leader commits.
        try:
            staging = ranks.decide(partial(self._store.open_staging, step))
        except CheckpointWriteError:  # in every caller
            ranks.run_sessions(give_up_export)
            raise
        with ExitStack() as undo:
            if ranks.is_leader:
                undo.callback(self._store.discard, staging)
            ranks.run_sessions(write_export, str(staging), capture.in_background)
            ranks.decide(commit)
            undo.pop_all()
        seconds = time.monotonic() - capture.began_s
        logger.info("step %d: exported %s in %.3f s", step, final, seconds)
        return seconds

    def _delete_old(self) -> None:
        if self._keep is None:
            return
        try:
            newest_first = self._store.generations()
        except OSError as error:
            logger.warning(
                "no export is deleted, because %s cannot be listed: %s", self._store.root, error
            )
            return
        for export in newest_first[self._keep :]:
            remove_or_log(export.path)

    def give_up(self, after: int) -> None:
        """Quarantine exports of steps later than ``after``, which the run trains again. Called in
        the leader.
        """
        # An export that an earlier process has begun may be due again.
        self.last_step = None
        self._store.sweep()
        for export in self._store.generations():
            if export.step > after:
                self._store.quarantine(export, f"the run went back to before step {export.step}")

        # Every kill may leave some. Those of the highest steps stay.
        if self._keep is not None:
            rejected = sorted(self._store.quarantined(), key=_rejected_step, reverse=True)
            for path in rejected[self._keep :]:
                remove_or_log(path)


def _rejected_step(path: Path) -> int:
    match = re.match(r"\.rejected-global_step_(\d+)", path.name)
    return int(match[1]) if match else -1


@dataclass(frozen=True)
class ExportCapture:
    """Weights of the engine ``name`` of one rank after one step, ready for ``write``."""

    name: str
    group: RankGroup
    model: nn.Module
    options: HFExportOptions
    write: Callable[..., None]


def capture_export(
    session: "RankSession", target: RankEngines, states: Mapping[str, DCPState], staged: bool
) -> ExportCapture:
    """Capture the weights of this rank, staged with the snapshot of this step if there is one."""
    request = session.request
    assert request is not None, "an export is due, but none was ever to be"
    name = request.name(target)
    engine = target.engines[name]
    state = states[name]
    # A staged model is a view of the staging buffers, for a thread that writes while training runs.
    model = exportable_model(state.model)
    if staged:
        model = staged_model(state.model, session.staged_weights(name, state))

    # Adapters keep their dtype, and the files of the base stay with the base.
    write: Any = write_adapters
    dtype = None
    base = None
    if request.adapters != "peft":
        write = write_hf
        if isinstance(engine, FSDPEngine):
            dtype = engine.base_dtype
            base = engine.model_folder if engine.model_folder.is_dir() else None
        else:
            # TRL merges adapters into the base for each generation, and does not wait for exports.
            copy_base(model)
    options = HFExportOptions(
        export_dtype(request.dtype, dtype), request.tokenizer, request.processor, base
    )
    return ExportCapture(name, target.group_of(name), model, options, write)


def write_export(session: "RankSession", holder: Any, folder: str, in_background: bool) -> None:
    """Write the captured export of this rank, under the same conditions as
    `RankSession.write_snapshot`.
    """
    capture = session.export
    session.export = None
    assert capture is not None, "nothing was captured"
    group = capture.group
    try:
        if in_background:
            group = session.enter_background()
            with all_ranks_succeed("preparing the export", group):
                session.finish_staging([capture.name])
        with reading_base(capture.model, group):
            capture.write(capture.model, Path(folder), capture.options, group=group)

        # A change that overlapped the copy may show only now (see `Staging.finish`).
        if in_background:
            with all_ranks_succeed("finishing the export", group):
                session.finish_staging([capture.name])
    finally:
        session.written()


def give_up_export(session: "RankSession", holder: Any) -> None:
    """Free the buffers of the captured export, which will not be written. Not collective."""
    session.export = None
    session.written()


def _check_export(holder: Any, request: ExportRequest) -> None:
    target = engines_of(holder)
    name = request.name(target)
    model = target.state(name).model
    look: Any = adapter_tensors if request.adapters == "peft" else exportable_tensors
    try:
        look(exportable_model(model))
    except CheckpointMismatchError as error:
        other = ""
        if request.adapters == "peft":
            other = "; set recover.hf_adapters to 'merged' for all weights"
        elif adapted_layers(model):
            other = "; set recover.hf_adapters to 'peft' for a folder of PEFT"
        raise ConfigError(
            f"engine {name!r} cannot be exported: {error}. Or unset recover.hf_freq_steps{other}"
        ) from error
