"""The fakes give the answers of the table of calls, which real servers are asked for, too."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from holdfast.engine.servers import client, sglang, vllm
from tests.engine.servers import sglang_calls, vllm_calls
from tests.engine.servers.call_table import (
    CONTEXT,
    END,
    Call,
    Folders,
    Server,
    Table,
    write_folders,
)
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.sglang_calls import ADMIN_KEY, API_KEY

pytestmark = pytest.mark.timeout(60)

SGLANG = {"api_key": API_KEY, "admin_key": ADMIN_KEY, "cpu_backup": True, "eos": END, "lora": True}
VLLM = {"device": "cpu", "plugin": True, "lora": False}
OPTIONS: dict[str, dict[str, Any]] = {
    sglang_calls.PLAIN: SGLANG | {"lora": False},
    vllm_calls.ADAPTERS: VLLM | {"lora": True},
}
"""Options of a fake, by what a call needs."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("models"))


def start(kind: str, folders: Folders, record: Path, options: dict[str, Any]) -> FakeServer:
    return FakeServer(
        kind,
        record,
        dtype="float32",
        folder=str(folders.base),
        max_model_len=CONTEXT,
        **options,
    )


def check(call: Call, fake: FakeServer, folders: Folders) -> None:
    server = Server(fake.url, folders, API_KEY, ADMIN_KEY)
    assert call.run(server) == call.answer
    assert fake.alive() is not call.ends


def check_alone(
    kind: str, call: Call, folders: Folders, record: Path, usual: dict[str, Any]
) -> None:
    with start(kind, folders, record, OPTIONS.get(call.needs, usual)) as fake:
        check(call, fake, folders)


@pytest.fixture(scope="module")
def fakes(
    folders: Folders, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, FakeServer]]:
    record = tmp_path_factory.mktemp("record")
    with (
        start("sglang", folders, record, SGLANG) as fake_sglang,
        start("vllm", folders, record, VLLM) as fake_vllm,
    ):
        yield {"sglang": fake_sglang, "vllm": fake_vllm}


def shared(call: Call) -> bool:
    """Whether the call may share a server with others."""
    return not (call.fresh or call.ends or call.needs in OPTIONS)


@pytest.mark.parametrize("call", sglang_calls.CALLS, ids=lambda call: call.name)
def test_the_fake_of_sglang_answers_as_the_table_says(
    call: Call, folders: Folders, fakes: dict[str, FakeServer], tmp_path: Path
) -> None:
    if shared(call):
        check(call, fakes["sglang"], folders)
    else:
        check_alone("sglang", call, folders, tmp_path, SGLANG)


@pytest.mark.parametrize("call", vllm_calls.CALLS, ids=lambda call: call.name)
def test_the_fake_of_vllm_answers_as_the_table_says(
    call: Call, folders: Folders, fakes: dict[str, FakeServer], tmp_path: Path
) -> None:
    if shared(call):
        check(call, fakes["vllm"], folders)
    else:
        check_alone("vllm", call, folders, tmp_path, VLLM)


def endpoints(module: ModuleType) -> set[str]:
    """All endpoints that a client names."""
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return {text for text in texts if isinstance(text, str) and re.fullmatch("/[a-z]\\S*", text)}


@pytest.mark.parametrize(
    ("module", "table"), [(sglang, sglang_calls.TABLE), (vllm, vllm_calls.TABLE)]
)
def test_the_table_has_every_endpoint_that_a_client_asks(module: ModuleType, table: Table) -> None:
    listed = {path for call in table.calls for path in call.paths}
    own = endpoints(module)
    assert len(own) > 10
    assert (own | endpoints(client)) - listed == {"/prepare"}  # of a mirror
