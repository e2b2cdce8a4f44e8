"""A failed snapshot, or one equal to the previous, is reported. Training goes on, but not for
ever.
"""

import copy
import logging
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.engine.dcp.state import DCPState
from holdfast.engine.staging.host_buffers import HostBuffers
from holdfast.recover import GenerationStore
from holdfast.utils.errors import CheckpointWriteError, PeerError, StaleSnapshotError
from tests.engine.hf_models import tiny_model
from tests.helpers import run_ranks
from tests.recover.runs import Tiny, hidden, make_handler, names, run_until, step_info

pytestmark = pytest.mark.timeout(60)


def _in_the_way(root: Path, there: bool) -> None:
    """Put a file in place of the folder of generations, or remove it."""
    recover = root / "e" / "t" / "recover"
    if there:
        os.rename(recover, recover.with_name("elsewhere"))
        recover.write_text("")
    else:
        recover.unlink()
        os.rename(recover.with_name("elsewhere"), recover)


def test_failed_snapshots_are_counted_and_too_many_in_a_row_end_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_until(tmp_path, 1)
    handler, tiny = make_handler(tmp_path, freq_steps=1, save_failures_allowed=2), Tiny()
    handler.load(tiny.state)
    _in_the_way(tmp_path, True)
    assert [handler.dump(tiny.state, step_info(step)) for step in (1, 2)] == [False, False]
    assert (
        handler.failed_saves == 2
        and "step 2: snapshot failed, 2 in a row (2 allowed): cannot" in caplog.text
    )
    _in_the_way(tmp_path, False)
    assert handler.dump(tiny.state, step_info(3)) and handler.failed_saves == 0
    _in_the_way(tmp_path, True)
    assert [handler.dump(tiny.state, step_info(step)) for step in (4, 5)] == [False, False]
    with pytest.raises(CheckpointWriteError):
        handler.dump(tiny.state, step_info(6))
    _in_the_way(tmp_path, False)
    assert names(tmp_path) == ["global_step_0", "global_step_3"] and hidden(tmp_path) == []


def test_a_forced_snapshot_that_fails_is_an_error_at_once(tmp_path: Path) -> None:
    handler, tiny = make_handler(tmp_path, freq_steps=1), Tiny()
    handler.load(tiny.state)
    handler.dump(tiny.state, step_info(0))
    _in_the_way(tmp_path, True)
    with pytest.raises(CheckpointWriteError):
        handler.dump(tiny.state, step_info(1), force=True)


def test_a_disk_without_room_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_until(tmp_path, 1)
    handler, tiny = make_handler(tmp_path, freq_steps=1), Tiny()
    handler.load(tiny.state)
    monkeypatch.setattr(GenerationStore, "newest_bytes", lambda self: 1 << 60)
    assert not handler.dump(tiny.state, step_info(1))
    assert f"{1 << 60}" in caplog.text and "free" in caplog.text
    assert names(tmp_path) == ["global_step_0"] and hidden(tmp_path) == []


def test_host_memory_of_a_failed_save_is_free_for_an_offload(tmp_path: Path) -> None:
    state = DCPState(model := tiny_model("llama"))
    handler = make_handler(
        tmp_path, freq_steps=1, hf_freq_steps=2, async_save=True, save_failures_allowed=9
    )
    handler.load(state)
    assert handler.dump(state, step_info(0))
    first = HostBuffers.take(model, offload := threading.Event())
    HostBuffers.release(model, offload)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (2, 3):  # no folder can be made. Step 3 is exported, too
        _in_the_way(tmp_path, True)
        (tmp_path / "e" / "t" / "hf").write_text("")
        assert not handler.dump(state, step_info(step))
        handler._saver.settle()
        (tmp_path / "e" / "t" / "hf").unlink()
        _in_the_way(tmp_path, False)
        assert HostBuffers.take(model, offload) is first
        HostBuffers.release(model, offload)
    for step in (4, 5):  # no file can be written
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
        try:
            assert not handler.dump(state, step_info(step))
            handler._saver.settle()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert HostBuffers.take(model, offload) is first
        HostBuffers.release(model, offload)
    stats = handler.save_stats
    assert (stats.failed, stats.exports_failed) == (4, 2)
    handler.close()


def test_the_newest_generation_says_how_many_bytes_the_next_one_needs(tmp_path: Path) -> None:
    store = GenerationStore(tmp_path / "e" / "t" / "recover")
    assert store.newest_bytes() == 0
    run_until(tmp_path, 1)
    (generation,) = store.generations()
    files = [
        path
        for path in generation.path.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    ]
    assert store.newest_bytes() == sum(path.stat().st_size for path in files)


def _one_rank_cannot_write(
    rank: int, world_size: int, root: str, kind: str
) -> tuple[list[bool], str]:
    tiny, handler = Tiny(), make_handler(root, freq_steps=1, save_failures_allowed=1)
    handler.load(tiny.state)
    saved, limits = (
        [handler.dump(tiny.state, step_info(0))],
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    if kind == "disk" and rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    if kind == "bug" and rank == 1:
        handler._stateful["x"] = _Unsavable()
    try:
        for step in (1, 2):
            tiny.step()
            saved.append(handler.dump(tiny.state, step_info(step)))
    except (CheckpointWriteError, PeerError, ZeroDivisionError) as error:
        outcome = type(error).__name__
    else:
        outcome = "none"
    dist.barrier()
    return saved, outcome


class _Unsavable:
    def state_dict(self) -> dict[str, Any]:
        raise ZeroDivisionError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def test_a_rank_that_cannot_write_fails_the_snapshot_not_the_training(tmp_path: Path) -> None:
    (saved, _), (also, error) = run_ranks(_one_rank_cannot_write, 2, str(tmp_path), "disk")
    assert saved == also == [True, False], "the first failure is allowed, the second ends the run"
    assert error == "CheckpointWriteError"
    assert names(tmp_path) == ["global_step_0"] and hidden(tmp_path) == []


def test_a_rank_with_a_bug_ends_all_ranks_at_once(tmp_path: Path) -> None:
    outcomes = run_ranks(_one_rank_cannot_write, 2, str(tmp_path), "bug")
    assert outcomes == [([True], "PeerError"), ([True], "ZeroDivisionError")]
    assert names(tmp_path) == ["global_step_0"] and hidden(tmp_path) == []


class _StaleState(DCPState):
    """Always returns the tensors of its first call, like a staging buffer that is never filled
    again.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._first: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        if not self._first:
            self._first.update(copy.deepcopy(super().state_dict()))
        return dict(self._first)


def test_a_snapshot_of_stale_values_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = Tiny()
    tiny.step()
    handler = make_handler(tmp_path, freq_steps=1, save_failures_allowed=1)
    handler.load(tiny.state)
    stale = _StaleState(tiny.model, tiny.optimizer, tiny.scheduler)
    assert handler.dump(stale, step_info(0))
    tiny.step()
    assert not handler.dump(stale, step_info(1))
    assert (
        "stale snapshot of 'default': fingerprints did not change between optimizer steps 1 and 2"
        in caplog.text
    )
    tiny.step()
    with pytest.raises(StaleSnapshotError):
        handler.dump(stale, step_info(2))
    assert names(tmp_path) == ["global_step_0"] and hidden(tmp_path) == []


def test_a_stale_snapshot_is_noticed_after_a_restart_too(tmp_path: Path) -> None:
    run_until(tmp_path, 3)
    tiny, handler = Tiny(), make_handler(tmp_path, freq_steps=1, save_failures_allowed=0)
    handler.load(tiny.state)
    stale = _StaleState(tiny.model, tiny.optimizer, tiny.scheduler)
    stale.state_dict()
    tiny.step()
    with pytest.raises(StaleSnapshotError):
        handler.dump(stale, step_info(3))


def test_steps_that_change_nothing_yet_are_no_stale_snapshots(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All rewards are equal, so advantage, gradient and moments are zero. Later the learning rate
    is zero.
    """
    tiny = Tiny()
    for group in tiny.optimizer.param_groups:
        group["weight_decay"] = 0.0
    handler = make_handler(tmp_path, freq_steps=1, save_failures_allowed=0, max_ckpt_to_keep=None)
    handler.load(tiny.state)
    for step in range(2):
        for param in tiny.model.parameters():
            param.grad = torch.zeros_like(param)
        tiny.optimizer.step()
        assert handler.dump(tiny.state, step_info(step))
    tiny.optimizer.param_groups[0]["lr"] = 0.0
    for step in range(2, 4):
        tiny.model(torch.randn(5, 3)).square().mean().backward()
        tiny.optimizer.step()
        assert handler.dump(tiny.state, step_info(step))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
