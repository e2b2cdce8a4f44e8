"""A small copy of a model's architecture with test weights, to find out how the architecture
computes.

The weights of a run are unsuitable for such tests, because they may hide a difference (a short
convolution or gate that starts at zero, a dominating residual stream, rounding in bfloat16).
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from ...utils.compat.torch_private import fsdp_mesh_of
from ...utils.compat.transformers_private import attention_of, build_from_config
from ...utils.distributed import collective_broke, get_rank
from .meshes import is_cut
from .rotary import fix_frequencies
from .tensor_parallel import cut_over_ranks, tensor_mesh_of
from .unsharded import unsharded_class
from .weights import give_memory

NOT_UNDERSTOOD = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)
"""Errors of a model that cannot handle a packed row, our mask or our head."""


def reason_of(error: Exception) -> str:
    """Describe an error of a twin in one line. Raise it if memory or a peer is to blame, not the
    model.
    """
    if isinstance(error, torch.OutOfMemoryError) or collective_broke(error):
        raise error
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextmanager
def twin_of(
    model: PreTrainedModel,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    whole: bool = False,
) -> Iterator[PreTrainedModel]:
    """Build a model of the same class, sharded like ``model``, with random weights that hide
    nothing. Free it at the end. With ``whole`` the ranks of `Meshes.tensor` do not share its
    matrices, and have equal weights.

    The parameters of ``model`` are not read. Inside, matrix products use full precision. torch's
    generators are restored.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []), _full_precision():
        twin = _build(model, config, dtype, device, None if whole else tensor_mesh_of(model))
        try:
            yield twin
        finally:
            _free(twin)


def with_few_layers(config: PretrainedConfig) -> PretrainedConfig:
    """Copy a config with one layer of each kind, at least two, if per-layer lists in it tell the
    kinds.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    n_layers = getattr(text, "num_hidden_layers", None)
    if type(n_layers) is not int or n_layers <= 2:
        return config
    lists = {
        key: value
        for key, value in vars(text).items()
        if isinstance(value, list) and len(value) == n_layers
    }
    kinds = [repr([value[i] for value in lists.values()]) for i in range(n_layers)]
    kept = sorted({kinds.index(kind) for kind in kinds} | {0, 1})
    for key, value in lists.items():
        setattr(text, key, [value[i] for i in kept])
    text.num_hidden_layers = len(kept)
    return config


def smaller_config(model: PreTrainedModel) -> PretrainedConfig | None:
    """Config with few layers and all kinds of modules that ``model`` has. None if there is none.

    A kind is a class with shapes of weights and plain attributes (a window, a scale, whether to
    rotate), which layers may choose by their number, so that no list in the config tells.
    """
    few = with_few_layers(model.config)
    if few.to_dict() == model.config.to_dict():
        return None
    try:
        return (
            few if _kinds_of_modules(model, few) == _kinds_of_modules(model, model.config) else None
        )
    except NOT_UNDERSTOOD:  # no model has so few layers
        return None


def _kinds_of_modules(model: PreTrainedModel, config: PretrainedConfig) -> set[tuple[Any, ...]]:
    with torch.device("meta"):
        built = build_from_config(unsharded_class(model), copy.deepcopy(config), torch.float32)
    kinds = set[tuple[Any, ...]]()
    for name, module in built.named_modules():
        place = ".".join(part for part in name.split(".") if not part.isdigit())
        shapes = tuple(
            (key, tuple(param.shape)) for key, param in module.named_parameters(recurse=False)
        )
        plain = (
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str)
        )
        kinds.add(
            (place, type(module), shapes, *(item for item in plain if item[0] != "layer_idx"))
        )
    return kinds


def twin_dtype(config: PretrainedConfig) -> torch.dtype:
    """Dtype of a twin: float32, or bfloat16 for flash-attention kernels, which accept nothing else."""
    return (
        torch.bfloat16
        if "flash" in attention_of(config.get_text_config(decoder=True))
        else torch.float32
    )


def probe_tokens(config: PretrainedConfig, count: int) -> torch.Tensor:
    """``[count]`` int64 token ids, the same at every call, without the first and last ids, where
    special tokens are.
    """
    vocab_size = config.get_text_config(decoder=True).vocab_size
    low = vocab_size // 4
    return torch.randint(
        low, max(3 * low, low + 1), (count,), generator=torch.Generator().manual_seed(0)
    )


@torch.no_grad()
def _build(
    model: PreTrainedModel,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    tensor_mesh: DeviceMesh | None,
) -> PreTrainedModel:
    with torch.device("meta"):
        twin, skeleton = (
            build_from_config(unsharded_class(model), copy.deepcopy(config), dtype).eval()
            for _ in range(2)
        )
    for each in (twin, skeleton):
        fix_frequencies(each, None)
    if tensor_mesh is not None:
        cut_over_ranks(twin, tensor_mesh)
    mesh = fsdp_mesh_of(model)
    sharded = {
        unsharded_class(module).__name__
        for module in model.modules()
        if isinstance(module, FSDPModule)
    }
    for module in reversed(list(twin.modules())):  # children first, as fully_shard requires
        if type(module).__name__ in sharded:
            fully_shard(module, mesh=mesh)
    for name in give_memory(twin, skeleton, device):
        twin.get_buffer(name).fill_(1)
    settings = vars(config.get_text_config(decoder=True)).items()
    counts = [
        value if isinstance(value, list | tuple) else [value]
        for key, value in settings
        if "expert" in key
    ]
    experts = {count for each in counts for count in each if type(count) is int}
    shard = get_rank() if mesh is None else mesh.get_local_rank(mesh.ndim - 1)
    seed = 1 + shard
    whole, common = (torch.Generator(device).manual_seed(seed) for seed in (seed, 0))
    part = (
        whole
        if tensor_mesh is None
        else torch.Generator(device).manual_seed(seed << 16 | get_rank())
    )
    for param in twin.parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        own = part if is_cut(param, tensor_mesh) else whole
        if param.dim() < 2:
            local.normal_(1.0, 0.1, generator=own)
        elif param.dim() == 2 or param.shape[0] not in experts:
            local.normal_(0.0, param.shape[-1] ** -0.5, generator=own)
        else:  # equal experts: rounding may change the choice of a router, but not its result
            one = torch.empty(param.shape[1:], dtype=dtype, device=device)
            local.copy_(
                one.normal_(0.0, param.shape[-1] ** -0.5, generator=common).expand(local.shape)
            )
    return twin


def _free(twin: PreTrainedModel) -> None:
    """Free the memory at once. FSDP's states and their modules refer to each other."""
    for module in twin.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for param in twin.parameters():
        (param.to_local() if isinstance(param, DTensor) else param).untyped_storage().resize_(0)


@contextmanager
def _full_precision() -> Iterator[None]:
    try:
        older = torch.get_float32_matmul_precision()
    except (
        RuntimeError
    ):  # precision was only set by torch.backends, which this older function cannot read
        older = "highest"
    backends: Any = torch.backends
    matmuls = backends.cuda.matmul, backends.mkldnn.matmul
    before = [matmul.fp32_precision for matmul in matmuls]
    if older != "highest":
        torch.set_float32_matmul_precision("highest")
    for matmul in matmuls:
        matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        if older != "highest":
            torch.set_float32_matmul_precision(older)
        for matmul, precision in zip(matmuls, before, strict=True):
            matmul.fp32_precision = (
                "none"  # as the setting for all products says, if that is the same
            )
            if matmul.fp32_precision != precision:
                matmul.fp32_precision = precision
