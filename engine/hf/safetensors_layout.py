"""The place of each tensor in a Hugging Face folder: file names, safetensors headers, byte offsets.
No tensor data.

Every rank computes the same layout from names, shapes and dtypes alone, so that all ranks can write
one file at the same time. The result equals ``save_pretrained`` byte for byte:

- file: ``u64 header length | header JSON padded with spaces to 8 bytes | tensor bytes without
  gaps`` (https://huggingface.co/docs/safetensors/index#format),
- tensors in a file are sorted by dtype (widest first), then by name, as in the safetensors library,
- `huggingface_hub.split_state_dict_into_shards_factory` deals tensors to files in the given order.
"""

import json
import math
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_SHARD_SIZE_BYTES = 50 * 10**9
"""Size at which ``save_pretrained`` begins a second file."""

_MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer ones too

# In the order of safetensors' Dtype enum. Files list tensors from the last dtype to the first.
DTYPE_CODES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a file that has no place yet."""

    key: str  # its name in the file
    shape: tuple[int, ...]  # its shape in the file
    dtype: torch.dtype  # its dtype in the file
    # tensors of one block share a file (``save_pretrained`` keeps views of one storage together)
    block: Hashable
    block_bytes: int  # bytes of the whole block, counted towards the size of a file

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class TensorSlot:
    """The place of a tensor's bytes in a file."""

    file: str  # name of the file, without folder
    offset: int  # first byte, counted from the start of the file
    shape: tuple[int, ...]  # shape of the tensor
    dtype: torch.dtype  # dtype of the tensor in the file


Slots = Mapping[str, TensorSlot]
"""Tensor name -> place of its data."""


@dataclass(frozen=True)
class WeightFile:
    """One safetensors file."""

    name: str  # name of the file, without folder
    header: bytes  # its first bytes: length and JSON
    total_bytes: int  # its size, header included
    slots: Slots


@dataclass(frozen=True)
class Layout:
    """All weight files of a folder."""

    files: Sequence[WeightFile]
    index: bytes | None  # contents of ``model.safetensors.index.json``. None for a single file

    @property
    def slots(self) -> dict[str, TensorSlot]:
        """Tensor name -> slot, over all files."""
        return {key: slot for file in self.files for key, slot in file.slots.items()}

    @property
    def total_bytes(self) -> int:
        """Size of all weight files."""
        return sum(file.total_bytes for file in self.files)


def plan_layout(
    tensors: Sequence[TensorSpec], max_shard_size_bytes: int, total_parameters: int
) -> Layout:
    """Deal tensors, in the order of ``save_pretrained``, to files as
    ``save_pretrained(max_shard_size=...)`` does.

    A larger file holds a single tensor (or block). The index has ``total_parameters``,
    ``model.num_parameters()``. CheckpointMismatchError if safetensors does not know a dtype.
    """
    if strange := next((tensor for tensor in tensors if tensor.dtype not in DTYPE_CODES), None):
        raise CheckpointMismatchError(
            f"{strange.key} has dtype {strange.dtype}; safetensors files hold "
            f"{', '.join(map(str, DTYPE_CODES))}"
        )
    split = split_state_dict_into_shards_factory(
        {tensor.key: tensor for tensor in tensors},
        get_storage_size=lambda tensor: tensor.block_bytes,
        get_storage_id=lambda tensor: tensor.block,
        filename_pattern=WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max_shard_size_bytes,
    )
    by_key = {tensor.key: tensor for tensor in tensors}
    files = [
        _plan_file(name, [by_key[key] for key in keys])
        for name, keys in split.filename_to_tensors.items()
    ]
    index = None
    if split.is_sharded:
        metadata = {"total_parameters": total_parameters, **split.metadata}
        document = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        index = (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
    return Layout(files, index)


def _plan_file(name: str, tensors: Iterable[TensorSpec]) -> WeightFile:
    ranking = list(DTYPE_CODES).index
    ordered = sorted(tensors, key=lambda tensor: (-ranking(tensor.dtype), tensor.key.encode()))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.nbytes
        code, shape = DTYPE_CODES[tensor.dtype], list(tensor.shape)
        entries[tensor.key] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    slots = {
        tensor.key: TensorSlot(
            name, len(header) + entries[tensor.key]["data_offsets"][0], tensor.shape, tensor.dtype
        )
        for tensor in ordered
    }
    return WeightFile(name, header, len(header) + end, slots)


def read_layout(
    folder: str | os.PathLike[str], open_file: Callable[[str], BufferedReader]
) -> dict[str, TensorSlot]:
    """Find every tensor of an existing folder. Reads only headers and the index, and checks sizes.

    ``open_file`` opens a file by name. The caller keeps it open, to read values from the file with
    this header.

    CheckpointNotFoundError if there is no such folder, or it has no safetensors weights.
    CheckpointCorruptError if a file is missing, truncated, not safetensors, or disagrees with the
    index. CheckpointMismatchError if torch does not know a dtype.
    """
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointNotFoundError(
            f"{root} is not a folder; expected a Hugging Face model folder"
        )
    if (root / WEIGHTS_NAME).is_file():
        return read_header(open_file(WEIGHTS_NAME))
    if not (root / INDEX_NAME).is_file():
        found = sorted(path.name for path in root.iterdir())[:10]
        raise CheckpointNotFoundError(
            f"{root} has neither {WEIGHTS_NAME} nor {INDEX_NAME} (found {found}); "
            "other weight formats must be converted to safetensors first"
        )
    weight_map = _read_index(root / INDEX_NAME)
    slots: dict[str, TensorSlot] = {}
    for name in sorted(set(weight_map.values())):
        if not (root / name).is_file():
            raise CheckpointCorruptError(f"{root / INDEX_NAME} names {name}, which is missing")
        for key, slot in read_header(open_file(name)).items():
            if key in slots:
                raise CheckpointCorruptError(
                    f"{root}: tensor {key} is in both {slots[key].file} and {name}"
                )
            slots[key] = slot
    for key, name in weight_map.items():
        if key not in slots or slots[key].file != name:
            raise CheckpointCorruptError(
                f"{root / INDEX_NAME} says that {key} is in {name}, but it is not"
            )
    return slots


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        names = {str(key): str(name) for key, name in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(
            f"{path} is not a weight index: {type(error).__name__}: {error}"
        ) from error
    if outside := next((name for name in names.values() if Path(name).name != name), None):
        raise CheckpointCorruptError(
            f"{path} names the file {outside!r}, which is outside of its folder"
        )
    return names


def read_header(file: BufferedReader) -> dict[str, TensorSlot]:
    """Find every tensor of one safetensors file that is open at its start. Raises as `read_layout`
    does.
    """
    path, size = Path(file.name), os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise CheckpointCorruptError(
            f"{path} ({size} bytes) is truncated or not a safetensors file"
        )
    text = file.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        described = {
            str(key): (
                str(entry["dtype"]),
                tuple(map(int, entry["shape"])),
                tuple(map(int, entry["data_offsets"])),
            )
            for key, entry in entries.items()
        }
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise CheckpointCorruptError(
            f"{path} has a broken header: {type(error).__name__}: {error}"
        ) from error
    return _check_header(path, 8 + length, size, described)


def _check_header(
    path: Path,
    start: int,
    size: int,
    described: Mapping[str, tuple[str, tuple[int, ...], tuple[int, ...]]],
) -> dict[str, TensorSlot]:
    slots, expected = {}, start
    for key, (code, shape, offsets) in sorted(described.items(), key=lambda item: item[1][2]):
        if code not in _DTYPES:
            raise CheckpointMismatchError(
                f"{path}: {key} has dtype {code}; expected one of {', '.join(_DTYPES)}"
            )
        if (
            not all(size >= 0 for size in shape)
            or math.prod(max(size, 1) for size in shape) >= 1 << 63
        ):
            raise CheckpointCorruptError(
                f"{path} has a broken header: {key} cannot have the shape {list(shape)}"
            )
        nbytes = math.prod(shape) * _DTYPES[code].itemsize
        if len(offsets) != 2 or start + offsets[0] != expected or offsets[1] - offsets[0] != nbytes:
            raise CheckpointCorruptError(
                f"{path} has a broken header: {key} of {nbytes} bytes cannot be at {list(offsets)}"
            )
        slots[key] = TensorSlot(path.name, expected, shape, _DTYPES[code])
        expected += nbytes
    if size != expected:
        problem = "truncated" if size < expected else "too long"
        raise CheckpointCorruptError(
            f"{path} is {problem}: {size} bytes, its header asks for {expected}"
        )
    return slots
