"""A real SGLang gives the answers of the table of calls, which the fake gives, too."""

import pytest

from tests.engine.servers.call_table import Call, Folders, Server
from tests.engine.servers.sglang_calls import ADMIN_KEY, API_KEY, CALLS, PLAIN
from tests.live_sglang.live_server import LiveServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_real_server_answers_as_the_table_says(
    call: Call, folders: Folders, request: pytest.FixtureRequest
) -> None:
    name = "live"
    if call.fresh:
        name = "fresh"
    if call.needs == PLAIN:
        name = "plain"
    live: LiveServer = request.getfixturevalue(name)
    server = Server(live.url, folders, API_KEY, ADMIN_KEY)
    assert call.run(server) == call.answer
    if call.ends:
        live.kill()
