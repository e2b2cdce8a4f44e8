"""Check at the start that an architecture computes with cut matrices as with whole ones.

The plans of transformers are made for inference. A rule that is missing or wrong there raises no
error: it gives other outputs, or right outputs with only a part of a gradient.
"""

from contextlib import closing
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...utils.distributed import RankGroup, all_agree
from ...utils.errors import ConfigError
from ..memory.tensors import local_tensor
from .meshes import is_cut
from .probe_model import (
    NOT_UNDERSTOOD,
    Twins,
    probe_tokens,
    reason_of,
    twin_dtype,
    with_few_layers,
)
from .tensor_parallel import sum_partial_gradients, tensor_mesh_of
from .unsharded import unsharded_class
from .weights import keep_own_shard


class _Limits(NamedTuple):
    """Largest relative difference (root mean square) that counts as rounding."""

    outputs: float
    gradients: float


_LIMITS = {
    torch.float32: _Limits(outputs=1e-4, gradients=1e-3),
    torch.bfloat16: _Limits(outputs=5e-2, gradients=0.25),
}
_ROUNDING = 1e-2
"""Smaller gradients, as a share of the largest one, may be rounding alone: of a router between
equal experts.
"""
_TOKENS = 24


class _Pair(NamedTuple):
    """A tensor of the cut model, and that of the whole one."""

    ours: Tensor
    expected: Tensor


def check_tensor_parallel(twins: Twins, group: RankGroup) -> None:
    """Raise ConfigError unless a small cut model has the outputs of the same model with whole
    matrices, and equal gradients of the weights that are whole in both. Does nothing for a model
    that is not cut.

    Collective over the ranks of the model's mesh. Call it before the model has memory: for a
    forward and a backward it takes the memory of two models with a few layers, one of them without
    tensor parallelism.
    """
    model = twins.model
    mesh = tensor_mesh_of(model)
    if mesh is None:
        return
    config = with_few_layers(model.config)
    dtype = twin_dtype(config)
    name = unsharded_class(model).__name__
    try:
        with (
            # Both are freed at the end, because their weights change.
            closing(twins),
            closing(Twins(model, twins.device, whole=True)) as others,
            twins.of(config, dtype) as cut,
            others.of(config, dtype) as whole,
        ):
            # Equal weights must give equal outputs and gradients.
            _share_weights(cut, whole, mesh)
            ids = probe_tokens(config, _TOKENS)[None].to(twins.device)
            outputs, gradients = _results(cut, whole, ids)
            problem = _first_difference(outputs, gradients, _LIMITS[dtype])
    except NOT_UNDERSTOOD as error:
        problem = f"it fails ({reason_of(error)})"
    if not all_agree(problem is None, group):
        raise ConfigError(
            f"tensor_parallel_size (t in config key 'backend') is {mesh.size()}, but {name} "
            "computes otherwise with the plan of transformers: "
            f"{problem or 'other ranks say so'}; set it to 1, so that FSDP2 alone shards the model"
        )


def _share_weights(cut: PreTrainedModel, whole: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Copy the weights of ``whole``. Those that are whole in both models get gradients."""
    weights = dict(cut.named_parameters())
    for key, param in whole.named_parameters():
        weight = weights[key]
        drawn = param.detach()
        if isinstance(drawn, DTensor):
            drawn = drawn.full_tensor()
        keep_own_shard(weight, drawn)
        is_whole = not is_cut(weight, mesh)
        param.requires_grad_(is_whole)
        weight.requires_grad_(is_whole)


def _first_difference(
    outputs: _Pair,
    gradients: dict[str, _Pair],
    limits: _Limits,
) -> str | None:
    problem = _difference("its outputs", outputs, limits.outputs)

    # Size below which a gradient may be rounding alone.
    floor = 0.0
    for pair in gradients.values():
        floor = max(floor, _ROUNDING * float(pair.expected.norm()))
    for key, pair in gradients.items():
        if problem is None:
            problem = _difference(f"gradients of {key!r}", pair, limits.gradients, floor)
    return problem


def _difference(what: str, pair: _Pair, limit: float, floor: float = 0.0) -> str | None:
    size = max(float(pair.expected.norm()), floor, 1e-30)
    difference = float((pair.ours - pair.expected).norm()) / size
    if difference <= limit:
        return None
    return f"{what} differ by {difference:.1e} (relative)"


def _results(
    cut: PreTrainedModel,
    whole: PreTrainedModel,
    ids: Tensor,
) -> tuple[_Pair, dict[str, _Pair]]:
    """Outputs of both models, and gradients of the weights that both have whole, by name."""
    with torch.enable_grad():
        # Both forwards before any backward.
        outputs = []
        for twin in (cut, whole):
            output = twin(input_ids=ids, use_cache=False)
            outputs.append(output.logits.float())
        for output in outputs:
            if output.requires_grad:  # else every weight is cut
                output.square().mean().backward()
    sum_partial_gradients(cut)

    # Cut weights have none.
    gradients: dict[str, _Pair] = {}
    others = dict(whole.named_parameters())
    for key, param in cut.named_parameters():
        ours = param.grad
        expected = others[key].grad
        if ours is not None and expected is not None:
            gradients[key] = _Pair(local_tensor(ours), local_tensor(expected))
    ours, expected = outputs
    return _Pair(ours.detach(), expected.detach()), gradients
