"""Tensors by name and by block, in host and device memory."""
