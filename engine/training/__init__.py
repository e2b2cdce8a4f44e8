"""One training step: process groups, the model sharded by FSDP2, packing into micro-batches,
optimizer.
"""
