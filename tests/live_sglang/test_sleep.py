"""A real SGLang server that takes turns with a trainer. The stand-in for ``torch_memory_saver``
frees no memory, and refuses calls in a wrong order.
"""

import asyncio
from contextlib import closing

import pytest

from holdfast.engine.api import UpdateType
from holdfast.engine.servers import ServerFleet, SGLangServer, colocated
from holdfast.engine.servers.api import (
    KV_CACHE,
    TAGS,
    WEIGHTS,
    ServerState,
    ServerStatus,
    weights_label,
)
from holdfast.utils.errors import BusyServerError
from tests.live.trainer import Trainer, sample, sample_later, small_buckets
from tests.live_sglang.checks import TOLERANCE, assert_serves
from tests.live_sglang.live_server import LiveServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


def asleep_status(trainer: Trainer, level: int, *tags: str) -> ServerStatus:
    """Status of a server that sleeps. At level 2 it has no weights."""
    label = weights_label(trainer.folder, trainer.version) if level == 1 else None
    return ServerStatus(label, paused=True, asleep=tags)


def test_a_server_that_keeps_its_weights_sleeps_and_wakes_up_at_once_or_in_parts(
    trainer: Trainer, client: SGLangServer
) -> None:
    trainer.publish([client])
    for _ in range(2):
        client.sleep()
        assert client.status() == asleep_status(trainer, 1, *TAGS)
    with pytest.raises(BusyServerError):
        sample(client)

    # All at once, and again.
    for _ in range(2):
        client.wake_up()
        assert_serves(client, trainer)

    # One part after the other.
    client.sleep()
    client.wake_up((WEIGHTS,))
    assert client.status() == asleep_status(trainer, 1, KV_CACHE)
    client.wake_up((KV_CACHE,))
    assert_serves(client, trainer)

    # Half awake, and back to sleep.
    client.sleep()
    client.wake_up((WEIGHTS,))
    client.sleep()
    assert client.status() == asleep_status(trainer, 1, *TAGS)
    client.wake_up()
    assert_serves(client, trainer)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("way", ["disk", "xccl"])
def test_a_publication_wakes_a_server_that_sleeps_wholly_or_in_part(
    level: int, way: UpdateType, trainer: Trainer, client: SGLangServer
) -> None:
    with trainer.publishing_by(way), small_buckets():
        trainer.publish([client])
        client.sleep(level)
        assert client.status() == asleep_status(trainer, level, *TAGS)
        trainer.publish([client])
        assert_serves(client, trainer)

        client.sleep(level)
        client.wake_up((WEIGHTS,))
        assert client.status() == asleep_status(trainer, level, KV_CACHE)
        trainer.publish([client])
        assert_serves(client, trainer)


def test_a_request_in_flight_sleeps_and_ends_on_the_next_version(
    trainer: Trainer, client: SGLangServer, live: LiveServer
) -> None:
    trainer.publish([client])

    async def across() -> None:
        with live.slow():
            running = asyncio.create_task(sample_later(client, tokens=200))
            while live.slow_steps() < 20:
                await asyncio.sleep(0.1)
            await asyncio.to_thread(client.sleep)
            sampled = live.slow_steps()
            await asyncio.sleep(1)
            assert live.slow_steps() == sampled and not running.done()
            await asyncio.to_thread(trainer.publish, [client])
        response = await running
        versions = response.output_versions
        assert versions == sorted(versions)
        assert set(versions) == {trainer.version - 1, trainer.version}
        assert trainer.error(response) < TOLERANCE

    asyncio.run(across())


@pytest.mark.parametrize("way", ["disk", "xccl"])
def test_turns_have_exact_labels(way: UpdateType, trainer: Trainer, client: SGLangServer) -> None:
    trainer.publish([client])
    with trainer.publishing_by(way), closing(ServerFleet([client], probe_interval_s=0.5)) as fleet:
        trainer.engine.connect_engine(fleet, trainer.meta)
        fleet.sleep()
        for _ in range(2):
            trainer.train()
            assert fleet.states()[0].state is ServerState.ASLEEP
            with colocated(trainer.engine, fleet).rollout() as published:
                assert published.version == trainer.version and fleet.serving() == [client]
                assert_serves(client, trainer)
        assert client.status().asleep == TAGS and trainer.engine.offloaded == frozenset()
        fleet.wake_up()
        assert_serves(client, trainer)
