"""Optimizer state and parameter groups, as a checkpoint stores them under the names of the
parameters.

State: most optimizers keep DTensors for sharded parameters. Some work on the local shards and keep
plain tensors for them. These are stored as the shards they are, and come back as plain tensors. A
plain tensor of another shape may differ by rank, so it is refused when it is saved. A number (a
step count) is assumed to be the same on all ranks.

Groups: saved groups are matched by their parameters, so groups may be built in another order. Lists
of schedulers with one value per group follow that order. If it is not known whether a list belongs
to the groups, the load fails.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...utils.compat.torch_private import like_sharded, made_sharded
from ...utils.errors import CheckpointMismatchError, ConfigError
from ...utils.logging import get_logger
from ..memory.tensors import local_tensor
from ..training.optimizer import keeps_state, materialize_state

logger = get_logger(__name__)

PREFIX = "optim.state."
"""Prefix of the dotted names ``optim.state.<parameter>.<entry>``."""

Parameters = Mapping[str, nn.Parameter]
Groups = Sequence[Mapping[str, Any]]

_CLASSES = (Tensor, nn.Parameter)
"""Classes of tensors that are nothing but their memory. Others may wrap tensors, or encode
something in the bits.
"""


def tensor_entries(
    optimizer: Optimizer,
    params: Parameters,
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of the optimizer state: parameter name -> entry -> tensor.

    A plain tensor with the shape of the local shard is returned as a DTensor. Others, such as
    ``step``, stay plain.
    """
    found = {}
    for name, tensors in _entries(optimizer, params, is_tensor=True).items():
        found[name] = {key: _as_shard(params[name], value) for key, value in tensors.items()}
    return found


def plain_entries(
    optimizer: Optimizer,
    params: Parameters,
) -> dict[str, dict[str, Any]]:
    """Return the rest of the optimizer state: parameter name -> entry -> value that is not a
    tensor.
    """
    return _entries(optimizer, params, is_tensor=False)


def _entries(
    optimizer: Optimizer,
    params: Parameters,
    is_tensor: bool,
) -> dict[str, dict[str, Any]]:
    found = {}
    for name, _, state in _states(optimizer, params):
        entries = {
            key: value for key, value in state.items() if isinstance(value, Tensor) == is_tensor
        }
        if entries:
            found[name] = entries
    return found


def local_entries(
    optimizer: Optimizer,
    params: Parameters,
) -> dict[str, list[str]]:
    """Parameter name -> names of the entries of its state that are plain tensors of this rank's
    shard.
    """
    found = {}
    for name, param, state in _states(optimizer, params):
        if not isinstance(param, DTensor):
            continue
        keys = [key for key, value in state.items() if _is_plain(value) and _is_shard(param, value)]
        if keys:
            found[name] = keys
    return found


def check_entries(
    optimizer: Optimizer,
    params: Parameters,
) -> None:
    """Check that the state can be stored so that every rank gets back its own values.

    Raises:
        ConfigError: there is state for a tensor that is no parameter of the model, or in another
            optimizer inside, a tensor of an unknown class, or one that ranks could hold
            differently.
    """
    # Only parameters of the model have names.
    own = {id(param) for param in params.values()}
    strangers = [key for key in optimizer.state if id(key) not in own]
    if strangers:
        first = strangers[0]
        what = repr(first)
        if isinstance(first, Tensor):
            what = f"a tensor {list(first.shape)}"
        raise ConfigError(
            f"the optimizer has state for {what}, which is no parameter of the model "
            f"({len(strangers)} such) and would be lost; make it one, or give it an optimizer of "
            "its own"
        )

    # State in an optimizer inside of a wrapper would be lost, too, unless a load reaches it.
    optimizer_name = type(optimizer).__name__
    for inner in _optimizers_inside(optimizer, {id(optimizer)}):
        if inner.state and inner.state is not optimizer.state:
            raise ConfigError(
                f"{optimizer_name} keeps state in an optimizer inside ({type(inner).__name__}), "
                "where a checkpoint would miss it; expected all of it in optimizer.state. Use one "
                "without others inside: FSDP2 shards its state"
            )

    for name, param, state in _states(optimizer, params):
        odd = [key for key in state if not isinstance(key, str)]
        if odd:
            raise ConfigError(
                f"{optimizer_name} calls state of {name} {odd[0]!r}; expected a string"
            )

        # The bits of a tensor must be its values.
        for key, value in state.items():
            kind = type(local_tensor(value))
            if isinstance(value, Tensor) and kind not in _CLASSES:
                raise ConfigError(
                    f"{optimizer_name} keeps {key!r} of {name} as a "
                    f"{kind.__module__}.{kind.__qualname__}, whose values a checkpoint cannot "
                    "hold; expected a Tensor or a DTensor of one. Use an optimizer with "
                    "plain state: torch's own, or Holdfast's (config key 'optimizer.type')"
                )

        # A plain tensor must be the same on all ranks, or this rank's shard.
        if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
            continue
        for key, value in state.items():
            if _is_plain(value) and value.ndim and not _is_shard(param, value):
                raise ConfigError(
                    f"{optimizer_name} keeps {key!r} of {name} as a plain tensor "
                    f"{list(value.shape)}, which may differ by rank; expected a DTensor, a "
                    f"number, or a tensor {list(param.to_local().shape)} as this rank's shard of "
                    f"the parameter {list(param.shape)}"
                )


def _optimizers_inside(optimizer: Optimizer, seen: set[int]) -> Iterator[Optimizer]:
    for value in vars(optimizer).values():
        held = [value]
        if isinstance(value, list | tuple):
            held = list(value)
        elif isinstance(value, Mapping):
            held = list(value.values())
        for inner in held:
            if isinstance(inner, Optimizer) and id(inner) not in seen:
                seen.add(id(inner))
                yield inner
                yield from _optimizers_inside(inner, seen)


def on_meta(param: nn.Parameter) -> nn.Parameter:
    """A parameter like ``param`` without memory for its values, sharded in the same way."""
    local = torch.empty_like(local_tensor(param), device="meta")
    twin = like_sharded(local, param) if isinstance(param, DTensor) else local
    return nn.Parameter(twin, requires_grad=param.requires_grad)


def propose_state(
    optimizer: Optimizer,
    params: Parameters,
    names: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> dict[str, Tensor]:
    """Allocate zeroed state that a checkpoint holds and `materialize_state` does not know.

    Takes dotted name -> shape and dtype, and returns dotted name -> tensor, for `adopt_state`. An
    entry of the parameter's shape is sharded like the parameter, any other is a plain tensor. A
    number takes the dtype of the checkpoint, because torch's numbers have the default dtype.
    """
    # Parameters that the optimizer has, and those whose step counts are on their device.
    materialize_state(optimizer)
    held = set()
    counts_on_device = set()
    for group in optimizer.param_groups:
        ids = {id(param) for param in group["params"]}
        held |= ids
        if group.get("capturable") or group.get("fused"):
            counts_on_device |= ids

    proposed: dict[str, Tensor] = {}
    for name, (shape, dtype) in names.items():
        # A frozen parameter is taken: it may have been trained before, or be trained later.
        fqn, entry = _split_name(name)
        param = params.get(fqn)
        if param is None or id(param) not in held:
            continue

        state = optimizer.state.get(param)
        if not state:
            # Torch keeps step counts on the CPU.
            device = torch.device("cpu")
            if len(shape) or id(param) in counts_on_device:
                device = param.device
            if shape == param.shape:
                zeros = torch.zeros_like(param, dtype=dtype)
            else:
                zeros = torch.zeros(shape, dtype=dtype, device=device)
            proposed[name] = zeros.detach()
            continue

        number = state.get(entry)
        if shape == () and _is_plain(number) and not number.ndim:
            are_floats = number.is_floating_point() and dtype.is_floating_point
            if are_floats and number.dtype != dtype:
                proposed[name] = number.to(dtype)
    return proposed


def describe_entries(
    tensors: Mapping[str, Tensor],
    params: Parameters,
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of each tensor of a whole state, for `propose_state`. This rank's shard of
    optimizer state has the shape of its parameter.
    """
    described = {}
    for name, tensor in tensors.items():
        fqn, _ = _split_name(name)
        param = params.get(fqn)
        if name.startswith(PREFIX) and param is not None:
            tensor = _as_shard(param, tensor)
        described[name] = (tensor.shape, tensor.dtype)
    return described


def check_given(
    optimizer: Optimizer,
    rest: Iterable[str],
    *,
    read_in_place: bool,
) -> None:
    """Check that no state is lost when that of ``optimizer`` is set from tensors in memory.

    Args:
        optimizer: before its state is set.
        rest: dotted names of the given tensors that have none here.
        read_in_place: whether all others are the live ones, into which torch's ``dcp.load`` has
            read.

    Raises CheckpointMismatchError if ``rest`` has state, or ``dcp.load`` may have missed it.
    """
    kind = type(optimizer).__name__
    strangers = sorted(name for name in rest if name.startswith(PREFIX))
    if strangers:
        raise CheckpointMismatchError(
            f"the state has {strangers[0]!r} ({len(strangers)} such), which the {kind} here does "
            "not have; build the optimizer as in the saved run"
        )
    if read_in_place and keeps_state(optimizer) and not any(optimizer.state.values()):
        raise CheckpointMismatchError(
            f"the {kind} here has no state before its first step, and torch's dcp.load reads only "
            "state that is there already; use load_dcp"
        )


def adopt_state(
    optimizer: Optimizer,
    params: Parameters,
    proposed: Mapping[str, Tensor],
    local: Mapping[str, Collection[str]],
) -> None:
    """Install the tensors that `propose_state` allocated. ``local`` is the `local_entries` of the
    saved optimizer.
    """
    # Plain tensors of a sharded parameter, for a warning.
    of_rank_0 = []
    for name, tensor in proposed.items():
        fqn, entry = _split_name(name)
        param = params[fqn]
        value = tensor
        if entry in local.get(fqn, ()):
            value = local_tensor(tensor)
        optimizer.state[param][entry] = value
        if isinstance(param, DTensor) and _is_plain(tensor) and tensor.ndim:
            of_rank_0.append(f"{name} {list(tensor.shape)}")
    if of_rank_0:
        logger.warning(
            "%s (%d such) is not stored as a shard of its parameter: every rank gets what rank 0 "
            "had",
            of_rank_0[0],
            len(of_rank_0),
        )


def _split_name(name: str) -> tuple[str, str]:
    """Names of parameter and entry."""
    # The name of a parameter has dots, the name of an entry has none.
    fqn, _, entry = name.removeprefix(PREFIX).rpartition(".")
    return fqn, entry


def _states(
    optimizer: Optimizer,
    params: Parameters,
) -> Iterator[tuple[str, nn.Parameter, Mapping[str, Any]]]:
    for name, param in params.items():
        state = optimizer.state.get(param)
        if state:
            yield name, param, state


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _is_shard(
    param: DTensor,
    value: Tensor,
) -> bool:
    return value.ndim > 0 and value.shape == param.to_local().shape


def _as_shard(
    param: nn.Parameter,
    value: Tensor,
) -> Tensor:
    """``value`` as a DTensor that is sharded like ``param``, if it is a plain tensor of this rank's
    shard.
    """
    if not isinstance(param, DTensor) or isinstance(value, DTensor) or not _is_shard(param, value):
        return value
    return made_sharded(value, param.device_mesh, param.placements, param.shape, param.stride())


# Parameter groups

# Left out of checkpoints, or named there in another way.
_OWN_OF_GROUP = {
    "params",
    "param_names",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "maximize",
}
_LISTS_OF_GROUPS = {
    "base_lrs",
    "_last_lr",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
    "lr_lambdas",
}
"""Lists in torch's schedulers with one value per group."""
_OTHER_LISTS = {"_milestones", "_schedule_phases"}
_NESTED = "_schedulers"


def describe_groups(
    optimizer: Optimizer,
    params: Parameters,
) -> list[dict[str, Any]]:
    """Hyperparameters of each group, and as ``params`` the names of its parameters."""
    names = {id(param): name for name, param in params.items()}
    described = []
    for group in optimizer.param_groups:
        ids = [id(param) for param in group["params"]]
        entries = hyperparameters(group)
        entries["params"] = [names[key] for key in ids if key in names]
        described.append(entries)
    return described


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a group that a checkpoint brings back."""
    return {key: value for key, value in group.items() if key not in _OWN_OF_GROUP}


def are_named(saved: Groups) -> bool:
    """Whether saved groups name their parameters. Older folders do not."""
    return all("params" in group for group in saved)


def check_untrained(
    optimizer: Optimizer,
    params: Parameters,
    saved: Groups,
) -> None:
    """Check that ``params``, without state in a folder, are missing there because they were not
    trained.

    Raises CheckpointMismatchError if one has state here, and is in no group of the saved optimizer.
    """
    there = set[str]()
    for group in saved:
        there.update(group.get("params", ()))
    trained = {name for name, param in params.items() if optimizer.state.get(param)}
    strangers = sorted(trained - there)
    if strangers:
        raise CheckpointMismatchError(
            f"the checkpoint lacks optimizer state of {strangers[0]} ({len(strangers)} such), "
            "because the optimizer of the saved run did not have it; build the optimizer over the "
            "same parameters"
        )


def match_groups(
    optimizer: Optimizer,
    params: Parameters,
    saved: Groups,
) -> list[int]:
    """For each group of ``optimizer``, the number of the saved group with the same parameters.

    Saved groups without names are matched by position. A parameter that is on one side only is
    ignored.

    Raises:
        CheckpointMismatchError: the parameters are grouped in another way, the number of groups
            differs, or the hyperparameters are those of another optimizer.
    """
    groups = describe_groups(optimizer, params)
    if len(saved) != len(groups):
        raise CheckpointMismatchError(
            f"the checkpoint has {len(saved)} parameter groups, the optimizer {len(groups)}"
        )
    order = list(range(len(groups)))
    if are_named(saved):
        order = _match_by_name(groups, saved)

    # One set of names contains the other: schedulers add names, and versions of torch differ.
    for group, number in zip(groups, order, strict=True):
        here = hyperparameters(group).keys()
        there = hyperparameters(saved[number]).keys()
        if not (here <= there or there <= here):
            raise CheckpointMismatchError(
                f"the checkpoint has an optimizer with {sorted(there - here)} and without "
                f"{sorted(here - there)}; expected that of {type(optimizer).__name__}"
            )
    return order


def _match_by_name(
    groups: Groups,
    saved: Groups,
) -> list[int]:
    there = {name: number for number, group in enumerate(saved) for name in group["params"]}

    # Groups with a common parameter belong together.
    first: dict[int, _Common] = {}  # by number there
    found: dict[int, int] = {}  # number here -> number there
    for here, group in enumerate(groups):
        for name in group["params"]:
            number = there.get(name)
            if number is None:
                continue
            common = first.setdefault(number, _Common(name, here))
            if common.here != here:
                raise _cut_otherwise(
                    common.name,
                    name,
                    f"both in group {number}",
                    f"in groups {common.here} and {here}",
                )
            known = found.setdefault(here, number)
            if known != number:
                raise _cut_otherwise(
                    first[known].name,
                    name,
                    f"in groups {known} and {number}",
                    f"both in group {here}",
                )

    # Empty groups follow each other in the same order.
    empty_here = [number for number, group in enumerate(groups) if not group["params"]]
    empty_there = [number for number, group in enumerate(saved) if not group["params"]]
    if len(empty_here) == len(empty_there):
        found.update(zip(empty_here, empty_there, strict=True))

    # One more group may have other parameters than before.
    rest_here = [number for number in range(len(groups)) if number not in found]
    rest_there = [number for number in range(len(saved)) if number not in found.values()]
    if len(rest_here) > 1:
        raise CheckpointMismatchError(
            f"parameter groups {rest_here} of the optimizer have no parameter that is in a group "
            "of the checkpoint, so it is not known which is which; build the groups from the same "
            "parameters as the saved run"
        )
    found.update(zip(rest_here, rest_there, strict=True))
    return [found[number] for number in range(len(groups))]


def _cut_otherwise(
    one: str,
    other: str,
    there: str,
    here: str,
) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"parameters {one} and {other} are {there} of the checkpoint's parameter groups, but "
        f"{here} of the optimizer's; build the groups from the same parameters as the saved run"
    )


def reorder_schedule(
    state: Mapping[str, Any],
    order: Sequence[int],
    name: str = "scheduler",
) -> dict[str, Any]:
    """A scheduler's ``state_dict()`` with its lists of groups in the order of this optimizer's
    groups.

    ``order`` is the result of `match_groups`. Raises CheckpointMismatchError if the order differs,
    and it is not known whether a list of that length belongs to the groups.
    """
    if list(order) == sorted(order):
        return dict(state)
    return _reorder_entries(state, order, name)


def _reorder_entries(
    state: Mapping[str, Any],
    order: Sequence[int],
    name: str,
) -> dict[str, Any]:
    return {key: _reorder(value, key, order, f"{name}.{key}") for key, value in state.items()}


def _reorder(
    value: Any,
    key: str,
    order: Sequence[int],
    name: str,
) -> Any:
    # Values may be nested.
    if isinstance(value, Mapping):
        entries = _reorder_entries(value, order, name)
        return type(value)(entries)  # type: ignore[call-arg]
    if key == _NESTED:
        return [reorder_schedule(nested, order, f"{name}[{at}]") for at, nested in enumerate(value)]

    # A list is reordered only if it certainly has one value per group.
    is_list = isinstance(value, list | tuple)
    if not is_list or len(value) != len(order) or key in _OTHER_LISTS:
        return value
    if key in _LISTS_OF_GROUPS:
        return type(value)(value[number] for number in order)
    raise CheckpointMismatchError(
        "the optimizer's parameter groups are those of the checkpoint in the order "
        f"{list(order)}, and {name} is a list of {len(value)} values that may go with them; build "
        "the groups in the order of the saved run"
    )


class _Common(NamedTuple):
    """The first parameter that a saved group and one here have in common."""

    name: str
    here: int  # number of the group here
