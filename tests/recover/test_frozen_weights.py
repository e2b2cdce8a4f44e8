"""Frozen weights that change, or that no start creates again: runs killed after any step end as if
never killed.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from holdfast.recover.engines import names_from_folder
from tests.engine.lora.engines import write_base
from tests.helpers import run_ranks
from tests.recover.runs import make_handler, step_info
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(120)

STEPS = 5


class Run:
    """A training loop outside of Holdfast, with its own model and optimizer.

    Args:
        root: folder of the test.
        first: first step of this process.
    """

    model: Any
    optimizer: torch.optim.Optimizer

    def __init__(self, root: Path, first: int) -> None:
        torch.manual_seed(0)

    def train(self, step: int) -> None:
        """Train the step, up to the moment of a snapshot."""
        torch.manual_seed(step)
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(4, 8)).square().mean()

    def after(self) -> None:
        """Code between a snapshot and the next step."""


class TargetNetworks(Run):
    """One network is trained. Two others follow it slowly and determine its target."""

    def __init__(self, root: Path, first: int) -> None:
        super().__init__(root, first)
        self.model = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.model[1:].requires_grad_(False)
        _shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model[0].parameters(), lr=0.1)

    def loss(self) -> torch.Tensor:
        one, *others = (network(torch.ones(4, 8)) for network in self.model)
        return (one - torch.stack(others).mean(0) - 1).square().mean()

    def train(self, step: int) -> None:
        super().train(step)
        _reshard(self.model)
        with torch.no_grad():
            for target in self.model[1:]:
                for param, source in zip(
                    target.parameters(), self.model[0].parameters(), strict=True
                ):
                    param.lerp_(source, 0.1)


class EditedBody(Run):
    """A frozen body with one element edited after step 1, invisibly to torch. The caller leaves the
    body out.
    """

    def __init__(self, root: Path, first: int) -> None:
        super().__init__(root, first)
        self.model = nn.Sequential(nn.Linear(8, 100), nn.Linear(100, 100), nn.Linear(100, 3))
        self.model[:2].requires_grad_(False)
        _shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model[2].parameters(), lr=0.1)

    def train(self, step: int) -> None:
        super().train(step)
        _reshard(self.model)
        if step == 1:
            _local(self.model[1].weight.data).view(-1)[1] += 0.5 * (dist.get_rank() == 0)


class HeadAfterBody(Run):
    """The body is trained, then frozen. The head gets its own optimizer."""

    def __init__(self, root: Path, first: int) -> None:
        super().__init__(root, first)
        self.model = nn.Sequential(nn.Linear(8, 100), nn.Linear(100, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        if first > 2:
            self.freeze()

    def freeze(self) -> None:
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model[1].parameters(), lr=0.1)

    def train(self, step: int) -> None:
        if step == 2:
            self.freeze()
        super().train(step)


class GradualFreezing(Run):
    """SGD without a state, with one layer less every step."""

    def __init__(self, root: Path, first: int) -> None:
        super().__init__(root, first)
        self.model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(STEPS)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.model[: max(0, first - 1)].requires_grad_(False)

    def train(self, step: int) -> None:
        self.model[:step].requires_grad_(False)
        super().train(step)


class UnseededProjection(Run):
    """A random projection that no seed reproduces."""

    def __init__(self, root: Path, first: int) -> None:
        super().__init__(root, first)
        torch.seed()
        projection = nn.Linear(8, 100)
        if (
            root / "projection.pt"
        ).exists() and first == 0:  # left by the killed run for the undisturbed one
            projection.load_state_dict(torch.load(root / "projection.pt"))
        elif first == 0:
            torch.save(projection.state_dict(), root / "projection.pt")
        torch.manual_seed(0)
        self.model = nn.Sequential(projection.requires_grad_(False), nn.Linear(100, 3))
        self.optimizer = torch.optim.AdamW(self.model[1].parameters(), lr=0.1)


class Adapters(Run):
    """Adapters of a model that is loaded from a folder."""

    def __init__(self, root: Path, first: int) -> None:
        super().__init__(root, first)
        base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
        self.before(base, first)
        torch.manual_seed(0)
        self.model = get_peft_model(
            base, LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "down_proj"])
        )
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], lr=0.1
        )

    def before(self, base: Any, first: int) -> None:
        """Change the base before it gets adapters."""

    def loss(self) -> torch.Tensor:
        ids = torch.randint(12, (2, 6))
        return self.model(input_ids=ids, labels=ids).loss


class MergedSends(Adapters):
    """Adapters are merged for each send of the weights and unmerged afterwards, which rounds the
    base each time.
    """

    def train(self, step: int) -> None:
        self.model.merge_adapter()
        self.model.unmerge_adapter()
        super().train(step)


class SnapshotsWhileMerged(Adapters):
    """Snapshots are taken between merging and unmerging."""

    def __init__(self, root: Path, first: int) -> None:
        super().__init__(root, first)
        self.resumed = first > 0

    def train(self, step: int) -> None:
        if self.resumed:
            self.after()
            self.resumed = False
        super().train(step)
        self.model.merge_adapter()

    def after(self) -> None:
        self.model.unmerge_adapter()


class TrainedBase(Adapters):
    """The model was trained in the same job before it got adapters. A resumed job skips that
    training.
    """

    def before(self, base: Any, first: int) -> None:
        optimizer = torch.optim.AdamW(base.parameters(), lr=0.01)
        for _ in range(2 if first == 0 else 0):
            ids = torch.randint(12, (2, 6))
            base(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()


def _shard(model: nn.Module) -> None:
    if dist.get_world_size() > 1:
        for layer in model.children():
            fully_shard(layer)


def _reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _train(
    rank: int, world_size: int, kind: type[Run], root: str, kill_after: int
) -> dict[str, torch.Tensor]:
    """Train to the end, or until SIGKILL after the snapshot of a step. Returns all weights and
    moments.
    """
    handler = make_handler(root, freq_steps=1, max_ckpt_to_keep=2)
    last = handler.peek()
    first = 0 if last is None else last.global_step + 1
    run = kind(Path(root), first)
    with handler:
        handler.load((run.model, run.optimizer))
        for step in range(first, STEPS):
            run.train(step)
            assert handler.dump((run.model, run.optimizer), step_info(step))
            if step == kill_after:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            run.after()
    return _ending(run)


def _train_alone(rank: int, world_size: int, kind: type[Run], root: str) -> dict[str, torch.Tensor]:
    """The same loop without a handler."""
    run = kind(Path(root), 0)
    for step in range(STEPS):
        run.train(step)
        run.after()
    return _ending(run)


def _ending(run: Run) -> dict[str, torch.Tensor]:
    found = {name: _whole(tensor) for name, tensor in run.model.state_dict().items()}
    names = {id(param): name for name, param in run.model.named_parameters()}
    for param, state in run.optimizer.state.items():
        found |= {f"{names[id(param)]} {key}": _whole(value) for key, value in state.items()}
    return found


def check(kind: type[Run], root: Path, kills: tuple[int, ...], world_size: int = 1) -> None:
    if issubclass(kind, Adapters):
        write_base(root / "base")
    for kill_after in kills:
        with pytest.raises(AssertionError, match="died without a word"):
            run_ranks(_train, world_size, kind, str(root), kill_after)
    found = run_ranks(_train, world_size, kind, str(root), -1)[0]
    expected = run_ranks(_train_alone, world_size, kind, str(root))[0]
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


KINDS = [
    TargetNetworks,
    EditedBody,
    HeadAfterBody,
    GradualFreezing,
    UnseededProjection,
    MergedSends,
    SnapshotsWhileMerged,
    TrainedBase,
]


@pytest.mark.parametrize(
    "kind", slow_but([TargetNetworks, GradualFreezing], KINDS), ids=lambda kind: kind.__name__
)
def test_a_run_whose_frozen_weights_change_ends_as_if_it_was_never_killed(
    kind: type[Run], tmp_path: Path
) -> None:
    check(kind, tmp_path, (3,))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_such_a_run_is_killed_again_and_again(kind: type[Run], tmp_path: Path) -> None:
    check(kind, tmp_path, (0, 1, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TargetNetworks, EditedBody])
def test_ranks_agree_on_frozen_weights_that_changed_on_one_of_them(
    kind: type[Run], tmp_path: Path
) -> None:
    check(kind, tmp_path, (0, 2), world_size=2)


def _look_after_a_forward(rank: int, world_size: int, base: str) -> int:
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=2, target_modules=["q_proj"]),
    )
    fully_shard(model)
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2]]))
    return len(names_from_folder(model, None))


def test_a_forward_that_leaves_gathered_weights_hides_no_base(tmp_path: Path) -> None:
    write_base(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    names = list(base.named_parameters(remove_duplicate=False))
    assert run_ranks(_look_after_a_forward, 2, str(tmp_path)) == [len(names)] * 2
