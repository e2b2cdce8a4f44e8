"""Direct preference optimization on top of any `TrainEngine`."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...utils.config import require_choice, require_range
from ...utils.errors import ConfigError
from ..api import Batch, LossFn, TrainEngine
from ..config import TrainEngineConfig
from ..training.logprobs import token_logprobs
from .pairs import (
    PairStats,
    evaluate_pairs,
    mean_over_pairs,
    of_pairs,
    require_pairs,
    spec_of_pairs,
    sum_of_tokens,
    train_pairs,
)


@dataclass
class DPOConfig(TrainEngineConfig):
    """A policy trained on pairs of a preferred and a rejected answer."""

    beta: float = 0.1
    """Strength with which the policy is held to the reference policy."""
    loss_type: str = "sigmoid"
    """``sigmoid`` (DPO) or ``ipo``: see `dpo_losses`."""
    label_smoothing: float = 0.0
    """``sigmoid``: assumed share of pairs with swapped labels, below 0.5."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_critic:
            raise ConfigError(
                "config key 'is_critic' is True; DPO trains a language-model head, expected False"
            )
        require_choice("loss_type", self.loss_type, ("sigmoid", "ipo"))
        require_range("label_smoothing", self.label_smoothing, low=0.0, high=0.4999)
        if not self.beta > 0:
            raise ConfigError(f"config key 'beta' is {self.beta}; expected more than 0")
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise ConfigError(
                f"config key 'label_smoothing' is {self.label_smoothing}, but loss_type "
                f"{self.loss_type!r} has none; take 'sigmoid', or 0"
            )
        # A micro-batch holds whole pairs.
        self.mb_spec = spec_of_pairs(self.mb_spec)


class DPO:
    """Preference updates of the model in ``engine``, which needs a language-model head. Every
    method is a collective.
    """

    def __init__(self, config: DPOConfig, engine: TrainEngine) -> None:
        self.config = config
        self.engine = engine

    def compute_logp(self, batch: Batch) -> Tensor:
        """Log-probability of every token under the current weights, ``[B, S]`` float32.

        From the engine with the reference policy, this is the ``ref_logp`` of the batch.
        """
        self.engine.eval()
        return self.engine.forward_batch(batch)

    def train_dpo(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on pairs, rows 2i (chosen) and 2i + 1 (rejected) of ``batch``,
        with ``ref_logp``.

        The loss is the mean of `dpo_losses` over the pairs of all ranks.

        Returns:
            the result of `TrainEngine.train_batch`, the implied rewards (``beta`` times the
            log-ratio to the reference) of ``chosen`` and ``rejected`` answers, their ``margin``,
            and ``accuracy`` (means over the pairs of all ranks).

        Raises:
            BatchError: see `require_pairs`. Or no pair counts on any rank.
        """
        pairs = self._checked(batch)
        return train_pairs(self.engine, pairs, partial(dpo_loss_fn, self.config))

    def evaluate_dpo(self, batch: Batch) -> dict[str, float]:
        """``loss`` and the statistics of `train_dpo`, without a step."""
        pairs = self._checked(batch)
        return evaluate_pairs(self.engine, pairs, partial(dpo_loss_fn, self.config))

    def _checked(self, batch: Batch) -> Batch:
        hint = "compute_logp of the reference policy must give it"
        return require_pairs(self.engine, batch, [("ref_logp", hint)])


def dpo_losses(
    chosen: Tensor,
    rejected: Tensor,
    config: DPOConfig,
) -> Tensor:
    """``[n]`` losses from ``[n]`` log-ratios of policy to reference, with ``d = chosen -
    rejected``.

    - ``sigmoid``: ``-(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)`` with e =
      ``label_smoothing``. Rafailov et al., "Direct Preference Optimization", 2023, eq. 7.
      Smoothing: Mitchell, "A note on DPO with noisy preferences", 2023.
    - ``ipo``: ``(d - 1 / (2 beta))^2``, with log-ratios averaged over tokens as in TRL and AReaL.
      Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences",
      2023, eq. 17.
    """
    beta = config.beta
    difference = chosen - rejected
    if config.loss_type == "ipo":
        return (difference - 1.0 / (2.0 * beta)).square()

    smoothing = config.label_smoothing
    margin = beta * difference
    # With the share e of swapped labels.
    as_labelled = -(1.0 - smoothing) * F.logsigmoid(margin)
    as_swapped = smoothing * F.logsigmoid(-margin)
    return as_labelled - as_swapped


def dpo_loss_fn(config: DPOConfig, stats: PairStats) -> LossFn:
    """The loss of `DPO.train_dpo`, for ``train_batch`` with `count_pairs` on a batch of
    `require_pairs`.
    """

    def loss_fn(output: Any, micro_batch: Batch) -> Tensor:
        # The log-ratio of policy to reference of each sequence.
        mask = micro_batch["loss_mask"].bool()
        logprobs, _ = token_logprobs(
            output,
            micro_batch["input_ids"],
            micro_batch["cu_seqlens"],
            config.temperature,
        )
        log_ratios = logprobs - micro_batch["ref_logp"].float()
        log_ratios = torch.where(mask, log_ratios, 0.0)
        sums = sum_of_tokens(log_ratios, micro_batch)

        # Implied rewards are of whole sequences, whatever the loss.
        rewards = config.beta * sums.detach()
        chosen, rejected = of_pairs(rewards, micro_batch)
        stats.add_pairs(chosen, rejected, micro_batch)

        if config.loss_type == "ipo":
            n_tokens = sum_of_tokens(mask.float(), micro_batch)
            sums = sums / n_tokens.clamp(min=1)
        chosen, rejected = of_pairs(sums, micro_batch)
        losses = dpo_losses(chosen, rejected, config)
        return mean_over_pairs(losses, micro_batch)

    return loss_fn
