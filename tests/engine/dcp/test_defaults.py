"""Files and loaded values do not depend on torch's settings, nor on the representation of a
tensor.
"""

import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.serialization import config

from holdfast.engine.dcp import format as dcp_format
from holdfast.engine.dcp.format import archive_of
from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.memory.tensors import bytes_of, flatten
from holdfast.utils.errors import CheckpointWriteError
from holdfast.utils.files import file_digest

pytestmark = pytest.mark.timeout(60)
SHAPES = [(), (0, 3), (3, 0, 2), (5,), (4, 3), (1, 1, 7)]
DTYPES = [
    torch.bool,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint32,
    torch.float32,
]


@pytest.fixture(autouse=True)
def fresh_archives() -> Iterator[None]:
    archive_of.cache_clear()
    yield
    archive_of.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_archive_is_the_same_whatever_torchs_settings_and_whichever_thread_asks(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    plain = archive_of(shape, dtype)
    assert plain.data_bytes == math.prod(shape) * dtype.itemsize
    archive_of.cache_clear()
    with (
        cast(Any, config).patch({"save.storage_alignment": 4096, "save.compute_crc32": False}),
        torch.device("meta"),
    ):
        assert archive_of(shape, dtype) == plain
    archive_of.cache_clear()
    found = []
    thread = threading.Thread(target=lambda: found.append(archive_of(shape, dtype)))
    thread.start()
    thread.join()
    assert found == [plain]


class Odd(nn.Module):
    """A parameter, and buffers that are views whose bytes are not their values, or have rare
    dtypes.
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 4), value))
        self.register_buffer("conjugate", torch.tensor([complex(value, 2)]).conj())
        self.register_buffer("scalar", torch.tensor(complex(value, 3)).conj())
        self.register_buffer("negative", torch.tensor([complex(1, value)]).conj().imag)
        self.register_buffer("across", torch.full((5, 3), value).t())
        self.register_buffer("unsigned", torch.tensor([int(value)], dtype=torch.uint32))
        self.register_buffer("precise", torch.tensor([value], dtype=torch.complex128))
        self.register_buffer("eighth", torch.tensor([value]).to(torch.float8_e5m2fnuz))


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_odd_tensors_come_back_whatever_the_default_device(tmp_path: Path, default: str) -> None:
    saved, loaded = Odd(7.0), Odd(1.0)
    with torch.device(default):
        save_dcp(tmp_path / "c", DCPState(saved))
        load_dcp(tmp_path / "c", DCPState(loaded))
    expected = dict(flatten(DCPState(saved).state_dict()))
    for name, tensor in flatten(DCPState(loaded).state_dict()):
        ours, theirs = (
            tensor.resolve_conj().resolve_neg(),
            expected[name].resolve_conj().resolve_neg(),
        )
        assert torch.equal(bytes_of(ours.contiguous()), bytes_of(theirs.contiguous())), name


def test_a_file_that_is_not_as_long_as_planned_is_never_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = DCPState(Odd(7.0))
    save_dcp(tmp_path / "good", state)
    archive = archive_of((3, 4), torch.float32)
    longer = dcp_format.Archive(archive.prefix + b" " * 64, archive.data_bytes, archive.suffix)
    monkeypatch.setattr("holdfast.engine.dcp.save.archive_of", lambda *_: longer)
    with pytest.raises(CheckpointWriteError, match="planned were"):
        save_dcp(tmp_path / "bad", state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good"]


def test_an_error_while_values_are_placed_says_the_state_is_half_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_dcp(tmp_path / "c", DCPState(Odd(7.0)))

    def broken(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("holdfast.engine.dcp.reader._preadv", broken)
    with pytest.raises(OSError, match="half loaded and must be loaded again"):
        load_dcp(tmp_path / "c", DCPState(Odd(1.0)))


def test_a_pipe_has_a_digest_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    thread = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"some bytes",))
    thread.start()
    (tmp_path / "file").write_bytes(b"some bytes")
    assert file_digest(tmp_path / "pipe") == file_digest(tmp_path / "file")
    thread.join()
