"""Tensors, numbers, strings, and containers of them as ``torch.save`` writes them, read without running anything.

That they can be read so is checked when they are written: what cannot fails the snapshot, not the recovery.
"""

import io
import os
import pickle
import re
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from .errors import CheckpointCorruptError, ConfigError

_DAMAGE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
)
"""What torch raises of bytes that are not its own."""

_ARCHIVE = b"PK\x03\x04"
"""First bytes of a file of ``torch.save``, which is a ZIP archive."""


def pack_plain(what: str, value: Any) -> bytes:
    """``torch.save`` of tensors and plain values.

    Raises:
        ConfigError: ``value``, which the message calls ``what``, could only be loaded by running code.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        allowed = "a state_dict may hold tensors, numbers, strings, lists and dicts"
        raise ConfigError(f"{what} cannot be saved: {plain_reason(error)}; {allowed}") from error
    return buffer.getvalue()


def unpack_plain(data: bytes, source: str | os.PathLike[str]) -> Any:
    """What `pack_plain` packed; see `load_plain`."""
    return load_plain(io.BytesIO(data), source)


def read_plain(path: Path) -> Any:
    """What a file holds that `pack_plain` packed; see `load_plain`."""
    try:
        with open(path, "rb") as file:
            return load_plain(file, path)
    except FileNotFoundError as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {error.strerror}") from error


def load_plain(file: IO[bytes], source: str | os.PathLike[str], device: torch.device | None = None) -> Any:
    """The value in ``file``, with its tensors on the CPU.

    Args:
        file: seekable.
        source: what to call it in messages.
        device: where tensors go that were on a GPU when they were saved; None: on the CPU, too.

    Raises:
        CheckpointCorruptError: it is damaged, asks for a type (which the message names) that could run code, or is
            compressed, as torch never writes: a small file could fill the memory.
    """
    try:
        _check_archive(file)
        return torch.load(file, map_location="cpu" if device is None else partial(_place, device), weights_only=True)
    except _DAMAGE as error:
        raise CheckpointCorruptError(f"{source} cannot be read: {plain_reason(error)}") from error


def map_plain(path: str | os.PathLike[str], *allowed: Any) -> Any:
    """The value that ``torch.save`` wrote to a file, its tensors mapped: a page is read when it is looked at.

    Tensors of a file of torch before 1.6 are read into memory.

    Args:
        path: the file; it must stay while the value is used.
        allowed: types and functions that it may ask for besides torch's own.

    Raises:
        CheckpointCorruptError: see `load_plain`.
        OSError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            mapped = _check_archive(file)
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(os.fspath(path), map_location="cpu", weights_only=True, mmap=mapped)
    except _DAMAGE as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {plain_reason(error)}") from error


def _place(device: torch.device, storage: Any, location: str) -> Any:
    """A storage that was read, and was at ``location`` (``cpu``, ``cuda:3`` ...), where it belongs now."""
    return storage.cuda(device.index) if location.startswith("cuda") and device.type == "cuda" else storage


def _check_archive(file: IO[bytes]) -> bool:
    """Whether the file is an archive, as torch writes since 1.6. Refuse one that is cut short or compressed."""
    start = file.tell()
    begins_as_archive = _ARCHIVE.startswith(file.read(len(_ARCHIVE)))
    n_bytes = file.seek(0, os.SEEK_END) - start
    if is_archive := zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise CheckpointCorruptError("it is compressed, which torch.save does not do")
    elif begins_as_archive:
        raise CheckpointCorruptError(
            f"it ends after {n_bytes} bytes, without the table of contents that torch.save writes last. "
            "Copy the file again, or use an older checkpoint"
        )
    file.seek(start)
    return is_archive


def plain_reason(error: Exception) -> str:
    """In a line what torch says in ten, advice to load it unsafely included."""
    forbidden = re.search(r"(?:Unsupported global: |unsupported )GLOBAL (\S+)", str(error))
    if forbidden:
        return f"it holds {forbidden[1]}, which could only be read by running code"
    if isinstance(error, CheckpointCorruptError):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):
        return "it is not a file of tensors and plain values"
    return f"{type(error).__name__}: {error}".splitlines()[0]
