"""Meshes for tests that run the same on each of them.

Engines do not support every dimension yet. Without the code of a dimension its ranks repeat the same computation on the
same rows, so generators, dataloaders, checkpoints and resumes are exact nevertheless, and can be tested. Once all
dimensions are supported, `allow_every_mesh` and `allow_every_mesh_in_jobs` can go.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine import FSDPConfig, parallel_strategy
from tests.simulated_cuda import mutated


def allow_every_mesh() -> None:
    """Let engines of this process be opened on every mesh."""
    getattr(parallel_strategy, "_NOT_SUPPORTED", set()).clear()


def allow_every_mesh_in_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines of processes that this test starts be opened on every mesh, and accept their configuration here."""
    lines = Path(parallel_strategy.__file__).read_text().splitlines()
    for line in (line for line in lines if line.startswith("_NOT_SUPPORTED = ")):
        change = [parallel_strategy.__name__, f"{line}\n", "_NOT_SUPPORTED = set()\n"]
        monkeypatch.setenv(mutated.VARIABLE, json.dumps(change))
        monkeypatch.setattr(parallel_strategy, "_NOT_SUPPORTED", set())


def mesh_options(backend: str, replicas: int = 1) -> dict[str, Any]:
    """Options of `TrainEngineConfig` for a mesh."""
    allow_every_mesh()
    return {"backend": backend, "fsdp": FSDPConfig(replicate_size=replicas)}
