"""A model with the weights that were staged: the source of an export in the background.

It is the `unsharded_view` of the model with staged buffers as parameters and buffers, so that training does not change
it. A frozen base is left out of checkpoints and is read from the live model (see `dcp.base_model`), so it must not
change. Adapters are gathered over a separate group (``gather_group``), because training uses the groups of the mesh.
"""

import copy
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

from ...utils.compat.torch_private import buffers_of, parameters_of, replace_members
from ..hf.dtypes import own_dtypes
from ..lora.adapters import transformers_model
from ..memory.tensors import clean_name
from ..training.unsharded import unsharded_view

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def staged_model(model: M, weights: Mapping[str, torch.Tensor]) -> M:
    """A view of ``model``, of transformers or PEFT, with staged weights as its parameters and buffers, for an export.

    ``weights`` is the entry ``model`` of the result of `Staging.stage`, read by the export later. ``model`` must not
    have computed anything since the staging.
    """
    own_dtypes(transformers_model(model))  # learned now, not during training
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
