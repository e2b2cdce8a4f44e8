"""Exports and published weights keep the dtype and the additional files of the engine's base
folder.
"""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from holdfast.engine import FSDPEngine, SaveLoadMeta, WeightUpdateMeta, save_hf
from holdfast.engine.api import export_dtype
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.hf.dtypes import own_dtypes
from holdfast.engine.hf.sidecars import adopt_base
from holdfast.engine.lora.adapters import plain_view, transformers_model
from holdfast.engine.memory.per_model import attached
from holdfast.engine.training.unsharded import original_of, unsharded_view
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.utils.errors import PeerError
from holdfast.utils.rng import capture_rng
from tests.engine.architectures.tiny import tiny_config
from tests.engine.hf.test_export import _contents as contents
from tests.engine.hf.test_export import _tokenizer
from tests.engine.hf_models import tiny_model
from tests.engine.models import tiny_qwen3
from tests.engine.shelf import shelf_url
from tests.helpers import run_ranks
from tests.once import make_once
from tests.recover.runs import SPEC, make_engine, step_info

GENERATION = {
    "do_sample": True,
    "temperature": 0.6,
    "eos_token_id": [2, 3],
    "bos_token_id": 1,
    "pad_token_id": 0,
}
REFUSED = {"num_return_sequences": 3, "eos_token_id": [2, 3], "made_by": "somebody"}
"""Transformers does not read this file again: several sequences without sampling."""

UNUSED = {"temperature": 0.6, "eos_token_id": [2, 3]}
"""Transformers reads this file, and writes it again only if nothing changes: a temperature without
sampling.
"""

SIDECARS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "modeling_own.py",
    "additional_chat_templates/tools.jinja",
)
WAYS = ("saved", "save_hf", "in_background", "at_url", "published", "recovered")
BASES = {
    "bfloat16": ("qwen3", "bfloat16", None),
    "no_dtype": ("qwen3", "bfloat16", None),
    "bias": ("deepseek_v32", "bfloat16", None),
    "bias_float16": ("deepseek_v32", "float16", None),
    "bias_asked": ("deepseek_v32", "float32", "bfloat16"),
    "router": ("ernie4_5_moe", "bfloat16", None),
    "router_asked": ("hunyuan_v1_moe", "float32", "bfloat16"),
}
"""Architecture and dtype of the folder, and dtype of the export.

In both 16-bit dtypes the router's bias of ``deepseek_v32`` stays float32
(``_keep_in_fp32_modules_strict``). In float16 its indexer does too (``_keep_in_fp32_modules``), and
so do the routers of ``ernie4_5_moe`` and of ``hunyuan_v1_moe`` (in its code).
"""


def write_base(folder: Path, name: str) -> None:
    """A folder like those on a hub."""
    model_type, dtype, _ = BASES[name]
    torch.manual_seed(0)
    config = tiny_qwen3() if model_type == "qwen3" else tiny_config(model_type)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.normal_()  # including a router's bias
    model.save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).save_pretrained(
        folder
    )
    _tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "preprocessor_config.json").write_text("{}")
    (folder / "modeling_own.py").write_text("# code that came with the model\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    if name == "no_dtype":
        written = json.loads((folder / "config.json").read_text())
        del written["dtype"]
        (folder / "config.json").write_text(json.dumps(written))


def _export_every_way(rank: int, world_size: int, root: Path) -> None:
    for name, (_, _, asked) in BASES.items():
        engine = make_engine(str(root / "base" / name), pack_sequences=False)
        _export(engine, root / name / "default", asked)
        if name == "bias_float16":
            _export(engine, root / name / "float32", "float32")
        engine.destroy()


def _export(engine: FSDPEngine, out: Path, dtype: str | None) -> None:
    base = engine.config.path
    for path in (out / "saved", out / "in_background", shelf_url(out / "at_url")):
        meta = SaveLoadMeta(str(path), "hf", False, base_model_path=base, dtype=dtype)
        engine.save(meta, blocking=path != out / "in_background")
    engine.wait_for_save()
    found = export_dtype(dtype, engine.base_dtype)
    save_hf(
        engine.model, out / "save_hf", group=engine.control_group, dtype=found, base_model_path=base
    )
    engine.update_weights(WeightUpdateMeta("disk", str(out / "weights"), version=1, dtype=dtype))
    config = RecoverConfig(fileroot=str(out), hf_freq_steps=1, hf_dtype=dtype)
    with RecoverHandler(config, SPEC) as handler:
        handler.load(engine)
        handler.dump(engine, step_info(0))


def _folder_of(root: Path, name: str, way: str, dtype: str = "default") -> Path:
    folders = {"published": "weights/v00000001", "recovered": "experiment/trial/hf/global_step_0"}
    return root / name / dtype / folders.get(way, way)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> Path:
        for name in BASES:
            write_base(folder / "base" / name, name)
        run_ranks(_export_every_way, 2, folder)
        return folder

    return make_once(tmp_path_factory, "bases", make)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BASES)
def test_an_export_has_the_bytes_of_from_pretrained_then_save_pretrained(
    root: Path, tmp_path: Path, name: str, way: str
) -> None:
    _, dtype, asked = BASES[name]
    AutoModelForCausalLM.from_pretrained(
        root / "base" / name, dtype=asked or "auto"
    ).save_pretrained(tmp_path)
    expected, found = contents(tmp_path), _folder_of(root, name, way)
    assert {file: (found / file).read_bytes() for file in expected} == expected
    assert json.loads((found / "config.json").read_text())["dtype"] == (asked or dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("bias", ["e_score_correction_bias"]),
        ("bias_asked", ["e_score_correction_bias"]),
        ("bias_float16", ["e_score_correction_bias", "indexer.weights_proj"]),
        ("router", ["gate.weight", "moe_statics"]),
        ("router_asked", ["mlp.gate.wg.weight"]),
    ],
)
def test_tensors_that_transformers_keeps_in_float32_stay_so_in_a_half_precision_export(
    root: Path, name: str, kept: list[str]
) -> None:
    _, dtype, asked = BASES[name]
    for key, tensor in load_file(_folder_of(root, name, "published") / "model.safetensors").items():
        own = torch.float32 if any(part in key for part in kept) else getattr(torch, asked or dtype)
        assert tensor.dtype == own, key


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_float32_can_be_asked_for_wherever_weights_are_written(
    root: Path, tmp_path: Path, way: str
) -> None:
    base, found = root / "base" / "bias_float16", _folder_of(root, "bias_float16", way, "float32")
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).save_pretrained(tmp_path)
    assert {file: (found / file).read_bytes() for file in contents(tmp_path)} == contents(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_sidecar_files_of_the_base_come_along(root: Path, way: str) -> None:
    found = _folder_of(root, "bfloat16", way)
    for name in SIDECARS:
        assert (found / name).read_bytes() == (root / "base" / "bfloat16" / name).read_bytes()
    assert not (found / "original").exists(), (
        "the weights in another format, and what belongs to them"
    )


ODD_GENERATIONS = {
    "none": None,
    "refused": REFUSED,
    "odd": {"watermarking_config": 3},
    "broken": "{",
}


def _export_generation_configs(rank: int, world_size: int, root: Path) -> None:
    for name in ODD_GENERATIONS:
        engine = make_engine(str(root / name / "base"))
        _export(engine, root / name / "default", None)
        engine.model.generation_config.max_length = 7  # type: ignore[union-attr]
        engine.save(SaveLoadMeta(str(root / name / "changed"), "hf", False))
        engine.destroy()


@pytest.mark.slow
def test_generation_config_is_the_bases_or_transformers_own_and_never_fails_exports(
    tmp_path: Path,
) -> None:
    for name, odd in ODD_GENERATIONS.items():
        base = tmp_path / name / "base"
        write_base(base, "bfloat16")
        (base / "generation_config.json").unlink()
        if odd is not None:
            (base / "generation_config.json").write_text(
                odd if isinstance(odd, str) else json.dumps(odd)
            )
    AutoModelForCausalLM.from_pretrained(tmp_path / "none" / "base").save_pretrained(
        tmp_path / "expected"
    )
    run_ranks(_export_generation_configs, 1, tmp_path)
    for name, odd in ODD_GENERATIONS.items():
        written = (
            tmp_path / ("expected" if odd is None else f"{name}/base") / "generation_config.json"
        )
        for way in WAYS:
            found = _folder_of(tmp_path, name, way) / "generation_config.json"
            assert found.read_bytes() == written.read_bytes(), (name, way)
        changed = json.loads((tmp_path / name / "changed" / "generation_config.json").read_text())
        assert changed["max_length"] == 7, "what is set on the model goes before what was read"


def test_a_generation_config_that_became_invalid_does_not_fail_an_export(tmp_path: Path) -> None:
    write_base(tmp_path / "base", "bfloat16")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(UNUSED))
    engine = make_engine(str(tmp_path / "base"))
    assert engine.model.generation_config is not None
    engine.model.generation_config.pad_token_id = 1  # as many scripts do
    _export(engine, tmp_path / "default", None)
    engine.destroy()
    for way in WAYS:
        written = json.loads((_folder_of(tmp_path, "", way) / "generation_config.json").read_text())
        wanted = UNUSED | {"pad_token_id": 1}
        assert {key: written.get(key) for key in wanted} == wanted, way


def _read_generation_configs(rank: int, world_size: int, root: Path) -> None:
    model, expected = (
        AutoModelForCausalLM.from_config(tiny_qwen3()),
        PeerError if rank == 0 else OSError,
    )
    with pytest.raises(expected, match=r"Input/output error: '.*rank1/generation_config\.json'"):
        adopt_base(model, root / f"rank{rank}")


def test_a_generation_config_unreadable_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    for rank in range(2):
        write_base(tmp_path / f"rank{rank}", "bfloat16")
    (tmp_path / "rank1" / "generation_config.json").unlink()
    # a file whose first page cannot be read
    (tmp_path / "rank1" / "generation_config.json").symlink_to("/proc/self/mem")
    run_ranks(_read_generation_configs, 2, tmp_path)


def test_an_export_of_a_bare_model_keeps_every_dtype_as_it_is(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(
        tiny_config("glm4_moe"), dtype=torch.float32
    ).bfloat16()
    model.save_pretrained(tmp_path / "expected")
    save_hf(model, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_a_model_is_asked_for_dtypes_once_and_nothing_random_is_drawn(
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
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    exported = load_file(tmp_path / "experiment/trial/hf/global_step_2/model.safetensors")
    assert {str(tensor.dtype) for tensor in exported.values()} == {
        "torch.bfloat16",
        "torch.float32",
    }


def test_state_of_a_model_is_found_through_its_views_and_through_peft() -> None:
    model: Any = tiny_model("llama")
    adapted: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    view = unsharded_view(unsharded_view(adapted))
    assert original_of(transformers_model(view)) is model
    assert original_of(plain_view(adapted)) is model
    assert original_of(model) is model
    own_dtypes(plain_view(adapted))
    assert attached(model)["twin_dtypes"].keys() == plain_view(adapted).state_dict().keys()
