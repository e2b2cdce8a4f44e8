"""``serve`` gives the files of versions, whole or in part, and nothing else of the disk."""

import http.client
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from holdfast_weights.errors import FolderError, MissingError
from holdfast_weights.mirror import Mirror
from holdfast_weights.service import FileHandler, Server
from holdfast_weights.source import Source, version_of

from tests.limits import stretched
from tests.plugins.weights.processes import Running
from tests.plugins.weights.publisher import Publisher

pytestmark = pytest.mark.timeout(60)

DATA = bytes(range(256)) * 40
WEIGHTS = "/v00000001/model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two versions, and files that must not be readable."""
    root = tmp_path_factory.mktemp("serve") / "root"
    publisher = Publisher(root)
    publisher.publish_chain((1, 2))
    (root / "v00000001" / "data.bin").write_bytes(DATA)
    (root / "v00000001" / "empty").touch()
    (root / "v00000001" / "odd #?%20é.json").write_bytes(b"odd")
    (root.parent / "secret").write_bytes(b"secret")
    (root / "secret").write_bytes(b"secret")
    (root / ".staging-v00000003-0").mkdir()
    (root / ".staging-v00000003-0" / "config.json").write_bytes(b"secret")
    (root / "v00000009").symlink_to(root.parent)
    (root / "current").symlink_to("v00000001")
    (root / "v00000001" / "link").symlink_to(root.parent / "secret")
    (root / "v00000001" / "folder").symlink_to(root.parent)
    os.mkfifo(root / "v00000001" / "pipe")
    return root


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[Running]:
    with Running("serve", root) as running:
        yield running


def get(
    served: Running | Server, path: str, method: str = "GET", **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    """A request for exactly this path, which no library cleans up."""
    connection = http.client.HTTPConnection(
        served.url.removeprefix("http://"), timeout=stretched(20)
    )
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return (
            answer.status,
            answer.read(),
            {name.lower(): value for name, value in answer.getheaders()},
        )
    finally:
        connection.close()


RANGES = {
    "bytes=0-": (206, DATA),
    "bytes=0-0": (206, DATA[:1]),
    "bytes=5-104": (206, DATA[5:105]),
    "bytes=10000-99999": (206, DATA[10000:]),
    f"bytes={len(DATA) - 1}-": (206, DATA[-1:]),
    "bytes=-7": (206, DATA[-7:]),
    "bytes=-99999": (206, DATA),
    f"bytes={len(DATA)}-": (416, b""),
    "bytes=9-3": (416, b""),
    "bytes=-0": (416, b""),
    "bytes=-": (416, b""),
    "bytes=0-1,3-4": (416, b""),
    "bytes=a-b": (416, b""),
    "lines=1-2": (416, b""),
    "bytes=" + "9" * 30 + "-": (416, b""),
}


@pytest.mark.parametrize("wanted", RANGES)
def test_a_range_has_exactly_its_bytes(wanted: str, served: Running) -> None:
    status, data, headers = get(served, "/v00000001/data.bin", Range=wanted)
    assert (status, data) == RANGES[wanted]
    if status == 206:
        begin, end = headers["content-range"].removeprefix("bytes ").split("/")[0].split("-")
        assert data == DATA[int(begin) : int(end) + 1] and headers["content-range"].endswith(
            f"/{len(DATA)}"
        )


def test_whole_files_and_sizes(served: Running, root: Path) -> None:
    status, data, headers = get(served, WEIGHTS)
    assert (status, data) == (200, (root / WEIGHTS[1:]).read_bytes())
    assert headers["accept-ranges"] == "bytes"
    status, data, headers = get(served, WEIGHTS, "HEAD")
    assert (status, data, headers["content-length"]) == (
        200,
        b"",
        str((root / WEIGHTS[1:]).stat().st_size),
    )
    assert get(served, "/v00000001/empty")[:2] == (200, b"")
    assert get(served, "/v00000001/odd%20%23%3F%2520%C3%A9.json")[:2] == (200, b"odd")
    assert get(served, "/v00000002/delta/manifest.json")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/secret",
        "/../secret",
        "/v00000001/../secret",
        "/v00000001/../../secret",
        "/v00000001/%2e%2e/%2e%2e/secret",
        "/v00000001/..%2f..%2fsecret",
        "/v00000001//etc/passwd",
        "//etc/passwd",
        "/v00000001/link",
        "/v00000001/folder/secret",
        "/v00000001/pipe",
        "/v00000001",
        "/v00000001/",
        "/v00000001/missing",
        "/v00000001/config.json/x",
        "/v00000009/secret",
        "/current/config.json",
        "/.staging-v00000003-0/config.json",
        "/v1/config.json",
        "/v00000001/%00",
        "/v00000001/" + "x" * 300,
    ],
)
def test_other_files_cannot_be_read(path: str, served: Running) -> None:
    status, data, _ = get(served, path)
    assert status == 404 and b"secret\n" not in data and data != b"secret"
    assert get(served, path, "HEAD")[:2] == (404, b"")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "POST", "PATCH"])
def test_nothing_is_written(method: str, served: Running) -> None:
    assert get(served, WEIGHTS, method)[0] == 501


def test_versions_are_listed(served: Running, root: Path) -> None:
    assert Source(served.url).versions() == [1, 2] == Source(f"{served.url}/").versions()
    assert Source(str(root)).versions() == [1, 2, 9]
    assert b"secret" not in get(served, "/")[1] and b"v00000009" not in get(served, "/")[1]


def test_a_source_reads_parts_sizes_and_odd_names(served: Running, root: Path) -> None:
    for source in (Source(served.url), Source(str(root)), Source(f"file://{root}")):
        assert source.size("v00000001/data.bin") == len(DATA)
        assert source.read("v00000001/data.bin", 3, 9) == DATA[3:9]
        assert source.read("v00000001/odd #?%20é.json", 0, 3) == b"odd"
        with pytest.raises(MissingError, match="v00000001/missing is missing"):
            source.size("v00000001/missing")
        with pytest.raises(FolderError, match=r"gave 0 bytes in place of|cannot read"):
            source.read("v00000001/data.bin", len(DATA), len(DATA) + 3)
    with pytest.raises(FolderError, match="is not a regular file"):
        Source(str(root)).size("v00000001/link")
    with pytest.raises(FolderError, match="is not a regular file"):
        Source(str(root)).size("v00000001/pipe")


def test_a_source_that_does_not_answer_is_no_missing_file() -> None:
    source = Source("http://user:secret@127.0.0.1:9/weights")
    with pytest.raises(FolderError, match=r"cannot read http://127.0.0.1:9/weights/v0") as caught:
        source.size("v00000001/manifest.json")
    assert not isinstance(caught.value, MissingError) and "secret" not in str(caught.value)


@contextmanager
def unreadable(folder: Path) -> Iterator[None]:
    """Nobody may read a folder. The superuser may read any, so this process is another user."""
    user = os.geteuid()
    folder.chmod(0)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(user)
        folder.chmod(0o755)


def test_a_version_that_cannot_be_read_is_not_taken_for_a_removed_one(tmp_path: Path) -> None:
    # Other users may not look into the folders of pytest.
    root = Path(tempfile.mkdtemp(), "source")
    root.parent.chmod(0o755)
    publisher = Publisher(root)
    publisher.publish_chain((1, 2))
    with Server("127.0.0.1:0", None, FileHandler, root) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mirror = Mirror(Source(server.url), tmp_path / "local")
        mirror.prepare_newest()
        message = "v00000002/manifest.json: ClientResponseError: 500"
        with unreadable(publisher.folder(2)), pytest.raises(FolderError, match=message) as caught:
            mirror.prepare_newest()
        with unreadable(root):
            assert get(server, "/")[0] == get(server, "/v00000001/config.json")[0] == 500
        assert get(server, "/")[0] == 200
        server.shutdown()
    shutil.rmtree(root.parent)
    assert not isinstance(caught.value, MissingError)
    assert mirror.status()["current"] == 2


def test_names_of_versions() -> None:
    names = [
        "v00000121",
        "v123456789",
        "v1",
        "v000000121",
        "v0000012a",
        "v-0000121",
        "x00000121",
        "v" + "\u0660" * 8,
        "v00000121x",
    ]
    assert [version_of(name) for name in names] == [121, 123456789, *[None] * 7]
