"""Copies while a real server crashes, stands still, is full or refuses: none is lost without a
warning, and the next one is complete.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.recover import GenerationStore
from holdfast.recover.storage.generations import Generation
from holdfast.recover.storage.mirror import Mirror
from holdfast.utils.errors import MirrorError
from holdfast.utils.manifest import verify_folder
from tests.limits import stretched
from tests.recover.mirrors import commit, listing, start_copy
from tests.storage.conftest import Place
from tests.storage.jobs import wait_for_marker
from tests.storage.servers import HDFSCluster, SeaweedFS

pytestmark = pytest.mark.timeout(300)
BOTH = pytest.mark.parametrize("place", ["hdfs", "s3"], indirect=True)
AT_S3 = pytest.mark.parametrize("place", ["s3"], indirect=True)
AT_HDFS = pytest.mark.parametrize("place", ["hdfs", "webhdfs"], indirect=True)
LARGE = 120 << 20
"""Bytes of a file that travels for seconds, and in parts to S3."""


@pytest.fixture
def store(tmp_path: Path) -> GenerationStore:
    return GenerationStore(tmp_path / "recover")


@pytest.fixture
def back(tmp_path: Path) -> GenerationStore:
    """The store of a machine that has lost all files."""
    return GenerationStore(tmp_path / "back")


def copy_once(place: Place, store: GenerationStore, step: int) -> str:
    """Try to copy a small generation with two attempts per operation. Returns the error, or ""."""
    mirror = Mirror(place.url, None, attempts=2, first_wait_s=0.1)
    mirror.submit(commit(store, step))
    assert mirror.wait(stretched(120))
    return "" if mirror.last_error is None else str(mirror.last_error)


@BOTH
@pytest.mark.parametrize("what", ["is killed", "stands still"])
def test_a_server_that_leaves_in_a_copy_gets_it_when_it_is_back(
    place: Place, store: GenerationStore, back: GenerationStore, what: str
) -> None:
    generation = commit(store, 2, sizes=[LARGE])
    # A server takes its time to start. Eight attempts last two minutes.
    copier = start_copy(place.url, generation, place.environment, attempts=8)
    try:
        wait_for_marker(place.url, after=1, still=copier.is_alive)
        if what == "is killed":
            place.data_server.kill()
        else:
            place.data_server.suspend()
        # Longer than the 15 s after which s3fs gives up waiting.
        copier.join(20 if what == "stands still" else 3)
        assert copier.is_alive(), "the copy was made before the server left"
    finally:
        if what == "is killed":
            place.data_server.start()
        else:
            place.data_server.resume()
        place.servers.wait()
    copier.join(stretched(150))
    assert copier.exitcode == 0
    fetched = Mirror(place.url, None).fetch(2, back)
    verify_folder(fetched.path)
    assert not any(name.startswith(".copying") for name in listing(place.url))


@AT_S3
def test_a_copier_killed_in_a_multipart_upload_leaves_no_object(
    place: Place, store: GenerationStore, back: GenerationStore
) -> None:
    generation = commit(store, 2, sizes=[LARGE])
    copier = start_copy(place.url, generation, place.environment)
    wait_for_marker(place.url, after=1, still=copier.is_alive)
    place.data_server.suspend()
    copier.kill()
    copier.join()
    place.data_server.resume()
    place.servers.wait()
    assert "global_step_2/default/shard_0" not in listing(place.url)
    assert Mirror(place.url, None).states() == {2: "incomplete"}

    assert copy_whole(place, generation) == {2: "complete"}
    verify_folder(Mirror(place.url, None).fetch(2, back).path)


def copy_whole(place: Place, generation: Generation) -> dict[int, str]:
    """Copy with all attempts, and return the states then."""
    mirror = Mirror(place.url, None)
    mirror.submit(generation)
    assert mirror.wait(stretched(120)) and mirror.last_error is None
    return dict(mirror.states())


@AT_HDFS
def test_safe_mode_is_a_warning_of_one_line_and_the_next_copy_is_complete(
    place: Place, hdfs: HDFSCluster, store: GenerationStore, caplog: pytest.LogCaptureFixture
) -> None:
    assert copy_once(place, store, 1) == ""
    hdfs.admin("dfsadmin", "-safemode", "enter")
    try:
        error = copy_once(place, store, 2)
    finally:
        hdfs.admin("dfsadmin", "-safemode", "leave")
    assert "Name node is in safe mode" in error and error.startswith(f"{place.url}/")
    for message in (error, *caplog.messages):
        assert "\n" not in message and "\\n" not in message and "FSNamesystem" not in message
    assert Mirror(place.url, None).states() == {1: "complete"}
    assert copy_once(place, store, 3) == ""
    assert Mirror(place.url, None).states() == {3: "complete", 1: "complete"}


@AT_HDFS
def test_a_full_quota_keeps_the_sound_copy_and_the_next_one_has_room(
    place: Place, hdfs: HDFSCluster, store: GenerationStore
) -> None:
    assert copy_once(place, store, 1) == ""
    folder = f"/{place.url.rpartition('/')[2]}"
    hdfs.admin("dfsadmin", "-setSpaceQuota", "1m", folder)
    error = copy_once(place, store, 2)
    assert "quota" in error.lower() and "\n" not in error and "\\n" not in error
    states = Mirror(place.url, None).states()
    assert states.pop(2, "incomplete") != "complete" and states == {1: "complete"}
    hdfs.admin("dfsadmin", "-clrSpaceQuota", folder)
    assert copy_once(place, store, 3) == ""
    assert Mirror(place.url, None).steps() == [3, 1]


@AT_S3
@pytest.mark.parametrize("user", ["reader", "nobody"])
def test_keys_that_may_not_write_are_refused_with_the_words_of_the_server(
    place: Place,
    s3: SeaweedFS,
    store: GenerationStore,
    user: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert copy_once(place, store, 1) == ""
    for name, value in s3.environment(user).items():
        monkeypatch.setenv(name, value)
    error = copy_once(place, store, 2)
    # It may read with the read-only key.
    if user == "reader":
        assert "Access Denied" in error
        assert Mirror(place.url, None).states() == {1: "complete"}
    else:
        assert "does not exist in our records" in error
        with pytest.raises(MirrorError, match="does not exist in our records"):
            Mirror(place.url, None, attempts=1).states()
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    assert secret not in caplog.text + error


@pytest.fixture
def temporary_user(s3: SeaweedFS) -> Iterator[str]:
    """A user whose key a test may withdraw."""
    yield "temporary"
    s3.shell("s3.configure -user=temporary -delete -apply")


@AT_S3
def test_a_key_that_expires_between_copies_costs_copies_until_it_is_renewed(
    place: Place,
    s3: SeaweedFS,
    temporary_user: str,
    store: GenerationStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s3.grant(temporary_user)
    for name, value in s3.environment(temporary_user).items():
        monkeypatch.setenv(name, value)
    mirror = Mirror(place.url, None, attempts=2, first_wait_s=0.1)

    def copied(step: int) -> bool:
        mirror.submit(commit(store, step))
        assert mirror.wait(stretched(120))
        return mirror.last_error is None

    assert copied(1)
    s3.shell(f"s3.configure -user={temporary_user} -delete -apply")
    s3.wait_for_key(temporary_user, works=False)
    assert not copied(2) and "does not exist in our records" in str(mirror.last_error)
    s3.grant(temporary_user)
    assert copied(3)
    assert Mirror(place.url, None).steps() == [3, 1]


@BOTH
def test_an_emptied_folder_is_called_empty(
    place: Place, store: GenerationStore, request: pytest.FixtureRequest
) -> None:
    if isinstance(place.servers, HDFSCluster):
        folder = place.url.removeprefix(place.servers.url)
        place.servers.admin("dfs", "-mkdir", "-p", f"{folder}/global_step_2/default")
    else:
        path = place.url.removeprefix("s3://")
        place.servers.shell(f"fs.mkdir /buckets/{path}/global_step_2/default")
    assert copy_once(place, store, 1) == ""
    assert Mirror(place.url, None).states() == {2: "empty", 1: "complete"}
