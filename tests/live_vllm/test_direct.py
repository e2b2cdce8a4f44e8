"""Weights sent to a real vLLM server in buckets, as the shards have them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from holdfast.engine.servers import VLLMServer
from holdfast.engine.servers.api import weights_label
from holdfast.engine.servers.groups import GlooGroup
from holdfast.utils.errors import PublishError
from tests.limits import stretched
from tests.live.trainer import TOLERANCE, Trainer, sample, small_buckets
from tests.live_vllm.live_server import LiveServer, plugin

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def client(model_folder: Path, scratch: Path) -> Iterator[VLLMServer]:
    """A client of a separate server, which ends before the servers of other modules start."""
    server = LiveServer(model_folder, scratch, *plugin("holdfast_gloo"))
    with server.running():
        yield VLLMServer(server.url, timeout_s=stretched(60))


@pytest.fixture
def trainer(trainer: Trainer) -> Iterator[Trainer]:
    """A trainer that writes the weights and sends them in several buckets."""
    with trainer.publishing_by("xccl"), small_buckets():
        yield trainer


def assert_serves(client: VLLMServer, trainer: Trainer, folder: Path) -> None:
    """Check that it samples with the weights of ``folder``, reports their version, and is not
    paused.
    """
    status = client.status()
    assert (status.label, status.paused) == (weights_label(folder, trainer.version), False)
    assert trainer.error(sample(client)) < TOLERANCE


@contextmanager
def sending(send: Callable[[int, GlooGroup, torch.Tensor], None]) -> Iterator[None]:
    """Call ``send`` with the number of the bucket instead of `GlooGroup.send`."""
    numbers = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooGroup, "send", lambda group, data: send(next(numbers), group, data))
        yield


def test_versions_that_are_sent_are_served(trainer: Trainer, client: VLLMServer) -> None:
    for _ in range(3):
        assert_serves(client, trainer, trainer.publish([client]))


def test_the_same_weights_without_a_folder_have_the_same_label(
    trainer: Trainer, client: VLLMServer
) -> None:
    folder = trainer.publish([client])
    trainer.engine.update_weights(replace(trainer.meta, path=None))
    assert_serves(client, trainer, folder)


@pytest.mark.parametrize("bucket", [0, 2])
def test_a_sender_that_dies_leaves_a_server_that_the_next_version_repairs(
    bucket: int, trainer: Trainer, client: VLLMServer
) -> None:
    folder, send = trainer.publish([client]), GlooGroup.send

    def cut_off(number: int, group: GlooGroup, data: torch.Tensor) -> None:
        if number < bucket:
            return send(group, data)
        group._group = group._store = group._tcp = None  # type: ignore[assignment]  # as after the death of its process
        raise ConnectionError("died")

    with sending(cut_off), pytest.raises(PublishError) as caught:
        trainer.publish([client])
    if bucket == 0:
        assert "it goes on with the weights it has" in str(caught.value)
        assert client.status().label == weights_label(folder, trainer.version - 1)
    else:
        assert "old and new weights are mixed" in str(caught.value) or "still mixed" in str(
            caught.value
        )
        assert client.status().paused
    assert_serves(client, trainer, trainer.publish([client]))


@pytest.mark.parametrize("bucket", [0, 2])
def test_tensors_that_arrive_changed_are_refused(
    bucket: int, trainer: Trainer, client: VLLMServer
) -> None:
    send = GlooGroup.send

    def change(number: int, group: GlooGroup, data: torch.Tensor) -> None:
        data = data.clone()
        data[0] ^= number == bucket
        send(group, data)

    with sending(change), pytest.raises(PublishError, match="the tensors that arrived have digest"):
        trainer.publish([client])
    assert client.status().paused == (bucket > 0)
    assert_serves(client, trainer, trainer.publish([client]))


def test_a_folder_repairs_a_server_that_received_a_part(
    trainer: Trainer, client: VLLMServer
) -> None:
    send = GlooGroup.send

    def change(number: int, group: GlooGroup, data: torch.Tensor) -> None:
        data = data.clone()
        data[0] ^= number == 1
        send(group, data)

    with sending(change), pytest.raises(PublishError):
        trainer.publish([client])
    assert client.status().paused
    client.update_weights_from_disk(str(trainer.folder), trainer.version)
    assert_serves(client, trainer, trainer.folder)
    assert_serves(client, trainer, trainer.publish([client]))
