"""Buffers that cannot be copied into are replaced, and nothing is ever half loaded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.utils.errors import CheckpointMismatchError, ConfigError
from tests.helpers import run_ranks
from tests.recover.runs import SPEC, step_info

pytestmark = pytest.mark.timeout(100)


class Model(nn.Module):
    """A layer and one buffer, which a second module also has."""

    def __init__(self, buffer: torch.Tensor | None, weight: float) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(3, 2), nn.Module()
        nn.init.constant_(self.layer.weight, weight)
        self.register_buffer("own", buffer)
        self.other.register_buffer("same", buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def complex_values(value: float) -> torch.Tensor:
    return torch.tensor([complex(value, 2), complex(-value, 1), complex(0, value)])


KINDS: dict[
    str, tuple[Callable[[float], torch.Tensor | None], Callable[[float], torch.Tensor | None]]
] = {
    "expanded": (lambda v: torch.tensor([v]).expand(5), lambda v: torch.tensor([v]).expand(5)),
    "expanded rows": (
        lambda v: torch.tensor([v, v + 1]).expand(3, 2),
        lambda v: torch.tensor([v, v + 1]).expand(3, 2),
    ),
    "conjugate": (lambda v: complex_values(v).conj(), lambda v: complex_values(v).conj()),
    "negative": (lambda v: complex_values(v).conj().imag, lambda v: complex_values(v).conj().imag),
    "grown": (lambda v: torch.full((7,), v), lambda v: torch.full((2,), v)),
    "shrunk": (lambda v: torch.full((2,), v), lambda v: torch.full((7,), v)),
    "with another dimension": (lambda v: torch.full((2, 3), v), lambda v: torch.full((), v)),
    "emptied": (lambda v: torch.full((0, 4), v), lambda v: torch.full((7,), v)),
    "grown from nothing": (lambda v: torch.full((3,), v), lambda v: None),
    "expanded where it was not": (
        lambda v: torch.full((5,), v),
        lambda v: torch.tensor([v]).expand(5),
    ),
}


def training(model: nn.Module) -> DCPState:
    return DCPState(model, torch.optim.AdamW(model.parameters()), changes_only_in_step=True)


def as_values(tensor: Any) -> Any:
    return None if tensor is None else (tensor.dtype, tensor.resolve_conj().resolve_neg().tolist())


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_comes_back_as_it_was(kind: str, in_background: bool, tmp_path: Path) -> None:
    saved, fresh = KINDS[kind]
    model, loaded = Model(saved(5.0), 1.0), Model(fresh(7.0), 0.0)
    config = RecoverConfig("e", "t", fileroot=str(tmp_path), freq_steps=1, async_save=in_background)
    with RecoverHandler(config, SPEC) as handler:
        handler.load(state := training(model))
        handler.dump(state, step_info(0))
    with RecoverHandler(config, SPEC) as handler:
        assert handler.load(training(loaded)) is not None
    assert as_values(loaded.own) == as_values(saved(5.0))
    if kind != "grown from nothing":  # if it was empty, nothing can tell that it was the same
        assert loaded.other.same is loaded.own
    assert float(loaded.layer.weight.detach()[0, 0]) == 1.0
    load_dcp(
        tmp_path / "e/t/recover/global_step_0/default", DCPState(again := Model(fresh(8.0), 0.0))
    )
    assert as_values(again.own) == as_values(saved(5.0))


def _grown_shards(rank: int, world_size: int, folder: str) -> Any:
    saved, fresh = Model(torch.full((7,), 5.0), 1.0), Model(torch.full((2,), 7.0), 0.0)
    for model in (saved, fresh):
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    save_dcp(f"{folder}/c", training(saved))
    load_dcp(f"{folder}/c", training(fresh))
    return as_values(fresh.own)


@pytest.mark.slow
def test_a_buffer_that_grew_comes_back_on_every_rank(tmp_path: Path) -> None:
    assert run_ranks(_grown_shards, 2, str(tmp_path)) == [as_values(torch.full((7,), 5.0))] * 2


def refused(folder: Path, model: nn.Module, words: str) -> None:
    before = {name: (id(buffer), as_values(buffer)) for name, buffer in model.named_buffers()}
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointMismatchError, match=words):
        load_dcp(folder, DCPState(model))
    assert {
        name: (id(buffer), as_values(buffer)) for name, buffer in model.named_buffers()
    } == before
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_a_parameter_never_takes_another_shape_and_a_buffer_never_another_dtype(
    tmp_path: Path,
) -> None:
    save_dcp(tmp_path / "c", DCPState(Model(torch.ones(7), 1.0)))
    wider = Model(torch.ones(2), 1.0)
    wider.layer = nn.Linear(4, 2)
    refused(tmp_path / "c", wider, "has shape")
    refused(tmp_path / "c", Model(torch.ones(7, dtype=torch.float64), 1.0), "has dtype")


def test_an_expanded_parameter_is_refused_at_save(tmp_path: Path) -> None:
    model = Model(torch.ones(2), 1.0)
    model.layer.weight = nn.Parameter(torch.ones(1).expand(2, 3), requires_grad=False)
    with pytest.raises(ConfigError, match=r"layer\.weight is expanded"):
        save_dcp(tmp_path / "c", DCPState(model))
    assert list(tmp_path.iterdir()) == []


# The default dtype


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def stepped(
    model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> DCPState:
    optimizer = kind(model.parameters(), **options)
    model(torch.ones(2, 3, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()
    return DCPState(model, optimizer)


def numbers(state: DCPState) -> Any:
    assert state.optimizer is not None
    return [(entry["step"].dtype, float(entry["step"])) for entry in state.optimizer.state.values()]


@pytest.mark.parametrize("options", [{}, {"fused": True}])
@pytest.mark.parametrize("at_save", [torch.float32, torch.float64])
@pytest.mark.parametrize("at_load", [torch.float32, torch.float64])
def test_a_checkpoint_saved_under_one_default_dtype_loads_under_any(
    at_save: torch.dtype, at_load: torch.dtype, options: Any, tmp_path: Path
) -> None:
    with default_dtype(at_save):
        state = stepped(nn.Linear(3, 2), **options)
        save_dcp(tmp_path / "c", state)
    with default_dtype(at_load):
        model = nn.Linear(3, 2, dtype=at_save)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        load_dcp(tmp_path / "c", DCPState(model, optimizer))
        assert numbers(DCPState(model, optimizer)) == numbers(state)
        model(torch.ones(2, 3, dtype=at_save)).sum().backward()
        optimizer.step()


# Inference mode


@pytest.mark.parametrize("promises", [True, False])
def test_tensors_made_in_inference_mode_can_be_trained_with(promises: bool, tmp_path: Path) -> None:
    config = RecoverConfig("e", "t", fileroot=str(tmp_path), freq_steps=1)
    model = Model(torch.ones(2), 1.0)
    state = DCPState(model, torch.optim.AdamW(model.parameters()), changes_only_in_step=promises)

    def step() -> None:
        model(torch.ones(2, 3)).sum().backward()
        assert state.optimizer is not None
        state.optimizer.step()
        state.optimizer.zero_grad()

    with RecoverHandler(config, SPEC) as handler:
        with torch.inference_mode():
            handler.load(state)
            assert handler.dump(state, step_info(0))
        for number in (1, 2):
            step()
            assert handler.dump(state, step_info(number))
    fresh: Any = Model(torch.ones(3), 0.0)
    resumed = DCPState(fresh, torch.optim.RMSprop(fresh.parameters()))
    rms = stepped(Model(torch.ones(2), 1.0), torch.optim.RMSprop)
    save_dcp(tmp_path / "rms", rms)
    with torch.inference_mode():
        load_dcp(tmp_path / "rms", resumed)
    fresh.own.add_(1)
    fresh(torch.ones(2, 3)).sum().backward()
    assert resumed.optimizer is not None
    resumed.optimizer.step()


def _sharded_inference(rank: int, world_size: int, folder: str) -> None:
    model = Model(torch.ones(2), 1.0)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    state, config = training(model), RecoverConfig("e", "t", fileroot=folder, freq_steps=1)
    with torch.inference_mode():
        save_dcp(f"{folder}/c", state)
        load_dcp(f"{folder}/c", state)
    with RecoverHandler(config, SPEC) as handler:
        for number in range(3):
            with torch.inference_mode():
                if number == 0:
                    handler.load(state)
                handler.dump(state, step_info(number))
            model(torch.ones(2, 3)).sum().backward()
            assert state.optimizer is not None
            state.optimizer.step()


@pytest.mark.slow
def test_shards_made_in_inference_mode_can_be_trained_with(tmp_path: Path) -> None:
    run_ranks(_sharded_inference, 2, str(tmp_path))
