"""Parameter groups in a checkpoint: matched by the parameters that are in them, in whichever order they were built.

Schedulers keep lists with one value a group, in the order of the groups; these follow. A list that may or may not be
one of them is never guessed at.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...utils.errors import CheckpointMismatchError

_OWN_OF_GROUP = {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "maximize"}
_LISTS_OF_GROUPS = {"base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas"}
"""What torch's schedulers keep with one value a group."""
_OTHER_LISTS = {"_milestones", "_schedule_phases"}
_NESTED = "_schedulers"


def describe_groups(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Hyperparameters of each group, and as ``params`` the names of its parameters that are the model's."""
    names = {id(param): name for name, param in params.items()}
    return [
        hyperparameters(group) | {"params": [names[id(p)] for p in group["params"] if id(p) in names]}
        for group in optimizer.param_groups
    ]


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a group a checkpoint brings back."""
    return {key: value for key, value in group.items() if key not in _OWN_OF_GROUP}


def are_named(saved: Sequence[Mapping[str, Any]]) -> bool:
    """Whether saved groups say which parameters are in them; older folders do not."""
    return all("params" in group for group in saved)


def match_groups(
    optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter], saved: Sequence[Mapping[str, Any]]
) -> list[int]:
    """For each group of ``optimizer`` the number of the saved one that has the same parameters.

    Saved groups without names are matched by position. A parameter that is on one side only does not count.

    Raises:
        CheckpointMismatchError: the groups are cut in another way, are of another number, or have the hyperparameters
            of another optimizer.
    """
    groups = describe_groups(optimizer, params)
    if len(saved) != len(groups):
        raise CheckpointMismatchError(f"the checkpoint has {len(saved)} parameter groups, the optimizer {len(groups)}")
    order = _match_by_name(groups, saved) if are_named(saved) else list(range(len(groups)))
    for group, number in zip(groups, order, strict=True):
        _check_hyperparameters(optimizer, group, saved[number])
    return order


def _match_by_name(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[int]:
    there = {name: number for number, group in enumerate(saved) for name in group["params"]}
    first: dict[int, tuple[str, int]] = {}  # number there -> a parameter of it, and its number here
    found: dict[int, int] = {}  # number here -> number there
    for here, group in enumerate(groups):
        for name in group["params"]:
            if (number := there.get(name)) is None:
                continue
            other, other_here = first.setdefault(number, (name, here))
            if other_here != here:
                raise _cut_otherwise(other, name, f"both in group {number}", f"in groups {other_here} and {here}")
            if found.setdefault(here, number) != number:
                other, _ = first[found[here]]
                raise _cut_otherwise(other, name, f"in groups {found[here]} and {number}", f"both in group {here}")
    rest_here = [number for number in range(len(groups)) if number not in found]
    rest_there = [number for number in range(len(saved)) if number not in first]
    if len(rest_here) > 1:
        raise CheckpointMismatchError(
            f"parameter groups {rest_here} of the optimizer have no parameter that is in a group of the checkpoint, so "
            "it is not known which is which; build the groups from the same parameters as the saved run"
        )
    found.update(zip(rest_here, rest_there, strict=True))
    return [found[number] for number in range(len(groups))]


def _cut_otherwise(one: str, other: str, there: str, here: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"parameters {one} and {other} are {there} of the checkpoint's parameter groups, but {here} of the optimizer's"
        "; build the groups from the same parameters as the saved run"
    )


def _check_hyperparameters(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], saved: Mapping[str, Any]
) -> None:
    """They must be those of one optimizer: a scheduler may have added some, and another version of torch may know more
    or fewer."""
    here, there = hyperparameters(group).keys(), hyperparameters(saved).keys()
    if not (here <= there or there <= here):
        raise CheckpointMismatchError(
            f"the checkpoint has an optimizer with {sorted(there - here)} and without {sorted(here - there)}; "
            f"expected that of {type(optimizer).__name__}"
        )


def reorder_schedule(state: Mapping[str, Any], order: Sequence[int], name: str = "scheduler") -> dict[str, Any]:
    """A scheduler's ``state_dict()`` with its lists of groups in the order of this optimizer's.

    Args:
        state: as it was saved.
        order: from `match_groups`.
        name: what messages call it.

    Raises:
        CheckpointMismatchError: the order is another, and a list of as many values may belong to the groups or not.
    """
    if list(order) == sorted(order):
        return dict(state)
    return {key: _reorder(value, key, order, f"{name}.{key}") for key, value in state.items()}


def _reorder(value: Any, key: str, order: Sequence[int], name: str) -> Any:
    if isinstance(value, Mapping):
        return type(value)({k: _reorder(v, k, order, f"{name}.{k}") for k, v in value.items()})  # type: ignore[call-arg]
    if key == _NESTED:
        return [reorder_schedule(nested, order, f"{name}[{at}]") for at, nested in enumerate(value)]
    if not isinstance(value, list | tuple) or len(value) != len(order) or key in _OTHER_LISTS:
        return value
    if key in _LISTS_OF_GROUPS:
        return type(value)(value[number] for number in order)
    raise CheckpointMismatchError(
        f"the optimizer's parameter groups are those of the checkpoint in the order {list(order)}, and {name} is a "
        f"list of {len(value)} values that may go with them; build the groups in the order of the saved run"
    )
