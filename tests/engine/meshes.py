"""Meshes for tests that run the same on each of them."""

from typing import Any

from holdfast.engine import FSDPConfig


def mesh_options(backend: str, replicas: int = 1) -> dict[str, Any]:
    """Options of `TrainEngineConfig` for a mesh."""
    return {"backend": backend, "fsdp": FSDPConfig(replicate_size=replicas)}
