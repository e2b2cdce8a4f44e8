"""Saves written while training goes on: their contents, the reports of failures, and the
leftovers.
"""

import gc
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping

from holdfast.engine.api import SaveLoadMeta
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.hf.save import save_hf
from holdfast.engine.staging import background_save as background_save
from holdfast.engine.staging.background_job import BackgroundJob, JobState
from holdfast.engine.staging.background_save import BackgroundSave
from holdfast.engine.staging.staged_state import Staging
from holdfast.engine.training.counters import EngineCounters
from holdfast.utils.errors import CheckpointExistsError, CheckpointWriteError, PeerError
from tests.engine.hf.test_export import _tokenizer
from tests.engine.hf.test_name_mapping import CONVERSIONS
from tests.engine.hf.test_shard_ranges import SHARDINGS
from tests.engine.hf_models import tiny_model
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.helpers import left_in_shared_memory, run_ranks, shared_memory
from tests.limits import stretched
from tests.recover.runs import SPEC, make_batch, make_engine, square_loss, token_count

pytestmark = pytest.mark.timeout(100)


class Gate:
    """Blocks background writes until it is opened. Open it before you wait for a save."""

    def __init__(self) -> None:
        self._open = threading.Event()
        for name in ("export_hf", "save_dcp"):
            setattr(background_save, name, self._held(getattr(background_save, name)))

    def _held(self, save: Callable[..., None]) -> Callable[..., None]:
        def held(*args: Any, **kwargs: Any) -> None:
            assert self._open.wait(30)
            save(*args, **kwargs)

        return held

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _train(engine: Any, steps: int = 1) -> None:
    for step in range(steps):
        engine.train_batch(make_batch([step, step + 1]), square_loss, token_count)
        engine.step_lr_scheduler()


def _metas(root: Path, kind: str) -> list[SaveLoadMeta]:
    hf: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_shard_size_bytes": 8000,
        "tokenizer": _tokenizer(),
    }
    return [
        SaveLoadMeta(str(root / f"{kind}-hf"), "hf", False, **hf),
        SaveLoadMeta(str(root / f"{kind}-dcp"), "dcp", True),
        SaveLoadMeta(str(root / f"{kind}-model"), "dcp", False),
    ]


def _settled_fds(expected: int) -> int:
    """Open files of this process. gloo closes a connection when it notices that the other end is
    closed.
    """
    deadline = time.monotonic() + stretched(20)
    while (found := psutil.Process().num_fds()) > expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _saves_while_training(rank: int, world_size: int, model: str, root: Path) -> None:
    gate, process = Gate(), psutil.Process()
    engine = make_engine(model)
    _train(engine)
    gate.open()
    for blocking, in_background in zip(_metas(root, "now"), _metas(root, "later"), strict=True):
        engine.save(blocking)
        gate.close()
        engine.save(in_background, blocking=False)
        engine.model.config.vocab_size = 99
        with torch.no_grad():
            engine.forward_batch(
                make_batch([1, 2])
            )  # after this FSDP2 holds the gathered parameters of the root
        assert not Path(in_background.path).exists()
        threading.Timer(0.2, gate.open).start()
        _train(engine, 3)
        engine.wait_for_save()
        engine.model.config.vocab_size = 15
    gate.close()
    (last, *_) = _metas(root, "last")
    engine.save(last, blocking=False)
    threading.Timer(0.2, gate.open).start()
    engine.destroy()
    assert Path(last.path).is_dir(), "destroy waits"
    assert [
        thread.name
        for thread in threading.enumerate()
        if "save" in thread.name or "staging" in thread.name
    ] == []
    expected = -1  # an engine that saved nothing in the background
    for number, blocking in enumerate((True, False, False)):
        engine = make_engine(model)
        engine.save(SaveLoadMeta(str(root / f"again{number}"), "hf", False), blocking=blocking)
        engine.destroy()
        dist.barrier()
        time.sleep(0.5 if blocking else 0.0)
        expected = process.num_fds() if blocking else expected
        assert _settled_fds(expected) == expected


def test_written_values_are_the_staged_ones_while_training_goes_on(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    shm = shared_memory()
    run_ranks(_saves_while_training, 2, str(tmp_path / "model"), tmp_path)
    assert left_in_shared_memory(shm) == set()
    for kind in ("hf", "dcp", "model"):
        assert _contents(tmp_path / f"later-{kind}") == _contents(tmp_path / f"now-{kind}"), kind
    assert _contents(tmp_path / "last-hf") != _contents(tmp_path / "now-hf")
    assert list(tmp_path.glob(".staging*")) == []


def _every_sharding(rank: int, world_size: int, root: Path) -> None:
    """Gathered spans, fused experts, tied weights and conversions, while other collectives run in
    the same world.
    """
    dist.barrier()
    n_fds = psutil.Process().num_fds()
    gate = Gate()
    for case, (name, shard) in sorted(SHARDINGS.items(), key=lambda item: item[0] == "replicated"):
        if case == "replicated":  # the last, because its mesh has groups of its own
            assert _settled_fds(n_fds) == n_fds
        if case in CONVERSIONS:
            register_checkpoint_conversion_mapping("llama", [CONVERSIONS[case]], overwrite=True)
        model: PreTrainedModel = shard(tiny_model(name))
        background = BackgroundSave(model, dist.group.WORLD, 30.0)  # type: ignore[arg-type]
        save_hf(model, root / "now" / case)
        gate.close()
        background.begin(SaveLoadMeta(str(root / "later" / case), "hf", False), DCPState(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
        gate.open()
        for _ in range(20):
            dist.all_reduce(torch.ones(1000))
        background.close()
        del background
        register_checkpoint_conversion_mapping("llama", [], overwrite=True)


@pytest.mark.slow
def test_weights_of_every_sharding_are_exported_in_the_background(tmp_path: Path) -> None:
    run_ranks(_every_sharding, 2, tmp_path)
    assert sorted(path.name for path in (tmp_path / "later").iterdir()) == sorted(SHARDINGS)
    for case in SHARDINGS:
        assert _contents(tmp_path / "later" / case) == _contents(tmp_path / "now" / case), case


def _failures(rank: int, world_size: int, model: str, root: Path) -> list[str]:
    engine, told = make_engine(model), []

    def begin(name: str, limit_bytes: int) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        engine.save(SaveLoadMeta(str(root / name), "hf", False), blocking=False)
        if limit_bytes and rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
        gate.open()
        background = engine._background
        assert background is not None and background._job is not None
        assert background._job.wait(60) is not JobState.RUNNING
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        gate.close()

    def telling(call: Callable[[], object]) -> None:
        with pytest.raises((CheckpointWriteError, PeerError)) as error:
            call()
        told.append(f"{type(error.value).__name__}: {error.value}")

    gate = Gate()
    begin("full", 3000)
    telling(lambda: engine.save(SaveLoadMeta(str(root / "next"), "dcp", True)))
    begin("full", 3000)
    telling(engine.wait_for_save)
    engine.wait_for_save()  # reported once
    begin("good", 0)
    begin("good", 0)
    with pytest.raises(CheckpointExistsError):
        engine.wait_for_save()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Staging, "stage", _no_room)
        begun = SaveLoadMeta("s3://me:secret@bucket/out", "hf", False)
        telling(lambda: engine.save(begun, blocking=False))
    begin("full", 3000)
    telling(engine.destroy)
    engine.destroy()
    assert [thread.name for thread in threading.enumerate() if "save" in thread.name] == []
    return told


def _no_thread(_: BackgroundJob) -> None:
    raise RuntimeError("can't start new thread")


def _cannot_start(rank: int, world_size: int, model: str, root: Path) -> str:
    engine = make_engine(model)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(BackgroundJob, "start", _no_thread)
        with pytest.raises((RuntimeError, PeerError)) as error:
            engine.save(SaveLoadMeta(str(root / "never"), "hf", False), blocking=False)
    engine.wait_for_save()
    engine.save(SaveLoadMeta(str(root / "next"), "hf", False), blocking=False)
    engine.destroy()
    return str(error.value)


def test_a_save_whose_thread_cannot_be_started_is_refused_on_every_rank_and_the_next_is_made(
    tmp_path: Path,
) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    other, failing = run_ranks(_cannot_start, 2, str(tmp_path / "model"), tmp_path)
    assert failing == "can't start new thread"
    assert "rank 1: RuntimeError: can't start new thread" in other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "next"]


def _no_room(*_: object, **__: object) -> None:
    raise CheckpointWriteError("no room")


def test_a_failed_background_save_is_raised_on_every_rank_with_its_cause(
    tmp_path: Path,
) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    other, failing = run_ranks(_failures, 2, str(tmp_path / "model"), tmp_path)
    assert other.pop(2).startswith("PeerError: staging s3://bucket/out failed on rank 1")
    assert failing.pop(2) == "CheckpointWriteError: no room"
    assert len(other) == len(failing) == 3
    assert all(
        t.startswith("CheckpointWriteError: cannot write") and "File too large" in t
        for t in failing
    )
    assert all(t.startswith("PeerError") and "rank 1: CheckpointWriteError" in t for t in other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "model"]


@pytest.mark.slow
def test_a_process_that_just_ends_has_its_last_save_or_says_otherwise(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    script = (
        "import sys; from tests.recover.runs import make_engine; from holdfast.engine.api import "
        "SaveLoadMeta\nengine = make_engine(sys.argv[1])\nfor path in sys.argv[2:]: "
        "engine.save(SaveLoadMeta(path, 'hf', False), blocking=False)\n"
    )
    out, nowhere = tmp_path / "out", tmp_path / "model/config.json/out"
    command = [sys.executable, "-c", script, str(tmp_path / "model"), str(out), str(nowhere)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=stretched(90),
    )
    assert done.returncode == 0, done.stderr
    assert _contents(out)["model.safetensors"]
    assert f"a save in the background failed: cannot write {nowhere}" in done.stderr


def _initialize_again(rank: int, world_size: int, models: tuple[str, str], root: Path) -> None:
    gate = Gate()
    engine = make_engine(models[0])
    optimizer: Any = engine.optimizer
    hooks = dict(optimizer._optimizer_step_pre_hooks)  # the guard of offloads
    _train(engine, 2)
    engine.set_version(7)
    engine.save(SaveLoadMeta(str(root / "first"), "hf", False), blocking=False)
    old = weakref.ref(engine.model)
    threading.Timer(0.2, gate.open).start()
    for destroyed in (False, True):
        if destroyed:
            engine.destroy()
            engine.create_process_group()
        engine.config.path = models[1]
        engine.initialize(None, SPEC)
        assert (root / "first").is_dir(), "what was being written is written"
        assert (
            engine.counters == EngineCounters(mesh=engine.counters.mesh)
            and engine.optimizer is not optimizer
        )
        assert optimizer._optimizer_step_pre_hooks == hooks, "a save leaves none"
        gc.collect()
        assert old() is None
        kind = "destroyed" if destroyed else "again"
        for blocking in (True, False):
            engine.save(
                SaveLoadMeta(str(root / f"{kind}-{blocking}"), "hf", False), blocking=blocking
            )
            engine.wait_for_save()
        assert _contents(root / f"{kind}-True") == _contents(root / f"{kind}-False")
        engine.save(SaveLoadMeta(str(root / f"{kind}-dcp"), "dcp", True), blocking=False)
        _train(engine)
        engine.wait_for_save()
        engine.load(SaveLoadMeta(str(root / f"{kind}-dcp"), "dcp", True))
    gate.close()
    engine.save(SaveLoadMeta(str(root / "first"), "hf", False), blocking=False)
    gate.open()
    with pytest.raises(CheckpointExistsError):
        engine.initialize(None, SPEC)
    engine.initialize(None, SPEC)
    engine.destroy()


@pytest.mark.slow
def test_an_engine_initialized_again_saves_its_new_model_and_frees_the_old(
    tmp_path: Path,
) -> None:
    write_model_folder(tmp_path / "a", tiny_qwen3())
    write_model_folder(tmp_path / "b", tiny_qwen3(tied=False, vocab_size=21, layers=1))
    run_ranks(_initialize_again, 1, (str(tmp_path / "a"), str(tmp_path / "b")), tmp_path)
