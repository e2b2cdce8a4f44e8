"""A step waits for the device once, however it is cut. Micro-batches of weight 0 change nothing."""

import logging
import math
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.engine import FSDPEngine, MicroBatchSpec, OptimizerConfig
from holdfast.engine.training.microbatch import split_batch
from holdfast.engine.training.optimizer_step import clip_grad_norm
from holdfast.utils.errors import BatchError, PeerError
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.engine.test_fsdp_engine import (
    loss_tokens,
    make_batch,
    make_engine,
    nll,
    rows,
    same,
    whole,
)
from tests.helpers import run_ranks, untimed

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "qwen3"
    write_model_folder(path, tiny_qwen3(tied=False))
    return path


@pytest.fixture
def engine(folder: Path) -> Iterator[FSDPEngine]:
    engine = make_engine(folder)
    yield engine
    engine.destroy()


class NumbersRead(TorchDispatchMode):
    """Counts tensors whose value Holdfast reads (transformers reads whether a row is packed).

    On a GPU, each read waits until everything before is computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            callers = [
                frame.filename
                for frame in traceback.extract_stack()
                if "/torch/" not in frame.filename
            ]
            self.count += "/site-packages/" not in callers[-2]  # the caller of this method
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_step_waits_for_no_more_numbers_with_more_micro_batches(
    engine: FSDPEngine, packed: bool
) -> None:
    counts, engine.config.pack_sequences = {}, packed
    for n_mbs in (2, 6):
        engine.config.mb_spec = MicroBatchSpec(n_mbs=n_mbs)
        for step in (engine.train_batch, engine.eval_batch):
            with NumbersRead() as read:
                step(make_batch(), nll, loss_tokens)
            counts[step.__name__, n_mbs] = read.count
    assert (
        counts["train_batch", 6] == counts["train_batch", 2]
        and counts["eval_batch", 6] == counts["eval_batch", 2]
    )


def test_a_plain_number_as_weight_counts_as_one_in_a_tensor(engine: FSDPEngine) -> None:
    plain: Any = lambda mb: int(mb["loss_mask"].sum())  # noqa: E731
    losses = [
        float(engine.eval_batch(make_batch(), nll, weigh))
        for weigh in (loss_tokens, plain, lambda mb: mb["loss_mask"].sum().reshape(1))
    ]
    assert len(set(losses)) == 1 and math.isfinite(losses[0])


def test_rows_that_do_not_count_leave_loss_and_gradient_unchanged(
    folder: Path, engine: FSDPEngine
) -> None:
    """Such rows have values that are not finite: an embedding that overflowed, a masked-out part of
    the vocabulary.
    """
    batch, twin = make_batch((5, 5, 5), masked_rows=(2,)), make_engine(folder)
    batch["input_ids"][batch["input_ids"] == 7] = 6
    batch["input_ids"][2, 1:] = 7
    for one in (engine, twin):
        model: Any = one.model
        with torch.no_grad():
            model.get_input_embeddings().weight.to_local()[7] = math.inf
        model.lm_head.register_forward_hook(lambda module, args, output: mask_token_3(output))
        one.config.mb_spec = MicroBatchSpec(n_mbs=3)
    counted = batch["input_ids"][:2]
    counted[counted == 3] = 2
    stats, expected = (
        engine.train_batch(batch, nll, loss_tokens),
        twin.train_batch(rows(batch, slice(2)), nll, loss_tokens),
    )
    assert stats["update_skipped"] == expected["update_skipped"] == 0
    assert math.isfinite(stats["loss"]) and stats["loss"] == pytest.approx(
        expected["loss"], rel=1e-6
    )
    assert stats["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert (stats["n_mbs"], stats["n_tokens"]) == (3, 15), (
        "the numbers are of the batch as it was given"
    )
    assert math.isfinite(float(engine.eval_batch(batch, nll, loss_tokens)))
    twin.destroy()


def mask_token_3(logits: torch.Tensor) -> torch.Tensor:
    return logits.index_fill(-1, torch.tensor([3], device=logits.device), -math.inf)


def _collectives_of_a_step(rank: int, world_size: int, folder: str) -> dict[str, int]:
    engine, counts = make_engine(folder, mb_spec=MicroBatchSpec(max_tokens_per_mb=8)), {}
    batch = make_batch((8, 8, 5) if rank == 0 else (2, 2, 2))
    for step in (engine.train_batch, engine.eval_batch):
        before = engine.control_group._get_sequence_number_for_group()
        step(batch, nll, loss_tokens)
        counts[step.__name__] = engine.control_group._get_sequence_number_for_group() - before
    engine.destroy()
    return counts


def test_ranks_agree_on_a_step_in_one_collective_however_ragged_it_is(folder: Path) -> None:
    counts = run_ranks(_collectives_of_a_step, 2, str(folder))
    assert counts == [{"train_batch": 1, "eval_batch": 2}] * 2


def each(mb: Any) -> torch.Tensor:
    return torch.tensor(0.1)


def _steps_of_micro_batches_that_count_alike(
    rank: int, world_size: int, folder: str
) -> dict[str, Any]:
    """Rank 1 learns that there are three micro-batches after it has reported that its only one
    weighs 0.1.
    """
    batch, results = make_batch((8, 8, 7) if rank == 0 else (2, 3, 2)), {}
    batch["loss_mask"] = batch["attention_mask"]
    specs = {"cut twice": MicroBatchSpec(max_tokens_per_mb=8), "cut once": MicroBatchSpec(n_mbs=3)}
    for name, spec in specs.items():
        sgd = OptimizerConfig(
            type="sgd", lr=1.0, gradient_clipping=0.1
        )  # no small differences grow with it
        engine = make_engine(folder, mb_spec=spec, optimizer=sgd)
        loss = float(engine.eval_batch(batch, nll, each))
        stats = untimed(engine.train_batch(batch, nll, each))
        results[name] = {"eval": loss, "stats": stats, "state": whole(engine)}
        engine.destroy()
    return results


@pytest.mark.slow
def test_a_weight_that_depends_on_the_cut_follows_the_last_cut(folder: Path) -> None:
    for ours in run_ranks(_steps_of_micro_batches_that_count_alike, 2, str(folder)):
        twice, once = ours["cut twice"], ours["cut once"]
        assert (
            twice["stats"] == pytest.approx(once["stats"], rel=1e-6) and once["stats"]["n_mbs"] == 3
        )
        assert twice["eval"] == pytest.approx(once["eval"], rel=1e-6)
        assert twice["state"].keys() == once["state"].keys()
        for name, tensor in once["state"].items():
            torch.testing.assert_close(twice["state"][name], tensor, rtol=1e-5, atol=1e-6)


def _weights_that_fail(rank: int, world_size: int, folder: str) -> str:
    engine = make_engine(folder)
    before = whole(engine)
    fails: Any = lambda mb: loss_tokens(mb) if rank == 0 else mb["no such key"]  # noqa: E731
    with pytest.raises(PeerError if rank == 0 else KeyError, match="no such key"):
        engine.train_batch(make_batch(), nll, fails)
    assert same(before, whole(engine))
    assert math.isfinite(engine.train_batch(make_batch(), nll, loss_tokens)["loss"]), (
        "the ranks are in step"
    )
    engine.destroy()
    return "in step"


def test_a_weight_that_fails_on_one_rank_fails_on_all(folder: Path) -> None:
    assert run_ranks(_weights_that_fail, 2, str(folder), timeout_s=50) == ["in step"] * 2


def _clip_as_torch_does(rank: int, world_size: int) -> int:
    n_same = 0
    for seed in range(10):
        torch.manual_seed(seed)
        model: Any = torch.nn.Sequential(torch.nn.Linear(9, 70), torch.nn.Linear(70, 3))
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        torch.manual_seed(100 * rank + seed)
        model(torch.randn(4, 9)).square().sum().backward()
        grads = [param.grad.to_local() for param in model.parameters()]
        before = [grad.clone() for grad in grads]
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()  # type: ignore[attr-defined]
        clipped = [grad.clone() for grad in grads]
        for grad, value in zip(grads, before, strict=True):
            grad.copy_(value)
        loss, norm, n_losses = clip_grad_norm(
            model, 0.1, torch.tensor(0.1 * (rank + 1), dtype=torch.float64), 3.0
        ).tolist()
        assert (loss, n_losses) == (0.1 + 0.2, 2)
        n_same += norm == float(expected) and all(map(torch.equal, grads, clipped))
    return n_same


def test_a_gradient_is_clipped_as_torch_clips_it_to_the_last_bit() -> None:
    assert run_ranks(_clip_as_torch_does, 2) == [10, 10]


LARGE = 2.0**70
"""Its square is infinite in float32."""


def _has_a_large_gradient(rank: int, world_size: int, folder: str) -> None:
    for loss_factor in (1.0, LARGE):
        engine = make_engine(
            folder, optimizer=OptimizerConfig(type="sgd", lr=0.1, gradient_clipping=1e-3)
        )
        before = whole(engine)
        batch = rows(make_batch((5, 9, 7, 3)), slice(rank, None, world_size))
        stats = engine.train_batch(
            batch, lambda output, mb, by=loss_factor: nll(output, mb) * by, loss_tokens
        )
        assert stats["update_successful"] == 1.0
        change = {name: tensor - before[name] for name, tensor in whole(engine).items()}
        if loss_factor == 1.0:
            expected_norm = stats["grad_norm"]
            expected_change = change
        engine.destroy()
    assert stats["grad_norm"] / LARGE == pytest.approx(expected_norm, rel=1e-5)
    for name, tensor in change.items():
        torch.testing.assert_close(tensor, expected_change[name], rtol=1e-3, atol=1e-7)


def test_a_gradient_whose_square_overflows_is_clipped_on_all_ranks(folder: Path) -> None:
    run_ranks(_has_a_large_gradient, 2, str(folder), timeout_s=50)


def unrelated(output: Any, mb: Any) -> torch.Tensor:
    return torch.zeros((), requires_grad=True)


def detached_logprobs(output: Any, mb: Any) -> torch.Tensor:
    return output.logprobs.detach().sum()


def detached_logits(output: Any, mb: Any) -> torch.Tensor:
    return (output * torch.zeros((), requires_grad=True)).detach().sum() * torch.zeros(
        (), requires_grad=True
    )


def mean_square(values: torch.Tensor, mb: Any) -> torch.Tensor:
    return values.square().mean()


def _one_loss_is_unrelated(rank: int, world_size: int, folder: str, critic: bool) -> None:
    batch = make_batch((5, 9, 7, 3), seed=rank)
    loss_fn = mean_square if critic else nll
    for kind in (
        (unrelated, detached_logits) if critic else (unrelated, detached_logprobs, detached_logits)
    ):
        engine, twin = make_engine(folder, is_critic=critic), make_engine(folder, is_critic=critic)
        for step in range(2):
            # The twin's loss depends on the output, with a gradient of zeros.
            own = kind if rank == step else loss_fn
            factor = float(rank != step)
            stats = engine.train_batch(batch, own, loss_tokens)
            expected = twin.train_batch(
                batch, lambda output, mb, by=factor: loss_fn(output, mb) * by, loss_tokens
            )
            assert stats["grad_norm"] == expected["grad_norm"] > 0
        assert same(whole(engine), whole(twin))

        # If no loss of any rank depends on the model, all ranks hear it, and the next step is as
        # ever.
        with pytest.raises(BatchError, match="no loss of any rank depends on the model"):
            engine.train_batch(batch, kind, loss_tokens)
        stats, twins = (each.train_batch(batch, loss_fn, loss_tokens) for each in (engine, twin))
        assert untimed(stats) == untimed(twins)
        assert same(whole(engine), whole(twin))
        engine.destroy()
        twin.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("critic", [False, True])
def test_a_loss_that_does_not_depend_on_the_model_counts_with_a_gradient_of_zeros(
    folder: Path, critic: bool
) -> None:
    run_ranks(_one_loss_is_unrelated, 2, str(folder), critic, timeout_s=50)


def test_a_loss_without_gradients_and_a_step_without_a_backward_are_refused(
    engine: FSDPEngine,
) -> None:
    def without_gradients(output: Any, mb: Any) -> torch.Tensor:
        with torch.no_grad():
            return nll(output, mb)

    with pytest.raises(BatchError, match="output without gradients"):
        engine.train_batch(make_batch(), without_gradients, loss_tokens)
    with pytest.raises(BatchError, match="no loss of any rank depends on the model"):
        engine.optimizer_step()
    assert engine.train_batch(make_batch(), nll, loss_tokens)["update_successful"] == 1.0


def long_batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": mask, "attention_mask": mask}


def test_by_default_no_row_of_several_sequences_is_longer_than_8192_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    n_tokens = [
        mb.n_tokens for mb in split_batch(long_batch([3000] * 6 + [9000]), MicroBatchSpec())
    ]
    assert n_tokens[0] == 9000 and max(n_tokens[1:]) <= 8192 and sum(n_tokens) == 27000
    assert not caplog.records


def test_a_long_unlimited_row_is_warned_about_once_for_each_doubling(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unlimited = MicroBatchSpec(max_tokens_per_mb=None)
    with caplog.at_level(logging.WARNING):
        split_batch(long_batch([4000] * 4), unlimited)
        split_batch(long_batch([40000]), unlimited)  # too long to cut
        assert not caplog.records
        for _ in range(3):
            split_batch(long_batch([4000] * 5), unlimited)
        split_batch(long_batch([4000] * 9), unlimited)
    first, second = (record.getMessage() for record in caplog.records)
    assert (
        "more than 16384 tokens" in first
        and "0.25 GiB" in first
        and "more than 32768 tokens" in second
    )
    assert "mb_spec.max_tokens_per_mb" in first
