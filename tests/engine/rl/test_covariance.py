"""Tokens selected by the covariance losses, independent of the distribution of rows over ranks."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from holdfast.engine.api import Batch
from holdfast.engine.rl import PPOActorConfig
from holdfast.engine.rl.policy_losses import picked_tokens
from holdfast.utils.metrics import reduce_stats
from tests.helpers import run_ranks

CASES: dict[str, dict[str, Any]] = {
    "drawn": {
        "policy_loss": "clip_cov",
        "clip_cov_ratio": 0.1,
        "clip_cov_lb": 0.2,
        "clip_cov_ub": 2.0,
    },
    "all": {
        "policy_loss": "clip_cov",
        "clip_cov_ratio": 1.0,
        "clip_cov_lb": 0.2,
        "clip_cov_ub": 2.0,
    },
    "none": {"policy_loss": "clip_cov", "clip_cov_lb": 90.0, "clip_cov_ub": 91.0},
    "largest": {"policy_loss": "kl_cov", "kl_cov_ratio": 0.1},
    "one": {"policy_loss": "kl_cov"},
}


@dataclass
class Ranks:
    """The methods of an engine that selecting tokens needs."""

    data_parallel_rank: int = 0
    data_parallel_world_size: int = 1

    def all_reduce_stats(self, sums: dict[str, float]) -> dict[str, float]:
        return reduce_stats(sums)


def rows(ties: bool) -> tuple[Batch, torch.Tensor]:
    """Eight rows of up to 30 tokens. With ``ties`` many covariances are equal."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.tensor([30, 4, 17, 1, 22, 9, 30, 12])
    mask = torch.arange(30) < lengths[:, None]
    noise = [torch.randn(8, 30, generator=draw) for _ in range(3)]
    advantages, logprobs, gaps = [(2 * each).round() / 2 for each in noise] if ties else noise
    loss_mask = mask & (torch.rand(8, 30, generator=draw) < 0.8)
    batch = {
        "input_ids": torch.randint(0, 100, mask.shape, generator=draw) * mask,
        "attention_mask": mask.long(),
        "loss_mask": loss_mask,
        "advantages": advantages.masked_fill(~loss_mask, torch.nan),
        "old_logprobs": (logprobs + gaps / 4).masked_fill(~loss_mask, -torch.inf),
    }
    return batch, logprobs.masked_fill(~loss_mask, -torch.inf)


def _pick(rank: int, world_size: int, shares: list[range], ties: bool) -> dict[str, torch.Tensor]:
    batch, logprobs = rows(ties)
    mine = list(shares[rank])
    longest = int(batch["attention_mask"][mine].sum(1).max())
    share = {key: value[mine][:, :longest] for key, value in batch.items()}
    engine: Any = Ranks(rank, world_size)
    return {
        name: picked_tokens(
            share,
            logprobs[mine][:, :longest],
            share["old_logprobs"],
            PPOActorConfig(**case),
            engine,
        )
        for name, case in CASES.items()
    }


def flat(picked: list[torch.Tensor]) -> list[list[int]]:
    """Places of the selected tokens of each row."""
    return [row.nonzero().flatten().tolist() for each in picked for row in each]


@pytest.mark.parametrize("ties", [False, True])
def test_the_same_tokens_are_picked_however_rows_are_spread(ties: bool) -> None:
    alone = _pick(0, 1, [range(8)], ties)
    batch, _ = rows(ties)
    n_tokens = int(batch["loss_mask"].sum())
    counts = {name: int(picked.sum()) for name, picked in alone.items()}
    assert counts["drawn"] == counts["largest"] == int(0.1 * n_tokens) < counts["all"]
    assert (counts["none"], counts["one"]) == (0, 1)
    assert not any((picked & ~batch["loss_mask"]).any() for picked in alone.values())
    assert not (alone["drawn"] & ~alone["all"]).any()
    spread = run_ranks(_pick, 2, [range(3), range(3, 8)], ties)
    for name in CASES:
        assert flat([each[name] for each in spread]) == flat([alone[name]]), name


def test_other_tokens_are_another_draw() -> None:
    batch, logprobs = rows(False)
    engine: Any = Ranks()
    config, draws = PPOActorConfig(**CASES["drawn"]), []
    for shift in range(4):
        batch["input_ids"] = batch["input_ids"] + shift * batch["attention_mask"]
        draws.append(flat([picked_tokens(batch, logprobs, batch["old_logprobs"], config, engine)]))
    assert all(a != b for i, a in enumerate(draws) for b in draws[:i])
