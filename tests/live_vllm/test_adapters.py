"""Answers of a real vLLM server to which only adapters are published."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine import WeightUpdateMeta
from holdfast.engine.servers import ServerFleet, VLLMServer
from holdfast.engine.servers.api import ModelResponse, weights_label
from holdfast.utils.errors import PublishError
from holdfast.utils.files import walk_files
from tests.limits import stretched
from tests.live.adapters import RANK, adapter_logprobs, error_of, trainers_logprobs
from tests.live.trainer import TOLERANCE, Trainer, sample, sample_later, started_trainer
from tests.live_vllm.live_server import LiveServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def live(model_folder: Path, scratch: Path) -> Iterator[LiveServer]:
    """A server that accepts adapters, with room for two versions."""
    flags = (
        "--enable-lora",
        "--max-lora-rank",
        str(RANK),
        "--max-loras",
        "2",
        "--lora-target-modules",
        *LAYERS,
    )
    server = LiveServer(model_folder, scratch, "--logprobs-mode", "processed_logprobs", *flags)
    with server.running():
        yield server


@pytest.fixture(scope="module")
def fleet(live: LiveServer) -> Iterator[ServerFleet[VLLMServer]]:
    """A fleet of that server with its prober."""
    fleet = ServerFleet([VLLMServer(live.url, timeout_s=stretched(60))], probe_interval_s=0.5)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def adapted(model_folder: Path, scratch: Path) -> Iterator[Trainer]:
    """One rank that trains adapters of the server's initial model and has published nothing yet."""
    meta = WeightUpdateMeta("adapter", str(scratch / "adapters"), timeout_s=stretched(120))
    lora: dict[str, Any] = {"use_lora": True, "lora_rank": RANK, "lora_alpha": 16}
    with started_trainer(model_folder, meta, **lora) as trainer:
        yield trainer


def size_of(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in walk_files(folder))


def assert_serves(client: VLLMServer, trainer: Trainer) -> float:
    """Check that the last version answers new requests. Returns the difference to the trainer."""
    status, response = client.status(), sample(client)
    assert (status.label, status.paused) == (weights_label(trainer.folder, trainer.version), False)
    assert set(response.output_versions) == {trainer.version}
    error = error_of(response, trainers_logprobs(trainer.engine, response))
    assert error < TOLERANCE
    return error


def test_three_versions_are_served(
    adapted: Trainer, fleet: ServerFleet[VLLMServer], scratch: Path
) -> None:
    errors = []
    for _ in range(3):
        folder = adapted.publish_to(fleet)
        (client,) = fleet.serving()
        errors.append(assert_serves(client, adapted))
        response = sample(client)
        with adapted.engine.adapters_off():
            assert error_of(response, trainers_logprobs(adapted.engine, response)) > 100 * TOLERANCE
    assert sorted(os.listdir(adapted.meta.path)) == ["v00000002", "v00000003"]
    adapted.engine.connect_engine([], WeightUpdateMeta("disk", str(scratch / "merged")))
    merged = size_of(adapted.engine.update_weights().path)
    assert size_of(folder) < merged
    print(
        f"differences: {errors}; adapters {size_of(folder)} bytes, merged {merged} bytes; "
        f"{dict(client.seconds)}"
    )


async def publish_meanwhile(
    adapted: Trainer, fleet: ServerFleet[VLLMServer], live: LiveServer, tokens: int
) -> ModelResponse:
    """A response during which the next version was published and served."""
    old, (client,) = adapted.version, fleet.serving()
    before = await asyncio.to_thread(live.generated_tokens)
    running = asyncio.create_task(sample_later(client, tokens))
    while await asyncio.to_thread(live.generated_tokens) < before + 20:
        await asyncio.sleep(0.05)
    await asyncio.to_thread(adapted.publish_to, fleet)
    await asyncio.to_thread(assert_serves, client, adapted)
    assert not running.done()
    assert client.folders_in_use() == {str(adapted.folder_of(old)), str(adapted.folder)}
    return await running


def test_a_request_in_flight_ends_on_the_version_it_began_with(
    adapted: Trainer, fleet: ServerFleet[VLLMServer], model_folder: Path, live: LiveServer
) -> None:
    adapted.publish_to(fleet)
    old = adapted.version
    with live.slow():
        response = asyncio.run(publish_meanwhile(adapted, fleet, live, tokens=1000))
    assert response.output_versions == [old] * 1000
    assert (
        error_of(response, adapter_logprobs(model_folder, adapted.folder_of(old), response))
        < TOLERANCE
    )
    newer = adapter_logprobs(model_folder, adapted.folder, response)
    assert error_of(response, newer) > 100 * TOLERANCE


def test_a_load_that_failed_leaves_the_old_adapters_serving(
    adapted: Trainer, fleet: ServerFleet[VLLMServer], tmp_path: Path
) -> None:
    adapted.publish_to(fleet)
    (client,) = fleet.serving()
    unseen = shutil.copytree(adapted.folder, tmp_path / "unseen")
    (unseen / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    manifest = unseen / "manifest.json"
    manifest.write_bytes(
        manifest.read_bytes().replace(b'"weight_version"', b'"weight_Version"')
    )  # changes the digest
    with pytest.raises(
        PublishError, match=r"/v1/load_lora_adapter was answered with 500 .*it goes on with the"
    ):
        client.update_adapters_from_disk(str(unseen), adapted.version + 1)
    assert_serves(client, adapted)


def test_a_restarted_server_is_brought_up_to_date(
    adapted: Trainer, fleet: ServerFleet[VLLMServer], live: LiveServer
) -> None:
    adapted.publish_to(fleet)
    (client,) = fleet.serving()
    live.restart()
    assert fleet.wait_serving(1, stretched(60)), fleet.states()
    assert_serves(client, adapted)
