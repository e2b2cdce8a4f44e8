"""Engines that leave their device and come back: no bit changes, saves go on, and what computes is
refused.
"""

import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from holdfast.engine import (
    FSDPConfig,
    FSDPEngine,
    OptimizerConfig,
    SaveLoadMeta,
    TrainEngineConfig,
    WeightUpdateMeta,
    full_state_dict,
    load_hf,
    save_hf,
)
from holdfast.engine.dcp.base_model import frozen_bases
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.memory.offloaded import host_copies
from holdfast.engine.memory.tensors import local_tensor
from holdfast.engine.staging import background_save, staged_state
from holdfast.engine.staging.background_job import JobState
from holdfast.engine.staging.staged_model import staged_model
from holdfast.utils.errors import ConfigError, EngineOffloadedError
from holdfast.utils.rng import seed_rng
from tests.engine.lora.engines import batch, train, write_base
from tests.engine.meshes import mesh_options
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.engine.staging.test_background import Gate
from tests.engine.test_expert_parallel import tiny_moe
from tests.helpers import run_ranks, untimed
from tests.limits import stretched
from tests.recover.runs import SPEC, Job, make_handler, newest, step_info
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(150)

KINDS: Mapping[str, dict[str, Any]] = {
    "full": {},
    "lora": {"use_lora": True, "lora_rank": 4},
    "critic": {"is_critic": True},
    "r2": mesh_options("fsdp", replicas=2),
    "c2": mesh_options("fsdp:c2"),
    "t2": mesh_options("fsdp:t2"),
    "d2c2": mesh_options("fsdp:d2c2"),
    "d2t2": mesh_options("fsdp:d2t2"),
    "d2e2": mesh_options("fsdp:d2e2"),
    "d2e2, params on the host": {"backend": "fsdp:d2e2", "fsdp": FSDPConfig(offload_params=True)},
    "d2t2, params on the host": {"backend": "fsdp:d2t2", "fsdp": FSDPConfig(offload_params=True)},
    "params on the host": {"fsdp": FSDPConfig(offload_params=True)},
    "optimizer on the host": {"optimizer": OptimizerConfig(lr=1e-2, offload=True)},
    "t2, optimizer on the host": {
        "backend": "fsdp:t2",
        "optimizer": OptimizerConfig(lr=1e-2, offload=True),
    },
    "d2e2, optimizer on the host": {
        "backend": "fsdp:d2e2",
        "optimizer": OptimizerConfig(lr=1e-2, offload=True),
    },
    "adam8bit on the host": {"optimizer": OptimizerConfig(type="adam8bit", lr=1e-2, offload=True)},
    "muon on the host": {"optimizer": OptimizerConfig(type="muon", lr=1e-2, offload=True)},
    "muon, params on the host": {
        "optimizer": OptimizerConfig(type="muon", lr=1e-2),
        "fsdp": FSDPConfig(offload_params=True),
    },
    "bfloat16": {
        "dtype": "bfloat16",
        "optimizer": OptimizerConfig(type="adam_bf16", lr=1e-2, offload=True),
    },
}

RANKS = dict.fromkeys(KINDS, (1, 2, 4))
RANKS |= {kind: (2,) for kind in KINDS if kind.startswith(("c2", "t2", "d2e2"))}
RANKS |= {"r2": (2, 4)} | dict.fromkeys(("d2c2", "d2t2", "d2t2, params on the host"), (4,))


def write_model(folder: Path, kind: str) -> None:
    if "e2" in kind:
        write_model_folder(folder, tiny_moe("qwen3_moe", 4))
    elif "t2" in kind:
        write_model_folder(folder, tiny_qwen3(vocab_size=16))
    else:
        write_base(folder)


def make_engine(base: Path | str, kind: str = "full", **changes: Any) -> FSDPEngine:
    config = {"dtype": "float32", "optimizer": OptimizerConfig(lr=1e-2), **KINDS[kind], **changes}
    engine = FSDPEngine(TrainEngineConfig(path=str(base), **config))
    engine.create_process_group()
    engine.initialize(None, SPEC)
    return engine


def values_of(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """This rank's part of all tensors of an engine, those left out of checkpoints, too."""
    tensors = {**engine.dcp_state().live_tensors(), **dict(engine.model.named_parameters())}
    return {name: local_tensor(tensor).detach().clone() for name, tensor in tensors.items()}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def storages() -> dict[int, torch.Tensor]:
    """All tensors in memory that this process knows, except numbers, by storage."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some modules warn of their attributes
        found = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    local = [
        tensor
        for tensor in found
        if not isinstance(tensor, DTensor) and tensor.device.type == "cpu"
    ]
    return {
        t.untyped_storage()._cdata: t for t in local if t.dim() and t.untyped_storage().nbytes()
    }


def step(engine: FSDPEngine) -> Any:
    if not engine.config.is_critic:
        return train(engine, 1)
    stats = engine.train_batch(
        batch(), lambda values, mb: values.square().mean(), lambda mb: mb["loss_mask"].sum()
    )
    return untimed(stats)


def _three_rounds(rank: int, world_size: int, base: str, kind: str) -> None:
    before = storages()
    options = KINDS[kind].get("optimizer", OptimizerConfig())
    # An optimizer on the host is compared with a plain one.
    plain = {"optimizer": replace(options, offload=False)} if options.offload else {}
    twin, engine = make_engine(base, kind, **plain), make_engine(base, kind)
    for number in range(3):
        assert step(engine) == step(twin)
        assert torch.equal(engine.forward_batch(batch()), twin.forward_batch(batch()))
        parameters = dict(engine.model.named_parameters())
        versions = {name: param._version for name, param in parameters.items()}
        objects = {name: id(tensor) for name, tensor in engine.dcp_state().live_tensors().items()}
        engine.offload(("weights",) if number else ("weights", "optimizer"))
        engine.offload()
        engine.offload()
        if engine.config.parts_on_host != ("weights", "optimizer"):
            assert all(
                local_tensor(param).untyped_storage().nbytes() == 0 for param in parameters.values()
            )
        step(twin)  # the other engine of the process has its turn
        engine.onload(("optimizer",) if number == 1 else ("weights", "optimizer"))
        engine.onload()
        engine.onload()
        assert versions == {name: param._version for name, param in engine.model.named_parameters()}
        assert objects == {
            name: id(tensor) for name, tensor in engine.dcp_state().live_tensors().items()
        }
        step(engine)
        assert same(values_of(engine), values_of(twin))
    del parameters
    twin.destroy()
    engine.offload()
    if not engine.config.parts_on_host:
        host = {
            copy.untyped_storage()._cdata
            for copy in map(local_tensor, host_copies(engine.model).values())
        }
        left = [
            tensor for key, tensor in storages().items() if key not in before and key not in host
        ]
        large = [
            (t.shape, t.dtype)
            for t in left
            if t.dtype not in (torch.int64, torch.int32) and t.numel() > 2
        ]
        assert large == [], f"more than a batch and the sums of a step has memory: {large}"
    engine.destroy()


@pytest.mark.parametrize(
    ("kind", "world_size"),
    slow_but(
        [("full", 2)],
        [(kind, n) for kind in KINDS for n in RANKS[kind]],
    ),
)
def test_three_rounds_of_training_between_offloads_change_no_bit(
    kind: str, world_size: int, tmp_path: Path
) -> None:
    write_model(tmp_path, kind)
    run_ranks(_three_rounds, world_size, str(tmp_path), kind)


def contents(folder: Path) -> dict[str, bytes]:
    """All files. Those of a generation without its description, which has the time."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    own = (
        {"recover_info.json", "manifest.json"} if (folder / "recover_info.json").exists() else set()
    )
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in files if path.name not in own
    }


def save_all(engine: FSDPEngine, root: Path, blocking: bool = True) -> None:
    formats: dict[str, tuple[Any, bool]] = {
        "dcp": ("dcp", True),
        "weights": ("dcp", False),
        "hf": ("hf", False),
    }
    if engine.config.use_lora:
        formats["peft"] = ("peft", False)
    for name, (weight_format, with_optim) in formats.items():
        engine.save(SaveLoadMeta(str(root / name), weight_format, with_optim), blocking=blocking)
    engine.wait_for_save()


def dump(engine: FSDPEngine, root: Path, in_background: bool) -> None:
    """A snapshot and an export with a handler of its own."""
    handler = make_handler(root, freq_steps=1, hf_freq_steps=1, async_save=in_background)
    handler.load(engine)
    assert handler.dump(engine, step_info(0))
    handler.wait()
    handler.close()


def publish(engine: FSDPEngine, root: Path) -> None:
    """The engine is connected, so that folders have the answers that servers must give."""
    engine.update_weights(WeightUpdateMeta("disk", str(root / "disk"), version=1))
    if engine.config.use_lora:
        engine.update_weights(WeightUpdateMeta("adapter", str(root / "adapter"), version=1))


def _saves(rank: int, world_size: int, base: str, kind: str, root: Path) -> None:
    engine = make_engine(base, kind)
    engine.connect_engine([], WeightUpdateMeta("disk", str(root / "unused")))
    step(engine)
    for place, tags in (("here", ()), ("away", ("weights", "optimizer")), ("half", ("weights",))):
        engine.offload(tags)
        for way in (True, False):
            save_all(engine, root / place / f"save {way}", blocking=way)
            dump(engine, root / place / f"dump {way}", in_background=way)
        publish(engine, root / place / "published")
        engine.onload()
    step(engine)
    save_all(engine, root / "later")
    if rank == 0:
        for folder in ("save True", "save False", "dump True", "dump False", "published"):
            here = contents(root / "here" / folder)
            assert len(here) > 3
            for place in ("away", "half"):
                away = contents(root / place / folder)
                assert away.keys() == here.keys(), (
                    place,
                    folder,
                    sorted(away.keys() ^ here.keys()),
                )
                assert [
                    name for name in here if away[name] != here[name] and not _is_of_one_run(name)
                ] == []
    engine.load(SaveLoadMeta(str(root / "away" / "save True" / "dcp"), "dcp", True))
    step(engine)
    save_all(engine, root / "again")
    if rank == 0:
        assert contents(root / "again") == contents(root / "later")
    engine.destroy()


def _is_of_one_run(name: str) -> bool:
    """Whether a file has a time, or the id of the run: each root of a handler has a run of its
    own.
    """
    of_run = ("recover_info.json", "manifest.json", "journal.jsonl", "run_id.txt")
    return Path(name).name in of_run or "lock" in name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world_size"),
    [(kind, n) for kind in KINDS for n in RANKS[kind] if n > 1],
)
def test_a_save_while_away_equals_the_save_before(
    kind: str, world_size: int, tmp_path: Path
) -> None:
    write_model(tmp_path / "base", kind)
    run_ranks(_saves, world_size, str(tmp_path / "base"), kind, tmp_path)


def _goes_away_during_saves(rank: int, world_size: int, base: str, root: Path) -> None:
    engine, gate = make_engine(base), Gate()
    step(engine)
    gate.open()
    formats: list[tuple[Any, bool]] = [("dcp", True), ("hf", False)]
    for format_, with_optim in formats:
        engine.save(SaveLoadMeta(str(root / f"{format_} now"), format_, with_optim))
        gate.close()
        engine.save(
            SaveLoadMeta(str(root / f"{format_} later"), format_, with_optim), blocking=False
        )
        held: Any = engine._background
        assert held is not None
        staged = held._staging._buffers.tensors["model.model.norm.weight"]
        engine.offload()
        lent = local_tensor(host_copies(engine.model)["model.model.norm.weight"])
        if format_ == "dcp":
            assert lent.data_ptr() == local_tensor(staged).data_ptr(), "the snapshot is the copy"
        engine.onload()
        step(engine)
        expected = values_of(engine)
        engine.offload()  # the buffers are still being written
        engine.onload()
        assert same(values_of(engine), expected)
        gate.open()
        engine.wait_for_save()
        if rank == 0:
            assert contents(root / f"{format_} now") == contents(root / f"{format_} later")
    gate.open()
    engine.destroy()


@pytest.mark.slow
def test_a_save_in_the_background_goes_on_while_the_engine_leaves_and_trains(
    tmp_path: Path,
) -> None:
    write_base(tmp_path / "base")
    run_ranks(_goes_away_during_saves, 2, str(tmp_path / "base"), tmp_path)


def _leaves_an_export_its_base(rank: int, world_size: int, base: str, root: Path) -> None:
    engine = make_engine(base, "lora")
    step(engine)
    meta = SaveLoadMeta(str(root / "now"), "hf", False)
    engine.save(meta)
    staging = staged_state.Staging(engine.model)
    view = staged_model(engine.model, staging.stage(engine.dcp_state(), model_only=True)["model"])
    engine.offload()  # the export has not begun
    for number in range(2):
        save_hf(view, root / str(number), group=engine.control_group, dtype=engine.base_dtype)
        engine.onload()  # and is read on, while the engine trains and leaves again
        step(engine)
        engine.offload()
    engine.onload()
    del view
    staging.release()
    engine.save(SaveLoadMeta(str(root / "then"), "hf", False))
    reading, go_on = threading.Event(), threading.Event()
    export: Callable[..., None] = background_save.export_hf

    def held(*args: Any, **kwargs: Any) -> None:
        reading.set()
        assert go_on.wait(stretched(30))
        export(*args, **kwargs)

    background_save.export_hf = held
    engine.save(SaveLoadMeta(str(root / "later"), "hf", False), blocking=False)
    assert reading.wait(stretched(30))
    threading.Timer(0.5, go_on.set).start()
    engine.offload()
    assert go_on.is_set(), "the export reads the live base"
    engine.wait_for_save()
    background_save.export_hf = export
    for one, other in (("now", "0"), ("now", "1"), ("then", "later")):
        if rank == 0:
            weights = [contents(root / name)["model.safetensors"] for name in (one, other)]
            assert weights[0] == weights[1]
    engine.destroy()


@pytest.mark.slow
def test_an_export_in_the_background_keeps_the_frozen_base(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    run_ranks(_leaves_an_export_its_base, 2, str(tmp_path / "base"), tmp_path)


def _is_pinned_once(rank: int, world_size: int, base: str, root: Path) -> None:
    engine = make_engine(base, "lora")
    step(engine)
    kinds: list[Any] = ["hf", "peft"]
    for kind in kinds:
        engine.save(SaveLoadMeta(str(root / kind), kind, False), blocking=False)
        background = engine._background
        assert background is not None and background._job is not None
        assert background._job.wait(stretched(30)) is JobState.DONE
        engine.offload()
        assert engine._offload is not None
        n_kept = len(engine._offload._kept)
        for _ in range(2):
            engine.onload()
            engine.offload()
        assert len(engine._offload._kept) == n_kept, kind
        engine.onload()
        engine.wait_for_save()
    engine.destroy()


def test_an_export_that_has_ended_keeps_no_host_memory_from_later_offloads(
    tmp_path: Path,
) -> None:
    write_base(tmp_path / "base")
    run_ranks(_is_pinned_once, 1, str(tmp_path / "base"), tmp_path)


def _is_guarded(rank: int, world_size: int, base: str, root: Path) -> None:
    engine: Any = make_engine(base)
    step(engine)
    save_all(engine, root / "saved")
    dump(engine, root / "run", in_background=False)
    expected = values_of(engine)
    engine.offload()
    handler = make_handler(root / "run")
    refused: list[Callable[[], Any]] = [
        lambda: step(engine),
        lambda: engine.eval_batch(batch(), None, None),
        lambda: engine.forward_batch(batch()),
        lambda: engine.forward(batch()),
        engine.optimizer_step,
        engine.optimizer.step,
        lambda: engine.model(**batch()),
        lambda: engine.load(SaveLoadMeta(str(root / "saved" / "dcp"), "dcp", True)),
        lambda: engine.load(SaveLoadMeta(str(root / "saved" / "hf"), "hf", False)),
        lambda: load_hf(engine.model, root / "saved" / "hf"),
        lambda: save_hf(engine.model, root / "unwanted"),
        lambda: full_state_dict(engine.model),
        lambda: handler.load(engine),
    ]
    for number, call in enumerate(refused):
        with pytest.raises(
            EngineOffloadedError, match="the engine is offloaded; call onload first"
        ):
            call()
            raise AssertionError(f"call {number} was not refused")
    engine.train()
    engine.eval()
    engine.set_version(3)
    assert engine.get_version() == 3
    assert engine.all_reduce_stats({"a": 1.0}) == {"a": float(world_size)}
    with pytest.raises(ConfigError, match="'tags' is 'gradients'"):
        engine.onload(("gradients",))
    engine.onload(("weights",))
    engine.forward_batch(batch())
    with pytest.raises(EngineOffloadedError):
        step(engine)
    engine.onload()
    assert same(values_of(engine), expected)
    step(engine)
    engine.offload()
    engine.initialize(None, SPEC)
    step(engine)
    engine.offload()
    engine.destroy()


def test_what_computes_or_loads_is_refused_while_away(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    run_ranks(_is_guarded, 2, str(tmp_path / "base"), tmp_path)


def _run(
    rank: int, world_size: int, base: str, root: str, away: bool, kill_after: int
) -> dict[str, Any]:
    seed_rng(1, rank)
    job = Job(base)
    engine, handler = job.engine, make_handler(root, freq_steps=1)
    info = handler.load(job)
    record: dict[str, Any] = {}
    for number in range(0 if info is None else info.last_step_info.global_step + 1, 4):
        record = job.train([number, number + 1])
        if away and number % 2:
            engine.offload()
        handler.dump(job, step_info(number))
        if away:
            engine.offload()
        if number == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.onload()
    handler.close()
    return record


@pytest.mark.slow
def test_a_run_that_is_killed_while_away_ends_as_if_it_had_stayed(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    base = str(tmp_path / "base")
    expected = run_ranks(_run, 2, base, str(tmp_path / "stays"), False, -1)
    for kill_after in (1, 2):
        with pytest.raises(AssertionError, match="died without a word"):
            run_ranks(_run, 2, base, str(tmp_path / "leaves"), True, kill_after)
        assert newest(tmp_path / "leaves").name.endswith(f"_{kill_after}")
    assert run_ranks(_run, 2, base, str(tmp_path / "leaves"), True, -1) == expected


def _copies_nothing(rank: int, world_size: int, base: str) -> None:
    engine = make_engine(base)
    step(engine)
    state = engine.dcp_state()
    staging = staged_state.Staging(engine.model)
    staging.prepare(state)
    engine.offload()
    copies = {
        name: local_tensor(copy).data_ptr() for name, copy in host_copies(engine.model).items()
    }
    assert set(copies.values()) <= {
        local_tensor(t).data_ptr() for kept in staging._kept for t in kept.tensors.values()
    }
    staged = dict(staged_state.flatten(staging.stage(state)))
    copies = {name: at for name, at in copies.items() if "inv_freq" not in name}  # in no checkpoint
    assert {name: local_tensor(staged[name]).data_ptr() for name in copies} == copies
    expected = {name: local_tensor(staged[name]).clone() for name in copies}
    engine.onload()
    step(engine)
    after = values_of(engine)
    engine.offload()
    staging.finish()
    assert same({name: local_tensor(staged[name]) for name in copies}, expected), (
        "the snapshot is not written yet"
    )
    engine.onload()
    staging.done()
    staged = dict(staged_state.flatten(staging.stage(state)))
    with torch.no_grad():
        engine.model.get_parameter("model.norm.weight").data.mul_(2)  # without `changing_weights`
    changed = values_of(engine)
    engine.offload()
    engine.onload()
    assert same(values_of(engine), changed) and not same(changed, after)
    engine.destroy()


def test_a_snapshot_while_away_and_a_departure_after_one_copy_nothing(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    run_ranks(_copies_nothing, 1, str(tmp_path / "base"))


def _has_another_optimizer(rank: int, world_size: int, base: str) -> None:
    engine = make_engine(base)
    step(engine)
    other = DCPState(
        engine.model, torch.optim.AdamW(engine.model.parameters()), changes_only_in_step=True
    )
    name = "optim.state.model.norm.weight.exp_avg"
    other.live_tensors()[name].fill_(7)
    staging = staged_state.Staging(engine.model)
    staging.stage(other)
    expected = values_of(engine)
    engine.offload()
    assert host_copies(engine.model)[name].max() < 7
    assert dict(staged_state.flatten(other.state_dict()))[name].min() == 7
    staged = dict(staged_state.flatten(staging.stage(other)))
    staging.finish()
    assert staged[name].min() == 7
    engine.onload()
    assert same(values_of(engine), expected)
    engine.destroy()


def test_another_optimizer_of_the_model_keeps_its_state(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    run_ranks(_has_another_optimizer, 1, str(tmp_path / "base"))


def _leaves_the_base_its_sums(rank: int, world_size: int, base: str, root: Path) -> int:
    engine = make_engine(base, "lora")
    noted = frozen_bases.of(engine.model)
    assert noted is not None
    known = dict(noted.sums)
    for away in (True, False, True):
        (engine.offload if away else engine.onload)()
        engine.dcp_state().state_dict()
        assert noted.sums == known, "the base is left out of checkpoints still"
    return len(known)


def test_the_base_is_left_out_of_checkpoints_while_away_and_after(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    assert min(run_ranks(_leaves_the_base_its_sums, 2, str(tmp_path / "base"), tmp_path)) > 10


def test_parameters_and_optimizer_are_not_both_kept_on_the_host_in_two_ways() -> None:
    with pytest.raises(
        ConfigError, match=r"'fsdp.offload_params' and 'optimizer.offload' are both true"
    ):
        TrainEngineConfig(
            path="m",
            fsdp=FSDPConfig(offload_params=True),
            optimizer=OptimizerConfig(lr=1.0, offload=True),
        )
