"""Trouble without damage: ranks that see other folders, folders that move, full disks, unusual
states.
"""

import fcntl
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holdfast.engine.dcp.state import DCPState
from holdfast.recover import RecoverHandler, ResumableDataLoader
from holdfast.recover.engines import RankEngines
from holdfast.recover.info import rank_state_name
from holdfast.recover.resuming.check import check_bytes
from holdfast.recover.resuming.restore import ProcessState
from holdfast.recover.saving.snapshot import capture_process, write_process
from holdfast.utils.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigError,
    PeerError,
)
from holdfast.utils.manifest import read_manifest
from holdfast.utils.plain_values import pack_plain
from holdfast.utils.rng import capture_rng
from tests.helpers import run_ranks
from tests.limits import stretched
from tests.recover.runs import (
    Diary,
    Tiny,
    hidden,
    make_handler,
    names,
    newest,
    run_until,
    step_info,
)

pytestmark = pytest.mark.timeout(90)


def test_a_rank_that_misses_a_file_stops_without_setting_anything_aside(tmp_path: Path) -> None:
    run_until(tmp_path, 1)
    files = read_manifest(newest(tmp_path))["files"]
    target = RankEngines({"default": Tiny().state})
    assert check_bytes(target, str(newest(tmp_path)), files) is None
    with pytest.raises(
        CheckpointNotFoundError, match=r"rank 0 does not see .*which the leader sees"
    ):
        check_bytes(target, str(tmp_path / "not mounted here"), files)


def _with_a_relative_fileroot(rank: int, world_size: int, root: str) -> list[int]:
    os.chdir(root if rank == 0 else "/")
    seen = []
    for step in range(2):
        handler, tiny = make_handler("runs", freq_steps=1), Tiny()
        info = handler.load(tiny.state)
        seen.append(-1 if info is None else info.last_step_info.global_step)
        handler.dump(tiny.state, step_info(step))
        handler.close()
    return seen


def test_a_relative_fileroot_is_relative_to_the_leaders_folder(tmp_path: Path) -> None:
    assert run_ranks(_with_a_relative_fileroot, 2, str(tmp_path)) == [[-1, 0], [-1, 0]]
    assert (
        names(tmp_path / "runs") == ["global_step_0", "global_step_1"]
        and hidden(tmp_path / "runs") == []
    )


@pytest.mark.parametrize("at", ["load", "a step"])
def test_a_run_with_a_relative_fileroot_stays_in_its_folder_if_the_program_leaves_for_another(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    handler, tiny, diary = make_handler("runs", freq_steps=1), Tiny(), Diary()
    handler.register("diary", diary)
    if at == "load":
        monkeypatch.chdir(tmp_path / "second")
    handler.load(tiny.state)
    tiny.step()
    assert handler.dump(tiny.state, step_info(0))
    monkeypatch.chdir(tmp_path / "second")
    assert handler.goodput()["lost_s"] > 0, "its journal is read"
    tiny.step()
    assert handler.dump(tiny.state, step_info(1))
    diary.note("in the second folder", durably=True)
    assert caplog.messages == [] and list((tmp_path / "second").iterdir()) == []
    root = tmp_path / "first" / "runs"
    with open(root / "e" / "t" / "recover.lock", "r+") as lock, pytest.raises(BlockingIOError):
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    handler.close()

    again, read = make_handler(root), Diary()
    again.register("diary", read)
    info = again.load(Tiny().state)
    assert info and info.last_step_info.global_step == 1 and read.read == ["in the second folder"]


def _with_folders_of_their_own(rank: int, world_size: int, root: str) -> str:
    own = Path(root) / str(rank)
    (own / "runs" / "e" / "t").mkdir(parents=True)
    os.chdir(own)
    handler = make_handler(
        "/proc/self/cwd/runs", freq_steps=1
    )  # one path that is another folder for each process
    with pytest.raises(ConfigError) as refusal:
        handler.load(Tiny().state)
    handler.close()
    assert rank != 0 or [path.name for path in own.rglob(".shared-*")] == []
    return str(refusal.value)


def test_ranks_that_do_not_see_the_leaders_folder_are_told_at_the_start(tmp_path: Path) -> None:
    told = run_ranks(_with_folders_of_their_own, 2, str(tmp_path))
    assert told[0] == told[1]
    host = socket.gethostname()
    assert told[0].startswith(f"rank 1 on {host} does not see /proc/self/cwd/runs/e/t/.shared-")
    assert f"which the leader sees on {host}; all ranks need the same folder" in told[0]


def test_a_run_that_went_back_and_moved_does_not_go_back_again(tmp_path: Path) -> None:
    run_until(tmp_path / "old", 4, max_ckpt_to_keep=None)
    wanted = str(tmp_path / "old" / "e" / "t" / "recover" / "global_step_1")
    run_until(tmp_path / "old", 4, first=2, resume_path=wanted, max_ckpt_to_keep=None)
    (tmp_path / "old").rename(tmp_path / "new")
    moved = wanted.replace("/old/", "/new/")
    info = make_handler(tmp_path / "new", resume_path=moved).load(Tiny().state)
    assert info and info.last_step_info.global_step == 3


def test_a_folder_whose_generations_were_removed_does_not_start_over_by_itself(
    tmp_path: Path,
) -> None:
    run_until(tmp_path, 2)
    for name in names(tmp_path):
        shutil.rmtree(tmp_path / "e" / "t" / "recover" / name)
    with pytest.raises(
        CheckpointCorruptError, match="says that generations were committed here, but there is none"
    ):
        make_handler(tmp_path).load(Tiny().state)
    (tmp_path / "e" / "t" / "recover" / "latest_checkpointed_iteration.txt").unlink()
    assert make_handler(tmp_path).load(Tiny().state) is None


def test_a_run_that_would_repeat_a_step_not_resumed_is_stopped(tmp_path: Path) -> None:
    first, second, tiny = (
        make_handler(tmp_path, freq_steps=1),
        make_handler(tmp_path, freq_steps=1),
        Tiny(),
    )
    first.load(tiny.state)
    second.load(tiny.state)
    assert first.dump(tiny.state, step_info(0))
    with pytest.raises(
        ConfigError, match=r"step 0 is to be snapshotted, but .* holds step 0: the job went back"
    ):
        second.dump(tiny.state, step_info(0))


def test_generators_of_other_devices_are_not_compared(tmp_path: Path) -> None:
    write_process(tmp_path, rank_state_name(0), capture_process({})[0])
    state = capture_rng() | {"cuda": torch.zeros(8, 16, dtype=torch.uint8)}
    (tmp_path / rank_state_name(0)).write_bytes(pack_plain("it", {"rng": state, "user": {}}))
    if not torch.cuda.is_initialized():
        assert ProcessState.read(tmp_path, 0).restore({}) is None


def _buffers_that_differ(rank: int, world_size: int, root: str) -> list[float]:
    model = nn.BatchNorm1d(4)
    with torch.no_grad():
        model.running_mean.fill_(rank + 1)  # type: ignore[union-attr]
    state = DCPState(model, torch.optim.AdamW(model.parameters()))
    handler = make_handler(root, freq_steps=1)
    handler.load(state)
    assert handler.dump(state, step_info(0))
    again = make_handler(root)
    assert again.load(state) is not None
    return model.running_mean.tolist()  # type: ignore[union-attr]


def test_a_buffer_that_differs_is_saved_from_the_first_rank(tmp_path: Path) -> None:
    assert run_ranks(_buffers_that_differ, 2, str(tmp_path)) == [[1.0] * 4] * 2


def test_a_chain_of_schedulers_is_no_reason_to_fail(tmp_path: Path) -> None:
    tiny = Tiny()
    schedulers = [torch.optim.lr_scheduler.ConstantLR(tiny.optimizer), tiny.scheduler]
    state = DCPState(
        tiny.model, tiny.optimizer, torch.optim.lr_scheduler.ChainedScheduler(schedulers)
    )
    handler = make_handler(tmp_path, freq_steps=1)
    handler.load(state)
    assert handler.dump(state, step_info(0))
    assert make_handler(tmp_path).load(state)


def test_an_accumulator_that_gradients_are_too_small_for_is_no_stale_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)
    state, handler = (
        DCPState(model, optimizer),
        make_handler(tmp_path, freq_steps=1, save_failures_allowed=0),
    )
    handler.load(state)
    for step in range(3):
        for param in model.parameters():
            param.grad = torch.full_like(param, 1e-5)
        optimizer.step()
        assert handler.dump(state, step_info(step))
    assert "the sampled optim of 'default' is the same" in caplog.text


def test_old_generations_are_removed_before_free_space_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill after a commit leaves one generation too many, on a disk without room for another."""
    run_until(tmp_path, 4, max_ckpt_to_keep=None)
    counted = []
    monkeypatch.setattr(
        "holdfast.recover.saving.snapshot.require_free_space",
        lambda root, needed: counted.append(len(names(tmp_path))),
    )
    run_until(tmp_path, 5, first=4, max_ckpt_to_keep=2)
    assert counted == [2]


_HOLD_THE_LOCK = """
import fcntl, os, sys, time
os.makedirs(os.path.dirname(sys.argv[1]), exist_ok=True)
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(6)
"""


def _wait_for_the_lock(rank: int, world_size: int, root: str) -> float:
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    import holdfast.utils.distributed as distributed

    distributed.WORD_EVERY_S = 0.5
    plain = make_handler(root, lock_timeout_s=30.0)
    handler, started = RecoverHandler(plain.config, plain.ft_spec, group=group), time.monotonic()
    assert handler.load(Tiny().state) is None
    return time.monotonic() - started


@pytest.mark.slow
def test_ranks_wait_for_a_slow_decision_for_longer_than_their_group_would(tmp_path: Path) -> None:
    lock = tmp_path / "e" / "t" / "recover.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD_THE_LOCK, str(lock)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    assert min(run_ranks(_wait_for_the_lock, 2, str(tmp_path))) > 0
    holder.wait(timeout=stretched(20))
    with open(lock) as file:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # and no process holds it now


def _one_rank_has_data(rank: int, world_size: int, root: str, at_load: tuple[int, ...]) -> str:
    handler, tiny = make_handler(root, freq_steps=1), Tiny()
    loader = ResumableDataLoader(list(range(24)), 4, seed=0)
    handler.load(tiny.state, loader if rank in at_load else None)
    with pytest.raises((ConfigError, PeerError)) as caught:
        handler.dump(tiny.state, step_info(0), loader if rank == 0 else None)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("at_load", "words"),
    [
        ((0,), "rank(s) [1] passed no dataloader"),
        ((0, 1), "dump got no dataloader, but load did"),
        ((), "load got no dataloader, but dump did"),
    ],
)
def test_a_dataloader_on_some_ranks_only_is_an_error_on_all(
    tmp_path: Path, at_load: tuple[int, ...], words: str
) -> None:
    for message in run_ranks(_one_rank_has_data, 2, str(tmp_path), at_load):
        assert words in message
    assert names(tmp_path) == [] and hidden(tmp_path) == []


def test_an_error_that_ends_the_block_does_not_wait_for_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "holdfast.recover.storage.mirror.Mirror._copy",
        lambda self, generation: time.sleep(300) or 0,
    )
    handler, started = (
        make_handler(tmp_path, freq_steps=1, mirror_url=f"file://{tmp_path}/mirror"),
        time.monotonic(),
    )
    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError), handler:
        tiny = Tiny()
        handler.load(tiny.state)
        handler.dump(tiny.state, step_info(0))
        raise ZeroDivisionError
    assert (
        time.monotonic() - started < stretched(20) and "gave up copying step(s) [0]" in caplog.text
    )


@pytest.mark.slow
def test_a_decision_that_hangs_does_not_keep_the_process_from_its_end() -> None:
    """Like a request to a mirror that never answers."""
    script = """
import os, signal, threading, time
from holdfast.recover.ranks import LocalRanks
from holdfast.recover.engines import RankEngines
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
LocalRanks(RankEngines({"it": object()})).decide_slowly(lambda: time.sleep(60))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=stretched(30)
    )
    assert ended.returncode != 0 and "KeyboardInterrupt" in ended.stderr
