"""`DurableWriter`: torch's DCP writer with files that are on stable storage, and described, when they are reported.

Torch fsyncs before Python's buffer is flushed, truncates what exists, replaces ``.metadata`` by removing it first, and
loses the error of every thread but the first. Here all files are `DurableFile`s (new, digested while they are written,
flushed before they are fsynced), ``.metadata`` is written last and in place, and there is one thread. An error on any
rank reaches all of them through torch's own collectives, within the timeout of the process group.

What is written is torch's format to the byte: stock ``dcp.load`` reads it. Making the folder's entries durable and the
folder visible is the caller's (`files.commit_folder`); until then it is no checkpoint. Digests cost one pass over bytes
that are in the cache; see benchmarks/dump_digest.py.
"""

import io
import os
import pickle
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint import FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystem
from torch.distributed.checkpoint.storage import WriteResult

from ..utils.files import DurableFile
from ..utils.manifest import FileEntry, write_sealed


class DurableWriter(FileSystemWriter):
    """A DCP ``StorageWriter`` for ``dcp.save(state, storage_writer=DurableWriter(path))``.

    Args:
        path: new or empty folder; a file that exists fails the save.

    Attributes:
        entries: the files this rank wrote; rank 0's ``.metadata`` is the last.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, sync_files=False, thread_count=1, overwrite=False)  # a DurableFile syncs itself
        self.entries: list[FileEntry] = []
        self.fs = _DurableFiles(self.entries)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save."""
        super().reset(checkpoint_id)
        self.entries.clear()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``; rank 0 is called when the data of all ranks is on stable storage."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        metadata.storage_meta = self.storage_meta()
        self.entries.append(write_sealed(cast(Path, self.path), ".metadata", pickle.dumps(metadata)))


class _DurableFiles(FileSystem):
    """Where torch opens its data files."""

    def __init__(self, entries: list[FileEntry]) -> None:
        self._entries = entries

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with DurableFile(path) as file:
            try:
                yield cast(Any, file)
            except RuntimeError as error:  # torch.save closes its archive, and complains of that instead
                if isinstance(error.__context__, Exception):
                    raise error.__context__ from None
                raise
        self._entries.append(FileEntry(file.path.name, file.bytes, file.digest))
