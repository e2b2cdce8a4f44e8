"""AReaL's names of the engine's methods, on two ranks: the same results, for dicts and for
lists.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine import (
    FinetuneSpec,
    FSDPEngine,
    MicroBatchSpec,
    OptimizerConfig,
    TrainEngineConfig,
)
from holdfast.engine.api import Batch
from holdfast.utils.errors import BatchError, ConfigError, PeerError
from tests.engine.hf_models import tiny_config
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.engine.test_fsdp_engine import (
    loss_tokens,
    make_batch,
    make_engine,
    nll,
    reference,
    rows,
    same,
    whole,
)
from tests.helpers import run_ranks, untimed
from tests.tiers import slow_but

LINEAR = OptimizerConfig(lr=1e-2, lr_scheduler_type="linear", warmup_steps=0, gradient_clipping=0.5)


def trajectories(batch: Batch, sizes: tuple[int, ...]) -> list[Batch]:
    """The rows of a batch as a list, each part cut to its longest row."""
    parts = [rows(batch, slice(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))]
    widths = [int(part["attention_mask"].sum(1).max()) for part in parts]
    return [
        {key: tensor[:, :width] for key, tensor in part.items()}
        for part, width in zip(parts, widths, strict=True)
    ]


def _lists(rank: int, folder: str) -> None:
    batch = rows(make_batch(), slice(rank * 4, rank * 4 + 4))
    listed = trajectories(batch, (1, 2, 1))
    engine, twin = (make_engine(folder, mb_spec=MicroBatchSpec(n_mbs=2)) for _ in range(2))
    loss = engine.eval_batch(batch, nll, loss_tokens)
    assert torch.equal(twin.eval_batch(listed, nll, loss_tokens), loss)
    logprobs = engine.forward(batch)
    assert torch.equal(logprobs, engine.forward_batch(batch))
    for found, part, start in zip(twin.forward(listed), listed, (0, 1, 3), strict=True):
        size, width = part["input_ids"].shape
        assert torch.equal(found, logprobs[start : start + size, :width])
    stats = untimed(engine.train_batch(batch, nll, loss_tokens))
    assert stats == untimed(twin.train_batch(listed, nll, loss_tokens))
    assert same(whole(engine), whole(twin))
    assert (stats["update_successful"], stats["num_micro_batches"]) == (1.0, stats["n_mbs"])
    bad = [listed[0], {key: tensor for key, tensor in listed[1].items() if key != "loss_mask"}]
    before = whole(engine)
    with pytest.raises(BatchError if rank == 1 else PeerError, match="trajectory 1 has the keys"):
        engine.train_batch(bad if rank == 1 else listed, nll, loss_tokens)
    assert same(whole(engine), before)


def _filled_rows(rank: int, folder: str) -> None:
    """Gradients do not depend on the padding values of rows, and the model gets rows of one
    length.
    """
    batch = rows(make_batch(), slice(rank * 4, rank * 4 + 4))
    spec = MicroBatchSpec(max_tokens_per_mb=12)
    plain = make_engine(folder, mb_spec=spec)
    filled = make_engine(folder, mb_spec=spec, pad_to_maximum=True, logprobs_chunk_size=3)
    lengths: set[int] = set()

    def see(module: Any, args: Any, kwargs: Any) -> None:
        lengths.add(kwargs["input_ids"].shape[1])

    filled.model.register_forward_pre_hook(see, with_kwargs=True)
    assert torch.allclose(filled.forward_batch(batch), plain.forward_batch(batch), atol=1e-6)
    ours, theirs = (engine.train_batch(batch, nll, loss_tokens) for engine in (plain, filled))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert lengths == {12}, "dummies too"


def test_rows_are_filled_up_beyond_the_positions_that_a_model_has_learned(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model", tiny_config("gpt2"))
    assert model.config.n_positions == 32
    engine = make_engine(
        tmp_path / "model",
        pad_to_maximum=True,
        mb_spec=MicroBatchSpec(n_mbs=4, max_tokens_per_mb=80),
    )
    batch = make_batch((32, 7))  # and two dummies
    torch.testing.assert_close(
        engine.forward_batch(batch), reference(model, batch)[1], rtol=0, atol=2e-5
    )
    assert engine.train_batch(batch, nll, loss_tokens)["update_skipped"] == 0
    engine.destroy()


def test_a_loss_that_is_no_tensor_is_refused_by_name(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    engine = make_engine(tmp_path / "model")
    batch = make_batch()
    with pytest.raises(
        ConfigError, match=r"the loss function returned 1\.5, a float; expected a tensor"
    ):
        engine.train_batch(batch, lambda *_: 1.5, loss_tokens)  # type: ignore[arg-type,return-value]
    with pytest.raises(
        ConfigError, match=r"returned a tensor of shape \[\d+\]; expected one value"
    ):
        engine.train_batch(batch, lambda output, mb: output.logprobs, loss_tokens)

    # A shape that `backward` accepts.
    stats = engine.train_batch(batch, lambda *given: nll(*given).reshape(1), loss_tokens)
    assert stats["update_skipped"] == 0
    engine.destroy()


def _own_step(rank: int, folder: str) -> None:
    """A hand-written training step with these methods equals train_batch."""
    batch = rows(make_batch(masked_rows=()), slice(rank * 4, rank * 4 + 4))
    engine, twin = (make_engine(folder, optimizer=LINEAR) for _ in range(2))
    weight = sum(float(part["loss_mask"][:, 1:].sum()) for part in (make_batch(),))
    stats = engine.train_batch(batch, nll, loss_tokens)
    twin.train()
    twin.optimizer_zero_grad()
    logits = twin.model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).logits
    picked = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    (
        -(picked * batch["loss_mask"][:, 1:]).sum() / weight * twin.data_parallel_world_size
    ).backward()
    mine = twin.optimizer_step()
    assert (
        mine["grad_norm"] == pytest.approx(stats["grad_norm"], rel=1e-5)
        and mine["lr"] == stats["lr"] == 1e-2
    )
    assert mine["update_successful"] == 1.0 and twin.counters.optimizer_steps == 1
    for name, value in whole(engine).items():
        assert torch.allclose(whole(twin)[name], value, atol=2e-4), name
    assert all(param.grad is None for param in twin.model.parameters())


def _rates_and_statistics(rank: int, folder: str) -> None:
    batch = rows(make_batch(), slice(rank * 4, rank * 4 + 4))
    engine = make_engine(folder, optimizer=LINEAR)
    assert engine.export_stats() == {}
    steps = [engine.train_batch(batch, nll, loss_tokens)]
    engine.set_lr(5e-3)
    steps.append(engine.train_batch(batch, nll, loss_tokens))
    assert steps[1]["lr"] == 5e-3
    engine.lr_scheduler_step()
    engine.lr_scheduler_step()  # changes without an update, as in AReaL
    skipped = engine.train_batch(
        batch, lambda logits, mb: nll(logits, mb) * float("nan"), loss_tokens
    )
    assert skipped["update_successful"] == 0.0 and skipped["lr"] == pytest.approx(
        1e-2 * (1 - 2 / 20)
    )
    means = engine.export_stats()
    assert means["update_successful"] == pytest.approx(2 / 3)
    assert means["grad_norm"] == pytest.approx((steps[0]["grad_norm"] + steps[1]["grad_norm"]) / 2)
    assert all(math.isfinite(value) for value in means.values()) and means[
        "n_tokens"
    ] == pytest.approx(37 / 2)
    assert engine.export_stats() == {}
    with pytest.raises(ConfigError, match="'lr' is -1"):
        engine.set_lr(-1.0)
    without = make_engine(folder, optimizer=None)
    for call in (without.optimizer_step, without.optimizer_zero_grad, lambda: without.set_lr(1.0)):
        with pytest.raises(ConfigError, match="no optimizer"):
            call()
    without.lr_scheduler_step()


def _groups(rank: int, folder: str) -> None:
    engine = FSDPEngine(TrainEngineConfig(path=folder, dtype="float32", optimizer=None))
    assert not engine.initialized
    for name in ("cpu_group", "data_parallel_group"):
        with pytest.raises(ConfigError, match="no process group"):
            getattr(engine, name)
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(1, 4, 2))
    assert engine.initialized and engine.cpu_group is engine.control_group
    assert engine.is_data_parallel_head() and engine.current_data_parallel_head() == rank
    total = torch.tensor(float(rank + 1))
    torch.distributed.all_reduce(total, group=engine.data_parallel_group)
    assert float(total) == sum(range(1, engine.data_parallel_world_size + 1))
    engine.destroy()
    assert not engine.initialized


def _check(rank: int, world_size: int, folder: str, check: Callable[[int, str], None]) -> None:
    check(rank, folder)


@pytest.mark.parametrize(
    "check", slow_but([_groups], [_lists, _filled_rows, _own_step, _rates_and_statistics, _groups])
)
def test_the_engine_answers_to_areals_names(
    tmp_path: Path, check: Callable[[int, str], None]
) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    run_ranks(_check, 2, str(tmp_path / "model"), check)


def test_filling_up_rows_that_are_not_packed_or_have_no_limit_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"'pad_to_maximum' is True, but 'mb_spec\.max_tokens_per_mb' is null"
    ):
        TrainEngineConfig(pad_to_maximum=True, mb_spec=MicroBatchSpec(max_tokens_per_mb=None))
    with pytest.raises(
        ConfigError, match="'pad_to_maximum' is True, but 'pack_sequences' is False"
    ):
        TrainEngineConfig(pad_to_maximum=True, pack_sequences=False)
    with pytest.raises(ConfigError, match="'logprobs_chunk_size' is 0"):
        TrainEngineConfig(logprobs_chunk_size=0)
    with pytest.raises(ConfigError, match=r"'mb_spec\.granularity' is 0"):
        MicroBatchSpec(granularity=0)
    with pytest.raises(ConfigError, match=r"'mb_spec\.n_mbs_divisor' is 0"):
        MicroBatchSpec(n_mbs_divisor=0)
