"""Shard a model in place with FSDP2."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from ...utils.compat.torch_private import fill_missing_gradients
from ...utils.compat.transformers_private import unsplit_classes
from ...utils.errors import ConfigError
from ..config import FSDPConfig, TrainEngineConfig
from ..memory.per_model import PerModel
from ..memory.tensors import fsdp_modules
from .model import COMPUTE_DTYPES
from .tensor_parallel import tensor_mesh_of
from .unsharded import unsharded_class

_GROUP = "set_separate_reduce_scatter_group"

zero_filled = PerModel[set[nn.Parameter]](
    "zero_filled",
    "Parameters whose gradient on this rank is all zeros. Set by `shard_model`, and updated in "
    "backwards by `fill_missing_gradients`. Ends with the model.",
)


def shard_model(
    model: PreTrainedModel,
    config: TrainEngineConfig,
    blocks: tuple[type[nn.Module], ...],
    mesh: DeviceMesh,
) -> None:
    """Shard in place with FSDP2 over `Meshes.fsdp`: one parameter group per block, one for the
    `embedding_group`, and one for the rest (norm, head).

    Parameters stay float32. Each group is gathered and computed in ``config.dtype``, and its
    gradient is summed in ``config.grad_reduce_dtype``. A parameter that only some ranks reach in a
    backward (an expert, a vision tower) gets their gradients, if all ranks run forward and backward
    through the same blocks.
    """
    options = fsdp_options(config, mesh)
    embedding = embedding_group(model)

    # FSDP2 warns of outputs that are views: what the ranks have summed of a cut embedding, and the
    # values of a head with a bias.
    if embedding is not None and tensor_mesh_of(model) is not None:
        embedding.register_forward_hook(_copy_hidden)
    if config.is_critic:
        model.register_forward_hook(_copy_values)

    # Inner blocks first, as `fully_shard` requires.
    for module in reversed(list(model.modules())):
        in_group = isinstance(module, blocks) or module is embedding
        if in_group and not isinstance(module, FSDPModule):
            fully_shard(module, **options)
    fully_shard(model, **options)
    set_overlap(model, config.fsdp)

    # Parameters that only some ranks reach.
    if mesh.size() > 1:
        filled = zero_filled.set(model, set())
        for module in fsdp_modules(model):
            fill_missing_gradients(module, filled)


def _copy_hidden(embedding: nn.Module, args: Any, hidden: Tensor) -> Tensor:
    return hidden.clone()


def _copy_values(model: nn.Module, args: Any, output: Any) -> Any:
    output.logits = output.logits.clone()
    return output


def fsdp_options(config: TrainEngineConfig, mesh: DeviceMesh) -> dict[str, Any]:
    """Arguments of ``fully_shard``: compute in ``config.dtype``, sum gradients in
    ``config.grad_reduce_dtype``.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPES[config.dtype],
        reduce_dtype=COMPUTE_DTYPES[config.grad_reduce_dtype],
        # some blocks need float32 inputs: rotary angles, a residual stream
        cast_forward_inputs=False,
    )
    options = {
        "mesh": mesh,
        "mp_policy": precision,
        "reshard_after_forward": config.fsdp.reshard_after_forward,
    }
    if config.fsdp.offload_params:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return options


def set_overlap(model: nn.Module, config: FSDPConfig) -> None:
    """Let collectives of FSDP2 overlap more with computation, as the keys say. Their speed was
    never measured.

    The blocks of the sharded model run in the order of its modules, each in every forward.
    Collective with ``separate_reduce_scatter_group``.

    Raises:
        ConfigError: this torch has no separate group.
    """
    sharded = fsdp_modules(model)
    root, *blocks = sharded
    for module, following in _with_following(sharded, config.forward_prefetch):
        module.set_modules_to_forward_prefetch(following)

    # In a backward, the root comes first, too, and then the blocks from the last to the first.
    backwards = [root, *reversed(blocks)]
    for module, following in _with_following(backwards, config.backward_prefetch):
        module.set_modules_to_backward_prefetch(following)

    if config.separate_reduce_scatter_group:
        if not hasattr(root, _GROUP):
            raise ConfigError(
                "config key 'fsdp.separate_reduce_scatter_group' is True, but "
                f"FSDPModule.{_GROUP} does not exist in this torch; set it to false, or install a "
                "newer torch"
            )
        getattr(root, _GROUP)()


def _with_following(
    modules: Sequence[FSDPModule],
    count: int,
) -> Iterator[tuple[FSDPModule, list[FSDPModule]]]:
    if not count:
        return
    # The last modules have fewer than `count` after them.
    for number, module in enumerate(modules, 1):
        following = modules[number : number + count]
        yield module, list(following)


def embedding_group(model: PreTrainedModel) -> nn.Module | None:
    """The input embedding, if its weight is not the head's, too. Memory that gathers and reduces
    one of them is then free for the other.

    None if the weight is tied or read by another module, or if transformers does not find the
    embedding.
    """
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        return None
    if embedding is None:
        return None
    uses = _uses(model)
    if any(uses[id(param)] > 1 for param in embedding.parameters()):
        return None
    if _is_read_elsewhere(model, embedding):
        return None
    return embedding


def _is_read_elsewhere(model: nn.Module, embedding: nn.Module) -> bool:
    """Whether a forward of another module reads the weight, as Gemma 4's does. In a group of its
    own it would be a shard there.
    """
    names = [name for name, module in model.named_modules() if module is embedding]
    attributes = "|".join(name.rpartition(".")[2] for name in names)
    read = re.compile(rf"\bself\.(\w+\.)*({attributes})\.weight\b(?!\.(device|dtype|shape)\b)")
    classes = {unsharded_class(module) for module in model.modules()}
    return any(read.search(_source_of(cls.forward)) for cls in classes)


@cache
def _source_of(forward: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(forward)
    except (OSError, TypeError):  # it is not in a file
        return ""


def _uses(model: nn.Module) -> Counter[int]:
    """Id of each parameter -> number of its names. A tied weight has several."""
    every = model.named_parameters(remove_duplicate=False)
    return Counter(id(param) for _, param in every)


def block_classes(model: PreTrainedModel, names: list[str] | None) -> tuple[type[nn.Module], ...]:
    """Classes of the repeated blocks: the named ones, or those that transformers does not split.

    Without names, blocks with a tied weight are left out, because FSDP cannot shard a weight in two
    groups.

    Raises:
        ConfigError: a named class does not occur in the model.
    """
    wanted = set(names or unsplit_classes(model))
    found = {type(module).__name__: type(module) for module in model.modules()}
    unknown = sorted(wanted - found.keys())
    if names and unknown:
        raise ConfigError(
            f"config key 'fsdp.wrap_policy.transformer_layer_cls_to_wrap' names {unknown[0]!r}, "
            f"which {type(model).__name__} does not contain; it contains "
            f"{', '.join(sorted(found))}"
        )

    if not names:
        uses = _uses(model)
        for module in model.modules():
            if any(uses[id(param)] > 1 for param in module.parameters()):
                wanted.discard(type(module).__name__)
    return tuple(found[name] for name in sorted(wanted & found.keys()))
