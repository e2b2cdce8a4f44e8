"""A real SGLang server whose model's head is its embedding, started with few flags."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.engine import WeightUpdateMeta
from holdfast.engine.api import UpdateType
from holdfast.utils.errors import ServerError
from tests.limits import stretched
from tests.live.trainer import Trainer, small_buckets, started_trainer
from tests.live_sglang.checks import assert_serves, client_of
from tests.live_sglang.live_server import LiveServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def tied(tied_folder: Path, scratch: Path, trainer: Trainer) -> Iterator[Trainer]:
    """One rank that trains the tied model. It shares the process group of the other trainer."""
    meta = WeightUpdateMeta("disk", str(scratch / "tied-weights"), timeout_s=stretched(120))
    with started_trainer(tied_folder, meta) as tied:
        yield tied


@pytest.mark.parametrize("way", ["disk", "xccl"])
def test_versions_of_a_model_with_a_tied_head_are_served(
    way: UpdateType, tied: Trainer, plain: LiveServer
) -> None:
    client = client_of(plain)
    with tied.publishing_by(way), small_buckets():
        for _ in range(2):
            tied.publish([client])
            assert_serves(client, tied)


def test_a_server_without_the_memory_saver_refuses_to_sleep(
    tied: Trainer, plain: LiveServer
) -> None:
    client = client_of(plain)
    tied.publish([client])
    with pytest.raises(ServerError, match="--enable-memory-saver"):
        client.sleep()
    assert_serves(client, tied)
