"""Weights sent to a real vLLM server that sees no folder."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine.servers import VLLMServer
from holdfast.engine.servers.api import weights_label
from holdfast.engine.servers.broadcast import WeightSender
from holdfast.utils.errors import PoisonedServerError, PublishError
from tests.limits import stretched
from tests.live_vllm.live_server import LiveServer, plugin
from tests.live_vllm.trainer import TOLERANCE, Trainer, sample

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def client(model_folder: Path, scratch: Path) -> Iterator[VLLMServer]:
    """A client of a separate server, which ends before the servers of other modules start."""
    server = LiveServer(model_folder, scratch, *plugin("holdfast_broadcast"))
    try:
        server.start()
        server.wait_until_ready()
        yield VLLMServer(server.url, timeout_s=stretched(60))
    finally:
        server.kill()


@pytest.fixture
def trainer(trainer: Trainer) -> Iterator[Trainer]:
    """A trainer that sends the weights it publishes."""
    of_all = trainer.meta
    trainer.meta = replace(of_all, type="broadcast")
    yield trainer
    trainer.meta = of_all


def assert_serves(client: VLLMServer, trainer: Trainer, folder: Path) -> None:
    """Check that it samples with the weights of ``folder``, reports their version, and is not paused."""
    status = client.status()
    assert (status.label, status.paused) == (weights_label(folder, trainer.version), False)
    assert trainer.error(sample(client)) < TOLERANCE


def test_versions_that_are_sent_are_served(trainer: Trainer, client: VLLMServer) -> None:
    for _ in range(2):
        assert_serves(client, trainer, trainer.publish([client]))


def test_a_sender_that_dies_leaves_the_server_as_it_was(
    trainer: Trainer, client: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trainer.publish([client])
    broadcast = WeightSender._broadcast

    def cut_off(sender: Any, data: torch.Tensor) -> None:
        if data.numel() == next(iter(sender._tensors.values())).nbytes:
            return broadcast(sender, data)
        sender._group = sender._store = None  # as after the death of its process
        raise ConnectionError("died")

    with monkeypatch.context() as patch:
        patch.setattr(WeightSender, "_broadcast", cut_off)
        with pytest.raises(PublishError, match="it goes on with the weights it has"):
            client.update_weights_from_distributed(str(folder), trainer.version)
    assert_serves(client, trainer, folder)
    assert_serves(client, trainer, trainer.publish([client]))


def test_tensors_that_arrive_changed_are_refused(
    trainer: Trainer, client: VLLMServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trainer.publish([client])
    broadcast = WeightSender._broadcast

    def change(sender: Any, data: torch.Tensor) -> None:
        data = data.clone()
        data[0] ^= 1
        broadcast(sender, data)

    with monkeypatch.context() as patch:
        patch.setattr(WeightSender, "_broadcast", change)
        with pytest.raises(PublishError, match="another digest than those that were sent") as caught:
            client.update_weights_from_distributed(str(folder), trainer.version)
    assert not isinstance(caught.value, PoisonedServerError)
    assert_serves(client, trainer, folder)
