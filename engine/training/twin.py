"""A model like another one, sharded as it is, that can be asked how the architecture computes.

The weights of a run are no good for such questions: they may hide what is looked for (a short convolution or a gate
that starts at zero, a residual stream that drowns it, rounding in bfloat16). Those of a twin let everything through.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from ...utils.distributed import get_rank
from ..compat.transformers_private import attention_of, build_from_config
from .model import give_memory
from .unsharded import unsharded_class

NOT_UNDERSTOOD = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)
"""What a model raises that does not know what to do with what it is asked: a packed row, a mask or a head of ours."""


@contextmanager
def twin_of(
    model: PreTrainedModel, config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[PreTrainedModel]:
    """A model of the same class, sharded like ``model``, with random weights that hide nothing; gone afterwards.

    Products are computed in full precision meanwhile, and torch's generators are left as they were.

    Args:
        model: on meta or not; its parameters are not read.
        config: of the twin.
        dtype: of its weights.
        device: where it computes.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []), _full_precision():
        twin = _build(model, config, dtype, device)
        try:
            yield twin
        finally:
            _free(twin)


def twin_dtype(config: PretrainedConfig) -> torch.dtype:
    """What a twin computes in: float32, but for kernels of flash attention, which take no other than bfloat16."""
    return torch.bfloat16 if "flash" in attention_of(config.get_text_config(decoder=True)) else torch.float32


def probe_tokens(config: PretrainedConfig, count: int) -> torch.Tensor:
    """``[count]`` int64 of the vocabulary, the same at every call. Special tokens are the first or the last ones."""
    vocab_size = config.get_text_config(decoder=True).vocab_size
    low = vocab_size // 4
    return torch.randint(low, max(3 * low, low + 1), (count,), generator=torch.Generator().manual_seed(0))


def _build(
    model: PreTrainedModel, config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    with torch.device("meta"):
        twin, skeleton = (
            build_from_config(unsharded_class(model), copy.deepcopy(config), dtype).eval() for _ in range(2)
        )
    mesh = next((param.device_mesh for param in model.parameters() if isinstance(param, DTensor)), None)
    for name, module in reversed(list(model.named_modules())):  # children first, as fully_shard wants it
        if isinstance(module, FSDPModule):
            fully_shard(twin.get_submodule(name), mesh=mesh)
    for name in give_memory(twin, skeleton, device):
        twin.get_buffer(name).fill_(1)
    experts = {value for key, value in vars(config.get_text_config(decoder=True)).items() if "expert" in key}
    own, common = (torch.Generator(device).manual_seed(seed) for seed in (1 + get_rank(), 0))
    for param in twin.parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        if param.dim() < 2:
            local.normal_(1.0, 0.1, generator=own)
        elif param.dim() == 2 or param.shape[0] not in experts:
            local.normal_(0.0, param.shape[-1] ** -0.5, generator=own)
        else:  # equal experts: which of them rounding makes a router choose does not matter
            one = torch.empty(param.shape[1:], dtype=dtype, device=device)
            local.copy_(one.normal_(0.0, param.shape[-1] ** -0.5, generator=common).expand(local.shape))
    return twin


def _free(twin: PreTrainedModel) -> None:
    """Give the memory back at once: FSDP's states refer to their modules and back."""
    for module in twin.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for param in twin.parameters():
        (param.to_local() if isinstance(param, DTensor) else param).untyped_storage().resize_(0)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Products in float32 without TensorFloat32 or bfloat16 inside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
