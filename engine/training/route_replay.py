"""Router replay (R3): a token takes the experts that the inference server took for it.

A router of transformers ends in one ``topk`` over ``[tokens, experts]``, and computes the weights
of the experts from what that returns. Inside of `RouteReplay.of` this one call is answered with the
server's experts and their scores. No formula of an architecture is repeated here, so the gradient
is the model's own. `find_replay` tries this on a twin.

Routes stay set until the backward of their micro-batch has ended. So blocks that activation
checkpointing runs again get the same ones. A token without a choice (see `ROUTES`) is routed by the
model.

Method: Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers", arXiv 2510.11370.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ...utils.errors import BatchError, ConfigError
from ...utils.logging import get_logger
from ..api import Batch
from .batch import ROUTES
from .packed_batch import MicroBatch
from .rank_parts import Group, own_part
from .routers import find_routers

logger = get_logger(__name__)

ROUTE_STATS = ("routes_differ", "tokens_rerouted", "routes_missing", "sibling_routes_differ")
"""Of the choices for tokens in the loss that a server made, the share that the trainer would make
differently. Of these tokens, the share with such a choice in any layer, and the share without a
server's choice in any layer. Of prompt tokens that are computed with another sequence, the share
for which the server chose otherwise there.
"""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ASK = (
    "start the servers with --enable-return-routed-experts, set return_routed_experts of the "
    "rollouts, or set config key 'router_replay.mode' to 'disabled'"
)

Answer = Callable[[Tensor, Any], Any]
"""Takes the scores ``[tokens, experts]`` and the result of their ``topk``. Returns another one."""


class RouteRules(NamedTuple):
    """What a model requires of `ROUTES`: its decoder layers, the experts of a token, and how many
    each layer with a router has to choose from.
    """

    n_layers: int
    top_k: int
    n_experts: Mapping[int, int]

    def check(self, batch: Batch, required: bool) -> Batch:
        """Return the batch, with zeros if no token has a choice. Raise BatchError if routes do not
        fit the model, or are missing although ``required``. Waits for the device of the batch.
        """
        routes = batch.get(ROUTES)
        if routes is None:
            if required:
                raise BatchError(f"the batch has no {ROUTES!r}, which routers replay; {_ASK}")
            return batch
        shape = batch["input_ids"].shape
        expected = (*shape, self.n_layers, self.top_k)
        if routes.shape == (*shape, 0, 0):
            # One zero in memory.
            return {**batch, ROUTES: routes.new_zeros(()).expand(expected)}
        if routes.shape != expected or routes.dtype not in (torch.uint8, torch.int16):
            raise BatchError(
                f"batch[{ROUTES!r}] is {routes.dtype} of shape {list(routes.shape)}; expected "
                f"uint8 or int16 of {list(expected)}: [batch, seqlen, decoder layers, experts of "
                "a token]. Do the servers have the same model?"
            )
        for layer, n_experts in self.n_experts.items():
            # Not uint8, to which the number of experts would be cast.
            own = routes[:, :, layer].flatten(1).int()
            is_outside = ((own < 0) | (own >= n_experts)).any(1)
            if bool(is_outside.any()):
                row = int(is_outside.nonzero()[0])
                raise BatchError(
                    f"batch[{ROUTES!r}] has experts {int(own[row].min())} to "
                    f"{int(own[row].max())} in row {row} and layer {layer}; expected 0 to "
                    f"{n_experts - 1}"
                )
        return batch


class RouteReplay:
    """The routers of a model, by decoder layer, as servers count them.

    With ``rules`` they take the experts of the batch. Without, they choose themselves, and only
    differences are counted, in `counting`. ``sequence`` are the ranks that share a row. A model
    that is no ``policy`` has nothing to count.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        packed: bool = True,
        sequence: Group = None,
        rules: RouteRules | None = None,
        policy: bool = True,
    ) -> None:
        self.rules = rules
        self._routers = routers_by_layer(model) if policy else {}
        self._n_layers = count_layers(model)
        self._packed = packed
        self._sequence = sequence
        self._wrapped = False
        self._told = False
        self._now: _Replayed | None = None
        self._has_routes = False
        self._sums = torch.empty(0)
        if rules is not None:
            self._wrap()

    def start_step(self, device: torch.device, has_routes: bool) -> None:
        """Reset the counts. ``has_routes`` says whether any rank has routes, the same on all."""
        self._has_routes = has_routes and bool(self._routers)
        if not self._has_routes:
            return
        self._sums = torch.zeros(len(_Counted._fields), dtype=torch.float64, device=device)
        if self.rules is None and not self._told:
            self._told = True
            logger.info(
                "the batch has %r, but config key 'router_replay.mode' is 'disabled': the model "
                "routes its tokens itself",
                ROUTES,
            )

    @contextmanager
    def of(self, mb: MicroBatch, share: float = 1.0) -> Iterator[None]:
        """Replay the routes of ``mb`` in the passes inside, unless it has none or its share of the
        loss is 0. Without ``rules`` this does nothing.
        """
        if self.rules is None:
            yield
            return
        with self._given(mb, share, set()):
            yield

    @contextmanager
    def counting(self, mb: MicroBatch, share: float) -> Iterator[None]:
        """`of` in the forward and backward of a step, with the counts of `statistics`. Without
        ``rules`` it counts alone.
        """
        with self._given(mb, share, set(self._routers)) as given:
            yield
        if given is None or given.uncounted:
            return
        of_siblings = _siblings_that_differ(mb, mb.data[ROUTES])
        counted = given.counted(of_siblings, mb.n_tokens - mb.n_row_tokens)
        self._sums += counted

    @contextmanager
    def _given(
        self,
        mb: MicroBatch,
        share: float,
        to_count: set[int],
    ) -> Iterator["_Replayed | None"]:
        """Give the routers the routes of ``mb``, and count in the layers ``to_count``."""
        routes = mb.data.get(ROUTES)
        if routes is None or share == 0 or not self._can_use(routes):
            yield None
            return
        multiple = 1 if self._sequence is None else dist.get_world_size(self._sequence)

        def in_rows(values: Tensor) -> Tensor:
            return own_part(mb.in_rows(values, self._packed, multiple), self._sequence)

        # Of the tokens in the loss, those before them count, whose experts decided about them.
        in_loss = mb.data["loss_mask"].bool()
        predicts = F.pad(in_loss[1:], (0, 1))
        self._now = _Replayed(in_rows(routes), in_rows(predicts), to_count)
        try:
            yield self._now
        finally:
            self._now = None

    def statistics(self) -> dict[str, Tensor]:
        """`ROUTE_STATS` of the step over all ranks, on the device, if there were routes. NaN where
        nothing was counted. Collective.
        """
        if not self._has_routes:
            return {}
        dist.all_reduce(self._sums)
        sums = _Counted(*self._sums.unbind())
        return {
            "routes_differ": sums.differ / sums.choices,
            "tokens_rerouted": sums.rerouted / sums.tokens,
            "routes_missing": sums.missing / sums.tokens,
            "sibling_routes_differ": sums.of_siblings / sums.siblings.clamp(min=1),
        }

    def _can_use(self, routes: Tensor) -> bool:
        # Without rules, they may be of another model.
        fits = routes.dim() == 3 and routes.shape[1] == self._n_layers
        if not self._routers or not fits:
            return False
        self._wrap()
        return True

    def _wrap(self) -> None:
        if self._wrapped:
            return
        self._wrapped = True
        for layer, router in self._routers.items():
            # Outside of graphs, in which the mode would not be seen.
            forward: Any = torch.compiler.disable(
                partial(self._route, layer, router.forward, experts_of(router))
            )
            router.forward = forward

    def _route(
        self,
        layer: int,
        forward: Callable[..., Any],
        n_experts: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        now = self._now
        if now is None:
            return forward(*args, **kwargs)
        replays = self.rules is not None
        with _Topk(n_experts, partial(now.answer, layer, replays)) as topk:
            output = forward(*args, **kwargs)
        if replays and topk.n_calls != 1:
            raise ConfigError(
                f"the router of layer {layer} chose experts in {topk.n_calls} steps; expected one, "
                "as in the test at the start. Was its forward replaced since? Set config key "
                "'router_replay.mode' to 'disabled'"
            )
        return output


class _Counted(NamedTuple):
    """Counts of a step, in one tensor."""

    differ: Tensor  # choices that the trainer would make differently
    choices: Tensor  # with a choice of the server
    rerouted: Tensor  # tokens of which any choice differs
    missing: Tensor  # tokens without a choice in any layer
    tokens: Tensor  # that predict a token in the loss
    of_siblings: Tensor  # tokens of a prompt whose first sequence has other routes
    siblings: Tensor  # tokens of prompts that are computed with another sequence


class _Replayed:
    """The routes of one micro-batch, ``[rows, layers, k]``, and how the trainer would choose.

    Each layer is counted once, in the forward, whatever the backward computes again.
    """

    def __init__(
        self,
        routes: Tensor,
        predicts: Tensor,
        layers: set[int],
    ) -> None:
        self.uncounted = layers
        self._routes = routes
        self._predicts = predicts
        self._rerouted = torch.zeros_like(predicts)
        self._missing = torch.zeros_like(predicts)
        self._sums = torch.zeros(2, dtype=torch.float64, device=predicts.device)

    def answer(
        self,
        layer: int,
        replays: bool,
        scores: Tensor,
        own: Any,
    ) -> Any:
        """The ``topk`` of a router: the server's experts if it ``replays``, and their scores."""
        routes = self._routes[:, layer].long()
        choices: Tensor = own.indices
        if routes.shape != choices.shape:
            if not replays:
                return own
            raise BatchError(
                f"routes of shape {list(routes.shape)} in layer {layer}, whose router chose "
                f"{list(choices.shape)}"
            )
        known = has_choice(routes)
        if layer in self.uncounted:
            self.uncounted.remove(layer)
            self._count(choices, routes, known)
        if not replays:
            return own
        given = torch.where(known[:, None], routes, choices)
        return torch.return_types.topk((scores.gather(1, given), given))  # type: ignore[arg-type]

    def _count(
        self,
        choices: Tensor,
        routes: Tensor,
        known: Tensor,
    ) -> None:
        counts = self._predicts & known
        # In any order: a choice differs if it is none of the server's.
        same = (choices[:, :, None] == routes[:, None, :]).any(2)
        differs = ~same & counts[:, None]
        self._rerouted |= differs.any(1)
        self._missing |= self._predicts & ~known
        n_choices = counts.sum() * choices.shape[1]
        self._sums += torch.stack([differs.sum(), n_choices])

    def counted(self, of_siblings: Tensor | int, siblings: int) -> Tensor:
        """`_Counted` of the micro-batch."""
        of_tokens = [self._rerouted.sum(), self._missing.sum(), self._predicts.sum()]
        of_prompts = [torch.as_tensor(of_siblings), torch.tensor(siblings)]
        device = self._sums.device
        more = [count.to(device, torch.float64) for count in (*of_tokens, *of_prompts)]
        return torch.cat([self._sums, torch.stack(more)])


class _Topk(TorchFunctionMode):
    """Answers each ``topk`` over ``[tokens, n_experts]``. Routers with groups call others, too."""

    def __init__(self, n_experts: int, answer: Answer) -> None:
        super().__init__()
        self.n_calls = 0
        self._n_experts = n_experts
        self._answer = answer

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or not args:
            return result
        scores: Tensor = args[0]
        if scores.dim() != 2 or scores.shape[1] != self._n_experts:
            return result
        self.n_calls += 1
        return self._answer(scores, result)


def has_choice(routes: Tensor) -> Tensor:
    """Whether the k entries of ``[..., k]`` are all different: ``[...]`` bool."""
    ordered = routes.sort(-1).values
    return (ordered[..., 1:] != ordered[..., :-1]).all(-1)


def routers_by_layer(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The routers of a model by the number of their decoder layer. Empty if a router has no such
    number, or shares it.
    """
    routers = find_routers(model)
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        layer = layer_of(name)
        if module in routers and layer is not None:
            found[layer] = module
    return found if len(found) == len(routers) else {}


def layer_of(name: str) -> int | None:
    """The number of the decoder layer in the name of a module."""
    number = _LAYER.search(name)
    return None if number is None else int(number[1])


def count_layers(model: PreTrainedModel) -> int:
    """Number of decoder layers, 0 if the config does not say it."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "num_hidden_layers", None) or 0


def route_bytes(model: PreTrainedModel) -> int:
    """Bytes of `ROUTES` for each token. 0 for a model whose routers are not known."""
    routers = routers_by_layer(model)
    config = model.config.get_text_config(decoder=True)
    top_k = getattr(config, "num_experts_per_tok", None) or 0
    most = max((experts_of(router) for router in routers.values()), default=0)
    item = 1 if most <= 256 else 2
    return count_layers(model) * top_k * item * bool(routers)


def experts_of(router: nn.Module) -> int:
    """Number of experts that a router chooses from: the rows of its matrix."""
    for param in router.parameters():
        if param.dim() == 2:
            return param.shape[0]
    return 0


def _siblings_that_differ(mb: MicroBatch, routes: Tensor) -> Tensor | int:
    """Number of tokens of shared prompts whose first sequence has other routes."""
    if mb.shared is None:
        return 0
    own = routes.sort(-1).values
    first = own[mb.shared.tokens][mb.shared.sequences.index]
    return (first != own).flatten(1).any(1).sum()
