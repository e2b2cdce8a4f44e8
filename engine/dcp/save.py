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

import copy
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
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
from ...utils.distributed import (
    RankGroup,
    all_ranks_succeed,
    gather_objects,
    get_rank,
    is_write_failure,
)
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
    group: RankGroup = None,
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
    folder = require_local(path, "a DCP checkpoint", advice)
    with staged_folder(folder, group, replace=replace) as staging:
        of_ranks = gather_objects(write_dcp(staging, state, group), group)

        # Training may have torn the copy until its last byte was read.
        if isinstance(state, StagedState):
            with all_ranks_succeed(f"finishing {path}", group):
                state.finish()
        if get_rank(group) == 0:
            entries = list(chain.from_iterable(of_ranks))
            write_manifest(staging, entries, {"world_size": len(of_ranks)})


def write_dcp(
    folder: PathLike,
    state: DCPState | StagedState,
    group: RankGroup = None,
) -> list[FileEntry]:
    """Write ``state`` into the existing, empty ``folder``. Returns and raises as `DCPSaver.write`
    does.
    """
    # Torch would leave the other ranks waiting if the state of one cannot be collected.
    if isinstance(state, DCPState):
        state = copy.copy(state)
        state.group = state.group or group
        state = state.with_agreed_base()
    with all_ranks_succeed(f"collecting the state for {folder}", group):
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
        self,
        folder: PathLike,
        values: Mapping[str, Any],
        group: RankGroup = None,
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
        # 1. Compare the structure with the last save, here and on the other ranks.
        with all_ranks_succeed(f"describing what goes to {folder}", group):
            tensors = dict(flatten({ROOT: values}))
            structure = describe_state(tensors, group, self._ranks_with_same_data)
            if self._structure is not None and structure == self._structure:
                structure = self._structure  # which has its digest
            vote = vote_on(structure, tensors)
        agreed = agree_on(vote, group)
        is_planned = self._plan is not None
        is_same = structure is self._structure and agreed == self._agreed
        unchanged = is_planned and is_same

        # 2. Plan, if the structure is another one. Ranks that do not agree plan together, and do so
        # if one of them has to. The old plan is given up first, in case that planning fails.
        if not agreed and not all(gather_objects(unchanged, group)):
            self._plan = None
            self._plan = plan_together({ROOT: dict(values)}, group)

        # 3. Write the data of this rank.
        with _write_together(folder, group):
            if agreed and not unchanged:
                self._plan = None
                self._plan = plan_alone(structure, {ROOT: dict(values)})
            self._structure = structure
            self._agreed = agreed
            plan = self._plan
            assert plan is not None
            written = [local_tensor(tensors[name]) for name in plan.names]
            entries = [_write_data(Path(folder), plan, written)]

        # 4. All data is on stable storage.
        with _write_together(folder, group):
            if get_rank(group) == 0:
                entries.append(write_entry(folder, ".metadata", plan.metadata))
        return entries


def _write_data(
    folder: Path,
    plan: RankSavePlan,
    tensors: list[Tensor],
) -> FileEntry:
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    pieces = _pieces(_archived(tensors))
    with DurableFile(folder / plan.file) as file:
        if device is None:
            file.write_views(map(memory_of, pieces))
        else:
            for block in HostBlocks(BLOCK_BYTES, device).pack(pieces, torch.uint8):
                file.write(block)

        # Else ``.metadata`` would be wrong.
        if file.bytes != plan.n_bytes:
            raise CheckpointWriteError(
                f"{file.path} has {file.bytes} bytes; planned were {plan.n_bytes}. Report it"
            )
    return FileEntry(plan.file, file.bytes, file.digest)


def _archived(tensors: list[Tensor]) -> Iterator[Tensor]:
    """The bytes of a data file: each tensor, from any device, inside its archive."""
    for tensor in tensors:
        archive = archive_of(tuple(tensor.shape), tensor.dtype)
        yield _as_uint8(archive.prefix)
        yield bytes_of(tensor.detach().resolve_conj().resolve_neg().contiguous())
        if archive.suffix:  # an empty tensor has no suffix
            yield _as_uint8(archive.suffix)


def _as_uint8(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _pieces(file: Iterable[Tensor]) -> Iterator[Tensor]:
    """The bytes of a file, cut at every multiple of `BLOCK_BYTES`."""
    room = BLOCK_BYTES
    for values in file:
        while len(values) >= room:
            yield values[:room]
            values = values[room:]
            room = BLOCK_BYTES
        if len(values):
            yield values
            room -= len(values)


@contextmanager
def _write_together(
    folder: PathLike,
    group: RankGroup,
) -> Iterator[None]:
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
    seen: Callable[[str, int, Tensor], None],
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
        # One file, which takes entries until it is large enough.
        with DurableFile(Path(folder) / f"__{len(files)}_0.distcp") as file:
            while following is not None and file.bytes < FILE_BYTES:
                path, value = following
                name = ".".join(map(str, path))
                begin = file.bytes
                if isinstance(value, LazyTensor):
                    index, entry = _describe(name, value)
                    for data in _framed(name, value, seen):
                        file.write(data)
                else:
                    index = MetadataIndex(name)
                    entry = BytesStorageMetadata()
                    buffer = io.BytesIO()
                    torch.save(value, buffer)
                    file.write(buffer.getvalue())

                metadata.planner_data[name] = path
                metadata.state_dict_metadata[name] = entry
                stored[index] = StorageInfo(file.path.name, begin, file.bytes - begin)
                following = next(rest, None)
        files.append(FileEntry(file.path.name, file.bytes, file.digest))
    metadata.storage_data = stored
    return [*files, write_entry(folder, ".metadata", pickle_metadata(metadata))]


def _describe(
    name: str,
    tensor: LazyTensor,
) -> tuple[MetadataIndex, TensorStorageMetadata]:
    """The entries of a tensor in ``.metadata``. Its only chunk is the whole tensor."""
    shape = torch.Size(tensor.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    properties = TensorProperties(dtype=tensor.dtype)
    index = MetadataIndex(name, chunk.offsets, 0)
    return index, TensorStorageMetadata(properties, shape, [chunk])


def _framed(
    name: str,
    tensor: LazyTensor,
    seen: Callable[[str, int, Tensor], None],
) -> Iterator[Any]:
    # ``seen`` gets each block before it is written.
    archive = archive_of(tensor.shape, tensor.dtype)
    yield archive.prefix
    for first, values in tensor.blocks():
        values = values.resolve_conj().resolve_neg()
        seen(name, first, values)
        yield memoryview(bytes_of(values).numpy().data)  # type: ignore[arg-type]
    yield archive.suffix
