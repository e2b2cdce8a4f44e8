"""Start-up of the tests' own processes: warnings are errors, and limits are stretched."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import ray

from tests import conftest, limits
from tests.helpers import run_ranks
from tests.ray_helpers import ROOT, local_ray

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


def test_time_limits_stretch_with_the_factor(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit() -> float:
        marker = request.node.get_closest_marker("timeout")
        assert marker is not None
        return marker.args[0]

    before = limit()
    assert before == limits.stretched(180)
    monkeypatch.setattr(limits, "TIMEOUT_FACTOR", 3)
    conftest.pytest_collection_modifyitems(request.config, [request.node])
    assert limit() == 3 * before


def test_a_slow_machine_has_longer_limits_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ADDITIONS_S", 1e-9)
    assert limits.slowness() == limits.LARGEST
    monkeypatch.setattr(limits, "ADDITIONS_S", 1e9)
    assert limits.slowness() == 1


def test_processes_have_the_limits_of_the_one_that_started_them() -> None:
    code = "from tests.limits import TIMEOUT_FACTOR; print(TIMEOUT_FACTOR)"
    said = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert float(said) == limits.TIMEOUT_FACTOR
