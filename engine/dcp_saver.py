"""`DCPSaver`: write the values of a `DCPState` as a torch.distributed.checkpoint folder, again and again."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from ..utils.distributed import get_rank
from ..utils.errors import CheckpointWriteError, PeerError
from ..utils.manifest import FileEntry
from .dcp_writer import DurableWriter

ROOT = "dcp"
"""The key all names stand under, as in AReaL's ``dcp.save({"dcp": DCPState(...)})``."""


class DCPSaver:
    """Writes states of one structure. Any thread may call it, one at a time; it uses collectives of ``group`` only."""

    def write(
        self, folder: str | os.PathLike[str], values: Mapping[str, Any], group: dist.ProcessGroup | None = None
    ) -> list[FileEntry]:
        """Write ``values`` into the existing, empty ``folder`` and fsync the files; all ranks of ``group`` call it.

        Args:
            values: what `DCPState.state_dict` returns, or a copy of it: nested dicts of DTensors (or their copies, with
                local tensors on the CPU) and plain tensors.

        Returns:
            what this rank wrote: its own data file, and on rank 0 also the metadata.

        Raises:
            CheckpointWriteError: the file system refused, on any rank.
            PeerError: another rank failed for another reason; that rank raises its own error.
            RuntimeError: a rank is gone; within the timeout of the group.
        """
        planner, writer = DefaultSavePlanner(dedup_save_to_lowest_rank=True), DurableWriter(folder)
        alone = not dist.is_initialized()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.save(
                    {ROOT: dict(values)}, storage_writer=writer, planner=planner, process_group=group, no_dist=alone
                )
        except CheckpointException as error:  # derives from BaseException
            raise _save_error(folder, error, get_rank(group)) from error
        return writer.entries


def _save_error(folder: str | os.PathLike[str], error: CheckpointException, rank: int) -> BaseException:
    """What a rank raises when torch has told all of them which failed, and why."""
    causes = {failed: cause for failed, (cause, _) in sorted(error.failures.items())}
    if all(isinstance(cause, OSError) for cause in causes.values()):
        reasons = "; ".join(f"rank {failed}: {cause}" for failed, cause in causes.items())
        return CheckpointWriteError(f"cannot write {folder}: {reasons}")
    others = {failed: cause for failed, cause in causes.items() if not isinstance(cause, OSError)}
    reports = {failed: f"{type(cause).__name__}: {cause}" for failed, cause in others.items()}
    return others.get(rank) or PeerError(f"writing {folder}", reports)
