"""One SGLang server with all flags for all tests, one with few of them, and the engine that
publishes to them.

A start takes from a minute to three, so both servers are started once. A test leaves its server
healthy or dead, and the next test that needs the server starts it again.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from holdfast.engine import WeightUpdateMeta
from holdfast.engine.servers import SGLangServer
from tests.engine.models import write_model_folder
from tests.engine.servers.call_table import Call, Folders, write_folders
from tests.engine.servers.sglang_calls import FLAGS, PLAIN_FLAGS
from tests.limits import stretched
from tests.live.trainer import Trainer, started_trainer
from tests.live_sglang.checks import as_started, client_of
from tests.live_sglang.live_server import PYTHON, LiveServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the calls that need a server to which nothing was published, and end with those
    that end it, so that it starts no more often than it must.
    """
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    callspec = getattr(item, "callspec", None)
    call = None if callspec is None else callspec.params.get("call")
    if not isinstance(call, Call):
        return 0
    return call.ends - call.fresh


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the session."""
    assert PYTHON.exists(), (
        f"{PYTHON} is missing: make test-sglang makes it, or name an environment by HOLDFAST_SGLANG"
    )
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="session")
def folders(scratch: Path) -> Folders:
    """Initial model of servers and engine, and the other folders of the table of calls."""
    return write_folders(scratch / "models")


@pytest.fixture(scope="session")
def full_server(folders: Folders, scratch: Path) -> Iterator[LiveServer]:
    """The server with all flags."""
    server = LiveServer(folders.base, scratch, *FLAGS)
    yield server
    server.kill()


@pytest.fixture
def live(full_server: LiveServer) -> LiveServer:
    """The server with all flags, which answers requests."""
    if not full_server.alive():
        full_server.restart()
    return full_server


@pytest.fixture
def fresh(live: LiveServer) -> LiveServer:
    """The server with all flags, with the base with which it was started and no adapters."""
    if not as_started(live):
        live.restart()
    return live


@pytest.fixture(scope="session")
def tied_folder(folders: Folders, scratch: Path) -> Path:
    """Initial model of the server with few flags: its head is its embedding."""
    config = AutoConfig.from_pretrained(folders.base)
    config.tie_word_embeddings = True
    write_model_folder(scratch / "tied", config)
    AutoTokenizer.from_pretrained(folders.base).save_pretrained(scratch / "tied")
    return scratch / "tied"


@pytest.fixture(scope="session")
def plain_server(tied_folder: Path, scratch: Path) -> Iterator[LiveServer]:
    """The server with few flags."""
    server = LiveServer(tied_folder, scratch, *PLAIN_FLAGS)
    yield server
    server.kill()


@pytest.fixture
def plain(plain_server: LiveServer) -> LiveServer:
    """The server with few flags, which answers requests."""
    if not plain_server.alive():
        plain_server.restart()
    return plain_server


@pytest.fixture
def client(live: LiveServer) -> SGLangServer:
    """A client of the server with all flags."""
    return client_of(live)


@pytest.fixture(scope="session")
def trainer(folders: Folders, scratch: Path) -> Iterator[Trainer]:
    """One rank in this process that has published nothing yet."""
    meta = WeightUpdateMeta("disk", str(scratch / "weights"), keep=8, timeout_s=stretched(120))
    with started_trainer(folders.base, meta) as trainer:
        yield trainer
