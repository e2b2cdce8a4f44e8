"""Host memory for copies of many tensors, in one piece; pinned where the tensors are on a GPU.

Torch's own pinned memory is rounded up to a power of two, tensor by tensor, to up to twice of what is needed, and is
kept by torch when nobody needs it any more. Here it is one anonymous mapping that is registered with CUDA as it is, and
goes back to the system with the last tensor in it.
"""

import mmap
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

_ALIGNMENT_BYTES = 512  # as torch has it on a GPU; no dtype and no cache line needs more
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process
_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK of Linux >= 4.14, from its ``include/uapi/asm-generic/mman-common.h``; Python has no name for it."""


class _Mapping(mmap.mmap):
    """Anonymous memory, which may be pinned."""

    _pinned: tuple[int, torch.device, int] | None = None

    def pin(self, address: int, device: torch.device) -> None:
        """Lock it into memory and make it known to CUDA, so that copies to it need not be waited for.

        Raises:
            RuntimeError: CUDA refused.
        """
        with torch.cuda.device(device):  # another one would get a context that nobody needs
            result = int(_cudart().cudaHostRegister(address, len(self), _PORTABLE))
        if result:
            with suppress(RuntimeError):  # the refusal stays CUDA's last error, which the next kernel would raise
                torch.ones(1, device=device)
            raise RuntimeError(
                f"CUDA cannot pin {len(self)} bytes of host memory to stage snapshots in (cudaError {result}); make "
                "room, or have nothing written in the background (recover.async_save: false, save(blocking=True))"
            )
        self._pinned = address, device, os.getpid()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Unpin it, before it is unmapped; not in a process that was forked from the one that pinned it, or ends."""
        if self._pinned is not None and not is_finalizing() and self._pinned[2] == os.getpid():
            address, device, _ = self._pinned
            with torch.cuda.device(device):
                _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    """CUDA's runtime, of which torch's types say nothing."""
    return torch.cuda.cudart()


def host_copies_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors of the shapes and dtypes of ``tensors``, by the same names; their values are anything.

    Those of tensors on one device share a mapping, which lives as long as any of them.

    Raises:
        OSError: the system has no memory.
        RuntimeError: CUDA cannot pin it.
    """
    of_device = defaultdict[torch.device, dict[str, torch.Tensor]](dict)
    for name, tensor in tensors.items():
        of_device[tensor.device][name] = tensor
    return {name: copy for device, some in of_device.items() for name, copy in _in_one_mapping(some, device).items()}


def _in_one_mapping(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    places, total = dict[str, int](), 0
    for name, tensor in tensors.items():
        places[name] = total
        total += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    mapping = _Mapping(-1, max(total, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # an older kernel
        mapping.madvise(_WIPE_ON_FORK)  # a fork copies pinned pages; with MADV_DONTFORK a child that reads them dies
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    if device.type == "cuda":
        mapping.pin(memory.data_ptr(), device)
    return {
        name: memory[places[name] : places[name] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for name, tensor in tensors.items()
    }
