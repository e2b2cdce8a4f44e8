"""Number of threads that read a file: a rank's share of the cores of its host, whatever torch may
use.
"""

import os

import pytest

from holdfast.utils.processes import reading_threads


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [(1, "1", 1), (2, None, 2), (16, "8", 2), (4, "8", 1), (192, "8", 8), (6, "", 6)],
)
def test_the_cores_are_shared_among_the_ranks_of_the_host(
    cores: int, ranks: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert reading_threads() == expected


@pytest.mark.parametrize(
    ("own", "of_parent", "expected"), [(6, 24, 6), (2, 16, 2), (1, 8, 1), (24, 24, 3), (24, 6, 3)]
)
def test_cores_that_the_launcher_has_divided_are_not_divided_again(
    own: int, of_parent: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: set(range(of_parent if pid == os.getppid() else own))
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert reading_threads() == expected
