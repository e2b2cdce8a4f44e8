"""`ExportWriter`: the Hugging Face exports of a run, in the leader: when one is due, its writing, which stay.

They lie beside the generations, each as ``hf/global_step_<N>``, and become visible as these do: staged, fsynced by
every rank, renamed. A run that goes back quarantines those of the steps it gives up.
"""

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ...utils.files import commit_folder, remove_or_log
from ...utils.logging import get_logger
from ...utils.write_errors import as_write_error
from ..config import RecoverConfig
from ..coordinator import Ranks
from ..storage.run_folder import RunFolder
from .rank_exports import ExportRequest, check_export
from .rank_session import RankSession

logger = get_logger(__name__)


class ExportWriter:
    """Writes the exports of one run.

    Args:
        config: its ``hf_*`` keys count.
        folder: of the run.
        sidecars: tokenizer and processor, or None for either.
    """

    def __init__(self, config: RecoverConfig, folder: RunFolder, sidecars: tuple[object, object]) -> None:
        self._config, self._folder, self._sidecars = config, folder, sidecars
        self._begun: int | None = None

    @property
    def request(self) -> ExportRequest | None:
        """What the ranks are asked for; None when no export ever is due."""
        if self._config.hf_freq_steps is None:
            return None
        config = self._config
        return ExportRequest(config.hf_engine, config.hf_dtype, config.hf_adapters, *self._sidecars)

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
        return not os.path.lexists(self._folder.exports.path_of(step))

    def begin(self, step: int) -> None:
        """Have no second export of ``step`` due, whatever this one comes to."""
        self._begun = step

    def write(self, ranks: Ranks, step: int, *, in_background: bool) -> Path:
        """Write and commit what the ranks have captured; collective over the callers.

        Args:
            ranks: who writes.
            step: the last step that is in it.
            in_background: whether other collectives go on meanwhile.

        Raises:
            CheckpointWriteError, PeerError: nothing became visible.
            CheckpointMismatchError: the weights cannot be expressed in the architecture's file format.
        """
        exports, final = self._folder.exports, self._folder.exports.path_of(step)
        staging = ranks.decide(partial(exports.open_staging, step))

        def commit() -> None:
            with self._folder.committing(), as_write_error(final):
                commit_folder(staging, final)
                self._delete_old()

        with ExitStack() as undo:
            if ranks.is_leader:
                undo.callback(exports.discard, staging)
            ranks.run_sessions(RankSession.write_export, str(staging), in_background)
            ranks.decide(commit)
            undo.pop_all()
        return final

    def go_back(self, step: int) -> None:
        """Remove what killed writers left, and quarantine what is of later steps than ``step``, where the run goes on.

        In the leader. Nobody shall take weights of steps that were given up for those that the run goes on with.
        """
        self._begun = None
        if self._config.hf_freq_steps is None:
            return
        exports = self._folder.exports
        exports.sweep()
        for export in exports.generations():
            if export.step > step:
                exports.quarantine(export, f"the run went back to before step {export.step}")

    def _delete_old(self) -> None:
        keep, exports = self._config.hf_max_to_keep, self._folder.exports
        try:
            old = exports.generations()[keep:] if keep is not None else []
        except OSError as error:
            logger.warning("no export is deleted, because %s cannot be listed: %s", exports.root, error)
            return
        for export in old:
            remove_or_log(export.path)
