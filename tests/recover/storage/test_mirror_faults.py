"""A mirror that is killed, down, hanging or overtaken: it is never wrong and never blocks the
training.
"""

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from holdfast.recover import GenerationStore
from holdfast.recover.storage.mirror import Mirror
from holdfast.utils.errors import CheckpointWriteError, MirrorError
from holdfast.utils.files import remove_folder
from tests.limits import stretched
from tests.recover.mirrors import (
    BUCKET,
    S3Server,
    block,
    commit,
    contents,
    listing,
    start,
    start_copy,
)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def module_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def server(module_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name, value in module_server.environment.items():
        monkeypatch.setenv(name, value)
    module_server.clear()
    yield module_server
    module_server.clear()


@pytest.fixture
def s3_url(server: S3Server, tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{tmp_path.name}/trial"


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        f"file://{tmp_path}/mirror/trial"
        if request.param == "file"
        else request.getfixturevalue("s3_url")
    )


@pytest.fixture
def store(tmp_path: Path) -> GenerationStore:
    return GenerationStore(tmp_path / "recover")


@pytest.fixture
def back(tmp_path: Path) -> GenerationStore:
    return GenerationStore(tmp_path / "back")


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + stretched(timeout_s)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("next_one", ["the same", "the step trained again"])
def test_a_killed_copy_does_not_count_and_the_next_completes_it(
    url: str,
    server: S3Server,
    store: GenerationStore,
    back: GenerationStore,
    tmp_path: Path,
    next_one: str,
) -> None:
    generation = commit(store, 5)
    whole = contents(generation.path)
    block(generation.path / "default" / "shard_2")
    process = start_copy(url, generation, server.environment)
    until(lambda: "global_step_5/default/shard_1" in listing(url))
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    mirror = Mirror(url, 2)
    assert mirror.steps() == [] and "global_step_5/default/shard_0" in listing(url)

    (generation.path / "default" / "shard_2").unlink()
    (generation.path / "default" / "shard_2").write_bytes(whole["default/shard_2"])
    if next_one != "the same":
        generation = commit(GenerationStore(tmp_path / "again"), 5, seed=1)
    server.clear()
    mirror.submit(generation)
    assert mirror.wait(30) and mirror.last_error is None and mirror.steps() == [5]
    assert contents(mirror.fetch(5, back).path) == contents(generation.path)
    assert len(listing(url)) == 4
    if url.startswith("s3") and next_one == "the same":
        assert server.puts() == ["global_step_5/default/shard_2", "global_step_5/manifest.json"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_at_any_request_there_is_always_a_copy_to_resume_from(
    s3_url: str, server: S3Server, store: GenerationStore, tmp_path: Path
) -> None:
    """The copy of step 1 replaces the copy of step 0. The process is killed before each of its
    requests.
    """
    old, new = commit(store, 0, sizes=(10, 20)), commit(store, 1, sizes=(10, 20))
    outcomes: list[list[int]] = []
    mirror = Mirror(s3_url, 1)
    while True:
        mirror.forget_newer(-1)
        mirror.submit(old)
        assert mirror.wait(30) and mirror.steps() == [0]
        server.hold_at(len(outcomes))
        process = start_copy(s3_url, new, server.environment, keep=1)
        until(lambda process=process: server.held.is_set() or not process.is_alive())
        if not server.held.is_set():
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        server.clear()
        outcomes.append(mirror.steps())
        for step in outcomes[-1]:
            back = GenerationStore(tmp_path / f"back_{len(outcomes)}_{step}")
            assert contents(mirror.fetch(step, back).path) == contents((old, new)[step].path)
        mirror.submit(new)
        assert mirror.wait(30) and mirror.last_error is None and mirror.steps() == [1]
    process.join(30)
    server.clear()
    assert process.exitcode == 0 and mirror.steps() == [1] and len(listing(s3_url)) == 3
    assert len(outcomes) > 20 and outcomes == sorted(outcomes, key=[[0], [1, 0], [1]].index)
    assert [0] in outcomes and [1, 0] in outcomes and [1] in outcomes


def test_a_mirror_that_is_down_costs_a_warning_until_it_returns(
    store: GenerationStore,
    back: GenerationStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    generation = commit(store, 0)
    with S3Server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
    mirror = Mirror(f"s3://{BUCKET}/down/trial", 2, attempts=2, first_wait_s=0.01)
    started = time.monotonic()
    mirror.submit(generation)
    assert time.monotonic() - started < stretched(0.5) and mirror.pinned() == {0}
    assert mirror.wait(60) and mirror.pinned() == set()
    assert isinstance(mirror.last_error, MirrorError) and "Could not connect" in str(
        mirror.last_error
    )
    assert [
        record.levelname
        for record in caplog.records
        if record.name == "holdfast.recover.storage.mirror"
    ] == ["WARNING"]
    assert sum("again in" in record.message for record in caplog.records) == 1
    with pytest.raises(
        MirrorError, match="failed 2 times, the last time with EndpointConnectionError"
    ):
        mirror.steps()
    with pytest.raises(MirrorError):
        mirror.fetch(0, back)
    assert not back.root.exists()
    with S3Server(server.port):
        mirror.submit(generation)
        assert mirror.wait(60) and mirror.last_error is None and mirror.steps() == [0]
        assert contents(mirror.fetch(0, back).path) == contents(generation.path)


def test_an_error_that_passes_is_tried_again(
    s3_url: str, server: S3Server, store: GenerationStore, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = Mirror(s3_url, 2, first_wait_s=0.01)
    server.fail(3)
    mirror.submit(commit(store, 0))
    assert mirror.wait(60) and mirror.last_error is None and mirror.steps() == [0]
    assert any("again in" in record.message for record in caplog.records)


def test_a_bucket_that_does_not_exist_is_not_made(server: S3Server, store: GenerationStore) -> None:
    mirror = Mirror("s3://another-bucket/trial", 2)
    mirror.submit(commit(store, 0))
    assert mirror.wait(60) and isinstance(mirror.last_error, OSError) and mirror.steps() == []
    assert "bucket does not exist" in str(mirror.last_error)
    assert "PUT /another-bucket" not in server.requests


def test_a_newer_generation_takes_the_turn_of_one_that_waits(
    url: str, store: GenerationStore, caplog: pytest.LogCaptureFixture
) -> None:
    generations = [commit(store, step) for step in range(4)]
    path = generations[0].path / "default" / "shard_1"
    block(path)
    mirror = Mirror(url, None)
    started = time.monotonic()
    for generation in generations:
        mirror.submit(generation)
    assert time.monotonic() - started < stretched(0.5)
    assert mirror.pinned() == {0, 3} and not mirror.wait(0.1)
    with path.open("wb"):  # both readers see an empty file
        path.unlink()
        path.touch()
    assert mirror.wait(30) and mirror.last_error is None and mirror.steps() == [3, 0]
    assert sum("a newer one came" in record.message for record in caplog.records) == 2


def test_a_generation_that_is_retired_while_it_is_copied_is_skipped(
    url: str, store: GenerationStore, caplog: pytest.LogCaptureFixture
) -> None:
    gone, next_one = commit(store, 0), commit(store, 1)
    path = gone.path / "default" / "shard_0"
    block(path)
    mirror = Mirror(url, 2)
    mirror.submit(gone)
    mirror.submit(next_one)
    with path.open("wb"):
        remove_folder(gone.path)
    assert mirror.wait(30) and mirror.last_error is None and mirror.steps() == [1]
    assert sum("it was removed meanwhile" in record.message for record in caplog.records) == 1
    assert not any("global_step_0" in name for name in listing(url))


class FullStore(MemoryFileSystem):
    """A store with room for ``room_bytes``, which may refuse a file, as with a quota of HDFS."""

    protocol = "full"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    room_bytes = 0
    refused = ""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if self.refused and path.endswith(self.refused):
            raise ConnectionError("the connection was lost")
        used = sum(len(file.getbuffer()) for file in self.store.values())
        if used + len(value) > self.room_bytes:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        super().pipe_file(path, value, mode, **kwargs)

    def put_file(self, lpath: str, rpath: str, *_: Any, **__: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())


def test_the_remains_of_an_interrupted_copy_make_room_for_the_next(
    store: GenerationStore, back: GenerationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("full", FullStore, clobber=True)
    sizes = (20_000, 20_000, 20_000)
    monkeypatch.setattr(FullStore, "room_bytes", 150_000)  # two generations and a half
    mirror = Mirror("full://trial", 1, attempts=1)
    mirror.submit(commit(store, 0, sizes))
    assert mirror.wait(30) and mirror.steps() == [0]

    monkeypatch.setattr(FullStore, "refused", "shard_2")
    mirror.submit(commit(store, 1, sizes))
    assert mirror.wait(30) and "connection was lost" in str(mirror.last_error)
    assert mirror.states() == {1: "incomplete", 0: "complete"}

    # The remains may be of this process or of one that was killed.
    monkeypatch.setattr(FullStore, "refused", "")
    mirror = Mirror("full://trial", 1, attempts=1)
    generation = commit(store, 2, sizes)
    mirror.submit(generation)
    assert mirror.wait(30) and mirror.last_error is None, mirror.last_error
    assert mirror.states() == {2: "complete"}
    assert contents(mirror.fetch(2, back).path) == contents(generation.path)


def test_a_copy_that_lacks_only_its_manifest_stays_until_the_next_is_complete(
    store: GenerationStore, tmp_path: Path
) -> None:
    folder = tmp_path / "mirror"
    mirror = Mirror(f"file://{folder}", 1, attempts=1)
    mirror.submit(commit(store, 0))
    assert mirror.wait(30)
    (folder / "global_step_0" / "manifest.json").rename(folder / ".copying-global_step_0")
    assert mirror.states() == {0: "unconfirmed"}

    generation = commit(store, 1)
    block(generation.path / "default" / "shard_1")
    process = start_copy(mirror.url, generation, {}, keep=1)
    until(lambda: "global_step_1/default/shard_0" in listing(mirror.url))
    assert mirror.states() == {1: "incomplete", 0: "unconfirmed"}
    process.kill()
    process.join(30)


def test_close_waits_for_the_copy_under_way(url: str, store: GenerationStore) -> None:
    mirror = Mirror(url, 2)
    mirror.submit(commit(store, 0))
    mirror.close(30)
    assert Mirror(url, 2).steps() == [0]
    assert not any(thread.name == "mirror" for thread in threading.enumerate())


@pytest.mark.slow
def test_a_process_ends_in_time_although_its_mirror_hangs(
    s3_url: str, server: S3Server, store: GenerationStore
) -> None:
    generation = commit(store, 0)
    server.hold_at(0)
    script = f"""
        import logging, time
        from pathlib import Path
        from holdfast.recover.storage.mirror import Mirror
        from holdfast.recover.storage.generations import Generation

        logging.basicConfig(level="WARNING")
        mirror = Mirror({s3_url!r}, 1)
        mirror.submit(Generation(0, Path({str(generation.path)!r})))
        started = time.monotonic()
        mirror.close(2.0)
        print("closed after", round(time.monotonic() - started, 1), flush=True)
        """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, **server.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    closed = time.monotonic()
    _, errors = process.communicate(timeout=stretched(60))
    assert line.startswith("closed after 2."), (line, errors)
    assert process.returncode == 0 and time.monotonic() - closed < stretched(8.0)
    assert "gave up copying step(s) [0]" in errors and "Traceback" not in errors
    assert server.held.is_set()


def test_a_disk_that_refuses_a_fetch_is_left_as_it_was(
    tmp_path: Path, store: GenerationStore
) -> None:
    url, back = f"file://{tmp_path}/mirror", GenerationStore(tmp_path / "back")
    mirror = Mirror(url, 2)
    mirror.submit(commit(store, 0))
    assert mirror.wait(30)
    process = start(fetch_with_small_files, {}, url, back)
    process.join(60)
    assert process.exitcode == 0
    assert back.generations() == [] and not list(back.root.iterdir())


def fetch_with_small_files(url: str, store: GenerationStore) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    with pytest.raises(CheckpointWriteError, match="File too large"):
        Mirror(url, 2).fetch(0, store)
