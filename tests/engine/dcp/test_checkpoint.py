"""DCP folders: exact at every world size, readable by stock torch, refused when anything is
wrong.
"""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.engine.config import OptimizerConfig
from holdfast.engine.dcp.format import read_layout
from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.training.optimizer import build_optimizer, build_scheduler
from holdfast.utils.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    HoldfastError,
    PeerError,
)
from tests.engine.models import build_reference, tiny_qwen3
from tests.helpers import run_ranks
from tests.once import make_once
from tests.tiers import slow_but

OPTIMIZER = OptimizerConfig(lr=1e-2, lr_scheduler_type="cosine", warmup_steps_proportion=0.1)


class Counter:
    """A user's counter with the two methods of a Stateful."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def make_state(
    seed: int,
    steps: int = 0,
    tied: bool = True,
    kind: str = "adam",
    momentum: float = 0.9,
    **config: Any,
) -> Any:
    model = build_reference(tiny_qwen3(tied=tied, **config), seed)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer_config = OptimizerConfig(**{**OPTIMIZER.__dict__, "type": kind, "momentum": momentum})
    optimizer = build_optimizer(model.parameters(), optimizer_config)
    scheduler = build_scheduler(optimizer, optimizer_config, 20)
    state = DCPState(model, optimizer, scheduler, Counter(steps))
    for step in range(steps):
        train_step(state, step)
    return state


def train_step(state: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 15, (2, 6), generator=generator)
    state.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.scheduler.step()


def whole(state: DCPState) -> dict[str, torch.Tensor]:
    tensors = state.live_tensors()
    return {
        n: (t.full_tensor() if isinstance(t, DTensor) else t).clone().cpu()
        for n, t in tensors.items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


def _save_and_train_on(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    state = make_state(0, steps=3)
    fresh = make_state(5)
    untouched = {n: t.full_tensor() for n, t in fresh.model.state_dict().items()}
    save_dcp(f"{folder}/fresh", fresh)
    assert all(
        torch.equal(t.full_tensor(), untouched[n]) for n, t in fresh.model.state_dict().items()
    )
    assert all(float(s["step"]) == 0 for s in fresh.optimizer.state.values())
    torch.manual_seed(100 + rank)
    torch.rand(rank + 1)
    save_dcp(f"{folder}/trained", state)
    saved, rates = whole(state), []
    draw = torch.rand(3)
    for step in range(3, 5):
        train_step(state, step)
        rates.append(state.scheduler.get_last_lr()[0])
    sgd = make_state(0, steps=2, kind="sgd")
    save_dcp(f"{folder}/sgd", sgd)
    save_dcp(f"{folder}/untied", make_state(0, steps=1, tied=False))
    save_dcp(f"{folder}/model_only", DCPState(state.model))
    torch.save({"whole": whole(sgd)}, f"{folder}/sgd_{rank}.pt")
    return {"saved": saved, "draw": draw, "rates": rates, "after": whole(state)}


def _load_elsewhere(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    state = make_state(1, steps=1)
    load_dcp(f"{folder}/trained", state)
    draw = torch.rand(3)
    loaded, counter, rates = whole(state), state.counters.value, []
    if world_size != 2:
        save_dcp(f"{folder}/back_{world_size}", state)
    for step in range(3, 5):
        train_step(state, step)
        rates.append(state.scheduler.get_last_lr()[0])
    sgd = make_state(1, kind="sgd")
    load_dcp(f"{folder}/sgd", sgd)
    model_only = make_state(1, steps=1)
    before = {n: t for n, t in whole(model_only).items() if n.startswith("optim")}
    load_dcp(f"{folder}/trained", DCPState(model_only.model))
    after = whole(model_only)
    assert all(torch.equal(before[n], after[n]) for n in before)
    return {
        "loaded": loaded,
        "draw": draw,
        "rates": rates,
        "counter": counter,
        "after": whole(state),
        "sgd": whole(sgd),
        "model_only": after,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    return make_once(
        tmp_path_factory,
        "dcp",
        lambda folder: (folder, run_ranks(_save_and_train_on, 2, str(folder))),
    )


@pytest.mark.parametrize("world_size", slow_but([3], [1, 2, 3]))
def test_parameters_and_moments_are_bit_identical_at_another_world_size_and_back(
    saved: tuple[Path, list[dict[str, Any]]], world_size: int
) -> None:
    folder, before = saved
    results = run_ranks(_load_elsewhere, world_size, str(folder))
    for rank, result in enumerate(results):
        assert same(result["loaded"], before[0]["saved"])
        assert same(result["sgd"], torch.load(folder / "sgd_0.pt")["whole"])
        assert all(
            torch.equal(result["model_only"][n], t)
            for n, t in before[0]["saved"].items()
            if n[:5] == "model"
        )
        assert result["counter"] == 3
        assert result["rates"] == before[0]["rates"]
        if rank < 2:
            assert torch.equal(result["draw"], before[rank]["draw"])
        if world_size == 2:
            assert same(result["after"], before[0]["after"])
    draws = [tuple(result["draw"].tolist()) for result in results]
    assert len(set(draws)) == world_size
    if world_size != 2:
        back = run_ranks(_load_back, 2, f"{folder}/back_{world_size}")
        assert same(back[0], before[0]["saved"])


def _load_back(rank: int, world_size: int, path: str) -> dict[str, torch.Tensor]:
    state = make_state(1)
    load_dcp(path, state)
    return whole(state)


def test_stock_torch_reads_the_folder(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, before = saved
    template = {"dcp": {"model": {}, "optim": {"state": {}}}}
    for name, tensor in before[0]["saved"].items():
        if name.startswith("model."):
            template["dcp"]["model"][name.removeprefix("model.")] = torch.zeros_like(tensor)
        else:
            fqn, entry = name.removeprefix("optim.state.").rsplit(".", 1)
            template["dcp"]["optim"]["state"].setdefault(fqn, {})[entry] = torch.zeros_like(tensor)
    dcp.load(template, checkpoint_id=folder / "trained", no_dist=True)
    for fqn, tensor in template["dcp"]["model"].items():
        assert torch.equal(tensor, before[0]["saved"][f"model.{fqn}"])
    for fqn, entries in template["dcp"]["optim"]["state"].items():
        assert all(
            torch.equal(t, before[0]["saved"][f"optim.state.{fqn}.{e}"]) for e, t in entries.items()
        )


def test_a_tied_tensor_is_stored_once(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    metadata = dcp.FileSystemReader(saved[0] / "trained").read_metadata()
    names = {
        name for name in metadata.state_dict_metadata if "embed_tokens" in name or "lm_head" in name
    }
    assert names == {
        "dcp.model.model.embed_tokens.weight",
        *(
            f"dcp.optim.state.model.embed_tokens.weight.{entry}"
            for entry in ("step", "exp_avg", "exp_avg_sq")
        ),
    }
    assert all(
        type(entry).__name__ == "TensorStorageMetadata"
        for entry in metadata.state_dict_metadata.values()
    )


class ArealState:
    """The state dict that AReaL saves, made by torch's own functions."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("only saved in this test")


def _areal_round_trip(rank: int, world_size: int, folder: str) -> None:
    for tied in (True, False):
        state = make_state(0, steps=2, tied=tied)
        dcp.save(
            {"dcp": ArealState(state.model, state.optimizer)},
            checkpoint_id=f"{folder}/areal_{tied}",
        )
        dist.barrier()
        other = make_state(1, tied=tied)
        load_dcp(f"{folder}/areal_{tied}", other)
        assert same(whole(other), whole(state))
    stock = make_state(2)
    save_dcp(f"{folder}/for_stock", stock)
    plain = make_state(0, steps=2, kind="sgd", momentum=0.0)
    dcp.save({"dcp": ArealState(plain.model, plain.optimizer)}, checkpoint_id=f"{folder}/areal_sgd")
    save_dcp(f"{folder}/sgd", plain)
    for name in ("areal_sgd", "sgd"):
        other = make_state(1, kind="sgd", momentum=0.0)
        load_dcp(f"{folder}/{name}", other)
        assert same(whole(other), whole(plain))
    assert other.scheduler.get_last_lr() == plain.scheduler.get_last_lr()
    again = make_state(3)
    dcp.load({"dcp": again}, checkpoint_id=f"{folder}/for_stock")
    assert same(whole(again), whole(stock))


def test_a_folder_of_areal_loads_and_the_stateful_works_with_stock_dcp(tmp_path: Path) -> None:
    run_ranks(_areal_round_trip, 2, str(tmp_path))


class Bomb:
    """Pickles to a call that creates a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


def _expect_tie_broken(rank: int, folder: str) -> None:
    """A tied model refuses a folder with two values, although one rank alone sees them differ."""
    separate = make_state(0, tied=False)
    with torch.no_grad():
        separate.model.lm_head.weight.copy_(separate.model.model.embed_tokens.weight)
    save_dcp(f"{folder}/equal", DCPState(separate.model))
    tied = make_state(1)
    load_dcp(f"{folder}/equal", DCPState(tied.model))
    assert torch.equal(
        tied.model.lm_head.weight.full_tensor(), separate.model.lm_head.weight.full_tensor()
    )
    if rank == 1:
        separate.model.lm_head.weight.to_local().data[-1, -1] += 1
    save_dcp(f"{folder}/unequal", DCPState(separate.model))
    words = (
        "lm_head.weight and model.embed_tokens.weight"
        if rank == 1
        else "rank 1: CheckpointMismatchError"
    )
    _expect_refusal(
        f"{folder}/unequal", DCPState(make_state(1).model), CheckpointMismatchError, words
    )


def _break(folder: Path, how: str) -> None:
    data = folder / "__1_0.distcp"
    if how == "file missing":
        data.unlink()
    elif how == "file short":
        os.truncate(data, data.stat().st_size // 2)
    elif how == "bytes flipped":
        raw = bytearray(data.read_bytes())
        raw[len(raw) // 2] ^= 0xFF
        data.write_bytes(raw)
    elif how == "metadata garbage":
        (folder / ".metadata").write_bytes(b"not a pickle")
    elif how == "metadata empty":
        (folder / ".metadata").write_bytes(b"")
    elif how == "metadata malicious":
        (folder / ".metadata").write_bytes(pickle.dumps(Bomb(str(folder / "bomb_went_off"))))
    elif how == "foreign keys":
        shutil.rmtree(folder)
        dcp.save({"app": {"weight": torch.ones(3)}}, checkpoint_id=folder, no_dist=True)
    elif how == "foreign folder":
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "notes.txt").write_text("hello")
    elif how == "missing folder":
        shutil.rmtree(folder)


BREAKAGES: dict[str, tuple[type[Exception], str]] = {
    "file missing": (CheckpointCorruptError, "missing"),
    "file short": (CheckpointCorruptError, "bytes"),
    "bytes flipped": (CheckpointCorruptError, "digest"),
    "metadata garbage": (CheckpointCorruptError, "cannot be read"),
    "metadata empty": (CheckpointCorruptError, "cannot be read"),
    "metadata malicious": (CheckpointCorruptError, "mkdir"),
    "foreign keys": (CheckpointMismatchError, "it has a model under '' (app.weight)"),
    "foreign folder": (CheckpointNotFoundError, "not a DCP checkpoint"),
    "missing folder": (CheckpointNotFoundError, "does not exist"),
}


def test_metadata_written_by_python_3_13_is_read(
    saved: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder = tmp_path / "python_3_13"
    shutil.copytree(saved[0] / "trained", folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    assert metadata.storage_meta is not None
    metadata.storage_meta.checkpoint_id = folder
    data = pickle.dumps(metadata, protocol=2).replace(b"cpathlib\n", b"cpathlib._local\n")
    assert b"cpathlib._local\nPosixPath" in data
    (folder / ".metadata").write_bytes(data)
    read, expected = read_layout(folder), read_layout(saved[0] / "trained")
    assert read.files == expected.files
    assert {name: stored.shape for name, stored in read.tensors.items()} == {
        name: getattr(entry, "size", None) for name, entry in metadata.state_dict_metadata.items()
    }


def _expect_refusal(path: str, state: DCPState, kind: type[Exception], words: str) -> str:
    """Load, and expect an error on every rank and no change."""
    before = whole(state)
    try:
        load_dcp(path, state)
    except HoldfastError as error:
        assert isinstance(error, kind | PeerError), repr(error)
        assert words in str(error), str(error)
        assert same(whole(state), before)
        return str(error)
    raise AssertionError(f"{path} was loaded")


def _refusals(rank: int, world_size: int, folder: str) -> None:
    save_dcp(f"{folder}/good", make_state(0, steps=1))
    save_dcp(f"{folder}/model_only", DCPState(make_state(0).model))
    save_dcp(f"{folder}/untied", make_state(0, tied=False))
    for how, (kind, words) in BREAKAGES.items():
        broken = Path(folder) / how.replace(" ", "_")
        if rank == 0:
            shutil.copytree(f"{folder}/good", broken)
            _break(broken, how)
            if how.startswith("metadata"):
                (broken / "manifest.json").unlink()
        dist.barrier()
        _expect_refusal(str(broken), make_state(1, steps=1), kind, words)
        assert not (broken / "bomb_went_off").exists()
    good = f"{folder}/good"
    _expect_refusal(good, make_state(1, hidden_size=64), CheckpointMismatchError, "has shape")
    _expect_refusal(good, make_state(1, layers=1), CheckpointMismatchError, "unexpected")
    _expect_refusal(good, make_state(1, layers=3), CheckpointMismatchError, "lacks")
    _expect_refusal(good, make_state(1, tied=False), CheckpointMismatchError, "lacks")
    _expect_refusal(
        good, make_state(1, kind="sgd"), CheckpointMismatchError, "another model or optimizer"
    )
    _expect_refusal(f"{folder}/untied", make_state(1), CheckpointMismatchError, "lm_head")
    _expect_refusal(
        f"{folder}/model_only", make_state(1), CheckpointMismatchError, "with_optim=False"
    )
    _expect_tie_broken(rank, folder)
    halves = make_state(1)
    halves.model.bfloat16()
    _expect_refusal(good, DCPState(halves.model), CheckpointMismatchError, "dtype")
    with pytest.raises(CheckpointExistsError, match="never written over"):
        save_dcp(good, make_state(0))
    with pytest.raises(CheckpointWriteError, match="cannot write"):
        save_dcp("/proc/holdfast/checkpoint", make_state(0))


def test_a_bad_or_foreign_folder_is_refused_before_anything_changes(tmp_path: Path) -> None:
    run_ranks(_refusals, 2, str(tmp_path))


def _disk_full_on_one_rank(rank: int, world_size: int, folder: str) -> str:
    import resource
    import signal

    state = make_state(0, steps=1)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    with pytest.raises(CheckpointWriteError) as caught:
        save_dcp(f"{folder}/full", state)
    return str(caught.value)


def test_a_full_disk_on_one_rank_fails_all_and_leaves_nothing_behind(tmp_path: Path) -> None:
    messages = run_ranks(_disk_full_on_one_rank, 2, str(tmp_path))
    assert all("rank 1" in message for message in messages)
    assert os.listdir(tmp_path) == []
