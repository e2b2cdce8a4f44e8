"""Micro-batching: nothing is lost, parts are balanced, deterministic and equal on every rank, and
unpack undoes it.
"""

import random
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from holdfast.engine.api import Batch
from holdfast.engine.config import MicroBatchSpec
from holdfast.engine.training.batch import (
    join_trajectories,
    refuse_unknown_tokens,
    select_rows,
    sequence_lengths,
    validate_batch,
)
from holdfast.engine.training.microbatch import (
    CutRules,
    split_and_weigh,
    split_batch,
    unpack,
    weigh,
)
from holdfast.engine.training.packed_batch import expand_to_tokens
from holdfast.engine.training.partition import partition
from holdfast.utils.errors import BatchError, PeerError
from tests.helpers import run_ranks


def make_batch(lengths: list[int], pad: int = 0) -> Batch:
    size, seqlen = len(lengths), max(lengths) + pad
    mask = torch.arange(seqlen)[None, :] < torch.tensor(lengths)[:, None]
    tokens = torch.arange(size * seqlen).reshape(size, seqlen) + 1
    return {
        "input_ids": tokens.masked_fill(~mask, 0),
        "attention_mask": mask.long(),
        "loss_mask": mask.long(),
        "logprobs": tokens.float().masked_fill(~mask, 7.0),
        "rewards": torch.arange(size).float(),
    }


LENGTHS = [5, 1, 9, 3, 3, 7, 2]


@pytest.mark.parametrize("algorithm", ["ffd", "kk"])
@pytest.mark.parametrize("n_mbs", [1, 2, 5, 7])
def test_split_batch_packs_every_token_once_and_unpack_puts_it_back(
    algorithm: str, n_mbs: int
) -> None:
    batch = make_batch(LENGTHS, pad=2)
    mbs = split_batch(batch, MicroBatchSpec(n_mbs=n_mbs, packing_algorithm=algorithm))
    assert len(mbs) == n_mbs and not any(mb.is_dummy for mb in mbs)
    assert sorted(torch.cat([mb.indices for mb in mbs]).tolist()) == list(range(len(LENGTHS)))
    assert sum(mb.n_tokens for mb in mbs) == sum(LENGTHS)
    restored = unpack([mb.data["logprobs"] for mb in mbs], mbs, *batch["input_ids"].shape)
    assert torch.equal(restored, batch["logprobs"] * batch["attention_mask"])


@pytest.mark.parametrize("algorithm", ["ffd", "kk"])
@pytest.mark.parametrize(("limit", "expected"), [(None, 3), (6, 4), (14, 3)])
def test_adjacent_sequences_of_a_granularity_stay_together(
    algorithm: str, limit: int | None, expected: int
) -> None:
    batch = make_batch([5, 1, 9, 3, 3, 7, 2, 2])
    spec = MicroBatchSpec(
        n_mbs=3, granularity=2, max_tokens_per_mb=limit, packing_algorithm=algorithm
    )
    mbs = split_batch(batch, spec)
    assert len(mbs) == expected
    for mb in mbs:
        firsts, seconds = mb.indices.tolist()[::2], mb.indices.tolist()[1::2]
        assert seconds == [row + 1 for row in firsts] and all(row % 2 == 0 for row in firsts)
    restored = unpack([mb.data["logprobs"] for mb in mbs], mbs, *batch["input_ids"].shape)
    assert torch.equal(restored, batch["logprobs"] * batch["attention_mask"])
    with pytest.raises(
        BatchError, match=r"has 3 sequences, which config key 'mb_spec.granularity' \(2\) does not"
    ):
        split_batch(make_batch([1, 2, 3]), spec)


@pytest.mark.parametrize(
    ("n_mbs", "divisor", "expected"), [(None, 1, 1), (1, 3, 3), (4, 3, 6), (5, 4, 8), (6, 3, 6)]
)
def test_the_number_of_micro_batches_is_a_multiple_of_the_divisor(
    n_mbs: int | None, divisor: int, expected: int
) -> None:
    mbs = split_batch(make_batch(LENGTHS), MicroBatchSpec(n_mbs=n_mbs, n_mbs_divisor=divisor))
    assert len(mbs) == expected and sum(mb.is_dummy for mb in mbs) == max(
        0, expected - len(LENGTHS)
    )
    by_tokens = split_batch(
        make_batch(LENGTHS), MicroBatchSpec(n_mbs_divisor=divisor, max_tokens_per_mb=9)
    )
    assert len(by_tokens) % divisor == 0 and all(mb.n_tokens <= 9 for mb in by_tokens)


def test_a_row_is_filled_up_with_sequences_no_longer_than_its_own_that_the_loss_does_not_see() -> (
    None
):
    (mb,) = split_batch(make_batch([3, 2]), MicroBatchSpec(), rules=CutRules(row_tokens=12))
    assert mb.n_tokens == 5 and mb.cu_seqlens.tolist() == [0, 3, 5]
    row = mb.row()
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2, 0]
    assert row.cu_seqlens.tolist() == [0, 3, 5, 8, 11, 12] and row.lengths == (3, 2, 3, 3, 1)
    assert row.data["input_ids"].tolist() == [*mb.data["input_ids"].tolist(), *[0] * 7]
    assert row.cu_seqlens.dtype == mb.cu_seqlens.dtype
    (longer,) = split_batch(make_batch([3, 2]), MicroBatchSpec(), rules=CutRules(row_tokens=4))
    assert longer.row().n_tokens == 5, "a sequence that is too long stays whole"


def test_a_dummy_has_the_shape_of_the_other_rows() -> None:
    (mb,) = split_batch(make_batch([3, 2]), MicroBatchSpec(), rules=CutRules(row_tokens=9))
    for dummy in (mb.first_token(), mb.first_token().first_token()):
        assert dummy.n_tokens == 1 and dummy.row().n_tokens == 9
        assert dummy.row().lengths == (1, 3, 3, 2), (
            "as long as sequences of the batch, not one token each"
        )
    (short,) = split_batch(make_batch([3, 2]), MicroBatchSpec())
    assert short.first_token().row().n_tokens == 1


def test_micro_batch_restarts_positions_and_masks_the_first_token_of_each_sequence() -> None:
    (mb,) = split_batch(make_batch([3, 1, 2]), MicroBatchSpec())
    assert mb.cu_seqlens.tolist() == [0, 3, 4, 6] and mb.cu_seqlens.dtype == torch.int32
    assert mb.position_ids.tolist() == [0, 1, 2, 0, 0, 1] and mb.position_ids.dtype == torch.int64
    assert mb.data["input_ids"].tolist() == [1, 2, 3, 4, 7, 8]
    assert mb.data["loss_mask"].tolist() == [0, 1, 1, 0, 0, 1]
    assert mb.data["rewards"].tolist() == [0, 1, 2]
    assert expand_to_tokens(mb.data["rewards"], mb.cu_seqlens, 6).tolist() == [0, 0, 0, 1, 2, 2]


def test_micro_batch_takes_the_attention_mask_when_there_is_no_loss_mask() -> None:
    batch = make_batch([3, 2], pad=1)
    del batch["loss_mask"]
    (mb,) = split_batch(batch, MicroBatchSpec())
    assert mb.data["loss_mask"].tolist() == [0, 1, 1, 0, 1]


def test_padded_form_has_the_same_tokens_its_mask_restores_packed_order() -> None:
    (mb,) = split_batch(make_batch([3, 1, 2], pad=4), MicroBatchSpec())
    padded = mb.padded()
    assert padded["input_ids"].tolist() == [[1, 2, 3], [8, 0, 0], [15, 16, 0]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert torch.equal(padded["input_ids"][mb.rows, mb.position_ids], mb.data["input_ids"])


def test_split_batch_does_not_change_the_batch() -> None:
    batch = make_batch(LENGTHS)
    before = {key: tensor.clone() for key, tensor in batch.items()}
    split_batch(batch, MicroBatchSpec(n_mbs=2))
    assert (
        all(torch.equal(before[key], batch[key]) for key in before)
        and before.keys() == batch.keys()
    )


@pytest.mark.parametrize("algorithm", ["ffd", "kk"])
def test_max_tokens_per_mb_is_kept_except_by_a_single_longer_sequence(algorithm: str) -> None:
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 30))]
        spec = MicroBatchSpec(
            n_mbs=rng.randint(1, 3), max_tokens_per_mb=32, packing_algorithm=algorithm
        )
        mbs = split_batch(make_batch(lengths), spec)
        assert len(mbs) >= spec.rounded(1)
        assert all(mb.n_tokens <= 32 or len(mb.indices) == 1 for mb in mbs)
        assert sorted(torch.cat([mb.indices for mb in mbs]).tolist()) == list(range(len(lengths)))
        sizes = [mb.n_tokens for mb in mbs if not mb.is_dummy]
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("algorithm", ["ffd", "kk"])
def test_partition_is_balanced_and_never_leaves_a_bin_empty(algorithm: str) -> None:
    rng = random.Random(1)
    for _ in range(50):
        lengths = [rng.randint(1, 500) for _ in range(rng.randint(1, 60))]
        n_bins = rng.randint(1, len(lengths))
        bins = partition(lengths, n_bins, algorithm)
        sums = [sum(lengths[i] for i in rows) for rows in bins]
        assert len(bins) == n_bins and min(sums) > 0
        assert sorted(i for rows in bins for i in rows) == list(range(len(lengths)))
        assert max(sums) - min(sums) <= max(lengths)


def test_karmarkar_karp_finds_the_even_partition_that_longest_first_misses() -> None:
    lengths = [
        8,
        7,
        6,
        5,
        4,
    ]  # both from Korf, "A complete anytime algorithm for number partitioning", 1998
    spread = {}
    for algorithm in ("ffd", "kk"):
        sums = [sum(lengths[i] for i in rows) for rows in partition(lengths, 2, algorithm)]
        spread[algorithm] = max(sums) - min(sums)
    assert spread == {"ffd": 4, "kk": 2}


def test_split_batch_fills_up_with_dummies_when_there_are_too_few_sequences() -> None:
    batch = make_batch([4, 2])
    mbs = split_batch(batch, MicroBatchSpec(n_mbs=4))
    assert [mb.is_dummy for mb in mbs] == [False, False, True, True]
    dummy = mbs[-1]
    assert (
        dummy.n_tokens == 1
        and dummy.indices.numel() == 0
        and dummy.data["loss_mask"].tolist() == [0]
    )
    assert dummy.data["input_ids"].tolist() == [1] and dummy.cu_seqlens.tolist() == [0, 1]
    assert dummy.data.keys() == mbs[0].data.keys()
    outputs = [torch.full((mb.n_tokens,), 9.0) for mb in mbs]
    assert torch.equal(unpack(outputs, mbs, 2, 4), 9.0 * batch["attention_mask"])


class _Copies(TorchFunctionMode):
    """Records asynchronous copies, and makes none."""

    def __init__(self) -> None:
        self.non_blocking: set[bool] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.to:
            return func(*args, **(kwargs or {}))
        self.non_blocking.add(kwargs.get("non_blocking", False))
        return args[0]


@pytest.mark.parametrize("device", ["cpu", "cuda:1", torch.device("cpu"), torch.device("cuda", 1)])
def test_copies_to_the_host_are_waited_for_copies_to_gpus_not(device: torch.device | str) -> None:
    (mb,) = split_batch(make_batch([3, 2]), MicroBatchSpec())
    with _Copies() as copies:
        mb.to(device)
    assert copies.non_blocking == {"cuda" in str(device)}


def test_weights_are_float64_whether_they_are_given_as_numbers_or_as_tensors() -> None:
    micro_batches = split_batch(make_batch([3, 2, 4]), MicroBatchSpec(n_mbs=3))
    given: list[Any] = [0.1, torch.tensor([16777217]), torch.tensor(0.5, dtype=torch.bfloat16)]
    weights = iter(given)
    assert weigh(micro_batches, lambda data: next(weights)) == [0.1, 16777217.0, 0.5]


def test_unpack_refuses_an_output_with_another_number_of_tokens() -> None:
    mbs = split_batch(make_batch([4, 2]), MicroBatchSpec())
    with pytest.raises(BatchError, match="micro-batch of 6 tokens"):
        unpack([torch.zeros(5)], mbs, 2, 4)


def test_select_rows_cuts_to_the_longest_row() -> None:
    picked = select_rows(make_batch([5, 1, 3]), [2, 1])
    assert picked["input_ids"].shape == (2, 3) and picked["rewards"].tolist() == [2, 1]
    assert sequence_lengths(picked) == [3, 1]


def changed(**changes: object) -> Batch:
    batch = {**make_batch([3, 2]), **changes}
    return {key: value for key, value in batch.items() if value is not None}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (changed(input_ids=None), "no 'input_ids'"),
        (changed(attention_mask=None), "no 'attention_mask'"),
        (changed(input_ids=torch.ones(3)), r"shape \[3\]; expected \[batch, seqlen\]"),
        (changed(input_ids=torch.ones(2, 3)), "dtype torch.float32"),
        (changed(input_ids=torch.ones(0, 3, dtype=torch.int64)), "empty"),
        (changed(input_ids=torch.ones(2, 0, dtype=torch.int64)), "empty"),
        (changed(attention_mask=torch.ones(2, 4)), "'attention_mask'"),
        (changed(attention_mask=torch.full((2, 3), 2)), "other than 0 and 1"),
        (
            changed(attention_mask=torch.tensor([[1, 1, 1], [0, 1, 1]])),
            r"row\(s\) 1 are not right-padded",
        ),
        (changed(attention_mask=torch.tensor([[0, 0, 0], [1, 1, 1]])), r"row\(s\) 0 have no token"),
        (changed(loss_mask=torch.ones(2)), r"'loss_mask'\] has shape \[2\]; expected \[2, 3\]"),
        (
            {**make_batch([3, 2, 1]), "loss_mask": torch.ones(3)},  # as many rows as tokens
            r"'loss_mask'\] has shape \[3\]; expected \[3, 3\]",
        ),
        (changed(mm_token_type_ids=torch.ones(2)), r"'mm_token_type_ids'\] has shape \[2\]"),
        (changed(logprobs=torch.zeros(2, 4)), "'logprobs'"),
        (changed(rewards=torch.zeros(3)), r"'rewards'\] has shape \[3\]"),
        (changed(rewards=torch.tensor(1.0)), "'rewards'"),
        (changed(rewards=[1.0, 2.0]), "is a list"),
        ([make_batch([2]), make_batch([3])], "the batch is a list; expected a dict of tensors"),
    ],
)
def test_validate_batch_names_what_is_wrong(batch: Batch, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        validate_batch(batch)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8])
def test_a_token_that_no_embedding_has_is_named(dtype: torch.dtype) -> None:
    ids = torch.tensor([[1, 2, 3], [4, 99, 99]], dtype=dtype)
    batch = changed(input_ids=ids)
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    for enough in (100, 300, 200_000):
        refuse_unknown_tokens(batch, enough)
    refuse_unknown_tokens(batch, 5, image_token=99)
    with pytest.raises(
        BatchError, match=r"token 1 of row 1 of the batch has id 99 \(1 such\); expected 0 to 98"
    ):
        refuse_unknown_tokens(batch, 99)
    with pytest.raises(BatchError, match=r"token 2 of row 0 of the batch has id 3 \(2 such\)"):
        refuse_unknown_tokens(batch, 3, image_token=99)


def test_trajectories_with_images_and_without_tokens_are_refused_in_words() -> None:
    with pytest.raises(BatchError, match="no 'input_ids'"):
        without_tokens: Any = {**changed(input_ids=None), "multi_modal_input": [{}, {}]}
        validate_batch(join_trajectories([without_tokens]))


def _split_on_ranks(rank: int, world_size: int) -> dict[str, object]:
    spec = MicroBatchSpec(max_tokens_per_mb=8)
    mbs = split_batch(make_batch([8, 8, 8, 8, 3] if rank == 0 else [2, 1, 2]), spec)
    again = split_batch(make_batch([8, 8, 8, 8, 3] if rank == 0 else [2, 1, 2]), spec)
    same = all(
        torch.equal(a.indices, b.indices) and torch.equal(a.data["input_ids"], b.data["input_ids"])
        for a, b in zip(mbs, again, strict=True)
    )
    try:
        split_batch(make_batch([1]) if rank == 0 else {}, spec)
        error = None
    except (BatchError, PeerError) as caught:
        error = type(caught).__name__
    rows = [mb.indices.tolist() for mb in mbs]
    return {
        "n": len(mbs),
        "dummies": sum(mb.is_dummy for mb in mbs),
        "rows": rows,
        "same": same,
        "error": error,
    }


@pytest.mark.timeout(90)
def test_every_rank_gets_equally_many_micro_batches_and_hears_of_bad_ones() -> None:
    first, second = run_ranks(_split_on_ranks, 2)
    assert first["n"] == second["n"] == 5
    assert (first["dummies"], second["dummies"]) == (0, 2)
    assert sorted(row for rows in second["rows"] for row in rows) == [0, 1, 2]
    assert first["same"] and second["same"]
    assert (first["error"], second["error"]) == ("PeerError", "BatchError")


def _batches_of_two_data_ranks(rank: int, world_size: int, differs: str) -> None:
    data_rank, spec = rank // 2, MicroBatchSpec(n_mbs=2)
    batch = make_batch([3, 5, 2]) if data_rank == 0 else make_batch([4])
    if rank == 3 and differs:
        batch = batch | {differs: batch[differs].clone()}
        batch[differs][0, 1] += 1
    if differs:
        with pytest.raises(
            BatchError, match=r"ranks 2 and 3 share their data \(2 ranks do\), but were given"
        ):
            split_batch(batch, spec, rules=CutRules(ranks_with_same_data=2))
        return
    weighed = split_and_weigh(
        batch, spec, lambda data: data["loss_mask"].sum(), rules=CutRules(ranks_with_same_data=2)
    )
    assert weighed.total == (2 + 4 + 1) + 3, "each data rank counts once"
    assert len(weighed.micro_batches) == 2


@pytest.mark.parametrize("differs", ["", "input_ids", "loss_mask", "logprobs"])
def test_ranks_with_the_same_data_count_once_and_are_told_of_different_batches(
    differs: str,
) -> None:
    run_ranks(_batches_of_two_data_ranks, 4, differs)
