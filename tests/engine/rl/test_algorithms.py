"""Each choice of loss, weights, penalty and aggregation takes the same step as float64 sums over
sequences.

The batch is ragged, one row has no loss token, and all values outside of the loss mask are -inf.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast.engine.api import Batch
from holdfast.engine.config import MicroBatchSpec
from holdfast.engine.fsdp_engine import FSDPEngine
from holdfast.engine.rl import NormConfig, PPOActor, PPOActorConfig
from holdfast.engine.rl.off_policy import RejectionSamplingConfig
from tests.engine.models import build_reference, tiny_qwen3, write_model_folder
from tests.engine.rl.reference import (
    TAU_NEG,
    TAU_POS,
    aggregate,
    covariance_losses,
    interpolated,
    kl,
    picked_tokens,
    policy_losses,
    reference_logprobs,
    verl_weights,
    weights,
)
from tests.engine.rl.test_actor import (
    TEMPERATURE,
    global_batch,
    make_actor,
    raises_batch_error,
    share_of,
)
from tests.helpers import run_ranks

POLICIES = ("logprobs", "ref_logp", "prox_logp")
VERSION = 4
MEANS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
CASES: dict[str, dict[str, Any]] = {
    "ppo": {},
    **{f"ppo, {mode}": {"loss_agg_mode": mode} for mode in MEANS[1:]},
    "Dr. GRPO": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 9.0, "std": None},
    "gspo": {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    "gspo by tokens": {"importance_sampling_level": "sequence"},
    "cispo": {"policy_loss": "cispo"},
    "sapo": {"policy_loss": "sapo", "loss_agg_mode": "seq-mean-token-mean"},
    "sequence sapo": {"policy_loss": "sapo", "importance_sampling_level": "sequence"},
    "gpg": {"policy_loss": "gpg", "loss_agg_mode": "seq-mean-token-sum"},
    "gmpo": {"policy_loss": "gmpo"},
    **{
        f"KL {kind}": {"kl_loss_coef": 0.3, "kl_estimator": kind}
        for kind in ("k1", "k2", "k3", "low_var_kl")
    },
    "KL in rewards": {"kl_ctl": 0.2, "discount": 0.9, "gae_lambda": 0.95},
    "k3 in rewards": {"kl_ctl": 0.2, "discount": 0.9, "gae_lambda": 0.95, "kl_estimator": "k3"},
    "entropy": {"entropy_coeff": 0.1, "loss_agg_mode": "seq-mean-token-mean"},
    "overlong": {
        "overlong_reward_penalty": True,
        "max_new_tokens": 7,
        "overlong_tokens": 4,
        "overlong_penalty_factor": 0.5,
    },
    "cut off": {"mask_truncated_completions": True},
    "decoupled": {"use_decoupled_loss": True},
    "rejected tokens": {"use_decoupled_loss": True, "rejection": {"upper": 1.3, "lower": 0.8}},
    "clamped tokens": {"use_decoupled_loss": True, "rejection": {"action": "clamp", "upper": 1.3}},
    "clamped sequences": {
        "use_decoupled_loss": True,
        "rejection": {"level": "sequence", "action": "clamp", "upper": 1.05, "lower": 0.95},
    },
    **{
        f"rejected sequences, {metric}, {agg}": {
            "use_decoupled_loss": True,
            "rejection": {"level": "sequence", "metric": metric, "agg": agg, "upper": upper},
        }
        for metric, agg, upper in [
            ("ratio", "sum", 1.1),
            ("ratio", "max", 1.4),
            ("kl_k1", "mean", 0.05),
            ("kl_k2", "sum", 0.1),
            ("kl_k3", "max", 0.06),
        ]
    },
    **{name: {"adv_estimator": name} for name in ("remax", "opo", "gpg", "grpo_passk")},
    "interpolated": {
        "use_decoupled_loss": True,
        "prox_logp_method": "loglinear",
        "rejection": {"upper": 1.2},
    },
    "the training step's own policy": {
        **{
            "use_decoupled_loss": True,
            "prox_logp_method": "reuse_train_logp",
            "ppo_n_minibatches": 1,
        },
        "rejection": {"upper": 1.2},
    },
    "interpolation measured": {"use_decoupled_loss": True, "prox_logp_method": "metrics"},
    "verl's token weights": {"rollout_is": "token", "rollout_is_threshold": 1.1},
    "verl's sequence weights": {"rollout_is": "sequence", "rollout_is_threshold": 1.3},
    "verl's rejection": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.95_1.04"},
    "verl's rejection by k3": {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": "0.06"},
    "verl's both": {
        "rollout_is": "token",
        "rollout_is_threshold": 1.2,
        "rollout_rs": "token_k2",
        "rollout_rs_threshold": "0.04",
    },
    "clip_cov": {
        "policy_loss": "clip_cov",
        "clip_cov_ratio": 1.0,
        "clip_cov_lb": 0.05,
        "clip_cov_ub": 0.6,
    },
    "kl_cov": {"policy_loss": "kl_cov", "kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7},
    "kl_cov, one token": {"policy_loss": "kl_cov", "loss_agg_mode": "seq-mean-token-mean"},
    "cispo, decoupled": {"policy_loss": "cispo", "use_decoupled_loss": True},
}


def whole_batch() -> Batch:
    """All rows, with log-probabilities of four policies close to the model's."""
    batch = global_batch()
    with torch.no_grad():
        logp, _ = reference_logprobs(build_reference(tiny_qwen3()), batch, TEMPERATURE)
    noise, outside = batch.pop("noise"), ~batch["loss_mask"].bool()
    near = (logp + noise, logp - noise.flip(0), logp + noise.roll(1, 0) / 2)
    batch |= {
        key: value.masked_fill(outside, -math.inf)
        for key, value in zip(POLICIES, near, strict=True)
    }
    batch["reward_baselines"] = batch["rewards"].roll(1) / 2
    batch["rewards"][4] = 0.0
    versions = torch.randint(
        0, VERSION + 1, outside.shape, generator=torch.Generator().manual_seed(2)
    )
    batch["versions"] = versions.masked_fill(outside, -1)
    batch["truncated"] = torch.tensor([0, 0, 1, 0, 0, 1]).bool()
    return batch


def actor_settings(case: dict[str, Any]) -> dict[str, Any]:
    """Options for `make_actor`."""
    settings = {key: value for key, value in case.items() if key not in ("std", "rejection")}
    if "adv_estimator" in case:
        settings["reward_norm"] = None
    else:
        settings["reward_norm"] = NormConfig("group", std_level=case.get("std", "group"))
    if rejection := case.get("rejection"):
        settings["rejection_sampling"] = RejectionSamplingConfig(**rejection)
    return settings | {"eps_clip_higher": 0.28, "sapo_tau_pos": TAU_POS, "sapo_tau_neg": TAU_NEG}


def estimated(
    name: str, pairs: torch.Tensor, lengths: torch.Tensor, greedy: torch.Tensor
) -> torch.Tensor:
    """Advantages of the two answers to each prompt."""
    scores = torch.zeros_like(pairs)
    alpha = pairs.numel() / sum(float(reward) != 0 for reward in pairs.flatten())
    for prompt, (a, b) in enumerate(pairs.tolist()):
        m, n = lengths[prompt].tolist()
        spread = abs(a - b)
        scores[prompt] = torch.tensor(
            {
                "remax": [a - float(greedy[2 * prompt]), b - float(greedy[2 * prompt + 1])],
                "opo": [a - (m * a + n * b) / (m + n), b - (m * a + n * b) / (m + n)],
                "gpg": [alpha * (a - b) / 2, alpha * (b - a) / 2],
                "grpo_passk": [x * spread / (spread / math.sqrt(2) + 1e-6) for x in (a > b, b > a)],
            }[name]
        )
    return scores


def advantages_of(batch: Batch, case: dict[str, Any]) -> list[torch.Tensor]:
    """``[n_i]`` of each row, in float64."""
    mask, rewards = batch["loss_mask"].bool(), batch["rewards"].double()
    if case.get("overlong_reward_penalty"):
        rewards = rewards - 0.5 * torch.tensor(
            [min(max((n - 3) / 4, 0.0), 1.0) for n in mask.sum(1).tolist()]
        )
    pairs = rewards.reshape(-1, 2)
    scores = pairs - pairs.mean(1, True)
    if estimator := case.get("adv_estimator"):
        scores = estimated(
            estimator, pairs, mask.sum(1).reshape(-1, 2), batch["reward_baselines"].double()
        )
    elif case.get("std", "group"):
        scores = scores / (pairs.std(1, keepdim=True) + 1e-5)
    advantages = [
        score.repeat(int(row.sum())) for score, row in zip(scores.flatten(), mask, strict=True)
    ]
    if kl_ctl := case.get("kl_ctl"):
        for i, row in enumerate(mask):
            logp, ref = (batch[key][i, row].double() for key in ("logprobs", "ref_logp"))
            penalties = (-kl_ctl * kl(case.get("kl_estimator", "k1"), logp, ref)).tolist()
            for t in range(len(penalties)):
                advantages[i][t] += sum(
                    penalty * (0.9 * 0.95) ** k for k, penalty in enumerate(penalties[t:])
                )
    return advantages


def reference_step(case: dict[str, Any]) -> tuple[torch.nn.Module, float]:
    """The model after a step of SGD, and the loss."""
    batch, model = whole_batch(), build_reference(tiny_qwen3()).double()
    logp, entropy = reference_logprobs(model, batch, TEMPERATURE)
    kind = case.get("policy_loss", "ppo")
    if case.get("importance_sampling_level") == "sequence":
        kind = "gspo" if kind == "ppo" else f"sequence {kind}"
    rows = []
    for i, (row, adv) in enumerate(
        zip(batch["loss_mask"].bool(), advantages_of(batch, case), strict=True)
    ):
        if row.any() and not (case.get("mask_truncated_completions") and batch["truncated"][i]):
            p, h, behave, ref, prox = (
                x[i, row].double() for x in (logp, entropy, *(batch[key] for key in POLICIES))
            )
            if case.get("prox_logp_method") == "loglinear":
                prox = interpolated(behave, p, batch["versions"][i, row].tolist(), VERSION)
            elif case.get("prox_logp_method") == "reuse_train_logp":
                prox = p.detach()
            rows.append((p, h, behave, ref, prox, adv))
    picked = [torch.zeros(len(adv), dtype=torch.bool) for *_, adv in rows]
    if kind in ("clip_cov", "kl_cov"):
        p, _, behave, _, _, adv = (torch.cat(each) for each in zip(*rows, strict=True))
        picked = torch.tensor(picked_tokens(case, p, behave, adv)).split(
            [len(each) for *_, each in rows]
        )
    losses = []
    for (p, h, behave, ref, prox, adv), apart in zip(rows, picked, strict=True):
        if case.get("use_decoupled_loss"):
            loss = policy_losses(kind, p, prox, adv) * weights(prox, behave, case.get("rejection"))
        elif "rollout_is" in case or "rollout_rs" in case:
            loss = policy_losses(kind, p, prox, adv) * verl_weights(case, prox, behave)
        elif kind in ("clip_cov", "kl_cov"):
            loss = covariance_losses(case, p, behave, adv, apart)
        else:
            loss = policy_losses(kind, p, behave, adv)
        loss = loss + case.get("kl_loss_coef", 0.0) * kl(case.get("kl_estimator", "k3"), p, ref)
        losses.append(loss - case.get("entropy_coeff", 0.0) * h)
    mean = "seq-mean-token-mean" if kind == "gmpo" else "token-mean"
    total = aggregate(case.get("loss_agg_mode", mean), losses, case.get("loss_scale_factor"))
    total.backward()
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param -= 0.5 * param.grad
    return model, float(total.detach())


def _left_out(case: dict[str, Any]) -> tuple[str, ...]:
    """Entries of a batch that this case must not have."""
    return (
        ("prox_logp",) if case.get("prox_logp_method") in ("loglinear", "reuse_train_logp") else ()
    )


def _each_case(rank: int, world_size: int, path: str, n_mbs: int, names: list[str]) -> list[str]:
    """Cases of ``names`` whose step differs from the reference, each with its largest
    difference.
    """
    wrong = []
    mine = share_of(whole_batch(), rank, world_size)
    for name in names:
        case = CASES[name]
        actor = make_actor(path, mb_spec=MicroBatchSpec(n_mbs=n_mbs), **actor_settings(case))
        actor.engine.set_version(VERSION)  # type: ignore[attr-defined]
        share = {key: value for key, value in mine.items() if key not in _left_out(case)}
        stats = actor.ppo_update(actor.compute_advantages(share))
        reference, loss = reference_step(case)
        wanted = dict(reference.named_parameters())
        worst = max(
            float((param.full_tensor() - wanted[key]).abs().max())  # type: ignore[attr-defined]
            for key, param in actor.engine.model.named_parameters()  # type: ignore[attr-defined]
        )
        if not (worst < 2e-6 and stats["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)):
            wrong.append(
                f"{name}: weights differ by {worst:.2g}, losses {stats['loss']} and {loss}"
            )
        wrong += _wrong_stats(name, case, stats)
        actor.engine.destroy()  # type: ignore[attr-defined]
    return wrong


def _wrong_stats(name: str, case: dict[str, Any], stats: dict[str, float]) -> Iterator[str]:
    for key, applies in {
        "behave_kl": True,
        "rejected": "use_decoupled_loss" in case or "rollout_is" in case or "rollout_rs" in case,
        "loglinear_error": case.get("prox_logp_method") == "metrics",
        "kl_reward": "kl_ctl" in case,
        "cov_fraction": case.get("policy_loss") in ("clip_cov", "kl_cov"),
        "kl_k1": True,
        "kl_ref_k1": True,
    }.items():
        if (key in stats) != applies:
            yield f"{name}: {key} is {'missing' if applies else 'there'}"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    write_model_folder(folder, tiny_qwen3())
    return str(folder)


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "n_mbs"), [(1, 1), (1, 5), (2, 1), (2, 2), (2, 5)])
def test_every_choice_takes_the_step_of_its_formula(
    model_path: str, world_size: int, n_mbs: int
) -> None:
    for wrong in run_ranks(_each_case, world_size, model_path, n_mbs, list(CASES), timeout_s=200):
        assert wrong == []


def test_some_choices_take_the_step_of_their_formula(model_path: str) -> None:
    for wrong in run_ranks(_each_case, 2, model_path, 2, list(CASES)[::10]):
        assert wrong == []


def _kl_of_rewards(rank: int, world_size: int) -> dict[str | None, torch.Tensor]:
    """Estimator -> reduction of a token's reward, divided by ``kl_ctl``."""
    batch, found = whole_batch(), {}
    batch["rewards"] = torch.zeros(len(batch["rewards"]))
    for estimator in (None, "k1", "k2", "k3"):
        config = PPOActorConfig(device="cpu", kl_ctl=0.2, kl_estimator=estimator, discount=0.0)
        engine = FSDPEngine(config)
        engine.create_process_group()
        ready = PPOActor(config, engine).compute_advantages(batch)
        found[estimator] = -5 * ready["advantages"][batch["loss_mask"].bool()]
        engine.destroy()
    return found


def test_the_kl_in_rewards_is_of_the_estimator_as_in_areal() -> None:
    (found,) = run_ranks(_kl_of_rewards, 1)
    batch, mask = whole_batch(), whole_batch()["loss_mask"].bool()
    logp, base = batch["logprobs"][mask].double(), batch["ref_logp"][mask].double()
    areal = {
        "k1": logp - base,
        "k2": (logp - base) ** 2 / 2,
        "k3": (base - logp).exp() - 1 - (base - logp),
    }
    areal = {name: kl.clamp(-10, 10) for name, kl in areal.items()}
    for name, expected in {None: areal["k1"], **areal}.items():
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-4, atol=1e-6)


def _what_is_missing(rank: int, world_size: int, path: str) -> dict[str, str]:
    seen = {}
    mine = share_of(whole_batch(), rank, world_size)

    def refused(actor: PPOActor, *left_out: str) -> str:
        batch = {key: value for key, value in mine.items() if key not in left_out}
        return raises_batch_error(lambda: actor.ppo_update(actor.compute_advantages(batch)))

    for name, settings in {
        "kl_ctl": {"kl_ctl": 0.1},
        "use_decoupled_loss": {"use_decoupled_loss": True},
    }.items():
        actor = make_actor(path, **settings)
        seen[name] = refused(actor, "ref_logp" if name == "kl_ctl" else "logprobs")
        actor.engine.destroy()  # type: ignore[attr-defined]
    actor = make_actor(path, use_decoupled_loss=True, prox_logp_method="loglinear")
    seen["versions"] = refused(actor, "versions")
    actor.engine.destroy()  # type: ignore[attr-defined]
    actor = make_actor(path, adv_estimator="remax", reward_norm=None)
    seen["remax"] = refused(actor, "reward_baselines")
    actor.engine.destroy()  # type: ignore[attr-defined]
    actor = make_actor(path, mask_truncated_completions=True)
    seen["truncated"] = refused(actor, "truncated")
    mine["truncated"] = torch.ones(len(mine["rewards"]))
    seen["all truncated"] = refused(actor)
    actor.engine.destroy()  # type: ignore[attr-defined]
    return seen


def test_missing_entries_of_a_batch_are_named(model_path: str) -> None:
    (seen,) = run_ranks(_what_is_missing, 1, model_path)
    assert seen["kl_ctl"] == "the batch has no 'ref_logp'; kl_ctl is not 0, so rewards need it"
    assert seen["use_decoupled_loss"].startswith(
        "the batch has no 'logprobs'; the rollout must give them"
    )
    assert seen["versions"].startswith(
        "the batch has no 'versions'; prox_logp_method needs the version"
    )
    assert seen["remax"].startswith("the batch has no finite 'reward_baselines' of shape [batch]")
    assert seen["truncated"].startswith("the batch has no 'truncated' of shape [batch]")
    assert seen["all truncated"].startswith("the batch has no loss token on any rank")
    assert "mask_truncated_completions" in seen["all truncated"]
