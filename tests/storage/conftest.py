"""The servers, started once, and places at them where tests put something."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from tests.engine.models import tiny_qwen3, write_model_folder
from tests.storage.jobs import Record, run_undisturbed
from tests.storage.servers import BUCKET, HDFSCluster, SeaweedFS, Server, missing

T = TypeVar("T", HDFSCluster, SeaweedFS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.storage)


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HDFSCluster]:
    """A NameNode and a DataNode. Tests leave both running."""
    with running("hdfs", HDFSCluster, tmp_path_factory) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """An S3 server. Tests leave it running."""
    with running("s3", SeaweedFS, tmp_path_factory) as server:
        yield server


@contextmanager
def running(
    kind: str, servers: Callable[[Path], T], factory: pytest.TempPathFactory
) -> Iterator[T]:
    """Start servers in a folder of their own, and remove both at the end. Skip if they cannot run
    here.
    """
    reason = missing(kind)
    if reason is not None:
        pytest.skip(reason)
    folder = factory.mktemp(kind)
    server = servers(folder)
    try:
        server.start()
        yield server
    finally:
        server.end()
        shutil.rmtree(folder)


@dataclass
class Place:
    """A folder at a server for one test.

    Attributes:
        url: its URL.
        environment: credentials of processes that use it, which this process has too.
        data_server: the program that gets the bytes.
        servers: what it belongs to.
    """

    url: str
    environment: dict[str, str]
    data_server: Server
    servers: HDFSCluster | SeaweedFS


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A place at the kind of storage that the parameter names."""
    if request.param == "s3":
        servers: SeaweedFS = request.getfixturevalue("s3")
        environment = servers.environment()
        found = Place(f"s3://{BUCKET}/{tmp_path.name}", environment, servers.server, servers)
    else:
        cluster: HDFSCluster = request.getfixturevalue("hdfs")
        root = cluster.url if request.param == "hdfs" else cluster.web_url
        environment = {"HADOOP_USER_NAME": "root"}
        found = Place(f"{root}/{tmp_path.name}", environment, cluster.datanode, cluster)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose snapshots have 22 MB: a copy takes a second or more."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(folder, tiny_qwen3(hidden_size=384))
    return folder


@pytest.fixture(scope="session")
def expected(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """Every step of a run that nothing disturbed and that made no copies."""
    return run_undisturbed(model_folder, tmp_path_factory.mktemp("undisturbed"))
