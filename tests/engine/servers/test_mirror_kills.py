"""A trainer is killed at every step of a delta, from the comparison to the last server, and starts
again.

Two ranks publish to two servers through a real mirror process. After each publication of the next
life all servers serve the same content, and the mirror's folder has the trainer's bytes.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.copy_task import write_model_folder
from holdfast.engine import WeightUpdateMeta
from holdfast.engine.hf import deltas, versions
from holdfast.engine.hf.delta_file import DeltaFile
from holdfast.engine.hf.versions import holds_delta_alone, version_path
from holdfast.engine.memory.tensors import local_tensor
from holdfast.engine.servers import ServerFleet, VLLMServer, publish
from holdfast.engine.servers.api import ServerStatus, weights_label
from holdfast.engine.servers.http import Calls
from holdfast.utils import atomic_folder
from holdfast.utils.manifest import DELTA_NAME, verify_folder
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.test_publish import make_engine
from tests.helpers import run_ranks
from tests.limits import stretched
from tests.plugins.weights.processes import Running

pytestmark = pytest.mark.timeout(120)

LIMIT_S = stretched(30)
STEPS: dict[str, tuple[Any, str]] = {
    "remove newer versions": (versions, "clear_from"),
    "compare": (deltas.PublishedCopy, "swap"),
    "encode": (DeltaFile, "add"),
    "write": (DeltaFile, "close"),
    "gather": (versions, "gather_objects"),
    "seal": (deltas.DeltaPublication, "seal"),
    "manifest": (versions, "write_manifest"),
    "rename": (atomic_folder, "commit_folder"),
    "declare valid": (deltas.DeltaPublication, "commit"),
    "tell": (ServerFleet, "update"),
    "delete": (publish, "delete_old"),
}
"""Step -> object and function, which both ranks or rank 0 alone call."""
BY_ALL_RANKS = ("compare", "encode", "write", "gather", "declare valid")
CALLS = (
    "prepare",
    "pause",
    "collective_rpc",
    "reset_prefix_cache",
    "update_weight_version",
    "resume",
    "generate",
)
"""Ends of the paths of an update's calls. The process ends after the first server's answer."""
KILLS = [
    (step, rank, when)
    for step in STEPS
    for rank in (0, 1)[: 1 + (step in BY_ALL_RANKS)]
    for when in ("at", "after")
]
KILLS += [(call, 0, "after") for call in CALLS]
KILLED = 3


def test_all_steps_at_which_a_process_is_killed_exist() -> None:
    assert [step for step, (owner, name) in STEPS.items() if not hasattr(owner, name)] == []


def _kill_at(step: str, when: str) -> None:
    """End this process at a step from now on."""
    owner, name = STEPS.get(step, (Calls, "_send"))
    function = getattr(owner, name)

    def watched(*args: Any, **options: Any) -> Any:
        if when == "at":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **options)
        if step in STEPS or args[3].endswith(f"/{step}"):  # self, phase, method, path
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, watched)


def _publish(
    rank: int,
    world_size: int,
    folder: str,
    root: str,
    urls: list[str],
    mirror: str,
    first: int,
    kill: Any,
) -> None:
    servers = [VLLMServer(url, mirror=mirror, timeout_s=LIMIT_S) for url in urls]
    fleet, engine = ServerFleet(servers, probe_interval_s=None), make_engine(folder)
    meta = WeightUpdateMeta("disk", root, delta=True)
    for version in range(first, first + KILLED):
        with torch.no_grad():
            for param in engine.model.parameters():
                local_tensor(param).view(-1)[version::10].add_(0.02)
        engine.set_version(version)
        engine.connect_engine([], replace(meta, path=f"{root}.full", delta=False))
        engine.update_weights()  # not to any server, to compare
        engine.connect_engine(fleet, meta)
        if version == KILLED and kill is not None and kill[1] == rank:
            _kill_at(kill[0], kill[2])
        engine.update_weights()
        if rank == 0:
            _check(Path(root), version, servers)
            assert holds_delta_alone(version_path(root, version)) == (version > first)
    engine.destroy()


def _check(root: Path, version: int, servers: list[VLLMServer]) -> None:
    full, local = version_path(f"{root}.full", version), root.parent / "local"
    for server in servers:
        assert server.status() == ServerStatus(weights_label(full, version), paused=False)
    assert verify_folder(full)["weight_version"] == version and (
        local / "current"
    ).resolve() == version_path(local, version)
    names = {path.name for path in (local / "current").iterdir()} - {DELTA_NAME}
    assert names == {path.name for path in full.iterdir()}
    assert all(
        (local / "current" / name).read_bytes() == (full / name).read_bytes() for name in names
    )


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[list[FakeServer]]:
    with (
        FakeServer("vllm", tmp_path, dtype="float32") as one,
        FakeServer("vllm", tmp_path, dtype="float32") as other,
    ):
        yield [one, other]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "rank", "when"), KILLS)
def test_a_trainer_killed_while_it_publishes_a_delta_starts_again(
    step: str, rank: int, when: str, fakes: list[FakeServer], tmp_path: Path
) -> None:
    folder, root, urls = (
        write_model_folder(tmp_path / "model"),
        tmp_path / "w",
        [fake.url for fake in fakes],
    )
    with Running("mirror", root, tmp_path / "local", "--poll", 0.1) as mirror:
        with pytest.raises(AssertionError, match="died without a word"):
            run_ranks(_publish, 2, str(folder), str(root), urls, mirror.url, 1, (step, rank, when))
        assert all(
            fake.alive() and fake.state()["version"] in (KILLED - 1, KILLED) for fake in fakes
        )
        run_ranks(_publish, 2, str(folder), str(root), urls, mirror.url, KILLED, None)
        assert mirror.process.poll() is None
