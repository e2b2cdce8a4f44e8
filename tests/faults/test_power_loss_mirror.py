"""Power cuts while a mirror makes a version: ``current`` is always whole, and the promised version
is there.

A mirror that starts afterwards removes damaged folders, and makes the version again.
"""

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from holdfast_weights.errors import FolderError
from holdfast_weights.manifest import check_folder
from holdfast_weights.mirror import CURRENT, Mirror
from holdfast_weights.source import Source

from tests.faults.power_loss import (
    FSYNCS,
    FULL,
    QUICK,
    PowerLoss,
    State,
    read_tree,
    relative_to,
    write_tree,
)
from tests.faults.power_traces import Recorded, survey
from tests.faults.shim import Shim
from tests.faults.tally import Tally
from tests.plugins.weights.publisher import Publisher, assert_same
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(1800)

SHAPES: dict[str, Any] = {"a": ("BF16", (40, 8)), "b": ("F32", (30,))}
MADE: dict[str, int] = {"first version": 1, "version from a delta": 3}
"""Name -> the version that is made. The mirror holds those before it."""


class Whole:
    """Oracle for the mirror's folder.

    Args:
        publisher: publisher of the mirror's source.
        made: version that the mirror made when the power failed.
    """

    def __init__(self, publisher: Publisher, made: int) -> None:
        self._publisher, self._made = publisher, made

    def __call__(self, state: State, scratch: Path) -> str | None:
        """Return the fault of a state, or None. ``scratch`` is an unused path."""
        local = scratch.with_name(f"{scratch.name}-{state.key().hex()}")
        write_tree(state.tree, local)
        if problem := self._problem_at_start(local, state.promised):
            return problem
        mirror = Mirror(Source(str(self._publisher.root)), local)
        try:
            mirror.open()
            held = {int(version) for version in mirror.status()["held"]}
            for version in held:
                assert_same(local / f"v{version:08d}", self._publisher, version)
            if self._made > 1 and not held & {self._made - 1, self._made}:
                return f"of the versions before, the mirror holds only {held}"
            assert_same(
                mirror.prepare(self._made, self._publisher.label(self._made)),
                self._publisher,
                self._made,
            )
        except (AssertionError, FolderError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            os.close(mirror._lock_fd)
        extra = set(os.listdir(local)) - {
            ".mirror",
            CURRENT,
            *(f"v{version:08d}" for version in held | {self._made}),
        }
        return f"{sorted(extra)} was left" if extra else None

    def _problem_at_start(self, local: Path, promised: bool) -> str | None:
        """Return the fault that a server would find which starts before the mirror."""
        current, newest = local / CURRENT, f"v{self._made:08d}"
        if not os.path.lexists(current):
            return "current is gone" if promised or self._made > 1 else None
        try:
            check_folder(current)
        except FolderError as error:
            return f"current is not whole: {error}"
        found = os.readlink(current)
        return (
            f"current is {found} after {newest} was promised"
            if promised and found != newest
            else None
        )


@pytest.fixture(scope="module", params=slow_but(["first version"], MADE))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A version that a mirror has made, with all calls."""
    root, version = tmp_path_factory.mktemp("mirror"), MADE[request.param]
    publisher, local = Publisher(root / "source", SHAPES, piece_elements=100), root / "local"
    publisher.publish_chain(range(1, version + 1), share=0.1)
    mirror = Mirror(Source(str(publisher.root)), local)
    mirror.open()
    for before in range(1, version):
        mirror.prepare(before, publisher.label(before))
    tree = read_tree(local)
    with Shim(local) as shim:
        mirror.prepare(version, publisher.label(version))
    os.close(mirror._lock_fd)
    scenario: Any = type("Scenario", (), {"name": f"mirror, {request.param}"})
    return Recorded(
        scenario, PowerLoss(tree, relative_to(local, shim.calls)), Whole(publisher, version)
    )


def test_a_power_cut_leaves_a_mirror_whole(
    made: Recorded, tally: Tally, say: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "holdfast_weights")
    found = survey(made, FULL)
    lost = len(found.losses)
    say(
        f"power loss, {made.scenario.name}: {found.points} moments, {found.states} states, {lost} "
        "lost"
    )
    tally.add("power loss, mirror", injected=found.states, survived=found.states - lost, lost=lost)
    assert found.states > 3 and not lost, "\n".join(found.losses[:5])


NEEDED = {
    "a weight file": r".*/target/model-.*\.safetensors",
    "a small file": r".*/target/weights_probe\.json",
    "the manifest": r".*/target/manifest\.json",
    "the folder of the version": r".*/target",
    "the staging folder": r"\.staging-[^/]+",
    "the folder of versions": r"\.",
}


@pytest.mark.parametrize("what", NEEDED)
def test_a_power_cut_leaves_a_torn_version_without_the_fsync_of(what: str, made: Recorded) -> None:
    calls = enumerate(made.loss.calls)
    dropped = [
        n for n, call in calls if call.name in FSYNCS and re.fullmatch(NEEDED[what], call.path)
    ]
    assert dropped and survey(made.without(*dropped), QUICK, until_first_loss=True).losses
