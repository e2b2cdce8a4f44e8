"""Buffers in host memory for copies of a state, shared by the snapshots of a model and by its
offload.

A set of buffers is for one copy at a time. It is idle when nothing reads it, and an idle set is
filled again rather than a new one made, because pinning memory takes seconds per shard.
"""

from collections.abc import Mapping
from threading import RLock
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...utils.compat.torch_private import like_sharded, same_layout
from ..memory.offloaded import host_copies
from ..memory.per_model import PerModel
from ..memory.pinned import host_copies_of
from ..memory.tensors import local_tensor


class HostBuffers:
    """Buffers by the names of the tensors, in ``tensors``, each sharded like its tensor."""

    _lock = RLock()  # threads that write snapshots end their reading

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._readers: WeakSet[object] = WeakSet()

    @classmethod
    def take(
        cls,
        model: nn.Module,
        reader: object,
    ) -> "HostBuffers":
        """Return a set of ``model`` that nothing but ``reader`` reads, the largest or a new one.

        ``reader`` fills buffers that it does not read yet. A set lives as long as a caller keeps
        it.
        """
        with cls._lock:
            known = _host_buffers.of(model)
            if known is None:
                known = _host_buffers.set(model, WeakSet())
            # ``reader`` may fill the buffers that it reads itself.
            idle = [one for one in known if not set(one._readers) - {reader}]
            found = max(idle or [cls()], key=lambda one: len(one.tensors))
            known.add(found)
            found._readers.add(reader)
        return found

    @classmethod
    def read_offloaded(
        cls,
        model: nn.Module,
        reader: object,
    ) -> None:
        """Make ``reader`` a reader of the copies of all offloaded tensors of ``model``."""
        # The copies of one offload may be in the sets of several snapshots.
        copies = host_copies(model)
        with cls._lock:
            for one in _host_buffers.of(model) or ():
                if any(one.tensors.get(name) is copy for name, copy in copies.items()):
                    one._readers.add(reader)

    @classmethod
    def release(
        cls,
        model: nn.Module,
        reader: object,
    ) -> None:
        """End the reading of ``reader``."""
        with cls._lock:
            for one in _host_buffers.of(model) or ():
                one._readers.discard(reader)

    def read(self, reader: object) -> None:
        """Make ``reader`` one more reader."""
        with self._lock:
            self._readers.add(reader)

    def fit(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a buffer for each live tensor: the one with its name, or a new one."""
        shards = {}
        for name, tensor in live.items():
            if not _fits(self.tensors.get(name), tensor):
                shards[name] = local_tensor(tensor)

        # New buffers are allocated together.
        for name, buffer in host_copies_of(shards).items():
            tensor = live[name]
            if isinstance(tensor, DTensor):
                buffer = like_sharded(buffer, tensor)
            self.tensors[name] = buffer
        return {name: self.tensors[name] for name in live}


_host_buffers = PerModel["WeakSet[HostBuffers]"](
    "host_buffers",
    "Sets of buffers for snapshots and offload. `HostBuffers.take` adds one, which ends when "
    "nothing keeps it.",
)


def _fits(
    buffer: Tensor | None,
    live: Tensor,
) -> bool:
    # Both sharded alike, or both plain.
    if isinstance(buffer, DTensor) and isinstance(live, DTensor):
        return same_layout(buffer, live)
    if buffer is None or isinstance(buffer, DTensor) or isinstance(live, DTensor):
        return False
    return buffer.shape == live.shape and buffer.dtype == live.dtype
