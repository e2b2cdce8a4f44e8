"""Answers of a real SGLang server to which only adapters are published."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine import WeightUpdateMeta
from holdfast.engine.servers import SGLangServer
from holdfast.engine.servers.api import ModelResponse, ServerStatus, weights_label
from holdfast.utils.errors import PublishError
from tests.engine.servers.call_table import Folders
from tests.limits import stretched
from tests.live.adapters import RANK, adapter_logprobs, error_of, trainers_logprobs
from tests.live.trainer import Trainer, sample, sample_later, started_trainer
from tests.live_sglang.checks import TOLERANCE, client_of
from tests.live_sglang.live_server import LiveServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def adapted(folders: Folders, scratch: Path, trainer: Trainer) -> Iterator[Trainer]:
    """One rank that trains adapters of the server's initial model and has published nothing yet.

    It shares the process group of the other trainer.
    """
    meta = WeightUpdateMeta("adapter", str(scratch / "adapters"), timeout_s=stretched(120))
    lora: dict[str, Any] = {"use_lora": True, "lora_rank": RANK, "lora_alpha": 16}
    with started_trainer(folders.base, meta, target_modules=MODULES, **lora) as trainer:
        yield trainer


def assert_serves_adapters(client: SGLangServer, adapted: Trainer, base: Path) -> None:
    """Check that the last version answers new requests, and is the only one that is loaded."""
    label = weights_label(adapted.folder, adapted.version)
    assert client.status() == ServerStatus(label, paused=False)
    assert client.folders_in_use() == {str(adapted.folder)}
    response = sample(client)
    assert set(response.output_versions) == {adapted.version}
    error = error_of(response, adapter_logprobs(base, adapted.folder, response))
    print(f"adapters {adapted.version} are served, largest difference {error:.1e}")
    assert error < TOLERANCE
    with adapted.engine.adapters_off():
        without = trainers_logprobs(adapted.engine, response)
    assert error_of(response, without) > 1000 * TOLERANCE


def test_three_versions_of_adapters_are_served_and_older_ones_unloaded(
    fresh: LiveServer, adapted: Trainer, folders: Folders
) -> None:
    client = client_of(fresh)
    for _ in range(3):
        adapted.publish([client])
        assert_serves_adapters(client, adapted, folders.base)


async def publish_meanwhile(
    live: LiveServer, client: SGLangServer, adapted: Trainer
) -> ModelResponse:
    """A response during which the next version was published."""
    old = adapted.folder
    with live.slow():
        running = asyncio.create_task(sample_later(client, tokens=190))
        while live.slow_steps() < 20:
            await asyncio.sleep(0.1)
        await asyncio.to_thread(adapted.publish, [client])
        assert not running.done()
        assert client.folders_in_use() == {str(old), str(adapted.folder)}
    return await running


def test_a_request_in_flight_ends_with_the_adapters_it_began_with(
    fresh: LiveServer, adapted: Trainer, folders: Folders
) -> None:
    client = client_of(fresh)
    old = adapted.publish([client])
    response = asyncio.run(publish_meanwhile(fresh, client, adapted))
    assert response.output_versions == [adapted.version - 1] * 190
    assert error_of(response, adapter_logprobs(folders.base, old, response)) < TOLERANCE
    newer = adapter_logprobs(folders.base, adapted.folder, response)
    assert error_of(response, newer) > 1000 * TOLERANCE

    # The old ones are unloaded with the next publication.
    adapted.publish([client])
    assert_serves_adapters(client, adapted, folders.base)


def test_adapters_of_a_base_that_was_replaced_are_refused(
    client: SGLangServer, adapted: Trainer, trainer: Trainer
) -> None:
    trainer.publish([client])
    with pytest.raises(PublishError, match="base"):
        adapted.publish([client])
    assert client.status().label == weights_label(trainer.folder, trainer.version)
