"""What `torch.save` writes around the values of one tensor: the same bytes for all tensors of a shape and a dtype.

A `.distcp` file is a row of such archives (zip, not compressed). Torch itself makes one for a shape and a dtype, with
no values in it (`skip_data`), so nobody here has to know what this version of torch writes before the values and after
them. With it a tensor is written, and found in a file, without an archive being built or parsed.

Zip's CRC32 of the values, and the id that torch derives from it, are left as torch leaves them when it skips the data.
``torch.load`` looks at neither; files have digests.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any, cast

import torch
from torch.serialization import skip_data
from torch.utils.serialization import config as serialization_config


@dataclass(frozen=True)
class Archive:
    """The archive of a contiguous CPU tensor.

    Attributes:
        prefix: bytes before the values. A tensor that was saved in another way (strided, by another version of torch)
            has others.
        data_bytes: of the values.
        suffix: bytes after them.
    """

    prefix: bytes
    data_bytes: int
    suffix: bytes

    @property
    def bytes(self) -> int:
        """Of all of it."""
        return len(self.prefix) + self.data_bytes + len(self.suffix)


_SETTINGS = {"save.storage_alignment": 64, "save.compute_crc32": True}
"""Torch's own. All ranks and threads must agree: rank 0 plans where each writes, and a user may have set others."""


@lru_cache(maxsize=4096)
def archive_of(shape: tuple[int, ...], dtype: torch.dtype) -> Archive:
    """The archive of a CPU tensor of this shape and dtype, whatever torch's defaults are. About 0.1 ms.

    Takes no memory: storage that is not touched has none, and `torch.empty` is filled in deterministic mode.
    """
    storage = torch.UntypedStorage(math.prod(shape) * dtype.itemsize, device="cpu")
    strides = torch.empty(shape, device="meta").stride()
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)
    sink = _Sink()
    with skip_data(), cast(Any, serialization_config).patch(_SETTINGS):
        torch.save(tensor, cast(IO[bytes], sink))
    return Archive(b"".join(sink.prefix), sink.data_bytes, b"".join(sink.suffix))


class _Sink:
    """A file that keeps what is written before and after the one place that is skipped."""

    def __init__(self) -> None:
        self.prefix: list[bytes] = []
        self.suffix: list[bytes] = []
        self.data_bytes = 0

    def write(self, data: bytes) -> int:
        (self.suffix if self.data_bytes else self.prefix).append(bytes(data))
        return len(data)

    def seek(self, offset: int, whence: int) -> None:
        self.data_bytes += offset

    def flush(self) -> None:
        """Torch asks for it."""
