"""``torch.save`` files of tensors, numbers, strings and containers, loaded without running code.

`pack_plain` checks that the value can be loaded this way, so that a bad value fails the snapshot and not the recovery.
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
"""Errors that torch raises for damaged files."""

_ARCHIVE = b"PK\x03\x04"
"""First bytes of a ``torch.save`` file, which is a ZIP archive."""


def pack_plain(what: str, value: Any) -> bytes:
    """Serialize tensors and plain values with ``torch.save``.

    Raises:
        ConfigError: loading ``value`` would run code. The message calls it ``what``.
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
    """Load the result of `pack_plain`. Raises as `load_plain`."""
    return load_plain(io.BytesIO(data), source)


def read_plain(path: Path) -> Any:
    """Load a file with the result of `pack_plain`. Raises as `load_plain`."""
    try:
        with open(path, "rb") as file:
            return load_plain(file, path)
    except FileNotFoundError as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {error.strerror}") from error


def load_plain(file: IO[bytes], source: str | os.PathLike[str], device: torch.device | None = None) -> Any:
    """Load the value in ``file``.

    Args:
        file: seekable file.
        source: name of the file in messages.
        device: destination of tensors that were saved from a GPU. None means the CPU, like all other tensors.

    Raises:
        CheckpointCorruptError: the file is damaged, needs a type that could run code (which the message names), or is
            compressed. torch never compresses, and a small compressed file could fill the memory.
    """
    try:
        _check_archive(file)
        return torch.load(file, map_location="cpu" if device is None else partial(_place, device), weights_only=True)
    except _DAMAGE as error:
        raise CheckpointCorruptError(f"{source} cannot be read: {plain_reason(error)}") from error


def map_plain(path: str | os.PathLike[str], *allowed: Any) -> Any:
    """Load a ``torch.save`` file with its tensors mapped into memory, so that pages are read when they are used.

    Files of torch before 1.6 are read as a whole.

    Args:
        path: file, which must stay while the value is used.
        allowed: types and functions that the file may use besides torch's own.

    Raises:
        CheckpointCorruptError: as `load_plain`.
        OSError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            mapped = _check_archive(file)
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(os.fspath(path), map_location="cpu", weights_only=True, mmap=mapped)
    except _DAMAGE as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {plain_reason(error)}") from error


def _place(device: torch.device, storage: Any, location: str) -> Any:
    """Move a loaded storage that was saved at ``location`` (``cpu``, ``cuda:3`` ...)."""
    return storage.cuda(device.index) if location.startswith("cuda") and device.type == "cuda" else storage


def _check_archive(file: IO[bytes]) -> bool:
    """Return whether the file is an archive, as torch writes since 1.6. Raises if it is truncated or compressed."""
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
    """Shorten torch's error to one line, without its advice to load unsafely."""
    forbidden = re.search(r"(?:Unsupported global: |unsupported )GLOBAL (\S+)", str(error))
    if forbidden:
        return f"it holds {forbidden[1]}, which could only be read by running code"
    if isinstance(error, CheckpointCorruptError):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):
        return "it is not a file of tensors and plain values"
    return f"{type(error).__name__}: {error}".splitlines()[0]
