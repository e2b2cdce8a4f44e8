"""What a dump accepts, a load of the same job takes: also if parameters are frozen or set free
during the run.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.memory.tensors import local_tensor
from holdfast.utils.errors import CheckpointMismatchError, ConfigError
from tests.helpers import run_ranks
from tests.recover.runs import make_handler, newest

pytestmark = pytest.mark.timeout(60)

CHANGE, STEPS = 2, 4

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.5),
}


class Job:
    """A script that trains two layers. ``frozen``: whether its top freezes the first one."""

    def __init__(self, optimizer: str, frozen: bool, sharded: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.model[0].requires_grad_(not frozen)
        if sharded:
            for layer in (*self.model, self.model):
                fully_shard(layer)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.engine = (self.model, self.optimizer)

    def train(self, step: int, free: bool) -> None:
        self.model[0].requires_grad_(free)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        """Weights and moments of this rank."""
        tensors = DCPState(*self.engine).live_tensors()
        return [local_tensor(tensors[name]).clone() for name in sorted(tensors)]


class Case(NamedTuple):
    """When the first layer is frozen: before `CHANGE` or since, and at the top of the script of
    each life.
    """

    free_first: (
        bool  # whether the layer is trained before `CHANGE`. Afterwards it is the other way round
    )
    stop: int  # the first step of the second life
    frozen_at_top: bool  # of the second life


CASES = {
    "trained, and frozen at the top after a restart": Case(True, CHANGE + 1, True),
    "frozen at the top, and trained since a step before the stop": Case(False, CHANGE + 1, True),
    "frozen, and trained from the top after a restart": Case(False, CHANGE, False),
}


def stop_and_resume(root: Path, optimizer: str, case: Case, sharded: bool = False) -> None:
    whole, first, second = (
        Job(optimizer, frozen, sharded) for frozen in (False, False, case.frozen_at_top)
    )
    free = [case.free_first == (step < CHANGE) for step in range(STEPS)]
    for step in range(STEPS):
        whole.train(step, free[step])
    with make_handler(root) as handler:
        assert handler.load(first.engine) is None
        for step in range(case.stop):
            first.train(step, free[step])
        assert handler.dump(first.engine, case.stop - 1, force=True)
    with make_handler(root) as handler:
        assert handler.load(second.engine) is not None
        for step in range(case.stop, STEPS):
            second.train(step, free[step])
        assert handler.dump(second.engine, STEPS - 1, force=True)
    for mine, other in zip(whole.values(), second.values(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_layer_may_be_frozen_or_trained_before_the_load_of_a_restart(
    optimizer: str, case: str, tmp_path: Path
) -> None:
    stop_and_resume(tmp_path, optimizer, CASES[case])


def _stop_and_resume_sharded(rank: int, world_size: int, root: str) -> None:
    for name, case in CASES.items():
        stop_and_resume(Path(root, name), "AdamW", case, sharded=True)


def test_a_sharded_layer_may_be_frozen_or_trained_before_the_load_of_a_restart(
    tmp_path: Path,
) -> None:
    run_ranks(_stop_and_resume_sharded, 2, str(tmp_path))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_load_of_an_older_step_takes_state_back_from_parameters_that_had_none(
    optimizer: str, tmp_path: Path
) -> None:
    job, whole = Job(optimizer, False, False), Job(optimizer, False, False)
    state = DCPState(*job.engine)
    job.train(0, False)
    save_dcp(tmp_path / "c", state)
    for step in (1, 2):
        job.train(step, True)
    load_dcp(tmp_path / "c", state)
    for step in range(3):
        whole.train(step, step > 0)
        if step:
            job.train(step, True)
    for mine, other in zip(whole.values(), job.values(), strict=True):
        assert torch.equal(mine, other)


def test_a_parameter_that_another_optimizer_left_out_is_refused(tmp_path: Path) -> None:
    job = Job("AdamW", True, False)
    saved = torch.optim.AdamW(job.model[1].parameters(), lr=0.1)
    save_dcp(tmp_path / "c", DCPState(job.model, saved))
    job.model.requires_grad_(True)
    with pytest.raises(
        CheckpointMismatchError,
        match=r"lacks optimizer state of 0\.bias \(2 such\), because the opt",
    ):
        load_dcp(tmp_path / "c", DCPState(*job.engine))


def test_state_of_a_parameter_that_the_optimizer_does_not_have_is_refused_with_advice(
    tmp_path: Path,
) -> None:
    job = Job("AdamW", False, False)
    job.train(0, True)
    save_dcp(tmp_path / "c", DCPState(*job.engine))
    fewer = torch.optim.AdamW(job.model[1].parameters(), lr=0.1)
    with pytest.raises(
        CheckpointMismatchError, match="give the optimizer all parameters that it had in the saved"
    ):
        load_dcp(tmp_path / "c", DCPState(job.model, fewer))


class Dotted(torch.optim.SGD):
    """Has state under a name that no load can find, since a given step."""

    first = 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["step"] = state.get("step", torch.tensor(0.0)) + 1
            if state["step"] >= self.first:
                state["moment.1"] = torch.zeros_like(param)


@pytest.mark.parametrize("first", [1, 3])
def test_state_that_no_load_would_take_ends_the_run_at_the_dump_that_meets_it(
    first: int, tmp_path: Path
) -> None:
    model = nn.Linear(3, 2)
    optimizer = Dotted(model.parameters(), lr=0.1)
    optimizer.first = first
    handler = make_handler(tmp_path, freq_steps=1)
    told = pytest.raises(
        ConfigError,
        match=r"Linear and Dotted is not saved, because the same job could not load it ag",
    )
    with told, handler:
        handler.load((model, optimizer))
        for step in range(5):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            handler.dump((model, optimizer), step)
    assert first == 1 or newest(tmp_path).name == f"global_step_{first - 2}"


class Listed(torch.optim.lr_scheduler.StepLR):
    """Has a list as its state, where a load expects a dict."""

    def state_dict(self) -> Any:
        return [self.last_epoch]


@pytest.mark.parametrize("async_save", [True, False])
def test_a_schedule_that_no_load_would_take_ends_the_run_at_its_load(
    async_save: bool, tmp_path: Path
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        ConfigError, match="could not load it again: scheduler in the checkpoint is a list"
    ):
        make_handler(tmp_path, freq_steps=1, async_save=async_save).load(
            (model, optimizer, Listed(optimizer, 2))
        )
