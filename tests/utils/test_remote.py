"""Folders at URLs: each kind of file system opens, its URL opens the same folder again, and no
message shows a secret or a Java stack.
"""

import http.server
import logging
import threading
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.config import conf
from fsspec.implementations.memory import MemoryFileSystem
from hdfs_native.fsspec import HdfsFileSystem

from holdfast.utils.errors import ConfigError, MirrorError
from holdfast.utils.remote import RemoteFolder, without_secrets

pytestmark = pytest.mark.timeout(60)


def opened(url: str) -> RemoteFolder:
    return RemoteFolder(url, setting="the URL", error=MirrorError, attempts=2, first_wait_s=0.01)


class Strict(MemoryFileSystem):
    """A file system that refuses every option it does not know, as paramiko's and Hadoop's do."""

    protocol = "strict"
    cachable = False

    def __init__(self) -> None:
        super().__init__()


class Caching(MemoryFileSystem):
    """A file system that keeps listings, as those of object stores do."""

    protocol = "caching"

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if path in self.dircache:
            return self.dircache[path]
        self.dircache[path] = found = super().ls(path, detail=detail, **options)
        return found


@pytest.fixture(autouse=True)
def registered() -> None:
    for kind in (Strict, Caching):
        fsspec.register_implementation(str(kind.protocol), kind, clobber=True)


def test_the_hdfs_client_that_pip_installs_opens() -> None:
    folder = opened("hdfs://127.0.0.1:8020/runs/a/")
    assert isinstance(folder._fs, HdfsFileSystem) and not folder.whole_files
    assert folder.url == "hdfs://127.0.0.1:8020/runs/a"


def test_a_file_system_that_refuses_unknown_options_opens() -> None:
    folder = opened("strict://runs/a")
    folder.put_bytes("x", b"1")
    assert folder.names() == ["x"]


def test_listings_are_never_those_of_earlier() -> None:
    reader = opened("caching://listings/a")
    reader.put_bytes("x", b"1")
    assert reader.names() == ["x"]
    opened("caching://listings/a").put_bytes("y", b"1")
    assert sorted(reader.names()) == ["x", "y"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("webhdfs://host:9870/runs/a", "webhdfs://host:9870/runs/a"),
        ("webhdfs://alice@host:9870/runs/a/", "webhdfs://alice@host:9870/runs/a"),
        ("webhdfs://alice:pass@host:9870/runs", "webhdfs://alice@host:9870/runs"),
        ("webhdfs://host:9870/runs?token=abc", "webhdfs://host:9870/runs"),
        ("webhdfs://host:9870/", "webhdfs://host:9870"),
        ("webhdfs://run/runs/a", "webhdfs://run/runs/a"),
        ("webhdfs://data/data/a", "webhdfs://data/data/a"),
        ("webhdfs://host:9870/a#b", "webhdfs://host:9870/a#b"),
        ("hdfs://namenode:8020/runs", "hdfs://namenode:8020/runs"),
        ("memory://runs/a", "memory:///runs/a"),
        ("file:///runs//a/", "file:///runs//a"),
    ],
)
def test_the_url_shown_opens_the_same_folder_without_a_password(given: str, shown: str) -> None:
    folder = opened(given)
    again = opened(folder.url)
    assert folder.url == again.url == shown
    assert folder._root == again._root
    assert getattr(folder._fs, "url", None) == getattr(again._fs, "url", None)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("webhdfs:///runs", "missing 1 required positional argument: 'host'"),
        ("hdfs:///runs", "No fs.defaultFS setting found"),
    ],
)
def test_a_url_that_its_client_refuses_is_a_clear_error(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"the URL .'{url}'. cannot be used: .*{problem}"):
        opened(url)


class Refusing(http.server.BaseHTTPRequestHandler):
    """A NameNode that answers every request with 503."""

    def do_GET(self) -> None:
        self.send_error(503)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def refusing_port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_token_in_the_options_is_in_no_message(
    refusing_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    token = "SECRETTOKEN"
    monkeypatch.setitem(conf, "webhdfs", {"token": token})
    folder = opened(f"webhdfs://127.0.0.1:{refusing_port}/runs")
    with pytest.raises(MirrorError, match=r"failed 2 times.*delegation=\.\.\.") as error:
        folder.names()
    # A traceback shows the cause.
    assert error.value.__cause__ is None and error.value.__suppress_context__
    assert "again in" in caplog.text and token not in caplog.text + str(error.value)


def test_parameters_that_grant_access_are_hidden() -> None:
    names = ["X-Amz-Signature", "X-Amz-Security-Token", "sig", "delegation", "sasToken"]
    for name in names:
        assert without_secrets(f"http://h/a?b=1&{name}=abc&c=2") == f"http://h/a?b=1&{name}=...&c=2"
    assert without_secrets("http://h/a?op=OPEN&offset=3") == "http://h/a?op=OPEN&offset=3"


@pytest.mark.parametrize("newline", ["\\n", "\n"])  # hdfs-native writes the first
def test_messages_have_the_first_line_of_a_java_stack(
    newline: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = opened("strict://runs/stack")
    lines = ['RPCError("x.SafeModeException", "Name node is in safe mode.', "It was", "at x.java:1"]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(newline.join(lines))

    monkeypatch.setattr(folder._fs, "ls", fail)
    with caplog.at_level(logging.WARNING), pytest.raises(MirrorError) as error:
        folder.names()
    message = str(error.value)
    assert message.endswith("Name node is in safe mode.") and message.startswith("strict://")
    assert "java" not in caplog.text and "safe mode.; again in" in caplog.text
    assert error.value.__cause__ is None
