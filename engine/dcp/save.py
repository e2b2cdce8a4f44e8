"""Write DCP folders: `save_dcp` on all ranks, `DCPSaver` again and again, `write_entries` from one
process.

Each rank writes one new `DurableFile`: for every tensor the bytes that torch would write around it
(see `archive_of`) and its values, in large blocks straight from memory, digested on the way. When
the data of all ranks is on stable storage, rank 0 writes ``.metadata``. The plan is kept while the
structure stays the same on all ranks. Torch builds an archive per tensor with a CRC32 pass, plans
anew for every save, calls fsync before its buffer is flushed, truncates existing files, and removes
``.metadata`` before it writes the new one.

Stock ``dcp.load`` reads the result. It becomes a checkpoint when the caller makes the folder's
entries durable and the folder visible (`utils.files.commit_folder`).
"""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ...utils.atomic_folder import staged_folder
from ...utils.compat.torch_private import CURRENT_DCP_VERSION, StorageInfo
from ...utils.distributed import all_ranks_succeed, gather_objects, get_rank, is_write_failure
from ...utils.errors import CheckpointWriteError, PeerError
from ...utils.files import DurableFile, as_write_error
from ...utils.manifest import FileEntry, write_entry, write_manifest
from ...utils.remote import require_local
from ..memory.host_blocks import HostBlocks
from ..memory.lazy_tensor import LazyTensor
from ..memory.tensors import bytes_of, flatten, local_tensor, memory_of
from .format import PathLike, archive_of, pickle_metadata
from .load import check_loads_again
from .save_plan import (
    RankSavePlan,
    Structure,
    agree_on,
    describe_state,
    plan_alone,
    plan_together,
    vote_on,
)
from .state import ROOT, DCPState, StagedState

BLOCK_BYTES = 8 << 20
"""Bytes per write. The page cache keeps such writes in large pages, which are also faster to read.
"""


def save_dcp(
    path: PathLike,
    state: DCPState | StagedState,
    group: dist.ProcessGroup | None = None,
    *,
    replace: bool = False,
) -> None:
    """Save ``state`` as the new folder ``path`` with a manifest. All ranks of ``group`` call it.

    The folder appears complete or not at all. `torch.distributed.checkpoint.load` reads it too.

        state = DCPState(model, optimizer, scheduler)
        save_dcp("runs/step_100", state)

    Args:
        path: the folder.
        state: what to save.
        group: the ranks. None is the default group.
        replace: an existing folder makes way for the new one once that is complete, for protocols
            that may save one step twice.

    Raises:
        ConfigError: ``path`` is a URL (other than ``file://``).
        CheckpointExistsError: ``path`` exists and is not empty, without ``replace``.
        CheckpointWriteError: any rank could not write. Nothing is left behind.
    """
    advice = "save to one, and set recover.mirror_url for copies of snapshots at a URL"
    with staged_folder(
        require_local(path, "a DCP checkpoint", advice), group, replace=replace
    ) as staging:
        entries = gather_objects(write_dcp(staging, state, group), group)
        if isinstance(state, StagedState):
            with all_ranks_succeed(f"finishing {path}", group):
                state.finish()
        if get_rank(group) == 0:
            write_manifest(
                staging, [entry for rank in entries for entry in rank], {"world_size": len(entries)}
            )


def write_dcp(
    folder: PathLike, state: DCPState | StagedState, group: dist.ProcessGroup | None = None
) -> list[FileEntry]:
    """Write ``state`` into the existing, empty ``folder``. Returns and raises as `DCPSaver.write`
    does.
    """
    with all_ranks_succeed(
        f"collecting the state for {folder}", group
    ):  # torch would leave the other ranks waiting
        values = state.state_dict()
        if isinstance(state, DCPState):
            check_loads_again(state, values)
    return DCPSaver(state.ranks_with_same_data).write(folder, values, group)


class DCPSaver:
    """Writes DCP folders. It keeps the plan of a save until the structure of the state changes.

    Any thread may call it, one at a time. It uses collectives of the given group only.
    ``ranks_with_same_data`` is the attribute of the `DCPState`.
    """

    def __init__(self, ranks_with_same_data: int = 1) -> None:
        self._ranks_with_same_data = ranks_with_same_data
        self._structure: Structure | None = None
        self._agreed = False
        self._plan: RankSavePlan | None = None

    def write(
        self, folder: PathLike, values: Mapping[str, Any], group: dist.ProcessGroup | None = None
    ) -> list[FileEntry]:
        """Write ``values`` into the existing, empty ``folder`` and fsync the files. All ranks of
        ``group`` call it.

        Takes the memory of two blocks, and on the device a copy of each tensor that is not
        contiguous.

        Args:
            folder: the same folder on all ranks.
            values: result of `DCPState.state_dict`, or a copy: nested dicts of DTensors (or their
                copies, with local tensors on the CPU) and plain tensors.
            group: the ranks. None is the default group.

        Returns:
            the files of this rank: its own data file, and on rank 0 also the metadata.

        Raises:
            CheckpointWriteError: the file system refused, on any rank.
            PeerError: another rank failed for another reason. That rank raises its own error.
            RuntimeError: a rank is gone. Raised within the timeout of the group.
        """
        with all_ranks_succeed(f"describing what goes to {folder}", group):
            tensors = dict(flatten({ROOT: values}))
            structure = describe_state(tensors, group, self._ranks_with_same_data)
            if self._structure is not None and structure == self._structure:
                structure = self._structure  # which has its digest
            vote = vote_on(structure, tensors)
        agreed = agree_on(vote, group)
        unchanged = (
            self._plan is not None and structure is self._structure and agreed == self._agreed
        )
        if not agreed and not all(gather_objects(unchanged, group)):
            self._plan = None
            self._plan = plan_together({ROOT: dict(values)}, group)
        with _write_together(folder, group):
            if agreed and not unchanged:
                self._plan = None
                self._plan = plan_alone(structure, {ROOT: dict(values)})
            self._structure, self._agreed, plan = structure, agreed, self._plan
            assert plan is not None
            entries = [
                _write_data(
                    Path(folder), plan, [local_tensor(tensors[name]) for name in plan.names]
                )
            ]
        with _write_together(folder, group):
            if get_rank(group) == 0:
                entries.append(write_entry(folder, ".metadata", plan.metadata))
        return entries


def _write_data(folder: Path, plan: RankSavePlan, tensors: list[torch.Tensor]) -> FileEntry:
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    pieces = _pieces(_archived(tensors))
    with DurableFile(folder / plan.file) as file:
        if device is None:
            file.write_views(map(memory_of, pieces))
        else:
            for block in HostBlocks(BLOCK_BYTES, device).pack(pieces, torch.uint8):
                file.write(block)
        if file.bytes != plan.n_bytes:  # .metadata would be wrong
            raise CheckpointWriteError(
                f"{file.path} has {file.bytes} bytes; planned were {plan.n_bytes}. Report it"
            )
    return FileEntry(plan.file, file.bytes, file.digest)


def _archived(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of a data file: each tensor, from any device, inside its archive."""
    for tensor in tensors:
        archive = archive_of(tuple(tensor.shape), tensor.dtype)
        yield torch.frombuffer(bytearray(archive.prefix), dtype=torch.uint8)
        yield bytes_of(tensor.detach().resolve_conj().resolve_neg().contiguous())
        if archive.suffix:  # an empty tensor has no suffix
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
def _write_together(folder: PathLike, group: dist.ProcessGroup | None) -> Iterator[None]:
    """`all_ranks_succeed`, but if only writing failed, all ranks raise a `CheckpointWriteError`."""
    try:
        with all_ranks_succeed(f"writing {folder}", group), as_write_error(folder):
            yield
    except CheckpointWriteError as error:
        raise CheckpointWriteError(f"rank {get_rank(group)}: {error}") from error
    except PeerError as error:
        if not is_write_failure(error):
            raise
        raise CheckpointWriteError(str(error)) from error


FILE_BYTES = 4 << 30
"""Size at which `write_entries` begins a new data file. A tensor is never cut."""


class Entry(NamedTuple):
    """A value for `write_entries`, a tensor or an object that torch stores. Its name joins the keys
    of ``path``.
    """

    path: tuple[str | int, ...]  # in the nested state that is stored
    value: LazyTensor | Any


def write_entries(
    folder: PathLike,
    entries: Iterable[Entry],
    seen: Callable[[str, int, torch.Tensor], None] = lambda name, first, values: None,
) -> list[FileEntry]:
    """Write tensors that are read block by block, in one process, into the existing, empty
    ``folder``.

    Each tensor is one chunk. There are several files, so that many ranks can read and verify them
    in parallel. All are fsynced. Takes the memory of one block (see `LazyTensor`).

    Args:
        folder: no other rank writes to it.
        entries: at least one tensor.
        seen: called with the name, the first element, and the values of every block that is
            written.

    Returns:
        every file, as a manifest lists it.
    """
    metadata = Metadata({}, {}, {}, None, CURRENT_DCP_VERSION)
    stored: dict[MetadataIndex, StorageInfo] = {}
    files: list[FileEntry] = []
    rest = iter(entries)
    following = next(rest, None)
    while following is not None:
        with DurableFile(Path(folder) / f"__{len(files)}_0.distcp") as file:
            while following is not None and file.bytes < FILE_BYTES:
                (path, value), at = following, file.bytes
                index = MetadataIndex(name := ".".join(map(str, path)))
                metadata.planner_data[name] = path
                if isinstance(value, LazyTensor):
                    shape = torch.Size(value.shape)
                    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
                    index = MetadataIndex(name, chunk.offsets, 0)
                    entry = TensorStorageMetadata(
                        TensorProperties(dtype=value.dtype), shape, [chunk]
                    )
                    for data in _framed(name, value, seen):
                        file.write(data)
                else:
                    entry, buffer = BytesStorageMetadata(), io.BytesIO()
                    torch.save(value, buffer)
                    file.write(buffer.getvalue())
                metadata.state_dict_metadata[name] = entry
                stored[index] = StorageInfo(file.path.name, at, file.bytes - at)
                following = next(rest, None)
        files.append(FileEntry(file.path.name, file.bytes, file.digest))
    metadata.storage_data = stored
    return [*files, write_entry(folder, ".metadata", pickle_metadata(metadata))]


def _framed(
    name: str, tensor: LazyTensor, seen: Callable[[str, int, torch.Tensor], None]
) -> Iterator[Any]:
    archive = archive_of(tensor.shape, tensor.dtype)
    yield archive.prefix
    for first, values in tensor.blocks():
        values = values.resolve_conj().resolve_neg()
        seen(name, first, values)
        yield memoryview(bytes_of(values).numpy().data)  # type: ignore[arg-type]
    yield archive.suffix
