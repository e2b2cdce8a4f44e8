"""Hugging Face exports through the handler: their schedule, their source, reports about them, and
runs that go back.
"""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from holdfast.engine import save_hf
from holdfast.engine.api import SaveLoadMeta
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.staging.background_job import JobState
from holdfast.engine.staging.staged_state import Staging
from holdfast.engine.workers.group import WorkerGroup
from holdfast.engine.workers.placement import PlacementRequest, WorkerResources, place
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.recover.saving import exports as export_writing
from holdfast.recover.saving.snapshot import RankSession
from holdfast.utils.distributed import collective_broke
from holdfast.utils.errors import (
    CheckpointWriteError,
    ConfigError,
    PeerError,
    Preempted,
    TornSnapshotError,
)
from tests.engine.hf.test_export import _contents, _tokenizer
from tests.engine.hf_models import tiny_model
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.helpers import left_in_shared_memory, run_ranks, shared_memory
from tests.ray_helpers import local_ray
from tests.recover.runs import SPEC, Job, Tiny, hidden, make_engine, names, step_info

__all__ = ["local_ray"]
pytestmark = pytest.mark.timeout(100)


def make(root: Path | str, **options: Any) -> RecoverHandler:
    sidecars = {name: options.pop(name) for name in ("tokenizer", "processor") if name in options}
    options = {"trial_name": "t", "hf_freq_steps": 1} | options
    return RecoverHandler(RecoverConfig("e", fileroot=str(root), **options), SPEC, **sidecars)


class Trainer:
    """A transformers model in one process, and blocking exports of it after each step."""

    def __init__(self, root: Path) -> None:
        torch.manual_seed(0)
        self.model, self._references = tiny_model("llama"), root / "references"
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = DCPState(self.model, optimizer, changes_only_in_step=True)

    def step(self, step: int, **options: Any) -> None:
        ids = torch.full((1, 4), step % 15)
        self.model(ids, labels=ids).loss.backward()
        assert self.state.optimizer is not None
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        if not (self._references / str(step)).exists():
            save_hf(self.model, self._references / str(step), **options)

    def assert_exported(self, root: Path, steps: list[int]) -> None:
        assert exports(root) == [f"global_step_{step}" for step in steps]
        for step in steps:
            found = _contents(root / f"e/t/hf/global_step_{step}")
            assert found == _contents(self._references / str(step)), step


def exports(root: Path, hidden: bool = False) -> list[str]:
    found = [
        path.name for path in (root / "e/t/hf").glob("*") if path.name.startswith(".") == hidden
    ]
    return sorted(found, key=lambda name: (len(name), name))


class Gate:
    """Blocks background exports until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        write: Callable[..., Any] = export_writing.write_export

        def held(*args: Any) -> Any:
            self.reached.set()
            assert self._open.wait(30)
            return write(*args)

        monkeypatch.setattr(export_writing, "write_export", held)

    def open_in(self, seconds: float) -> None:
        threading.Timer(seconds, self._open.set).start()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open_in(0)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every staged copy, whether it has only the weights."""
    copies: list[bool] = []
    stage = Staging.stage

    def counted(self: Staging, state: DCPState, *, model_only: bool = False) -> Any:
        copies.append(model_only)
        return stage(self, state, model_only=model_only)

    monkeypatch.setattr(Staging, "stage", counted)
    return copies


def _export_from_another_folder(rank: int, world_size: int, root: str) -> None:
    os.chdir(root)
    engine = make_engine("model")
    with make(root) as handler:
        handler.load(engine)
        os.chdir("/")
        handler.dump(engine, step_info(0))
    engine.destroy()


def test_an_export_has_the_files_of_a_relative_model_folder_from_any_working_folder(
    tmp_path: Path,
) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    run_ranks(_export_from_another_folder, 1, str(tmp_path))
    assert (tmp_path / "e/t/hf/global_step_0/tokenizer.json").read_text() == "{}"


def test_due_steps_are_exported_as_they_were_from_their_snapshots_copy(
    tmp_path: Path, staged: list[bool]
) -> None:
    trainer, options = Trainer(tmp_path), {"dtype": torch.bfloat16, "tokenizer": _tokenizer()}
    with make(
        tmp_path, freq_steps=4, hf_freq_steps=2, hf_dtype="bfloat16", tokenizer=_tokenizer()
    ) as handler:
        handler.load(trainer.state)
        taken = []
        for step in range(8):
            trainer.step(step, **options)
            taken.append(handler.dump(trainer.state, step_info(step)))
            assert not handler.dump(trainer.state, step_info(step)), "never one step twice"
    assert staged == [True, False, True, False]
    assert taken == [step in (3, 7) for step in range(8)] and names(tmp_path) == [
        "global_step_3",
        "global_step_7",
    ]
    trainer.assert_exported(tmp_path, [1, 3, 5, 7])
    assert (handler.save_stats.committed, handler.save_stats.exported) == (2, 4)
    assert exports(tmp_path, hidden=True) == []


def test_training_goes_on_while_exports_are_written_one_at_a_time(
    tmp_path: Path, gate: Gate
) -> None:
    trainer, handler = (
        Trainer(tmp_path),
        make(tmp_path, freq_steps=1, hf_freq_steps=2, on_busy="skip"),
    )
    handler.load(trainer.state)
    for step in range(4):
        trainer.step(step)
        handler.dump(trainer.state, step_info(step))
        if step == 0:
            handler.wait()
    assert gate.reached.wait(20) and exports(tmp_path) == [] and handler.save_stats.skipped == 2
    assert names(tmp_path) == ["global_step_0", "global_step_1"], (
        "the snapshot does not wait for its export"
    )
    gate.open_in(0)
    handler.close()
    trainer.assert_exported(tmp_path, [1])


@pytest.mark.slow
def test_exports_are_blocking_when_snapshots_are_and_only_the_newest_stay(
    tmp_path: Path, staged: list[bool]
) -> None:
    trainer = Trainer(tmp_path)
    with make(tmp_path, freq_steps=2, hf_max_to_keep=2, async_save=False) as handler:
        handler.load(trainer.state)
        for step in range(12):
            trainer.step(step)
            handler.dump(trainer.state, step_info(step))
            assert handler.save_stats.exported == step + 1
    assert staged == []
    trainer.assert_exported(tmp_path, [10, 11])


@pytest.mark.slow
def test_a_run_that_goes_back_renames_exports_and_makes_the_lost_one(
    tmp_path: Path,
) -> None:
    trainer = Trainer(tmp_path)
    with make(tmp_path, freq_steps=2) as handler:
        handler.load(trainer.state)
        for step in range(5):
            trainer.step(step)
            handler.dump(trainer.state, step_info(step))
    os.rename(
        tmp_path / "e/t/hf/global_step_3", tmp_path / "before"
    )  # as if killed after the commit of the snapshot
    (tmp_path / "e/t/hf/.staging-3-0123456789ab").mkdir()
    again = Trainer(tmp_path)
    with make(tmp_path, freq_steps=2) as handler:
        info = handler.load(again.state)
        assert info is not None and info.last_step_info.global_step == 3
        found = exports(
            tmp_path, hidden=True
        )  # includes the staging folder of step 3 during its write
        assert ".staging-3-0123456789ab" not in found
        (quarantined,) = (name for name in found if not name.startswith(".staging-3-"))
        assert quarantined.startswith(".rejected-global_step_4-the-run-went-back")
        handler.wait()
        assert _contents(tmp_path / "before") == _contents(tmp_path / "e/t/hf/global_step_3")
        again.step(4)
        handler.dump(again.state, step_info(4))
    again.assert_exported(tmp_path, [0, 1, 2, 3, 4])
    os.rename(tmp_path / "e/t/recover", tmp_path / "elsewhere")
    with make(tmp_path) as handler:
        assert handler.load(Trainer(tmp_path).state) is None
    assert exports(tmp_path) == [] and len(exports(tmp_path, hidden=True)) == 6


def test_a_run_started_from_elsewhere_has_no_export_of_its_past(
    tmp_path: Path,
) -> None:
    trainer = Trainer(tmp_path)
    with make(tmp_path, freq_steps=1) as handler:
        handler.load(trainer.state)
        for step in range(2):
            trainer.step(step)
            handler.dump(trainer.state, step_info(step))
    os.rename(tmp_path / "e/t/recover", tmp_path / "elsewhere")
    (tmp_path / "e/t/hf/global_step_1/config.json").write_text("of the past")
    with make(tmp_path, resume_path=str(tmp_path / "elsewhere/global_step_1")) as handler:
        assert handler.load(Trainer(tmp_path).state) is not None
    trainer.assert_exported(tmp_path, [0, 1])
    (quarantined,) = exports(tmp_path, hidden=True)
    assert quarantined.startswith(".rejected-global_step_1-")


def test_only_one_engine_that_is_named_and_of_transformers_can_be_exported(tmp_path: Path) -> None:
    trainer, tiny = Trainer(tmp_path), Tiny()
    engines = {"actor": trainer.state, "other": tiny.state}
    for name, said in (
        (None, "expected|name one"),
        ("nobody", "expected one of"),
        ("other", "Linear"),
    ):
        with pytest.raises(ConfigError, match=said), make(tmp_path, hf_engine=name) as handler:
            handler.load(engines)
    with make(tmp_path, freq_steps=1, hf_engine="actor") as handler:
        handler.load(engines)
        trainer.step(0)
        handler.dump(engines, step_info(0))
    trainer.assert_exported(tmp_path, [0])
    for key, value in {"hf_freq_steps": 0, "hf_dtype": "int8", "hf_max_to_keep": 0}.items():
        with pytest.raises(ConfigError, match=f"recover.{key}"):
            make(tmp_path, **{key: value})


def test_a_model_that_no_file_has_a_place_for_is_refused_before_training(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(2)))
    with (
        pytest.raises(ConfigError, match=r"has no parameter extra.*unset recover.hf_freq_steps"),
        make(tmp_path) as handler,
    ):
        handler.load(trainer.state)


@pytest.mark.parametrize("in_background", [True, False])
def test_exports_may_fail_as_often_as_snapshots_and_beside_them(
    tmp_path: Path, in_background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(tmp_path)
    handler = make(tmp_path, freq_steps=1, save_failures_allowed=1, async_save=in_background)
    handler.load(trainer.state)
    (tmp_path / "e/t").mkdir(parents=True, exist_ok=True)
    (tmp_path / "e/t/hf").write_text("a file where the folder of the exports should be")
    trainer.step(0)
    assert handler.dump(trainer.state, step_info(0))
    handler._saver.settle()
    assert "step 0: export failed, 1 in a row (1 allowed)" in caplog.text
    trainer.step(1)
    with pytest.raises(CheckpointWriteError, match="hf"):
        handler.dump(trainer.state, step_info(1))
        handler._saver.settle()
    stats = handler.save_stats
    assert (stats.committed, stats.failed, stats.exports_failed, handler.failed_saves) == (
        2,
        0,
        2,
        0,
    )
    (tmp_path / "e/t/hf").unlink()
    trainer.step(2)
    handler.dump(trainer.state, step_info(2))
    handler.close()
    trainer.assert_exported(tmp_path, [2])


def test_wait_and_close_tell_of_an_export_that_failed_in_the_background(tmp_path: Path) -> None:
    for call in (RecoverHandler.wait, RecoverHandler.close):
        root = tmp_path / call.__name__
        trainer, handler = Trainer(root), make(root)
        handler.load(trainer.state)
        (root / "e/t").mkdir(parents=True, exist_ok=True)
        (root / "e/t/hf").write_text("")
        trainer.step(0)
        handler.dump(trainer.state, step_info(0))
        with pytest.raises(CheckpointWriteError, match="hf"):
            call(handler)
        handler.close()


def test_an_export_that_shows_a_change_only_at_its_end_does_not_become_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, handler = Trainer(tmp_path), make(tmp_path, async_save=True)
    write: Callable[..., Any] = export_writing.write_hf

    @torch.no_grad()
    def disturbed(*args: Any, **kwargs: Any) -> Any:
        next(trainer.model.parameters()).mul_(1)
        return write(*args, **kwargs)

    monkeypatch.setattr(export_writing, "write_hf", disturbed)
    handler.load(trainer.state)
    trainer.step(0)
    handler.dump(trainer.state, step_info(0))
    with pytest.raises(TornSnapshotError, match="changing_weights"):
        handler.wait()
    handler.close()
    assert exports(tmp_path) == exports(tmp_path, hidden=True) == []


@pytest.mark.slow
def test_a_stopped_run_has_the_export_under_way_and_the_last(tmp_path: Path, gate: Gate) -> None:
    trainer, handler = Trainer(tmp_path), make(tmp_path, freq_steps=4)
    handler.load(trainer.state)
    trainer.step(0)
    handler.dump(trainer.state, step_info(0))
    trainer.step(1)
    gate.open_in(0.2)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(Preempted):
        handler.dump(trainer.state, step_info(1))
    assert names(tmp_path) == ["global_step_1"]
    trainer.assert_exported(tmp_path, [0, 1])


@pytest.mark.parametrize("taken", ["at_the_stop", "just_before"])
@pytest.mark.parametrize("in_background", [True, False])
def test_a_stopped_run_makes_its_failed_export_at_the_next_start(
    tmp_path: Path, in_background: bool, taken: str
) -> None:
    trainer, copies = Trainer(tmp_path), tmp_path / "copies"
    handler = make(tmp_path, freq_steps=1, async_save=in_background, mirror_url=f"file://{copies}")
    handler.load(trainer.state)
    (tmp_path / "e/t/hf").write_text("a file where the folder of the exports should be")
    trainer.step(0)
    if taken == "just_before":
        handler.dump(trainer.state, step_info(0), force=True)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(Preempted):
        handler.dump(trainer.state, step_info(0))
    assert names(tmp_path) == ["global_step_0"] and (copies / "e/t/global_step_0").is_dir()
    assert (handler.save_stats.committed, handler.save_stats.exports_failed) == (1, 1)
    (tmp_path / "e/t/hf").unlink()
    with make(tmp_path, freq_steps=1) as handler:
        assert handler.load(Trainer(tmp_path).state) is not None
    trainer.assert_exported(tmp_path, [0])


def test_nothing_is_left_of_exports_after_close(tmp_path: Path) -> None:
    process, trainer = psutil.Process(), Trainer(tmp_path)
    n_fds, shm = process.num_fds(), shared_memory()
    for run in range(3):
        with make(tmp_path / str(run)) as handler:
            handler.load(trainer.state)
            for step in range(2):
                trainer.step(step)
                handler.dump(trainer.state, step_info(step))
    assert process.num_fds() == n_fds and left_in_shared_memory(shm) == set()
    assert [
        t.name for t in threading.enumerate() if t.name.startswith(("snapshot", "staging"))
    ] == []


def _killed_before_the_commit(rank: int, world_size: int, root: Path) -> None:
    export_writing.commit_folder = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    trainer, handler = Trainer(root), make(root, freq_steps=1)
    handler.load(trainer.state)
    trainer.step(0)
    handler.dump(trainer.state, step_info(0))
    handler.wait()


def test_after_a_kill_before_the_commit_the_next_start_exports(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(_killed_before_the_commit, 1, tmp_path)
    assert names(tmp_path) == ["global_step_0"] and exports(tmp_path) == []
    assert [name[:11] for name in exports(tmp_path, hidden=True)] == [".staging-0-"]
    trainer = Trainer(tmp_path)
    with make(tmp_path) as handler:
        assert handler.load(trainer.state) is not None
    trainer.assert_exported(tmp_path, [0])
    assert exports(tmp_path, hidden=True) == [] == hidden(tmp_path)


def _sharded(rank: int, world_size: int, model: str, root: Path) -> tuple[str, int]:
    """Two engines train on during an export of the actor. Then rank 1 has no space, which all ranks
    report.
    """
    job = Job(model, ("actor", "critic"))
    handler = make(
        root, freq_steps=2, hf_engine="actor", save_failures_allowed=0, tokenizer=_tokenizer()
    )
    handler.load(job.engine)
    for step in range(4):
        job.train([step, step + 1])
        meta = SaveLoadMeta(
            str(root / f"references/{step}"), "hf", False, _tokenizer(), base_model_path=model
        )
        job.engines["actor"].save(meta)
        handler.dump(job.engine, step_info(step))
    handler.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000 if rank == 1 else soft, hard))
    step, error = 4, "none"
    try:
        for step in range(4, 20, 2):  # steps with exports only
            handler.dump(job.engine, step_info(step))
            job.train([step])
    except (CheckpointWriteError, PeerError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    torch.distributed.barrier()
    handler.close(wait=False)
    return error, step


@pytest.mark.slow
def test_a_sharded_engine_is_exported_and_failed_writes_reach_all_ranks(
    tmp_path: Path,
) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    (tmp_path / "model" / "LICENSE").write_text("goes along")
    (told, step), (own, own_step) = run_ranks(_sharded, 2, str(tmp_path / "model"), tmp_path)
    assert step == own_step == 6
    assert own.startswith("CheckpointWriteError") and "File too large" in own
    assert told.startswith("PeerError") and "rank 1" in told
    assert exports(tmp_path) == [f"global_step_{step}" for step in range(4)]
    for step in range(4):
        found = _contents(tmp_path / f"e/t/hf/global_step_{step}")
        assert (
            found == _contents(tmp_path / f"references/{step}")
            and "LICENSE" in found
            and "tokenizer.json" in found
        )
    assert exports(tmp_path, hidden=True) == []


def _reference(job: Job, path: str) -> None:
    job.engines["default"].save(
        SaveLoadMeta(path, "hf", False, base_model_path=job.engines["default"].config.path)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_a_ray_driver_has_its_workers_export_while_they_train_on(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    placement = place(PlacementRequest("trainer", 2, WorkerResources()), 30)
    group = WorkerGroup(
        Job, args=(str(tmp_path / "model"),), world_size=2, placement=placement, name="trainer"
    )
    try:
        with make(tmp_path, freq_steps=2) as handler:
            handler.load(group)
            for step in range(3):
                group.call_all("train", [step, step + 1])
                group.run_all(_reference, str(tmp_path / f"references/{step}"))
                handler.dump(group, step_info(step))
                group.call_all("train", [step])
            handler.wait()
            group.run_all(_save_in_background, str(tmp_path / "background"))
            group.call_all("train", [9])
            group.run_all(_wait_for_save)
    finally:
        group.shutdown()
        placement.remove()
    assert exports(tmp_path) == [f"global_step_{step}" for step in range(3)]
    for step in range(3):
        found = _contents(tmp_path / f"e/t/hf/global_step_{step}")
        assert found == _contents(tmp_path / f"references/{step}"), step
    assert (tmp_path / "background" / "model.safetensors").is_file()


def _save_in_background(job: Job, path: str) -> None:
    job.engines["default"].save(SaveLoadMeta(path, "hf", False), blocking=False)


def _wait_for_save(job: Job) -> None:
    job.engines["default"].wait_for_save()


def _group_breaks(rank: int, world_size: int, root: str) -> tuple[str, str]:
    trainer, write = Trainer(Path(root)), RankSession.write_snapshot
    handler = make(root, freq_steps=1, save_timeout_s=1.0)
    handler.load(trainer.state)
    torch.distributed.barrier()
    if rank == 1:  # too late for the other
        RankSession.write_snapshot = lambda *args: (time.sleep(3.0), write(*args))[1]  # type: ignore[assignment]
    handler.dump(trainer.state, step_info(0))
    background = handler._saver._background
    assert background is not None and background.job.wait(30) is JobState.FAILED
    error, told = (str(task.error()) for task in background.tasks.values())
    with pytest.raises(CheckpointWriteError, match="could not reach each other"):
        handler.wait()
    torch.distributed.barrier()
    handler.close(wait=False)
    return error, told


@pytest.mark.slow
def test_an_export_is_not_begun_in_a_group_that_its_snapshot_broke(tmp_path: Path) -> None:
    for error, told in run_ranks(_group_breaks, 2, str(tmp_path)):
        assert collective_broke(RuntimeError(error))
        assert (
            "the export of step 0 was not begun: what was written before it broke the ranks' "
            "process group"
        ) in told
    assert names(tmp_path) == [] and exports(tmp_path) == []


def test_exports_that_resumes_reject_are_bounded_like_the_others(tmp_path: Path) -> None:
    for _ in range(3):  # each life is killed after the export of step 2
        trainer = Trainer(tmp_path)
        with make(tmp_path, freq_steps=100, hf_max_to_keep=1) as handler:
            handler.load(trainer.state)
            for step in range(3):
                trainer.step(step)
                handler.dump(trainer.state, step_info(step), force=step == 0)
    assert exports(tmp_path) == ["global_step_2"]
    (kept,) = exports(tmp_path, hidden=True)
    assert kept.startswith(".rejected-global_step_2-")
