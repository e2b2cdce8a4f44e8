"""Find out at the start whether the experts of a model can be replayed: on a twin, before the model
has memory.

Three forwards of the twin: the routers choose, then they are given their own choices, then other
ones. DeepSeek-V2 with groups is refused, for instance. It takes scores that are 0 outside of the
groups it chose, so experts of other groups would have no weight and no gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...utils.distributed import RankGroup, all_agree
from ...utils.errors import ConfigError
from ..config import TrainEngineConfig
from .batch import ROUTES
from .meshes import Meshes
from .packed_batch import pack_rows
from .probe_model import (
    NOT_UNDERSTOOD,
    Twins,
    probe_tokens,
    reason_of,
    smaller_config,
    twin_dtype,
)
from .route_replay import (
    RouteReplay,
    RouteRules,
    count_layers,
    experts_of,
    layer_of,
    routers_by_layer,
)
from .routers import number_of_experts
from .unsharded import unsharded_class

_TOKENS = 24
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Relative difference of weights that counts as rounding, by compute dtype."""


class _Taken(NamedTuple):
    """What the experts of a layer were called with: ``[tokens, k]`` each. And the gradient that
    their weights give the router.
    """

    choices: Tensor
    weights: Tensor
    gradient: float


def find_replay(
    twins: Twins,
    config: TrainEngineConfig,
    meshes: Meshes,
    group: RankGroup,
) -> RouteReplay:
    """The `RouteReplay` of the twins' model. Collective with ``router_replay.mode: R3``, over the
    ranks of the model's mesh.

    Call it before the model has memory: a twin needs the float32 shard of a model with a layer of
    each kind (all layers, if there is no such model) for three short forwards. The model and
    torch's generators are not changed.

    Raises:
        ConfigError: on every rank. Experts of the model cannot be replayed.
    """
    rules = None
    if config.router_replay.is_on:
        rules = _rules_of(twins, group)
    is_policy = config.optimizer is not None and not config.is_critic
    return RouteReplay(twins.model, config.pack_sequences, meshes.sequence, rules, is_policy)


def _rules_of(twins: Twins, group: RankGroup) -> RouteRules:
    model = twins.model
    routers = routers_by_layer(model)
    top_k = 0
    problem: str | None = None
    if not routers or routers.keys() != _experts_by_layer(model).keys():
        problem = "transformers knows no router for the experts of each layer"
    else:
        try:
            top_k = _replayed_choices(twins)
        except (*NOT_UNDERSTOOD, ConfigError) as error:
            problem = reason_of(error)
    if all_agree(problem is None, group):
        n_experts = {layer: experts_of(router) for layer, router in routers.items()}
        return RouteRules(count_layers(model), top_k, n_experts)
    raise ConfigError(
        "config key 'router_replay.mode' is 'R3', but experts cannot be replayed in "
        f"{unsharded_class(model).__name__} ({problem or 'other ranks say so'}); set it to "
        "'disabled'"
    )


def _replayed_choices(twins: Twins) -> int:
    """The number of experts of a token. ValueError if the experts of a twin cannot be replayed."""
    config = smaller_config(twins.model) or twins.model.config
    dtype = twin_dtype(config)
    with twins.of(config, dtype) as twin:
        routers = routers_by_layer(twin)
        n_experts = {layer: experts_of(router) for layer, router in routers.items()}
        n_layers = count_layers(twin)
        ids = probe_tokens(config, _TOKENS)[None]

        # The choices of the routers themselves.
        with torch.no_grad(), _seeing(twin) as plain:
            twin(input_ids=ids.to(twins.device), use_cache=False)
        top_k = next(iter(plain.values())).choices.shape[1]
        if top_k < 2:
            raise ValueError("a token has one expert, so that a missing choice looks like expert 0")
        replay = RouteReplay(twin, rules=RouteRules(n_layers, top_k, n_experts))

        def run(routes: Tensor) -> None:
            batch = {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                ROUTES: routes,
            }
            mb = pack_rows(batch, [0], [_TOKENS]).to(twins.device)
            with replay.of(mb):
                twin(input_ids=ids.to(twins.device), use_cache=False)

        # The same choices must change nothing.
        routes = torch.zeros(1, _TOKENS, n_layers, top_k, dtype=torch.int16)
        for layer, taken in plain.items():
            routes[0, :, layer] = taken.choices
        with torch.no_grad(), _seeing(twin) as again:
            run(routes)
        for layer, taken in plain.items():
            found = again[layer]
            is_same = torch.equal(taken.choices, found.choices)
            # On GPUs the sums of the layers before may be rounded otherwise.
            is_close = torch.allclose(taken.weights, found.weights, rtol=_ROUNDING[dtype])
            if not is_same or not is_close:
                raise ValueError(f"its own choices change the results of layer {layer}")

        # Other ones, across groups of experts, must reach the experts.
        generator = torch.Generator().manual_seed(0)
        for layer, count in n_experts.items():
            drawn = torch.rand(_TOKENS, count, generator=generator)
            routes[0, :, layer] = drawn.argsort(1)[:, :top_k]
        with torch.enable_grad(), _seeing(twin, _gradient_of) as others:
            run(routes)
        for layer, taken in others.items():
            given = routes[0, :, layer].long()
            if not torch.equal(taken.choices.cpu(), given):
                raise ValueError(f"the experts of layer {layer} do not get the given choices")
            if bool((taken.weights == 0).any()):
                raise ValueError(f"an expert given to layer {layer} has weight 0")
            if not taken.gradient:
                raise ValueError(f"the router of layer {layer} gets no gradient")
    twins.close()  # the routers of this one are wrapped
    return top_k


@contextmanager
def _seeing(
    twin: PreTrainedModel,
    gradient_of: Callable[[nn.Module, Tensor], float] | None = None,
) -> Iterator[dict[int, _Taken]]:
    """Note what the experts of each layer are called with in this block."""
    routers = routers_by_layer(twin)
    found: dict[int, _Taken] = {}

    def note(layer: int, module: nn.Module, args: Any) -> None:
        _, choices, weights = args
        gradient = 0.0
        if gradient_of is not None:
            gradient = gradient_of(routers[layer], weights)
        found[layer] = _Taken(choices.detach().clone(), weights.detach().clone(), gradient)

    # Before FSDP's hook, after which the gradient would pass through FSDP and reshard the experts.
    handles = []
    for layer, module in _experts_by_layer(twin).items():
        hook = partial(note, layer)
        handles.append(module.register_forward_pre_hook(hook, prepend=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _gradient_of(router: nn.Module, weights: Tensor) -> float:
    """The largest number in the gradient of a router's matrix, for a loss that weighs experts."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(weights.shape, generator=generator).to(weights.device)
    matrices = [param for param in router.parameters() if param.dim() == 2]
    gradients = torch.autograd.grad((weights * draws).sum(), matrices)
    return max(float(gradient.abs().max()) for gradient in gradients)


def _experts_by_layer(model: PreTrainedModel) -> dict[int, nn.Module]:
    found = {}
    for name, module in model.named_modules():
        layer = layer_of(name)
        if layer is not None and number_of_experts(module):
            found[layer] = module
    return found
