"""Checkpoints that transformers' Trainer writes: the next step after a conversion is the Trainer's own."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from holdfast.engine.api import FinetuneSpec, StepInfo
from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.recover.convert import convert
from holdfast.recover.convert.architecture import Architecture
from holdfast.recover.convert.trainer import _place
from holdfast.utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from tests.recover.convert.hosts import assert_same, tiny_config

pytestmark = pytest.mark.timeout(120)

STEPS, SAVED = 4, 2


class Ids(Dataset):
    """Eight samples of the same length: four steps an epoch."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + 6)
        return {"input_ids": ids, "labels": ids}


def make_trainer(folder: Path) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config())
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        save_steps=SAVED,
        learning_rate=1e-2,
        weight_decay=0.1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(model, arguments, train_dataset=Ids())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint after two steps; what the Trainer holds there, and at the end of the run."""
    root, found = tmp_path_factory.mktemp("trainer"), []
    trainer = make_trainer(root)
    save_checkpoint = trainer._save_checkpoint

    def look(*args: Any, **kwargs: Any) -> None:
        found.append(held(trainer))
        save_checkpoint(*args, **kwargs)

    trainer._save_checkpoint = look  # type: ignore[method-assign]
    trainer.train()
    return root / f"checkpoint-{SAVED}", found[0], held(trainer)


def held(trainer: Any) -> dict[str, torch.Tensor]:
    optimizer: Any = trainer.optimizer
    state = DCPState(trainer.model, optimizer.optimizer)
    return {name: tensor.detach().clone() for name, tensor in state.live_tensors().items()}


def resumed(generation: bool, root: Path) -> tuple[Any, Any]:
    """A new Trainer's model, optimizer and schedule, with what was converted in them."""
    trainer = make_trainer(root / "new")
    trainer.create_optimizer_and_scheduler(STEPS)
    optimizer: Any = trainer.optimizer
    for value in trainer.model.parameters():
        value.data.zero_()
    state = DCPState(trainer.model, optimizer, trainer.lr_scheduler)
    if not generation:
        load_dcp(root / "c", state)
        return trainer, None
    with RecoverHandler(RecoverConfig("e", "t", str(root), freq_steps=1), FinetuneSpec(1, 8, 2)) as handler:
        return trainer, handler.load(state)


def test_a_generation_of_a_checkpoint_takes_the_steps_that_the_trainer_took(saved: Any, tmp_path: Path) -> None:
    source, then, end = saved
    done = convert(source, tmp_path / "e" / "t", to="generation")
    assert (done.step, done.format) == (SAVED - 1, "transformers Trainer") and done.lacks.keys() == {"data"}
    trainer, info = resumed(True, tmp_path)
    assert info.last_step_info == StepInfo.at(SAVED - 1, 4)
    optimizer: Any = trainer.optimizer
    state = DCPState(trainer.model, optimizer)
    assert_same({name: tensor.detach().clone() for name, tensor in state.live_tensors().items()}, then)
    scheduler: Any = trainer.lr_scheduler
    batches = list(make_trainer(tmp_path / "again").get_train_dataloader())  # the order of the epoch
    before_batches(source)
    for batch in batches[SAVED:]:
        trainer.model.train()
        trainer.model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    found = {name: tensor.detach().clone() for name, tensor in state.live_tensors().items()}
    assert_same(found, end)


def before_batches(source: Path) -> None:
    """The generators as the checkpoint has them: reading the loader above has drawn from them."""
    torch.set_rng_state(torch.load(source / "rng_state.pth", weights_only=False)["cpu"])


def test_the_groups_are_those_that_the_trainer_makes(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    architecture, trainer = Architecture.read(tmp_path), make_trainer(tmp_path / "run")
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    names = [name for name, _ in trainer.model.named_parameters()]
    assert architecture.trainer_groups() == [[n for n in names if n in decayed], [n for n in names if n not in decayed]]
    assert architecture.parameters == names and architecture.aliases == {"lm_head.weight": "model.embed_tokens.weight"}


def test_the_dcp_and_hugging_face_folders_hold_the_checkpoints_tensors(saved: Any, tmp_path: Path) -> None:
    source, then, _ = saved
    convert(source, tmp_path / "c", to="dcp")
    trainer, _ = resumed(False, tmp_path)
    assert_same(held_raw(trainer), then)
    assert trainer.lr_scheduler is not None and trainer.lr_scheduler.last_epoch == SAVED
    done = convert(source, tmp_path / "hf", to="hf")
    assert not done.optimizer
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), load_file(source / "model.safetensors"))
    assert convert(tmp_path / "hf", tmp_path / "m", to="dcp").format == "Hugging Face"
    load_dcp(tmp_path / "m", DCPState(AutoModelForCausalLM.from_config(tiny_config())))


def held_raw(trainer: Any) -> dict[str, torch.Tensor]:
    optimizer: Any = trainer.optimizer
    return {n: t.detach().clone() for n, t in DCPState(trainer.model, optimizer).live_tensors().items()}


def copy_of(source: Path, target: Path, *without: str) -> Path:
    target.mkdir()
    for path in source.iterdir():
        if path.name not in without:
            os.link(path, target / path.name)
    return target


class Bomb:
    """Pickles to a call that leaves a folder behind when it is run."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_file_that_would_run_code_is_refused_and_not_run(name: str, saved: Any, tmp_path: Path) -> None:
    source = copy_of(saved[0], tmp_path / "checkpoint-2", name)
    torch.save({"state": Bomb(tmp_path / "hit"), "param_groups": []}, source / name)
    with pytest.raises(CheckpointCorruptError, match=rf"{name} cannot be read: it holds \w+\.mkdir, which could only"):
        convert(source, tmp_path / "c", to="dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2"]


def test_a_pickle_that_needs_no_reading_is_never_opened(saved: Any, tmp_path: Path) -> None:
    source = copy_of(saved[0], tmp_path / "checkpoint-2", "training_args.bin")
    torch.save(Bomb(tmp_path / "hit"), source / "training_args.bin")
    convert(source, tmp_path / "c", to="dcp")
    assert not (tmp_path / "hit").exists()


def test_an_optimizer_in_another_order_is_refused_with_what_to_give(saved: Any, tmp_path: Path) -> None:
    source = copy_of(saved[0], tmp_path / "checkpoint-2", "optimizer.pt")
    state = torch.load(saved[0] / "optimizer.pt", weights_only=True)
    groups = state["param_groups"]
    torch.save(
        state | {"param_groups": [groups[0] | {"params": [n for g in groups for n in g["params"]]}]},
        source / "optimizer.pt",
    )
    with pytest.raises(CheckpointMismatchError, match=r"its parameters are in another order; give the names"):
        convert(source, tmp_path / "c", to="dcp")
    names = Architecture.read(source).trainer_groups()
    convert(source, tmp_path / "c", to="dcp", parameters=[[*names[0], *names[1]]])
    numbers = [number for group in groups for number in group["params"]]
    torch.save(state | {"param_groups": [groups[0] | {"params": [n]} for n in numbers]}, source / "optimizer.pt")
    with pytest.raises(ConfigError, match=r"in groups of \[1, 1.*Trainer's groups .* would be \[15, 9\]"):
        convert(source, tmp_path / "d", to="dcp")


@pytest.mark.parametrize(("epoch", "known"), [(0.4, 250), (0.3, None), (1 + 3 / 7, 70)])
def test_steps_of_an_epoch_are_known_only_where_they_are_exact(epoch: float, known: int | None, tmp_path: Path) -> None:
    """0.3 after 100 steps is of 1000 batches by 3: 334 steps, the last one of a single batch."""
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 100, "epoch": epoch}))
    assert _place(tmp_path / "trainer_state.json") == (99, known)


def test_what_is_no_checkpoint_is_refused_by_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=r"it holds \['notes\.txt'\]\. Looked for: model_world_size_<N>"):
        convert(tmp_path, tmp_path / "c", to="dcp")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    with pytest.raises(ConfigError, match=r"holds an adapter \(LoRA\)"):
        convert(tmp_path, tmp_path / "c", to="hf")
