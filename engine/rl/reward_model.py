"""A reward model on top of any `TrainEngine` with a value head. The output at the last token scores
a sequence.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...utils.errors import ConfigError
from ..api import Batch, LossFn, TrainEngine
from ..config import TrainEngineConfig
from .pairs import (
    PairStats,
    at_last_token,
    evaluate_pairs,
    mean_over_pairs,
    of_pairs,
    require_pairs,
    spec_of_pairs,
    train_pairs,
)


@dataclass
class RewardModelConfig(TrainEngineConfig):
    """A model that scores whole sequences, trained on pairs."""

    is_critic: bool = True
    """Always True."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_critic:
            raise ConfigError(
                "config key 'is_critic' is False; a reward model has a value head, expected True"
            )
        # A micro-batch holds whole pairs.
        self.mb_spec = spec_of_pairs(self.mb_spec)


class RewardModel:
    """Pairwise updates and scores of the model in ``engine``, which needs a value head. Every
    method is a collective.
    """

    def __init__(self, config: RewardModelConfig, engine: TrainEngine) -> None:
        self.config = config
        self.engine = engine

    def train_rw(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on pairs, rows 2i (chosen) and 2i + 1 (rejected) of ``batch``.

        The loss is the mean over the pairs of all ranks of ``-log sigmoid(s_chosen - s_rejected)``:
        Bradley and Terry, 1952, and Ouyang et al., "Training language models to follow instructions
        with human feedback", 2022, eq. 1.

        Returns:
            the result of `TrainEngine.train_batch`, ``chosen`` and ``rejected`` scores, their
            ``margin``, and ``accuracy`` (means over the pairs of all ranks).

        Raises:
            BatchError: see `require_pairs`. Or no pair counts on any rank.
        """
        pairs = require_pairs(self.engine, batch)
        return train_pairs(self.engine, pairs, rw_loss_fn)

    def evaluate_rw(self, batch: Batch) -> dict[str, float]:
        """``loss`` and the statistics of `train_rw`, without a step."""
        pairs = require_pairs(self.engine, batch)
        return evaluate_pairs(self.engine, pairs, rw_loss_fn)


def rw_loss_fn(stats: PairStats) -> LossFn:
    """The loss of `RewardModel.train_rw`, for ``train_batch`` with `count_pairs` on a batch of
    `require_pairs`.
    """

    def loss_fn(output: torch.Tensor, micro_batch: Batch) -> torch.Tensor:
        # The output at the last token scores the sequence.
        scores = at_last_token(output.float(), micro_batch)
        chosen, rejected = of_pairs(scores, micro_batch)
        stats.add_pairs(chosen, rejected, micro_batch)
        # -log sigmoid(s_chosen - s_rejected)
        losses = -F.logsigmoid(chosen - rejected)
        return mean_over_pairs(losses, micro_batch)

    return loss_fn
