"""Folders and configurations that make no model: one clear error on every rank, and a second try
may succeed.
"""

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import ViTConfig

from holdfast.engine import FSDPConfig, FSDPEngine, TrainEngineConfig
from holdfast.engine.config import FSDPWrapPolicy
from holdfast.utils.errors import CheckpointMismatchError, ConfigError
from tests.engine.hf_models import tiny_model
from tests.engine.model.test_initial_model import start
from tests.engine.test_fsdp_engine import SPEC
from tests.helpers import run_ranks
from tests.limits import stretched

NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown activation": ({"hidden_act": "zilu"}, "KeyError: 'zilu'"),
    "no heads": ({"num_attention_heads": 0}, "ZeroDivisionError"),
    "a negative size": ({"intermediate_size": -1}, "RuntimeError"),
    "a dtype that torch does not have": ({"dtype": "float12"}, "AttributeError"),
    "a layer type that there is not": ({"layer_types": ["sideways", "sideways"]}, ".*sideways"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_a_config_of_no_model_is_an_error_that_names_the_file(what: str, tmp_path: Path) -> None:
    changes, reason = NONSENSE[what]
    tiny_model("llama").save_pretrained(tmp_path)
    _change_config(tmp_path, changes)
    with pytest.raises(
        ConfigError, match=rf"config key 'path': .*{tmp_path}/config\.json.*: {reason}"
    ) as refusal:
        start(tmp_path)
    assert "\n" not in str(refusal.value)


def test_an_error_about_a_critics_initial_weights_names_their_folder(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    _change_config(tmp_path, {"vocab_size": 40})
    for changes in ({}, {"is_critic": True}):
        with pytest.raises(
            CheckpointMismatchError, match=rf"^{tmp_path}: (lm_head|model\.\w+)\.weight has sha"
        ):
            start(tmp_path, **changes)


def _change_config(folder: Path, changes: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _truncated(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 2000)


def _quantized(folder: Path) -> None:
    _change_config(folder, {"quantization_config": {"quant_method": "awq"}})


def _nonsense(folder: Path) -> None:
    _change_config(folder, {"hidden_act": "zilu"})


def _no_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    shutil.copytree(folder.parent / "in shards", folder, dirs_exist_ok=True)
    min(folder.glob("model-*.safetensors")).unlink()


def _other_config(folder: Path) -> None:
    ViTConfig().save_pretrained(folder)


def _fine(folder: Path) -> None:
    pass


PROBLEMS: dict[str, tuple[Callable[[Path], None], dict[str, Any], str]] = {
    "no config": (_no_config, {}, "ConfigError: config key 'path' is"),
    "no weights": (_no_weights, {}, "CheckpointNotFoundError: "),
    "a truncated file": (_truncated, {}, "CheckpointCorruptError: "),
    "a missing shard": (_no_shard, {}, "CheckpointCorruptError: "),
    "a config that describes no model": (_nonsense, {}, "ConfigError: config key 'path': "),
    "quantized weights": (_quantized, {}, "ConfigError: "),
    "no such head": (_other_config, {}, "ConfigError: config key 'path': "),
    "no such attention": (_fine, {"attn_impl": "no-such"}, "ConfigError: "),
    "no such block": (
        _fine,
        {"fsdp": FSDPConfig(wrap_policy=FSDPWrapPolicy(["NoSuchLayer"]))},
        (
            "ConfigError: config key 'fsdp.wrap_policy.transformer_layer_cls_to_wrap' names "
            "'NoSuchLayer'"
        ),
    ),
}
"""A fault on rank 1 alone, in its folder or its config, and the message of that rank."""


def _one_rank_fails(rank: int, world_size: int, root: Path) -> dict[str, str]:
    outcomes = {}
    for problem, (spoil, changes, _) in PROBLEMS.items():
        folder = root / f"{problem} {rank}"
        shutil.copytree(root / "good", folder)
        if rank == 1:
            spoil(folder)
        engine = FSDPEngine(
            TrainEngineConfig(path=str(folder), device="cpu", **(changes if rank == 1 else {}))
        )
        engine.create_process_group()
        began = time.monotonic()
        try:
            engine.initialize(None, SPEC)
        except Exception as error:
            outcomes[problem] = f"{type(error).__name__}: {error}"
        assert time.monotonic() - began < stretched(20), f"{problem}: it waited"
        shutil.copytree(
            root / "good", folder, dirs_exist_ok=True
        )  # repaired, so the same engine starts
        engine.config = TrainEngineConfig(path=str(folder), device="cpu")
        engine.initialize(None, SPEC)
        assert engine.model_folder == folder
        engine.destroy()
    return outcomes


@pytest.mark.slow
def test_a_failed_start_on_one_rank_fails_all_and_can_be_repeated(
    tmp_path: Path,
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "good")
    tiny_model("llama").save_pretrained(tmp_path / "in shards", max_shard_size="2KB")
    first, second = run_ranks(_one_rank_fails, 2, tmp_path, timeout_s=60)
    for problem, (*_, message) in PROBLEMS.items():
        assert second[problem].startswith(message), problem
        assert first[problem].startswith("PeerError: "), problem
        assert f"rank 1: {message}" in first[problem], problem


def _start_at_a_port_in_use(rank: int, world_size: int, port: int) -> None:
    dist.destroy_process_group()
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    with pytest.raises(
        ConfigError, match=rf"rank 0 cannot listen at 127\.0\.0\.1:{port} .*; choose a free one"
    ):
        FSDPEngine(TrainEngineConfig(path="x")).create_process_group()


def test_a_port_that_another_job_has_is_named_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other_job:
        run_ranks(_start_at_a_port_in_use, 1, other_job.getsockname()[1])
