"""TRL with ``peft_config``: periodic exports of `RecoverHandler`, with and without kills, under DDP
and FSDP2.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.integrations.processes import run_killed

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

LAST = 7


def job(*args: Any) -> None:
    from tests.integrations.trainer_job import main

    main(*args)


def exported(
    folder: Path, adapters: str, kills: tuple[str, ...] = (), ranks: int = 1, **options: Any
) -> Path:
    recover = {"hf_freq_steps": 4, "hf_adapters": adapters}
    given = {
        "lora": True,
        "recover": recover,
        "num_train_epochs": 2 * ranks,
        "max_steps": LAST + 1,
        **options,
    }
    job_of = [("sft", kill, False, given) for kill in kills]
    run_killed(job, folder, job_of, "sft", "", False, given, ranks=ranks)
    return folder / f"runs/experiment/trial/hf/global_step_{LAST}"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    (weights,) = folder.glob("*.safetensors")
    return load_file(weights)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_both_forms_are_what_trl_itself_ends_with_also_after_a_kill(tmp_path: Path) -> None:
    from examples.integrations.tiny import tiny_model

    peft = exported(tmp_path / "peft", "peft", kills=("step:6",))
    theirs = tensors(tmp_path / "peft" / "adapters")
    assert same(tensors(peft), theirs)
    assert all(tensor.abs().max() > 0 for name, tensor in theirs.items() if "lora_B" in name)
    assert (peft / "tokenizer.json").is_file()
    merged = exported(tmp_path / "merged", "merged")
    ids = torch.tensor([[1, 2, 3, 4]])
    expected = (
        PeftModel.from_pretrained(tiny_model(), str(peft)).merge_and_unload()(input_ids=ids).logits
    )
    found = AutoModelForCausalLM.from_pretrained(merged)(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_under_fsdp2_an_export_is_what_the_ranks_together_end_with(tmp_path: Path) -> None:
    peft, theirs = exported(tmp_path, "peft", ranks=2, fsdp2=True), tensors(tmp_path / "adapters")
    assert same(tensors(peft), theirs)
    assert all(tensor.abs().max() > 0 for name, tensor in theirs.items() if "lora_B" in name)
