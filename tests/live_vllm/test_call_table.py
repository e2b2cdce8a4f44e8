"""A real vLLM gives the answers of the table of calls, which the fakes give, too."""

from collections.abc import Iterator

import pytest

from tests.engine.servers.call_table import Call, Folders, Server, write_folders
from tests.engine.servers.vllm_calls import (
    ADAPTER_FLAGS,
    ADAPTERS,
    CALLS,
    FLAGS,
    GLOO,
    GLOO_FLAGS,
)
from tests.live_vllm.live_server import LiveServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

STARTS = {"": FLAGS, GLOO: GLOO_FLAGS, ADAPTERS: ADAPTER_FLAGS}
"""Flags of a server, by what a call needs."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, folders: Folders, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A new server for the calls with the same needs, with a tokenizer."""
    scratch = tmp_path_factory.mktemp("vllm")
    live = LiveServer(folders.base, scratch, *STARTS[request.param], sees=True)
    try:
        live.start()
        live.wait_until_ready()
        yield Server(live.url, folders)
    finally:
        live.kill()


@pytest.mark.parametrize(
    ("server", "call"),
    [pytest.param(call.needs, call, id=call.name) for call in CALLS],
    indirect=["server"],
    scope="module",
)
def test_a_real_vllm_answers_as_the_table_says(server: Server, call: Call) -> None:
    assert call.run(server) == call.answer
