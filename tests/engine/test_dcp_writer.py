"""The durable writer: files are synced whole, described as they lie on disk, never touched again; errors reach all."""

import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard

from holdfast.engine.dcp_checkpoint import load_dcp, save_dcp
from holdfast.engine.dcp_state import DCPState
from holdfast.engine.dcp_writer import DurableWriter
from holdfast.utils.distributed import is_write_failure
from holdfast.utils.errors import CheckpointWriteError, PeerError
from holdfast.utils.files import DurableFile
from holdfast.utils.manifest import seal_files
from tests.helpers import run_ranks

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

GROUP_TIMEOUT_S = 6.0


def plain_state(value: float = 1.0) -> dict[str, Any]:
    """Tensors of several sizes and kinds, and plain objects."""
    return {
        "app": {
            "large": torch.full((300, 300), value),
            "half": torch.full((7,), value, dtype=torch.bfloat16),
            "view": torch.arange(100.0)[10:20],
            "empty": torch.empty(0),
            "step": 3,
            "names": ["a", "b"],
        }
    }


def sharded_state() -> DCPState:
    """A small FSDP2 model with AdamW, after a step."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return DCPState(model, optimizer)


def _watched_save(rank: int, world_size: int, folder: str) -> tuple[list[str], list[Any]]:
    """Save, and tell every opening, renaming and removal below ``folder``, and what the writer says it wrote."""
    seen: list[str] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove", "os.truncate") and str(args[0]).startswith(f"{folder}/"):
            seen.append(f"{event} {Path(str(args[0])).name} {args[1] if event == 'open' else ''}".strip())

    sizes, fsync = [], os.fsync

    def record(fd: int) -> None:
        sizes.append(os.fstat(fd).st_size)
        fsync(fd)

    os.fsync = record
    sys.addaudithook(watch)
    writer = DurableWriter(folder)
    dcp.save(plain_state(), storage_writer=writer)
    assert sizes == [entry.bytes for entry in writer.entries], "every file is fsynced once, when all of it is there"
    return seen, writer.entries


def test_each_file_is_opened_once_to_be_created_and_nothing_is_renamed_removed_or_read_again(tmp_path: Path) -> None:
    ranks = run_ranks(_watched_save, 2, str(tmp_path))
    assert ranks[0][0] == ["open __0_0.distcp x", "open .metadata x"]
    assert ranks[1][0] == ["open __1_0.distcp x"]
    entries = [entry for _, rank in ranks for entry in rank]
    assert sorted(entry.name for entry in entries) == sorted(os.listdir(tmp_path))
    assert entries == seal_files(tmp_path, [entry.name for entry in entries])


def test_stock_torch_reads_what_the_writer_wrote_and_the_metadata_is_torchs_own(tmp_path: Path) -> None:
    saved = plain_state(2.5)
    dcp.save(saved, storage_writer=DurableWriter(tmp_path / "ours"))
    dcp.save(saved, checkpoint_id=tmp_path / "stock")
    assert (tmp_path / "ours" / "__0_0.distcp").read_bytes() == (tmp_path / "stock" / "__0_0.distcp").read_bytes()
    ours, stock = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "stock"))
    for metadata in (ours, stock):
        metadata.storage_meta = None
    assert ours == stock
    template = plain_state(0.0) | {}
    template["app"] |= {"step": 0, "names": []}
    dcp.load(template, checkpoint_id=tmp_path / "ours")
    assert (template["app"]["step"], template["app"]["names"]) == (3, ["a", "b"])
    assert all(torch.equal(template["app"][key], saved["app"][key]) for key in ("large", "half", "view", "empty"))


def test_a_file_that_is_there_fails_the_save_and_keeps_its_bytes(tmp_path: Path) -> None:
    dcp.save(plain_state(1.0), storage_writer=DurableWriter(tmp_path))
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    with pytest.raises(CheckpointException):
        dcp.save(plain_state(2.0), storage_writer=DurableWriter(tmp_path))
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CheckpointException, match="File exists"):
        dcp.save(plain_state(2.0), storage_writer=DurableWriter(tmp_path))
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == {
        name: data for name, data in before.items() if name != ".metadata"
    }


def test_a_writer_that_is_used_again_describes_the_second_save(tmp_path: Path) -> None:
    writer = DurableWriter(tmp_path / "a")
    dcp.save(plain_state(1.0), storage_writer=writer)
    dcp.save(plain_state(2.0), storage_writer=writer, checkpoint_id=tmp_path / "b")
    assert writer.entries == seal_files(tmp_path / "b", ["__0_0.distcp", ".metadata"])


def _save_within_limits(rank: int, world_size: int, folder: str) -> int:
    """Save with room for ever more bytes in a file, until it succeeds; the number of refusals."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    state = sharded_state()
    for tries, limit in enumerate(range(0, 200_000, 997)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        path = f"{folder}/{limit}"
        try:
            save_dcp(path, state)
        except CheckpointWriteError as error:
            assert "File too large" in str(error) and is_write_failure(error), str(error)
            assert os.listdir(folder) == []
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            load_dcp(path, state)
            return tries
    raise AssertionError("it never succeeded")


def test_a_refused_write_is_a_write_error_wherever_it_strikes(tmp_path: Path) -> None:
    assert run_ranks(_save_within_limits, 1, str(tmp_path))[0] > 40


def _strike(act: Callable[[], object], n_bytes: int) -> None:
    """Have ``act`` called in the middle of the next data file this process writes."""
    write = DurableFile.write

    def striking(self: DurableFile, data: Any) -> int:
        if self.bytes > n_bytes:
            act()
        return write(self, data)

    DurableFile.write = striking


def bug() -> None:
    """What is no fault of the file system."""
    raise KeyError("bug")


class UnpicklableError(Exception):
    """Cannot be told to other ranks as it is."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("not this one")


def unpicklable_bug() -> None:
    """Likewise, and it cannot travel."""
    raise UnpicklableError("strange bug")


ACTS: dict[str, Callable[[], object]] = {
    "bug": bug,
    "unpicklable": unpicklable_bug,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def _one_rank_fails(rank: int, world_size: int, folder: str, how: str) -> None:
    group: Any = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    state = sharded_state()
    if rank == 1:
        _strike(ACTS[how], 2000)
    started = time.monotonic()
    try:
        save_dcp(f"{folder}/save", state, group)
    except BaseException as error:
        seconds = time.monotonic() - started
        (Path(folder) / f"rank_{rank}").write_text(f"{seconds} {type(error).__name__} {error}")
        assert not is_write_failure(error)
        assert how != "bug" or isinstance(error, PeerError if rank == 0 else KeyError), repr(error)


@pytest.mark.parametrize("how", ACTS)
def test_a_rank_that_fails_dies_or_hangs_in_the_middle_fails_the_save_on_the_others_in_bounded_time(
    tmp_path: Path, how: str
) -> None:
    if how in ("killed", "stopped"):
        with pytest.raises(AssertionError, match=r"rank 1|ranks \[1\] did not answer"):
            run_ranks(_one_rank_fails, 2, str(tmp_path), how, timeout_s=40)
    else:
        run_ranks(_one_rank_fails, 2, str(tmp_path), how)
    seconds, what = (tmp_path / "rank_0").read_text().split(" ", 1)
    assert float(seconds) < 2 * GROUP_TIMEOUT_S, what
    assert how != "bug" or "rank 1: KeyError: 'bug'" in what
    assert {name for name in os.listdir(tmp_path) if not name.startswith("rank_")} == set(), "nothing is left behind"
