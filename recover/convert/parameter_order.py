"""Optimizer states that go by numbers, under the names of their parameters.

``Optimizer.state_dict()`` numbers the parameters in the order in which the optimizer was given them, group by group. It
does not say which they are: that is known by the rule by which the source makes its optimizer. The shapes of what the
state keeps for each parameter must fit; where they do not, or no rule has as many parameters, nothing is guessed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...engine.lazy_tensor import LazyTensor
from ...utils.errors import CheckpointMismatchError, ConfigError

_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "exp_inf", "grad_avg")
"""What torch's optimizers keep in the shape of the parameter."""

_HELP = (
    "give the names of the parameters, a list for each group in the order in which the optimizer got them "
    "(`[[n for n, p in model.named_parameters() if ...], ...]`), as parameters=, or as a JSON file with --parameters"
)


class Rule(NamedTuple):
    """One way in which an optimizer may have been made.

    Attributes:
        text: what it is, for messages.
        groups: names of the parameters of each group, in order.
    """

    text: str
    groups: Sequence[Sequence[str]]


def name_states(
    what: str,
    state_dict: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rules: Sequence[Rule],
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The state by name of parameter, and the groups with names in ``params``.

    Args:
        what: names the source in messages.
        state_dict: ``state`` and ``param_groups``, by number, or by name already; tensors as `LazyTensor`.
        shapes: name -> shape, of the model.
        rules: tried in this order; the first whose groups have as many parameters counts.

    Raises:
        ConfigError: no rule fits.
        CheckpointMismatchError: one fits, but the state is of other shapes; or this is no state of an optimizer.
    """
    groups, state = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping) or not all("params" in g for g in groups):
        raise CheckpointMismatchError(f"{what} is not the state_dict of a torch optimizer")
    numbers = [list(group["params"]) for group in groups]
    if all(isinstance(each, str) for group in numbers for each in group):
        names = {name: name for group in numbers for name in group}
    else:
        names = _names_of(what, numbers, rules)
    named = {names[number]: dict(entries) for number, entries in state.items() if number in names}
    if strangers := [number for number in state if number not in names]:
        raise CheckpointMismatchError(
            f"{what} has state for parameter {strangers[0]!r}, which is in none of its groups"
        )
    _check_shapes(what, named, shapes)
    return named, [plain_group(group) | {"params": [names[n] for n in group["params"]]} for group in groups]


def _names_of(what: str, numbers: Sequence[Sequence[Any]], rules: Sequence[Rule]) -> dict[Any, str]:
    counts = [len(group) for group in numbers]
    for rule in rules:
        if [len(group) for group in rule.groups] == counts:
            pairs = zip(numbers, rule.groups, strict=True)
            return {number: name for ours, theirs in pairs for number, name in zip(ours, theirs, strict=True)}
    tried = "; ".join(f"{rule.text} would be {[len(group) for group in rule.groups]}" for rule in rules)
    raise ConfigError(
        f"{what} numbers its parameters, in groups of {counts}; which they are is not known"
        f"{f' ({tried})' if tried else ''}: {_HELP}"
    )


def _check_shapes(what: str, named: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, entries in named.items():
        if name not in shapes:
            raise CheckpointMismatchError(f"{what} has state for {name!r}, which is no tensor of the model")
        for key, value in entries.items():
            if isinstance(value, LazyTensor) and key in _LIKE_PARAMETER and value.shape != shapes[name]:
                raise CheckpointMismatchError(
                    f"{what}: {key} of {name} has shape {list(value.shape)}, the parameter {list(shapes[name])}: its "
                    f"parameters are in another order; {_HELP}"
                )


def plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group as plain values: a rate may be kept as a tensor."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
