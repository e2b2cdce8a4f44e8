"""The configuration of a restart, compared with what is in use after a load.

A load brings back the hyperparameters of the optimizer's groups and the settings of the schedule.
So a process that was started with others goes on without them. It knows what it was started with:
the groups and the schedule as they were built, before the load. `Configured` notes them, and tells
afterwards which of them are not in use.

The shape of a `LambdaLR` is code, which no checkpoint holds, so the shape of this process is used.
A load of another horizon (more epochs) then changes the rate.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from ...utils.compat.torch_private import note_rates, schedules_inside
from ...utils.errors import ConfigError
from ...utils.logging import get_logger

logger = get_logger(__name__)

_PROGRESS = {
    "last_epoch",
    "base_lrs",
    "T_cur",
    "T_i",
    "best",
    "num_bad_epochs",
    "cooldown_counter",
}
"""Public attributes of torch's schedules that are no settings, and the rates, which are compared by
group.
"""
_HYPERPARAMETERS = (
    "lr",
    "initial_lr",
    "weight_decay",
    "decoupled_weight_decay",
    "betas",
    "eps",
    "beta2_decay",
    "momentum",
    "momentum_decay",
    "dampening",
    "nesterov",
    "amsgrad",
    "alpha",
    "rho",
    "lambd",
    "t0",
    "lr_decay",
    "centered",
    "etas",
    "step_sizes",
    "ns_coefficients",
    "ns_steps",
    "adjust_lr_fn",
    "max_lr",
    "min_lr",
    "max_momentum",
    "base_momentum",
)
"""Names in groups that are hyperparameters in every optimizer. Others may be progress:
schedule-free AdamW counts steps there.
"""
_CYCLED = ("beta1", "beta2", "momentum")
"""Hyperparameters that `OneCycleLR` and `CyclicLR` change in every step, besides the rate."""


class Setting(NamedTuple):
    """A setting with two values, as text: before and after, or in use and configured."""

    name: str
    one: str
    other: str

    def of(self, owner: str) -> "Setting":
        """The same setting with the text ``owner`` behind its name."""
        return Setting(self.name + owner, self.one, self.other)


class Settled(NamedTuple):
    """What a load means for the configuration of this process.

    ``changed`` has the settings that are other ones than in the saved run, as (name, saved, in
    use). ``kept`` has those that were configured and are not in use, as (name, in use, configured).
    """

    changed: list[Setting]
    kept: list[Setting]


def inner_schedule(scheduler: Any) -> Any:
    """The schedule inside Accelerate's wrapper. Any other one is returned as it is."""
    inner = getattr(scheduler, "scheduler", None)
    if inner is None:
        return scheduler
    return inner


def require_own_schedule(
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
) -> None:
    """Raise `ConfigError` if ``scheduler`` changes the rates of another optimizer. Wrappers share
    their groups.
    """
    schedule = inner_schedule(scheduler)
    other = getattr(schedule, "optimizer", None)
    if optimizer is None or other is None:
        return
    own = {id(group) for group in optimizer.param_groups}
    if not any(id(group) in own for group in other.param_groups):
        raise ConfigError(
            f"the schedule ({type(schedule).__name__}) belongs to another "
            f"{type(other).__name__} than the optimizer that it is saved with, so it does not "
            "change the rates of that one; expected a schedule that was built with this "
            "optimizer. Build it again after the optimizer"
        )


def describe_schedule(scheduler: Any) -> str:
    """Describe the shape of a schedule: its class, or the function of a `LambdaLR` with the
    arguments of a partial.
    """
    schedule = inner_schedule(scheduler)
    if isinstance(schedule, LambdaLR):
        factor = schedule.lr_lambdas[0]
        if isinstance(factor, partial):
            plain = []
            for name, value in sorted(factor.keywords.items()):
                if isinstance(value, int | float | str):
                    plain.append(f"{name}={value}")
            return f"{factor.func.__name__}({', '.join(plain)})"
    return type(schedule).__name__


class Configured:
    """Hyperparameters and schedule of a process, as they were built. Make it before the load.

    Args:
        optimizer: the optimizer that is loaded. None: there is nothing to compare.
        scheduler: its schedule, or None.
        saved_schedule: whether the checkpoint has the state of a schedule.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any,
        saved_schedule: bool,
    ) -> None:
        self._optimizer = optimizer
        self._schedule = inner_schedule(scheduler)
        self._saved_schedule = saved_schedule
        self._rates_are = self._find_rates()
        self._groups = list(self._read_groups())
        self._settings = _schedule_settings(self._schedule)

    def settle(self, *, is_own: bool = False) -> Settled:
        """Compare with what is in use now, and bring the rates of the next step to this process's
        schedule.

        Call it once, after the load and after the restored rates were checked. If the schedule has
        the shape of the saved one, no rate changes. With a schedule that the checkpoint lacks,
        ``is_own`` decides about the next step: a run of Holdfast never had one, so it begins, but
        another trainer did not save it, so the saved rates stay.
        """
        if self._optimizer is None:
            return Settled([], [])
        changed = []
        if self._schedule is None and self._saved_schedule:
            rate = _plain(self._optimizer.param_groups[0].get("lr"))
            stays = f"left out, so that the learning rate stays at {rate}"
            changed.append(Setting("schedule", "in use", stays))
        elif self._schedule is not None and not self._saved_schedule:
            begins = f"{describe_schedule(self._schedule)} from its own step on"
            changed.append(Setting("schedule", "none", begins))
            if is_own:
                changed += self._use_rates(self._schedule.get_last_lr())
        elif isinstance(self._schedule, LambdaLR):
            changed += self._follow_shape(self._schedule)
        return Settled(changed, self._kept())

    # Rates

    def _find_rates(self) -> str | None:
        """Find where the configured rates are. None if progress may have changed all of them."""
        if hasattr(self._schedule, "base_lrs"):
            return "base_lrs"
        if self._optimizer is None or "initial_lr" in self._optimizer.param_groups[0]:
            return "initial_lr"
        if self._schedule is None:
            return "lr"
        return None

    def _follow_shape(self, schedule: LambdaLR) -> list[Setting]:
        """Compare the restored rates with those that the function of ``schedule`` has for the same
        step.
        """
        factors: Sequence[Any] = schedule.lr_lambdas
        if not all(isinstance(factor, FunctionType | partial) for factor in factors):
            return []  # an object, whose attributes were restored

        # Rates of the same step, as saved and as this process would have them.
        saved = [float(rate) for rate in schedule.get_last_lr()]
        rates = []
        are_close = True
        for was, base, factor in zip(saved, schedule.base_lrs, factors, strict=True):
            rate = float(base) * factor(schedule.last_epoch)
            rates.append(rate)
            are_close = are_close and math.isclose(was, rate, rel_tol=1e-9)
        if are_close:
            return []
        if all(isinstance(factor, partial) for factor in factors):
            return self._use_rates(rates)

        # A function of the user may depend on more than the step, so the next step keeps the saved
        # rate.
        what = "learning rate from the second step on"
        return [Setting(what, str(saved[0]), str(rates[0]))]

    def _use_rates(self, rates: Sequence[Any]) -> list[Setting]:
        assert self._optimizer is not None and self._schedule is not None
        groups = self._optimizer.param_groups
        before = [float(group["lr"]) for group in groups]
        after = [float(rate) for rate in rates]
        # A group that was added after the schedule was built keeps its rate.
        for group, rate in zip(groups, after, strict=False):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        note_rates(self._schedule, [group["lr"] for group in groups])

        # Several groups may have the same change.
        changes = dict.fromkeys(zip(before, after, strict=False))
        return [Setting("learning rate", str(was), str(now)) for was, now in changes if was != now]

    # Settings

    def _read_groups(self) -> Iterator[dict[str, Any]]:
        if self._optimizer is None:
            return
        schedules = _each(self._schedule)
        is_cycled = any(getattr(each, "cycle_momentum", False) for each in schedules)
        for number, group in enumerate(self._optimizer.param_groups):
            values = {name: _plain(group[name]) for name in _HYPERPARAMETERS if name in group}
            values["beta1"], values["beta2"] = values.pop("betas", None) or (None, None)

            # The rate is the configured one, wherever that is.
            rates = {name: values.pop(name, None) for name in ("lr", "initial_lr")}
            if self._rates_are == "base_lrs":
                # A group that was added after the schedule was built has none.
                base_lrs = self._schedule.base_lrs
                if number < len(base_lrs):
                    values["lr"] = _plain(base_lrs[number])
            elif self._rates_are is not None:
                values["lr"] = rates[self._rates_are]

            # Values that change in every step are no configuration.
            if is_cycled or "max_momentum" in values:
                for name in _CYCLED:
                    values.pop(name, None)
            yield values

    def _kept(self) -> list[Setting]:
        # Hyperparameters that are not in use, and the groups that they are of.
        found: dict[Setting, list[str]] = {}
        groups = list(self._read_groups())
        for number, (configured, now) in enumerate(zip(self._groups, groups, strict=True)):
            for name, value in configured.items():
                # The momentum is not there if a schedule that was left out has changed it.
                is_known = value is not None and name in now
                if is_known and not _same(now[name], value):
                    setting = Setting(name, str(now[name]), str(value))
                    found.setdefault(setting, []).append(str(number))
        kept = []
        for setting, numbers in found.items():
            where = ""
            if len(numbers) < len(groups):
                where = f" of group {', '.join(numbers)}"
            kept.append(setting.of(where))

        # Settings of the schedule.
        settings = _schedule_settings(self._schedule)
        for name, value in self._settings.items():
            if name in settings and not _same(settings[name], value):
                now = str(settings[name])
                kept.append(Setting(f"{name} of the schedule", now, str(value)))
        return kept


def _each(schedule: Any) -> Iterator[Any]:
    """``schedule`` and all schedules inside of it."""
    if schedule is not None:
        yield schedule
        for nested in schedules_inside(schedule):
            yield from _each(nested)


def _schedule_settings(schedule: Any) -> dict[str, Any]:
    """Settings of torch's schedules by name. A class of the user may count steps in any attribute,
    so it has none.
    """
    found: dict[str, Any] = {}
    for number, each in enumerate(_each(schedule)):
        if type(each).__module__ != "torch.optim.lr_scheduler":
            continue
        state = each.state_dict()
        settings = {}
        for name, value in state.items():
            if name[0] != "_" and name not in _PROGRESS:
                settings[name] = value
        if "_milestones" in state:
            settings["milestones"] = state["_milestones"]

        # Attributes of objects that are the functions of a `LambdaLR`.
        for at, attributes in enumerate(settings.pop("lr_lambdas", ())):
            for name, value in (attributes or {}).items():
                settings[f"lr_lambdas[{at}].{name}"] = value

        # Schedules inside of a schedule have their number.
        prefix = f"{number}." if number else ""
        for name, value in settings.items():
            found[prefix + name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    return value


def _same(
    one: Any,
    other: Any,
) -> bool:
    are_nan = one != one and other != other
    return bool(one == other) or are_nan


def warn_of_settings(
    what: Any,
    changed: Sequence[Setting],
    kept: Sequence[Setting],
) -> None:
    """Log one warning of all settings here that are not those of the saved run ``what``."""
    parts = []
    if changed:
        changes = "; ".join(f"{name} was {was}, is {now}" for name, was, now in changed)
        parts.append(
            "In use from now on, so that the run goes on with other numbers than without the "
            f"restart: {changes}. Set them before load as they were, unless the change is meant"
        )
    if kept:
        differences = "; ".join(f"{name} is {now}, configured {own}" for name, now, own in kept)
        parts.append(
            "Configured here, but not in use, because the run goes on with what it saved: "
            f"{differences}. To change them, set them after load in optimizer.param_groups, and lr "
            "also in base_lrs of the schedule: see 'Another configuration' in "
            "docs/saving-and-resuming.md"
        )
    if parts:
        logger.warning("%s was saved with other settings. %s", what, ". ".join(parts))
