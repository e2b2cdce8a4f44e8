"""Snapshots written while training goes on: their contents, the reports about them, and the
leftovers.
"""

import errno
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from holdfast.engine.dcp import state as dcp_state
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.staging import background_job, staged_state
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.recover.saving import snapshot as snapshot_saving
from holdfast.recover.saving.saver import BackgroundStep
from holdfast.recover.saving.snapshot import RankSession
from holdfast.utils.errors import (
    CheckpointWriteError,
    ConfigError,
    PeerError,
    Preempted,
    StaleSnapshotError,
)
from holdfast.utils.rng import RngState, capture_rng
from tests.helpers import left_in_shared_memory, run_ranks, shared_memory
from tests.recover.runs import SPEC, Tiny, hidden, make_handler, names, step_info

pytestmark = pytest.mark.timeout(60)


def make(root: Path | str, **options: Any) -> RecoverHandler:
    options = {"trial_name": "t", "freq_steps": 1} | options
    return RecoverHandler(RecoverConfig("e", fileroot=str(root), **options), SPEC)


class Gate:
    """Blocks background writes until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        write: Callable[..., Any] = RankSession.write_snapshot

        def held(*args: Any) -> Any:
            self.reached.set()
            assert self._open.wait(30)
            return write(*args)

        monkeypatch.setattr(RankSession, "write_snapshot", held)

    def open_in(self, seconds: float) -> None:
        threading.Timer(seconds, self._open.set).start()

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def restored(root: Path) -> str:
    tiny = Tiny()
    with make(root) as handler:
        assert handler.load(tiny.state) is not None
    return tiny.digest()


def test_training_goes_on_while_a_snapshot_of_staged_values_is_written(
    tmp_path: Path, gate: Gate
) -> None:
    tiny = Tiny()
    handler = make(tmp_path)
    handler.load(tiny.state)
    staged = tiny.step()
    assert handler.dump(tiny.state, step_info(0))
    assert gate.reached.wait(20) and names(tmp_path) == []
    for _ in range(3):
        tiny.step()
    assert not handler.dump(tiny.state, step_info(0), force=True), "never one step twice"
    gate.open()
    handler.wait()
    assert names(tmp_path) == ["global_step_0"] and handler.save_stats.committed == 1
    handler.close()
    assert restored(tmp_path) == staged != tiny.digest()


def test_a_due_snapshot_waits_for_the_one_before(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, handler = Tiny(), make(tmp_path)
    handler.load(tiny.state)
    wait = BackgroundStep.wait

    def open_and_wait(step: BackgroundStep) -> None:
        gate.open_in(0.2)
        wait(step)

    monkeypatch.setattr(BackgroundStep, "wait", open_and_wait)
    with caplog.at_level(logging.INFO):
        for step in range(2):
            tiny.step()
            assert handler.dump(tiny.state, step_info(step))
    stats = handler.save_stats
    assert stats.waited == 1 and 0.1 < stats.waited_s <= stats.blocked_s and stats.skipped == 0
    assert "step 0 was still being written: waited" in caplog.text
    handler.close()
    assert (
        names(tmp_path) == ["global_step_0", "global_step_1"] and handler.save_stats.committed == 2
    )


def test_a_due_snapshot_is_skipped_when_told_but_never_if_forced(
    tmp_path: Path, gate: Gate
) -> None:
    tiny, handler = Tiny(), make(tmp_path, on_busy="skip")
    handler.load(tiny.state)
    saved = []
    for step in range(3):
        tiny.step()
        saved.append(handler.dump(tiny.state, step_info(step)))
    assert saved == [True, False, False] and handler.save_stats.skipped == 2
    gate.open_in(0.2)
    tiny.step()
    assert handler.dump(tiny.state, step_info(3), force=True)
    handler.wait()
    tiny.step()
    assert handler.dump(tiny.state, step_info(4))
    handler.close()
    assert names(tmp_path) == ["global_step_3", "global_step_4"]


def _spoil(root: Path) -> Path:
    """Prevent all writes by a file in place of the folder of generations."""
    recover = root / "e" / "t" / "recover"
    if recover.exists():
        os.rename(recover, recover.with_name("elsewhere"))
    recover.write_text("")
    return recover


@pytest.mark.parametrize("by", ["dump", "forced", "wait", "close"])
def test_a_failure_in_the_background_is_reported_by_the_next_call(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    tiny, handler = Tiny(), make(tmp_path)
    handler.load(tiny.state)
    tiny.step()
    assert handler.dump(tiny.state, step_info(0), force=by == "forced"), "nothing is known yet"
    spoilt = _spoil(tmp_path) if gate.reached.wait(20) else None
    assert spoilt is not None
    gate.open()
    if by == "dump":
        handler._saver.settle()
        assert (
            "step 0: snapshot failed, 1 in a row (3 allowed)" in caplog.text
            and handler.failed_saves == 1
        )
        spoilt.unlink()
        tiny.step()
        assert handler.dump(tiny.state, step_info(1))
        handler.close()
        assert names(tmp_path) == ["global_step_1"] and handler.failed_saves == 0
        return
    with pytest.raises(CheckpointWriteError, match="recover"):
        if by == "forced":
            while not handler.dump(tiny.state, step_info(1)):
                tiny.step()
        elif by == "wait":
            handler.wait()
        else:
            handler.close()
    handler.close()


def test_a_run_that_ends_with_an_error_still_has_its_last_snapshot(
    tmp_path: Path, gate: Gate
) -> None:
    tiny = Tiny()
    with pytest.raises(ZeroDivisionError), make(tmp_path) as handler:
        handler.load(tiny.state)
        last = tiny.step()
        handler.dump(tiny.state, step_info(0))
        tiny.step()
        gate.open_in(0.3)
        raise ZeroDivisionError
    assert names(tmp_path) == ["global_step_0"] and restored(tmp_path) == last


def test_a_run_that_is_interrupted_gives_the_snapshot_up(tmp_path: Path, gate: Gate) -> None:
    tiny = Tiny()
    handler = make(tmp_path)
    with pytest.raises(KeyboardInterrupt), handler:
        handler.load(tiny.state)
        tiny.step()
        handler.dump(tiny.state, step_info(0))
        assert gate.reached.wait(20)
        raise KeyboardInterrupt
    gate.open()
    for thread in threading.enumerate():
        if thread.name == "snapshot":
            thread.join(20)
    assert names(tmp_path) == [] and hidden(tmp_path) == []


def test_a_stopped_run_has_the_snapshot_under_way_and_the_last(tmp_path: Path, gate: Gate) -> None:
    tiny, handler = Tiny(), make(tmp_path)
    handler.load(tiny.state)
    tiny.step()
    handler.dump(tiny.state, step_info(0))
    assert gate.reached.wait(20)
    last = tiny.step()
    gate.open_in(0.2)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(Preempted):
        handler.dump(tiny.state, step_info(1))
    assert names(tmp_path) == ["global_step_0", "global_step_1"] and restored(tmp_path) == last


def test_a_buffer_that_is_not_filled_again_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, handler = Tiny(), make(tmp_path)
    handler.load(tiny.state)
    tiny.step()
    handler.dump(tiny.state, step_info(0))
    handler.wait()
    monkeypatch.setattr(staged_state, "_copy_all", lambda pairs: None)
    tiny.step()
    handler.dump(tiny.state, step_info(1))
    with pytest.raises(StaleSnapshotError):
        handler.wait()
    assert names(tmp_path) == ["global_step_0"] and hidden(tmp_path) == []


def test_nothing_is_left_of_the_background_after_close(tmp_path: Path) -> None:
    process = psutil.Process()
    tiny = Tiny()
    n_fds, shm = process.num_fds(), shared_memory()
    for run in range(3):
        with make(tmp_path / str(run)) as handler:
            handler.load(tiny.state)
            for step in range(2):
                tiny.step()
                handler.dump(tiny.state, step_info(step))
    assert process.num_fds() == n_fds and left_in_shared_memory(shm) == set()
    assert [
        t.name for t in threading.enumerate() if t.name.startswith(("snapshot", "staging"))
    ] == []
    assert not tiny.optimizer._optimizer_step_pre_hooks


def _refuse(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def _one_rank_fails(rank: int, world_size: int, root: str) -> tuple[list[bool], str, int]:
    tiny = Tiny()
    handler = make(root, save_failures_allowed=0)
    handler.load(tiny.state)
    tiny.step()
    saved = [handler.dump(tiny.state, step_info(0))]
    handler.wait()
    if rank == 1:
        snapshot_saving.write_process = _refuse
    tiny.step()
    saved.append(handler.dump(tiny.state, step_info(1)))
    step, error = 2, "none"
    try:
        while step < 12:
            tiny.step()
            handler.dump(tiny.state, step_info(step))
            step += 1
    except (CheckpointWriteError, PeerError) as caught:
        error = type(caught).__name__
    torch.distributed.barrier()
    handler.close(wait=False)
    return saved, error, step


def test_a_rank_that_cannot_write_is_reported_everywhere_at_one_step(tmp_path: Path) -> None:
    (saved, error, step), (also, own_error, own_step) = run_ranks(_one_rank_fails, 2, str(tmp_path))
    assert saved == also == [True, True] and step == own_step == 2
    assert (error, own_error) == ("PeerError", "CheckpointWriteError")
    assert names(tmp_path) == ["global_step_0"] and hidden(tmp_path) == []


def _group_goes_away(rank: int, world_size: int, root: str) -> str:
    tiny, begun, gate = Tiny(), threading.Event(), threading.Event()
    handler = make(root, max_ckpt_to_keep=1)
    handler.load(tiny.state)
    tiny.step()
    handler.dump(tiny.state, step_info(0))
    handler.wait()
    write = RankSession.write_snapshot
    RankSession.write_snapshot = lambda *args: (
        begun.set() or (write(*args) if gate.wait(20) else None)
    )  # type: ignore
    tiny.step()
    handler.dump(tiny.state, step_info(1))
    assert begun.wait(20)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    gate.set()
    with pytest.raises(CheckpointWriteError) as caught:
        handler.close()
    return str(caught.value)


def test_a_snapshot_whose_ranks_leave_torch_distributed_is_one_error_and_the_one_before_stays(
    tmp_path: Path,
) -> None:
    for told in run_ranks(_group_goes_away, 2, str(tmp_path)):
        assert told.startswith(
            "step 1: the snapshot is lost, because the ranks could not reach each other"
        )
        assert "close of the RecoverHandler before destroy_process_group" in told
    assert names(tmp_path) == ["global_step_0"]
    handler, tiny = make_handler(tmp_path), Tiny()  # the lock is free
    info = handler.load(tiny.state)
    assert info and info.last_step_info.global_step == 0 and hidden(tmp_path) == []
    handler.close()


def test_a_wait_that_is_interrupted_forgets_nothing(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, handler, states = Tiny(), make(tmp_path, max_ckpt_to_keep=None), []
    handler.load(tiny.state)
    states.append(tiny.step())
    handler.dump(tiny.state, step_info(0))

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(background_job, "wait", interrupt)
        handler.wait()
    states.append(tiny.step())
    gate.open_in(0.2)
    handler.dump(tiny.state, step_info(1))
    handler.close()
    assert handler.save_stats.committed == 2 and names(tmp_path) == [
        "global_step_0",
        "global_step_1",
    ]
    for step, state in enumerate(states):
        again = Tiny()
        with make(
            tmp_path, resume_path=str(tmp_path / f"e/t/recover/global_step_{step}"), trial_name="u"
        ) as other:
            other.load(again.state)
        assert again.digest() == state


def test_two_handlers_may_snapshot_one_model_at_a_time(tmp_path: Path, gate: Gate) -> None:
    tiny = Tiny()
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    for handler in (first, second):
        handler.load(tiny.state)
    at_first = tiny.step()
    first.dump(tiny.state, step_info(0))
    at_second = tiny.step()
    second.dump(tiny.state, step_info(1))
    tiny.step()
    gate.open()
    for handler in (first, second):
        handler.close()
    assert (restored(tmp_path / "a"), restored(tmp_path / "b")) == (at_first, at_second)


def test_two_optimizers_of_one_model_are_two_states(tmp_path: Path) -> None:
    def engines() -> dict[str, DCPState]:
        tiny = Tiny()
        other = torch.optim.AdamW(tiny.model.parameters(), lr=0.7)
        return {"a": tiny.state, "b": DCPState(tiny.model, other)}

    with make(tmp_path) as handler:
        saved = engines()
        handler.load(saved)
        handler.dump(saved, step_info(0))
    with make(tmp_path) as handler:
        assert handler.load(engines()) is not None


def test_generators_are_captured_once_for_all_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[RngState] = []

    def counted() -> RngState:
        captured.append(capture_rng())
        return captured[-1]

    monkeypatch.setattr(snapshot_saving, "capture_rng", counted)
    monkeypatch.setattr(dcp_state, "capture_rng", counted)
    actor, critic = Tiny(), Tiny()
    with make(tmp_path) as handler:
        handler.load({"actor": actor.state, "critic": critic.state})
        captured.clear()
        handler.dump({"actor": actor.state, "critic": critic.state}, step_info(0))
        assert len(captured) == 1


def test_a_signal_after_the_last_dump_does_not_cost_the_snapshot(
    tmp_path: Path, gate: Gate
) -> None:
    passed_on: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: passed_on.append(number))
    try:
        tiny, handler = Tiny(), make(tmp_path)
        handler.load(tiny.state)
        tiny.step()
        handler.dump(tiny.state, step_info(0))
        os.kill(os.getpid(), signal.SIGUSR1)
        gate.open_in(0.2)
        handler.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert names(tmp_path) == ["global_step_0"] and passed_on == [signal.SIGUSR1]


def test_metrics_are_copied_at_the_dump(tmp_path: Path, gate: Gate) -> None:
    tiny, handler, metrics = Tiny(), make(tmp_path), {"reward": 0.5}
    handler.load(tiny.state)
    handler.dump(tiny.state, step_info(0), metrics=metrics)
    metrics["reward"] = 99.0
    gate.open()
    handler.close()
    info = json.loads((tmp_path / "e/t/recover/global_step_0/recover_info.json").read_text())
    assert info["metrics"] == {"reward": 0.5}


def test_a_second_load_waits_for_what_is_being_written(tmp_path: Path, gate: Gate) -> None:
    tiny, handler = Tiny(), make(tmp_path)
    handler.load(tiny.state)
    staged = tiny.step()
    handler.dump(tiny.state, step_info(0))
    tiny.step()
    gate.open_in(0.2)
    assert handler.load(tiny.state) is not None and tiny.digest() == staged
    tiny.step()
    handler.dump(tiny.state, step_info(1))
    handler.close()
    assert names(tmp_path) == ["global_step_0", "global_step_1"]


def _one_cannot_stage(rank: int, world_size: int, root: str) -> list[bool]:
    handler, tiny, seen = make(root), Tiny(), []
    bad = nn.Linear(1, 1)
    if rank == 1:
        bad.weight = nn.Parameter(torch.zeros(1).expand(2))  # found when memory is allocated for it
    engines = {"first": tiny.state, "second": DCPState(bad, torch.optim.AdamW(bad.parameters()))}
    with pytest.raises((ConfigError, PeerError)):
        handler.load(engines)
    seen.append(handler._sessions.own is None)
    assert handler.load(tiny.state) is None and handler.dump(tiny.state, step_info(0))
    handler.wait()
    handler.close(wait=False)
    return [*seen, handler._sessions.own is None]


def test_staging_memory_is_given_back_by_failed_loads_and_hasty_closes(
    tmp_path: Path,
) -> None:
    assert run_ranks(_one_cannot_stage, 2, str(tmp_path)) == [[True, True]] * 2
