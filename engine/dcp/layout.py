"""Where stored tensors lie in a DCP folder: what ``.metadata`` says, as arrays.

Rank 0 parses ``.metadata``; the others get this, which is a fraction of the size, and is searched without a Python
object for each of the chunks that a thousand ranks have written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..memory.tensors import Box


class Overlap(NamedTuple):
    """What a box has in common with a chunk.

    Attributes:
        chunk: number of the chunk.
        chunk_sizes: of the whole chunk.
        in_chunk: the common box, from the begin of the chunk on.
        offsets: where it begins in the box.
    """

    chunk: int
    chunk_sizes: tuple[int, ...]
    in_chunk: Box
    offsets: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Chunks:
    """The boxes that a tensor is stored in, which tile it; one object for all tensors that are cut alike.

    Attributes:
        offsets: ``[n, dims]`` int64.
        sizes: ``[n, dims]`` int64.
    """

    offsets: np.ndarray
    sizes: np.ndarray

    def overlaps(self, box: Box) -> list[Overlap]:
        """What of which chunk ``box`` is made of; nothing for an empty box."""
        if 0 in box.sizes:
            return []
        begins = np.maximum(self.offsets, np.array(box.offsets, np.int64))
        ends = np.minimum(self.offsets + self.sizes, np.array(box.offsets, np.int64) + np.array(box.sizes, np.int64))
        return [
            Overlap(
                int(chunk),
                tuple(self.sizes[chunk].tolist()),
                Box(
                    tuple((begins[chunk] - self.offsets[chunk]).tolist()),
                    tuple((ends[chunk] - begins[chunk]).tolist()),
                ),
                tuple((begins[chunk] - np.array(box.offsets, np.int64)).tolist()),
            )
            for chunk in np.flatnonzero((begins < ends).all(1))
        ]


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of a folder.

    Attributes:
        shape: of the whole tensor.
        dtype: of its values.
        chunks: how it is cut.
        files: ``[n]`` int64: of each chunk, the position of its file in `FolderLayout.files`.
        begins: ``[n]`` int64: of each chunk, where its archive begins in the file, in bytes.
        lengths: ``[n]`` int64: of each chunk, the bytes of its archive.
    """

    shape: torch.Size
    dtype: torch.dtype
    chunks: Chunks
    files: np.ndarray
    begins: np.ndarray
    lengths: np.ndarray


class StoredObject(NamedTuple):
    """What a folder stores that is not a tensor: an archive of `torch.save`.

    Attributes:
        file: name of its file.
        begin: where its archive begins in the file, in bytes.
        length: bytes of its archive.
    """

    file: str
    begin: int
    length: int


@dataclass(frozen=True, eq=False)
class FolderLayout:
    """Everything that is stored in a folder.

    Attributes:
        files: names of the data files, and how many bytes each has at least.
        tensors: full name -> tensor.
        objects: full name -> where it is, of what is not a tensor.
    """

    files: dict[str, int]
    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]

    def names(self) -> set[str]:
        """Of tensors and objects."""
        return self.tensors.keys() | self.objects.keys()

    def renamed(self, rename: Callable[[str], str]) -> "FolderLayout":
        """The same under other names."""
        tensors = {rename(name): tensor for name, tensor in self.tensors.items()}
        return FolderLayout(self.files, tensors, {rename(name): place for name, place in self.objects.items()})
