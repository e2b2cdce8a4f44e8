"""Reinforcement learning on top of an engine: losses, advantages, actor, critic."""
