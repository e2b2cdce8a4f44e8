"""Start-up of the tests' own processes: warnings are errors, and limits are stretched."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import ray

from tests import conftest, limits
from tests.helpers import run_ranks
from tests.ray_helpers import local_ray

__all__ = ["local_ray"]

OF_OURS = "import warnings; warnings.warn_explicit('old', {}, 'file.py', 1, module={!r})"


def _warn(category: type[Warning], module: str) -> str:
    try:
        warnings.warn_explicit("old", category, "file.py", 1, module=module)
    except category:
        return "error"
    return "warning"


def _warn_in_turn(rank: int = 0, world_size: int = 1) -> list[str]:
    cases = (
        (DeprecationWarning, "holdfast.engine.api"),
        (FutureWarning, "holdfast.utils"),
        (FutureWarning, "holdfasts"),
    )
    return [_warn(*case) for case in cases]


EXPECTED = ["error", "error", "warning"]


def test_deprecated_calls_of_holdfast_are_errors_in_ranks() -> None:
    assert run_ranks(_warn_in_turn, 2) == [EXPECTED] * 2


@pytest.mark.slow
def test_deprecated_calls_of_holdfast_are_errors_in_ray_workers(local_ray: None) -> None:
    assert ray.get(ray.remote(num_cpus=0)(_warn_in_turn).remote()) == EXPECTED


@pytest.mark.parametrize(
    ("category", "module", "fails"),
    [("DeprecationWarning", "holdfast.recover", True), ("DeprecationWarning", "other", False)],
)
def test_deprecated_calls_of_holdfast_are_errors_in_new_processes(
    category: str, module: str, fails: bool, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", OF_OURS.format(category, module)], cwd=tmp_path, capture_output=True
    )
    assert ended.returncode == int(fails), ended.stderr


def test_time_limits_stretch_with_the_factor_and_the_load(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit() -> float:
        marker = request.node.get_closest_marker("timeout")
        assert marker is not None
        return marker.args[0]

    assert 180 <= limit() <= 180 * limits.TIMEOUT_FACTOR * limits.MOST_CROWDED
    cores = os.cpu_count() or 1
    for load, factor in ((0.0, 1.0), (4.0 * cores, 4.0), (1000.0 * cores, limits.MOST_CROWDED)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        before = limit()
        assert limits.stretched(10) == 10 * limits.TIMEOUT_FACTOR * factor
        next(conftest.pytest_runtest_protocol(request.node))
        assert limit() == before * limits.TIMEOUT_FACTOR * factor
