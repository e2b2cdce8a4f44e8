"""PPOActor and PPOCritic on a real sharded engine, against an unsharded padded model and
autograd.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.engine.api import Batch, FinetuneSpec
from holdfast.engine.config import MicroBatchSpec, OptimizerConfig
from holdfast.engine.fsdp_engine import FSDPEngine
from holdfast.engine.rl import NormConfig, PPOActor, PPOActorConfig, PPOCritic, PPOCriticConfig
from holdfast.engine.rl.losses import LOSS_AGG_MODES
from holdfast.utils.errors import BatchError
from tests.engine.models import build_reference, tiny_qwen3, write_model_folder
from tests.engine.rl.reference import reference_logprobs
from tests.helpers import run_ranks, untimed
from tests.once import make_once

LENGTHS = [7, 3, 9, 1, 5, 6]
SHARES = {1: [range(6)], 2: [range(4), range(4, 6)]}
TEMPERATURE = 0.8


def global_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(max(LENGTHS))[None, :] < torch.tensor(LENGTHS)[:, None]).long()
    loss_mask = mask.clone()
    loss_mask[:, :2] = 0  # a prompt of two tokens
    loss_mask[2, 5] = 0  # and a token that the model did not sample
    return {
        "input_ids": torch.randint(0, 15, mask.shape, generator=generator) * mask,
        "attention_mask": mask,
        "loss_mask": loss_mask,
        "rewards": torch.rand(6, generator=generator),
        "noise": torch.randn(mask.shape, generator=generator) * 0.3,
    }


def share_of(batch: Batch, rank: int, world_size: int) -> Batch:
    rows = torch.tensor(list(SHARES[world_size][rank]))
    longest = int(batch["attention_mask"][rows].sum(1).max())
    return {
        key: value[rows][:, :longest] if value.dim() == 2 else value[rows]
        for key, value in batch.items()
    }


def start(engine: FSDPEngine) -> None:
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(1, 100, 1))


def make_actor(path: str, **changes: Any) -> PPOActor:
    optimizer = OptimizerConfig(
        type="sgd", lr=0.5, weight_decay=0.0, gradient_clipping=1e6, warmup_steps_proportion=0.0
    )
    settings = {
        "path": path,
        "dtype": "float32",
        "temperature": TEMPERATURE,
        "mb_spec": MicroBatchSpec(max_tokens_per_mb=10),
        "optimizer": optimizer,
        "group_size": 2,
        "ppo_n_minibatches": 1,
        "reward_norm": NormConfig("group", std_level="group"),
    }
    config = PPOActorConfig(**(settings | changes))
    engine = FSDPEngine(config)
    start(engine)
    return PPOActor(config, engine)


def reference_update(
    batch: Batch, ref_logp: torch.Tensor, old: torch.Tensor
) -> tuple[nn.Module, dict[str, float]]:
    """One SGD step on the mean over all loss tokens of clipped surrogate + KL - entropy, written
    out in full.
    """
    model = build_reference(tiny_qwen3())
    mask = batch["loss_mask"].bool()
    rewards = batch["rewards"].reshape(-1, 2)
    scores = ((rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-5)).reshape(
        -1, 1
    )
    logp, entropy = reference_logprobs(model, batch, TEMPERATURE)
    advantages = scores.expand_as(logp)
    ratio = (logp - old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    kl = (ref_logp - logp).exp() - 1 - (ref_logp - logp)
    per_token = -surrogate + 0.1 * kl - 0.02 * entropy
    loss = per_token[mask].mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    clipped = ratio.clamp(0.8, 1.28) * advantages < ratio * advantages
    stats = {
        "loss": loss,
        "reward": batch["rewards"].mean(),
        "advantage": advantages[mask].mean(),
        "ratio": ratio[mask].mean(),
        "clip_fraction": clipped[mask].float().mean(),
        "kl": (ratio - 1 - ratio.log())[mask].mean(),
        "kl_ref": kl[mask].mean(),
        "entropy": entropy[mask].mean(),
        "grad_norm": norm,
        "n_loss_tokens": mask.sum(),
    }
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param -= 0.5 * param.grad
    return model, {name: float(value.detach()) for name, value in stats.items()}


def same_weights(engine: FSDPEngine, reference: nn.Module, atol: float) -> None:
    wanted = dict(reference.named_parameters())
    for name, param in engine.model.named_parameters():
        torch.testing.assert_close(param.full_tensor(), wanted[name].detach(), rtol=1e-4, atol=atol)  # type: ignore[attr-defined]


def raises_batch_error(action: Callable[[], object]) -> str:
    with pytest.raises(BatchError) as caught:
        action()
    return str(caught.value)


def _grpo_against_reference(rank: int, world_size: int, path: str) -> dict[str, float]:
    batch = global_batch()
    mine = share_of(batch, rank, world_size)
    actor = make_actor(path, kl_loss_coef=0.1, entropy_coeff=0.02, eps_clip_higher=0.28)
    with torch.no_grad():
        logp, _ = reference_logprobs(build_reference(tiny_qwen3()), batch, TEMPERATURE)
    batch |= {"old": logp + batch["noise"], "ref": logp - batch["noise"].flip(0)}
    expected_logp = share_of({**batch, "logp": logp}, rank, world_size)["logp"]
    torch.testing.assert_close(actor.compute_logp(mine), expected_logp, rtol=1e-4, atol=2e-5)

    shares = share_of(batch, rank, world_size)
    mine |= {"logprobs": shares["old"], "ref_logp": shares["ref"]}
    before = {key: value.clone() for key, value in mine.items()}
    ready = actor.compute_advantages(mine)
    stats = actor.ppo_update(ready)
    assert (
        all(torch.equal(before[key], mine[key]) for key in before) and before.keys() == mine.keys()
    )

    reference, expected = reference_update(batch, batch["ref"], batch["old"])
    assert expected["clip_fraction"] > 0
    same_weights(actor.engine, reference, atol=2e-5)  # type: ignore[arg-type]
    for name, value in expected.items():
        assert stats[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
    assert stats["tokens_per_second"] > 0
    assert (stats["n_seqs"], stats["n_tokens"], stats["n_updates"], stats["lr"]) == (
        6,
        sum(LENGTHS),
        1,
        0.5,
    )
    actor.engine.destroy()  # type: ignore[attr-defined]
    return untimed(stats)


def _uneven_and_bad_batches(rank: int, world_size: int, path: str) -> dict[str, Any]:
    mine = share_of(global_batch(), rank, world_size)
    actor = make_actor(path, ppo_n_minibatches=4, recompute_logprob=True)
    ready = actor.compute_advantages(mine)
    seen: dict[str, Any] = {"uneven": untimed(actor.ppo_update(ready))}
    weights = [param.full_tensor().clone() for param in actor.engine.model.parameters()]  # type: ignore[attr-defined]

    nobody = {**ready, "loss_mask": torch.zeros_like(ready["loss_mask"])}
    seen["nothing"] = raises_batch_error(lambda: actor.ppo_update(nobody))
    bad = {**mine, "rewards": mine["rewards"] / (0.0 if rank == 1 else 1.0)}
    seen["rewards"] = raises_batch_error(lambda: actor.compute_advantages(bad))
    odd = {key: value[:-1] if rank == 0 else value for key, value in mine.items()}
    seen["groups"] = raises_batch_error(lambda: actor.compute_advantages(odd))
    missing = mine if rank == 1 else ready
    seen["advantages"] = raises_batch_error(lambda: actor.ppo_update(missing))

    huge = {**ready, "advantages": ready["advantages"] * 0 + 3e38}
    seen["skipped"] = actor.ppo_update(huge)["update_skipped"]
    seen["unchanged"] = all(
        torch.equal(old, new.full_tensor())
        for old, new in zip(weights, actor.engine.model.parameters(), strict=True)  # type: ignore[attr-defined]
    )
    only_rank_0 = {**ready, "loss_mask": ready["loss_mask"] * (rank == 0)}
    seen["half"] = actor.ppo_update(only_rank_0)
    actor.engine.destroy()  # type: ignore[attr-defined]
    return seen


def _learning(rank: int, world_size: int, path: str) -> list[float]:
    adam = OptimizerConfig(lr=3e-3, warmup_steps_proportion=0.0)
    actor = make_actor(
        path, optimizer=adam, recompute_logprob=True, ppo_n_minibatches=2, group_size=2
    )
    mine = share_of(global_batch(), rank, world_size)
    ready = actor.compute_advantages(mine)
    margins = []
    as_list: Any = [mine]
    assert "the batch is a list" in raises_batch_error(lambda: actor.compute_ref_logp(as_list))
    for _ in range(8):
        logp = actor.compute_logp(mine) * ready["loss_mask"]
        sums = actor.engine.all_reduce_stats({"margin": float((logp * ready["advantages"]).sum())})
        margins.append(sums["margin"])
        actor.ppo_update(ready)
        actor.engine.step_lr_scheduler()
    actor.engine.destroy()  # type: ignore[attr-defined]
    return margins


def _critic(rank: int, world_size: int, path: str) -> list[dict[str, float]]:
    adam = OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0)
    config = PPOCriticConfig(
        path=path, dtype="float32", init_from_scratch=True, optimizer=adam, ppo_n_minibatches=2
    )
    config.eps_clip = 1e3
    config.mb_spec = MicroBatchSpec(n_mbs=2)
    engine = FSDPEngine(config)
    start(engine)
    critic = PPOCritic(config, engine)
    mine = share_of(global_batch(), rank, world_size)
    values = critic.compute_values(mine)
    raw = engine.forward_batch(mine)
    mask = mine["attention_mask"]
    assert torch.equal(values[:, 1:], raw[:, :-1] * mask[:, 1:]) and not bool(values[:, 0].any())

    lengths = mask.sum(1)
    as_list: Any = [mine]
    assert "the batch is a list" in raises_batch_error(lambda: critic.with_values(as_list))
    last_values = critic.with_values(mine)["last_values"]
    assert last_values.tolist() == [float(raw[i, n - 1]) for i, n in enumerate(lengths)]
    truncated = torch.arange(len(lengths)) % 2 == 0
    bootstrapping = make_actor(
        path, reward_norm=None, discount=0.9, gae_lambda=0.95, bootstrap_truncated=True
    )
    seen_from = {"values": values, "last_values": last_values, "truncated": truncated}
    returns = bootstrapping.compute_advantages({**mine, **seen_from})["returns"].double()
    for i, row in enumerate(mine["loss_mask"].bool()):
        v = [*values[i, row].double().tolist(), float(last_values[i]) * float(truncated[i])]
        gain, expected = 0.0, []
        for t in reversed(range(len(v) - 1)):
            reward = float(mine["rewards"][i]) if t == len(v) - 2 else 0.0
            gain = reward + 0.9 * v[t + 1] - v[t] + 0.9 * 0.95 * gain
            expected.insert(0, gain + v[t])
        assert returns[i, row].tolist() == pytest.approx(expected, abs=1e-5)
    lacks = {name: value for name, value in seen_from.items() if name != "last_values"}
    assert "'last_values'" in raises_batch_error(
        lambda: bootstrapping.compute_advantages({**mine, **lacks})
    )
    assert "is for GAE" in raises_batch_error(
        lambda: bootstrapping.compute_advantages({**mine, "truncated": truncated})
    )
    bootstrapping.engine.destroy()  # type: ignore[attr-defined]

    actor = make_actor(path, reward_norm=None, discount=0.9, gae_lambda=0.95)
    ready = actor.compute_advantages({**mine, "values": values})
    assert not bool(ready["returns"][~ready["loss_mask"]].any())
    seen = [untimed(critic.ppo_update(ready)) for _ in range(12)]
    raises_batch_error(lambda: critic.ppo_update(mine))
    actor.engine.destroy()  # type: ignore[attr-defined]
    engine.destroy()
    return seen


def verls_value_loss(
    mode: str, values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor
) -> float:
    """Sums over rows in float64. ``seq-mean-token-sum-norm`` has TRL's mean over sequences, L =
    9.
    """
    rows = []
    for v, v_old, target, row in zip(
        *(x.double() for x in (values, old, returns)), mask.bool(), strict=True
    ):
        near = v.clamp(v_old - 0.5, v_old + 0.5)
        rows.append(torch.max((v - target) ** 2, (near - target) ** 2)[row])
    rows = [row for row in rows if len(row)]
    total = {
        "token-mean": torch.cat(rows).mean(),
        "seq-mean-token-mean": torch.stack([row.mean() for row in rows]).mean(),
        "seq-mean-token-sum": torch.stack([row.sum() for row in rows]).mean(),
        "seq-mean-token-sum-norm": torch.stack([row.sum() for row in rows]).mean() / 9,
    }[mode]
    return 0.5 * float(total)


def _value_losses(rank: int, world_size: int, path: str) -> None:
    optimizer = OptimizerConfig(type="sgd", lr=0.0, weight_decay=0.0)
    spec = MicroBatchSpec(max_tokens_per_mb=10)
    config = PPOCriticConfig(
        path=path, dtype="float32", optimizer=optimizer, ppo_n_minibatches=1, mb_spec=spec
    )
    engine = FSDPEngine(config)
    start(engine)
    batch, generator = global_batch(), torch.Generator().manual_seed(3)
    values = PPOCritic(config, engine).compute_values(batch)
    batch["values"], batch["returns"] = (
        values + torch.randn(values.shape, generator=generator) * scale for scale in (0.6, 2.0)
    )
    for mode in LOSS_AGG_MODES:
        factor = 9.0 if mode == "seq-mean-token-sum-norm" else None
        critic = PPOCritic(replace(config, loss_agg_mode=mode, loss_scale_factor=factor), engine)
        expected = verls_value_loss(
            mode, values, batch["values"], batch["returns"], batch["loss_mask"]
        )
        assert critic.ppo_update(batch)["loss"] == pytest.approx(expected, rel=1e-5), mode
    engine.destroy()


def _first_has_old_logprobs(rank: int, world_size: int, path: str) -> tuple[dict, dict]:
    unchanged = OptimizerConfig(type="sgd", lr=0.0, weight_decay=0.0)
    actor = make_actor(path, recompute_logprob=True, optimizer=unchanged)
    ready = actor.compute_advantages(share_of(global_batch(), rank, world_size))
    old = actor.compute_logp(ready)
    given = {**ready, "prox_logp": old + ready["noise"] * (rank == 0)}
    on_all = untimed(actor.ppo_update(given))
    on_first = untimed(actor.ppo_update(given if rank == 0 else ready))
    actor.engine.destroy()  # type: ignore[attr-defined]
    return on_all, on_first


REFUSED = {
    "loss_mask": "batch['loss_mask'] has shape [4]; expected [4, 9], per token",
    "logprobs": "batch['logprobs'] has shape [4]; expected [4, 9], per token",
    "values": "1 rank(s) have 'values' in their share of the batch, and 1 do not",
    "kl_rewards": "1 rank(s) have 'kl_rewards' in their share of the batch, and 1 do not",
}
"""Entry of rank 0's share -> its error."""


def _first_has_other_entries(rank: int, world_size: int, path: str) -> dict[str, str]:
    actor = make_actor(path, recompute_logprob=True, reward_norm=NormConfig(), kl_ctl=0.1)
    actor.config.kl_target = 0.1
    whole = global_batch()
    whole["logprobs"] = whole["ref_logp"] = whole["noise"]
    mine = share_of(whole, rank, world_size)
    ready = actor.compute_advantages(mine)
    per_token = ready.pop("kl_rewards")
    seen = {}
    for key in REFUSED:
        entry = per_token if key in ("values", "kl_rewards") else per_token[:, -1]
        more = {key: entry} if rank == 0 else {}
        if key in ("logprobs", "kl_rewards"):
            refused = partial(actor.ppo_update, {**ready, **more})
        else:
            refused = partial(actor.compute_advantages, {**mine, **more})
        seen[key] = raises_batch_error(refused)
    actor.engine.destroy()  # type: ignore[attr-defined]
    return seen


def _all_checks(rank: int, world_size: int, path: str) -> dict[str, Any]:
    return {
        "grpo": _grpo_against_reference(rank, world_size, path),
        "uneven": _uneven_and_bad_batches(rank, world_size, path),
        "learning": _learning(rank, world_size, path),
        "critic": _critic(rank, world_size, path),
    }


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("models") / "qwen3"
    write_model_folder(folder, tiny_qwen3())
    return str(folder)


@pytest.fixture(scope="module")
def two_ranks(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return make_once(
        tmp_path_factory, "actor", lambda _: run_ranks(_all_checks, 2, model_path, timeout_s=150)
    )


@pytest.mark.slow
def test_grpo_on_two_ranks_takes_the_step_of_an_unsharded_padded_model(
    two_ranks: list[dict[str, Any]],
) -> None:
    first, second = (result["grpo"] for result in two_ranks)
    assert first == second


def test_old_log_probabilities_that_one_rank_has_already_are_kept(model_path: str) -> None:
    for on_all, on_first in run_ranks(_first_has_old_logprobs, 2, model_path, timeout_s=20):
        assert on_first == pytest.approx(on_all, rel=1e-5)
        assert on_all["kl"] > 1e-3


def test_entries_that_one_rank_has_in_another_way_are_an_error_on_every_rank(
    model_path: str,
) -> None:
    first, second = run_ranks(_first_has_other_entries, 2, model_path, timeout_s=20)
    for key, message in REFUSED.items():
        assert message in first[key]
        assert message in second[key] or "1 other rank(s) refused" in second[key]


def test_value_losses_become_one_by_loss_agg_mode_as_in_verl(model_path: str) -> None:
    run_ranks(_value_losses, 1, model_path)


def test_grpo_on_one_rank_takes_the_same_step(model_path: str) -> None:
    run_ranks(_grpo_against_reference, 1, model_path)


@pytest.mark.slow
def test_minibatches_lose_no_sequence_when_ranks_have_fewer_sequences_than_minibatches(
    two_ranks: list[dict[str, Any]],
) -> None:
    first, second = (result["uneven"] for result in two_ranks)
    assert first["uneven"] == second["uneven"]
    loss_tokens = float(global_batch()["loss_mask"].sum())
    assert (first["uneven"]["n_seqs"], first["uneven"]["n_loss_tokens"]) == (6, loss_tokens)
    # Rank 0's one-token sequence is its own mini-batch. It counts only if rank 1 has tokens in the
    # same mini-batch.
    assert 3 <= first["uneven"]["n_updates"] <= 4
    assert first["half"]["n_seqs"] == 6 and first["half"]["n_loss_tokens"] < loss_tokens


def test_a_bad_batch_on_one_rank_is_an_error_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    first, second = (result["uneven"] for result in two_ranks)
    assert "no loss token on any rank" in first["nothing"] and first["nothing"] == second["nothing"]
    assert (
        "'rewards'] is NaN or infinite" in second["rewards"]
        and "1 other rank(s)" in first["rewards"]
    )
    assert (
        "3 sequences are not whole groups of 2" in first["groups"]
        and "1 other rank(s)" in second["groups"]
    )
    assert "give the batch that compute_advantages returns" in second["advantages"]
    assert "1 other rank(s)" in first["advantages"]


def test_updates_with_a_non_finite_gradient_are_counted_and_change_nothing(
    two_ranks: list[dict[str, Any]],
) -> None:
    for result in two_ranks:
        assert result["uneven"]["skipped"] >= 1 and result["uneven"]["unchanged"]


def test_repeated_updates_raise_the_probability_of_rewarded_sequences(
    two_ranks: list[dict[str, Any]],
) -> None:
    margins = two_ranks[0]["learning"]
    assert all(later > earlier for earlier, later in pairwise(margins))


def test_critic_updates_bring_values_towards_the_returns(two_ranks: list[dict[str, Any]]) -> None:
    first, second = (result["critic"] for result in two_ranks)
    assert first == second
    assert first[-1]["value_error"] < 0.5 * first[0]["value_error"]
