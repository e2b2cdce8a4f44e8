"""Meshes on two simulated devices train as the unsharded model does, and save in the background
while they train.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine import FSDPConfig, SaveLoadMeta
from tests.engine.meshes import own_rows
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.engine.test_fsdp_engine import loss_tokens, make_engine, nll, same, whole
from tests.helpers import run_ranks

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(150)]

MESHES: dict[str, dict[str, Any]] = {
    "fsdp:d2": {},
    "fsdp:d2 with two copies": {"fsdp": FSDPConfig(replicate_size=2)},
}
"""Backend for two ranks and a comment -> the other keys of `TrainEngineConfig`."""
STEPS = 3


def _train(engine: Any, n_steps: int = 1) -> list[float]:
    """Losses and norms of gradients."""
    batch, found = own_rows(engine), []
    for _ in range(n_steps):
        stats = engine.train_batch(batch, nll, loss_tokens)
        found += [stats["loss"], stats["grad_norm"]]
    return found


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    return {
        name: tensor.cpu() for name, tensor in whole(engine).items() if name.startswith("model.")
    }


def _on_the_cpu(
    rank: int, world_size: int, folder: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = make_engine(folder, device="cpu")
    return _train(engine, STEPS), _weights(engine)


def _on_the_device(
    rank: int, world_size: int, folder: str, out: Path, mesh: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train, and check what was saved meanwhile against a twin that saves nothing."""
    engine, twin, other = (
        make_engine(folder, device="cuda", backend=mesh.split()[0], **MESHES[mesh]) for _ in "123"
    )
    assert {param.device for param in engine.model.parameters()} == {torch.device("cuda", rank)}
    stats = _train(engine, STEPS)
    assert _train(twin, STEPS) == stats
    result = stats, _weights(twin)
    formats: list[tuple[Any, bool]] = [("dcp", True), ("hf", False)]
    for kind, with_optim in formats:
        later, now = (
            SaveLoadMeta(str(out / f"{when}_{kind}"), kind, with_optim) for when in ("later", "now")
        )
        engine.save(later, blocking=False)
        _train(engine)  # nothing waits for the copies before this
        engine.wait_for_save()
        twin.save(now)
        expected = whole(twin)
        for meta in (later, now):
            other.load(meta)
            if with_optim:
                assert same(whole(other), expected)
            else:
                assert same(_weights(other), _weights(twin))
        _train(twin)
        if with_optim:
            _train(other)
            assert same(whole(other), whole(twin)), "moments and counters are restored, too"
        assert same(whole(engine), whole(twin)), "the save has left training alone"
    return result


def _on_one_row_of_devices(rank: int, world_size: int, folder: str, out: Path) -> bool:
    """Whether plain shards load the same values from both folders."""
    engine, found = make_engine(folder, device="cuda"), []
    for when in ("later", "now"):
        engine.load(SaveLoadMeta(str(out / f"{when}_dcp"), "dcp", with_optim=True))
        found.append(whole(engine))
    return same(*found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "qwen3"
    write_model_folder(path, tiny_qwen3())
    return str(path)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_trains_as_the_unsharded_model_and_saves_while_it_trains(
    folder: str, mesh: str, tmp_path: Path
) -> None:
    ((expected_stats, expected),) = run_ranks(_on_the_cpu, 1, folder)
    for stats, weights in run_ranks(_on_the_device, 2, folder, tmp_path, mesh):
        assert stats == pytest.approx(expected_stats, rel=1e-5)
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    for path in (tmp_path / "later_dcp").iterdir():
        assert path.read_bytes() == (tmp_path / "now_dcp" / path.name).read_bytes(), path.name
    assert run_ranks(_on_one_row_of_devices, 2, folder, tmp_path) == [True, True]
