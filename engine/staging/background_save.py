"""The saves of one engine that are written while training goes on, one at a time.

The caller waits only for the copy into staging buffers, see `Staging`. A thread then writes and
commits, over a separate gloo group. The thread is no daemon: a process that ends waits for its
save. `FSDPEngine.destroy` waits too. Call it if the fsspec backend of a URL needs a thread pool of
Python (s3fs does to look up a host): these pools are closed at the end of a process, so that the
export would fail, with a log line.
"""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ...utils.distributed import all_ranks_succeed, drop_group, new_background_group
from ...utils.logging import get_logger
from ...utils.remote import without_secrets
from ..api import HFExportOptions, SaveLoadMeta
from ..dcp.load import check_loads_again
from ..dcp.save import save_dcp
from ..dcp.state import DCPState, StagedState
from ..hf.adapter_folder import save_adapters
from ..hf.save import export_hf
from .background_job import BackgroundJob, Task
from .staged_model import reading_base, staged_model
from .staged_state import Staging

logger = get_logger(__name__)


class BackgroundSave:
    """The background saves of one engine. All ranks make one, and call its methods in the same
    order.

    ``group`` is the control group of the ranks, and ``timeout_s`` how long they wait for each other
    during a write.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        group: dist.ProcessGroup,
        timeout_s: float,
    ) -> None:
        self._model = model
        self._group = group
        self._staging = Staging(model)
        self._background_group = new_background_group(group, timeout_s)
        self._job: BackgroundJob | None = None

    def begin(
        self,
        meta: SaveLoadMeta,
        state: DCPState,
        base_dtype: torch.dtype | None = None,
    ) -> None:
        """Stage the state that `FSDPEngine.save` would write, and return. The caller must have
        waited for the last save.

        ``state`` is the whole state of the engine, even if only a part is written. See
        `SaveLoadMeta.hf_options` for ``base_dtype``. Raises RuntimeError if a rank has no memory
        for the buffers.
        """
        assert self._job is None, "the buffers are being written"
        state = state.with_agreed_base()
        with all_ranks_succeed(f"staging {without_secrets(meta.path)}", self._group):
            values = self._staging.stage(state, model_only=not meta.with_optim)
            if meta.weight_format == "dcp":
                saved = state if meta.with_optim else state.model_only()
                check_loads_again(saved, values)
                # Writing waits for the rest of the copy.
                staged = StagedState(values, self._staging.finish, state.ranks_with_same_data)
                write = partial(save_dcp, meta.path, staged, self._background_group)
            else:
                # Training and configuration of the live model do not reach this view.
                model = staged_model(self._model, values["model"])
                write = self._exporter(meta, model, base_dtype)

        # Nothing is written before all ranks have their threads.
        started = Future[None]()
        task = Task("save", partial(_write_after, started, write))
        job = BackgroundJob("background save", [task], daemon=False)
        try:
            with all_ranks_succeed(f"starting to write {without_secrets(meta.path)}", self._group):
                job.start()
            self._job = job
            started.set_result(None)
        except BaseException:
            if started.cancel():  # nothing will be written
                self._job = None
                self._staging.wait()  # a copy may be under way
                self._staging.done()
            raise

        # The end of the thread frees the buffers, also after an error.
        job.call_at_end(self._staging.done)

    def wait(self) -> None:
        """Wait until nothing is being written. Raises the error of the save, once."""
        if self._job is None:
            return
        self._job.wait()  # KeyboardInterrupt here leaves the state unchanged
        # An error is raised once, and the next save may begin.
        task = self._job.tasks[0]
        self._job = None
        task.result()

    def _exporter(
        self,
        meta: SaveLoadMeta,
        model: PreTrainedModel,
        base_dtype: torch.dtype | None,
    ) -> Callable[[], None]:
        if meta.weight_format == "peft":
            return partial(self._export, save_adapters, model, meta.path, meta.hf_options(None))
        options = meta.hf_options(base_dtype)
        return partial(self._export, export_hf, model, meta.path, options)

    def close(self) -> None:
        """`wait`, then give up the buffers and the group, even if `wait` raises."""
        # The steps run from the last to the first, even if one raises.
        with ExitStack() as last:
            last.callback(drop_group, self._background_group)
            last.callback(self._staging.release)
            self.wait()

    def _export(
        self,
        export: Callable[..., None],
        model: PreTrainedModel,
        path: str,
        options: HFExportOptions,
    ) -> None:
        with all_ranks_succeed(f"staging {without_secrets(path)}", self._background_group):
            self._staging.finish()
        # An offload of the frozen base waits for this.
        group = self._background_group
        with reading_base(model, group):
            # A change that overlapped the copy may show only at the end (see `Staging.finish`).
            export(model, path, options, group=group, finish=self._staging.finish)


def _write_after(started: Future[None], write: Callable[[], None]) -> None:
    """Call ``write`` when all ranks have ``started``. An error of it is logged at once: the process
    may end without asking for it.
    """
    started.result()
    try:
        write()
    except BaseException as error:
        logger.error("a save in the background failed: %s", error)
        raise
