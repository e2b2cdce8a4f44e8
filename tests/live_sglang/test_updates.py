"""Folders that a real SGLang server loads, or is not told of, and what it does after a restart."""

import shutil
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest
from safetensors.torch import load_file, save_file

from holdfast.engine.servers import ServerFleet, SGLangServer
from holdfast.engine.servers.api import ServerStatus, weights_label
from holdfast.utils.errors import PublishError, ServerError
from holdfast.utils.manifest import MANIFEST_NAME, file_entries, write_manifest
from tests.limits import stretched
from tests.live.trainer import PROMPT, Trainer, folder_logprobs
from tests.live_sglang.checks import TOLERANCE, assert_serves, client_of
from tests.live_sglang.live_server import LiveServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

WEIGHTS = "model.safetensors"


def test_three_versions_of_a_folder_are_served(trainer: Trainer, client: SGLangServer) -> None:
    folders = []
    for _ in range(3):
        folders.append(trainer.publish([client]))
        assert_serves(client, trainer)
    probes = [folder_logprobs(folder, PROMPT) for folder in folders]
    apart = [max(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in pairwise(probes)]
    assert min(apart) > 1000 * TOLERANCE, "the versions are too much alike to be told apart"


def cut(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-20_000])


def flip_bit(folder: Path) -> None:
    path = folder / WEIGHTS
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x40
    path.write_bytes(data)


def lose_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "flipped": flip_bit,
    "without weights": lose_weights,
    "gone": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_server_is_not_told_of_a_damaged_folder_and_serves_on(
    damage: str, trainer: Trainer, client: SGLangServer, live: LiveServer, tmp_path: Path
) -> None:
    folder = trainer.publish([client])
    bad = shutil.copytree(folder, tmp_path / "bad")
    DAMAGES[damage](bad)
    with pytest.raises(PublishError, match="not told"):
        client.update_weights_from_disk(str(bad), trainer.version)
    assert_serves(client, trainer)
    trainer.publish([client])
    assert_serves(client, trainer)
    assert live.alive()


def write_again(folder: Path) -> None:
    """Write the manifest of a folder that was changed."""
    (folder / MANIFEST_NAME).unlink()
    names = [path.name for path in folder.iterdir()]
    write_manifest(folder, file_entries(folder, names), {})


def old_weights(folder: Path, older: Path) -> None:
    shutil.copy(older / WEIGHTS, folder / WEIGHTS)


def missing_tensor(folder: Path, older: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize("change", [old_weights, missing_tensor])
def test_weights_that_the_server_takes_and_that_are_not_the_trainers_are_found(
    change: Callable[[Path, Path], None],
    trainer: Trainer,
    client: SGLangServer,
    tmp_path: Path,
) -> None:
    """SGLang answers 200. The answer to the probe differs, so the server is paused."""
    older = trainer.publish([client])
    trainer.train()
    trainer.engine.connect_engine([], trainer.meta)
    bad = shutil.copytree(trainer.engine.update_weights().path, tmp_path / "bad")
    change(bad, older)
    write_again(bad)
    with pytest.raises(PublishError, match="it answers by other weights"):
        client.update_weights_from_disk(str(bad), trainer.version)
    assert client.status().paused
    trainer.publish([client])
    assert_serves(client, trainer)


def test_a_paused_server_is_seen_as_paused_and_looks_unhealthy(
    trainer: Trainer, client: SGLangServer, live: LiveServer
) -> None:
    trainer.publish([client])
    label = weights_label(trainer.folder, trainer.version)
    with client._exclusive("a pause", ServerError) as calls:
        client._pause(calls, "pause")
    assert client.status() == ServerStatus(label, paused=True)
    health = httpx2.get(live.url + "/health", timeout=stretched(60))
    assert health.status_code == 503, "a probe of liveness would end the server"
    assert client.status() == ServerStatus(label, paused=True)
    trainer.publish([client])
    assert_serves(client, trainer)


def test_a_paused_server_that_is_killed_and_restarted_is_brought_up_to_date(
    trainer: Trainer, client: SGLangServer, live: LiveServer
) -> None:
    with closing(ServerFleet([client_of(live)], probe_interval_s=0.5)) as fleet:
        trainer.publish_to(fleet)
        with client._exclusive("a pause", ServerError) as calls:
            client._pause(calls, "pause")
        live.kill()
        with pytest.raises(ServerError, match=client.name):
            client.status()

        # No server is told of the newest version.
        with pytest.raises(ServerError):
            trainer.publish_to(fleet)
        assert fleet.serving() == []

        live.start()
        live.wait_until_ready()
        assert fleet.wait_serving(1, stretched(60)), fleet.states()

        # Also for the client that had paused the server before.
        assert_serves(client, trainer)
