"""`CheckedReader`: DCP reader for untrusted folders: restricted unpickler, ``weights_only``.

Torch's own unpickles the metadata and every object as they come, casts what has another dtype, and takes the bytes for
what they should be. Here metadata comes from `read_metadata`; a manifest, if there is one, is compared before a file is
used; a tensor must have the dtype and shape that the metadata announced; and an object is handed on only after torch's
``weights_only`` loader accepted it, as bytes written anew from what that loader understood.

A file is hashed as a whole before the first tensor of it is read: one more pass over what is mostly in the page cache
afterwards.
"""

import os
from collections.abc import Iterable, Iterator
from io import SEEK_CUR, SEEK_END, SEEK_SET, BytesIO, RawIOBase
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner, Metadata, ReadItem
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError
from ...utils.heartbeat import beat
from ...utils.manifest import MANIFEST_NAME, check_listing, verify_file
from ...utils.safe_torch import load_plain
from .metadata import read_metadata, tensor_entry


class _Part(RawIOBase):
    """``length`` bytes of an open file from ``start`` on, as a file of their own.

    Torch's view of that kind cannot seek from its end.
    """

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        self._at = max(0, offset + {SEEK_SET: 0, SEEK_CUR: self._at, SEEK_END: self._length}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])  # type: ignore[attr-defined]
        self._at += count
        return count


class CheckedReader(FileSystemReader):
    """A DCP ``StorageReader`` for ``dcp.load(state, storage_reader=CheckedReader(path))``.

    Args:
        path: DCP folder.
        metadata: from `read_metadata` of a folder whose files were verified; None has the reader do both.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError: see `read_metadata` and `verify_folder`.
    """

    def __init__(self, path: str | os.PathLike[str], metadata: Metadata | None = None) -> None:
        super().__init__(path)
        self._unverified: dict[str, dict[str, Any]] = {}
        self._metadata = self._check() if metadata is None else metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of ``checkpoint_id`` if it is given."""
        super().reset(checkpoint_id)
        if checkpoint_id is not None:
            self._metadata = self._check()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checked metadata."""
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what ``plan`` asks for to where ``planner`` wants it; in place, as torch's own reader does.

        Raises:
            CheckpointCorruptError: a file is not what was committed, or not what the metadata announces.
            CheckpointMismatchError: a tensor has another dtype than the one it would be copied to; nothing was changed.
        """
        for item in plan.items:
            self._check_target(item, planner)
        for item, value in self.read_items(plan.items):
            if isinstance(value, BytesIO):
                planner.load_bytes(item, value)
            else:
                target = planner.resolve_tensor(item).detach()
                target.copy_(value)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_items(self, items: Iterable[ReadItem]) -> Iterator[tuple[ReadItem, torch.Tensor | BytesIO]]:
        """``(item, value)`` of each item, file by file: the tensor values it asks for, or the bytes of a plain object.

        Raises:
            CheckpointCorruptError: see `read_data`.
        """
        files: dict[str, list[tuple[Any, ReadItem]]] = {}
        for item in items:
            info = self._metadata.storage_data[item.storage_index]
            files.setdefault(info.relative_path, []).append((info, item))
        for name, parts in files.items():
            if name in self._unverified:
                verify_file(self.path, name, self._unverified.pop(name))
            with open(Path(self.path) / name, "rb") as file:
                for info, item in sorted(parts, key=lambda part: part[0].offset):
                    beat()
                    part: Any = _Part(file, info.offset, info.length)
                    yield item, self._read_bytes(item, part) if _is_bytes(item) else self._read_tensor(item, part)

    def _check(self) -> Metadata:
        """Compare names, sizes and ``.metadata`` with the manifest, if there is one; data files follow when read."""
        self._unverified = {}
        if (Path(self.path) / MANIFEST_NAME).exists():
            self._unverified = dict(check_listing(self.path)["files"])
            verify_file(self.path, ".metadata", self._unverified.pop(".metadata"))
        return read_metadata(self.path)

    def _check_target(self, item: ReadItem, planner: LoadPlanner) -> None:
        if _is_bytes(item):
            return
        name, target, entry = item.storage_index.fqn, planner.resolve_tensor(item), self._entry(item)
        if target.dtype != entry.properties.dtype:
            raise CheckpointMismatchError(
                f"{self.path}: {name} has dtype {entry.properties.dtype}, but is to be read into {target.dtype}"
            )
        if target.shape != item.lengths:
            raise CheckpointMismatchError(
                f"{self.path}: {name} is to be read into {list(target.shape)}, planned were {list(item.lengths)}"
            )

    def _entry(self, item: ReadItem) -> Any:
        entry = tensor_entry(self._metadata, item.storage_index.fqn)
        if entry is None:
            raise CheckpointMismatchError(f"{self.path}: {item.storage_index.fqn} is no tensor")
        return entry

    def _read_tensor(self, item: ReadItem, part: IO[bytes]) -> torch.Tensor:
        name, entry, value = self._name(item), self._entry(item), load_plain(part, self._name(item))
        shape = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == item.storage_index.offset)
        if not isinstance(value, torch.Tensor) or value.shape != shape or value.dtype != entry.properties.dtype:
            found = f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise CheckpointCorruptError(
                f"{name} holds {found}; .metadata announces {list(shape)} {entry.properties.dtype}"
            )
        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            value = value.narrow(dim, offset, length)
        return value

    def _read_bytes(self, item: ReadItem, part: IO[bytes]) -> BytesIO:
        rewritten = BytesIO()
        torch.save(load_plain(part, self._name(item)), rewritten)
        rewritten.seek(0)
        return rewritten

    def _name(self, item: ReadItem) -> str:
        return f"{self.path}: {item.storage_index.fqn}"


def _is_bytes(item: ReadItem) -> bool:
    return item.type == LoadItemType.BYTE_IO
