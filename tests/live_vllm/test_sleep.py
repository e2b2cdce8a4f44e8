"""A real vLLM server that takes turns with a trainer. On CPUs vLLM sleeps in all respects but the
memory.
"""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.engine.servers import ServerFleet, VLLMServer, colocated
from holdfast.engine.servers.api import (
    KV_CACHE,
    TAGS,
    WEIGHTS,
    ServerState,
    ServerStatus,
    weights_label,
)
from holdfast.utils.errors import BusyServerError
from tests.limits import stretched
from tests.live.trainer import TOLERANCE, Trainer, sample, sample_later
from tests.live_vllm.live_server import LiveServer, plugin

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def live(model_folder: Path, scratch: Path) -> Iterator[LiveServer]:
    """A separate server, which ends before the servers of other modules start."""
    server = LiveServer(
        model_folder, scratch, "--logprobs-mode", "processed_logprobs", *plugin("holdfast_gloo")
    )
    with server.running():
        yield server


@pytest.fixture
def client(live: LiveServer) -> VLLMServer:
    return VLLMServer(live.url, timeout_s=stretched(60))


def assert_serves(client: VLLMServer, trainer: Trainer) -> None:
    """Check that it samples with the weights of the last version and reports exactly that
    version.
    """
    assert client.status() == ServerStatus(
        weights_label(trainer.folder, trainer.version), paused=False
    )
    response = sample(client)
    assert (
        set(response.output_versions) == {trainer.version} and trainer.error(response) < TOLERANCE
    )


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_sleeps_and_wakes_up(
    level: int, trainer: Trainer, client: VLLMServer, live: LiveServer
) -> None:
    label = weights_label(trainer.publish([client]), trainer.version)
    client.sleep(level)
    assert live.sleeps()
    assert client.status() == ServerStatus(label if level == 1 else None, paused=True, asleep=TAGS)
    with pytest.raises(BusyServerError):
        sample(client)
    client.wake_up((WEIGHTS,))
    assert live.sleeps() and client.status().asleep == (KV_CACHE,)
    if level == 1:
        client.wake_up()
        assert not live.sleeps()
        assert_serves(client, trainer)
        client.sleep()
    trainer.publish([client])
    assert not live.sleeps()
    assert_serves(client, trainer)


def test_a_request_in_flight_sleeps_and_ends_on_the_next_version(
    trainer: Trainer, client: VLLMServer, live: LiveServer
) -> None:
    trainer.publish([client])

    async def across() -> None:
        before = live.generated_tokens()
        response = asyncio.ensure_future(sample_later(client, tokens=400))
        while live.generated_tokens() < before + 20:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(client.sleep)
        sampled = live.generated_tokens()
        await asyncio.sleep(1)
        assert live.generated_tokens() == sampled and not response.done()
        await asyncio.to_thread(trainer.publish, [client])
        versions = (done := await response).output_versions
        assert versions == sorted(versions) and set(versions) == {
            trainer.version - 1,
            trainer.version,
        }
        assert trainer.error(done) < TOLERANCE

    with live.slow():
        asyncio.run(across())


@pytest.mark.parametrize("way", ["disk", "xccl"])
def test_turns_have_exact_labels(
    way: str, trainer: Trainer, client: VLLMServer, live: LiveServer
) -> None:
    with closing(ServerFleet([client], probe_interval_s=0.5)) as fleet:
        trainer.engine.connect_engine(fleet, replace(trainer.meta, type=way))
        fleet.sleep()
        for _ in range(2):
            trainer.train()
            assert live.sleeps() and fleet.states()[0].state is ServerState.ASLEEP
            with colocated(trainer.engine, fleet).rollout() as published:
                assert published.version == trainer.version and fleet.serving() == [client]
                assert not live.sleeps()
                assert_serves(client, trainer)
        assert live.sleeps() and trainer.engine.offloaded == frozenset()
        fleet.wake_up()
        assert_serves(client, trainer)
