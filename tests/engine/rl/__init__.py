"""Losses, advantages, actor and critic."""
