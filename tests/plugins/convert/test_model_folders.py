"""Weights in folders of transformers, its Trainer and Accelerate. Other files are named, but not
opened.
"""

import json
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from holdfast_convert import convert
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from tests.helpers import run_ranks
from tests.plugins.convert.hosts import Host, assert_same, tiny_config, tiny_experts

pytestmark = pytest.mark.timeout(120)

Tensors = dict[str, torch.Tensor]


def weights_of(model: torch.nn.Module) -> Tensors:
    whole = {
        n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()
    }
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


def save_with_accelerate(
    model: PreTrainedModel, folder: Path, *, sharded: bool = False, safe: bool = True
) -> Tensors:
    """Save a model with ``Accelerator.save_state`` after a step, and return its weights."""
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    accelerator = Accelerator(cpu=True)
    if sharded:  # Accelerate leaves it out on a CPU
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap",
        )
        plugin.set_auto_wrap_policy(model)
        AcceleratorState._shared_state.update(
            distributed_type=DistributedType.FSDP, fsdp_plugin=plugin
        )
        PartialState._shared_state.update(distributed_type=DistributedType.FSDP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    prepared: Any = accelerator.prepare(model, optimizer, scheduler)
    model, optimizer, scheduler = prepared
    ids = torch.arange(14).view(2, 7)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    scheduler.step()
    accelerator.save_state(str(folder), safe_serialization=safe)
    return weights_of(accelerator.unwrap_model(model))


def _save_on_ranks(
    rank: int, world_size: int, folder: str, sharded: bool, safe: bool, experts: bool
) -> Tensors:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_experts() if experts else tiny_config())
    return save_with_accelerate(model, Path(folder), sharded=sharded, safe=safe)


def loaded(folder: Path) -> Tensors:
    return weights_of(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"))


@pytest.mark.parametrize(
    ("world_size", "sharded", "safe", "experts"),
    [
        (1, False, True, True),
        pytest.param(1, False, True, False, marks=pytest.mark.slow),
        pytest.param(1, False, False, False, marks=pytest.mark.slow),
        pytest.param(2, True, True, False, marks=pytest.mark.slow),
    ],
)
def test_a_folder_of_accelerate_with_a_config_gives_its_weights_and_names_other_files(
    world_size: int, sharded: bool, safe: bool, experts: bool, tmp_path: Path
) -> None:
    source = tmp_path / "state"
    saved = run_ranks(_save_on_ranks, world_size, str(source), sharded, safe, experts)[0]
    (tiny_experts() if experts else tiny_config()).save_pretrained(source)
    done = convert(source, tmp_path / "hf", to="hf")
    assert done.format == "Accelerate" and not done.optimizer
    assert_same(loaded(tmp_path / "hf"), saved)
    optimizer = "optimizer_0" if sharded else "optimizer.bin"
    assert {optimizer, "scheduler.bin", "random_states_0.pkl"} <= set(done.ignored)
    convert(source, tmp_path / "c", to="dcp")
    model = AutoModelForCausalLM.from_config(tiny_experts() if experts else tiny_config())
    load_dcp(tmp_path / "c", DCPState(model))
    assert_same(weights_of(model), saved)


def test_the_config_of_a_folder_without_one_is_asked_for(tmp_path: Path) -> None:
    saved = run_ranks(_save_on_ranks, 1, str(tmp_path / "state"), False, True, False)[0]
    with pytest.raises(
        ConfigError, match=r"Accelerate has no config\.json; name a folder that has the model's"
    ):
        convert(tmp_path / "state", tmp_path / "hf", to="hf")
    tiny_config().save_pretrained(tmp_path / "config")
    convert(tmp_path / "state", tmp_path / "hf", to="hf", config=tmp_path / "config")
    assert_same(loaded(tmp_path / "hf"), saved)


class Ids(Dataset):
    """Eight samples of the same length."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + 6)
        return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``checkpoint-2`` of transformers' Trainer."""
    root = tmp_path_factory.mktemp("trainer")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config())
    arguments = TrainingArguments(
        str(root),
        per_device_train_batch_size=2,
        max_steps=2,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=Ids()).train()
    return root / "checkpoint-2"


class Bomb:
    """Pickles to a call that creates a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def copy_of(source: Path, target: Path, *without: str) -> Path:
    target.mkdir()
    for path in source.iterdir():
        if path.name not in without:
            os.link(path, target / path.name)
    return target


def test_weights_of_a_trainer_are_its_own_bytes_and_its_pickles_are_never_opened(
    checkpoint: Path, tmp_path: Path
) -> None:
    pickles = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin")
    source = copy_of(checkpoint, tmp_path / "checkpoint-2", *pickles)
    for name in pickles:
        torch.save(Bomb(tmp_path / "hit"), source / name)
    done = convert(source, tmp_path / "hf", to="hf")
    assert done.format == "transformers Trainer" and not (tmp_path / "hit").exists()
    assert set(done.ignored) == {*pickles, "trainer_state.json"}
    one, other = (folder / "model.safetensors" for folder in (tmp_path / "hf", checkpoint))
    assert one.read_bytes() == other.read_bytes()
    assert convert(tmp_path / "hf", tmp_path / "c", to="dcp").ignored == []
    model = AutoModelForCausalLM.from_config(tiny_config())
    load_dcp(tmp_path / "c", DCPState(model))
    assert_same(weights_of(model), loaded(checkpoint))


def test_a_generation_is_not_made_of_weights_alone(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"weights and .*optimizer\.pt.* no optimizer state that can be .*--to hf"
    ):
        convert(checkpoint, tmp_path / "e" / "t", to="generation", step=1)
    assert not (tmp_path / "e").exists()


def test_two_sets_of_weights_in_one_folder_are_refused(tmp_path: Path) -> None:
    run_ranks(_save_on_ranks, 1, str(tmp_path / "state"), True, True, False)
    Host(3).model.save_pretrained(tmp_path / "state")
    with pytest.raises(
        ConfigError, match=r"pytorch_model_fsdp_0 and model\.safetensors.* move away"
    ):
        convert(tmp_path / "state", tmp_path / "hf", to="hf")


def test_pickled_weights_beside_safetensors_are_left_alone_as_from_pretrained_does(
    tmp_path: Path,
) -> None:
    model = Host(3).model
    model.save_pretrained(tmp_path / "model")
    torch.save(Host(4).model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    done = convert(tmp_path / "model", tmp_path / "hf", to="hf")
    assert done.ignored == ["pytorch_model.bin"]
    assert_same(loaded(tmp_path / "hf"), weights_of(model))
    (tmp_path / "model" / "model.safetensors").unlink()
    convert(tmp_path / "model", tmp_path / "other", to="hf")
    assert_same(loaded(tmp_path / "other"), weights_of(Host(4).model))


def test_pickled_weights_that_would_run_code_are_refused_and_not_run(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path / "model")
    torch.save({"lm_head.weight": Bomb(tmp_path / "hit")}, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(
        CheckpointCorruptError, match=r"cannot be read: it holds \w+\.mkdir, which could only"
    ):
        convert(tmp_path / "model", tmp_path / "c", to="dcp")
    assert not (tmp_path / "hit").exists() and not (tmp_path / "c").exists()


def test_weights_of_another_model_than_the_config_are_refused(tmp_path: Path) -> None:
    run_ranks(_save_on_ranks, 1, str(tmp_path / "state"), False, True, False)
    weights = load_file(tmp_path / "state" / "model.safetensors")
    tiny_experts().save_pretrained(tmp_path / "state")
    assert weights
    with pytest.raises(
        CheckpointMismatchError, match=r"has 'model\.layers\.\d\.mlp\.\w+\.weight', which its model"
    ):
        convert(tmp_path / "state", tmp_path / "c", to="dcp")


def _edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a model folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


AMBIGUOUS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "two names of one weight": (
        lambda found: found.update({"norm.weight": found["model.norm.weight"] + 1}),
        r"has 'norm\.weight', which fills what another tensor fills too \(1 such\)",
    ),
    "whole numbers for weights": (
        lambda found: found.update({"model.norm.weight": torch.ones(16, dtype=torch.int32)}),
        r"model\.norm\.weight has dtype torch\.int32; Qwen3ForCausalLM needs torch\.float32",
    ),
}


@pytest.mark.parametrize("what", AMBIGUOUS)
def test_weights_that_from_pretrained_could_misread_are_refused(what: str, tmp_path: Path) -> None:
    change, words = AMBIGUOUS[what]
    Host(3).model.save_pretrained(tmp_path / "model")
    _edit(tmp_path / "model", change)
    with pytest.raises(CheckpointMismatchError, match=words):
        convert(tmp_path / "model", tmp_path / "hf", to="hf")
    assert not (tmp_path / "hf").exists()


def test_all_copies_of_a_tied_weight_are_compared_whatever_their_names(tmp_path: Path) -> None:
    config = T5Config(vocab_size=33, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "model")

    def rename(tensors: Tensors, added: float) -> None:
        shared = tensors.pop("shared.weight")
        tensors["encoder.embed_tokens.weight"] = shared
        tensors["lm_head.weight"] = shared + added

    _edit(tmp_path / "model", partial(rename, added=0))
    convert(tmp_path / "model", tmp_path / "equal", to="hf")
    _edit(tmp_path / "model", lambda found: found["lm_head.weight"].add_(1))
    with pytest.raises(CheckpointMismatchError, match=r"have different values, but the config"):
        convert(tmp_path / "model", tmp_path / "other", to="hf")
    assert not (tmp_path / "other").exists()


def test_pieces_of_a_fused_weight_keep_every_bit_in_whatever_dtypes_they_are(
    tmp_path: Path,
) -> None:
    AutoModelForCausalLM.from_config(tiny_experts()).save_pretrained(tmp_path / "model")
    first = "model.layers.0.mlp.experts.0.gate_proj.weight"
    _edit(tmp_path / "model", lambda found: found.update({first: found[first].bfloat16()}))
    convert(tmp_path / "model", tmp_path / "hf", to="hf")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "hf"))
    assert_same({name: tensor.float() for name, tensor in before.items()}, after)


def test_pickled_tied_weights_convert_in_any_order_of_their_names(tmp_path: Path) -> None:
    host = Host(3)
    tiny_config().save_pretrained(tmp_path / "model")
    ordered = dict(sorted(host.model.state_dict().items()))  # the head comes first
    torch.save(ordered, tmp_path / "model" / "pytorch_model.bin")
    convert(tmp_path / "model", tmp_path / "areal", to="areal")
    convert(tmp_path / "areal", tmp_path / "back", to="hf", config=tmp_path / "model")
    assert_same(loaded(tmp_path / "back"), weights_of(host.model))


@pytest.mark.parametrize("named", [[1], {"a": 1}, "Qwen3ForCausalLM"])
def test_architectures_that_are_no_list_of_one_name_are_refused(
    named: object, tmp_path: Path
) -> None:
    Host(3).model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": named}))
    with pytest.raises(ConfigError, match=r"names architectures .*; expected one that"):
        convert(tmp_path / "model", tmp_path / "hf", to="hf")


def test_a_folder_without_a_checkpoint_is_refused_with_its_contents(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(
        ConfigError, match=r"it holds \['notes\.txt'\]\. Looked for: model_world_size_<N>"
    ):
        convert(tmp_path, tmp_path / "c", to="dcp")
    (tmp_path / "pytorch_model_fsdp_rank0.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"a file of each rank, which only Accelerate"):
        convert(tmp_path, tmp_path / "c", to="hf")
    (tmp_path / "pytorch_model_fsdp_rank0.bin").unlink()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match=r"holds an adapter \(LoRA\)"):
        convert(tmp_path, tmp_path / "c", to="hf")
