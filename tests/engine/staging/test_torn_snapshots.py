"""Weights changed outside of a step while a snapshot copies them: the change waits, or the snapshot
fails.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.engine import SaveLoadMeta, changing_weights
from holdfast.engine.api import WeightFormat
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.lora.adapters import adapted_layers
from holdfast.engine.memory.tensors import flatten, local_tensor
from holdfast.engine.staging import background_save, staged_state
from holdfast.engine.staging.staged_state import Staging
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.utils.errors import CheckpointWriteError, PeerError, TornSnapshotError
from holdfast.utils.remote import RemoteFolder
from tests.engine.lora.engines import lora_engine, train, write_base
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.helpers import ON_DEVICES, run_ranks, unique_name
from tests.limits import stretched
from tests.recover.runs import (
    SPEC,
    make_batch,
    make_engine,
    names,
    square_loss,
    step_info,
    token_count,
)

pytestmark = pytest.mark.timeout(100)


def make_state(sharded: bool = False, size: int = 40) -> DCPState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, size), nn.Linear(size, 3))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    state = DCPState(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), changes_only_in_step=True
    )
    step(state)
    return state


def step(state: DCPState) -> None:
    assert state.optimizer is not None
    state.model(torch.randn(4, 5)).square().sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


def values_of(nested: Any) -> dict[str, torch.Tensor]:
    return {name: local_tensor(tensor).clone() for name, tensor in flatten(nested)}


def differing(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    assert some.keys() == others.keys()
    return [name for name in some if not torch.equal(some[name], others[name])]


@contextmanager
def held_copies(*seconds: float) -> Iterator[threading.Event]:
    """Let the threads of delayed copies wait for the event, each at most the given number of
    seconds.
    """
    gate, copy, waits = threading.Event(), staged_state._copy_in_thread, iter(seconds)

    def held(*args: Any) -> Any:
        gate.wait(next(waits, 20))
        return copy(*args)

    staged_state._copy_in_thread = held
    try:
        yield gate
    finally:
        gate.set()
        staged_state._copy_in_thread = copy


def moments(state: DCPState) -> list[torch.Tensor]:
    assert state.optimizer is not None
    return [entries["exp_avg"] for entries in state.optimizer.state.values()]


def _load_older(state: DCPState) -> None:
    state.model.load_state_dict(
        {name: tensor.clone() + 1 for name, tensor in state.model.state_dict().items()}
    )


WAYS: dict[str, Callable[[DCPState], object]] = {
    "in place": lambda state: [p.mul_(2) for p in state.model.parameters()],
    "in place in the last one": lambda state: list(state.model.parameters())[-1].add_(1),
    "a copy": lambda state: [p.copy_(torch.ones_like(p)) for p in state.model.parameters()],
    "load_state_dict": _load_older,
    "the moments": lambda state: [moment.zero_() for moment in moments(state)],
    "foreach": lambda state: torch._foreach_mul_(list(state.model.parameters()), 2.0),
    ".data": lambda state: [p.data.mul_(2) for p in state.model.parameters()],
    "the local tensor": lambda state: [local_tensor(p).mul_(2) for p in state.model.parameters()],
    "an element of the local tensor": lambda state: local_tensor(next(state.model.parameters()))[
        7
    ].fill_(3.0),
}


def check_way(way: str, sharded: bool) -> None:
    state = make_state(sharded)
    staging, before = Staging(state.model), values_of(state.state_dict())
    with held_copies(), torch.no_grad():
        staging.stage(state)
        WAYS[way](state)
    with pytest.raises(TornSnapshotError, match=r"(model|optim\.state)\..*changing_weights"):
        staging.finish()
    with pytest.raises(TornSnapshotError):
        staging.finish()
    step(state)
    after = values_of(state.state_dict())
    assert differing(after, before)
    staged = staging.stage(state)
    staging.finish()
    assert differing(values_of(staged), after) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_change_during_the_copy_fails_that_snapshot_and_no_other(way: str) -> None:
    check_way(way, sharded=False)


def _every_way(rank: int, world_size: int) -> None:
    for way in WAYS:
        check_way(way, sharded=True)


def test_a_change_of_shards_during_the_copy_fails_only_that_snapshot() -> None:
    run_ranks(_every_way, 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_change_after_the_copy_harms_nothing(way: str) -> None:
    state = make_state()
    staging, before = Staging(state.model), values_of(state.state_dict())
    staged = staging.stage(state)
    staging.wait()
    with torch.no_grad():
        WAYS[way](state)
    staging.finish()
    assert differing(values_of(staged), before) == []


@pytest.mark.parametrize("way", WAYS)
def test_the_guard_waits_for_the_copy(way: str) -> None:
    state = make_state()
    staging, before = Staging(state.model), values_of(state.state_dict())
    with held_copies(0.2):
        staged = staging.stage(state)
        with changing_weights(state.model), torch.no_grad():
            WAYS[way](state)
    staging.finish()
    assert differing(values_of(staged), before) == []


def test_the_guard_knows_models_by_parts_and_parts_by_models() -> None:
    state = make_state()
    outer, part = nn.ModuleList([state.model]), next(state.model.children())
    for module, waits in ((outer, True), (part, True), (nn.Linear(2, 2), False)):
        staging = Staging(state.model)
        with held_copies(0.2):
            staging.stage(state)
            with changing_weights(module):
                assert staging.reads_live != waits, module
        staging.finish()


def test_state_staged_inside_the_guard_is_copied_at_once() -> None:
    state = make_state()
    staging = Staging(state.model)
    with changing_weights(state.model), torch.no_grad(), held_copies():
        WAYS["in place"](state)
        before = values_of(state.state_dict())
        staged = staging.stage(state)
        WAYS["in place"](state)
        staging.finish()
    assert differing(values_of(staged), before) == []
    with (
        held_copies() as gate,
        pytest.raises(TornSnapshotError),
    ):  # without the guard the snapshot is torn
        staging.stage(state)
        with torch.no_grad():
            WAYS["in place"](state)
        gate.set()
        staging.finish()


def test_an_operation_that_is_under_way_when_the_copy_ends_is_noticed() -> None:
    model = nn.Linear(6_000_000, 1, bias=False)
    state = DCPState(model, torch.optim.SGD(model.parameters()), changes_only_in_step=True)
    staging, n_torn = Staging(model), 0
    for number in range(20):
        with torch.no_grad():
            model.weight.fill_(1.0)
            staged = staging.stage(state)
            model.weight.mul_(2)
        try:
            staging.finish()
        except TornSnapshotError:
            n_torn += 1
        else:
            assert staged["model"]["weight"].unique().tolist() == [1.0], number
    assert n_torn


def test_the_step_of_another_optimizer_of_the_model_waits_too() -> None:
    state = make_state()
    other = DCPState(
        state.model, torch.optim.SGD(state.model.parameters(), lr=0.1), changes_only_in_step=True
    )
    stagings, before = (
        [Staging(state.model), Staging(state.model)],
        values_of(state.state_dict()["model"]),
    )
    state.model(torch.randn(4, 5)).square().sum().backward()
    with held_copies(0.4, 0.1):
        staged = [
            staging.stage(each) for staging, each in zip(stagings, (state, other), strict=True)
        ]
        assert other.optimizer is not None
        other.optimizer.step()
    for staging, values in zip(stagings, staged, strict=True):
        staging.finish()
        assert differing(values_of(values["model"]), before) == []


def _torn_on_rank_1(rank: int, world_size: int, root: str) -> list[Any]:
    state, told = make_state(), []
    handler = RecoverHandler(
        RecoverConfig("e", "t", fileroot=root, freq_steps=1, save_failures_allowed=1), SPEC
    )
    handler.load(state)
    for number in range(4):
        step(state)
        with held_copies(), torch.no_grad():
            assert handler.dump(state, step_info(number))
            if rank == 1 and number in (1, 3):
                WAYS[".data"](state)
        told.append((handler.save_stats.committed, handler.save_stats.failed))
    with pytest.raises((TornSnapshotError, PeerError), match="changing_weights") as error:
        handler.wait()
    handler.close()
    return [*told, type(error.value).__name__]


def test_the_handler_skips_a_torn_snapshot_on_all_ranks_and_trains_on(tmp_path: Path) -> None:
    results = run_ranks(_torn_on_rank_1, 2, str(tmp_path))
    counts = [(0, 0), (1, 0), (1, 1), (2, 1)]
    assert results == [[*counts, "PeerError"], [*counts, "TornSnapshotError"]]
    assert names(tmp_path) == ["global_step_0", "global_step_2"]


def _torn_saves(rank: int, world_size: int, model: str, root: Path) -> None:
    engine = make_engine(model)
    engine.train_batch(make_batch([1, 2]), square_loss, token_count)
    for kind in ("dcp", "hf"):
        meta = SaveLoadMeta(str(root / f"torn-{kind}"), kind, kind == "dcp")
        with held_copies(), torch.no_grad():
            engine.save(meta, blocking=False)
            for parameter in engine.model.parameters():
                parameter.data.mul_(2)
        with pytest.raises(TornSnapshotError):
            engine.wait_for_save()
        engine.save(SaveLoadMeta(str(root / kind), kind, kind == "dcp"), blocking=False)
        with changing_weights(engine.model), torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(2)
        engine.wait_for_save()
    engine.destroy()


@pytest.mark.skipif(
    ON_DEVICES, reason="holds copies on the host; tests/simulated_cuda has those of a device"
)
def test_a_save_in_the_background_is_never_torn_either(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    run_ranks(_torn_saves, 1, str(tmp_path / "model"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "hf", "model"]


def _torn_until_the_end(rank: int, world_size: int, root: Path) -> None:
    engine = lora_engine(root / "base")
    train(engine, 1)
    url = f"memory://{unique_name(root)}/out"
    writers: dict[str, WeightFormat] = {
        str(root / "hf"): "hf",
        url: "hf",
        str(root / "peft"): "peft",
    }
    for path, kind in writers.items():
        name = {"hf": "export_hf", "peft": "save_adapters"}[kind]
        export: Callable[..., None] = getattr(background_save, name)

        @torch.no_grad()
        def disturbed(*args: Any, export: Any = export, **kwargs: Any) -> None:
            for parameter in engine.model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1)
            export(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(background_save, name, disturbed)
            meta = SaveLoadMeta(path, kind, False)
            engine.save(meta, blocking=False)
            with pytest.raises(TornSnapshotError):
                engine.wait_for_save()
    assert RemoteFolder(url, setting="path", error=CheckpointWriteError).names() == []
    engine.destroy()


def test_an_export_that_shows_a_change_only_at_its_end_does_not_become_visible(
    tmp_path: Path,
) -> None:
    write_base(tmp_path / "base")
    run_ranks(_torn_until_the_end, 1, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def _merge(engine: Any, factor: float) -> None:
    """Change the base in place as PEFT's ``merge_adapter`` does, by a factor that loses no bit."""
    with changing_weights(engine.model):
        for layer in adapted_layers(engine.model).values():
            layer.base_layer.weight.data *= factor
            layer.merged_adapters[:] = ["default"] if factor > 1 else []


def _merges_during_exports(rank: int, world_size: int, root: Path) -> None:
    engine = lora_engine(root / "base")
    train(engine, 1)
    export: Callable[..., None] = background_save.export_hf
    engine.save(SaveLoadMeta(str(root / "expected"), "hf", False))
    for name in ("not begun", "begun", "inside"):
        begun, go_on = threading.Event(), threading.Event()

        def held(*args: Any, begun: Any = begun, go_on: Any = go_on, **kwargs: Any) -> None:
            begun.set()
            assert go_on.wait(stretched(30))
            export(*args, **kwargs)

        background_save.export_hf = held
        finishing = threading.Event()
        finish = Staging.finish

        def held_finish(staging: Staging, go: Any = finishing, finish: Any = finish) -> None:
            assert go.wait(stretched(30))
            finish(staging)

        Staging.finish = held_finish  # type: ignore[method-assign]
        try:
            with changing_weights(engine.model) if name == "inside" else nullcontext():
                engine.save(SaveLoadMeta(str(root / name), "hf", False), blocking=False)
            if name == "begun":
                finishing.set()
                assert begun.wait(stretched(30))
                threading.Timer(0.3, go_on.set).start()
            _merge(engine, 2)
            assert go_on.is_set() == (name == "begun"), "only what was begun is waited for"
            finishing.set()
            go_on.set()
            engine.wait_for_save()
        finally:
            Staging.finish = finish  # type: ignore[method-assign]
            background_save.export_hf = export
        _merge(engine, 0.5)
        if rank == 0:
            files = [root / folder / "model.safetensors" for folder in ("expected", name)]
            assert files[0].read_bytes() == files[1].read_bytes(), name
    engine.destroy()


def test_a_frozen_base_that_is_merged_during_an_export_is_exported_as_it_was(
    tmp_path: Path,
) -> None:
    write_base(tmp_path / "base")
    run_ranks(_merges_during_exports, 2, tmp_path)
