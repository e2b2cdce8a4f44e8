"""Pickles that run code if they are loaded carelessly, in every wrapping of torch and pickle.

Each payload creates a marker file. `careless` loads them all and runs their code, so that a test
can first check that the payloads work.
"""

import io
import os
import pickle
import subprocess
import sys
import timeit
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Call:
    """Unpickles into ``function(*arguments)``."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._function, self._arguments


def payload_objects(marker: Path) -> dict[str, Any]:
    """Name -> object that creates ``marker`` when unpickled."""
    code, command = f"open({str(marker)!r}, 'w').close()", f"touch {marker}"
    inner = io.BytesIO()
    torch.save(Call(os.system, command), inner, _use_new_zipfile_serialization=False)
    return {
        "os.system": Call(os.system, command),
        "builtins.eval": Call(eval, code),
        "builtins.exec": Call(exec, code),
        "subprocess.call": Call(subprocess.call, ["touch", str(marker)]),
        "timeit.timeit": Call(timeit.timeit, code, "pass", timeit.default_timer, 1),
        "torch.storage": Call(torch.storage._load_from_bytes, inner.getvalue()),
        "in an OrderedDict": OrderedDict(a=torch.ones(2), b=[{"c": (Call(os.system, command),)}]),
    }


def payload_streams(marker: Path) -> dict[str, bytes]:
    """Name -> pickle that creates ``marker``: `payload_objects`, and opcodes that Python itself no
    longer writes.
    """
    plain = {
        name: value
        for name, value in payload_objects(marker).items()
        if name != "in an OrderedDict"
    }
    streams = {name: pickle.dumps(value, protocol=2) for name, value in plain.items()}
    command = f"touch {marker}".encode()
    streams["protocol 4"] = pickle.dumps(plain["builtins.exec"], protocol=4)
    streams["opcode INST"] = b"(S'" + command + b"'\nios\nsystem\n."
    streams["opcode OBJ"] = b"(cos\nsystem\nS'" + command + b"'\no."
    streams["opcode REDUCE"] = b"cos\nsystem\n(S'" + command + b"'\ntR."
    streams["nested"] = pickle.dumps({"user": [OrderedDict(a=(plain["os.system"],))]}, protocol=2)
    return streams


def _in_zip(stream: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Wrap a pickle like ``torch.save`` today."""
    honest, forged = io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.arange(3)}, honest)
    with zipfile.ZipFile(honest) as source, zipfile.ZipFile(forged, "w", compression) as target:
        for name in source.namelist():
            target.writestr(name, stream if name.endswith("/data.pkl") else source.read(name))
    return forged.getvalue()


def _in_legacy(stream: bytes) -> bytes:
    """Wrap a pickle like ``torch.save`` before version 1.6."""
    head: tuple[Any, ...] = (
        0x1950A86A20F9469CFC6C,
        1001,
        {"protocol_version": 1001, "little_endian": True},
    )
    return b"".join(pickle.dumps(value, 2) for value in head) + stream + pickle.dumps([], 2)


WRAPPINGS: dict[str, Callable[[bytes], bytes]] = {
    "bare": lambda stream: stream,
    "zip": _in_zip,
    "deflated zip": lambda stream: _in_zip(stream, zipfile.ZIP_DEFLATED),
    "legacy": _in_legacy,
}
"""Functions that turn a pickle into a file for torch.load."""


def careless(data: bytes) -> None:
    """Load data without any safeguard, and ignore errors."""
    try:
        torch.load(io.BytesIO(data), weights_only=False)
    except Exception as error:  # the payload has run by now, or the test reports that it has not
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


def zip_bomb(n_bytes: int) -> bytes:
    """A ``torch.save`` file a thousand times smaller than its uint8 tensor of ``n_bytes`` zeros."""
    honest, forged = io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.zeros(n_bytes, dtype=torch.uint8)}, honest)
    with (
        zipfile.ZipFile(honest) as source,
        zipfile.ZipFile(forged, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return forged.getvalue()
