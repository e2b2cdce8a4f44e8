"""Malicious Hugging Face folders: code next to, inside or instead of the weights. None runs, and
errors name each.
"""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from holdfast.engine import TrainEngineConfig
from holdfast.engine.hf.load import load_hf
from holdfast.engine.training.model import build_on_meta
from holdfast.utils.errors import ConfigError, HoldfastError
from tests.engine.models import build_reference, tiny_qwen3, write_model_folder
from tests.faults.generations import time_limit
from tests.faults.payloads import Call, payload_streams
from tests.faults.tally import Tally

pytestmark = pytest.mark.timeout(120)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
KIND = "malicious Hugging Face folder"


def _header(entries: object) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def _index(folder: Path, weight_map: object) -> None:
    (folder / WEIGHTS).rename(folder.parent / "outside.safetensors")
    text = (
        weight_map
        if isinstance(weight_map, bytes)
        else json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (folder / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())


def _pickle(marker: Path) -> bytes:
    return payload_streams(marker)["os.system"]


Attack = Callable[[Path, Path], object]
HUGE = {"model.norm.weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
NEGATIVE = {"model.norm.weight": {"dtype": "F32", "shape": [-1, -32], "data_offsets": [0, 128]}}
ENDLESS = {
    "model.norm.weight": {"dtype": "F32", "shape": [1 << 40, 1 << 40, 0], "data_offsets": [0, 0]}
}

REFUSED: dict[str, tuple[Attack, str]] = {
    "a pickle as safetensors": (
        lambda folder, marker: (folder / WEIGHTS).write_bytes(_pickle(marker)),
        WEIGHTS,
    ),
    "a torch file as safetensors": (
        lambda folder, marker: torch.save(
            {"a": Call(os.system, f"touch {marker}")}, folder / WEIGHTS
        ),
        WEIGHTS,
    ),
    "pytorch_model.bin instead of safetensors": (
        lambda folder, marker: (folder / WEIGHTS).rename(folder / "x") and _bin(folder, marker),
        "pytorch_model.bin",
    ),
    "an index that points outside": (
        lambda folder, _: _index(folder, {"model.norm.weight": "../outside.safetensors"}),
        "outside.safetensors",
    ),
    "an index with an absolute path": (
        lambda folder, _: _index(
            folder, {"model.norm.weight": str(folder.parent / "outside.safetensors")}
        ),
        "outside.safetensors",
    ),
    "an index that names a pickle": (
        lambda folder, marker: (
            _index(folder, {"model.norm.weight": "pytorch_model.bin"}) or _bin(folder, marker)  # type: ignore[func-returns-value]
        ),
        "pytorch_model.bin",
    ),
    "an index nested deeply": (lambda folder, _: _index(folder, b"[" * 100_000), INDEX),
    "a header nested deeply": (
        lambda folder, _: (folder / WEIGHTS).write_bytes(_header(b"[" * 100_000)),
        WEIGHTS,
    ),
    "a header longer than the file": (
        lambda folder, _: (folder / WEIGHTS).write_bytes((1 << 62).to_bytes(8, "little") + b"{}"),
        WEIGHTS,
    ),
    "a tensor larger than the file": (
        lambda folder, _: (folder / WEIGHTS).write_bytes(_header(HUGE)),
        WEIGHTS,
    ),
    "a negative shape": (
        lambda folder, _: (folder / WEIGHTS).write_bytes(_header(NEGATIVE) + bytes(128)),
        "model.norm.weight",
    ),
    "a shape of which no tensor can be": (
        lambda folder, _: (folder / WEIGHTS).write_bytes(_header(ENDLESS)),
        "model.norm.weight",
    ),
}


def _bin(folder: Path, marker: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(_pickle(marker))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "sound"
    write_model_folder(folder, tiny_qwen3())
    return folder


def _values(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("attack", REFUSED)
def test_weights_that_are_not_weights_are_refused_and_change_nothing(
    attack: str, sound: Path, tmp_path: Path, tally: Tally
) -> None:
    folder, marker = tmp_path / "model", tmp_path / "marker"
    shutil.copytree(sound, folder)
    plant, named = REFUSED[attack]
    plant(folder, marker)
    model = build_reference(tiny_qwen3(), seed=3)
    before = _values(model)
    with time_limit(20), pytest.raises(HoldfastError, match=named):
        load_hf(model, folder)
    tally.add(KIND, injected=1, survived=int(not marker.exists()), executed=int(marker.exists()))
    assert not marker.exists() and _same(before, _values(model))


def test_a_pickle_beside_the_weights_is_not_read(sound: Path, tmp_path: Path, tally: Tally) -> None:
    folder, marker = tmp_path / "model", tmp_path / "marker"
    shutil.copytree(sound, folder)
    _bin(folder, marker)
    (folder / "pytorch_model.bin.index.json").write_text(
        '{"weight_map": {"a": "pytorch_model.bin"}}'
    )
    model = build_reference(tiny_qwen3(), seed=3)
    load_hf(model, folder)
    assert not marker.exists() and _same(
        _values(model), _values(build_reference(tiny_qwen3(), seed=0))
    )
    tally.add(KIND, injected=1, survived=1)
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert marker.exists(), "the attack is not alive"


@pytest.mark.parametrize("model_type", ["qwen3", "evil"])
def test_code_in_a_model_folder_is_not_imported_even_if_the_user_agrees(
    model_type: str, sound: Path, tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without trust_remote_code=False, transformers asks on the terminal whether to trust the
    folder.
    """
    folder, marker = tmp_path / "model", tmp_path / "marker"
    shutil.copytree(sound, folder)
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    (folder / "config.json").write_text(
        json.dumps(config | {"auto_map": auto_map, "model_type": model_type})
    )
    (folder / "evil.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import Qwen3Config as EvilConfig, Qwen3ForCausalLM as EvilModel\n"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    said = "nothing"
    try:
        build_on_meta(TrainEngineConfig(path=str(folder)))
    except ConfigError as error:
        said = str(error)
    tally.add(KIND, injected=1, survived=int(not marker.exists()), executed=int(marker.exists()))
    assert not marker.exists()
    assert ("config.json cannot be used" in said) == (model_type == "evil"), said
