"""One training step: process groups and mesh, the model sharded by FSDP2, packing, micro-batches, optimizer."""
