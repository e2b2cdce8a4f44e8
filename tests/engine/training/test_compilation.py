"""`compile: true`: the same gradients and names, and a number of graphs that does not grow with the rows."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from holdfast.engine import MicroBatchSpec, OptimizerConfig, SaveLoadMeta, TrainEngineConfig
from holdfast.engine.training import compilation
from holdfast.utils.errors import ConfigError
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.engine.test_fsdp_engine import (
    capture_gradients,
    loss_tokens,
    make_batch,
    make_engine,
    nll,
    rows,
    same,
    whole,
)
from tests.helpers import run_ranks

pytestmark = pytest.mark.timeout(500)

SGD = OptimizerConfig(type="sgd", lr=0.0, gradient_clipping=1e9)
BATCHES = [(5, 1, 9, 3), (7, 2, 6, 4), (2, 2, 3, 2), (30, 1, 1, 17), (8, 8, 8, 8), (4, 1, 25, 1)]
MOST_GRAPHS = 24
"""Rows of several tokens and of one, with gradients and without. Each takes the part before attention and the part
after it, once more for the first block if its input needs no gradient."""


def _compiled_steps(rank: int, world_size: int, folder: str, out: str, checkpointing: bool | str) -> int:
    counter: Any = CompileCounterWithBackend("aot_eager")
    spec = MicroBatchSpec(n_mbs=2)
    plain = make_engine(folder, optimizer=SGD, mb_spec=spec)
    with patch.object(compilation, "_BACKEND", counter):
        compiled = make_engine(folder, optimizer=SGD, mb_spec=spec, compile=True, gradient_checkpointing=checkpointing)
    gradients, n_graphs = {engine: capture_gradients(engine) for engine in (plain, compiled)}, 0
    for number, lengths in enumerate(BATCHES * 2):
        batch = rows(
            make_batch(lengths, seed=number), slice(rank * 2, rank * 2 + 2) if world_size == 2 else slice(None)
        )
        losses = [engine.train_batch(batch, nll, loss_tokens)["loss"] for engine in (plain, compiled)]
        losses += [float(engine.eval_batch(batch, nll, loss_tokens)) for engine in (plain, compiled)]
        assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
        assert gradients[plain].keys() == gradients[compiled].keys()
        for name, gradient in gradients[plain].items():
            torch.testing.assert_close(gradients[compiled][name], gradient, rtol=1e-4, atol=2e-6, msg=name)
        n_graphs = n_graphs if number >= len(BATCHES) else counter.frame_count
    assert counter.frame_count == n_graphs, "the rows of the second round are known"
    compiled.save(SaveLoadMeta(f"{out}/dcp", "dcp", with_optim=True))
    compiled.save(SaveLoadMeta(f"{out}/hf", "hf", with_optim=False))
    for path in ("dcp", "hf"):
        other = make_engine(folder, optimizer=SGD)
        other.load(SaveLoadMeta(f"{out}/{path}", path, with_optim=path == "dcp"))
        assert same(whole(other), whole(compiled)), "names and values are those of a model that is not compiled"
    return counter.frame_count


def check(tmp_path: Path, world_size: int, checkpointing: bool | str) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    counts = run_ranks(
        _compiled_steps, world_size, str(tmp_path / "model"), str(tmp_path), checkpointing, timeout_s=400
    )
    assert 0 < max(counts) <= MOST_GRAPHS, counts


@pytest.mark.slow
def test_a_compiled_model_has_the_same_gradients_and_few_graphs(tmp_path: Path) -> None:
    check(tmp_path, 1, "every_2")


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_models_of_two_ranks_have_the_same_gradients_and_few_graphs(
    tmp_path: Path, checkpointing: bool
) -> None:
    check(tmp_path, 2, checkpointing)


def test_operators_that_compiled_blocks_hide_cannot_be_kept() -> None:
    with pytest.raises(ConfigError, match=r"'compile' is True, but the operators that .* 'selective' keeps"):
        TrainEngineConfig(compile=True, gradient_checkpointing="selective")
