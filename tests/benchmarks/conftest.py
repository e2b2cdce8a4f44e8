"""Fixtures for the tests of the benchmarks."""

from pathlib import Path

import pytest

from benchmarks.harness import Options


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(
        parameters=1_000_000, ranks=2, rounds=2, device="cpu", scratch=tmp_path, quick=True
    )
