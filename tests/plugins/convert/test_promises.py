"""Promises of every conversion: all or nothing, compared at the end, in bounded memory, for every
kind of source.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from holdfast_convert import convert, writers
from holdfast_convert.shards import from_ranks
from holdfast_convert.torch_files import read_file
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from holdfast.engine.api import FinetuneSpec
from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.utils.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointMismatchError,
    ConfigError,
    FolderInUseError,
)
from holdfast.utils.manifest import file_entries, write_manifest
from tests.helpers import run_ranks
from tests.limits import stretched
from tests.plugins.convert.hosts import Host, assert_same, tiny_config, tiny_experts

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

SPEC = FinetuneSpec(total_train_epochs=2, dataset_size=40, train_batch_size=4)


def config_folder(root: Path, config: Any = None) -> Path:
    (config or tiny_config()).save_pretrained(root / "config")
    return root / "config"


KILLED = """
import sys
from pathlib import Path
from holdfast_convert import convert, writers

write = writers.write_entries

def stop_after_the_data(folder, *args):
    files = write(folder, *args)
    print("written", flush=True)
    sys.stdin.read()
    return files

writers.write_entries = stop_after_the_data
convert(sys.argv[1], sys.argv[2], to=sys.argv[3])
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["dcp", "generation"])
def test_a_killed_conversion_leaves_nothing_visible_and_the_same_command_makes_it(
    to: str, tmp_path: Path
) -> None:
    host = Host().train(2)
    save_dcp(tmp_path / "source", host.state)
    target = tmp_path / "e" / "t"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "source"), str(target), to]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
    within = target.parent if to == "dcp" else target / "recover"
    (left,) = [path for path in within.iterdir() if path.name.startswith(".staging-")]
    assert list(left.rglob("*.distcp")) and not list(within.glob("[!.]*"))
    done = convert(tmp_path / "source", target, to=to)
    assert not left.exists()
    loaded = Host(4)
    load_dcp(done.target if to == "dcp" else Path(done.target) / "default", loaded.state)
    assert_same(loaded.tensors(), host.tensors())


def test_a_target_that_differs_from_the_source_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_dcp(tmp_path / "source", Host().train(1).state)
    write = writers.write_entries

    def damage(folder: Path, *args: Any) -> Any:
        files = write(folder, *args)
        with open(
            folder / "__0_0.distcp", "r+b"
        ) as file:  # a disk that returns other bytes than were written
            file.seek(2000)
            byte = file.read(1)[0]
            file.seek(2000)
            file.write(bytes([byte ^ 1]))
        return files

    monkeypatch.setattr(writers, "write_entries", damage)
    with pytest.raises(CheckpointCorruptError, match="is not what was read from the source"):
        convert(tmp_path / "source", tmp_path / "c", to="dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_target_without_a_tensor_of_the_source_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_dcp(tmp_path / "source", Host().train(1).state)
    entries = writers.dcp_entries
    monkeypatch.setattr(
        writers, "dcp_entries", lambda each: (e for e in entries(each) if "exp_avg" not in e.path)
    )
    with pytest.raises(
        CheckpointCorruptError, match=r"exp_avg of the source was not written \(24 such\)"
    ):
        convert(tmp_path / "source", tmp_path / "c", to="dcp")
    assert not (tmp_path / "c").exists()


def test_a_model_folder_with_a_manifest_is_verified_before_it_is_read(tmp_path: Path) -> None:
    Host().model.save_pretrained(folder := tmp_path / "v00000001")
    write_manifest(
        folder,
        file_entries(folder, [path.name for path in folder.iterdir()]),
        {"weight_version": 1},
    )
    convert(folder, tmp_path / "c", to="dcp")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match=r"model\.safetensors has digest"):
        convert(folder, tmp_path / "d", to="dcp")


def test_a_checkpoint_without_its_frozen_base_is_refused_with_advice(tmp_path: Path) -> None:
    model = Host().model
    for name, param in model.named_parameters():
        param.requires_grad = "norm" in name
    save_dcp(tmp_path / "c", DCPState(model, trainable_only=True))
    for config in (None, config_folder(tmp_path)):
        with pytest.raises(
            ConfigError, match=r"partly frozen model .* without its base: .* engine\.save"
        ):
            convert(tmp_path / "c", tmp_path / "d", to="dcp", config=config)


def test_a_source_with_a_flipped_byte_is_refused(tmp_path: Path) -> None:
    save_dcp(tmp_path / "source", Host().train(1).state)
    path = tmp_path / "source" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp has digest"):
        convert(tmp_path / "source", tmp_path / "c", to="dcp")


@pytest.mark.parametrize("there", ["nothing", "the folder of a run", "its lock"])
def test_a_refused_conversion_leaves_what_was_there(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_dcp(tmp_path / "source", Host().train(1).state)
    run = tmp_path / "runs" / "e" / "t"
    if there != "nothing":
        (run / "logs").mkdir(parents=True)
    if there == "its lock":
        (run / "recover.lock").touch()
    before = sorted(tmp_path.rglob("*"))
    entries = writers.dcp_entries
    monkeypatch.setattr(
        writers, "dcp_entries", lambda each: (e for e in entries(each) if "exp_avg" not in e.path)
    )
    for target, to in ((run, "generation"), (run / "a" / "b", "dcp")):
        with pytest.raises(CheckpointCorruptError, match="was not written"):
            convert(tmp_path / "source", target, to=to)
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_nothing_is_written_over_and_a_run_in_use_is_left_alone(tmp_path: Path) -> None:
    host = Host().train(1)
    save_dcp(tmp_path / "source", host.state)
    with pytest.raises(CheckpointExistsError, match="never written over"):
        convert(tmp_path / "source", tmp_path, to="areal")
    config = RecoverConfig("e", "t", str(tmp_path), freq_steps=1, async_save=False)
    with RecoverHandler(config, SPEC) as handler:
        handler.load(host.state)
        code = (
            "import sys; from holdfast_convert import convert; "
            "convert(*sys.argv[1:], to='generation')"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "source"), str(tmp_path / "e" / "t")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=stretched(60))
        assert FolderInUseError.__name__ in done.stderr
        handler.dump(host.state, 0)
    with pytest.raises(
        CheckpointExistsError,
        match=r"holds global_step_0 already; convert into the folder of a new",
    ):
        convert(tmp_path / "source", tmp_path / "e" / "t", to="generation")


def test_missing_parts_of_a_source_are_reported_and_the_run_starts_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host().train(3)
    areal, target, config_of_model = (
        tmp_path / "areal",
        tmp_path / "e" / "t",
        config_folder(tmp_path),
    )
    save_dcp(tmp_path / "ours", DCPState(host.model, host.optimizer))
    assert convert(tmp_path / "ours", areal, to="areal", config=config_of_model).lacks == {}
    done = convert(areal, target, to="generation", config=config_of_model)
    assert done.step == 2 and done.notes == [
        "step 2, by the optimizer's updates; give step= (--step) if a step makes several"
    ]
    assert list(done.lacks) == ["data", "generators", "schedule", "epochs"]
    loaded, loader = Host(5), _Loader()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    config = RecoverConfig("e", "t", str(tmp_path), freq_steps=1)
    with caplog.at_level(logging.WARNING, "holdfast"), RecoverHandler(config, SPEC) as handler:
        info = handler.load(loaded.state, loader)
        assert info is not None and info.last_step_info.steps_per_epoch == 10
        assert torch.equal(torch.get_rng_state(), before)
    for part in done.lacks:
        assert f"had no {part}: {done.lacks[part]}" in caplog.text
    assert_same(loaded.tensors(), host.tensors())


class _Loader:
    """A dataloader with a state that must not be used."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("nothing was saved of it")


def test_a_generation_of_ours_goes_to_every_format(tmp_path: Path) -> None:
    host = Host().train(2)
    config = RecoverConfig("e", "t", str(tmp_path), freq_steps=1, async_save=False)
    with RecoverHandler(config, SPEC) as handler:
        handler.load({"actor": host.state})
        handler.dump({"actor": host.state}, 6)
    saved = host.tensors()
    host.step()
    source = tmp_path / "e" / "t" / "recover" / "global_step_6"
    model = config_folder(tmp_path)
    for to in ("hf", "dcp", "areal"):
        assert (
            done := convert(source, tmp_path / to, to=to, config=model)
        ).format == "Holdfast generation"
        assert any(name.startswith("state/") for name in done.ignored)
    done = convert(source, tmp_path / "e" / "u", to="generation", config=model)
    assert done.step == 6 and list(done.lacks) == ["data"]
    loaded = Host(3)
    with RecoverHandler(RecoverConfig("e", "u", str(tmp_path), freq_steps=1), SPEC) as handler:
        handler.load({"actor": loaded.state})
        loaded.step()
    assert loaded.digest() == host.digest()
    weights = {
        f"model.{name}": tensor
        for name, tensor in load_file(tmp_path / "hf" / "model.safetensors").items()
    }
    assert_same(
        weights, {name: tensor for name, tensor in saved.items() if name.startswith("model.")}
    )
    for folder in ("dcp", "areal"):
        other = Host(3)
        load_dcp(tmp_path / folder, DCPState(other.model, other.optimizer))
        assert_same(other.tensors(), saved)


def test_fused_experts_go_from_a_model_folder_to_parameters_and_back(tmp_path: Path) -> None:
    config = tiny_experts()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "c", to="dcp")
    loaded = AutoModelForCausalLM.from_config(config)
    load_dcp(tmp_path / "c", DCPState(loaded))
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    convert(tmp_path / "c", tmp_path / "back", to="hf", config=tmp_path / "model")
    one, other = (tmp_path / name / "model.safetensors" for name in ("model", "back"))
    assert one.read_bytes() == other.read_bytes()


def _save_grid(rank: int, world_size: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(35, dtype=torch.float32).view(5, 7)
    torch.save(distribute_tensor(whole, mesh, [Shard(0), Shard(1)]), f"{folder}/{rank}.pt")


def test_shards_of_two_dims_are_put_together_and_shards_of_one_twice_are_refused(
    tmp_path: Path,
) -> None:
    run_ranks(_save_grid, 4, str(tmp_path))
    parts = [read_file(tmp_path / f"{rank}.pt") for rank in range(4)]
    tensor = from_ranks("w", parts)
    whole = torch.arange(35, dtype=torch.float32).view(5, 7)
    assert torch.equal(tensor.rows(0, 5), whole) and torch.equal(tensor.rows(2, 4), whole[2:4])
    with pytest.raises(CheckpointMismatchError, match="4 ranks; 3 ranks saved"):
        from_ranks("w", parts[:3])
    with pytest.raises(CheckpointMismatchError, match="differs by rank: flat shards"):
        from_ranks("w", [torch.zeros(2), torch.ones(2)])


PEAK = """
import resource, sys
from holdfast_convert import convert
from holdfast.engine.memory.lazy_tensor import BLOCK_BYTES
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2], to="dcp")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / BLOCK_BYTES)
"""


@pytest.mark.slow
def test_memory_is_a_few_blocks_however_large_the_source_is(tmp_path: Path) -> None:
    state = {
        f"w{number}": torch.full((8192, 8192), float(number)) for number in range(6)
    }  # 1.5 GiB
    dcp.save({"model": state}, checkpoint_id=str(tmp_path / "c"))
    del state
    command = [sys.executable, "-c", PEAK, str(tmp_path / "c"), str(tmp_path / "d")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=stretched(100))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 5  # blocks of 64 MiB, while the source has 24


def test_json_of_a_conversion_is_plain(tmp_path: Path) -> None:
    save_dcp(tmp_path / "source", Host().train(1).state)
    began = time.monotonic()
    done = convert(tmp_path / "source", tmp_path / "c", to="dcp")
    assert 0 < done.seconds <= time.monotonic() - began
    assert json.loads(json.dumps(asdict(done)))["tensors"] == done.tensors
    assert os.listdir(tmp_path / "c")
