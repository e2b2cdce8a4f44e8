"""The saves of one engine that are written while training goes on, one at a time.

The caller waits for the copy into staging buffers, and for no more of it than `Staging` says; a thread then writes and
commits, over a gloo group of its own. It is no daemon: a process that ends before its save is written waits for it.
That is too late for an export to a URL whose fsspec backend needs a thread from Python's pools then, as s3fs does to
look up a host: it fails, and the log says so. `FSDPEngine.destroy` waits in time.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ...utils.distributed import all_ranks_succeed, drop_group, new_background_group
from ...utils.logging import get_logger
from ...utils.remote import without_secrets
from ..api import SaveLoadMeta
from ..dcp.save import save_dcp
from ..dcp.state import DCPState, StagedState
from ..hf.export import save_hf
from .staged_model import check_mesh, staged_model
from .staged_state import Staging

logger = get_logger(__name__)


class BackgroundSave:
    """What one engine writes in the background. All ranks make one, and call its methods in the same order.

    Args:
        model: the engine's.
        group: where its ranks agree.
        timeout_s: how long they wait for each other while they write.
    """

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._model, self._group = model, group
        self._staging = Staging(model)
        self._background_group = new_background_group(group, timeout_s)
        self._outcome: Future[None] | None = None

    def begin(self, meta: SaveLoadMeta, state: DCPState, base_dtype: torch.dtype | None = None) -> None:
        """Stage what `FSDPEngine.save` would write, and return; the save before must have been waited for.

        Args:
            meta: what to write.
            state: all of the engine's, whatever part of it is written.
            base_dtype: see `SaveLoadMeta.hf_options`.

        Raises:
            ConfigError: the model is sharded so that it cannot be exported in the background.
            RuntimeError: there is no memory for the buffers, on any rank.
        """
        assert self._outcome is None, "the buffers are being written"
        with all_ranks_succeed(f"staging {without_secrets(meta.path)}", self._group):
            values = self._staging.stage(state, weights_only=not meta.with_optim)
            if meta.weight_format == "dcp":
                write = partial(save_dcp, meta.path, StagedState(values, self._staging.finish), self._background_group)
            else:
                check_mesh(values["model"], self._group)
                model = staged_model(self._model, values["model"])
                write = partial(self._export, model, meta.path, meta.hf_options(base_dtype))
        self._outcome = Future()
        Thread(target=_fulfil, args=(self._outcome, write, torch.get_num_threads()), name="background save").start()

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            Exception: what the save came to; once.
        """
        if self._outcome is None:
            return
        wait([self._outcome])  # who interrupts this finds it as it was
        outcome, self._outcome = self._outcome, None
        outcome.result()

    def close(self) -> None:
        """`wait`, then give up the buffers and the group, whatever it raises."""
        with ExitStack() as last:
            last.callback(drop_group, self._background_group)
            last.callback(self._staging.release)
            self.wait()

    def _export(self, model: PreTrainedModel, path: str, options: dict[str, Any]) -> None:
        with all_ranks_succeed(f"staging {without_secrets(path)}", self._background_group):
            self._staging.finish()
        save_hf(model, path, group=self._background_group, gather_group=self._background_group, **options)


def _fulfil(outcome: Future[None], write: Callable[[], None], threads: int) -> None:
    """In the background: whatever this comes to is for who waits for it; a failure is also logged at once."""
    torch.set_num_threads(threads)  # else a new thread takes all cores
    try:
        outcome.set_result(write())
    except BaseException as error:
        logger.error("a save in the background failed: %s", error)  # the process may end without asking
        outcome.set_exception(error)
