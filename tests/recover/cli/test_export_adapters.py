"""``holdfast export`` of generations with adapters: merged into their base, or as a PEFT folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM

from holdfast.engine import SaveLoadMeta
from tests.engine.hf.test_export import _contents
from tests.engine.hf_models import tiny_model
from tests.engine.lora.engines import lora_engine, train, write_base
from tests.helpers import run_ranks
from tests.once import make_once
from tests.recover.cli.commands import answer, holdfast
from tests.recover.runs import make_handler, step_info
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(120)


def _train(rank: int, world_size: int, root: str) -> None:
    torch.set_num_threads(1)
    engine = lora_engine(Path(root) / "base")
    with make_handler(root, freq_steps=1, hf_freq_steps=1) as handler:
        handler.load(engine)
        for step in range(2):
            train(engine, 1)
            handler.dump(engine, step_info(step))
            engine.save(SaveLoadMeta(f"{root}/peft_{step}", "peft", False))
    engine.destroy()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that trains adapters of ``base``, with an export of each form after every
    step.
    """

    def make(root: Path) -> Path:
        write_base(root / "base")
        write_base(root / "other", seed=1)
        run_ranks(_train, 2, str(root))
        return root

    return make_once(tmp_path_factory, "adapters", make)


@pytest.mark.parametrize("step", slow_but([1], [0, 1]))
def test_merged_exports_have_the_bytes_that_the_run_itself_exported(
    root: Path, tmp_path: Path, step: int
) -> None:
    done = answer("export", f"{root / 'e/t'}@{step}", "--to", tmp_path / "merged")
    assert done["files"] == len(_contents(tmp_path / "merged"))
    assert _contents(tmp_path / "merged") == _contents(root / f"e/t/hf/global_step_{step}")
    assert (
        answer("export", f"{root / 'e/t'}@{step}", "--to", tmp_path / "wide", "--dtype", "float32")[
            "files"
        ]
        > 1
    )
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(root / "base").float(), root / f"peft_{step}"
    )
    expected = model.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "wide").state_dict()
    torch.testing.assert_close(found, dict(expected), rtol=0, atol=1e-6)


def test_exported_peft_folders_equal_the_adapters_and_config_that_the_run_saves(
    root: Path, tmp_path: Path
) -> None:
    answer("export", f"{root / 'e/t'}@1", "--to", tmp_path / "peft", "--adapters", "peft")
    name = "adapter_model.safetensors"
    assert (tmp_path / "peft" / name).read_bytes() == (root / "peft_1" / name).read_bytes()
    own, theirs = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (tmp_path / "peft", root / "peft_1")
    )
    assert (
        sorted(own.pop("target_modules")) == sorted(theirs.pop("target_modules")) and own == theirs
    )
    PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(root / "base"), tmp_path / "peft"
    )
    answer(
        "export",
        f"{root / 'e/t'}@1",
        "--to",
        tmp_path / "half",
        "--adapters",
        "peft",
        "--dtype",
        "bfloat16",
    )
    assert {tensor.dtype for tensor in load_file(tmp_path / "half" / name).values()} == {
        torch.bfloat16
    }


def test_no_other_base_is_taken_and_one_that_has_moved_is_named(root: Path, tmp_path: Path) -> None:
    code, _, err = holdfast(
        "export", f"{root / 'e/t'}@1", "--to", tmp_path / "x", "--base", root / "other"
    )
    assert code == 2 and "was trained on another base than" in err and not (tmp_path / "x").exists()
    edited = Path(shutil.copytree(root / "base", tmp_path / "edited"))
    weights = load_file(edited / "model.safetensors")
    weights["model.embed_tokens.weight"].view(-1)[1] += 1e-3  # not in the sample
    save_file(weights, edited / "model.safetensors", {"format": "pt"})
    code, _, err = holdfast("export", f"{root / 'e/t'}@1", "--to", tmp_path / "x", "--base", edited)
    assert code == 2 and "was trained on another base than" in err and not (tmp_path / "x").exists()
    moved = Path(shutil.copytree(root / "base", tmp_path / "moved"))
    shutil.copytree(root / "e/t", tmp_path / "e/t")
    code, _, err = holdfast(
        "export", f"{tmp_path / 'e/t'}@1", "--to", tmp_path / "y", "--base", moved
    )
    assert code == 0, err
    assert _contents(tmp_path / "y") == _contents(root / "e/t/hf/global_step_1")
    for option in (("--config", moved), ("--base", moved)):
        code, _, err = holdfast(
            "export", f"{root / 'e/t'}@1", "--to", tmp_path / "z", "--adapters", "peft", *option
        )
        assert code == 2 and "are of merged weights" in err


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_generation_of_a_peft_model_is_exported_once_its_base_is_named(
    root: Path, tmp_path: Path, wrapped: bool
) -> None:
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32),
        LoraConfig(r=2, use_rslora=True, target_modules=["q_proj", "up_proj"]),
    )
    if wrapped:
        blocks: Any = model.get_submodule("base_model.model.model.layers")
        for number in range(len(blocks)):
            blocks[number] = checkpoint_wrapper(blocks[number])
    optimizer = torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad], lr=0.1
    )
    with make_handler(tmp_path, freq_steps=1, hf_freq_steps=1) as handler:
        handler.load((model, optimizer))
        ids = torch.tensor([[1, 2, 3, 4]])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        handler.dump((model, optimizer), step_info(0))
    generation, weights = f"{tmp_path / 'e/t'}@0", "model.safetensors"
    answer("export", generation, "--to", tmp_path / "merged", "--dtype", "float32")
    run, ours = (
        load_file(folder / weights)
        for folder in (tmp_path / "e/t/hf/global_step_0", tmp_path / "merged")
    )
    assert run.keys() == ours.keys() and all(torch.equal(run[name], ours[name]) for name in run)
    answer("export", generation, "--to", tmp_path / "peft", "--adapters", "peft")
    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32), tmp_path / "peft"
    )
    assert torch.equal(again(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_an_adapter_on_a_tied_weight_is_exported_alone_and_not_merged(tmp_path: Path) -> None:
    tiny_model("qwen3_tied").save_pretrained(tmp_path / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32),
        LoraConfig(r=2, target_modules=["lm_head"]),
    )
    optimizer = torch.optim.AdamW(param for param in model.parameters() if param.requires_grad)
    with make_handler(tmp_path, freq_steps=1) as handler:
        handler.load((model, optimizer))
        handler.dump((model, optimizer), step_info(0))
    generation = f"{tmp_path / 'e/t'}@0"
    code, _, err = holdfast("export", generation, "--to", tmp_path / "merged")
    assert code == 2 and "has an adapter of lm_head, whose weight is tied to another one" in err
    assert not (tmp_path / "merged").exists()
    answer("export", generation, "--to", tmp_path / "peft", "--adapters", "peft")


def test_the_named_one_of_several_engines_is_exported(root: Path, tmp_path: Path) -> None:
    def model_of(name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32)

    engines: dict[str, Any] = {
        "actor": get_peft_model(model_of("base"), LoraConfig(r=2, target_modules=["q_proj"])),
        "judge": get_peft_model(model_of("other"), LoraConfig(r=2, target_modules=["up_proj"])),
        "plain": model_of("other"),
    }
    optimizers = {
        name: torch.optim.AdamW(p for p in one.parameters() if p.requires_grad)
        for name, one in engines.items()
    }
    job = {name: (model, optimizers[name]) for name, model in engines.items()}
    with make_handler(tmp_path, freq_steps=1) as handler:
        handler.load(job)
        handler.dump(job, step_info(0))
    generation = f"{tmp_path / 'e/t'}@0"
    for name, given in {
        "actor": ("--base", root / "base"),
        "judge": ("--base", root / "other"),
        "plain": ("--config", root / "other"),
    }.items():
        answer("export", generation, "--to", tmp_path / name, "--engine", name, *given)
        expected = AutoModelForCausalLM.from_pretrained(root / given[1].name).state_dict()
        torch.testing.assert_close(
            dict(AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()),
            dict(expected),
            rtol=0,
            atol=1e-6,
        )


@pytest.mark.slow
def test_a_generation_of_all_weights_has_no_adapters(finished: Path, tmp_path: Path) -> None:
    code, _, err = holdfast("export", f"{finished}@7", "--to", tmp_path / "x", "--adapters", "peft")
    assert code == 2 and "holds all weights, no adapters" in err and not (tmp_path / "x").exists()
