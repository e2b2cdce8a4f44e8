"""Files of verl with odd contents: each is refused in one line with the file and the entry."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from holdfast_convert import convert

from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.utils.errors import CheckpointError, CheckpointMismatchError, ConfigError
from tests.plugins.convert.hosts import Host

Files = dict[str, Any]
"""The contents of the files of one rank: ``model``, ``optim`` and ``extra_state``."""


def sound_files() -> Files:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(2):
        model(torch.ones(5, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    rng = {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": rng}
    return {
        "model": dict(model.state_dict()),
        "optim": optimizer.state_dict(),
        "extra_state": extra,
    }


def write(files: Files, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for kind, content in files.items():
        torch.save(content, folder / f"{kind}_world_size_1_rank_0.pt")
    return folder


Change = Callable[[Files], Any]


def in_model(name: Any, value: Any) -> Change:
    return lambda files: files["model"].update({name: value})


def in_group(name: str, value: Any) -> Change:
    return lambda files: files["optim"]["param_groups"][0].update({name: value})


def in_state(name: Any, value: Any) -> Change:
    return lambda files: files["optim"]["state"][0].update({name: value})


def in_schedule(name: str, value: Any) -> Change:
    return lambda files: files["extra_state"]["lr_scheduler"].update({name: value})


ODD: dict[str, tuple[Change, str]] = {
    "a model entry of text": (
        in_model("0.weight", "text"),
        r"model_\S+: 0\.weight is a str; expected a tensor",
    ),
    "a model entry that is a list": (
        in_model("0.weight", [1.0]),
        r"model_\S+: 0\.weight is a list; expected",
    ),
    "a model entry without a name": (
        in_model(7, torch.ones(2)),
        r"model_\S+: an entry is called 7; expected a str",
    ),
    "a sparse model entry": (
        in_model("0.weight", torch.eye(4).to_sparse()),
        r"model_\S+: 0\.weight is a sparse_coo",
    ),
    "a model entry on meta": (
        in_model("0.weight", torch.ones(4, device="meta")),
        r"model_\S+: 0\.weight is .* meta",
    ),
    "a quantized model entry": (
        in_model("0.weight", torch.quantize_per_tensor(torch.ones(4, 3), 0.1, 0, torch.qint8)),
        r"model_\S+: 0\.weight is a quantized tensor",
    ),
    "a model without entries": (
        lambda files: files["model"].clear(),
        r"model_\S+ holds no tensors",
    ),
    "a rate of text": (
        in_group("lr", "1e-5"),
        r"optim_\S+: the rate \(lr\) of group 0 is '1e-5'; expected a number",
    ),
    "a rate that is a list": (
        in_group("lr", [0.1]),
        r"optim_\S+: the rate \(lr\) of group 0 is \[0\.1\]",
    ),
    "a rate that is None": (in_group("lr", None), r"optim_\S+: the rate \(lr\) of group 0 is None"),
    "betas in a tensor": (
        in_group("betas", torch.ones(2)),
        r"optim_\S+: param_groups\[0\]\.betas is a torch\.Tensor",
    ),
    "groups of strings": (
        lambda files: files["optim"].update(param_groups=["group"]),
        r"optim_\S+: param_groups\[0\] is 'group'; expected a dict",
    ),
    "a group without parameters": (
        in_group("params", None),
        r"optim_\S+: params of param_groups\[0\] is None; exp",
    ),
    "parameters that are a number": (
        in_group("params", 4),
        r"optim_\S+: params of param_groups\[0\] is 4; expected a",
    ),
    "parameters that are lists": (
        in_group("params", [[0], [1]]),
        r"optim_\S+: params of param_groups\[0\] is \[\[0",
    ),
    "no groups": (
        lambda files: files["optim"].update(param_groups=[]),
        r"optim_\S+ numbers its parameters",
    ),
    "a state that is a list": (
        lambda files: files["optim"]["state"].update({1: [1, 2]}),
        r"optim_\S+: the state of parameter 1 is \[1, 2\]; expected a dict",
    ),
    "a moment that is a list": (
        in_state("exp_avg", [0.0]),
        r"global_step_2: its optimizer .* '\S+0\.weight\.exp_avg'",
    ),
    "a sparse moment": (
        in_state("exp_avg", torch.ones(4, 3).to_sparse()),
        r"optim_\S+ parameter 0: exp_avg is a spa",
    ),
    "a moment on meta": (
        in_state("exp_avg", torch.ones(4, device="meta")),
        r"optim_\S+ parameter 0: exp_avg is .* met",
    ),
    "a step of text": (
        in_state("step", "two"),
        r"optim_\S+: step of 0\.weight is 'two'; expected a number",
    ),
    "a step of two numbers": (
        in_state("step", torch.ones(2)),
        r"optim_\S+: step of 0\.weight is a tensor \[2\]; exp",
    ),
    "a state without a name": (
        in_state(5, torch.ones(2)),
        r"optim_\S+ parameter 0: an entry is called 5; expected",
    ),
    "an optimizer that is a list": (
        lambda files: files.update(optim=[1]),
        r"optim_\S+ holds a list; expected a dict",
    ),
    "all states in a list": (
        lambda files: files["optim"].update(state=[1]),
        r"optim file of rank 0 has",
    ),
    "a schedule of text": (
        lambda files: files["extra_state"].update(lr_scheduler="linear"),
        r"extra_state_\S+: lr_scheduler is 'linear'; expected the state_dict",
    ),
    "a schedule with bytes": (
        in_schedule("base_lrs", b"x"),
        r"extra_state_\S+: lr_scheduler\.base_lrs is a builtins.b",
    ),
    "a schedule at a step of text": (
        in_schedule("last_epoch", "two"),
        r"extra_state_\S+: last_epoch .* is 'two'; exp",
    ),
    "generators in a list": (
        lambda files: files["extra_state"].update(rng=[1]),
        r"extra_state_\S+ does not hold",
    ),
}


@pytest.mark.parametrize("what", ODD)
def test_odd_contents_are_refused_in_one_line_with_file_and_entry(
    what: str, tmp_path: Path
) -> None:
    change, words = ODD[what]
    files = sound_files()
    change(files)
    source = write(files, tmp_path / "source" / "global_step_2")
    with pytest.raises((CheckpointError, ConfigError), match=words) as caught:
        convert(source, tmp_path / "e" / "t", to="generation")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "e").exists()


def without(name: str) -> Change:
    return lambda files: [entries.pop(name) for entries in files["optim"]["state"].values()]


INCOMPLETE: dict[str, Change] = {
    "without steps": without("step"),
    "without a moment": without("exp_avg_sq"),
    "with steps that are plain numbers": in_state("step", 2),
    "with steps in whole numbers": in_state("step", torch.tensor(2)),
    "with steps in lists": in_state("step", torch.ones(1)),
    "with moments in another dtype": in_state("exp_avg", torch.ones(4, 3, dtype=torch.bfloat16)),
    "with a moment too many": in_state("average", torch.ones(4, 3)),
    "without the largest moments": in_group("amsgrad", True),
}


@pytest.mark.parametrize("to", ["generation", "dcp"])
@pytest.mark.parametrize("what", INCOMPLETE)
def test_an_optimizer_that_no_load_would_take_is_refused_and_its_weights_convert(
    what: str, to: str, tmp_path: Path
) -> None:
    files = sound_files()
    INCOMPLETE[what](files)
    source = write(files, tmp_path / "source" / "global_step_2")
    with pytest.raises(
        CheckpointMismatchError,
        match=r"global_step_2: its optimizer could not be loaded: .* --to hf",
    ):
        convert(source, tmp_path / "e" / "t", to=to)
    assert not (tmp_path / "e").exists()


def test_sound_files_convert_and_load(tmp_path: Path) -> None:
    source = write(sound_files(), tmp_path / "source" / "global_step_2")
    convert(source, tmp_path / "c", to="dcp")
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    load_dcp(tmp_path / "c", DCPState(model, torch.optim.AdamW(model.parameters())))


def test_weights_convert_whatever_the_optimizer_is(tmp_path: Path) -> None:
    host = Host()
    files = {"model": host.model.state_dict(), "optim": [1], "extra_state": "text"}
    folder = write(files, tmp_path / "global_step_2")
    host.model.config.save_pretrained(folder / "huggingface")
    assert convert(folder, tmp_path / "hf", to="hf").tensors == len(list(host.model.parameters()))
