"""Check at the start that an architecture computes with cut matrices as with whole ones.

The plans of transformers are made for inference. A rule that is missing or wrong there raises no
error: it gives other outputs, or right outputs with only a part of a gradient.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...utils.distributed import all_agree
from ...utils.errors import ConfigError
from ..memory.tensors import local_tensor
from .meshes import is_cut
from .probe_model import (
    NOT_UNDERSTOOD,
    probe_tokens,
    reason_of,
    twin_dtype,
    twin_of,
    with_few_layers,
)
from .tensor_parallel import sum_partial_gradients, tensor_mesh_of
from .unsharded import unsharded_class
from .weights import keep_own_shard

_LIMITS = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (5e-2, 0.25)}
"""Largest relative difference (root mean square) of outputs and of gradients that counts as
rounding, by dtype.
"""
_ROUNDING = 1e-2
"""Smaller gradients, as a share of the largest one, may be rounding alone: of a router between
equal experts.
"""
_TOKENS = 24


def check_tensor_parallel(
    model: PreTrainedModel, device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """Raise ConfigError unless a small cut model has the outputs of the same model with whole
    matrices, and equal gradients of the weights that are whole in both. Does nothing for a model
    that is not cut.

    Collective over the ranks of the model's mesh. Call it before the model has memory: for a
    forward and a backward it takes the memory of two models with a few layers, one of them without
    tensor parallelism.
    """
    if (mesh := tensor_mesh_of(model)) is None:
        return
    config = with_few_layers(model.config)
    dtype, name, problem = twin_dtype(config), unsharded_class(model).__name__, None
    try:
        with (
            twin_of(model, config, dtype, device) as cut,
            twin_of(model, config, dtype, device, whole=True) as whole,
        ):
            weights = dict(cut.named_parameters())
            for key, param in whole.named_parameters():
                drawn = param.detach()
                keep_own_shard(
                    weights[key], drawn.full_tensor() if isinstance(drawn, DTensor) else drawn
                )
                for each in (param, weights[key]):
                    each.requires_grad_(not is_cut(weights[key], mesh))
            ids = probe_tokens(config, _TOKENS)[None].to(device)
            (ours, expected), gradients = _results(cut, whole, ids)
            limit, gradient_limit = _LIMITS[dtype]
            problem = _difference("its outputs", ours, expected, limit)
            floor = max(
                [0.0, *(_ROUNDING * float(expected.norm()) for _, expected in gradients.values())]
            )
            for key, (ours, expected) in gradients.items():
                problem = problem or _difference(
                    f"gradients of {key!r}", ours, expected, gradient_limit, floor
                )
    except NOT_UNDERSTOOD as error:
        problem = f"it fails ({reason_of(error)})"
    if not all_agree(problem is None, group):
        raise ConfigError(
            f"tensor_parallel_size (t in config key 'backend') is {mesh.size()}, but {name} "
            "computes otherwise with the plan of transformers: "
            f"{problem or 'other ranks say so'}; set it to 1, so that FSDP2 alone shards the model"
        )


_Pair = tuple[torch.Tensor, torch.Tensor]


def _difference(
    what: str, ours: torch.Tensor, expected: torch.Tensor, limit: float, floor: float = 0.0
) -> str | None:
    difference = float((ours - expected).norm()) / max(float(expected.norm()), floor, 1e-30)
    return None if difference <= limit else f"{what} differ by {difference:.1e} (relative)"


def _results(
    cut: PreTrainedModel, whole: PreTrainedModel, ids: torch.Tensor
) -> tuple[_Pair, dict[str, _Pair]]:
    """Outputs of both models, and gradients of the weights that both have whole, by name."""
    with torch.enable_grad():
        outputs = [twin(input_ids=ids, use_cache=False).logits.float() for twin in (cut, whole)]
        for output in outputs:
            if output.requires_grad:  # else every weight is cut
                output.square().mean().backward()
    sum_partial_gradients(cut)
    gradients, others = dict[str, _Pair](), dict(whole.named_parameters())
    for key, param in cut.named_parameters():
        if (ours := param.grad) is not None and (expected := others[key].grad) is not None:
            gradients[key] = local_tensor(ours), local_tensor(expected)
    return (outputs[0].detach(), outputs[1].detach()), gradients
