"""Reinforcement learning on top of an engine: actor, critic, losses and advantages. Also reward
models, DPO, SFT and teachers.
"""

from .actor import PPOActor
from .alignment import from_areal_alignment, to_areal_alignment
from .config import NormConfig, PPOActorConfig, PPOCriticConfig
from .critic import PPOCritic
from .dpo import DPO, DPOConfig
from .losses import count_loss_tokens, sft_loss_fn
from .reward_model import RewardModel, RewardModelConfig
from .teacher import EngineTeacher, ServerTeacher

__all__ = [
    "DPO",
    "DPOConfig",
    "EngineTeacher",
    "NormConfig",
    "PPOActor",
    "PPOActorConfig",
    "PPOCritic",
    "PPOCriticConfig",
    "RewardModel",
    "RewardModelConfig",
    "ServerTeacher",
    "count_loss_tokens",
    "from_areal_alignment",
    "sft_loss_fn",
    "to_areal_alignment",
]
