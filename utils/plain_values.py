"""Plain values (numbers, strings, containers, tensors) as bytes that are loaded without running
code.

- `pack_plain` writes ``torch.save`` files. It checks that the value can be loaded this way, so that
  a bad value fails the snapshot and not the recovery.
- `pack_json` puts values without tensors into a uint8 tensor, so that tensor files can hold them
  without pickle. JSON keeps every bit of a float. Tuples, and dicts with other keys than strings,
  are tagged.
"""

import io
import json
import math
import os
import pickle
import re
import struct
import zipfile
from collections import Counter, OrderedDict
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from .errors import CheckpointCorruptError, ConfigError
from .files import StrPath

DAMAGE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors raised by unpickling damaged bytes."""

_TORCH_DAMAGE = (*DAMAGE, AssertionError, struct.error, zipfile.BadZipFile)
"""Errors raised by torch.load for damaged files."""

_ARCHIVE = b"PK\x03\x04"
"""First bytes of a ``torch.save`` file, which is a ZIP archive."""


def pack_plain(what: str, value: Any) -> bytes:
    """Serialize tensors and plain values with ``torch.save``.

    Raises ConfigError if loading ``value``, called ``what`` in the message, would run code.
    """
    return _packed(what, value).getvalue()


def pack_nested(what: str, value: Any) -> torch.Tensor:
    """`pack_plain` as a uint8 tensor ``[n]``, for a part of another packed value.

    ``torch.save`` writes bytes as text, which takes 1.5 times the space and 20 times the time.
    """
    return torch.frombuffer(_packed(what, value).getbuffer(), dtype=torch.uint8)


def _packed(what: str, value: Any) -> io.BytesIO:
    # torch.save accepts any object, so that only the way back shows whether it needs code.
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        allowed = "a state_dict may hold tensors, numbers, strings, lists and dicts"
        raise ConfigError(f"{what} cannot be saved: {plain_reason(error)}; {allowed}") from error
    return buffer


def unpack_plain(data: bytes | torch.Tensor, source: StrPath) -> Any:
    """Load the result of `pack_plain` or `pack_nested`. Raises as `load_plain`."""
    if isinstance(data, torch.Tensor) and data.dtype == torch.uint8 and data.dim() == 1:
        data = data.numpy().tobytes()
    if not isinstance(data, bytes):
        raise CheckpointCorruptError(
            f"{source} cannot be read: it is a {type(data).__name__}; expected bytes"
        )
    return load_plain(io.BytesIO(data), source)


def read_plain(path: Path) -> Any:
    """Load a file with the result of `pack_plain`. Raises as `load_plain`."""
    try:
        with open(path, "rb") as file:
            return load_plain(file, path)
    except FileNotFoundError as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {error.strerror}") from error


def load_plain(file: IO[bytes], source: StrPath, device: torch.device | None = None) -> Any:
    """Load the value in ``file``.

    Args:
        file: seekable file.
        source: name of the file in messages.
        device: destination of tensors that were saved from a GPU. None means the CPU, like all
            other tensors.

    Raises:
        CheckpointCorruptError: the file is damaged, needs a type that could run code (which the
            message names), or is compressed. torch never compresses, and a small compressed file
            could fill the memory.
    """
    place: Any = "cpu"
    if device is not None:
        place = partial(_place, device)
    try:
        # Before torch reads it, which may fill the memory.
        _check_archive(file)
        return torch.load(file, map_location=place, weights_only=True)
    except _TORCH_DAMAGE as error:
        raise CheckpointCorruptError(f"{source} cannot be read: {plain_reason(error)}") from error


def map_plain(path: StrPath, *allowed: Any) -> Any:
    """Load a ``torch.save`` file with its tensors mapped into memory, so that pages are read when
    they are used.

    Files of torch before 1.6 are read as a whole. The file must stay while the value is used.
    ``allowed`` are types and functions that it may use besides torch's own. Raises OSError, and
    CheckpointCorruptError as `load_plain`.
    """
    try:
        with open(path, "rb") as file:
            mapped = _check_archive(file)

        # Older files are no archives, and torch cannot map them.
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(os.fspath(path), map_location="cpu", weights_only=True, mmap=mapped)
    except _TORCH_DAMAGE as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {plain_reason(error)}") from error


def _place(device: torch.device, storage: Any, location: str) -> Any:
    """Move a loaded storage that was saved at ``location`` (``cpu``, ``cuda:3`` ...)."""
    if location.startswith("cuda") and device.type == "cuda":
        return storage.cuda(device.index)
    return storage


def _check_archive(file: IO[bytes]) -> bool:
    """Return whether the file is an archive, as torch writes since 1.6. Raises if it is truncated
    or compressed.
    """
    start = file.tell()
    first_bytes = file.read(len(_ARCHIVE))
    begins_as_archive = _ARCHIVE.startswith(first_bytes)
    n_bytes = file.seek(0, os.SEEK_END) - start

    # The table of contents is at the end of an archive.
    is_archive = zipfile.is_zipfile(file)
    if is_archive:
        with zipfile.ZipFile(file) as archive:
            kinds = {member.compress_type for member in archive.infolist()}
        if kinds - {zipfile.ZIP_STORED}:
            raise CheckpointCorruptError("it is compressed, which torch.save does not do")
    elif begins_as_archive:
        raise CheckpointCorruptError(
            f"it ends after {n_bytes} bytes, without the table of contents that torch.save writes "
            "last. Copy the file again, or use an older checkpoint"
        )
    file.seek(start)
    return is_archive


def plain_reason(error: Exception) -> str:
    """Shorten torch's error to one line, without its advice to load unsafely."""
    # torch has named the type in these two ways.
    forbidden = re.search(r"(?:Unsupported global: |unsupported )GLOBAL (\S+)", str(error))
    if forbidden:
        return f"it holds {forbidden[1]}, which could only be read by running code"
    if isinstance(error, CheckpointCorruptError):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):
        return "it is not a file of tensors and plain values"
    return f"{type(error).__name__}: {error}".splitlines()[0]


_BLOCK_BYTES = 4096
"""Packed tensors are padded to a multiple of this, so that their size is stable when a digit is
added.
"""

_SCALARS = (bool, int, float, str)
_TAG = "__type__"
_TAGGED = {kind.__name__: kind for kind in (dict, tuple, Counter, OrderedDict)}


def pack_json(value: Any, name: str) -> torch.Tensor:
    """Encode ``value`` as JSON text in a ``[n]`` uint8 tensor, padded with spaces.

    Raises ConfigError if ``value``, called ``name``, holds other things than numbers, strings,
    lists, tuples and dicts.
    """
    return pad_bytes(plain_json(value, name), b" ")


def plain_json(value: Any, name: str, exact: bool = False) -> bytes:
    """Encode ``value`` as JSON text. ConfigError as in `pack_json`.

    With ``exact``, numbers and strings of numpy are encoded as Python's, and other subclasses of
    numbers and strings (an Enum), which would come back as plain ones, are a ConfigError too.
    """
    return json.dumps(_encode(value, name, exact)).encode()


def from_plain_json(data: bytes) -> Any:
    """Reverse `plain_json`. Raises ValueError, TypeError or KeyError if it is something else."""
    return _decode(json.loads(data))


def unpack_json(tensor: torch.Tensor, name: str) -> Any:
    """Reverse `pack_json`: an equal value of the same container types. Raises
    CheckpointCorruptError.
    """
    try:
        data = tensor.cpu().numpy().tobytes()
        return from_plain_json(data)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointCorruptError(
            f"{name} is not JSON as a checkpoint has it: {error}"
        ) from error


def pad_bytes(data: bytes, padding: bytes) -> torch.Tensor:
    """``[n]`` uint8 with ``data``, padded with a byte to a multiple of 4096."""
    n_blocks = math.ceil(len(data) / _BLOCK_BYTES)
    padded = data.ljust(n_blocks * _BLOCK_BYTES, padding)
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8)


def _pythons(value: Any) -> Any:
    """Python's number or string for one of numpy, and any other value as it is."""
    return value.item() if isinstance(value, np.generic) else value


def _encode(value: Any, name: str, exact: bool) -> Any:
    if exact:
        value = _pythons(value)
    kind = type(value)
    if value is None or kind in _SCALARS:
        return value
    if not exact and isinstance(value, _SCALARS):
        return value
    # Lists, and dicts with names, are those of JSON. The name leads to the item in messages.
    if kind is list:
        return [_encode(item, f"{name}[{index}]", exact) for index, item in enumerate(value)]
    has_names = kind is dict and all(type(key) is str for key in value)
    if has_names and _TAG not in value:
        return {key: _encode(item, f"{name}.{key}", exact) for key, item in value.items()}
    # Containers that JSON does not know are lists with a tag.
    if kind in _TAGGED.values():
        if kind is tuple:
            items = list(value)
        else:
            items = [[key, item] for key, item in value.items()]
        return {_TAG: kind.__name__, "items": _encode(items, name, exact)}
    raise ConfigError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; "
        "expected Python's own numbers, strings, lists, tuples and dicts of them"
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode(item) for key, item in value.items()}

    # A tagged container. The items of a dict are pairs.
    kind = _TAGGED[value[_TAG]]
    items = _decode(value["items"])
    if kind is tuple:
        return tuple(items)
    return kind(dict(items))
