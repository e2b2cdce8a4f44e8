"""`DCPSaver`: write the values of a `DCPState` as a torch.distributed.checkpoint folder, again and again.

Torch builds an archive per tensor through a Python file, with a CRC32 pass, plans and pickles metadata anew for every
save, fsyncs before its buffer is flushed, truncates what exists and replaces ``.metadata`` by removing it first. Here
each rank writes one new `DurableFile`: for every tensor what torch would have written around it (see `tensor_framing`)
and its bytes, in large blocks straight from memory, digested on their way. Then, when the data of all ranks is on
stable storage, rank 0 writes ``.metadata``. The plan is kept while the structure stays the same on all ranks.

Stock ``dcp.load`` reads what is written. Making the folder's entries durable and the folder visible is the caller's
(`utils.files.commit_folder`); until then it is no checkpoint.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...utils.atomic_folder import staged_folder
from ...utils.distributed import all_ranks_succeed, gather_objects, get_rank, is_write_failure
from ...utils.errors import CheckpointWriteError, PeerError
from ...utils.files import DurableFile
from ...utils.manifest import FileEntry, write_entry, write_manifest
from ...utils.remote import require_local
from ...utils.write_errors import as_write_error
from ..memory.host_blocks import HostBlocks
from ..memory.tensors import bytes_of, flatten, local_tensor
from .save_plan import RankSavePlan, plan_alone, plan_together
from .state import ROOT, DCPState, StagedState
from .structure import Structure, agree_on, describe_state, vote_on
from .tensor_framing import archive_of

BLOCK_BYTES = 8 << 20
"""What is written at once. The page cache keeps such writes in large pages, which are faster to read, too."""


def save_dcp(
    path: str | os.PathLike[str],
    state: DCPState | StagedState,
    group: dist.ProcessGroup | None = None,
    *,
    replace: bool = False,
) -> None:
    """Save ``state`` as the new folder ``path`` with a manifest; it appears complete or not at all.

    Args:
        path: the folder.
        state: what to save.
        group: the ranks; None is the default group.
        replace: a folder that is there already makes way for the new one once that is complete, for protocols that may
            save one step twice.

    Raises:
        ConfigError: ``path`` is a URL (other than ``file://``).
        CheckpointExistsError: ``path`` exists and is not empty, without ``replace``.
        CheckpointWriteError: any rank could not write; nothing is left behind.
    """
    advice = "save to one, and set recover.mirror_url for copies of snapshots at a URL"
    with staged_folder(require_local(path, "a DCP checkpoint", advice), group, replace=replace) as staging:
        entries = gather_objects(write_dcp(staging, state, group), group)
        if isinstance(state, StagedState):
            with all_ranks_succeed(f"finishing {path}", group):
                state.finish()
        if get_rank(group) == 0:
            write_manifest(staging, [entry for rank in entries for entry in rank], {"world_size": len(entries)})


def write_dcp(
    folder: str | os.PathLike[str], state: DCPState | StagedState, group: dist.ProcessGroup | None = None
) -> list[FileEntry]:
    """Write ``state`` into the existing, empty ``folder`` and fsync the files; all ranks of ``group`` call it.

    Returns, and raises, what `DCPSaver.write` does.
    """
    with all_ranks_succeed(f"collecting the state for {folder}", group):  # torch would leave the other ranks waiting
        values = state.state_dict()
    return DCPSaver().write(folder, values, group)


class DCPSaver:
    """Writes DCP folders; the plan of a save is kept for the next ones, until the structure of the state changes.

    Any thread may call it, one at a time; it uses collectives of the given group only.
    """

    def __init__(self) -> None:
        self._structure: Structure | None = None
        self._agreed = False
        self._plan: RankSavePlan | None = None

    def write(
        self, folder: str | os.PathLike[str], values: Mapping[str, Any], group: dist.ProcessGroup | None = None
    ) -> list[FileEntry]:
        """Write ``values`` into the existing, empty ``folder`` and fsync the files; all ranks of ``group`` call it.

        Takes no more memory than two blocks; on the device as much as a tensor that is not contiguous.

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
        with all_ranks_succeed(f"describing what goes to {folder}", group):
            tensors = dict(flatten({ROOT: values}))
            structure = describe_state(tensors, group)
            if self._structure is not None and structure == self._structure:
                structure = self._structure  # which has its digest
            vote = vote_on(structure, tensors)
        agreed = agree_on(vote, group)
        unchanged = self._plan is not None and structure is self._structure and agreed == self._agreed
        if not agreed and not all(gather_objects(unchanged, group)):
            self._plan = None
            self._plan = plan_together({ROOT: dict(values)}, group)
        with _write_together(folder, group):
            if agreed and not unchanged:
                self._plan = None
                self._plan = plan_alone(structure, {ROOT: dict(values)})
            self._structure, self._agreed, plan = structure, agreed, self._plan
            assert plan is not None
            entries = [_write_data(Path(folder), plan, [local_tensor(tensors[name]) for name in plan.names])]
        with _write_together(folder, group):
            if get_rank(group) == 0:
                entries.append(write_entry(folder, ".metadata", plan.metadata))
        return entries


def _write_data(folder: Path, plan: RankSavePlan, tensors: list[torch.Tensor]) -> FileEntry:
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    pieces = _pieces(_archived(tensors))
    with DurableFile(folder / plan.file) as file:
        if device is None:
            file.write_views(piece.numpy().data for piece in pieces)
        else:
            for block in HostBlocks(BLOCK_BYTES, device).pack(pieces, torch.uint8):
                file.write(block)
        if file.bytes != plan.n_bytes:  # what .metadata says of it would be wrong
            raise CheckpointWriteError(f"{file.path} has {file.bytes} bytes; planned were {plan.n_bytes}. Report it")
    return FileEntry(plan.file, file.bytes, file.digest)


def _archived(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of a data file: each tensor as torch stores it, from any device, and what is around it."""
    for tensor in tensors:
        archive = archive_of(tuple(tensor.shape), tensor.dtype)
        yield torch.frombuffer(bytearray(archive.prefix), dtype=torch.uint8)
        yield bytes_of(tensor.detach().resolve_conj().resolve_neg().contiguous())
        if archive.suffix:  # that of an empty tensor is in the prefix
            yield torch.frombuffer(bytearray(archive.suffix), dtype=torch.uint8)


def _pieces(file: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of a file, cut at every multiple of `BLOCK_BYTES`."""
    room = BLOCK_BYTES
    for values in file:
        while len(values) >= room:
            yield values[:room]
            values, room = values[room:], BLOCK_BYTES
        if len(values):
            yield values
            room -= len(values)


@contextmanager
def _write_together(folder: str | os.PathLike[str], group: dist.ProcessGroup | None) -> Iterator[None]:
    """Like `all_ranks_succeed`; when nothing but writing failed, all raise a `CheckpointWriteError` that says where."""
    try:
        with all_ranks_succeed(f"writing {folder}", group), as_write_error(folder):
            yield
    except CheckpointWriteError as error:
        raise CheckpointWriteError(f"rank {get_rank(group)}: {error}") from error
    except PeerError as error:
        if not is_write_failure(error):
            raise
        raise CheckpointWriteError(str(error)) from error
