"""Checkpoints of partly frozen models: their contents, and the world sizes and bases that can load
them.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from holdfast.engine import FSDPConfig, SaveLoadMeta
from holdfast.engine.dcp import state as state_module
from holdfast.engine.dcp.base_model import (
    base_fingerprint,
    frozen_bases,
    pack_share,
    same_base,
    sample_base,
)
from holdfast.engine.dcp.format import read_layout
from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.utils.errors import CheckpointCorruptError, CheckpointMismatchError
from holdfast.utils.plain_values import pack_json
from tests.engine.lora.engines import lora_engine, same, train, trained_state, whole, write_base
from tests.engine.models import build_reference, tiny_qwen3
from tests.helpers import run_ranks


def _save(rank: int, world_size: int, root: str) -> dict[str, torch.Tensor]:
    engine = lora_engine(Path(root) / "base")
    train(engine, 3)
    state = trained_state(engine)
    engine.save(SaveLoadMeta(f"{root}/of_{world_size}", "dcp", True), blocking=False)
    engine.save(SaveLoadMeta(f"{root}/model_of_{world_size}", "dcp", False))
    engine.wait_for_save()
    engine.destroy()
    return state


def _load(rank: int, world_size: int, root: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    engine, found = lora_engine(Path(root) / "base"), {}
    for saved in sizes:
        engine.load(SaveLoadMeta(f"{root}/of_{saved}", "dcp", True))
        found[f"of_{saved}"] = trained_state(engine)
        train(engine, 1)
        engine.load(SaveLoadMeta(f"{root}/model_of_{saved}", "dcp", False))
        found[f"model_of_{saved}"] = trained_state(engine)
    engine.destroy()
    return found


def _refuse(rank: int, world_size: int, root: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, keys in {
        "other": {"path": f"{root}/other"},
        "seeded": {"init_from_scratch": True},
        "targets": {"target_modules": ["q_proj"]},
        "full": {"use_lora": False},
    }.items():
        engine = lora_engine(Path(root) / "base", **keys)
        before = trained_state(engine)
        try:
            engine.load(SaveLoadMeta(f"{root}/of_2", "dcp", True))
            found[name] = "loaded"
        except CheckpointMismatchError as error:
            found[name] = str(error)
        found[f"{name}_unchanged"] = same(before, trained_state(engine))
        engine.destroy()
    return found


@pytest.fixture(scope="module", params=[(1, 2), pytest.param((1, 2, 3), marks=pytest.mark.slow)])
def sizes(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """World sizes that save and load."""
    return request.param


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    write_base(root / "base")
    write_base(root / "other", seed=1)
    return root


@pytest.fixture(scope="module")
def save_once(root: Path) -> Callable[[int], dict[str, torch.Tensor]]:
    """A function that writes the checkpoint of a world size once and returns its tensors."""
    return cache(lambda world_size: run_ranks(_save, world_size, str(root))[0])


@pytest.fixture(scope="module")
def saved(
    save_once: Callable[[int], dict[str, torch.Tensor]], sizes: tuple[int, ...]
) -> dict[int, dict[str, torch.Tensor]]:
    return {world_size: save_once(world_size) for world_size in sizes}


def test_adapters_and_moments_load_bit_by_bit_at_every_world_size(
    saved: dict[int, dict[str, torch.Tensor]], root: Path
) -> None:
    for size in saved:
        found = run_ranks(_load, size, str(root), tuple(saved))[0]
        for world_size, state in saved.items():
            assert same(found[f"of_{world_size}"], state)
            of_model = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
            assert same(
                {n: t for n, t in found[f"model_of_{world_size}"].items() if n in of_model},
                of_model,
            )


def test_only_trained_weights_are_stored_with_a_digest_of_the_base(root: Path, saved: Any) -> None:
    names = read_layout(root / "of_2").names()
    params = {name for name in names if name.startswith("dcp.model.")}
    assert len(params) == 28 and all(".lora_" in name for name in params), (
        "no frozen weight, tied or not"
    )
    assert {"dcp.base", "dcp.base_sample.rank_00000", "dcp.base_sample.rank_00001"} <= names


@pytest.mark.slow
def test_another_base_is_refused_before_anything_changes(saved: Any, root: Path) -> None:
    for found in run_ranks(_refuse, 2, str(root)):
        assert (
            "of_2 holds what was trained on another base model: its frozen parameters of "
            f"{root}/base"
        ) in found["other"]
        assert f"those here frozen parameters of {root}/other" in found["other"]
        assert "another base model" in found["seeded"]
        assert (
            "dcp.model.model.layers.0.mlp.down_proj.lora_A.default.weight', which this model"
            in found["targets"]
        )
        assert "other parameters frozen, which it leaves out" in found["full"]
        assert all(found[f"{name}_unchanged"] for name in ("other", "seeded", "targets", "full"))


def _size(rank: int, world_size: int, root: str) -> int:
    engine = lora_engine(Path(root) / "wide", lora_rank=64)
    train(engine, 1)
    engine.save(SaveLoadMeta(f"{root}/wide_dcp", "dcp", True))
    return sum(tensor.nbytes for tensor in trained_state(engine).values())


@pytest.mark.slow
def test_a_checkpoint_is_little_larger_than_adapters_and_moments(root: Path) -> None:
    write_base(root / "wide", hidden_size=384)
    trained_bytes = run_ranks(_size, 2, str(root))[0]
    stored_bytes = sum(file.stat().st_size for file in (root / "wide_dcp").iterdir())
    print(
        f"{stored_bytes} bytes for {trained_bytes} of adapters and moments: "
        f"{stored_bytes / trained_bytes:.3f}"
    )
    assert trained_bytes <= stored_bytes <= 1.2 * trained_bytes


# Models frozen by other code, without processes


def partly_frozen(seed: int = 0) -> nn.Module:
    """A tied model with only its last block trained, and a buffer that counts."""
    model = build_reference(tiny_qwen3(), seed)
    model.register_buffer("count", torch.full((2,), float(seed)))
    model.requires_grad_(False)
    model.get_submodule("model.layers.1").requires_grad_(True)
    return model


def peft_model(seed: int = 0) -> nn.Module:
    """A ``PeftModel`` with adapters that are not zero."""
    model = get_peft_model(
        build_reference(tiny_qwen3(), seed), LoraConfig(r=2, target_modules=["q_proj", "o_proj"])
    )
    torch.manual_seed(7)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data.normal_()
    return model


def trained(model: nn.Module) -> DCPState:
    """A state after a step that moves all trained parameters."""
    optimizer = torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad], lr=0.1
    )
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    return DCPState(model, optimizer, trainable_only=True)


def copies(state: DCPState) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.live_tensors().items()}


@pytest.mark.parametrize("build", [partly_frozen, peft_model])
def test_a_partly_frozen_model_is_stored_without_its_frozen_weights(
    build: Callable[[int], nn.Module], tmp_path: Path
) -> None:
    state = trained(build(0))
    save_dcp(tmp_path / "saved", state)
    stored = {
        n.removeprefix("dcp.model.")
        for n in read_layout(tmp_path / "saved").names()
        if n.startswith("dcp.model.")
    }
    expected = {name for name, param in state.model.named_parameters() if param.requires_grad}
    expected |= {name for name, _ in state.model.named_buffers() if name == "count"}
    assert stored == expected and not any("lm_head" in name or "embed" in name for name in stored)

    again = trained(build(0))
    for param in again.model.parameters():
        if param.requires_grad:
            param.data.zero_()
    load_dcp(tmp_path / "saved", again)
    assert same(copies(again), copies(state))

    other = trained(build(1))
    before = copies(other)
    with pytest.raises(CheckpointMismatchError, match="another base model"):
        load_dcp(tmp_path / "saved", other)
    assert same(copies(other), before)


def test_a_base_of_which_one_element_was_edited_is_refused(tmp_path: Path) -> None:
    save_dcp(tmp_path / "saved", trained(partly_frozen()))
    edited = trained(partly_frozen())
    load_dcp(tmp_path / "saved", edited)
    with torch.no_grad():
        edited.model.get_parameter("model.embed_tokens.weight").view(-1)[1] += (
            1e-3  # not in the sample
        )
    with pytest.raises(CheckpointMismatchError, match="another base model"):
        load_dcp(tmp_path / "saved", edited)


def body_and_head(seed: int = 0) -> nn.Module:
    """A sharded model whose body, the largest part, is frozen."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 3))
    model[0].requires_grad_(False)
    fully_shard(model)
    return model


def _changed_between_saves(rank: int, world_size: int, root: str) -> dict[str, bool]:
    """Whether a fresh model gets every bit from a folder that was saved after a change to the
    frozen body.
    """
    found = {}

    def edited(model: nn.Module) -> None:
        change, body = torch.zeros(100, 100), cast(Any, model.get_parameter("0.weight"))
        change[0, 1] = 1e-3  # not in the sample
        with torch.no_grad():
            body.add_(distribute_tensor(change, body.device_mesh, body.placements))

    def edited_as_data(model: nn.Module) -> None:
        if rank == 0:
            cast(Any, model.get_parameter("0.weight").data).to_local()[0, 1] += 1e-3

    def loaded(model: nn.Module) -> None:
        set_model_state_dict(model, body_and_head(1).state_dict())

    def trained_meanwhile(model: nn.Module) -> None:
        model.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        model(torch.ones(4, 100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.requires_grad_(False)
        model.get_submodule("1").requires_grad_(True)

    for change in (edited, edited_as_data, loaded, trained_meanwhile):
        model, folder = body_and_head(), Path(root, change.__name__)
        save_dcp(f"{folder}_before", DCPState(model, trainable_only=True))
        change(model)
        save_dcp(f"{folder}_after", DCPState(model, trainable_only=True))
        fresh = body_and_head()
        load_dcp(f"{folder}_before", DCPState(fresh, trainable_only=True))
        load_dcp(f"{folder}_after", DCPState(fresh, trainable_only=True))
        pairs = zip(model.parameters(), fresh.parameters(), strict=True)
        found[change.__name__] = all(torch.equal(whole(one), whole(other)) for one, other in pairs)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_base_that_changed_between_two_saves_is_stored_by_the_second(
    world_size: int, tmp_path: Path
) -> None:
    for found in run_ranks(_changed_between_saves, world_size, str(tmp_path)):
        assert len(found) == 4 and all(found.values()), found


def test_adapters_that_count_otherwise_are_refused_before_anything_changes(tmp_path: Path) -> None:
    def with_alpha(alpha: int) -> nn.Module:
        return get_peft_model(
            build_reference(tiny_qwen3()),
            LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"]),
        )

    save_dcp(tmp_path / "saved", trained(with_alpha(4)))
    other = trained(with_alpha(8))
    before = copies(other)
    with pytest.raises(
        CheckpointMismatchError, match=r"q_proj with scaling 2\.0, this model has 4\.0: lora_alpha"
    ):
        load_dcp(tmp_path / "saved", other)
    assert same(copies(other), before)
    load_dcp(tmp_path / "saved", trained(with_alpha(4)))


@pytest.mark.parametrize(
    "settings", [[], {"q_proj": {}}, {"q_proj": {"scaling": {"default": "2"}, "merged": []}}]
)
def test_invalid_settings_of_adapters_are_damage(settings: Any) -> None:
    state = trained(peft_model())
    with pytest.raises(CheckpointCorruptError, match="does not hold settings of adapters"):
        state.load_state_dict(state.state_dict() | {"adapters": pack_json(settings, "adapters")})


def test_a_base_that_was_loaded_over_another_is_stored_where_it_differs(tmp_path: Path) -> None:
    other = partly_frozen()
    other.get_parameter("model.embed_tokens.weight").data.view(-1)[1] += 1e-3  # not in the sample
    save_dcp(tmp_path / "all", DCPState(other))
    state = DCPState(partly_frozen(), trainable_only=True)
    save_dcp(tmp_path / "before", state)
    load_dcp(tmp_path / "all", state)
    save_dcp(tmp_path / "after", state)
    again = partly_frozen()
    load_dcp(tmp_path / "after", DCPState(again, trainable_only=True))
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), other.parameters(), strict=True)
    )
    stored = read_layout(tmp_path / "after").names() - read_layout(tmp_path / "before").names()
    assert stored == {"dcp.model.model.embed_tokens.weight"}, (
        "nothing but what changed is stored besides"
    )


@pytest.mark.parametrize("noted_by", ["record_frozen_base", "save", "load"])
def test_a_frozen_weight_that_changes_after_it_was_noted_is_stored(
    tmp_path: Path, noted_by: str
) -> None:
    save_dcp(tmp_path / "before", DCPState(partly_frozen(), trainable_only=True))
    state = DCPState(partly_frozen(), trainable_only=True)
    assert frozen_bases.of(state.model) is None, "a state that nobody has used notes nothing"
    if noted_by == "record_frozen_base":
        state.record_frozen_base()
    elif noted_by == "save":
        save_dcp(tmp_path / "unchanged", state)
    else:
        load_dcp(tmp_path / "before", state)
    state.model.get_parameter("model.embed_tokens.weight").data.view(-1)[1] += 1e-3
    save_dcp(tmp_path / "after", DCPState(state.model, trainable_only=True))
    stored = read_layout(tmp_path / "after").names() - read_layout(tmp_path / "before").names()
    assert stored == {"dcp.model.model.embed_tokens.weight"}


def test_an_empty_fingerprint_differs_from_every_base() -> None:
    assert not same_base(base_fingerprint([]), base_fingerprint([pack_share(1, 2)]))


@pytest.mark.parametrize("n_bytes", [0, 4])
def test_a_folder_without_a_fingerprint_of_its_base_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_bytes: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            state_module, "sample_base", lambda *given: sample_base(*given)[:n_bytes].clone()
        )
        save_dcp(tmp_path / "saved", trained(partly_frozen()))
    with pytest.raises(CheckpointCorruptError, match="'base_sample' of a rank has"):
        load_dcp(tmp_path / "saved", trained(partly_frozen()))


def test_folders_that_know_the_base_by_a_sample_alone_load_on_the_same_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(state_module, "sample_base", lambda *given: sample_base(*given)[:8].clone())
        save_dcp(tmp_path / "saved", trained(partly_frozen()))
    load_dcp(tmp_path / "saved", trained(partly_frozen()))
    with pytest.raises(CheckpointMismatchError, match="another base model"):
        load_dcp(tmp_path / "saved", trained(partly_frozen(1)))


def test_frozen_weights_that_may_have_changed_are_stored(tmp_path: Path) -> None:
    state = trained(partly_frozen())
    state.model.get_submodule("model.layers.1.mlp").requires_grad_(False)  # after some training
    for part in (state, state.model_only()):
        save_dcp(tmp_path / f"saved_{part is state}", part)
        names = read_layout(tmp_path / f"saved_{part is state}").names()
        assert {
            f"dcp.model.model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
        } <= names
        assert "dcp.model.model.embed_tokens.weight" not in names
    again = trained(partly_frozen())
    for param in again.model.get_submodule("model.layers.1").parameters():
        param.data.zero_()
    load_dcp(tmp_path / "saved_True", again)
    assert same(copies(again), copies(trained(partly_frozen())))


def test_torchs_own_load_refuses_another_base_too(tmp_path: Path) -> None:
    save_dcp(tmp_path / "saved", trained(partly_frozen()))
    dcp.load({"dcp": trained(partly_frozen())}, checkpoint_id=tmp_path / "saved")
    with pytest.raises(CheckpointMismatchError, match="another base model"):
        trained(partly_frozen(1)).load_state_dict(trained(partly_frozen()).state_dict())


def _on_two_meshes(rank: int, world_size: int, root: str) -> None:
    shards = lora_engine(Path(root) / "base")
    replicas = lora_engine(Path(root) / "base", fsdp=FSDPConfig(replicate_size=2))
    for source, target in ((shards, replicas), (replicas, shards)):
        folder = f"{root}/of_{'shards' if source is shards else 'replicas'}"
        train(source, 1)
        source.save(SaveLoadMeta(folder, "dcp", True), blocking=False)
        source.wait_for_save()
        for load in (load_dcp, lambda path, state: dcp.load({"dcp": state}, checkpoint_id=path)):
            train(target, 1)
            load(folder, target.dcp_state())
            assert same(trained_state(target), trained_state(source))
        source.save(SaveLoadMeta(f"{folder}_hf", "hf", False), blocking=False)
        source.wait_for_save()


@pytest.mark.slow
def test_adapters_of_replicas_load_into_shards_and_back(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    run_ranks(_on_two_meshes, 2, str(tmp_path))


def test_a_whole_checkpoint_loads_into_a_partly_frozen_model_and_what_is_saved_can_be_chosen(
    tmp_path: Path,
) -> None:
    whole = trained(partly_frozen(0))
    whole = DCPState(whole.model, whole.optimizer)
    save_dcp(tmp_path / "whole", whole)
    assert "dcp.base" not in read_layout(tmp_path / "whole").names()
    other = trained(partly_frozen(1))
    load_dcp(tmp_path / "whole", other)
    for (name, one), two in zip(
        whole.model.named_parameters(), other.model.parameters(), strict=True
    ):
        assert torch.equal(one, two), name
    save_dcp(tmp_path / "part", trained(partly_frozen(0)))
    load_dcp(tmp_path / "part", DCPState(partly_frozen(0)))  # the folder says which tensors it has


def test_frozen_weights_are_stored_unless_the_caller_leaves_them_out(tmp_path: Path) -> None:
    for model in (build_reference(tiny_qwen3()).requires_grad_(False), partly_frozen()):
        assert {f"model.{name}" for name, _ in model.named_parameters()} <= DCPState(
            model
        ).live_tensors().keys()
        assert "base" not in DCPState(model).state_dict()
    frozen = peft_model().requires_grad_(False)  # like PeftModel.from_pretrained
    save_dcp(tmp_path / "adapters", trained(peft_model()))
    load_dcp(tmp_path / "adapters", DCPState(frozen))
    expected = dict(trained(peft_model()).model.named_parameters())
    assert all(torch.equal(param, expected[name]) for name, param in frozen.named_parameters())


def test_the_base_in_another_dtype_is_another_base(tmp_path: Path) -> None:
    save_dcp(tmp_path / "saved", trained(peft_model()))
    model = peft_model()
    for name, param in model.named_parameters():
        if "lora_" not in name:
            param.data = param.data.bfloat16()
    with pytest.raises(
        CheckpointMismatchError, match=r"24 float32.*24 bfloat16.*keeps them in another dtype"
    ):
        load_dcp(tmp_path / "saved", DCPState(model))


def _foreign_sharded(rank: int, world_size: int, root: str) -> bool:
    model = peft_model()
    for block in model.get_submodule("base_model.model.model.layers").children():
        fully_shard(block)
    fully_shard(model)
    load_dcp(f"{root}/alone", DCPState(model))
    save_dcp(f"{root}/sharded_{world_size}", DCPState(model, trainable_only=True))
    return True


def test_a_peft_model_moves_between_one_process_and_fsdp2(tmp_path: Path) -> None:
    alone = trained(peft_model())
    save_dcp(tmp_path / "alone", alone.model_only())
    run_ranks(_foreign_sharded, 2, str(tmp_path))
    again = DCPState(peft_model(), trainable_only=True)
    load_dcp(tmp_path / "sharded_2", again)
    assert same(copies(again), copies(alone.model_only()))
