"""Lists of trajectories equal the padded batch they are joined to. Others are refused with their
number and key.
"""

from typing import Any

import pytest
import torch

from holdfast.engine.api import Batch
from holdfast.engine.training.batch import join_trajectories, split_like
from holdfast.utils.errors import BatchError


def trajectory(rows: int, seqlen: int, start: int = 0) -> Batch:
    ids = torch.arange(start, start + rows * seqlen).reshape(rows, seqlen) + 1
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "hidden": ids[..., None].float().repeat(1, 1, 2),
        "rewards": torch.arange(rows).float() + start,
    }


def test_a_list_is_padded_to_its_longest_and_results_are_split_again() -> None:
    parts = [trajectory(1, 3), trajectory(2, 5, 10), trajectory(1, 1, 30)]
    batch = join_trajectories(parts)
    assert {key: list(tensor.shape) for key, tensor in batch.items()} == {
        "input_ids": [4, 5],
        "attention_mask": [4, 5],
        "hidden": [4, 5, 2],
        "rewards": [4],
    }
    assert batch["attention_mask"].sum(1).tolist() == [3, 5, 5, 1]
    assert batch["rewards"].tolist() == [0, 10, 11, 30]
    assert [
        torch.equal(a, b["input_ids"])
        for a, b in zip(split_like(batch["input_ids"], parts), parts, strict=True)
    ]
    assert torch.equal(batch["hidden"][..., 1], batch["input_ids"].float())
    assert join_trajectories(batch) is batch


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 0, 1]])
def test_trajectories_without_experts_are_joined_with_others(
    order: list[int], dtype: torch.dtype
) -> None:
    routes = torch.arange(1, 2 * 5 * 3 * 2 + 1, dtype=dtype).reshape(2, 5, 3, 2)
    known = {**trajectory(2, 5), "routed_experts": routes}
    empty = [torch.zeros(rows, 3, 0, 0, dtype=torch.uint8) for rows in (1, 2)]
    without = [{**trajectory(len(own), 3), "routed_experts": own} for own in empty]
    parts = [known, *without]
    found = join_trajectories([parts[i] for i in order])["routed_experts"]
    of_parts = dict(zip(order, found.split([len(parts[i]["rewards"]) for i in order]), strict=True))
    assert found.dtype == dtype and found.shape == (5, 5, 3, 2)
    assert torch.equal(of_parts[0], routes)
    assert not of_parts[1].any() and not of_parts[2].any()
    assert join_trajectories(without)["routed_experts"].shape == (3, 3, 0, 0)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (torch.ones(1, 2, 4, 2, dtype=torch.uint8), r"\[1, 3, 3, 2\]; .* same model"),
        (torch.ones(1, 2, 3, 2, dtype=torch.int16), "'routed_experts' is torch.int16"),
        ([1], "'routed_experts' is a list; expected a torch.Tensor"),
        (None, "trajectory 1 has the keys .* the first one .*'routed_experts'"),
    ],
)
def test_trajectories_with_other_experts_are_not_joined(routes: Any, message: str) -> None:
    first = {**trajectory(1, 3), "routed_experts": torch.ones(1, 3, 3, 2, dtype=torch.uint8)}
    second = trajectory(1, 2)
    if routes is not None:
        second["routed_experts"] = routes
    with pytest.raises(BatchError, match=message):
        join_trajectories([first, second])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": [1.0]}, "trajectory 1: 'rewards' is a list; expected a torch.Tensor"),
        ({"rewards": torch.tensor(1.0)}, r"trajectory 1: 'rewards' is torch.float32 of shape \[\]"),
        ({"input_ids": torch.ones(1, 2)}, "trajectory 1: 'input_ids' is torch.float32"),
        (
            {"hidden": torch.ones(1, 2, 3)},
            r"trajectory 1: 'hidden' is of shape \[1, 2, 3\], not \[1, 3, 2\]",
        ),
        ({"extra": torch.ones(1)}, r"trajectory 1 has the keys .*'extra'"),
    ],
)
def test_trajectories_that_cannot_be_joined_are_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        join_trajectories([trajectory(1, 3), {**trajectory(1, 2), **change}])


def test_no_list_of_dicts_is_refused() -> None:
    with pytest.raises(BatchError, match="empty"):
        join_trajectories([])
    strangers: Any = [trajectory(1, 3), "text"]
    with pytest.raises(BatchError, match="trajectory 1 is a str; expected a dict"):
        join_trajectories(strangers)
