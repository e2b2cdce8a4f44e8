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
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PretrainedConfig, PreTrainedModel

from ...utils.compat.torch_private import fsdp_mesh_of
from ...utils.compat.transformers_private import attention_of, build_from_config
from ...utils.distributed import collective_broke, get_rank
from ..memory.tensors import local_tensor, reshard
from .meshes import is_cut
from .model import describe_unusable
from .rotary import fix_frequencies
from .sharding import embedding_group
from .tensor_parallel import cut_over_ranks, tensor_mesh_of
from .unsharded import unsharded_class
from .weights import compute_buffers, give_memory

NOT_UNDERSTOOD = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)
"""Errors of a model that cannot handle a packed row, our mask or our head."""


def reason_of(error: Exception) -> str:
    """Describe an error of a twin in one line. Raise it if memory or a peer is to blame, not the
    model.
    """
    if isinstance(error, torch.OutOfMemoryError) or collective_broke(error):
        raise error
    return describe_unusable(error)


class Twins:
    """Models of the same class as ``model`` and sharded like it, with random weights that hide
    nothing.

    One of them exists at a time: the last one, for probes that need it again. `close` frees it.
    With ``whole`` the ranks of `Meshes.tensor` do not share its matrices, and have equal weights.
    The parameters of ``model`` are not read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        whole: bool = False,
    ) -> None:
        self.model = model
        self.device = device
        self._tensor_mesh = None if whole else tensor_mesh_of(model)
        self._last: Any = None
        self._built_from: Any = None

    @contextmanager
    def of(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
    ) -> Iterator[PreTrainedModel]:
        """The twin with a config and dtype. Inside, matrix products use full precision. torch's
        generators are restored.

        Leave its weights and gradients as they are, and remove your hooks.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), _full_precision():
            # A copy, because the config may change later.
            wanted = _content(copy.deepcopy(config)), dtype
            if wanted != self._built_from:
                self.close()
                self._last = self._build(config, dtype)
                self._built_from = wanted
            try:
                yield self._last
            except BaseException:
                # It may have ended inside of a forward.
                self._built_from = None
                raise
            finally:
                # The next forward gathers what that of a new twin on another rank gathers.
                reshard(self._last)

    def close(self) -> None:
        """Free the memory at once. FSDP's states and their modules refer to each other."""
        self._built_from = None
        if self._last is not None:
            for param in self._last.parameters():
                local_tensor(param).untyped_storage().resize_(0)
        self._last = None

    @torch.no_grad()
    def _build(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
    ) -> PreTrainedModel:
        with torch.device("meta"):
            cls = unsharded_class(self.model)
            twin = build_from_config(cls, copy.deepcopy(config), dtype).eval()
        # Frequencies and cuts as in the model.
        fix_frequencies(twin, None)
        computed = compute_buffers(twin)
        if self._tensor_mesh is not None:
            cut_over_ranks(twin, self._tensor_mesh)

        # The twin's modules are sharded as those of the model, children first, as fully_shard
        # requires. The class of the input embedding may be that of others, too.
        mesh = fsdp_mesh_of(self.model)
        embedding = embedding_group(self.model)
        sharded = set()
        for module in self.model.modules():
            if isinstance(module, FSDPModule) and module is not embedding:
                sharded.add(unsharded_class(module).__name__)
        own_embedding = None
        if isinstance(embedding, FSDPModule):
            own_embedding = embedding_group(twin)
        for module in reversed(list(twin.modules())):
            if type(module).__name__ in sharded or module is own_embedding:
                fully_shard(module, mesh=mesh)
        # Buffers that only a checkpoint can fill.
        for name in give_memory(twin, computed, self.device):
            twin.get_buffer(name).fill_(1)

        # Ranks that have the same shard draw the same weights. The shard is the last dimension of
        # the mesh. Replicas have equal weights.
        shard = get_rank() if mesh is None else mesh.get_local_rank(mesh.ndim - 1)
        self._draw_weights(twin, 1 + shard)
        return twin

    def _draw_weights(self, twin: PreTrainedModel, seed: int) -> None:
        whole = torch.Generator(self.device).manual_seed(seed)
        common = torch.Generator(self.device).manual_seed(0)
        part = whole
        if self._tensor_mesh is not None:
            part = torch.Generator(self.device).manual_seed(seed << 16 | get_rank())

        n_experts = _numbers_of_experts(twin.config)
        for param in twin.parameters():
            local = local_tensor(param)
            own = part if is_cut(param, self._tensor_mesh) else whole
            # Norms and biases are near 1, so that none of them hides anything.
            if param.dim() < 2:
                local.normal_(1.0, 0.1, generator=own)
                continue
            std = param.shape[-1] ** -0.5
            # Matrices keep the size of what they are multiplied with.
            if param.dim() == 2 or param.shape[0] not in n_experts:
                local.normal_(0.0, std, generator=own)
                continue
            # Equal experts: rounding may change the choice of a router, but not its result.
            one = local.new_empty(param.shape[1:])
            one.normal_(0.0, std, generator=common)
            local.copy_(one.expand(local.shape))


def _content(config: PretrainedConfig) -> dict[str, Any]:
    """Everything in a config. ``==`` of configs leaves out their attention, and keys that their
    class does not declare.
    """
    content = dict(vars(config))
    for key, value in content.items():
        if isinstance(value, PretrainedConfig):
            content[key] = _content(value)
    return content


def with_few_layers(config: PretrainedConfig) -> PretrainedConfig:
    """Copy a config with one layer of each kind, at least two, if per-layer lists in it tell the
    kinds.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    n_layers = getattr(text, "num_hidden_layers", None)
    if type(n_layers) is not int or n_layers <= 2:
        return config
    lists = {}
    for key, value in vars(text).items():
        if isinstance(value, list) and len(value) == n_layers:
            lists[key] = value

    # The kind of a layer are its entries in all lists. The first layer of each kind is kept.
    kinds = [repr([value[i] for value in lists.values()]) for i in range(n_layers)]
    first_of_kinds = {kinds.index(kind) for kind in kinds}
    kept = sorted(first_of_kinds | {0, 1})
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
        has_all = _kinds_of_modules(model, few) == _kinds_of_modules(model, model.config)
    except NOT_UNDERSTOOD:
        # No model has so few layers.
        return None
    return few if has_all else None


def _kinds_of_modules(
    model: PreTrainedModel,
    config: PretrainedConfig,
) -> set[tuple[Any, ...]]:
    with torch.device("meta"):
        built = build_from_config(unsharded_class(model), copy.deepcopy(config), torch.float32)
    kinds = set[tuple[Any, ...]]()
    for name, module in built.named_modules():
        # The name without the numbers of layers and experts.
        place = ".".join(part for part in name.split(".") if not part.isdigit())
        parameters = module.named_parameters(recurse=False)
        shapes = tuple((key, tuple(param.shape)) for key, param in parameters)
        plain = []
        for key, value in vars(module).items():
            if isinstance(value, bool | int | float | str) and key != "layer_idx":
                plain.append((key, value))
        kinds.add((place, type(module), shapes, *plain))
    return kinds


def twin_dtype(config: PretrainedConfig) -> torch.dtype:
    """Dtype of a twin: float32, or bfloat16 for flash-attention kernels, which need it."""
    attention = attention_of(config.get_text_config(decoder=True))
    return torch.bfloat16 if "flash" in attention else torch.float32


def probe_tokens(config: PretrainedConfig, count: int) -> Tensor:
    """``[count]`` int64 token ids, the same at every call, without the first and last ids, where
    special tokens are.
    """
    vocab_size = config.get_text_config(decoder=True).vocab_size
    low = vocab_size // 4
    high = max(3 * low, low + 1)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high, (count,), generator=generator)


def _numbers_of_experts(config: PretrainedConfig) -> set[int]:
    text = config.get_text_config(decoder=True)
    numbers = set()
    for key, value in vars(text).items():
        if "expert" in key:
            counts = value if isinstance(value, list | tuple) else [value]
            numbers |= {count for count in counts if type(count) is int}
    return numbers


@contextmanager
def _full_precision() -> Iterator[None]:
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        # The precision was only set by torch.backends, which this older function cannot read.
        older = "highest"
    backends: Any = torch.backends
    matmuls = (backends.cuda.matmul, backends.mkldnn.matmul)
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
            # As the setting for all products says, if that is the same.
            matmul.fp32_precision = "none"
            if matmul.fp32_precision != precision:
                matmul.fp32_precision = precision
