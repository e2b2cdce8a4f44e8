"""The rollouts."""
