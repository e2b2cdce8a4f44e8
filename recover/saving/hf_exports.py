"""Hugging Face exports of a run: when one is due, the order of writing it, which stay, and which are given up.

They lie beside the generations, each as ``hf/global_step_<N>``, and become visible as these do: staged, fsynced by
every rank, renamed. A run that goes back sets aside those of the steps it gives up.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

from ...utils.atomic_folder import as_write_error
from ...utils.files import commit_folder, remove_or_log
from ...utils.logging import get_logger
from ..config import RecoverConfig
from ..coordinator import Ranks
from ..storage.generations import GenerationStore
from .rank import capture_rank, export_rank
from .rank_exports import ExportRequest, check_export

logger = get_logger(__name__)


class HFExports:
    """The exports of one run.

    Args:
        config: its ``hf_*`` keys count.
        key: of the handler, which the ranks know it by.
        sidecars: tokenizer and processor, or None for either.
    """

    def __init__(self, config: RecoverConfig, key: str, sidecars: tuple[object, object]) -> None:
        self._config, self._key, self._sidecars = config, key, sidecars
        self._store = GenerationStore(config.hf_root)  # the same names, in another folder
        self._begun: int | None = None

    @property
    def request(self) -> ExportRequest | None:
        """What the ranks are asked for; None when no export ever is due."""
        if self._config.hf_freq_steps is None:
            return None
        return ExportRequest(self._config.hf_engine, self._config.hf_dtype, *self._sidecars)

    def check(self, ranks: Ranks) -> None:
        """See that the ranks can export what the configuration names; collective over the callers.

        Raises:
            ConfigError: see `check_export`.
        """
        if (request := self.request) is not None:
            ranks.run_all(check_export, request, self._config.async_save)

    def due(self, step: int) -> bool:
        """Whether the weights after ``step`` are to be exported and have not been; in the leader."""
        every = self._config.hf_freq_steps
        if every is None or (step + 1) % every or step == self._begun:
            return False
        return not os.path.lexists(self._store.path_of(step))

    def capture(self, ranks: Ranks, *, staged: bool) -> None:
        """Capture the weights alone, on all ranks; collective over the callers."""
        ranks.run_all(capture_rank, self._key, staged, False, True)

    def begin(self, step: int) -> None:
        """No second export of ``step``, whatever this one comes to."""
        self._begun = step

    def write(
        self, ranks: Ranks, step: int, staged: bool, committing: Callable[[], AbstractContextManager[None]]
    ) -> Path:
        """Write and commit what was captured; collective over the callers.

        Args:
            ranks: who writes.
            step: the last step that is in it.
            staged: whether the ranks' state may change meanwhile.
            committing: as for `GenerationWriter.write`.

        Raises:
            CheckpointWriteError, PeerError: nothing became visible.
            CheckpointMismatchError: the weights cannot be expressed in the architecture's file format.
        """
        staging = ranks.decide(partial(self._store.open_staging, step))
        with ExitStack() as undo:
            if ranks.is_leader:
                undo.callback(self._store.discard, staging)
            ranks.run_all(export_rank, self._key, str(staging), staged)

            def commit() -> Path:
                with committing(), as_write_error(self._store.path_of(step)):
                    commit_folder(staging, self._store.path_of(step))
                    self._retire()
                return self._store.path_of(step)

            final = ranks.decide(commit)
            undo.pop_all()
        return final

    def staged_bytes(self, step: int) -> int:
        """See `GenerationStore.staged_bytes`."""
        return self._store.staged_bytes(step)

    def go_back(self, step: int) -> None:
        """Remove what killed writers left, and set aside what is of later steps than ``step``, where the run goes on.

        In the leader. Nobody shall take weights of steps that were given up for those that the run goes on with.
        """
        self._begun = None
        if self._config.hf_freq_steps is None:
            return
        self._store.sweep()
        for export in self._store.generations():
            if export.step > step:
                self._store.set_aside(export, f"the run went back to before step {export.step}")

    def _retire(self) -> None:
        keep = self._config.hf_max_to_keep
        try:
            old = self._store.generations()[keep:] if keep is not None else []
        except OSError as error:
            logger.warning("no export is removed, because %s cannot be listed: %s", self._store.root, error)
            return
        for export in old:
            remove_or_log(export.path)
