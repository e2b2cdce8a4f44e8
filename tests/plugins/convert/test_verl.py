"""Checkpoints of verl's FSDP workers: tensors, schedule and generators, on any number of ranks."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from holdfast_convert import convert
from holdfast_convert.verl import _require_alike, _step
from transformers import AutoModelForCausalLM

from holdfast.engine.api import FinetuneSpec, StepInfo
from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from tests.helpers import run_ranks
from tests.plugins.convert.hosts import Host, assert_same, load_as_verl, save_as_verl

pytestmark = pytest.mark.timeout(120)

SPEC = FinetuneSpec(total_train_epochs=2, dataset_size=40, train_batch_size=4)


def _train_and_save(rank: int, world_size: int, root: str) -> dict[str, torch.Tensor]:
    host = Host(ranks=True).train(2)
    save_as_verl(host, Path(root) / "global_step_2" / "actor")
    return host.tensors()


def _next_step_of_verl(rank: int, world_size: int, root: str) -> str:
    host = Host(7, ranks=True)
    load_as_verl(host, Path(root) / "global_step_2" / "actor")
    host.step()
    return host.digest()


def _next_step_of_the_generation(
    rank: int, world_size: int, root: str, engine: str
) -> tuple[Any, str, list[str]]:
    messages: list[str] = []
    handler_of_logs = logging.Handler()
    handler_of_logs.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler_of_logs)
    host, config = (
        Host(8, ranks=world_size > 1),
        RecoverConfig("e", "t", root, freq_steps=1, async_save=False),
    )
    with RecoverHandler(config, SPEC) as handler:
        told = handler.peek()
        info = handler.load({engine: host.state})
        assert info is not None and told == info.last_step_info
        host.step()
        digest = host.digest()
        assert handler.dump({engine: host.state}, info.last_step_info.next())
    return told, digest, messages


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A step of verl on two ranks, and its tensors."""
    root = tmp_path_factory.mktemp("verl")
    return root, run_ranks(_train_and_save, 2, str(root))[0]


@pytest.mark.slow
def test_a_generation_of_a_verl_step_goes_on_with_the_step_that_verl_would_take(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    source, _ = saved
    done = convert(source / "global_step_2", tmp_path / "e" / "t", to="generation")
    assert done.step == 1 and done.lacks.keys() == {"data", "epochs"} and done.optimizer
    assert Path(done.target) == tmp_path / "e" / "t" / "recover" / "global_step_1"
    expected = run_ranks(_next_step_of_verl, 2, str(source))
    found = run_ranks(_next_step_of_the_generation, 2, str(tmp_path), "actor")
    assert [digest for _, digest, _ in found] == expected
    told, _, messages = found[0]
    assert told == StepInfo.at(1, SPEC.steps_per_epoch)
    assert any(
        "converted from verl, 2 ranks, which had no data: the dataloader starts" in line
        for line in messages
    )
    assert any("no epochs" in line for line in messages) and not any(
        "no generators" in line for line in messages
    )


def _load(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    host = Host(9, ranks=world_size > 1)
    load_dcp(folder, host.state)
    assert host.scheduler.last_epoch == 2
    return host.tensors()


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_dcp_folder_loads_on_any_number_of_ranks(
    world_size: int, saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    source, expected = saved
    done = convert(source / "global_step_2" / "actor", tmp_path / "c", to="dcp")
    assert done.format == "verl, 2 ranks" and done.bytes == sum(t.nbytes for t in expected.values())
    for found in run_ranks(_load, world_size, str(tmp_path / "c")):
        assert_same(found, expected)


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_steps_of_other_numbers_of_ranks_convert_alike(world_size: int, tmp_path: Path) -> None:
    expected = run_ranks(_train_and_save, world_size, str(tmp_path))[0]
    convert(tmp_path / "global_step_2" / "actor", tmp_path / "c", to="dcp")
    host = Host(9)
    load_dcp(tmp_path / "c", host.state)
    assert_same(host.tensors(), expected)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_hugging_face_folder_is_what_save_pretrained_makes_of_the_model(
    dtype: str | None, saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    source, expected = saved
    convert(source / "global_step_2", tmp_path / "hf", to="hf", dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    wanted = torch.float32 if dtype is None else torch.bfloat16
    found = {f"model.{name}": param.detach() for name, param in model.named_parameters()}
    weights = {
        name: tensor.to(wanted) for name, tensor in expected.items() if name.startswith("model.")
    }
    assert_same(found, weights)
    model.save_pretrained(tmp_path / "again")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "again"))
    assert one == other


def test_an_incomplete_folder_and_mixed_ones_are_refused_by_what_is_missing(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    actor = saved[0] / "global_step_2" / "actor"
    for name in (
        "model_world_size_2_rank_0.pt",
        "model_world_size_2_rank_1.pt",
        "fsdp_config.json",
    ):
        (tmp_path / name).write_bytes((actor / name).read_bytes())
    (tmp_path / "optim_world_size_2_rank_0.pt").write_bytes(
        (actor / "optim_world_size_2_rank_0.pt").read_bytes()
    )
    with pytest.raises(CheckpointCorruptError, match=r"optim_world_size_2_rank_1\.pt is missing"):
        convert(tmp_path, tmp_path / "c", to="dcp")
    (tmp_path / "model_world_size_2_rank_1.pt").rename(tmp_path / "model_world_size_3_rank_1.pt")
    with pytest.raises(ConfigError, match=r"files of runs on \[2, 3\] ranks"):
        convert(tmp_path, tmp_path / "c", to="dcp")
    (tmp_path / "model_world_size_3_rank_1.pt").unlink()
    with pytest.raises(
        CheckpointCorruptError, match=r"the model files of ranks \[1\] of 2 are missing"
    ):
        convert(tmp_path, tmp_path / "c", to="dcp")
    assert not (tmp_path / "c").exists()


def test_optimizer_files_that_are_incomplete_or_differ_are_refused_by_rank(tmp_path: Path) -> None:
    whole = {"state": {0: {"step": torch.ones(1)}}, "param_groups": []}
    for other, message in (
        ({"state": {}, "param_groups": []}, "ranks 0 and 1 differ"),
        ({"state": {}}, "of rank 1 has"),
    ):
        with pytest.raises(CheckpointCorruptError, match=message):
            _require_alike(tmp_path, [whole, other])


def test_the_step_is_found_from_inside_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "global_step_8" / "actor").mkdir(parents=True)
    for folder in (tmp_path / "global_step_8", tmp_path / "global_step_8" / "actor"):
        monkeypatch.chdir(folder)
        assert _step(Path()) == 7


def _save_fsdp1(rank: int, world_size: int, root: str) -> None:
    save_as_verl(Host(ranks=True).train(1), Path(root), version=1)


def test_the_flat_optimizer_of_fsdp1_is_refused_with_what_can_be_done(tmp_path: Path) -> None:
    run_ranks(_save_fsdp1, 1, str(tmp_path / "actor"))
    with pytest.raises(CheckpointMismatchError, match=r"FSDP1 .* convert --to hf"):
        convert(tmp_path / "actor", tmp_path / "c", to="dcp")


@pytest.mark.slow
def test_an_engine_of_several_must_be_named(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    both = tmp_path / "global_step_2"
    both.mkdir()
    for name in ("actor", "critic"):
        (both / name).symlink_to(saved[0] / "global_step_2" / "actor")
    with pytest.raises(ConfigError, match=r"holds \['actor', 'critic'\]; say which one: engine="):
        convert(both, tmp_path / "c", to="dcp")
    convert(both, tmp_path / "c", to="dcp", engine="critic")
    convert(both, tmp_path / "e" / "t", to="generation")
    host, other = Host(4), Host(5)
    with RecoverHandler(RecoverConfig("e", "t", str(tmp_path), freq_steps=1), SPEC) as handler:
        assert (
            handler.load({"actor": host.state, "critic": DCPState(other.model, other.optimizer)})
            is not None
        )
    assert_same(host.tensors(), saved[1])
    assert_same(other.tensors(), saved[1])
    assert not dist.is_initialized()


def _copy_renamed(
    source: Path, target: Path, kinds: tuple[str, ...], swap: tuple[int, int]
) -> Path:
    """Copy the files of a worker, but swap the names of two ranks on files of these kinds."""
    shutil.copytree(source, target)
    for kind in kinds:
        one, other = (target / f"{kind}_world_size_2_rank_{rank}.pt" for rank in swap)
        kept = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(kept)
    return target


@pytest.mark.parametrize("kinds", [("model", "optim"), ("model",), ("optim",)])
def test_files_of_ranks_that_have_each_others_names_are_refused(
    kinds: tuple[str, ...], saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    swapped = _copy_renamed(saved[0] / "global_step_2" / "actor", tmp_path / "actor", kinds, (0, 1))
    with pytest.raises(
        CheckpointCorruptError, match=r"the file of rank 0 .* rank 1|rank 0 holds .* of rank 1"
    ):
        convert(swapped, tmp_path / "c", to="dcp")
    assert not (tmp_path / "c").exists()


def _save_without_coordinates(rank: int, world_size: int, root: str) -> None:
    """Save like a version of torch whose meshes do not contain the coordinates of the rank."""
    host = Host(ranks=True)
    state = host.model.state_dict()
    for tensor in state.values():
        vars(tensor.device_mesh)["_coordinate_on_dim"] = None
    torch.save(state, Path(root) / f"model_world_size_{world_size}_rank_{rank}.pt")


def test_shards_of_other_sizes_than_fsdp_cuts_are_refused(tmp_path: Path) -> None:
    """torch.chunk cuts 33 rows on two ranks into 17 and 16. Files with 16 and 17 belong to other
    ranks.
    """
    (tmp_path / "actor").mkdir()
    run_ranks(_save_without_coordinates, 2, str(tmp_path / "actor"))
    convert(tmp_path / "actor", tmp_path / "c", to="dcp")
    swapped = _copy_renamed(tmp_path / "actor", tmp_path / "swapped", ("model",), (0, 1))
    with pytest.raises(
        CheckpointCorruptError, match=r"the shard of rank 0 .*\[16, 16\].*\[17, 16\]"
    ):
        convert(swapped, tmp_path / "d", to="dcp")


@pytest.mark.parametrize("to", ["generation", "dcp"])
def test_an_optimizer_that_lacks_a_parameter_is_refused_by_its_name(
    to: str, saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    actor = tmp_path / "global_step_2" / "actor"
    shutil.copytree(saved[0] / "global_step_2" / "actor", actor)
    for path in actor.glob("optim_*.pt"):
        state = torch.load(path, weights_only=False)
        del state["state"][3]
        torch.save(state, path)
    with pytest.raises(
        CheckpointMismatchError, match=r"no state for 1 of its 24 parameters \(model\.layers\.0\."
    ):
        convert(actor, tmp_path / "e" / "t", to=to)
    assert convert(actor, tmp_path / "hf", to="hf").tensors == 24


def test_schedule_and_generators_without_an_optimizer_are_named_as_left_out(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    left = shutil.ignore_patterns("optim_*")
    shutil.copytree(saved[0] / "global_step_2" / "actor", tmp_path / "actor", ignore=left)
    assert convert(tmp_path / "actor", tmp_path / "c", to="dcp").ignored == [
        "schedule",
        "generators",
    ]
