"""What exports and published weights have of the folder that the engine's model was made from: dtype, sidecar files."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from holdfast.engine import SaveLoadMeta, WeightUpdateMeta, save_hf
from holdfast.engine.dcp_state import DCPState
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.utils.rng import capture_rng
from tests.engine.architectures.tiny import tiny_config
from tests.engine.models import tiny_qwen3
from tests.engine.shelf import shelf_url
from tests.engine.test_hf_checkpoint import _contents as contents
from tests.engine.test_hf_checkpoint import _tokenizer
from tests.helpers import run_ranks
from tests.recover.runs import SPEC, make_engine, step_info

GENERATION = {"do_sample": True, "temperature": 0.6, "eos_token_id": [2, 3], "bos_token_id": 1, "pad_token_id": 0}
REFUSED = {"num_return_sequences": 3, "eos_token_id": [2, 3], "made_by": "somebody"}
"""Transformers does not read this again: several sequences without sampling."""

SIDECARS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json")
WAYS = ("saved", "in_background", "at_url", "published", "recovered")
BASES = ("bfloat16", "no_dtype", "float16_moe")


def write_base(folder: Path, name: str) -> None:
    """A folder as it comes from a hub."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        tiny_config("glm4_moe") if name == "float16_moe" else tiny_qwen3(), dtype=torch.float32
    )
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.normal_()  # a router's bias too
    model.save_pretrained(folder)
    dtype = torch.float16 if name == "float16_moe" else torch.bfloat16
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "preprocessor_config.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    if name == "no_dtype":
        config = json.loads((folder / "config.json").read_text())
        del config["dtype"]
        (folder / "config.json").write_text(json.dumps(config))


def _export_every_way(rank: int, world_size: int, root: Path) -> None:
    for name in BASES:
        engine, out = make_engine(str(root / "base" / name), pack_sequences=False), root / name
        _save(engine, out / "saved")
        _save(engine, out / "in_background", blocking=False)
        engine.wait_for_save()
        _save(engine, shelf_url(out / "at_url"))
        _save(engine, out / "float32", dtype="float32")
        engine.update_weights(WeightUpdateMeta("disk", str(out / "weights"), version=1))
        engine.update_weights(WeightUpdateMeta("disk", str(out / "weights"), version=2, dtype="float32"))
        for dtype in (None, "float32"):
            config = RecoverConfig(trial_name=str(dtype), fileroot=str(out), hf_freq_steps=1, hf_dtype=dtype)
            with RecoverHandler(config, SPEC) as handler:
                handler.load(engine)
                handler.dump(engine, step_info(0))
        engine.destroy()


def _save(engine: Any, path: Path | str, blocking: bool = True, **options: Any) -> None:
    base = engine.config.path
    engine.save(SaveLoadMeta(str(path), "hf", False, base_model_path=base, **options), blocking=blocking)


def _folder_of(root: Path, name: str, way: str) -> Path:
    folders = {"published": "weights/v00000001", "recovered": "experiment/None/hf/global_step_0"}
    return root / name / folders.get(way, way)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for name in BASES:
        write_base(folder / "base" / name, name)
    run_ranks(_export_every_way, 2, folder)
    return folder


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BASES)
def test_an_export_has_the_bytes_that_save_pretrained_gives_of_the_base_as_from_pretrained_loads_it(
    root: Path, tmp_path: Path, name: str, way: str
) -> None:
    AutoModelForCausalLM.from_pretrained(root / "base" / name).save_pretrained(tmp_path)
    expected, found = contents(tmp_path), _folder_of(root, name, way)
    assert {file: (found / file).read_bytes() for file in expected} == expected
    dtype = json.loads((found / "config.json").read_text())["dtype"]
    assert dtype == {"float16_moe": "float16"}.get(name, "bfloat16")


def test_what_transformers_keeps_in_float32_is_float32_in_a_half_precision_export(root: Path) -> None:
    weights = load_file(_folder_of(root, "float16_moe", "published") / "model.safetensors")
    dtypes = {key: tensor.dtype for key, tensor in weights.items()}
    assert dtypes.pop("model.layers.1.mlp.gate.e_score_correction_bias") == torch.float32
    assert set(dtypes.values()) == {torch.float16}


@pytest.mark.parametrize("folder", ["float32", "weights/v00000002", "experiment/float32/hf/global_step_0"])
def test_float32_can_be_asked_for_wherever_weights_are_written(root: Path, tmp_path: Path, folder: str) -> None:
    base, found = root / "base" / "float16_moe", root / "float16_moe" / folder
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).save_pretrained(tmp_path)
    assert {file: (found / file).read_bytes() for file in contents(tmp_path)} == contents(tmp_path)


@pytest.mark.parametrize("way", WAYS)
def test_sidecar_files_of_the_base_come_along(root: Path, way: str) -> None:
    found = _folder_of(root, "bfloat16", way)
    for name in (*SIDECARS, "additional_chat_templates/tools.jinja"):
        assert (found / name).read_bytes() == (root / "base" / "bfloat16" / name).read_bytes()
    assert not (found / "original").exists(), "the weights in another format, and what belongs to them"


def _export_generation_configs(rank: int, world_size: int, root: Path) -> None:
    for name in ("none", "refused", "broken"):
        engine = make_engine(str(root / name / "base"))
        engine.save(SaveLoadMeta(str(root / name / "saved"), "hf", False))
        engine.save(SaveLoadMeta(str(root / name / "in_background"), "hf", False), blocking=False)
        engine.update_weights(WeightUpdateMeta("disk", str(root / name / "weights"), version=1))
        engine.model.generation_config.max_length = 7  # type: ignore[union-attr]
        engine.save(SaveLoadMeta(str(root / name / "changed"), "hf", False))
        engine.destroy()


def test_generation_config_is_the_bases_or_what_transformers_makes_up_and_never_fails_an_export(tmp_path: Path) -> None:
    for name, text in {"none": None, "refused": json.dumps(REFUSED), "broken": "{"}.items():
        base = tmp_path / name / "base"
        write_base(base, "bfloat16")
        (base / "generation_config.json").unlink()
        if text is not None:
            (base / "generation_config.json").write_text(text)
    AutoModelForCausalLM.from_pretrained(tmp_path / "none" / "base").save_pretrained(tmp_path / "expected")
    made_up = (tmp_path / "expected" / "generation_config.json").read_bytes()
    run_ranks(_export_generation_configs, 1, tmp_path)
    for name, expected in {"none": made_up, "refused": json.dumps(REFUSED).encode(), "broken": b"{"}.items():
        for way in ("saved", "in_background", "weights/v00000001"):
            assert (tmp_path / name / way / "generation_config.json").read_bytes() == expected, (name, way)
        changed = json.loads((tmp_path / name / "changed" / "generation_config.json").read_text())
        assert changed["max_length"] == 7, "what is set on the model goes before what was read"


def test_an_export_of_a_bare_model_keeps_every_dtype_as_it_is(tmp_path: Path) -> None:

    model = AutoModelForCausalLM.from_config(tiny_config("glm4_moe"), dtype=torch.float32).bfloat16()
    model.save_pretrained(tmp_path / "expected")
    save_hf(model, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_a_model_is_asked_for_its_own_dtypes_once_by_the_caller_and_nothing_random_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("glm4_moe"), dtype=torch.float32)
    before, threads = capture_rng(), []
    build = PreTrainedModel._from_config.__func__  # type: ignore[attr-defined]

    def built(cls: type, *args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        return build(cls, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "_from_config", classmethod(built))
    config = RecoverConfig(fileroot=str(tmp_path), hf_freq_steps=1, hf_dtype="bfloat16")
    state = DCPState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with RecoverHandler(config, SPEC) as handler:
        handler.load(state)
        for step in range(3):
            handler.dump(state, step_info(step))
    assert threads == [threading.main_thread()], "it changes torch's default dtype, for all threads"
    assert torch.get_default_dtype() == torch.float32
    after = capture_rng()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    exported = load_file(tmp_path / "experiment/trial/hf/global_step_2/model.safetensors")
    assert {str(tensor.dtype) for tensor in exported.values()} == {"torch.bfloat16", "torch.float32"}
