"""Buffers in host memory for copies of a state, shared by the snapshots of a model and by its
offload.

A set of buffers is for one copy at a time. It is idle when nothing reads it, and an idle set is
filled again rather than a new one made, because pinning memory takes seconds per shard.
"""

from collections.abc import Mapping
from threading import RLock
from typing import ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...utils.compat.torch_private import like_sharded, same_layout
from ..memory.offloaded import host_copies
from ..memory.pinned import host_copies_of
from ..memory.tensors import local_tensor


class HostBuffers:
    """Buffers by the names of the tensors, in ``tensors``, each sharded like its tensor."""

    _of_models: ClassVar[WeakKeyDictionary[nn.Module, "WeakSet[HostBuffers]"]] = WeakKeyDictionary()
    _lock = RLock()  # threads that write snapshots end their reading

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._readers: WeakSet[object] = WeakSet()

    @classmethod
    def take(cls, model: nn.Module, reader: object) -> "HostBuffers":
        """Return a set of ``model`` that nothing but ``reader`` reads, the largest or a new one.

        ``reader`` fills buffers that it does not read yet. A set lives as long as a caller keeps
        it.
        """
        with cls._lock:
            known = cls._of_models.setdefault(model, WeakSet())
            idle = [one for one in known if not set(one._readers) - {reader}]
            found = max(idle, key=lambda one: len(one.tensors), default=cls())
            known.add(found)
            found._readers.add(reader)
        return found

    @classmethod
    def read_offloaded(cls, model: nn.Module, reader: object) -> None:
        """Make ``reader`` a reader of the copies of all offloaded tensors of ``model``."""
        copies = host_copies(model)
        with cls._lock:
            for one in cls._of_models.get(model, ()):
                if any(one.tensors.get(name) is copy for name, copy in copies.items()):
                    one._readers.add(reader)

    @classmethod
    def release(cls, model: nn.Module, reader: object) -> None:
        """End the reading of ``reader``."""
        with cls._lock:
            for one in cls._of_models.get(model, ()):
                one._readers.discard(reader)

    def read(self, reader: object) -> None:
        """Make ``reader`` one more reader."""
        with self._lock:
            self._readers.add(reader)

    def fit(self, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a buffer for each live tensor: the one with its name if it fits, else a new one."""
        new = {
            name: tensor
            for name, tensor in live.items()
            if not _fits(self.tensors.get(name), tensor)
        }
        for name, buffer in host_copies_of(
            {name: local_tensor(tensor) for name, tensor in new.items()}
        ).items():
            self.tensors[name] = (
                like_sharded(buffer, tensor) if isinstance(tensor := new[name], DTensor) else buffer
            )
        return {name: self.tensors[name] for name in live}


def _fits(buffer: torch.Tensor | None, live: torch.Tensor) -> bool:
    if isinstance(buffer, DTensor) and isinstance(live, DTensor):
        return same_layout(buffer, live)
    if buffer is None or isinstance(buffer, DTensor) or isinstance(live, DTensor):
        return False
    return buffer.shape == live.shape and buffer.dtype == live.dtype
