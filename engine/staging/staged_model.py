"""A model with the weights that were staged or offloaded: the source of an export.

It is the `unsharded_view` of the model with buffers in host memory as parameters and buffers, so
that training does not change it. A frozen base is left out of checkpoints and is read from the live
model (see `dcp.base_model`). Before it is changed or offloaded, copies take its place in the view,
or the change waits for an export that has begun to read it.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from threading import Lock
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...utils.compat.torch_private import (
    buffers_of,
    like_sharded,
    parameters_of,
    replace_members,
)
from ...utils.distributed import RankGroup, all_ranks_succeed
from ...utils.errors import CheckpointWriteError
from ..hf.dtypes import own_dtypes
from ..lora.adapters import adapted_layers, transformers_model
from ..memory.offloaded import weights_on_host
from ..memory.per_model import PerModel
from ..memory.pinned import host_copies_of
from ..memory.tensors import clean_name, local_tensor
from ..memory.weight_changes import LiveReader, is_changing
from ..training.unsharded import unsharded_view

M = TypeVar("M", bound=nn.Module)


class _BaseReader(LiveReader):
    """A view that reads frozen parameters of ``model``, with these ids, until its export ends.

    ``lock`` is held while it is exported. ``failure`` is why it got no copies, which fails the
    export and not the training.
    """

    reads_frozen = True

    def __init__(self, model: nn.Module, view: nn.Module, ids: set[int]) -> None:
        super().__init__(model)
        self.reads_live = True
        self.lock = Lock()
        self.failure: Exception | None = None
        self._view = ref(view)
        self._ids = ids

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the end of the export, or give the view copies if it has not begun."""
        with self.lock:
            view = self._view()
            if view is not None and self.reads_live:
                named = view.named_parameters()
                live = {name: param for name, param in named if id(param) in self._ids}
                try:
                    _replace_tensors(view, _copies_of(live))
                except (OSError, RuntimeError) as error:
                    self.failure = error
            self.reads_live = False


def _copies_of(tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Id of a tensor -> its copy in host memory, sharded alike."""
    copies = host_copies_of({name: local_tensor(tensor) for name, tensor in tensors.items()})
    of_id: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        copy = copies[name].copy_(local_tensor(tensor))
        of_id[id(tensor)] = like_sharded(copy, tensor) if isinstance(tensor, DTensor) else copy
    return of_id


_base_readers = PerModel[_BaseReader](
    "base_reader",
    "Reader of a view with frozen parameters of a live model. `staged_model` sets it. It ends with "
    "the view.",
)


@torch.no_grad()
def staged_model(
    model: M,
    weights: Mapping[str, Tensor],
) -> M:
    """A view of ``model``, of transformers or PEFT, with staged weights as its parameters and
    buffers, for an export.

    ``weights`` is the entry ``model`` of the result of `Staging.stage`, read by the export later.
    ``model`` must not have computed anything since the staging.
    """
    own_dtypes(transformers_model(model))  # learned now, not during training
    weights = {**weights_on_host(model), **weights}

    # The staged tensor in place of each live one.
    staged = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        name = clean_name(name)
        if name in weights:
            staged[id(tensor)] = weights[name]
    view = unsharded_view(model)
    _replace_tensors(view, staged)
    frozen = {id(param) for param in model.parameters()} - staged.keys()
    if frozen:
        _base_readers.set(view, _BaseReader(model, view, frozen))
        if is_changing(model):
            copy_base(view)
    _keep_merged(view)

    # Training may change the configuration.
    inner = transformers_model(view).__dict__
    for name in ("config", "generation_config"):
        config = copy.deepcopy(inner.get(name))
        if config is not None:
            inner[name] = config
    return view


def exportable_model(model: M) -> M:
    """The model for an export that is written at once: a `staged_model` if ``model`` is offloaded,
    else itself.
    """
    if weights_on_host(model):
        return staged_model(model, {})
    return model


def copy_base(view: nn.Module) -> None:
    """Give a `staged_model` copies of its frozen base, because code that changes the base does not
    wait.
    """
    reader = _base_readers.of(view)
    if reader is not None:
        reader.wait()


@contextmanager
def reading_base(view: nn.Module, group: RankGroup) -> Iterator[None]:
    """Wrap the only export of a `staged_model` on all ranks of ``group``. What would change its
    base waits for the end.

    Raises:
        CheckpointWriteError: the base has changed, and there was no memory for a copy.
        PeerError: so it was on another rank.
    """
    reader = _base_readers.of(view)
    if reader is None:
        yield
        return
    with reader.lock:
        try:
            with all_ranks_succeed("reading the frozen base", group):
                if reader.failure is not None:
                    raise CheckpointWriteError(
                        "the frozen base changes while an export waits to be written, and there "
                        f"is no host memory for a copy of it ({reader.failure})"
                    ) from reader.failure
            yield
        finally:
            reader.reads_live = False


def offload_base(
    copies: Mapping[int, Tensor],
    reader: Callable[[object], None],
) -> None:
    """Give every view that reads its live base the copy of each frozen parameter. Call it before
    the base is freed.

    Args:
        copies: id of a live tensor -> copy in host memory.
        reader: called with each view, which reads the copies as long as it lives.
    """
    for view, own in _base_readers.items():
        # A view of another model.
        if not any(id(param) in copies for param in view.parameters()):
            continue
        with own.lock:
            # After its export it reads nothing.
            if not own.reads_live:
                continue
            reader(view)
            _replace_tensors(view, copies)


def _keep_merged(view: nn.Module) -> None:
    """Note which adapters are merged into the weights of the view, whatever becomes of the live
    ones.
    """
    for layer in adapted_layers(view).values():
        if hasattr(layer, "merged_adapters"):
            layer.merged_adapters = list(layer.merged_adapters)


def _replace_tensors(
    view: nn.Module,
    of_id: Mapping[int, Tensor],
) -> None:
    for module in view.modules():
        parameters = _replaced(parameters_of(module), of_id)
        buffers = _replaced(buffers_of(module), of_id)
        replace_members(module, parameters=parameters, buffers=buffers)


def _replaced(
    members: Mapping[str, Any],
    of_id: Mapping[int, Tensor],
) -> dict[str, Any]:
    return {name: of_id.get(id(tensor), tensor) for name, tensor in members.items()}
