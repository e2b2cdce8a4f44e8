"""Answers of a real vLLM server after updates, successful or not."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.engine.servers import ServerFleet, VLLMServer
from holdfast.engine.servers.api import weights_label
from holdfast.utils.errors import PoisonedServerError, PublishError, ServerError
from holdfast.utils.manifest import MANIFEST_NAME, file_entries, write_manifest
from tests.limits import stretched
from tests.live.trainer import PROMPT, TOLERANCE, Trainer, folder_logprobs, sample
from tests.live_vllm.live_server import LiveServer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]  # the first test waits for the start of two servers

both = pytest.mark.parametrize("name", ["stock", "plugin"])


def assert_serves(client: VLLMServer, trainer: Trainer, folder: Path, seed: int = 1) -> None:
    """Check that it samples with the weights of ``folder``, reports their version, and is not
    paused.
    """
    version = trainer.version
    status = client.status()
    assert (status.label, status.paused) == (weights_label(folder, version), False)
    response = sample(client, seed=seed)
    assert set(response.output_versions) == {version}
    assert trainer.error(response) < TOLERANCE


def test_three_versions_are_served(trainer: Trainer, clients: dict[str, VLLMServer]) -> None:
    folders = []
    for _ in range(3):
        folders.append(trainer.publish(clients.values()))
        for client in clients.values():
            assert_serves(client, trainer, folders[-1])
    probes = [folder_logprobs(folder, PROMPT) for folder in folders]
    apart = [max(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in pairwise(probes)]
    assert min(apart) > 100 * TOLERANCE, "the versions are too much alike to be told apart"


@both
def test_no_cached_block_of_an_older_version_is_used(
    name: str, trainer: Trainer, clients: dict[str, VLLMServer], live_servers: dict[str, LiveServer]
) -> None:
    client, live = clients[name], live_servers[name]
    trainer.publish([client])
    sample_by_hand(live)  # its blocks are in the cache now
    folder = trainer.publish([client])
    assert_serves(client, trainer, folder)
    tokens, logprobs = sample_by_hand(live)
    expected = folder_logprobs(folder, [*LONG_PROMPT, *tokens])[len(LONG_PROMPT) :]
    assert max(abs(a - b) for a, b in zip(logprobs, expected, strict=True)) < TOLERANCE


def test_a_kept_cache_changes_the_sampled_tokens(
    trainer: Trainer, clients: dict[str, VLLMServer], live_servers: dict[str, LiveServer]
) -> None:
    """The test above can fail: without a reset, the next tokens belong to neither version."""
    client, live = clients["stock"], live_servers["stock"]
    old = trainer.publish([client])
    sample_by_hand(live)
    new = trainer.publish([clients["plugin"]])
    live.post(
        "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(new)}}
    ).raise_for_status()
    tokens, logprobs = sample_by_hand(live)
    for folder in (old, new):
        expected = folder_logprobs(folder, [*LONG_PROMPT, *tokens])[len(LONG_PROMPT) :]
        assert max(abs(a - b) for a, b in zip(logprobs, expected, strict=True)) > 10 * TOLERANCE
    assert_serves(client, trainer, trainer.publish([client]))


LONG_PROMPT = [3 + i % 90 for i in range(400)]  # several blocks of 128 tokens


def sample_by_hand(live: LiveServer) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities without a cache salt, which would be enough to avoid the cached
    blocks.
    """
    sampling = {"max_tokens": 4, "logprobs": 0, "seed": 5, "ignore_eos": True}
    body = {"token_ids": LONG_PROMPT, "sampling_params": sampling}
    choice = live.post("/inference/v1/generate", body).raise_for_status().json()["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


@both
def test_a_server_that_lies_is_found_and_paused(
    name: str, trainer: Trainer, clients: dict[str, VLLMServer], live_servers: dict[str, LiveServer]
) -> None:
    client, live = clients[name], live_servers[name]
    trainer.publish([client])
    live.lie(True)
    try:
        with pytest.raises(PublishError, match=f"(?s){client.name}.*it answers by other weights"):
            trainer.publish([client])
        assert client.status().paused
    finally:
        live.lie(False)
    assert_serves(client, trainer, trainer.publish([client]))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": shutil.rmtree,
    "torn": lambda folder: os.truncate(folder / "model.safetensors", 100_000),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_folder_leaves_a_stock_server_paused(
    damage: str, trainer: Trainer, clients: dict[str, VLLMServer], tmp_path: Path
) -> None:
    client, folder = clients["stock"], trainer.publish([clients["stock"]])
    bad = shutil.copytree(folder, tmp_path / "bad")
    label_file = (bad / "manifest.json").read_bytes()
    DAMAGES[damage](bad)
    bad.mkdir(exist_ok=True)
    (bad / "manifest.json").write_bytes(label_file)
    with pytest.raises(PoisonedServerError, match="do not resume it"):
        client.update_weights_from_disk(str(bad), trainer.version + 1)
    assert client.status().paused
    assert_serves(client, trainer, trainer.publish([client]))


def flip_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["torn", "flipped"])
def test_the_plugin_refuses_a_bad_folder_and_serves_on(
    damage: str, trainer: Trainer, clients: dict[str, VLLMServer], tmp_path: Path
) -> None:
    client, folder = clients["plugin"], trainer.publish([clients["plugin"]])
    bad = shutil.copytree(folder, tmp_path / "bad")
    {**DAMAGES, "flipped": flip_bit}[damage](bad)
    with pytest.raises(PublishError, match="it goes on with the weights it has") as caught:
        client.update_weights_from_disk(str(bad), trainer.version)
    assert not isinstance(caught.value, PoisonedServerError)
    assert_serves(client, trainer, folder)
    assert_serves(client, trainer, trainer.publish([client]))


def half_a_layer(folder: Path) -> None:
    """Make a valid folder that vLLM can load only in part: a layer's last tensor has another
    shape.
    """
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"] = torch.zeros(16, 64)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    names = [path.name for path in folder.iterdir() if path.name != MANIFEST_NAME]
    (folder / MANIFEST_NAME).unlink()
    write_manifest(folder, file_entries(folder, names), {})


def test_the_plugin_repairs_a_load_that_failed_in_the_middle(
    trainer: Trainer, clients: dict[str, VLLMServer], tmp_path: Path
) -> None:
    client, folder = clients["plugin"], trainer.publish([clients["plugin"]])
    bad = shutil.copytree(folder, tmp_path / "bad")
    half_a_layer(bad)
    with pytest.raises(PoisonedServerError, match="old and new weights are mixed"):
        client.update_weights_from_disk(str(bad), trainer.version)
    flip_bit(bad)
    with pytest.raises(PoisonedServerError, match="refused, the weights are still mixed"):
        client.update_weights_from_disk(str(bad), trainer.version)
    assert client.status().paused
    assert_serves(client, trainer, trainer.publish([client]))


def test_a_stock_server_is_never_believed_after_a_load_that_failed_in_the_middle(
    trainer: Trainer,
    clients: dict[str, VLLMServer],
    live_servers: dict[str, LiveServer],
    tmp_path: Path,
) -> None:
    client, folder = clients["stock"], trainer.publish([clients["stock"]])
    bad = shutil.copytree(folder, tmp_path / "bad")
    half_a_layer(bad)
    with pytest.raises(PoisonedServerError, match="restart it"):
        client.update_weights_from_disk(str(bad), trainer.version)
    for _ in range(
        3
    ):  # vLLM begins with its kept part: an error, then an answer of 200 with wrong weights
        with pytest.raises(PublishError):
            trainer.publish([client])
    live_servers["stock"].restart()
    assert_serves(client, trainer, trainer.publish([client]))


_PUBLISHER = """
import os, signal, sys
from holdfast.engine.servers import VLLMServer
from holdfast.engine.servers.http import Calls

post = Calls.post
def post_and_die(self, phase, path, *args, **kwargs):
    answer = post(self, phase, path, *args, **kwargs)
    if path == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer
Calls.post = post_and_die
transfer = sys.argv[5] or None
VLLMServer(sys.argv[2], transfer=transfer).update_weights_from_disk(sys.argv[3], int(sys.argv[4]))
"""

DEATHS = {
    "stock": ("/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"),
    "plugin": ("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"),
}


@pytest.mark.parametrize(
    ("name", "route"), [(name, route) for name, routes in DEATHS.items() for route in routes]
)
def test_a_server_whose_publisher_was_killed_is_repaired(
    name: str, route: str, trainer: Trainer, clients: dict[str, VLLMServer]
) -> None:
    client, folder = clients[name], trainer.publish([clients[name]])
    transfer = client.transfer or ""
    command = [
        sys.executable,
        "-c",
        _PUBLISHER,
        route,
        client.url,
        str(folder),
        str(trainer.version),
        transfer,
    ]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=stretched(60))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert client.status().paused
    assert_serves(client, trainer, trainer.publish([client]))


def test_a_server_killed_in_an_update_is_brought_up_to_date_after_a_restart(
    trainer: Trainer, clients: dict[str, VLLMServer], live_servers: dict[str, LiveServer]
) -> None:
    client, live, other = clients["plugin"], live_servers["plugin"], clients["stock"]
    fleet = ServerFleet(clients.values(), min_servers=1, probe_interval_s=0.5)
    try:
        live.signal(signal.SIGSTOP)
        killer = threading.Timer(1.0, live.kill)
        killer.start()
        folder = trainer.publish_to(fleet)  # one server has confirmed
        killer.join()
        assert_serves(other, trainer, folder)
        assert fleet.serving() == [other]
        with pytest.raises(ServerError, match=client.name):
            client.status()

        folder = trainer.publish_to(fleet)
        live.start()
        live.wait_until_ready()
        assert fleet.wait_serving(2, stretched(60)), fleet.states()
        assert_serves(client, trainer, folder)
    finally:
        fleet.close()
