"""Exports of models with adapters through the handler, merged or as PEFT folders, from engines and
from PeftModels.
"""

import copy
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from holdfast.engine import SaveLoadMeta
from holdfast.engine.staging import staged_model
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.recover.saving import exports
from holdfast.utils.errors import CheckpointWriteError, ConfigError
from tests.engine.hf.test_export import _contents, _tokenizer
from tests.engine.lora.engines import lora_engine, train, write_base
from tests.engine.models import build_reference, tiny_qwen3
from tests.helpers import run_ranks
from tests.limits import stretched
from tests.recover.runs import SPEC, step_info

pytestmark = pytest.mark.timeout(100)

FORMS = ("merged", "peft")
PEFT_FILES = {"adapter_config.json", "adapter_model.safetensors"}


def handler(root: Path, adapters: str, **options: Any) -> RecoverHandler:
    keys = {
        "fileroot": str(root),
        "trial_name": adapters,
        "hf_freq_steps": 1,
        "hf_adapters": adapters,
    } | options
    sidecars = {"tokenizer": keys.pop("tokenizer", None)}
    return RecoverHandler(RecoverConfig("e", **keys), SPEC, **sidecars)


def export(root: Path, adapters: str, step: int) -> Path:
    return root / f"e/{adapters}/hf/global_step_{step}"


def peft_model(**options: Any) -> PeftModel:
    keys = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **options}
    torch.manual_seed(3)
    model = get_peft_model(build_reference(tiny_qwen3()), LoraConfig(**keys))
    assert isinstance(model, PeftModel)
    return model


class Host:
    """A loop outside of Holdfast over a ``PeftModel``, which gives the handler its model and
    optimizer.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(
            [param for param in model.parameters() if param.requires_grad], lr=0.05
        )

    @property
    def engine(self) -> tuple[Any, torch.optim.Optimizer]:
        return self.model, self.optimizer

    def step(self, step: int) -> None:
        ids = torch.full((1, 4), step % 15)
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[3, 1, 4, 1, 5]])).logits


def loaded(folder: Path) -> Any:
    """Load an export of either form as its users do."""
    if (folder / "config.json").exists():
        return AutoModelForCausalLM.from_pretrained(folder)
    return PeftModel.from_pretrained(build_reference(tiny_qwen3()), str(folder))


@pytest.mark.parametrize("async_save", [True, False], ids=["in the background", "blocking"])
def test_a_peft_model_is_exported_in_both_forms_as_it_was_while_it_trains_on(
    tmp_path: Path, async_save: bool
) -> None:
    for form in FORMS:
        host, then = Host(peft_model()), []
        with handler(
            tmp_path, form, freq_steps=2, async_save=async_save, tokenizer=_tokenizer()
        ) as run:
            assert run.load(host.engine) is None
            for step in range(3):
                host.step(step)
                run.dump(host.engine, step_info(step))
                then.append(copy.deepcopy(host.model))
        for step, model in enumerate(then):
            found = export(tmp_path, form, step)
            if form == "merged":
                model.merge_and_unload().save_pretrained(tmp_path / f"theirs_{async_save}_{step}")
                expected = (
                    tmp_path / f"theirs_{async_save}_{step}" / "model.safetensors"
                ).read_bytes()
                assert (found / "model.safetensors").read_bytes() == expected
            else:
                assert set(_contents(found)) >= {
                    *PEFT_FILES,
                    "tokenizer.json",
                } and "config.json" not in _contents(found)
                assert torch.equal(logits(loaded(found)), logits(model))
        assert not torch.equal(
            logits(loaded(export(tmp_path, form, 0))), logits(loaded(export(tmp_path, form, 2)))
        )


def host_on_base(folder: Path) -> Host:
    """A host with adapters on a base in ``folder``."""
    build_reference(tiny_qwen3()).save_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder)
    return Host(get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])))


def test_a_trainer_may_merge_its_adapters_while_their_export_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_on_base(tmp_path / "base")
    merged, write = threading.Event(), exports.write_hf

    def held(*args: Any, **kwargs: Any) -> None:
        assert merged.wait(stretched(30))
        write(*args, **kwargs)

    monkeypatch.setattr(exports, "write_hf", held)
    with handler(tmp_path, "merged", freq_steps=2) as run:
        run.load(host.engine)
        for step in range(2):
            host.step(step)
        expected = copy.deepcopy(host.model).merge_and_unload()
        run.dump(host.engine, step_info(1))
        host.model.merge_adapter()  # as TRL does before each generation
        merged.set()
        run.wait()
        host.model.unmerge_adapter()
    expected.save_pretrained(tmp_path / "theirs")
    found = export(tmp_path, "merged", 1) / "model.safetensors"
    assert found.read_bytes() == (tmp_path / "theirs" / "model.safetensors").read_bytes()


def test_an_export_without_memory_for_the_base_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_on_base(tmp_path / "base")

    def refuse(tensors: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(staged_model, "host_copies_of", refuse)
    with handler(tmp_path, "merged", freq_steps=2) as run:
        run.load(host.engine)
        for step in range(2):
            host.step(step)
        assert run.dump(host.engine, step_info(1))
        with pytest.raises(CheckpointWriteError, match="no host memory for a copy"):
            run.wait()
        host.step(2)
    assert (tmp_path / "e" / "merged" / "recover" / "global_step_1").exists()
    assert not export(tmp_path, "merged", 1).exists()


def test_adapters_that_cannot_be_merged_are_exported_as_peft_stores_them_or_refused_early(
    tmp_path: Path,
) -> None:
    dora = peft_model(use_dora=True, modules_to_save=["norm"])
    host = Host(dora)
    with (
        pytest.raises(ConfigError, match=r"variant of LoRA.*set recover.hf_adapters to 'peft'"),
        handler(tmp_path, "merged") as run,
    ):
        run.load(host.engine)
    with handler(tmp_path, "peft") as run:
        run.load(host.engine)
        host.step(0)
        run.dump(host.engine, step_info(0))
    assert torch.equal(logits(loaded(export(tmp_path, "peft", 0))), logits(dora))


def test_forms_that_a_model_cannot_have_are_refused_at_load_with_the_reason(tmp_path: Path) -> None:
    beside = peft_model()
    beside.get_base_model().lm_head.weight.requires_grad_(True)  # type: ignore[union-attr]
    prefix = get_peft_model(
        build_reference(tiny_qwen3()),
        PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    )
    for model, form, reason in (
        (
            build_reference(tiny_qwen3()),
            "peft",
            "has no adapters of PEFT.*set recover.hf_adapters to 'merged'",
        ),
        (beside, "peft", "is trained beside the adapters"),
        (prefix, "peft", "is a prompt and no adapter"),
        (prefix, "merged", "prompt_encoder.*is beside the layers of the model"),
    ):
        with pytest.raises(ConfigError, match=reason), handler(tmp_path, form) as run:
            run.load(Host(model).engine)
    assert not list(tmp_path.glob("e/*/hf/*"))
    with pytest.raises(ConfigError, match=r"recover.hf_adapters.*'lora'"):
        RecoverConfig(hf_adapters="lora")


def _sharded(rank: int, world_size: int, root: Path) -> None:
    """Export in both forms from an engine, a DDP model and an FSDP2 model, which train on
    meanwhile.
    """
    torch.set_num_threads(1)
    engine = lora_engine(root / "base")
    for form in FORMS:
        with handler(root / "engine", form, freq_steps=2) as run:
            run.load(engine)
            for step in range(2):
                train(engine, 1)
                kind = "hf" if form == "merged" else "peft"
                engine.save(SaveLoadMeta(str(root / f"saved_{form}_{step}"), kind, False))
                run.dump(engine, step_info(step))
    engine.destroy()
    for name in ("ddp", "fsdp2"):
        model: Any = peft_model()
        if name == "ddp":
            model = DistributedDataParallel(model)
        else:
            for block in model.get_submodule("base_model.model.model.layers").children():
                fully_shard(block)
            fully_shard(model)
        host = Host(model)
        for step, form in enumerate(FORMS):
            with handler(root / name, form, freq_steps=1) as run:
                run.load(host.engine)
                host.step(step)
                run.dump(host.engine, step_info(step))
                host.step(step + 1)


@pytest.mark.slow
def test_both_forms_of_sharded_models_are_what_one_process_has(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    run_ranks(_sharded, 2, tmp_path)
    for form in FORMS:
        for step in range(2):
            found = _contents(export(tmp_path / "engine", form, step))
            assert found == _contents(tmp_path / f"saved_{form}_{step}")
    host = Host(peft_model())
    for step, form in enumerate(FORMS):
        host.step(step)
        for name in ("ddp", "fsdp2"):
            found = loaded(export(tmp_path / name, form, step))
            torch.testing.assert_close(logits(found), logits(host.model), atol=1e-4, rtol=1e-4)
        assert not torch.allclose(logits(host.model), logits(peft_model()), atol=1e-2)
        host.step(step + 1)


def test_a_folder_of_peft_has_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    host = Host(peft_model())
    with handler(tmp_path, "peft", hf_dtype="bfloat16") as run:
        run.load(host.engine)
        run.dump(host.engine, step_info(0))
    tensors = load_file(export(tmp_path, "peft", 0) / "adapter_model.safetensors")
    assert len(tensors) == 8 and {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
