"""Check at the start that an architecture computes with cut matrices as with whole ones.

The plans of transformers are made for inference. A rule that is missing or wrong there raises no error: it gives other
outputs, or right outputs with only a part of a gradient.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...utils.distributed import all_agree, collective_broke
from ...utils.errors import ConfigError
from ..memory.tensors import local_tensor
from .probe_model import NOT_UNDERSTOOD, probe_tokens, twin_dtype, twin_of, with_few_layers
from .tensor_parallel import is_cut, sum_partial_gradients, tensor_mesh_of
from .unsharded import unsharded_class
from .weights import keep_own_shard

_LIMITS = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (5e-2, 0.25)}
"""Largest relative difference (root mean square) of outputs and of gradients that counts as rounding, by dtype."""
_TOKENS = 24


def check_tensor_parallel(model: PreTrainedModel, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Raise ConfigError unless a small cut model has the outputs of the same model with whole matrices, and equal
    gradients of the weights that are whole in both. Does nothing for a model that is not cut.

    Collective over the ranks of the model's mesh. Call it before the model has memory: it takes the memory of two models
    with a few layers, one of them without tensor parallelism, for a forward and a backward.
    """
    if (mesh := tensor_mesh_of(model)) is None:
        return
    config = with_few_layers(model.config)
    dtype, name, problem = twin_dtype(config), unsharded_class(model).__name__, None
    try:
        with twin_of(model, config, dtype, device) as cut, twin_of(model, config, dtype, device, whole=True) as whole:
            weights = dict(cut.named_parameters())
            for key, param in whole.named_parameters():
                drawn = param.detach()
                keep_own_shard(weights[key], drawn.full_tensor() if isinstance(drawn, DTensor) else drawn)
                for each in (param, weights[key]):
                    each.requires_grad_(not is_cut(weights[key], mesh))
            ids = probe_tokens(config, _TOKENS)[None].to(device)
            limits = _LIMITS[dtype]
            for what, ours, expected in _results(cut, whole, ids):
                difference = float((ours - expected).norm() / expected.norm().clamp(min=1e-12))
                if not difference <= limits[what != "its outputs"]:
                    problem = problem or f"{what} differ by {difference:.1e} (relative)"
    except NOT_UNDERSTOOD as error:
        if isinstance(error, torch.OutOfMemoryError) or collective_broke(error):
            raise
        problem = f"it fails ({type(error).__name__}: {' '.join(str(error).split())})"
    if not all_agree(problem is None, group):
        raise ConfigError(
            f"tensor_parallel_size (t in config key 'backend') is {mesh.size()}, but {name} computes otherwise with the "
            f"plan of transformers: {problem or 'other ranks say so'}; set it to 1, so that FSDP2 alone shards the model"
        )


def _results(
    cut: PreTrainedModel, whole: PreTrainedModel, ids: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    with torch.enable_grad():
        outputs = [twin(input_ids=ids, use_cache=False).logits.float() for twin in (cut, whole)]
        for output in outputs:
            output.square().mean().backward()
    yield "its outputs", outputs[0].detach(), outputs[1].detach()
    sum_partial_gradients(cut)
    others = dict(whole.named_parameters())
    for key, param in cut.named_parameters():
        if param.grad is not None and others[key].grad is not None:
            yield f"gradients of {key!r}", local_tensor(param.grad), local_tensor(others[key].grad)
