"""Log-probabilities under the proximal policy without a forward pass: interpolated by versions, as AReaL does.

A token sampled by weights of version b, updated by weights of version v, has a proximal policy one version behind:
``log p_prox = log p_behave + a (log p - log p_behave)`` with ``a = (v - 1 - b) / (v - b)``, between 0 and 1, and 0
where nothing was sampled: AReaL's ``prox_logp_method: loglinear``.
"""

import torch

from .losses import Stats

PROX_LOGP_METHODS = ("recompute", "loglinear", "metrics", "reuse_train_logp")


def prox_alpha(versions: torch.Tensor, version: int) -> torch.Tensor:
    """How far the proximal policy is from the one that sampled to the present one: float32 from 0 to 1.

    Args:
        versions: of the weights that sampled each token, in any shape; negative where none did.
        version: of the weights that are updated.
    """
    behind = version - versions.float()
    alpha = ((behind - 1.0) / behind.clamp(min=1.0)).clamp(0.0, 1.0)
    return torch.where(versions >= 0, alpha, 0.0)


def interpolate(
    behave_logp: torch.Tensor, logprobs: torch.Tensor, alpha: torch.Tensor, loss_mask: torch.Tensor
) -> torch.Tensor:
    """``log p_prox``, detached float32, 0 outside ``loss_mask``; all arguments have one shape."""
    mask = loss_mask.bool()
    behave_logp, logprobs = (torch.where(mask, x.detach().float(), 0.0) for x in (behave_logp, logprobs))
    return torch.lerp(behave_logp, logprobs, alpha)  # exactly ``logprobs`` where alpha is 1


def approximation_errors(
    prox_logp: torch.Tensor,
    behave_logp: torch.Tensor,
    logprobs: torch.Tensor,
    alpha: torch.Tensor,
    loss_mask: torch.Tensor,
) -> Stats:
    """How far approximations are from the proximal log-probabilities: ``<name>_error``, the size of the difference.

    Of ``loglinear`` (`interpolate`), ``linear`` (the same of probabilities) and ``rollout`` (those of the sampler).
    """
    mask = loss_mask.bool()
    prox_logp, behave_logp, logprobs = (
        torch.where(mask, x.detach().float(), 0.0) for x in (prox_logp, behave_logp, logprobs)
    )
    linear = ((1.0 - alpha) * behave_logp.exp() + alpha * logprobs.exp()).clamp(min=1e-10).log()
    loglinear = interpolate(behave_logp, logprobs, alpha, mask)
    approximations = {"loglinear": loglinear, "linear": linear, "rollout": behave_logp}
    return {f"{name}_error": (prox_logp - each).abs() for name, each in approximations.items()}
