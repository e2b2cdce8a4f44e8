"""Reinforcement learning on top of an engine: losses, advantages, actor, critic; and supervised fine-tuning."""

from .actor import PPOActor
from .config import NormConfig, PPOActorConfig, PPOCriticConfig
from .critic import PPOCritic
from .losses import count_loss_tokens
from .sft import sft_loss_fn

__all__ = [
    "NormConfig",
    "PPOActor",
    "PPOActorConfig",
    "PPOCritic",
    "PPOCriticConfig",
    "count_loss_tokens",
    "sft_loss_fn",
]
