"""Engines with adapters, and checkpoints of partly frozen models."""
