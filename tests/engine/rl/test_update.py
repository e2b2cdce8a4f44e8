"""Mini-batches and token statistics in one process, and agreement about a batch on ranks with the
same data.
"""

import pytest
import torch

from holdfast.engine import FSDPEngine, TrainEngineConfig
from holdfast.engine.rl.update import (
    TokenStats,
    all_ranks_accept,
    loss_mask_of,
    mean_over_ranks,
    split_minibatches,
)
from holdfast.utils.errors import BatchError
from tests.engine.meshes import mesh_options
from tests.engine.training.test_microbatch import make_batch
from tests.helpers import run_ranks


def test_split_minibatches_holds_every_row_once_in_equal_token_counts() -> None:
    lengths = [5, 1, 9, 3, 3, 7, 2, 8]
    minibatches = split_minibatches(make_batch(lengths, pad=3), 3)
    rows = [int(reward) for minibatch in minibatches for reward in minibatch["rewards"]]
    assert sorted(rows) == list(range(8))
    sums = [int(minibatch["attention_mask"].sum()) for minibatch in minibatches]
    assert sum(sums) == sum(lengths) and max(sums) - min(sums) <= 2
    assert all(
        minibatch["input_ids"].shape[1] == minibatch["attention_mask"].sum(1).max()
        for minibatch in minibatches
    )
    again = split_minibatches(make_batch(lengths, pad=3), 3)
    assert all(
        torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(minibatches, again, strict=True)
    )


def test_split_minibatches_fills_up_with_tokens_that_do_not_count() -> None:
    batch = make_batch([4, 2])
    minibatches = split_minibatches(batch, 4)
    assert [minibatch["input_ids"].tolist() for minibatch in minibatches[2:]] == [[[1]], [[1]]]
    assert [int(loss_mask_of(minibatch).sum()) for minibatch in minibatches] == [3, 1, 0, 0]
    assert all(minibatch.keys() == batch.keys() for minibatch in minibatches)


def test_loss_mask_of_leaves_out_padding_and_first_tokens_without_changing_batches() -> None:
    batch = make_batch([3, 1], pad=1)
    batch["loss_mask"] = torch.ones(2, 4, dtype=torch.bool)
    assert loss_mask_of(batch).tolist() == [[False, True, True, False], [False] * 4]
    assert bool(batch["loss_mask"].all())
    del batch["loss_mask"]
    assert loss_mask_of(batch).sum() == 2 and batch["attention_mask"].sum() == 4


def test_token_stats_average_over_loss_tokens_of_all_micro_batches() -> None:
    class OneRank:
        def all_reduce_stats(self, sums: dict[str, float]) -> dict[str, float]:
            return dict(sums)

    stats = TokenStats()
    nan = float("nan")
    stats.add({"x": torch.tensor([1.0, nan, 2.0])}, torch.tensor([1, 0, 1]))
    stats.add({"x": torch.tensor([6.0])}, torch.tensor([True]))
    assert stats.reduce(OneRank(), ("x", "never")) == {"x": 3.0}  # type: ignore[arg-type]


def _peers(rank: int, world_size: int) -> None:
    engine = FSDPEngine(TrainEngineConfig(path="none", **mesh_options("fsdp:d1c2")))
    engine.create_process_group()
    assert (
        engine.all_reduce_stats({"seen": 3.0}) == {"seen": 3.0}
        and mean_over_ranks(engine, torch.ones(2)) == 1.0
    )
    for wrong in range(world_size):
        words = "wrong" if rank == wrong else r"1 other rank\(s\) refused their share"
        with pytest.raises(BatchError, match=words), all_ranks_accept(engine):
            if rank == wrong:
                raise BatchError("wrong")

    # An error that no check foresaw
    expected = RuntimeError if rank == 0 else BatchError
    with pytest.raises(expected), all_ranks_accept(engine):
        if rank == 0:
            raise RuntimeError
    engine.destroy()


def test_ranks_with_the_same_data_count_once_and_refuse_a_batch_together() -> None:
    run_ranks(_peers, 2)
