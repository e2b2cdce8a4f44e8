"""Meshes for tests that run the same on each of them."""

from typing import Any

from holdfast.engine import FSDPConfig, parallel_strategy


def allow_every_mesh() -> None:
    """Let engines of this process be opened on meshes that they do not support yet.

    Without the code of a dimension its ranks repeat the same computation on the same rows. Generators, dataloaders,
    checkpoints and resumes are exact nevertheless. Once all dimensions are supported, this function has no purpose.
    """
    parallel_strategy._NOT_SUPPORTED.clear()


def mesh_options(backend: str, replicas: int = 1) -> dict[str, Any]:
    """Options of `TrainEngineConfig` for a mesh."""
    allow_every_mesh()
    return {"backend": backend, "fsdp": FSDPConfig(replicate_size=replicas)}
