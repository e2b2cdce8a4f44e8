"""A version is complete before any server hears about it, and no failure removes the previous
one.
"""

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.copy_task import write_model_folder
from holdfast.engine import (
    FinetuneSpec,
    FSDPEngine,
    TrainEngineConfig,
    WeightUpdateMeta,
    full_state_dict,
    publish_weights,
)
from holdfast.engine.hf.versions import published_versions, version_path
from holdfast.engine.servers import ServerFleet
from holdfast.engine.servers.api import weights_label
from holdfast.engine.servers.publish import PublishedWeights
from holdfast.utils.errors import (
    CheckpointWriteError,
    ConfigError,
    PeerError,
    PublishError,
    WorkerLost,
)
from holdfast.utils.manifest import verify_folder
from tests.engine.servers.scripted import PlainServer, ScriptedServer
from tests.helpers import run_ranks
from tests.limits import stretched, wait_until


class Server:
    """Checks the folder when it is told to load it, like a real server."""

    def __init__(self, off_by: int = 0, fails: bool = False) -> None:
        self.off_by, self.fails = off_by, fails
        self.told: list[int] = []

    def update_weights_from_disk(self, path: str, version: int) -> int:
        assert verify_folder(path)["weight_version"] == version
        assert not [entry for entry in os.listdir(Path(path).parent) if entry.startswith(".")]
        self.told.append(version)
        if self.fails:
            raise TimeoutError("the server did not answer")
        return version + self.off_by


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def make_engine(folder: str, **options: Any) -> FSDPEngine:
    config = TrainEngineConfig(
        path=folder, init_from_scratch=True, dtype="float32", optimizer=None, **options
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(1, 8, 1))
    return engine


def publish(engine: FSDPEngine, version: int) -> None:
    """Change the weights, and publish them as ``version``."""
    with torch.no_grad():
        for param in engine.model.parameters():
            param.mul_(1.5)
    engine.set_version(version)
    engine.update_weights()


def names_of_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def check_contents(engine: FSDPEngine, path: Path) -> None:
    """Check that a folder is complete by itself: the live weights, and a tokenizer."""
    live = full_state_dict(engine.model)
    if engine.data_parallel_rank == 0:
        published = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        assert live.keys() == published.keys()
        assert all(torch.equal(live[key], published[key]) for key in live)
        assert len(AutoTokenizer.from_pretrained(path)("12=").input_ids) == 3
        assert (path / "chat_template.jinja").exists()


def _versions_grow_and_old_ones_go(rank: int, world_size: int, folder: str, root: str) -> list[int]:
    engine, server = make_engine(folder), Server()
    with pytest.raises(ConfigError, match="no WeightUpdateMeta"):
        engine.update_weights()
    engine.connect_engine([server], WeightUpdateMeta("disk", root))
    for version, expected in ((1, [1]), (2, [1, 2]), (3, [2, 3]), (7, [3, 7])):
        publish(engine, version)
        assert published_versions(root) == expected
        assert sorted(os.listdir(root)) == [f"v{v:08d}" for v in expected]
        check_contents(engine, version_path(root, version))
    engine.update_weights(WeightUpdateMeta("disk", root, version=8, keep=1))
    assert published_versions(root) == [8]
    assert engine.get_version() == 7
    return server.told


def _no_failure_takes_an_older_version_away(
    rank: int, world_size: int, folder: str, root: str
) -> None:
    engine, good = make_engine(folder), Server()
    meta = WeightUpdateMeta("disk", root)
    engine.connect_engine([good], meta)
    publish(engine, 1)
    publish(engine, 2)

    with (
        largest_file(100_000 if rank == 1 else resource.RLIM_INFINITY),
        pytest.raises(CheckpointWriteError if rank == 1 else PeerError, match="File too large"),
    ):
        publish(engine, 3)
    dist.barrier()  # rank 0 cleans up after it has reported
    assert sorted(os.listdir(root)) == ["v00000001", "v00000002"]
    assert good.told == ([1, 2] if rank == 0 else [])

    late = Server()
    engine.connect_engine([good, Server(off_by=-1), late], meta)
    with pytest.raises(PublishError, match="serves version 2 after it was told to load version 3"):
        publish(engine, 3)
    assert published_versions(root) == [1, 2, 3], "a server may still serve 1 or 2"
    engine.connect_engine([Server(fails=True), late], meta)
    with pytest.raises(
        PublishError, match=r"by [01] of 2 .*TimeoutError: the server did not answer"
    ):
        publish(engine, 4)
    assert published_versions(root) == [1, 2, 3, 4]
    wanted, end = [3, 4] if rank == 0 else [], time.monotonic() + 10
    while (
        late.told != wanted and time.monotonic() < end
    ):  # its thread may run only after another server's has failed
        time.sleep(0.01)
    assert late.told == wanted, "all are told at once"
    for version in published_versions(root):
        assert verify_folder(version_path(root, version))["weight_version"] == version


def _a_recovered_run_replaces_what_it_had_published(
    rank: int, world_size: int, folder: str, root: str
) -> list[int]:
    engine, server = make_engine(folder), Server()
    engine.connect_engine([server], WeightUpdateMeta("disk", root))
    for version in (5, 6, 7):
        publish(engine, version)
    if rank == 0:  # leftovers of publishers killed during a write and during a removal
        for leftover in (
            ".staging-v00000008-01234567",
            ".retired-v00000005-01234567",
            ".amplified-v00000005-ab",
        ):
            (Path(root) / leftover / "part").mkdir(parents=True)
    dist.barrier()
    publish(engine, 6)  # restored to step 6, with weights other than the first life's
    assert sorted(os.listdir(root)) == ["v00000006"]
    check_contents(engine, version_path(root, 6))
    publish(engine, 7)
    assert published_versions(root) == [6, 7]
    check_contents(engine, version_path(root, 7))
    return server.told


def _the_same_weights_stay_in_their_folder(
    rank: int, world_size: int, folder: str, root: str
) -> None:
    engine, server = make_engine(folder), Server()
    engine.connect_engine([server], WeightUpdateMeta("disk", root))
    publish(engine, 5)
    engine.update_weights(WeightUpdateMeta("disk", root, version=6))
    written_at = os.stat(version_path(root, 5)).st_mtime_ns

    again = engine.update_weights()
    assert published_versions(root) == [5], "newer versions go in any case"
    assert os.stat(again.path).st_mtime_ns == written_at and again.figures["bytes"] == 0
    assert rank != 0 or server.told == [5, 6, 5]

    # A damaged folder is replaced.
    if rank == 0:
        with (again.path / "config.json").open("ab") as file:
            file.write(b" ")
    dist.barrier()
    engine.update_weights()
    assert os.stat(again.path).st_mtime_ns != written_at
    check_contents(engine, again.path)


def _other_weights_wait_for_the_end_of_a_load(
    rank: int, world_size: int, folder: str, root: str
) -> None:
    engine, server = make_engine(folder), PlainServer()
    server.go.clear()
    meta = WeightUpdateMeta("disk", root, timeout_s=0.3)
    engine.connect_engine([server], meta)
    with pytest.raises(PublishError, match="did not load"):
        publish(engine, 5)
    before = weights_label(version_path(root, 5), 5)
    dist.barrier()
    with pytest.raises(PublishError, match=r"is still loading .* nothing was written in its place"):
        publish(engine, 5)
    assert weights_label(version_path(root, 5), 5) == before

    # The server reads whole folders: first the old one, then the new one.
    threading.Timer(0.3, server.go.set).start()
    engine.update_weights(replace(meta, timeout_s=stretched(20)))
    assert weights_label(version_path(root, 5), 5) != before
    assert rank != 0 or server.told == [5, 5]


def _all(rank: int, world_size: int, folder: str, root: str) -> tuple[list[int], list[int]]:
    told = _versions_grow_and_old_ones_go(rank, world_size, folder, f"{root}/a")
    _no_failure_takes_an_older_version_away(rank, world_size, folder, f"{root}/b")
    _the_same_weights_stay_in_their_folder(rank, world_size, folder, f"{root}/d")
    _other_weights_wait_for_the_end_of_a_load(rank, world_size, folder, f"{root}/e")
    return told, _a_recovered_run_replaces_what_it_had_published(
        rank, world_size, folder, f"{root}/c"
    )


class SlowServer:
    """Takes some seconds to load a version. None: forever."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def update_weights_from_disk(self, path: str, version: int) -> int:
        threading.Event().wait(self.seconds)
        return version


def _servers_slower_than_the_ranks_wait(
    rank: int, world_size: int, folder: str, root: str
) -> list[float]:
    engine = make_engine(folder, timeout_s=2.0)
    waited = []
    for version, seconds in ((1, 3.5), (2, 0.0)):
        started = time.monotonic()
        engine.connect_engine([SlowServer(seconds)], WeightUpdateMeta("disk", root, timeout_s=30))
        publish(engine, version)
        waited.append(time.monotonic() - started)
    engine.connect_engine([SlowServer(None)], WeightUpdateMeta("disk", root, timeout_s=2.5))
    with pytest.raises(PublishError, match=r"is gone: it did not load .* within 2.5 s"):
        publish(engine, 3)
    engine.connect_engine([], WeightUpdateMeta("disk", root, version=4))
    engine.update_weights()
    assert published_versions(root) == [3, 4]
    return waited


@pytest.mark.slow
def test_servers_may_take_longer_than_ranks_wait_for_each_other(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    for slow, quick in run_ranks(
        _servers_slower_than_the_ranks_wait, 2, str(folder), str(tmp_path / "weights")
    ):
        assert 3.5 <= slow < 9 and quick < 2


@pytest.mark.slow
def test_a_server_that_never_answers_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    script = f"""
from holdfast.engine import WeightUpdateMeta
from holdfast.utils.errors import PublishError
from tests.engine.servers.test_publish import SlowServer, make_engine
engine = make_engine({str(folder)!r})
meta = WeightUpdateMeta("disk", {str(tmp_path / "weights")!r}, timeout_s=0.5)
engine.connect_engine([SlowServer(None)], meta)
try:
    engine.update_weights()
except PublishError as error:
    print(error)
engine.destroy()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=40
    )
    assert ended.returncode == 0, ended.stderr
    assert "within 0.5 s" in ended.stdout


@pytest.mark.timeout(90)
def test_versions_are_complete_when_rank_zero_tells_and_survive_every_failure(
    tmp_path: Path,
) -> None:
    folder = write_model_folder(tmp_path / "model")
    first, second = run_ranks(_all, 2, str(folder), str(tmp_path / "weights"))
    assert first == ([1, 2, 3, 7, 8], [5, 6, 7, 6, 7])
    assert second == ([], []), "only rank 0 tells"


def _a_fleet_outlives_the_loss_of_a_server(
    rank: int, world_size: int, folder: str, root: str
) -> None:
    engine, (good, lost) = make_engine(folder), (ScriptedServer("good"), ScriptedServer("lost"))
    meta = WeightUpdateMeta("disk", root, min_servers=1)
    with closing(ServerFleet([good, lost], probe_interval_s=0.05)) as fleet:
        engine.connect_engine(fleet, meta)
        engine.set_version(1)
        done = engine.update_weights()
        assert (done.path, done.version) == (version_path(root, 1), 1)
        assert [report.state for report in done.servers] == ["serving", "serving"], "on both ranks"
        stats = done.stats()
        phases = {
            "publish_write_s",
            "publish_commit_s",
            "publish_tell_s",
            "update_total_s",
            "update_load_s",
        }
        assert all(0 < stats[phase] < 60 for phase in phases)
        assert sum(stats[phase] for phase in phases if phase[0] == "p") <= stats["publish_total_s"]
        assert stats["servers_serving"] == 2 and stats["servers_gone"] == 0
        written = sum(entry["bytes"] for entry in verify_folder(done.path)["files"].values())
        assert (
            stats["publish_bytes"] == stats["publish_full_bytes"] == written
            and stats["publish_delta"] == 0
        )

        lost.alive = False
        publish(engine, 2)
        if rank == 0:
            assert fleet.serving() == [good]
            lost.restart()
            assert fleet.wait_serving(2, stretched(10)), "nobody published again"
            assert lost.label == weights_label(version_path(root, 2), 2)
        dist.barrier()

        good.alive = lost.alive = False
        with pytest.raises(
            PublishError, match="confirmed by 0 of 2 inference servers, 1 are needed"
        ):
            publish(engine, 3)
        assert published_versions(root) == [1, 2, 3], "a server may still serve 1 or 2"
        good.restart()
        lost.restart()
        assert rank != 0 or fleet.wait_serving(2, stretched(10)), (
            "they are brought to the version of the failed one"
        )

        with (
            largest_file(100_000 if rank == 1 else resource.RLIM_INFINITY),
            pytest.raises(CheckpointWriteError if rank == 1 else PeerError, match="File too large"),
        ):
            publish(engine, 4)
        assert rank != 0 or fleet.serving() == [good, lost], (
            "they serve 3, whose folder is still there"
        )
        publish(engine, 2)  # as after a recovery
        if rank == 0:
            label = weights_label(version_path(root, 2), 2)
            assert fleet.serving() == [good, lost] and good.label == lost.label == label
        assert published_versions(root) == [1, 2]
        engine.destroy()
        if rank == 0:
            lost.restart()
            wait_until(lambda: lost.label == label)  # the fleet's owner closes it


def _servers_that_were_named_are_looked_after(
    rank: int, world_size: int, folder: str, root: str
) -> None:
    engine, server = make_engine(folder), ScriptedServer()
    engine.connect_engine([server], WeightUpdateMeta("disk", root))
    publish(engine, 1)
    assert ("inference server prober" in names_of_threads()) == (rank == 0)
    engine.connect_engine([server, server], WeightUpdateMeta("disk", root))
    assert "inference server prober" not in names_of_threads()
    with pytest.raises(ConfigError if rank == 0 else PeerError, match="is named twice"):
        publish(engine, 2)
    engine.connect_engine([server], WeightUpdateMeta("disk", root))
    publish(engine, 2)
    engine.destroy()
    assert "inference server prober" not in names_of_threads()


def _the_loss_of_a_worker_reaches_every_rank(
    rank: int, world_size: int, folder: str, root: str
) -> None:
    def die(version: int) -> None:
        raise WorkerLost("rollout", [0], "died during the update")

    engine = make_engine(folder)
    engine.connect_engine([PlainServer("lost", die)], WeightUpdateMeta("disk", root))
    with pytest.raises(WorkerLost) as caught:
        publish(engine, 1)
    assert caught.value.group == "rollout"


def _what_goes_along_is_sealed(rank: int, world_size: int, folder: str, root: str) -> None:
    engine, extra = make_engine(folder), {"notes.json": f"of rank {rank}".encode()}
    meta = WeightUpdateMeta("disk", root)
    done = publish_weights(engine.model, meta, 1, [], engine.control_group, extra_files=extra)
    assert done.servers == () and "notes.json" in verify_folder(done.path)["files"]
    assert (done.path / "notes.json").read_text() == "of rank 0"


def _all_of_a_fleet(rank: int, world_size: int, folder: str, root: str) -> PublishedWeights:
    _a_fleet_outlives_the_loss_of_a_server(rank, world_size, folder, f"{root}/a")
    _servers_that_were_named_are_looked_after(rank, world_size, folder, f"{root}/b")
    _the_loss_of_a_worker_reaches_every_rank(rank, world_size, folder, f"{root}/c")
    _what_goes_along_is_sealed(rank, world_size, folder, f"{root}/d")
    engine = make_engine(folder)
    engine.connect_engine([], WeightUpdateMeta("disk", f"{root}/e", version=5))
    return engine.update_weights()  # the driver tells the servers


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_ranks_publish_to_a_fleet_that_loses_servers(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    written, _ = run_ranks(_all_of_a_fleet, 2, str(folder), str(tmp_path / "weights"))
    server = ScriptedServer()
    with closing(ServerFleet([server])) as fleet:
        fleet.update(written.path, written.version, stretched(10))
    assert server.label == weights_label(written.path, 5)


def test_a_url_is_no_place_to_publish_to(tmp_path: Path) -> None:
    expected = (
        r"WeightUpdateMeta\.path is s3://bucket/w; publishing needs a folder of this machine: "
        r"give one"
    )
    with pytest.raises(ConfigError, match=expected):
        WeightUpdateMeta("disk", "s3://me:secret@bucket/w")
    assert WeightUpdateMeta("disk", f"file://{tmp_path}/w").path == f"{tmp_path}/w"


class Listener(Server):
    """Notes the folders that it is told to load."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []

    def update_weights_from_disk(self, path: str, version: int) -> int:
        self.paths.append(path)
        return super().update_weights_from_disk(path, version)


def _publish_to_a_relative_folder(rank: int, world_size: int, folder: str, at: str) -> list[str]:
    os.chdir(at)
    engine = make_engine(folder)
    server = Listener()
    engine.connect_engine([server], WeightUpdateMeta("disk", "weights"))
    publish(engine, 1)
    engine.destroy()
    return server.paths


def test_servers_are_told_the_whole_path_of_a_relative_folder(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    (told,) = run_ranks(_publish_to_a_relative_folder, 1, str(folder), str(tmp_path))
    assert told == [str(version_path(tmp_path / "weights", 1))]
