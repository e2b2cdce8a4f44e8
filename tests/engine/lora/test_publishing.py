"""An engine that publishes only its adapters: written files, a server's answers, and early
refusals.
"""

import multiprocessing as mp
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from holdfast.engine import WeightUpdateMeta
from holdfast.engine.hf.versions import version_path
from holdfast.engine.servers import VLLMServer
from holdfast.engine.servers.api import ServerStatus, weights_label
from holdfast.engine.servers.content_check import PROBE_NAME, read_weights_probe
from holdfast.utils.errors import ConfigError
from holdfast.utils.files import walk_files
from holdfast.utils.manifest import file_entries, verify_folder, write_manifest
from tests.engine.lora.engines import lora_engine, train, write_base
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.scripted import PlainServer
from tests.helpers import PRELOAD, run_ranks
from tests.limits import stretched

pytestmark = pytest.mark.timeout(120)

VERSION = 3


def write_served_base(folder: Path) -> Path:
    """A base model that the fake server accepts too: with a manifest."""
    write_base(folder)
    write_manifest(folder, file_entries(folder, list(walk_files(folder))), {"weight_version": 0})
    return folder


def refusal(engine: Any, root: Path) -> str:
    """The error of publishing adapters, which must not have written anything."""
    with pytest.raises(ConfigError) as caught:
        engine.update_weights(WeightUpdateMeta("adapter", str(root), version=1))
    assert not root.exists()
    return str(caught.value)


def _publish(rank: int, world_size: int, base: str, root: str, url: str) -> dict[str, Any]:
    engine = lora_engine(Path(base))
    engine.connect_engine([VLLMServer(url)], WeightUpdateMeta("adapter", f"{root}/adapters"))
    for version in range(1, VERSION + 1):
        train(engine, 1)
        engine.set_version(version)
        done = engine.update_weights()
    engine.destroy()
    return {"path": done.path, "stats": done.stats()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


def test_two_ranks_publish_their_adapters_and_a_server_puts_them_on_the_base(root: Path) -> None:
    base = write_served_base(root / "base")
    with FakeServer("vllm", root, lora=True, dtype="float32", folder=str(base)) as fake:
        seen, _ = run_ranks(_publish, 2, str(base), str(root), fake.url)
        folder, client = Path(seen["path"]), VLLMServer(fake.url)
        probe = read_weights_probe(folder)
        assert probe is not None
        (name,) = fake.state()["adapters"]
        assert name == f"holdfast-v{weights_label(folder, VERSION)}"
        with client._calls("", stretched(20)) as calls:
            served = client._prompt_logprobs(calls, probe.prompt_ids, name)
        assert max(abs(a - b) for a, b in zip(served, probe.logprobs, strict=True)) < 1e-4
        assert client.status() == ServerStatus(
            None, paused=False
        )  # a client that has published nothing
    assert seen["stats"]["servers_serving"] == 1 and seen["stats"]["update_load_s"] > 0
    assert sorted(os.listdir(root / "adapters")) == ["v00000002", "v00000003"]
    assert sorted(os.listdir(folder)) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
        PROBE_NAME,
    ]
    assert verify_folder(folder)["base_dtype"] == "bfloat16"
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder
    ).eval()
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([probe.prompt_ids])).logits[0].log_softmax(-1)
    loaded = [float(row[token]) for row, token in zip(rows, probe.prompt_ids[1:], strict=False)]
    assert max(abs(a - b) for a, b in zip(loaded, probe.logprobs, strict=True)) < 1e-4


@pytest.mark.slow
def test_engines_and_servers_without_adapters_are_refused_before_anything_is_written(
    root: Path,
) -> None:
    base = write_base(root / "refused_base")
    (seen,) = run_ranks(_refused, 1, str(base), str(root))
    assert "has none (config key 'use_lora'); publish by type 'disk'" in seen["all weights"]
    assert "is trained beside them; publish by type 'disk'" in seen["critic"]
    assert "a PlainServer, has no endpoint that loads adapters" in seen["plain"]


def _refused(rank: int, world_size: int, base: str, root: str) -> dict[str, str]:
    seen, folder = {}, Path(root) / "none"
    for name, keys in {
        "all weights": {"use_lora": False},
        "critic": {"is_critic": True},
        "plain": {},
    }.items():
        engine = lora_engine(Path(base), **keys)
        engine.connect_engine([PlainServer()], WeightUpdateMeta("adapter", str(folder)))
        seen[name] = refusal(engine, folder)
        engine.destroy()
    return seen


class DiesBeforeTelling(VLLMServer):
    """Ends the publisher when it is about to tell the server."""

    def update_adapters_from_disk(self, path: str, version: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return version


def _life(base: str, root: str, client: VLLMServer, steps: int) -> None:
    torch.set_num_threads(1)
    engine = lora_engine(Path(base))
    engine.connect_engine([client], WeightUpdateMeta("adapter", root))
    for _ in range(steps):
        train(engine, 1)
        engine.set_version(engine.get_version() + 1)
    engine.update_weights()
    engine.destroy()


@pytest.mark.slow
def test_a_publisher_killed_between_writing_and_telling_is_followed_by_its_next_life(
    tmp_path: Path,
) -> None:
    base, root, context = (
        write_served_base(tmp_path / "base"),
        tmp_path / "w",
        mp.get_context("forkserver"),
    )
    context.set_forkserver_preload(list(PRELOAD))

    def live(client: VLLMServer, steps: int) -> int | None:
        process = context.Process(target=_life, args=(str(base), str(root), client, steps))
        process.start()
        process.join(stretched(60))
        return process.exitcode

    with FakeServer("vllm", tmp_path, lora=True, dtype="float32", folder=str(base)) as fake:
        assert live(VLLMServer(fake.url), 1) == 0
        first = fake.state()["adapters"]
        assert live(DiesBeforeTelling(fake.url), 2) == -signal.SIGKILL
        assert (
            fake.state()["adapters"] == first and (version_path(root, 2) / "manifest.json").exists()
        )
        assert live(VLLMServer(fake.url), 2) == 0
        assert fake.state()["adapters"] == [f"holdfast-v{weights_label(version_path(root, 2), 2)}"]
