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
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError
from ...utils.files import StrPath

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
ADAPTER_NAME = "adapter_config.json"
"""File of an adapter of PEFT."""
MAX_SHARD_SIZE_BYTES = 50 * 10**9
"""Size at which ``save_pretrained`` begins a second file."""

# The safetensors library refuses longer headers too.
_MAX_HEADER_BYTES = 100_000_000

# Errors of reading a JSON document of another form.
_NOT_AS_EXPECTED = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
)

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
    # bytes of the whole block, counted towards the size of a file
    block_bytes: int

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
    # first byte, counted from the start of the file
    offset: int
    shape: tuple[int, ...]  # shape of the tensor
    # dtype of the tensor in the file
    dtype: torch.dtype


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
    # contents of ``model.safetensors.index.json``. None for a single file
    index: bytes | None

    @property
    def slots(self) -> dict[str, TensorSlot]:
        """Tensor name -> slot, over all files."""
        return {key: slot for file in self.files for key, slot in file.slots.items()}

    @property
    def total_bytes(self) -> int:
        """Size of all weight files."""
        return sum(file.total_bytes for file in self.files)


def plan_layout(
    tensors: Sequence[TensorSpec],
    max_shard_size_bytes: int,
    total_parameters: int,
) -> Layout:
    """Deal tensors, in the order of ``save_pretrained``, to files as
    ``save_pretrained(max_shard_size=...)`` does.

    A larger file holds a single tensor (or block). The index has ``total_parameters``,
    ``model.num_parameters()``. CheckpointMismatchError if safetensors does not know a dtype.
    """
    for tensor in tensors:
        if tensor.dtype not in DTYPE_CODES:
            raise CheckpointMismatchError(
                f"{tensor.key} has dtype {tensor.dtype}; safetensors files hold "
                f"{', '.join(map(str, DTYPE_CODES))}"
            )

    # The rule of `save_pretrained` which tensors go to which file.
    by_key = {tensor.key: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_key,
        get_storage_size=lambda tensor: tensor.block_bytes,
        get_storage_id=lambda tensor: tensor.block,
        filename_pattern=WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max_shard_size_bytes,
    )
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

    # Offsets in the header count from its end.
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start = end
        end += tensor.nbytes
        entries[tensor.key] = {
            "dtype": DTYPE_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    header = encode_header(entries)

    slots = {}
    for tensor in ordered:
        start, _ = entries[tensor.key]["data_offsets"]
        slots[tensor.key] = TensorSlot(name, len(header) + start, tensor.shape, tensor.dtype)
    return WeightFile(name, header, len(header) + end, slots)


def encode_header(entries: Mapping[str, Any]) -> bytes:
    """The first bytes of a file: the length of the JSON, and the JSON padded to 8 bytes."""
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_layout(
    folder: StrPath, open_file: Callable[[str], BufferedReader]
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

    # Several files. Each tensor must be in the one that the index names, and in no other.
    weight_map = _read_index(root / INDEX_NAME)
    slots = {}
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
    except _NOT_AS_EXPECTED as error:
        raise CheckpointCorruptError(
            f"{path} is not a weight index: {type(error).__name__}: {error}"
        ) from error
    for name in names.values():
        if Path(name).name != name:
            raise CheckpointCorruptError(
                f"{path} names the file {name!r}; expected the name of a file next to it"
            )
    return names


class _Described(NamedTuple):
    """A tensor as the header of its file describes it."""

    dtype: str
    shape: tuple[int, ...]
    # of its first byte and after its last
    offsets: tuple[int, ...]


def read_header(file: BufferedReader) -> dict[str, TensorSlot]:
    """Find every tensor of one safetensors file that is open at its start. Raises as `read_layout`
    does.
    """
    path = Path(file.name)
    size = os.fstat(file.fileno()).st_size
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
            str(key): _Described(
                str(entry["dtype"]),
                tuple(map(int, entry["shape"])),
                tuple(map(int, entry["data_offsets"])),
            )
            for key, entry in entries.items()
        }
    except _NOT_AS_EXPECTED as error:
        raise CheckpointCorruptError(
            f"{path} has a broken header: {type(error).__name__}: {error}"
        ) from error
    return _check_header(path, 8 + length, size, described)


def _check_header(
    path: Path,
    start: int,
    size: int,
    described: Mapping[str, _Described],
) -> dict[str, TensorSlot]:
    slots = {}
    expected = start
    for key in sorted(described, key=lambda key: described[key].offsets):
        code, shape, offsets = described[key]
        if code not in _DTYPES:
            raise CheckpointMismatchError(
                f"{path}: {key} has dtype {code}; expected one of {', '.join(_DTYPES)}"
            )

        # torch counts elements with 63 bits, even those of an empty tensor.
        if min(shape, default=0) < 0 or math.prod(max(size, 1) for size in shape) >= 1 << 63:
            raise CheckpointCorruptError(
                f"{path} has a broken header: {key} cannot have the shape {list(shape)}"
            )

        # Tensors follow each other without gaps.
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
