"""Keys of a real SGLang server: ``--api-key`` and ``--admin-api-key``."""

from typing import Any

import pytest

from holdfast.engine.servers import SGLangServer
from holdfast.utils.errors import PublishError, ServerError
from tests.engine.servers.sglang_calls import API_KEY
from tests.limits import stretched
from tests.live.trainer import Trainer, sample
from tests.live_sglang.checks import assert_serves
from tests.live_sglang.live_server import LiveServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

WRONG: dict[str, dict[str, Any]] = {
    "none": {},
    "wrong": {"api_key": "NO"},
    "wrong for updates": {"api_key": "NO", "admin_key": "NO"},
}


@pytest.mark.parametrize("keys", WRONG)
def test_a_wrong_or_missing_key_is_refused_and_changes_nothing(
    keys: str, trainer: Trainer, client: SGLangServer, live: LiveServer
) -> None:
    folder = trainer.publish([client])
    other = SGLangServer(live.url, timeout_s=stretched(60), **WRONG[keys])
    with pytest.raises(ServerError, match=r"401.*api_key and admin_key"):
        other.status()
    with pytest.raises(ServerError, match="401"):
        sample(other)
    with pytest.raises(PublishError, match="401"):
        other.update_weights_from_disk(str(folder), trainer.version)
    assert_serves(client, trainer)


def test_the_key_for_requests_is_not_enough_for_updates(
    trainer: Trainer, client: SGLangServer, live: LiveServer
) -> None:
    folder = trainer.publish([client])
    reader = SGLangServer(live.url, timeout_s=stretched(60), api_key=API_KEY)
    assert reader.status() == client.status()
    assert len(sample(reader).output_tokens) == 24
    with pytest.raises(PublishError, match=r"401.*api_key and admin_key"):
        reader.update_weights_from_disk(str(folder), trainer.version)
    with pytest.raises(ServerError, match=r"401.*api_key and admin_key"):
        reader.sleep()
    assert_serves(client, trainer)
