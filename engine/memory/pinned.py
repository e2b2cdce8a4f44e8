"""Host memory for copies of tensors on a device, pinned once.

The pinned memory of torch is rounded up to a power of two for every tensor, to as much as twice the
need, and torch never returns it. So copies are in one anonymous mapping per device, which is
registered with CUDA and freed with the last tensor in it.
"""

import mmap
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 512  # as torch aligns on a GPU. No dtype and no cache line needs more
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process
_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK of Linux >= 4.14 (``include/uapi/asm-generic/mman-common.h``), which Python does
not define.
"""


class _Mapping(mmap.mmap):
    """Anonymous memory that can be pinned."""

    _pinned: tuple[int, torch.device, int] | None = None

    def pin(
        self,
        address: int,
        device: torch.device,
    ) -> None:
        """Lock the mapping into memory and register it with CUDA, so that copies to it are
        asynchronous.
        """
        with torch.cuda.device(device):  # any other device would get a useless context
            cudart: Any = torch.cuda.cudart()
            result = int(cudart.cudaHostRegister(address, len(self), _PORTABLE))
        if result:
            # The refusal stays CUDA's last error, which the next kernel would raise.
            with suppress(RuntimeError):
                torch.ones(1, device=device)
            raise RuntimeError(
                f"CUDA cannot pin {len(self)} bytes of host memory to stage snapshots in "
                f"(cudaError {result}); make room, or have nothing written in the background "
                "(recover.async_save: false, save(blocking=True))"
            )
        self._pinned = address, device, os.getpid()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Unpin before the unmap, but not in a fork of the process that pinned it, nor at the end
        of the process.
        """
        if self._pinned is None or is_finalizing():
            return
        address, device, pid = self._pinned
        if pid == os.getpid():
            with torch.cuda.device(device):
                cudart: Any = torch.cuda.cudart()
                cudart.cudaHostUnregister(address)


def host_copies_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors with the names, shapes and dtypes of ``tensors``, without their
    values.

    Copies of tensors on one device share a mapping, which lives as long as any of them. Raises
    OSError if there is no memory, and RuntimeError if CUDA cannot pin it.
    """
    of_device = defaultdict[torch.device, dict[str, Tensor]](dict)
    for name, tensor in tensors.items():
        of_device[tensor.device][name] = tensor
    copies: dict[str, Tensor] = {}
    for device, some in of_device.items():
        copies |= _in_one_mapping(some, device)
    return copies


def _in_one_mapping(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    # One after the other, each at a multiple of the alignment.
    places: dict[str, int] = {}
    total = 0
    for name, tensor in tensors.items():
        places[name] = total
        total += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    size = max(total, mmap.PAGESIZE)
    mapping = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # an older kernel
        # Without this a fork copies pinned pages. With MADV_DONTFORK a child that reads them would
        # die.
        mapping.madvise(_WIPE_ON_FORK)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    if device.type == "cuda":
        mapping.pin(memory.data_ptr(), device)

    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        data = memory[places[name] : places[name] + tensor.nbytes]
        values = data.view(tensor.dtype)
        copies[name] = values.view(tensor.shape)
    return copies
