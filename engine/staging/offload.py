"""Offload: a model and its optimizer leave the device while something else, such as an inference
server, needs it.

The values go to the staging buffers, and the storages of parameters, buffers and optimizer state
are emptied. The tensors stay the same objects with the same versions, so that FSDP2, the optimizer
and plans of saves go on with them. A snapshot that has just been staged is the copy already, and
while offloaded the copy is the snapshot. So neither costs another copy or more host memory, unless
an older snapshot is still being written from the buffers.

Cost: one copy over the bus each way. Host memory: the staging buffers, and with LoRA the frozen
base.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...utils.compat.torch_private import storage_id
from ...utils.config import require_choice
from ...utils.devices import free_cached_memory
from ...utils.distributed import all_ranks_succeed
from ...utils.logging import get_logger
from ..dcp.state import DCPState
from ..memory.offloaded import MODEL, Away, refuse, tensors_away
from ..memory.tensors import (
    by_clean_name,
    first_names,
    is_expanded,
    local_tensor,
    named_tensors,
)
from ..memory.weight_changes import wait_for_readers
from ..training.gradient_sync import drop_partial
from .host_buffers import HostBuffers
from .staged_model import offload_base
from .staged_state import copy_to_host, stagings_of

logger = get_logger(__name__)

WEIGHTS = "weights"
OPTIMIZER = "optimizer"
TAGS = (WEIGHTS, OPTIMIZER)
"""Parts of an engine that are offloaded together: parameters and buffers, or the state of the
optimizer.
"""


class Offload:
    """The parts of one engine that are offloaded. All ranks of ``group`` call the same methods.

    An interrupt such as Ctrl-C may come between any two lines. So the tags are set before the first
    storage is emptied and taken back after the last one is filled, and the copy of a tensor is its
    value from before the one until after the other. Both methods finish what an earlier call has
    begun.

    Args:
        state: the whole state of the engine.
        device: device of this rank. Tensors elsewhere stay where they are.
        group: control group.
        on_host: parts that are in host memory in any case, and stay there.
    """

    def __init__(
        self,
        state: DCPState,
        device: torch.device,
        group: dist.ProcessGroup,
        on_host: Collection[str] = (),
    ) -> None:
        self.tags = set[str]()  # the parts that are offloaded
        self._state = state
        self._device = device
        self._group = group
        self._on_host = on_host
        self._kept = set[HostBuffers]()

        # Direct calls of the model and the optimizer are refused, too.
        refuse_forward = partial(_refuse_if_away, self.tags, {WEIGHTS})
        state.model.register_forward_pre_hook(refuse_forward, prepend=True)
        if state.optimizer is not None:
            refuse_step = partial(_refuse_if_away, self.tags, set(TAGS))
            state.optimizer.register_step_pre_hook(refuse_step)

    def require_onloaded(self, *tags: str) -> None:
        """Raise EngineOffloadedError if one of these parts is offloaded."""
        _refuse_if_away(self.tags, set(tags))

    @torch.no_grad()
    def offload(self, tags: set[str]) -> None:
        """Move parts to host memory and drop the gradients. See `FSDPEngine.offload`."""
        model = self._state.model
        model.zero_grad()
        drop_partial(model)

        # All ranks have copies before one of them empties a storage.
        away = tensors_away(model)
        try:
            with all_ranks_succeed("offloading", self._group):
                tensors = self._tensors_of(tags)
                new = {name: tensor for name, tensor in tensors.items() if name not in away}
                copies = self._copy(new)
        except BaseException:
            self._synchronize()  # copies to the buffers may be under way
            self._release_buffers()
            raise

        # From here on the copies are the values.
        self.tags.update(tags)
        for name, tensor in new.items():
            local = local_tensor(tensor)
            n_bytes = local.untyped_storage().nbytes()
            away[name] = Away(local.data, n_bytes, copies[name])
        copy_of = {id(tensor): away[name].copy for name, tensor in tensors.items()}
        offload_base(copy_of, partial(HostBuffers.read_offloaded, model))

        # Give back the memory.
        for tensor in tensors.values():
            local_tensor(tensor).untyped_storage().resize_(0)
        total = sum(one.n_bytes for one in away.values())
        parts = " and ".join(sorted(self.tags))
        logger.info("offloaded: %d bytes of %s are in host memory", total, parts)
        free_cached_memory(self._device)

    @torch.no_grad()
    def onload(self, tags: set[str]) -> None:
        """Move parts back. See `FSDPEngine.onload`."""
        # All ranks have the memory before one of them fills it.
        away = tensors_away(self._state.model)
        coming = {name: one for name, one in away.items() if _tag_of(name) in tags}
        try:
            with all_ranks_succeed("onloading", self._group):
                for one in coming.values():
                    one.local.untyped_storage().resize_(one.n_bytes)
        except BaseException:
            # The other program has not left the device yet.
            for one in coming.values():
                one.local.untyped_storage().resize_(0)
            free_cached_memory(self._device)
            raise

        # When the values are here, the buffers are free for the next offload.
        for one in coming.values():
            if one.n_bytes > one.local.nbytes:  # FSDP2 fills uneven shards with zeros
                storage = one.local.untyped_storage()
                one.local.new_empty(0).set_(storage).zero_()
            one.local.copy_(local_tensor(one.copy), non_blocking=True)
        self._synchronize()

        for name in coming:
            del away[name]
        self._release_buffers()
        self.tags.difference_update(tags)

    def _tensors_of(self, tags: Collection[str]) -> dict[str, Tensor]:
        """Dotted name -> tensor to offload. What shares its memory with another tensor stays."""
        tensors = self._state.live_tensors(readable=False)  # without gathered parameters
        named = by_clean_name(named_tensors(self._state.model))
        for name, tensor in first_names(named).items():
            tensors[f"{MODEL}{name}"] = tensor

        local = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        n_users = Counter(storage_id(one) for one in local.values())
        leaving = set(tags).difference(self._on_host)
        found = {}
        for name, one in local.items():
            if _tag_of(name) not in leaving or one.device != self._device:
                continue

            # Numbers stay, and what does not have a resizable storage for itself.
            storage = one.untyped_storage()
            is_alone = n_users[storage_id(one)] == 1 and not is_expanded(one)
            can_leave = storage.nbytes() and storage.resizable()
            if one.dim() and is_alone and can_leave:
                found[name] = tensors[name]
        return found

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors to host memory, and wait. Buffers of a snapshot that equal them are taken
        without a copy.
        """
        # Copies of a call that was interrupted may be under way to the same buffers.
        self._synchronize()

        # Copies of snapshots.
        model = self._state.model
        copies: dict[str, Tensor] = {}
        others = dict(tensors)
        for staging in stagings_of(model):
            lent = staging.lend(others, self, self._kept)
            copies |= lent
            for name in lent:
                del others[name]

        # Copies of the rest.
        wait_for_readers(model)
        if others:
            buffers = HostBuffers.take(model, self)
            self._kept.add(buffers)
            copies |= buffers.fit(others)
            copy_to_host(others, copies)
            self._synchronize()
        return copies

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _release_buffers(self) -> None:
        if not tensors_away(self._state.model):
            HostBuffers.release(self._state.model, self)


def _refuse_if_away(away: set[str], needed: set[str], *_: object) -> None:
    """Raise EngineOffloadedError if a needed part is away. Can be a hook of a module or an
    optimizer.
    """
    if away & needed:
        refuse()


def _tag_of(name: str) -> str:
    if name.startswith(MODEL):
        return WEIGHTS
    return OPTIMIZER


def checked_tags(tags: Collection[str]) -> set[str]:
    """The tags without repeats. Raises ConfigError if one is unknown."""
    for tag in tags:
        require_choice("tags", tag, TAGS)
    return set(tags)
