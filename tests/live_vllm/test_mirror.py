"""A stock vLLM server that starts with ``LOCAL/current`` and is updated from deltas through a real mirror."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from holdfast_weights.delta import read_header
from holdfast_weights.manifest import check_folder
from safetensors import safe_open

from holdfast.engine.servers import VLLMServer
from holdfast.engine.servers.api import weights_label
from holdfast.utils.errors import PoisonedServerError, PublishError
from tests.limits import stretched
from tests.live_vllm.live_server import LiveServer
from tests.live_vllm.trainer import PROMPT, TOLERANCE, Trainer, folder_logprobs
from tests.plugins.weights.processes import Running
from tests.plugins.weights.publisher import Publisher, assert_same

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def copy_weights(folder: Path, publisher: Publisher) -> None:
    """Give a publisher the weights and small files of a folder."""
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            for tensor in read_header(path):
                dtype = f"<u{tensor.item_bytes}"
                publisher.values[tensor.name] = np.fromfile(path, dtype, tensor.count, offset=tensor.offset)
        elif path.is_file() and path.name != "manifest.json":
            publisher.small[path.name] = path.read_bytes()


@dataclass
class Mirrored:
    """A mirror, the versions that it follows, and a server that starts with its newest one."""

    trainer: Trainer
    publisher: Publisher
    mirror: Running
    local: Path
    live: LiveServer
    version: int = 0

    def publish(self) -> int:
        """Train a step and publish it, as a delta after the first version. Returns the version."""
        self.trainer.publish([])
        copy_weights(self.trainer.folder, self.publisher)
        self.version += 1
        self.publisher.publish(self.version, self.version - 1 or None)
        return self.version

    def prepare(self, version: int) -> Path:
        """Have the mirror make a version, and return its folder."""
        status, answer = self.mirror.prepare(version, self.publisher.label(version))
        assert status == 200, answer
        return Path(answer["path"])

    @property
    def client(self) -> VLLMServer:
        return VLLMServer(self.live.url, timeout_s=stretched(60), mirror=self.mirror.url)

    def assert_serves(self) -> None:
        """Check that tokens are sampled with the newest weights, also by a server without a label."""
        sampling = {"max_tokens": 24, "logprobs": 0, "seed": 1, "ignore_eos": True}
        body = {"token_ids": PROMPT, "sampling_params": sampling}
        choice = self.live.post("/inference/v1/generate", body).raise_for_status().json()["choices"][0]
        found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        expected = folder_logprobs(self.trainer.folder, [*PROMPT, *choice["token_ids"]])[len(PROMPT) :]
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < TOLERANCE


@pytest.fixture(scope="module")
def mirrored(trainer: Trainer, scratch: Path) -> Iterator[Mirrored]:
    trainer.publish([])
    shapes = tensor_shapes(trainer.folder / "model.safetensors")
    publisher = Publisher(scratch / "source", shapes, piece_elements=1000)
    local = scratch / "mirror"
    with Running("mirror", scratch / "source", local, "--poll", 0) as mirror:
        live = LiveServer(local / "current", scratch, "--logprobs-mode", "processed_logprobs")
        found = Mirrored(trainer, publisher, mirror, local, live)
        found.prepare(found.publish())
        live.start()
        try:
            live.wait_until_ready()
            yield found
        finally:
            live.kill()


def tensor_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a file."""
    with safe_open(path, framework="np") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {name: (found.get_dtype(), tuple(found.get_shape())) for name, found in slices.items()}


def test_a_server_starts_with_current_and_follows_deltas(mirrored: Mirrored) -> None:
    mirrored.assert_serves()
    for _ in range(2):
        version = mirrored.publish()
        folder = mirrored.publisher.folder(version)
        assert not list(folder.glob("*.safetensors")), "it is a delta"
        mirrored.client.update_weights_from_disk(str(folder), version)
        assert_same(mirrored.local / "current", mirrored.publisher, version)
        assert mirrored.client.status().label == weights_label(folder, version)
        mirrored.assert_serves()


def test_a_server_that_missed_versions_loads_once(mirrored: Mirrored) -> None:
    for _ in range(5):
        version = mirrored.publish()
    mirrored.client.update_weights_from_disk(str(mirrored.publisher.folder(version)), version)
    mirrored.assert_serves()


def test_a_restarted_server_has_the_newest_version_at_once(mirrored: Mirrored) -> None:
    mirrored.prepare(mirrored.publish())
    mirrored.live.restart()
    mirrored.assert_serves()


def test_a_wrong_byte_in_the_local_folder_is_found(mirrored: Mirrored, clients: dict[str, VLLMServer]) -> None:
    version = mirrored.publish()
    folder = mirrored.prepare(version)
    clients["plugin"].update_weights_from_disk(str(folder), version)
    path = folder / "model-00001-of-00002.safetensors"
    (largest,) = sorted(read_header(path), key=lambda tensor: tensor.count)[-1:]
    file = os.open(path, os.O_RDWR)
    try:
        values = np.frombuffer(os.pread(file, 4 * largest.count, largest.offset), "<u4").copy()
        values[:] ^= 0x00400000
        os.pwrite(file, values.tobytes(), largest.offset)
        with pytest.raises(PublishError, match="it goes on with the weights it has") as caught:
            clients["plugin"].update_weights_from_disk(str(folder), version)
        assert not isinstance(caught.value, PoisonedServerError)
        with pytest.raises(PublishError, match="it answers by other weights"):
            mirrored.client.update_weights_from_disk(str(mirrored.publisher.folder(version)), version)
        os.pwrite(file, (values ^ 0x00400000).tobytes(), largest.offset)
    finally:
        os.close(file)
    check_folder(folder)
    mirrored.client.update_weights_from_disk(str(mirrored.publisher.folder(version)), version)
    mirrored.assert_serves()
