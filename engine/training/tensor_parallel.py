"""Tensor parallelism: matrices cut over the ranks of `Meshes.tensor`, as the plan of transformers
says.

The plan of an architecture names layers whose weights are cut by rows or by columns, and their
collectives. Three parts of it are replaced:

- Experts stay whole on every rank, because each would hold several runs of rows of cut ones. Expert
  parallelism divides them.
- The head is cut by words. It returns whole logits, or scores without them (see `head`).
- Norms of single heads (``q_norm``) have a part of their gradient on each rank.
  `sum_partial_gradients` adds the parts once a step. The plan would add them in each backward, and
  so several times if gradients accumulate.

All other weights are whole on every rank, and have equal gradients there.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from ...utils.compat.transformers_private import apply_parallel_plan, tensor_parallel_plan
from ...utils.errors import ConfigError
from ..config import TrainEngineConfig
from ..memory.per_model import PerModel
from ..parallel_strategy import divisors
from .rank_parts import gather_parts, sum_gradient

# Styles of transformers' plans.
_PARTIAL = "replicated_with_grad_allreduce"
_EXPERTS = (
    "moe_tp_experts",
    "moe_identity_expert",
    "packed_colwise",
    "packed_rowwise",
)
_ROWS = "colwise"
_EMBEDDING = "embedding_rowwise"
_BY_ROWS = (_ROWS, "colwise_rep", "colwise_gather_output")
_KNOWN = (
    *_BY_ROWS,
    "rowwise",
    "rowwise_rep",
    "rowwise_split_input",
    _EMBEDDING,
    "embedding_colwise",
    _PARTIAL,
    "replicate",
    "all_reduce",
    "mla_kv_a_proj",
    "local_params",
)

Plan = dict[str, str]
"""Style of each layer or weight, by its name."""
Modules = dict[str, nn.Module]


@dataclass(frozen=True)
class _Cut:
    mesh: DeviceMesh
    partial: list[str] = field(default_factory=list)  # modules whose gradients are parts of a sum


_cuts = PerModel[_Cut](
    "tensor_cuts",
    "How tensor parallelism cut the model. Set by `cut_over_ranks`. Ends with the model.",
)


def cut_over_ranks(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cut the matrices of ``model``, on the meta device and not sharded yet, over the ranks of
    `Meshes.tensor`.

    Raises:
        ConfigError: transformers has no plan for the architecture, or one that is not supported, or
            the number of ranks does not divide rows, columns or heads.
    """
    size = mesh.size()
    modules: Modules = dict(model.named_modules())
    plan = dict(tensor_parallel_plan(model, size))

    # Experts stay whole.
    experts = [layer for layer, style in plan.items() if style in _EXPERTS]
    for layer in list(plan):
        if any(_is_in(layer, expert) for expert in experts):
            del plan[layer]

    # So do norms of single heads, which `sum_partial_gradients` needs to know.
    norms = set()
    for layer, style in list(plan.items()):
        if style == _PARTIAL:
            del plan[layer]
            if layer in modules:
                norms.add(layer)
    norms.update(layer for layer in _norms_of_heads(modules, plan) if layer not in plan)

    # The head is cut by words, whatever the plan says, and so is an embedding with its weight.
    _require_supported(model, modules, plan, size)
    head = plain_head(model)
    if head is not None:
        names = {module: name for name, module in modules.items()}
        for key, _ in head.named_parameters():
            plan[f"{names[head]}.{key}"] = _ROWS
        plan.pop(names[head], None)
        embedding = model.get_input_embeddings()
        if head.weight is embedding.weight:
            plan[f"{names[embedding]}.weight"] = _EMBEDDING
            plan[names[embedding]] = _EMBEDDING

    # A tied weight has one name among the parameters, and the plan may have the other one.
    existing = modules.keys() | dict(model.named_parameters()).keys()
    plan = {name: style for name, style in plan.items() if name in existing}

    # Heads are counted before the cut changes the sizes of layers.
    sizes = dict(_heads(modules, plan))
    apply_parallel_plan(model, mesh, plan)
    by_rows = [name for name, style in plan.items() if style in _BY_ROWS]
    _share_inputs([modules[name] for name in by_rows if name in modules], mesh)
    model.tie_weights()
    sizes.update(_cut_sizes(model))
    _require_even(sizes, size)

    _cuts.set(model, _Cut(mesh, sorted(norms)))
    if head is not None:
        whole_logits = partial(_whole_logits, head)
        head.forward = whole_logits  # type: ignore[method-assign]  # hides that of the class


def _require_supported(
    model: PreTrainedModel,
    modules: Modules,
    plan: Plan,
    size: int,
) -> None:
    name = type(model).__name__
    # A plan that names head and embedding alone cuts no layer between them.
    elsewhere = (None, plain_head(model), model.get_input_embeddings())
    if all(modules.get(layer) in elsewhere for layer in plan):
        raise _refusal(size, f"but transformers has no plan for the layers of {name}")
    for layer, style in plan.items():
        if style not in _KNOWN:
            raise _refusal(size, f"but transformers plans {style!r} for {layer!r} of {name}")


def _share_inputs(layers: list[nn.Module], mesh: DeviceMesh) -> None:
    """Let layers with the same input (q, k and v) sum its gradient over the ranks once, instead of
    once for each.
    """
    # The input of the layers before, and its DTensor, until the gradient of the input is there.
    last: list[Tensor] = []

    def shared(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        # Without a gradient nothing is to be shared.
        hidden = args[0]
        has_gradient = torch.is_grad_enabled() and hidden.requires_grad
        if isinstance(hidden, DTensor) or not has_gradient:
            return None

        # The first of the layers makes the DTensor, the others find it.
        if not last or last[0] is not hidden:
            whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
            last[:] = [hidden, whole]
            hidden.register_hook(lambda _: last.clear())
        return last[1], *args[1:]

    for layer in layers:
        layer.register_forward_pre_hook(shared)


def plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """The language-model head, if its class computes what `nn.Linear` does."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return head
    return None


def _is_in(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


def _heads(modules: Modules, plan: Plan) -> Iterator[tuple[str, int]]:
    """Yield the number of heads for each projection of which a rank keeps some."""
    for name, _, dim in _projections(modules, plan):
        n_heads: int = modules[name].out_features // dim  # type: ignore[operator,assignment]
        yield f"heads of {name!r}", n_heads


def _norms_of_heads(modules: Modules, plan: Plan) -> Iterator[str]:
    """Yield layers with a weight for each element of a head, which some plans (GLM-4.5) forget."""
    for _, attention, dim in _projections(modules, plan):
        for key, child in modules[attention].named_children():
            shapes = [tuple(param.shape) for param in child.parameters()]
            if shapes == [(dim,)]:
                yield f"{attention}.{key}"


def _projections(modules: Modules, plan: Plan) -> Iterator[tuple[str, str, int]]:
    """Yield each layer that is cut by heads, its attention, and the size of a head."""
    for name, style in plan.items():
        attention = name.rpartition(".")[0]
        dim = getattr(modules.get(attention), "head_dim", None)
        is_linear = isinstance(modules.get(name), nn.Linear)
        if style == _ROWS and type(dim) is int and is_linear:
            yield name, attention, dim


def _cut_sizes(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            continue
        placement = param.placements[0]
        if not isinstance(placement, Replicate):
            dim = placement.dim % param.dim()  # type: ignore[attr-defined]
            what = "columns" if dim else "rows"
            yield f"{what} of {name!r}", param.shape[dim]


def _require_even(sizes: dict[str, int], ranks: int) -> None:
    """FSDP2 would hold other rows of a weight than its DTensor says if parts had several sizes."""
    for what, number in sizes.items():
        if number % ranks:
            fitting = divisors(math.gcd(*sizes.values()))
            raise _refusal(
                ranks,
                f"which does not divide the {number} {what}; expected one of {fitting}",
                instead="",
            )


def _refusal(
    size: int,
    problem: str,
    instead: str = "; set it to 1, so that FSDP2 alone shards the model",
) -> ConfigError:
    return ConfigError(
        f"tensor_parallel_size (t in config key 'backend') is {size}, {problem}{instead}"
    )


def require_cuttable(config: TrainEngineConfig, model: PreTrainedModel, size: int) -> None:
    """Raise ConfigError if ``config`` trains adapters, or compiles blocks."""
    if config.use_lora:
        raise _refusal(size, "with config key 'use_lora' true: adapters are not cut")
    if config.compile:
        raise _refusal(
            size, "with config key 'compile' true, which cannot compile matrices that are cut"
        )


def tensor_mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh that `cut_over_ranks` cut a model over, or None."""
    cut = _cuts.of(model)
    if cut is None:
        return None
    return cut.mesh


def has_own_forward(head: nn.Linear) -> bool:
    """Whether something other than `cut_over_ranks` has replaced the forward of a head."""
    forward = vars(head).get("forward")
    if forward is None:
        return False
    return getattr(forward, "func", None) is not _whole_logits


def words_of(
    head: nn.Linear,
) -> tuple[Tensor, Tensor | None, int, dist.ProcessGroup | None]:
    """Weight and bias of this rank's words inside the head's forward, the first word, and the group
    with all words.
    """
    weight = head.weight
    bias = head.bias
    if not isinstance(weight, DTensor):
        return weight, bias, 0, None
    mesh = weight.device_mesh
    local = weight.to_local()
    if isinstance(bias, DTensor):
        bias = bias.to_local()
    first_word = mesh.get_local_rank() * len(local)
    return local, bias, first_word, mesh.get_group()


def _whole_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    weight, bias, _, group = words_of(head)
    # Each rank has the part of the gradient that comes from its words.
    hidden = sum_gradient(hidden, group)
    own_logits = F.linear(hidden, weight, bias)
    return gather_parts(own_logits, group, dim=-1)


@torch.no_grad()
def sum_partial_gradients(model: nn.Module) -> None:
    """Sum the gradients of which each rank of `Meshes.tensor` has a part. One all-reduce, of
    sharded gradients.
    """
    cut = _cuts.of(model)
    if cut is None:
        return

    # This rank's shards of the gradients
    parts = []
    for name in cut.partial:
        for param in model.get_submodule(name).parameters(recurse=False):
            if isinstance(param.grad, DTensor):
                parts.append(param.grad.to_local())
    if not parts:
        return

    # With `fsdp.offload_params` gradients are in host memory.
    flat = torch.cat([part.flatten() for part in parts])
    whole = flat.to(cut.mesh.device_type)
    dist.all_reduce(whole, group=cut.mesh.get_group())

    # Back to the gradients, which share no memory with the sums.
    sums = whole.split([part.numel() for part in parts])
    for part, values in zip(parts, sums, strict=True):
        part.copy_(values.view_as(part))
