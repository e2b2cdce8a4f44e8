"""SIGKILL at every moment of a dump: what was committed stays, what was not never shows, the next start cleans up."""

import errno
import os
import random
import signal
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast.engine.dcp_state import DCPState
from holdfast.recover import GenerationStore
from holdfast.utils.errors import CheckpointWriteError
from tests.helpers import run_ranks
from tests.recover.runs import Tiny, hidden, make_handler, names, step_info

pytestmark = pytest.mark.timeout(120)


def _fill(tiny: Tiny, step: int) -> None:
    with torch.no_grad():
        tiny.model.weight.fill_(step)


def _die_at_each_call(rank: int, world_size: int, root: str) -> list[tuple[str, int, list[str]]]:
    """Fork a process that dumps and dies just before its n-th call into the file system, for every n."""
    dist.destroy_process_group()
    outcomes, moment = [], 0
    while True:
        child = os.fork()
        if child == 0:
            _dump_and_die(root, moment)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        left = hidden(root)
        handler, tiny = make_handler(root, max_ckpt_to_keep=2), Tiny()
        info = handler.load(tiny.state)
        step = info.last_step_info.global_step if info else -1
        assert info is None or tiny.model.weight.unique().tolist() == [step]
        assert hidden(root) == []
        outcomes.append((names(Path(root)), step, left))
        if not killed:
            return outcomes
        moment += 1


def _dump_and_die(root: str, moment: int) -> None:
    """Never returns."""
    handler, tiny = make_handler(root, max_ckpt_to_keep=2), Tiny()
    info = handler.load(tiny.state)
    step = info.last_step_info.global_step + 1 if info else 0
    _fill(tiny, step)
    calls = 0

    def count(event: str, args: tuple) -> None:
        nonlocal calls
        if event.startswith(("open", "os.", "shutil.")) and root in str(args):
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1

    sys.addaudithook(count)
    handler.dump(tiny.state, step_info(step), force=True)
    os._exit(0)


def _fail_at_each_call(rank: int, world_size: int, root: str) -> int:
    """One dump for every n, whose n-th call into the file system finds the disk full; how many calls there were."""
    dist.destroy_process_group()
    handler, tiny = make_handler(root, freq_steps=1, max_ckpt_to_keep=2), Tiny()
    handler.load(tiny.state)
    step, moment, calls, too_late = 0, sys.maxsize, 0, 0

    def strike(event: str, args: tuple) -> None:
        nonlocal calls
        if event.startswith(("open", "os.mkdir", "os.rename", "shutil.")) and root in str(args):
            calls += 1
            if calls - 1 == moment:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sys.addaudithook(strike)
    for step in range(3):
        handler.dump(tiny.state, step_info(step))
    for moment in range(sys.maxsize):
        before, calls, step = names(Path(root)), 0, step + 1
        try:
            assert handler.dump(tiny.state, step_info(step))
        except CheckpointWriteError:
            appeared = names(Path(root)) != before  # only the fsync after the rename comes too late to hide it
            too_late += appeared
        if calls <= moment:
            assert too_late == 1
            return moment
        assert all(name.startswith(".retired-") for name in hidden(root)), hidden(root)
        handler.store.verify(handler.store.generations()[0].path)
    raise AssertionError("unreachable")


def test_a_full_disk_at_any_call_fails_the_dump_alone(tmp_path: Path) -> None:
    assert run_ranks(_fail_at_each_call, 1, str(tmp_path))[0] > 20


def test_a_kill_before_any_call_into_the_file_system_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    (outcomes,) = run_ranks(_die_at_each_call, 1, str(tmp_path))
    assert len(outcomes) > 20
    steps = [step for _, step, _ in outcomes]
    assert steps == sorted(steps) and steps[0] == -1, "a committed generation was lost"
    # The dump commits at one call: kills before it leave the old generation, those after it the new one.
    assert set(steps) >= {-1, 0} and all(b - a in (0, 1) for a, b in pairwise(steps))
    assert any(".staging-" in str(left) for _, _, left in outcomes)
    assert any(".retired-" in str(left) for _, _, left in outcomes)


class _Sharded:
    """Two sharded layers whose every weight is the number of the step."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        fully_shard(self.model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
        self.state = DCPState(self.model, torch.optim.AdamW(self.model.parameters()))

    def fill(self, step: int) -> None:
        with torch.no_grad():
            for tensor in self.state.live_tensors().values():
                tensor.fill_(step)

    def values(self) -> set[float]:
        tensors = self.state.live_tensors().values()
        return {value for tensor in tensors for value in (getattr(tensor, "_local_tensor", tensor)).unique().tolist()}


def _dump_until_killed(rank: int, world_size: int, root: str, victims: tuple[int, ...], delay_s: float) -> int:
    sharded, handler = _Sharded(), make_handler(root, freq_steps=1)
    info = handler.load(sharded.state)
    step = info.last_step_info.global_step if info else -1
    assert info is None or sharded.values() == {step}
    assert rank != 0 or hidden(root) == []
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
    while victims:
        step += 1
        sharded.fill(step)
        handler.dump(sharded.state, step_info(step))
        if rank in victims and timer.ident is None:  # after the first dump, so that every attempt gets ahead
            timer.start()
    return step


def test_ranks_killed_while_they_dump_resume_the_newest_complete_generation(tmp_path: Path) -> None:
    draw = random.Random(4)
    store, last = GenerationStore(tmp_path / "e" / "t" / "recover"), -1
    for victims in [(0,), (1,), (0, 1)] * 3:
        with pytest.raises(AssertionError, match="died without a word"):
            run_ranks(_dump_until_killed, 2, str(tmp_path), victims, draw.uniform(0.01, 0.4), timeout_s=20)
        generations = store.generations()
        for generation in generations:
            assert store.verify(generation.path).last_step_info.global_step == generation.step
        assert generations[0].step > last
        last = generations[0].step
    assert run_ranks(_dump_until_killed, 2, str(tmp_path), (), 0.0) == [last, last]
    assert store.rejected() == []


def test_the_step_of_a_killed_dump_can_be_dumped_again(tmp_path: Path) -> None:
    handler, tiny = make_handler(tmp_path, freq_steps=1), Tiny()
    handler.load(tiny.state)
    staging = handler.store.open_staging(0)
    (staging / "default").mkdir()
    assert handler.dump(tiny.state, step_info(0)), "somebody's leftover is in nobody's way"
    assert [name.partition("-")[0] for name in hidden(tmp_path)] == [".staging"]
    info: Any = make_handler(tmp_path).load(tiny.state)
    assert info.last_step_info.global_step == 0 and hidden(tmp_path) == []
