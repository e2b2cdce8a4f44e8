"""A model as it was when its weights were staged: what an export in the background is made from.

It is the model's `unsharded_view` with the staged buffers for parameters and buffers, so that the export asks it what
it asks any model, and nothing that training does meanwhile shows in it. Only what is left out of checkpoints, a frozen
base, is read where it is (see `dcp.base_model`): it must not change. What the export gathers must not meet the
collectives of the training in the group of their mesh: it goes over a group of its own (``gather_group``).
"""

import copy
from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...utils.compat.torch_private import buffers_of, parameters_of, replace_members
from ...utils.errors import ConfigError
from ..hf.dtypes import own_dtypes
from ..lora.layers import transformers_model
from ..memory.tensors import clean_name
from ..training.unsharded import unsharded_view

M = TypeVar("M", bound=nn.Module)


def check_mesh(weights: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """See that ``weights`` can be gathered over ``group``, or over another group of the same ranks.

    Raises:
        ConfigError: they are sharded over more than one dimension, or over other ranks.
    """
    for name, weight in weights.items():
        if isinstance(weight, DTensor):
            mesh = weight.device_mesh
            if mesh.ndim != 1 or mesh.mesh.tolist() != dist.get_process_group_ranks(group):
                raise ConfigError(
                    f"{name} is on {mesh}; expected a mesh of one dimension over all ranks, as an export in the "
                    "background needs. Save it with blocking=True (with a RecoverHandler: recover.async_save: false)"
                )


@torch.no_grad()
def staged_model(model: M, weights: Mapping[str, torch.Tensor]) -> M:
    """``model`` with ``weights`` in the place of its own, for `write_hf` to be given while ``model`` trains.

    Args:
        model: of transformers, or a ``PeftModel``; nothing may have been computed with it since it was staged.
        weights: what `Staging.stage` returned as ``model``; they are read when the export is written.
    """
    own_dtypes(transformers_model(model))  # learned now: it is nothing to do beside training
    live = [*model.named_parameters(), *model.named_buffers()]
    staged = {id(tensor): weights[clean_name(name)] for name, tensor in live if clean_name(name) in weights}
    view = unsharded_view(model)
    for module in view.modules():
        parameters, buffers = (
            {name: staged.get(id(tensor), tensor) for name, tensor in members.items()}
            for members in (parameters_of(module), buffers_of(module))
        )
        replace_members(module, parameters=parameters, buffers=buffers)
    inner = transformers_model(view)
    configs = {name: copy.deepcopy(inner.__dict__.get(name)) for name in ("config", "generation_config")}
    inner.__dict__.update({name: config for name, config in configs.items() if config is not None})
    return view
