"""The value function of PPO on top of any `TrainEngine` with a value head.

The engine's output at a position is the value after that token. Everything here is aligned with the
token that is *chosen next*, like log-probabilities: ``values[t]`` is the value before token t, 0 at
the first token.
"""

import torch
from torch import Tensor

from ..api import Batch, LossFn, TrainEngine
from ..training.batch import validate_batch
from ..training.logprobs import align_with_tokens
from .config import PPOCriticConfig
from .losses import Stats, aggregate, count_losses, masked, with_loss_weights
from .update import (
    INPUTS,
    TokenStats,
    all_ranks_accept,
    loss_mask_of,
    require_per_token,
    train_minibatches,
)

_TOKEN_STATS = ("value", "value_clip_fraction", "value_error")


class PPOCritic:
    """Value estimates and updates of the model in ``engine``. Every method is a collective."""

    def __init__(self, config: PPOCriticConfig, engine: TrainEngine) -> None:
        self.config = config
        self.engine = engine

    def compute_values(self, batch: Batch) -> Tensor:
        """``[B, S]`` float32: the value before each token was chosen, 0 at the first token and at
        padding.
        """
        return self.with_values(batch)["values"]

    def with_values(self, batch: Batch) -> Batch:
        """Return the batch with ``values`` (see `compute_values`) and ``last_values``, in one
        forward pass.

        ``last_values`` ``[B]`` float32 is the value after the last token, used by
        `PPOActorConfig.bootstrap_truncated`. Raises BatchError (see `validate_batch`).
        """
        with all_ranks_accept(self.engine):
            validate_batch(batch)
        self.engine.eval()
        after = self.engine.forward_batch(batch)  # value after each token

        # The value before a token is the one after the token to its left.
        attention_mask = batch["attention_mask"].bool()
        values = torch.zeros_like(after)
        values[:, 1:] = torch.where(attention_mask[:, 1:], after[:, :-1], 0.0)

        last = attention_mask.sum(1, keepdim=True) - 1
        last_values = after.gather(1, last).squeeze(1)
        return {**batch, "values": values, "last_values": last_values}

    def ppo_update(self, batch: Batch) -> dict[str, float]:
        """Take ``ppo_n_minibatches`` optimizer steps towards ``returns``, clipped around ``values``
        (both ``[B, S]``).

        Returns:
            the statistics of `train_minibatches`, and ``value``, ``value_clip_fraction`` and
            ``value_error`` (means over the loss tokens of all ranks).

        Raises:
            BatchError: ``values`` or ``returns`` are missing or not finite, no rank has a loss
                token, or another rank refused its share.
        """
        with all_ranks_accept(self.engine):
            validate_batch(batch)
            mask = loss_mask_of(batch)
            require_per_token(batch, "values", mask, "call compute_values first")
            hint = (
                "give the batch that the actor's compute_advantages returns for a batch with values"
            )
            require_per_token(batch, "returns", mask, hint)

        # The entries that the model and the loss read.
        needed = (*INPUTS, "values", "returns")
        share = {key: batch[key] for key in needed if key in batch}
        share["loss_mask"] = mask
        share = with_loss_weights(share, self.config.loss_agg_mode, self.config.loss_scale_factor)

        stats = TokenStats()
        self.engine.train()
        result = train_minibatches(
            self.engine,
            share,
            self.config.ppo_n_minibatches,
            self._loss_fn(stats),
            count_losses,
            shares_prompts=self.config.enable_tree_training,
        )
        return {**stats.reduce(self.engine, _TOKEN_STATS), **result}

    def _loss_fn(self, stats: TokenStats) -> LossFn:
        def loss_fn(output: Tensor, micro_batch: Batch) -> Tensor:
            mask = micro_batch["loss_mask"]
            losses, seen = ppo_critic_loss(
                align_with_tokens(output.float(), micro_batch["cu_seqlens"]),
                micro_batch["values"],
                micro_batch["returns"],
                mask,
                self.config.eps_clip,
            )
            stats.add(seen, mask)
            return aggregate(losses, micro_batch)

        return loss_fn


def ppo_critic_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    eps_clip: float = 0.5,
) -> tuple[Tensor, Stats]:
    """Clipped value loss of each token: ``max((v - R)^2, (clip(v, v_old - e, v_old + e) - R)^2) /
    2``.

    Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
    2015, keep the value function near the old one. The clipped form is from the reference
    implementation of PPO (OpenAI baselines).

    Returns:
        losses in the shape of the arguments, and the stats ``value``, ``value_clip_fraction`` and
        ``value_error`` (``|v
        - R|``).
    """
    mask = loss_mask.bool()
    values = masked(values, mask)
    old_values = masked(old_values, mask)
    returns = masked(returns, mask)

    # clip(v, v_old - e, v_old + e)
    held = torch.minimum(values, old_values + eps_clip)
    held = torch.maximum(held, old_values - eps_clip)

    plain = (values - returns).square()
    clipped = (held - returns).square()
    loss = torch.maximum(plain, clipped) / 2
    return loss, {
        "value": values.detach(),
        "value_clip_fraction": (clipped > plain).float(),
        "value_error": (values - returns).abs().detach(),
    }
