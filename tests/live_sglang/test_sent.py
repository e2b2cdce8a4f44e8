"""Weights sent to a real SGLang server over gloo, in several buckets."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.engine.servers import SGLangServer
from holdfast.engine.servers.api import weights_label
from holdfast.engine.servers.groups import GlooGroup
from tests.engine.servers.call_table import Folders
from tests.limits import stretched
from tests.live.trainer import Trainer, folder_logprobs, sample, small_buckets
from tests.live_sglang.checks import TOLERANCE, assert_serves
from tests.live_sglang.live_server import LiveServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


@pytest.fixture
def trainer(trainer: Trainer) -> Iterator[Trainer]:
    """A trainer that writes the weights and sends them in several buckets."""
    with trainer.publishing_by("xccl"), small_buckets():
        yield trainer


def publish_elsewhere(
    live: LiveServer, model: Path, weights: Path, version: int, bucket: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the publisher, which is killed in ``bucket``."""
    arguments = [str(model), str(weights), live.url, str(version)]
    if bucket is not None:
        arguments.append(str(bucket))
    command = [sys.executable, "-m", "tests.live_sglang.publisher", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=stretched(120))


def test_three_versions_are_sent_in_one_group_and_served(
    trainer: Trainer, client: SGLangServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    send = GlooGroup.send
    monkeypatch.setattr(
        GlooGroup, "send", lambda group, data: sizes.append(len(data)) or send(group, data)
    )
    for _ in range(3):
        trainer.publish([client])
        assert_serves(client, trainer)
    assert len(sizes) >= 3 * 3, "each version is sent in several buckets"


def test_a_trainer_that_was_restarted_sends_the_next_versions(
    folders: Folders, trainer: Trainer, client: SGLangServer, live: LiveServer, tmp_path: Path
) -> None:
    """The trainer before is another process, which has ended without a word to the server."""
    done = publish_elsewhere(live, folders.base, tmp_path, version=7)
    assert done.returncode == 0, done.stderr
    served = tmp_path / "v00000007"
    assert client.status().label == weights_label(served, 7)
    response = sample(client)
    ids = [*response.input_tokens, *response.output_tokens]
    expected = folder_logprobs(served, ids)[len(response.input_tokens) :]
    pairs = zip(response.output_logprobs, expected, strict=True)
    assert max(abs(told - computed) for told, computed in pairs) < TOLERANCE

    for _ in range(2):
        trainer.publish([client])
        assert_serves(client, trainer)


@pytest.mark.parametrize("bucket", [0, 2])
def test_a_server_whose_publisher_was_killed_inside_a_bucket_is_repaired_by_the_next_one(
    bucket: int,
    folders: Folders,
    trainer: Trainer,
    client: SGLangServer,
    live: LiveServer,
    tmp_path: Path,
) -> None:
    trainer.publish([client])
    killed = publish_elsewhere(live, folders.base, tmp_path, 7, bucket)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert client.status().paused
    trainer.publish([client])
    assert_serves(client, trainer)


def test_weights_that_are_sent_without_a_folder_have_the_same_label(
    trainer: Trainer, client: SGLangServer
) -> None:
    trainer.publish([client])
    trainer.engine.update_weights(replace(trainer.meta, path=None))
    assert_serves(client, trainer)
