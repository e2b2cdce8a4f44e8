"""Reference for an update, sequence by sequence in float64: losses, weights, aggregation, one step
of SGD.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from holdfast.engine.api import Batch

LOW, HIGH = 0.2, 0.28
TAU_POS, TAU_NEG = 1.3, 1.7


def reference_logprobs(
    model: nn.Module, batch: Batch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded ``[B, S]`` log-probabilities and entropies aligned with the tokens, computed with
    log_softmax.
    """
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).logits
    log_p = torch.log_softmax(logits[:, :-1] / temperature, -1)
    picked = log_p.gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return tuple(F.pad(x, (1, 0)) * batch["attention_mask"] for x in (picked, entropy))  # type: ignore[return-value]


def picked_tokens(
    case: dict[str, Any], logp: torch.Tensor, old: torch.Tensor, adv: torch.Tensor
) -> list[bool]:
    """Which of the n loss tokens of a mini-batch a covariance loss selects (``clip_cov`` without a
    random draw).
    """
    n, (logp, old, adv) = len(logp), (x.detach() for x in (logp, old, adv))
    cov = [float((adv[i] - adv.sum() / n) * (logp[i] - logp.sum() / n)) for i in range(n)]
    if case["policy_loss"] == "kl_cov":
        k = max(1, math.floor(case.get("kl_cov_ratio", 0.0002) * n))
        return [sum(other > mine for other in cov) < k for mine in cov]
    assert case["clip_cov_ratio"] == 1.0
    ratio = (logp - old).exp()
    clipped = [
        (r > 1 + HIGH and a > 0) or (r < 1 - LOW and a < 0) for r, a in zip(ratio, adv, strict=True)
    ]
    inside = [case["clip_cov_lb"] < value < case["clip_cov_ub"] for value in cov]
    return [yes and not no for yes, no in zip(inside, clipped, strict=True)]


def covariance_losses(
    case: dict[str, Any],
    logp: torch.Tensor,
    old: torch.Tensor,
    adv: torch.Tensor,
    picked: torch.Tensor,
) -> torch.Tensor:
    """``[n]`` losses of the n loss tokens of one sequence, given the selected tokens."""
    if case["policy_loss"] == "clip_cov":
        return policy_losses("ppo", logp, old, adv) * ~picked
    return -adv * (logp - old).exp() + picked * case.get("ppo_kl_coef", 0.1) * (logp - old).abs()


def policy_losses(
    kind: str, logp: torch.Tensor, old: torch.Tensor, adv: torch.Tensor
) -> torch.Tensor:
    """``[n]`` losses of the n loss tokens of one sequence."""
    ratio = (logp - old).exp()
    clip = [min(max(float(r), 1 - LOW), 1 + HIGH) for r in ratio]
    if kind == "ppo":
        held = torch.stack(
            [r if float(r) == c else torch.tensor(c) for r, c in zip(ratio, clip, strict=True)]
        )
        return -torch.minimum(ratio * adv, held * adv)
    if kind == "gspo":  # eq. 5: one ratio and one term for the sequence
        mean = (logp - old).mean().exp()
        return -torch.minimum(mean * adv[0], mean.clamp(1 - LOW, 1 + HIGH) * adv[0]).expand(
            len(adv)
        )
    if kind == "cispo":
        return -torch.tensor(clip, dtype=torch.float64) * adv * logp
    if kind == "sapo":
        return torch.stack([_sapo(r, a) for r, a in zip(ratio, adv, strict=True)])
    if kind == "sequence sapo":
        mean = (logp - old).mean().exp()
        return _sapo(mean, adv[0]).expand(len(adv))
    if kind == "gpg":
        return -adv * logp
    assert kind == "gmpo"
    limits = (-LOW, HIGH)
    logs = []
    for log_ratio, a in zip(logp - old, adv, strict=True):
        clipped = log_ratio.clamp(*limits)
        logs.append(
            torch.minimum(log_ratio, clipped) if a > 0 else torch.maximum(log_ratio, clipped)
        )
    return (-adv.mean() * torch.stack(logs).mean().exp()).expand(len(adv))


def _sapo(ratio: torch.Tensor, adv: torch.Tensor) -> torch.Tensor:
    tau = TAU_POS if adv > 0 else TAU_NEG
    return -adv * 4 / tau / (1 + (-tau * (ratio - 1)).exp())


def kl(kind: str, logp: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """``[n]`` estimates with the gradient they have in a loss."""
    difference = logp - ref
    if kind == "k1":
        return difference.detach() + difference**2 / 2 - (difference**2 / 2).detach()
    if kind == "k2":
        return difference**2 / 2
    k3 = (-difference).exp() - 1 + difference
    return torch.where(k3 > 10, 10.0, k3) if kind == "low_var_kl" else k3


def weights(
    prox: torch.Tensor, behave: torch.Tensor, rejection: dict[str, Any] | None
) -> torch.Tensor:
    """``[n]`` weights of decoupled PPO for one sequence."""
    logs = prox - behave
    if rejection is None:
        return logs.exp()
    settings = {
        "level": "token",
        "action": "mask",
        "metric": "ratio",
        "agg": "mean",
        "lower": -math.inf,
    } | rejection
    metric = {
        "ratio": logs,
        "kl_k1": logs,
        "kl_k2": logs**2 / 2,
        "kl_k3": (-logs).exp() - 1 + logs,
    }[settings["metric"]]
    values = [float(x) for x in metric]
    w = [math.exp(x) for x in logs]
    if settings["level"] == "sequence":
        whole = {"mean": sum(values) / len(values), "sum": sum(values), "max": max(values)}[
            settings["agg"]
        ]
        values = [whole] * len(values)
        if settings["metric"] == "ratio":
            w = [math.exp(float(logs.mean()))] * len(w)
    for i, value in enumerate(values):
        judged = math.exp(value) if settings["metric"] == "ratio" else value
        if not settings["lower"] <= judged <= settings["upper"]:
            w[i] = (
                0.0
                if settings["action"] == "mask"
                else min(max(w[i], settings["lower"]), settings["upper"])
            )
    return torch.tensor(w, dtype=torch.float64)


def verl_weights(
    case: dict[str, Any], trainer: torch.Tensor, sampler: torch.Tensor
) -> torch.Tensor:
    """``[n]`` weights of one sequence by verl's keys: truncated importance sampling, times the mask
    of kept tokens.
    """
    logs = [float(x) for x in trainer - sampler]
    limit = case.get("rollout_is_threshold", math.inf)
    ratios = {None: [1.0] * len(logs), "token": [math.exp(x) for x in logs]}
    ratios["sequence"] = [math.exp(sum(logs))] * len(logs)
    w = [min(x, limit) for x in ratios[case.get("rollout_is")]]
    if name := case.get("rollout_rs"):
        level, k = name.rsplit("_", 1)
        values = {
            "k1": [-x for x in logs],
            "k2": [x * x / 2 for x in logs],
            "k3": [math.exp(x) - 1 - x for x in logs],
        }[k]
        if level != "token":
            whole = {
                "seq_sum": sum(values),
                "seq_mean": sum(values) / len(values),
                "seq_max": max(values),
            }[level]
            values = [whole] * len(values)
        low, high = -math.inf, 0.0
        if k == "k1":
            low, high = (
                math.log(float(bound)) for bound in case["rollout_rs_threshold"].split("_")
            )
        else:
            high = float(case["rollout_rs_threshold"])
        w = [x if low <= value <= high else 0.0 for x, value in zip(w, values, strict=True)]
    return torch.tensor(w, dtype=torch.float64)


def interpolated(
    behave: torch.Tensor, now: torch.Tensor, versions: list[int], version: int
) -> torch.Tensor:
    """``[n]`` proximal log-probabilities, interpolated between the sampler's and the current
    ones.
    """
    prox = behave.clone()
    for i, sampled_by in enumerate(versions):
        if sampled_by < version:
            prox[i] += (
                (version - 1 - sampled_by)
                / (version - sampled_by)
                * (float(now[i]) - float(behave[i]))
            )
    return prox


def aggregate(mode: str, losses: list[torch.Tensor], scale: float | None) -> torch.Tensor:
    """The loss of a step from ``[n_i]`` losses of the sequences that have any."""
    if mode == "token-mean":
        return torch.cat(losses).mean()
    if mode == "seq-mean-token-mean":
        return torch.stack([loss.mean() for loss in losses]).mean()
    return torch.stack([loss.sum() for loss in losses]).mean() / (scale or 1.0)
