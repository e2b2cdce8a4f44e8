"""Read files of ``torch.save``, which may hold only what cannot run code."""

import codecs
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.engine.memory.lazy_tensor import LazyTensor
from holdfast.recover.export.stored_tensors import Tensors
from holdfast.utils.errors import CheckpointCorruptError
from holdfast.utils.plain_values import map_plain

# Pickles of numpy 1 and 2 name the same function in different modules.
_RECONSTRUCT: Any = np.zeros(0).__reduce__()[0]
_ARRAYS: Sequence[Any] = (
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    codecs.encode,
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),
    (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
)
"""Types in the state of numpy's generator, which trainers save unchanged."""


def read_file(path: Path) -> Any:
    """Map a ``torch.save`` file of tensors, DTensors, numbers, strings, arrays and containers.

    Raises:
        CheckpointCorruptError: the file is missing, damaged, or asks for a type that could run
            code, which is named.
    """
    try:
        with _quiet_meshes():
            return map_plain(path, *_ARRAYS)
    except FileNotFoundError as error:
        raise CheckpointCorruptError(f"{path} is missing") from error


@contextmanager
def _quiet_meshes() -> Iterator[None]:
    """Silence torch's warning that a mesh has no process group, because none is needed."""
    # The level is that of the whole process, so it is put back.
    logger = logging.getLogger("torch.distributed.device_mesh")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def require_tensor(where: str | Path, name: Any, value: Any) -> None:
    """Raise `CheckpointCorruptError` unless ``value``, called ``name`` in the file ``where``, is a
    tensor of rows.
    """
    if not isinstance(name, str):
        raise CheckpointCorruptError(f"{where}: an entry is called {name!r}; expected a string")
    if not isinstance(value, Tensor):
        raise CheckpointCorruptError(
            f"{where}: {name} is a {type(value).__name__}; expected a tensor"
        )

    # Anything but a dense tensor of numbers would fail later, without a name.
    local = local_part(value)
    if local.layout is not torch.strided:
        layout = str(local.layout).removeprefix("torch.")
        kind = f"{layout} tensor"
    elif local.is_quantized:
        kind = "quantized tensor"
    elif local.is_meta:
        kind = "tensor on the meta device, without values"
    else:
        return
    raise CheckpointCorruptError(f"{where}: {name} is a {kind}; expected a dense tensor of numbers")


def local_part(tensor: Tensor) -> Tensor:
    """The shard of a rank in a DTensor. Any other tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shared_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name of a tensor -> earlier name of a tensor in the same memory, so that tied tensors are
    stored once.
    """
    first: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        # Tensors without elements have no memory to share.
        local = local_part(tensor)
        if not local.numel():
            continue
        place = (
            local.untyped_storage().data_ptr(),
            local.storage_offset(),
            tuple(local.shape),
            local.stride(),
        )
        earlier = first.setdefault(place, name)
        if earlier != name:
            found[name] = earlier
    return found


def read_bin(path: Path) -> tuple[Tensors, dict[str, str]]:
    """Tensors of a ``torch.save`` file in its order, and the aliases of those that share memory."""
    state = read_file(path)
    if not isinstance(state, dict):
        raise CheckpointCorruptError(f"{path} is not the state_dict of a model")
    for name, value in state.items():
        require_tensor(path, name, value)

    # The first of several tensors that share memory is taken.
    tied = shared_names(state)
    found: Tensors = {}
    for name, tensor in state.items():
        if name not in tied:
            found[name] = LazyTensor.of(tensor)
    return found, tied
