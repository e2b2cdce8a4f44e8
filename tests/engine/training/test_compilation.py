"""`compile: true`: the same gradients and names, and a number of graphs that does not grow with the
rows.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import varlen

from holdfast.engine import MicroBatchSpec, OptimizerConfig, SaveLoadMeta, TrainEngineConfig
from holdfast.engine.training import attention, compilation
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
MOST_GRAPHS = 40
"""Rows of several tokens and of one, with gradients and without. Each takes the parts before,
within and after the attention, once more for the first block if its input needs no gradient. And
the logits.
"""


def _compiled_steps(
    rank: int, world_size: int, folder: str, out: str, checkpointing: bool | str
) -> int:
    counter: Any = CompileCounterWithBackend("aot_eager")
    compilation._BACKEND = counter
    torch._dynamo.config.fail_on_recompile_limit_hit = (
        True  # instead of steps that are not compiled
    )
    spec = MicroBatchSpec(n_mbs=2)
    plain = make_engine(folder, optimizer=SGD, mb_spec=spec)
    compiled = make_engine(
        folder, optimizer=SGD, mb_spec=spec, compile=True, gradient_checkpointing=checkpointing
    )
    gradients, n_graphs = {engine: capture_gradients(engine) for engine in (plain, compiled)}, 0
    for number, lengths in enumerate(BATCHES * 2):
        batch = rows(
            make_batch(lengths, seed=number),
            slice(rank * 2, rank * 2 + 2) if world_size == 2 else slice(None),
        )
        losses = [
            engine.train_batch(batch, nll, loss_tokens)["loss"] for engine in (plain, compiled)
        ]
        losses += [
            float(engine.eval_batch(batch, nll, loss_tokens)) for engine in (plain, compiled)
        ]
        assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
        assert gradients[plain].keys() == gradients[compiled].keys()
        for name, gradient in gradients[plain].items():
            torch.testing.assert_close(
                gradients[compiled][name], gradient, rtol=1e-4, atol=2e-6, msg=name
            )
        n_graphs = n_graphs if number >= len(BATCHES) else counter.frame_count
    assert counter.frame_count == n_graphs, "the rows of the second round are known"
    compiled.save(SaveLoadMeta(f"{out}/dcp", "dcp", with_optim=True))
    compiled.save(SaveLoadMeta(f"{out}/hf", "hf", with_optim=False))
    for path in ("dcp", "hf"):
        other = make_engine(folder, optimizer=SGD)
        other.load(SaveLoadMeta(f"{out}/{path}", path, with_optim=path == "dcp"))
        assert same(whole(other), whole(compiled)), (
            "names and values are those of a model that is not compiled"
        )
    return counter.frame_count


def varlen_on_cpus() -> None:
    """Give CPUs the operator that packed attention takes on CUDA, and let the attention take it."""

    def weights(
        q: torch.Tensor,
        k: torch.Tensor,
        ends: torch.Tensor,
        key_ends: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        queries, keys = torch.arange(len(q)), torch.arange(len(k))
        sequence = torch.bucketize(queries, ends, right=True)
        of_keys = torch.bucketize(keys, key_ends, right=True)
        # Causal from the last token of each, as flash attention aligns unequal numbers of both.
        is_earlier = (ends[sequence] - queries)[:, None] <= key_ends[of_keys] - keys
        seen = (sequence[:, None] == of_keys) & is_earlier
        scores = torch.einsum("thd,shd->hts", q, k) * (scale or q.shape[-1] ** -0.5)
        return scores.masked_fill(~seen, -torch.inf).softmax(-1)

    @varlen._varlen_attn.register_kernel("cpu")
    def _(q: Any, k: Any, v: Any, ends: Any, ends_k: Any, _max: Any, _k: Any, *rest: Any) -> Any:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        out = torch.einsum("hts,shd->thd", weights(q, k, ends, ends_k, rest[1]), v).contiguous()
        return out, torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)

    @varlen._varlen_attn_backward.register_kernel("cpu")
    def _(grad: Any, q: Any, k: Any, v: Any, _o: Any, _sums: Any, ends: Any, *rest: Any) -> Any:
        groups, scale = (k.shape[1], q.shape[1] // k.shape[1]), rest[5] or q.shape[-1] ** -0.5
        k, v = (each.repeat_interleave(groups[1], 1) for each in (k, v))
        p = weights(q, k, ends, rest[0], scale)
        of_p = torch.einsum("thd,shd->hts", grad, v)
        of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * scale
        of_k, of_v = (torch.einsum("hts,thd->shd", *pair) for pair in ((of_scores, q), (p, grad)))
        of_k, of_v = (each.unflatten(1, groups).sum(2) for each in (of_k, of_v))
        return torch.einsum("hts,shd->thd", of_scores, k).contiguous(), of_k, of_v

    attention._kernel_takes = lambda query, value: True


def _steps_with_one_kernel(rank: int, world_size: int, folder: str, out: str) -> int:
    varlen_on_cpus()
    return _compiled_steps(rank, world_size, folder, out, True)


def check(tmp_path: Path, world_size: int, checkpointing: bool | str) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    counts = run_ranks(
        _compiled_steps,
        world_size,
        str(tmp_path / "model"),
        str(tmp_path),
        checkpointing,
        timeout_s=400,
    )
    assert 0 < max(counts) <= MOST_GRAPHS, counts


@pytest.mark.slow
def test_attention_in_one_kernel_is_a_part_of_the_graph_of_its_block(tmp_path: Path) -> None:
    """As on CUDA. A graph for each kind of row, and three for the logits."""
    write_model_folder(tmp_path / "model", tiny_qwen3())
    counts = run_ranks(
        _steps_with_one_kernel, 1, str(tmp_path / "model"), str(tmp_path), timeout_s=400
    )
    assert 0 < counts[0] <= 8, counts


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
    with pytest.raises(
        ConfigError, match=r"'compile' is True, but the operators that .* 'selective' keeps"
    ):
        TrainEngineConfig(compile=True, gradient_checkpointing="selective")
