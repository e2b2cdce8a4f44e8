"""Offload: a model and its optimizer leave the device while something else, such as an inference server, needs it.

The values go to the staging buffers, and the storages of parameters, buffers and optimizer state are emptied. The
tensors stay the same objects with the same versions, so that FSDP2, the optimizer and plans of saves go on with them.
A snapshot that has just been staged is the copy already, and while offloaded the copy is the snapshot. So neither costs
another copy or more host memory, unless an older snapshot is still being written from the buffers.

Cost: one copy over the bus each way. Host memory: the staging buffers, and with LoRA the frozen base.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from ...utils.compat.torch_private import storage_id
from ...utils.config import require_choice
from ...utils.devices import free_cached_memory
from ...utils.distributed import all_ranks_succeed
from ...utils.errors import ConfigError
from ...utils.logging import get_logger
from ..api import WeightUpdateMeta
from ..dcp.state import DCPState
from ..memory.offloaded import MODEL, host_copies, refuse
from ..memory.tensors import by_clean_name, first_names, is_expanded, local_tensor
from ..memory.weight_changes import wait_for_readers
from ..training.gradient_sync import drop_partial
from .host_buffers import HostBuffers
from .staged_model import offload_base
from .staged_state import copy_to_host, stagings_of

logger = get_logger(__name__)

WEIGHTS, OPTIMIZER = TAGS = ("weights", "optimizer")
"""Parts of an engine that are offloaded together: parameters and buffers, or the state of the optimizer."""


@dataclass(frozen=True)
class _Emptied:
    """A tensor whose storage was emptied. ``local`` has the same storage and its own count of writes."""

    local: torch.Tensor
    n_bytes: int
    copy: torch.Tensor


class Offload:
    """The parts of one engine that are offloaded. All ranks of ``group`` call the same methods.

    Args:
        state: the whole state of the engine.
        device: device of this rank. Tensors elsewhere stay where they are.
        group: control group.
        on_host: parts that are in host memory in any case, and stay there.
    """

    def __init__(
        self, state: DCPState, device: torch.device, group: dist.ProcessGroup, on_host: Collection[str] = ()
    ) -> None:
        self.tags = set[str]()  # the parts that are offloaded
        self._state, self._device, self._group, self._on_host = state, device, group, on_host
        self._emptied: dict[str, _Emptied] = {}  # by dotted name
        self._kept = set[HostBuffers]()
        self._guards: list[RemovableHandle] = []

    def require_onloaded(self, *tags: str) -> None:
        """Raise EngineOffloadedError if one of these parts is offloaded."""
        if self.tags.intersection(tags):
            refuse()

    @torch.no_grad()
    def offload(self, tags: set[str]) -> None:
        """Move parts to host memory and drop the gradients. See `Offloadable.offload`."""
        if tags <= self.tags:
            return
        model = self._state.model
        model.zero_grad()
        drop_partial(model)
        try:
            with all_ranks_succeed("offloading", self._group):
                tensors = self._tensors_of(tags - self.tags)
                copies = self._copy(tensors)
        except BaseException:
            self._release_buffers()
            raise
        host_copies(model).update(copies)
        of_id = {id(tensor): copies[name] for name, tensor in tensors.items()}
        offload_base(of_id, partial(HostBuffers.read_offloaded, model))
        for name, tensor in tensors.items():
            storage = local_tensor(tensor).untyped_storage()
            self._emptied[name] = _Emptied(local_tensor(tensor).data, storage.nbytes(), copies[name])
            storage.resize_(0)
        self._note(self.tags | tags)
        n_bytes = sum(one.n_bytes for one in self._emptied.values())
        logger.info("offloaded: %d bytes of %s are in host memory", n_bytes, " and ".join(sorted(self.tags)))
        free_cached_memory(self._device)

    @torch.no_grad()
    def onload(self, tags: set[str]) -> None:
        """Move parts back. See `Offloadable.onload`."""
        names = [name for name in self._emptied if _tag_of(name) in tags]
        try:
            with all_ranks_succeed("onloading", self._group):
                for one in (self._emptied[name] for name in names):
                    one.local.untyped_storage().resize_(one.n_bytes)
        except BaseException:
            for name in names:  # the other program has not left the device yet
                self._emptied[name].local.untyped_storage().resize_(0)
            free_cached_memory(self._device)
            raise
        for one in (self._emptied.pop(name) for name in names):
            if one.n_bytes > one.local.nbytes:  # FSDP2 fills uneven shards with zeros
                one.local.new_empty(0).set_(one.local.untyped_storage()).zero_()
            one.local.copy_(local_tensor(one.copy), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the next offload may use the buffers
        for name in names:
            del host_copies(self._state.model)[name]
        self._note(self.tags - tags)
        self._release_buffers()

    def _tensors_of(self, tags: Collection[str]) -> dict[str, torch.Tensor]:
        """Dotted name -> tensor to offload. What shares its memory with another tensor stays."""
        tensors = self._state.live_tensors(readable=False)  # without gathered parameters
        model = self._state.model
        named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        tensors |= {f"{MODEL}{name}": tensor for name, tensor in first_names(by_clean_name(named)).items()}
        local = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        users = Counter(storage_id(one) for one in local.values())
        return {
            name: tensors[name]
            for name, one in local.items()
            if _tag_of(name) in tags and _tag_of(name) not in self._on_host
            if one.device == self._device and one.dim() and one.untyped_storage().nbytes()
            if users[storage_id(one)] == 1 and one.untyped_storage().resizable() and not is_expanded(one)
        }

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors to host memory, and wait. Buffers of a snapshot that equal them are taken without a copy."""
        model, copies = self._state.model, dict[str, torch.Tensor]()
        for staging in stagings_of(model):
            copies |= staging.lend({n: t for n, t in tensors.items() if n not in copies}, self, self._kept)
        wait_for_readers(model)
        if others := {name: tensor for name, tensor in tensors.items() if name not in copies}:
            buffers = HostBuffers.take(model, self)
            self._kept.add(buffers)
            copies |= buffers.fit(others)
            under_way = copy_to_host(others, copies)
            if under_way and self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        return copies

    def _release_buffers(self) -> None:
        if not self._emptied:
            HostBuffers.release(self._state.model, self)

    def _note(self, tags: set[str]) -> None:
        """Set the offloaded parts, and guard direct calls of the model and the optimizer."""
        for guard in self._guards:
            guard.remove()
        self.tags, self._guards, optimizer = tags, [], self._state.optimizer
        if WEIGHTS in tags:
            self._guards.append(self._state.model.register_forward_pre_hook(refuse, prepend=True))
        if tags and optimizer is not None:
            self._guards.append(optimizer.register_step_pre_hook(refuse))


class Offloadable:
    """The methods of an engine that shares its device with something else."""

    _offload: Offload | None = None  # None: no model
    _servers: Any  # `ServerConnection`

    @property
    def offloaded(self) -> frozenset[str]:
        """The parts that are offloaded now."""
        return frozenset() if self._offload is None else frozenset(self._offload.tags)

    def offload(self, tags: Collection[str] = TAGS) -> None:
        """Free the device for something else, such as an inference server. Collective.

        The values wait in host memory until `onload`, which restores every bit. Until then saves, snapshots, exports
        and `update_weights` read them there, and what computes raises `EngineOffloadedError`. Gradients are dropped. A
        save in the background goes on. A part that is already offloaded stays so. If `connect_engine` was called, this
        also runs the forward with which servers check what `update_weights` gives them.

            engine.offload()
            rollouts = generate()  # by servers on the same GPUs
            engine.onload()

        Args:
            tags: ``"weights"`` (parameters and buffers), ``"optimizer"`` (its state) or both.

        Raises:
            ConfigError: there is no such tag, or no model.
            OSError, RuntimeError: there is no host memory on this rank. PeerError: on another. Nothing was offloaded.
        """
        parts, tags = self._parts(), _checked(tags)
        if WEIGHTS in tags - parts.tags:
            self._servers.before_offload(self)
        parts.offload(tags)

    def onload(self, tags: Collection[str] = TAGS) -> None:
        """Bring back parts that `offload` moved away. Parts that are here stay. Collective.

        Raises:
            ConfigError: there is no such tag, or no model.
            RuntimeError: there is no room on the device of this rank. PeerError: on another. All stays offloaded, and
                may be tried again.
        """
        self._parts().onload(_checked(tags))

    def publication_to(self, fleet: Any, meta: WeightUpdateMeta | None = None) -> WeightUpdateMeta:
        """``meta``, or the `WeightUpdateMeta` of `connect_engine`. ConfigError if ``fleet`` is not connected."""
        return self._servers.meta_for(meta, fleet)

    def _require_onloaded(self, *tags: str) -> None:
        self._parts().require_onloaded(*tags)

    def _parts(self) -> Offload:
        if self._offload is None:
            raise ConfigError("the engine has no model; call create_process_group and initialize first")
        return self._offload


def _checked(tags: Collection[str]) -> set[str]:
    for tag in tags:
        require_choice("tags", tag, TAGS)
    return set(tags)


def _tag_of(name: str) -> str:
    return WEIGHTS if name.startswith(MODEL) else OPTIMIZER
