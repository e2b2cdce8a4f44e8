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
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from ...utils.compat.transformers_private import apply_parallel_plan, tensor_parallel_plan
from ...utils.errors import ConfigError
from ..config import TrainEngineConfig
from ..parallel_strategy import divisors
from .rank_parts import gather_parts, sum_gradient

_PARTIAL = "replicated_with_grad_allreduce"
_EXPERTS = ("moe_tp_experts", "moe_identity_expert", "packed_colwise", "packed_rowwise")
_ROWS, _EMBEDDING = "colwise", "embedding_rowwise"
_BY_ROWS = (_ROWS, "colwise_rep", "colwise_gather_output")
_KNOWN = (
    *(*_BY_ROWS, "rowwise", "rowwise_rep", "rowwise_split_input"),
    *(
        _EMBEDDING,
        "embedding_colwise",
        _PARTIAL,
        "replicate",
        "all_reduce",
        "mla_kv_a_proj",
        "local_params",
    ),
)


@dataclass(frozen=True)
class _Cut:
    mesh: DeviceMesh
    partial: list[str] = field(default_factory=list)  # modules whose gradients are parts of a sum


_cuts: WeakKeyDictionary[nn.Module, _Cut] = WeakKeyDictionary()


def cut_over_ranks(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cut the matrices of ``model``, on the meta device and not sharded yet, over the ranks of
    `Meshes.tensor`.

    Raises:
        ConfigError: transformers has no plan for the architecture, or one that is not supported, or
            the number of ranks does not divide rows, columns or heads.
    """
    size, name, head = mesh.size(), type(model).__name__, plain_head(model)
    modules: dict[str, nn.Module] = dict(model.named_modules())
    parameters = dict(model.named_parameters())  # a tied weight has one name
    plan = tensor_parallel_plan(model, size)
    experts = [name for name, style in plan.items() if style in _EXPERTS]
    plan = {
        name: style
        for name, style in plan.items()
        if not any(_is_in(name, expert) for expert in experts)
    }
    norms = {name for name, style in plan.items() if style == _PARTIAL and name in modules}
    plan = {name: style for name, style in plan.items() if style != _PARTIAL}
    norms |= {name for name in _norms_of_heads(modules, plan) if name not in plan}
    if not any(
        modules.get(layer) not in (None, head, model.get_input_embeddings()) for layer in plan
    ):
        raise _refusal(size, f"but transformers has no plan for the layers of {name}")
    if unknown := next((name for name, style in plan.items() if style not in _KNOWN), None):
        raise _refusal(size, f"but transformers plans {plan[unknown]!r} for {unknown!r} of {name}")
    if head is not None:
        names, embedding = (
            {module: name for name, module in modules.items()},
            model.get_input_embeddings(),
        )
        plan |= {f"{names[head]}.{key}": _ROWS for key, _ in head.named_parameters()}
        plan.pop(names[head], None)
        if head.weight is embedding.weight:
            plan |= {f"{names[embedding]}.weight": _EMBEDDING, names[embedding]: _EMBEDDING}
    plan = {name: style for name, style in plan.items() if name in parameters or name in modules}
    heads = dict(_heads(modules, plan))
    apply_parallel_plan(model, mesh, plan)
    _share_inputs(
        [modules[name] for name, style in plan.items() if style in _BY_ROWS and name in modules],
        mesh,
    )
    model.tie_weights()
    _require_even(heads | dict(_cut_sizes(model)), size)
    _cuts[model] = _Cut(mesh, sorted(norms))
    if head is not None:
        head.forward = partial(_whole_logits, head)  # type: ignore[method-assign]  # hides that of the class


def _share_inputs(layers: list[nn.Module], mesh: DeviceMesh) -> None:
    """Let layers with the same input (q, k and v) sum its gradient over the ranks once, instead of
    once for each.
    """
    last: list[
        torch.Tensor
    ] = []  # the input of the layers before, and its DTensor, until its gradient is there

    def shared(layer: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if isinstance(hidden := args[0], DTensor) or not (
            torch.is_grad_enabled() and hidden.requires_grad
        ):
            return None
        if not last or last[0] is not hidden:
            last[:] = hidden, DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
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
    return head if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward else None


def _is_in(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


def _heads(modules: dict[str, nn.Module], plan: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the number of heads for each projection of which a rank keeps some."""
    for name, _, dim in _projections(modules, plan):
        yield f"heads of {name!r}", modules[name].out_features // dim  # type: ignore[operator]


def _norms_of_heads(modules: dict[str, nn.Module], plan: dict[str, str]) -> Iterator[str]:
    """Yield layers with a weight for each element of a head, which some plans (GLM-4.5) forget."""
    for _, attention, dim in _projections(modules, plan):
        for key, child in modules[attention].named_children():
            if [tuple(param.shape) for param in child.parameters()] == [(dim,)]:
                yield f"{attention}.{key}"


def _projections(
    modules: dict[str, nn.Module], plan: dict[str, str]
) -> Iterator[tuple[str, str, int]]:
    """Yield each layer that is cut by heads, the attention that it is in, and the size of a head."""
    for name, style in plan.items():
        attention = name.rpartition(".")[0]
        dim = getattr(modules.get(attention), "head_dim", None)
        if style == _ROWS and type(dim) is int and isinstance(modules.get(name), nn.Linear):
            yield name, attention, dim


def _cut_sizes(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) and not isinstance(cut := param.placements[0], Replicate):
            dim = cut.dim % param.dim()  # type: ignore[attr-defined]
            yield f"{'columns' if dim else 'rows'} of {name!r}", param.shape[dim]


def _require_even(sizes: dict[str, int], ranks: int) -> None:
    """FSDP2 would hold other rows of a weight than its DTensor says if the parts had several sizes."""
    for what, number in sizes.items():
        if number % ranks:
            fitting = divisors(math.gcd(*sizes.values()))
            raise _refusal(
                ranks, f"which does not divide the {number} {what}; expected one of {fitting}", ""
            )


def _refusal(
    size: int, problem: str, instead: str = "; set it to 1, so that FSDP2 alone shards the model"
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
    return None if (cut := _cuts.get(model)) is None else cut.mesh


def has_own_forward(head: nn.Linear) -> bool:
    """Whether something other than `cut_over_ranks` has replaced the forward of a head."""
    forward = vars(head).get("forward")
    return forward is not None and getattr(forward, "func", None) is not _whole_logits


def words_of(
    head: nn.Linear,
) -> tuple[torch.Tensor, torch.Tensor | None, int, dist.ProcessGroup | None]:
    """Weight and bias of this rank's words inside the head's forward, the first word, and the group
    with all words.
    """
    weight, bias = head.weight, head.bias
    if not isinstance(weight, DTensor):
        return weight, bias, 0, None
    local, mesh = weight.to_local(), weight.device_mesh
    return (
        local,
        bias.to_local() if isinstance(bias, DTensor) else bias,
        mesh.get_local_rank() * len(local),
        mesh.get_group(),
    )


def _whole_logits(head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    weight, bias, _, group = words_of(head)
    return gather_parts(F.linear(sum_gradient(hidden, group), weight, bias), group, dim=-1)


@torch.no_grad()
def sum_partial_gradients(model: nn.Module) -> None:
    """Sum the gradients of which each rank of `Meshes.tensor` has a part. One all-reduce, of
    sharded gradients.
    """
    if (cut := _cuts.get(model)) is None:
        return
    params = [
        param
        for name in cut.partial
        for param in model.get_submodule(name).parameters(recurse=False)
    ]
    parts = [param.grad.to_local() for param in params if isinstance(param.grad, DTensor)]
    if parts:
        whole = torch.cat([part.flatten() for part in parts]).to(
            cut.mesh.device_type
        )  # from `fsdp.offload_params`
        dist.all_reduce(whole, group=cut.mesh.get_group())
        for part, values in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
            part.copy_(values.view_as(part))
