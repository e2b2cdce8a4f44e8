"""A restart with another configuration: one warning says what it changes and what it does not, and
nothing is lost.
"""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from holdfast.engine import FinetuneSpec, FSDPEngine, OptimizerConfig, TrainEngineConfig
from holdfast.engine.api import SaveLoadMeta, StepInfo
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.training.optimizer import schedule_of
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.recover.resuming.check import warn_of_configuration
from holdfast.utils.errors import CheckpointMismatchError, ConfigError
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.helpers import run_ranks
from tests.recover.runs import make_batch, make_handler, names, square_loss, step_info, token_count

pytestmark = pytest.mark.timeout(60)

Make = Callable[[torch.optim.Optimizer], Any]


class Told(logging.Handler):
    """The warnings about configuration, while it is attached."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "was saved with other settings" in message:
            self.messages.append(message)

    def __enter__(self) -> list[str]:
        logging.getLogger("holdfast").addHandler(self)
        return self.messages

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("holdfast").removeHandler(self)


# Engines

SAVED: dict[str, Any] = {"lr": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 1}


def _live(
    root: str,
    steps: range,
    epochs: int = 2,
    optimizer: dict[str, Any] | None = None,
    before: str = "",
    after: str = "",
    trial: str = "t",
    **keys: Any,
) -> Any:
    """Warnings of a load, and the rates of the steps after it. Every epoch has 4 steps.

    ``before`` and ``after`` are code that runs before and after the load.
    """
    spec = FinetuneSpec(total_train_epochs=epochs, dataset_size=8, train_batch_size=2)
    config = TrainEngineConfig(
        f"{root}/model", path=f"{root}/model", dtype=keys.pop("dtype", "float32"), **keys
    )
    config.optimizer = OptimizerConfig(**SAVED | (optimizer or {}))
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, spec)
    exec(before, scope := {"engine": engine, "SaveLoadMeta": SaveLoadMeta})
    handler = RecoverHandler(
        RecoverConfig("e", trial, fileroot=root, freq_steps=1, async_save=False), spec
    )
    rates = []
    with Told() as told, handler:
        info = handler.load(engine)
        assert (info is None) == (steps.start == 0)
        exec(after, scope)
        for step in steps:
            stats = engine.train_batch(make_batch([step, step + 1]), square_loss, token_count)
            rates.append(stats["lr"])
            engine.step_lr_scheduler()
            handler.dump(engine, StepInfo.at(step, spec.steps_per_epoch))
    weights = [param.full_tensor().detach() for param in engine.model.parameters()]  # type: ignore[attr-defined]
    engine.destroy()
    return told, rates, weights


def _other_hyperparameters(rank: int, world_size: int, root: str) -> Any:
    _live(root, range(3))
    changes = {"lr": 2e-2, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6}
    other = changes | {"gradient_clipping": 0.5, "warmup_steps": 2}
    mb_spec = TrainEngineConfig().mb_spec
    mb_spec.n_mbs = 2
    keys = {"temperature": 2.0, "mb_spec": mb_spec, "enable_tree_training": True}
    return _live(root, range(3, 4), optimizer=other, **keys)


def test_one_warning_has_every_key_of_an_engine_that_the_restart_changes_or_does_not(
    tmp_path: Path,
) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    (((warning,), _, _),) = run_ranks(_other_hyperparameters, 1, str(tmp_path))
    assert warning.startswith("global_step_2 was saved with other settings")
    changed, kept = warning.split("Configured here, but not in use")
    for text in (
        "optimizer.gradient_clipping of default was 1.0, is 0.5",
        "temperature of default was 1.0, is 2.0",
        "mb_spec.n_mbs of default was 1, is 2",
        "enable_tree_training of default was False, is True",
        "warmup_steps=1), is lr_factor",
        "learning rate of default was 0.0",
    ):
        assert text in changed, text
    for text in (
        "lr of default is 0.01, configured 0.02",
        "weight_decay of default is 0.01, configured 0.1",
        "beta1 of default is 0.9, configured 0.8",
        "beta2 of default is 0.999, configured 0.99",
        "eps of default is 1e-08, configured 1e-06",
        "docs/saving-and-resuming.md",
    ):
        assert text in kept, text
    assert kept.count("configured ") == 5


def _longer(rank: int, world_size: int, root: str) -> Any:
    untouched = _live(f"{root}/untouched", range(6))
    _live(f"{root}/same", range(3))
    same = _live(f"{root}/same", range(3, 6))
    _live(f"{root}/longer", range(3))
    longer = _live(f"{root}/longer", range(3, 6), epochs=4)
    planned = _live(f"{root}/planned", range(6), epochs=4)
    exact = all(torch.equal(one, other) for one, other in zip(untouched[2], same[2], strict=True))
    return (
        exact,
        same[0],
        untouched[1][3:] == same[1],
        longer[0],
        longer[1],
        planned[1][3:],
        untouched[1][3],
    )


@pytest.mark.slow
def test_more_epochs_stretch_the_schedule_from_the_next_step_on_and_both_rates_are_told(
    tmp_path: Path,
) -> None:
    for name in ("untouched", "same", "longer", "planned"):
        write_model_folder(tmp_path / name / "model", tiny_qwen3())
    ((exact, quiet, same_rates, told, rates, planned, before),) = run_ranks(
        _longer, 1, str(tmp_path)
    )
    assert exact and same_rates and quiet == []
    assert rates == planned
    (warning,) = told
    assert f"learning rate of default was {before}, is {planned[0]}" in warning
    assert "total_steps=8, warmup_steps=1), is lr_factor" in warning and "total_steps=16" in warning
    assert "Configured here" not in warning


PAGE = (Path(__file__).parents[3] / "docs" / "saving-and-resuming.md").read_text()


def documented(title: str) -> str:
    """The code of a section of the page."""
    below = re.split(rf"^#+ {re.escape(title)}\n", PAGE, maxsplit=1, flags=re.MULTILINE)[1]
    return re.split(r"^```(?:python)?\n", below, maxsplit=2, flags=re.MULTILINE)[1]


def _set_after_load(rank: int, world_size: int, root: str) -> Any:
    lines = documented("Another configuration")
    _live(root, range(2))
    wanted = {"lr": 2e-5, "weight_decay": 0.1}
    first = _live(root, range(2, 4), optimizer=wanted, after=lines)
    second = _live(root, range(4, 6), optimizer=wanted, after=lines)
    return first[0], first[1] + second[1], second[0]


def test_the_documented_lines_set_hyperparameters_once_and_for_all(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    ((told, rates, quiet),) = run_ranks(_set_after_load, 1, str(tmp_path))
    assert (
        "lr of default is 0.01, configured 2e-05" in told[0]
        and "weight_decay" in told[0]
        and quiet == []
    )
    factor = schedule_of(OptimizerConfig(**SAVED), 8)
    assert rates == pytest.approx([2e-5 * factor(step) for step in range(2, 6)])


def _new_phase(rank: int, world_size: int, root: str) -> Any:
    line = documented("A new phase").replace(
        "runs/experiment/trial/recover/global_step_7", f"{root}/e/t/recover/global_step_2"
    )
    assert root in line
    _, _, trained = _live(root, range(3))
    moments = (
        "assert not any(s['exp_avg'].any() for s in engine.dcp_state().optimizer.state.values())"
    )
    start = _live(root, range(0), trial="new", before=line, after=moments)
    same = all(torch.equal(one, other) for one, other in zip(trained, start[2], strict=True))
    first = _live(root, range(2), trial="new", before=line, optimizer={"lr": 3e-3})
    second = _live(root, range(2, 3), trial="new", before=line, optimizer={"lr": 3e-3})
    return same, start[0] + first[0] + second[0], first[1] + second[1]


def test_a_new_phase_has_the_weights_of_a_generation_with_fresh_moments_and_its_own_schedule(
    tmp_path: Path,
) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    ((same, told, rates),) = run_ranks(_new_phase, 1, str(tmp_path))
    factor = schedule_of(OptimizerConfig(**SAVED), 8)
    assert (
        same and told == [] and rates == pytest.approx([3e-3 * factor(step) for step in range(3)])
    )


def _load_directly(rank: int, world_size: int, root: str) -> Any:
    spec = FinetuneSpec(total_train_epochs=2, dataset_size=8, train_batch_size=2)
    messages = []
    for lr in (1e-2, 3e-2):
        engine = FSDPEngine(
            TrainEngineConfig(
                path=f"{root}/model", dtype="float32", optimizer=OptimizerConfig(lr=lr)
            )
        )
        engine.create_process_group()
        engine.initialize(None, spec)
        meta = SaveLoadMeta(f"{root}/dcp", "dcp", with_optim=True)
        if lr == 1e-2:
            engine.save(meta)
        with Told() as told:
            engine.load(meta)
        messages.append(told)
        engine.destroy()
    return messages


def test_a_load_without_a_handler_warns_too_on_one_rank(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    ((quiet, (warning,)), (quiet_1, silent)) = run_ranks(_load_directly, 2, str(tmp_path))
    assert quiet == quiet_1 == silent == []
    assert (
        f"{tmp_path}/dcp was saved with other settings" in warning
        and "lr is 0.01, configured 0.03" in warning
    )


def test_a_coefficient_that_a_load_brings_back_adapted_is_not_called_in_use(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fixed = {"kl_ctl of actor": "0.1", "kl_target of actor": "None"}
    adaptive = fixed | {"kl_target of actor": "0.02"}
    for now, text in (
        (fixed, "kl_ctl of actor was 0.1, is 0.3"),
        (adaptive, "is the adapted one, configured 0.3"),
    ):
        caplog.clear()
        warn_of_configuration("global_step_1", now, now | {"kl_ctl of actor": "0.3"}, {})
        assert text in caplog.text


# Models with an optimizer and a schedule


class Plain:
    """A model of two groups without an engine."""

    def __init__(
        self,
        make: Make | None,
        lr: float = 0.1,
        weight_decay: float = 0.0,
        kind: Any = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        groups = [
            {"params": self.model[0].parameters()},
            {"params": self.model[1].parameters(), "weight_decay": 0.5},
        ]
        self.optimizer: torch.optim.Optimizer = kind(
            groups, lr=lr, weight_decay=weight_decay, **options
        )
        self.scheduler = None if make is None else make(self.optimizer)

    @property
    def parts(self) -> Any:
        return self.model, self.optimizer, self.scheduler

    def step(self) -> float:
        """Train once and return the rate of the step."""
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.model(torch.ones(2, 3)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(1.0)
        elif self.scheduler is not None:
            self.scheduler.step()
        return rate


def live(
    root: Path, plain: Plain, steps: range, engine: Any = None
) -> tuple[list[str], list[float]]:
    """Warnings and rates of a run that is resumed."""
    handler = make_handler(root, freq_steps=1)
    rates = []
    with Told() as told, handler:
        assert (handler.load(engine or plain.parts) is None) == (steps.start == 0)
        for step in steps:
            rates.append(plain.step())
            handler.dump(engine or plain.parts, step_info(step))
    return told, rates


def cosine(steps: int) -> Make:
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


QUIET: dict[str, Make | None] = {
    "none": None,
    "LambdaLR": halving,
    "CosineAnnealingLR": cosine(9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(
        o, T_0=2, T_mult=2
    ),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=9),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.1, max_lr=1.0, step_size_up=2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.8)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("none", "OneCycleLR") else pytest.param(name, marks=pytest.mark.slow)
        for name in QUIET
    ],
)
def test_the_same_configuration_goes_on_exactly_without_a_word(name: str, tmp_path: Path) -> None:
    told, expected = live(tmp_path / "untouched", Plain(QUIET[name]), range(6))
    live(tmp_path / "run", Plain(QUIET[name]), range(3))
    again, rates = live(tmp_path / "run", Plain(QUIET[name]), range(3, 6))
    assert told == again == [] and rates == expected[3:]


class CountsInGroups(torch.optim.AdamW):
    """An optimizer whose groups hold progress, as schedule-free ones have it."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_progress_in_groups_is_no_configuration(tmp_path: Path) -> None:
    def counting() -> Plain:
        plain = Plain(None)
        plain.optimizer = CountsInGroups(plain.model.parameters(), lr=0.1)
        plain.optimizer.param_groups[0]["k"] = 0
        return plain

    live(tmp_path, counting(), range(2))
    again = counting()
    assert live(tmp_path, again, range(2, 3))[0] == [] and again.optimizer.param_groups[0]["k"] == 3


def phases(*kinds: Make) -> Make:
    milestones = list(range(1, len(kinds)))
    return lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [make(optimizer) for make in kinds], milestones
    )


@pytest.mark.parametrize(
    "other", [phases(cosine(4), cosine(4), cosine(4)), phases(cosine(4), halving)]
)
def test_another_row_of_schedules_is_refused_before_anything_changes(
    other: Make, tmp_path: Path
) -> None:
    live(tmp_path, Plain(phases(cosine(4), cosine(4))), range(2))
    plain = Plain(other)
    before = [param.clone() for param in plain.model.parameters()]
    with pytest.raises(
        CheckpointMismatchError, match=r"schedules inside, this one has 3|has no 'lr_lambdas'"
    ):
        live(tmp_path, plain, range(2, 3))
    assert all(
        torch.equal(one, two) for one, two in zip(before, plain.model.parameters(), strict=True)
    )
    assert names(tmp_path) == ["global_step_0", "global_step_1"]


CHANGES: dict[str, tuple[Callable[[], Plain], Callable[[], Plain], list[str]]] = {
    "rates": (
        lambda: Plain(None),
        lambda: Plain(None, lr=0.2),
        ["lr of default is 0.1, configured 0.2"],
    ),
    "rates of a schedule": (
        lambda: Plain(halving),
        lambda: Plain(halving, lr=0.2),
        ["lr of default is 0.1, configured 0.2"],
    ),
    "one group": (
        lambda: Plain(halving),
        lambda: Plain(halving, weight_decay=0.3, betas=(0.9, 0.5)),
        [
            "weight_decay of group 0 of default is 0.0, configured 0.3",
            "beta2 of default is 0.999, configured 0.5",
        ],
    ),
    "the horizon of a schedule with its own": (
        lambda: Plain(cosine(9)),
        lambda: Plain(cosine(18)),
        ["T_max of the schedule of default is 9, configured 18"],
    ),
    "a function with another horizon": (
        lambda: Plain(halving),
        lambda: Plain(
            lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        ),
        ["learning rate from the second step on of default was 0.0125, is 0.025"],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tuples_and_trainers_are_told_what_is_not_in_use(name: str, tmp_path: Path) -> None:
    saved, restarted, expected = CHANGES[name]
    live(tmp_path, saved(), range(3))
    other = restarted()
    as_trainer = SimpleNamespace(**vars(other), lr_scheduler=other.scheduler)
    told, _ = live(tmp_path, other, range(3, 4), as_trainer if name == "one group" else None)
    assert len(told) == 1 and [text for text in expected if text not in told[0]] == []
    assert told[0].count(", configured ") == sum(", configured " in text for text in expected)


# Schedules that come, go, or are another optimizer's


def test_a_schedule_that_a_restart_adds_starts_at_its_own_step_and_the_generation_stays(
    tmp_path: Path,
) -> None:
    live(tmp_path, Plain(None), range(3))
    told, rates = live(tmp_path, Plain(halving, lr=0.2), range(3, 6))
    assert rates == [0.2, 0.1, 0.05]
    assert "schedule of default was none, is LambdaLR from its own step on" in told[0]
    assert "learning rate of default was 0.1, is 0.2" in told[0] and len(told) == 1
    assert names(tmp_path)[-1] == "global_step_5" and not list(
        tmp_path.glob("e/t/recover/.rejected*")
    )


def test_a_schedule_that_was_advanced_before_the_load_goes_on_from_there(tmp_path: Path) -> None:
    live(tmp_path, Plain(None), range(3))
    plain = Plain(halving)
    for _ in range(3):
        plain.optimizer.step()
        plain.scheduler.step()  # type: ignore[union-attr]
    _, rates = live(tmp_path, plain, range(3, 5))
    assert rates == [0.1 / 8, 0.1 / 16]


SGD: dict[str, Any] = {"kind": torch.optim.SGD, "momentum": 0.9}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LambdaLR", {}),
        ("OneCycleLR", {}),
        ("OneCycleLR", SGD),
        ("CyclicLR", {}),
        ("CyclicLR", SGD),
    ],
)
def test_a_schedule_that_a_restart_leaves_out_leaves_the_rate_where_it_is_and_is_told(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    make = QUIET[name]
    _, all_rates = live(tmp_path / "untouched", Plain(make, **options), range(4))
    last = all_rates[3]
    live(tmp_path, Plain(make, **options), range(3))
    told, rates = live(tmp_path, Plain(None, **options), range(3, 5))
    assert rates == [last, last] and len(told) == 1
    assert (
        f"schedule of default was in use, is left out, so that the learning rate stays at {last}"
        in told[0]
    )
    assert f"lr of default is {last}, configured 0.1" in told[0]
    told, rates = live(tmp_path, Plain(make, **options), range(5, 7))  # and back
    assert rates == all_rates[:2] and f"was none, is {name}" in told[0]
    assert not list(tmp_path.glob("e/t/recover/.rejected*"))


class GroupAddedLater(Plain):
    """A model whose second group is given to the optimizer after its schedule was built, as for
    gradual unfreezing, or before.
    """

    def __init__(self, make: Make | None, later: bool) -> None:
        super().__init__(None)
        self.optimizer = torch.optim.AdamW(self.model[0].parameters(), lr=0.1)
        second = {"params": list(self.model[1].parameters()), "lr": 0.02}
        if not later:
            self.optimizer.add_param_group(second)
        self.scheduler = None if make is None else make(self.optimizer)
        if later:
            self.optimizer.add_param_group(second)


def exponential(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.8)


@pytest.mark.parametrize(("saved_later", "resumed_later"), [(True, True), (True, False)])
def test_a_group_that_was_added_after_the_schedule_was_built_goes_on_exactly(
    saved_later: bool, resumed_later: bool, tmp_path: Path
) -> None:
    untouched = GroupAddedLater(exponential, saved_later)
    _, expected = live(tmp_path / "untouched", untouched, range(6))
    live(tmp_path / "run", GroupAddedLater(exponential, saved_later), range(3))
    resumed = GroupAddedLater(exponential, resumed_later)
    told, rates = live(tmp_path / "run", resumed, range(3, 6))
    assert told == [] and rates == expected[3:]
    for one, other in zip(resumed.model.parameters(), untouched.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_schedule_that_a_restart_adds_leaves_a_later_group_its_rate(tmp_path: Path) -> None:
    live(tmp_path, GroupAddedLater(None, True), range(2))
    resumed = GroupAddedLater(exponential, True)
    told, rates = live(tmp_path, resumed, range(2, 4))
    assert rates == [0.1, 0.1 * 0.8] and "schedule of default was none" in told[0]
    assert resumed.optimizer.param_groups[1]["lr"] == pytest.approx(0.02 * 0.8**2)


def test_a_schedule_of_another_optimizer_is_refused_at_the_start(tmp_path: Path) -> None:
    one, other = Plain(halving), Plain(halving)
    mixed = (one.model, one.optimizer, other.scheduler)
    with pytest.raises(
        ConfigError, match=r"LambdaLR\) belongs to another AdamW than .* Build it again"
    ):
        DCPState(*mixed)
    for async_save in (True, False):
        with pytest.raises(ConfigError, match="belongs to another AdamW"):
            make_handler(tmp_path, freq_steps=1, async_save=async_save).load({"model": mixed})
    assert names(tmp_path) == []
