"""A stock vLLM server that starts with ``LOCAL/current`` and follows the deltas of a trainer
through a real mirror.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from holdfast_weights.delta import read_header
from holdfast_weights.manifest import check_folder

from holdfast.engine.hf.versions import holds_delta_alone, version_path
from holdfast.engine.servers import ServerFleet, VLLMServer
from holdfast.engine.servers.api import WEIGHTS, ServerState, ServerStatus, weights_label
from holdfast.utils.errors import PoisonedServerError, PublishError
from tests.limits import stretched
from tests.live.trainer import PROMPT, TOLERANCE, Trainer, folder_logprobs
from tests.live_vllm.live_server import LiveServer
from tests.plugins.weights.processes import Running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

RATE = 2e-5
"""Changes less than half of the weights in bfloat16, and the answers by more than `TOLERANCE`."""


@dataclass
class Mirrored:
    """A trainer that publishes deltas, the mirror that follows it, and a server that starts with
    its newest version.
    """

    trainer: Trainer
    mirror: Running
    local: Path
    live: LiveServer

    def publish(self, *servers: VLLMServer) -> Path:
        """Train a step and publish it. Returns the folder of the mirror, which servers are told
        of.
        """
        self.trainer.engine.set_lr(RATE)
        self.trainer.publish(servers)
        return version_path(self.local, self.trainer.version)

    def prepare(self) -> Path:
        """Have the mirror make the newest version, and return its folder."""
        version, folder = self.trainer.version, self.trainer.folder
        status, answer = self.mirror.prepare(version, weights_label(folder, version))
        assert status == 200, answer
        return Path(answer["path"])

    @property
    def client(self) -> VLLMServer:
        return VLLMServer(self.live.url, timeout_s=stretched(60), mirror=self.mirror.url)

    def assert_serves(self) -> None:
        """Check that tokens are sampled with the newest weights, also by a server without a
        label.
        """
        sampling = {"max_tokens": 24, "logprobs": 0, "seed": 1, "ignore_eos": True}
        body = {"token_ids": PROMPT, "sampling_params": sampling}
        choice = (
            self.live.post("/inference/v1/generate", body).raise_for_status().json()["choices"][0]
        )
        found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        ids = [*PROMPT, *choice["token_ids"]]
        before, newest = (
            folder_logprobs(path, ids)[len(PROMPT) :] for path in sorted(self.local.glob("v*"))
        )
        assert max(abs(a - b) for a, b in zip(found, newest, strict=True)) < TOLERANCE
        assert max(abs(a - b) for a, b in zip(found, before, strict=True)) > TOLERANCE


@pytest.fixture(scope="module")
def mirrored(trainer: Trainer, scratch: Path) -> Iterator[Mirrored]:
    source, local, meta = scratch / "source", scratch / "mirror", trainer.meta
    trainer.meta = replace(meta, path=str(source), dtype="bfloat16", delta=True, keep=2)
    with Running("mirror", source, local, "--poll", 0) as mirror:
        live = LiveServer(local / "current", scratch, "--logprobs-mode", "processed_logprobs")
        found = Mirrored(trainer, mirror, local, live)
        for _ in range(2):
            found.publish()
            found.prepare()
        live.start()
        try:
            live.wait_until_ready()
            yield found
        finally:
            live.kill()
            trainer.meta = meta
            trainer.engine.set_lr(1e-2)


def test_a_server_starts_with_current_and_follows_deltas(mirrored: Mirrored) -> None:
    mirrored.assert_serves()
    trainer, client = mirrored.trainer, mirrored.client
    folder = mirrored.publish(client)
    for _ in range(2):
        folder = mirrored.publish(client)
        assert holds_delta_alone(trainer.folder)
        assert client.status() == ServerStatus(weights_label(folder, trainer.version), paused=False)
        mirrored.assert_serves()
    full = replace(trainer.meta, path=f"{trainer.meta.path}.full", delta=False)
    trainer.engine.connect_engine([], full)
    trainer.engine.update_weights()
    names = {path.name for path in folder.iterdir()} - {"delta"}
    reference = version_path(str(full.path), trainer.version)
    assert names == {path.name for path in reference.iterdir()}
    assert all((folder / name).read_bytes() == (reference / name).read_bytes() for name in names)


def test_a_server_that_missed_versions_loads_once(mirrored: Mirrored) -> None:
    for _ in range(4):
        mirrored.publish()
    mirrored.publish(mirrored.client)
    mirrored.assert_serves()


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_that_slept_over_five_versions_wakes_up_with_the_newest(
    level: int, mirrored: Mirrored
) -> None:
    trainer, client = mirrored.trainer, mirrored.client
    mirrored.publish(client)
    with closing(ServerFleet([client], probe_interval_s=None)) as fleet:
        fleet.sleep(stretched(60), level)
        for _ in range(5):
            mirrored.publish()
        assert mirrored.live.sleeps()
        fleet.wake_up((WEIGHTS,))
        fleet.update(trainer.folder, trainer.version, stretched(60))
        assert fleet.states()[0].state is ServerState.SERVING and not mirrored.live.sleeps()
        assert client.status() == ServerStatus(
            weights_label(trainer.folder, trainer.version), paused=False
        )
    mirrored.assert_serves()


def test_a_restarted_server_has_the_newest_version_at_once(mirrored: Mirrored) -> None:
    mirrored.publish()
    mirrored.prepare()
    mirrored.live.restart()
    mirrored.assert_serves()


def test_a_wrong_byte_in_the_local_folder_is_found(
    mirrored: Mirrored, clients: dict[str, VLLMServer]
) -> None:
    mirrored.publish()
    folder, version = mirrored.prepare(), mirrored.trainer.version
    clients["plugin"].update_weights_from_disk(str(folder), version)
    path = folder / "model.safetensors"
    (largest,) = sorted(read_header(path), key=lambda tensor: tensor.count)[-1:]
    file = os.open(path, os.O_RDWR)
    try:
        values = np.frombuffer(os.pread(file, 2 * largest.count, largest.offset), "<u2").copy()
        os.pwrite(
            file, (values ^ 0x0200).tobytes(), largest.offset
        )  # 16 times as large, or a sixteenth
        with pytest.raises(PublishError, match="it goes on with the weights it has") as caught:
            clients["plugin"].update_weights_from_disk(str(folder), version)
        assert not isinstance(caught.value, PoisonedServerError)
        with pytest.raises(PublishError, match="it answers by other weights"):
            mirrored.client.update_weights_from_disk(str(folder), version)
        os.pwrite(file, values.tobytes(), largest.offset)
    finally:
        os.close(file)
    check_folder(folder)
    mirrored.client.update_weights_from_disk(str(folder), version)
    mirrored.assert_serves()
