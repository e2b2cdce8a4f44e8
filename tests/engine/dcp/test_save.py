"""`DCPSaver`: files are synced completely, described as they are on disk, and never changed. Errors
reach all ranks.
"""

import io
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
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import fully_shard

from holdfast.engine.dcp import save
from holdfast.engine.dcp.format import read_layout
from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import DCPSaver, save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.memory.tensors import local_tensor
from holdfast.utils.atomic_folder import staged_folder
from holdfast.utils.distributed import is_write_failure
from holdfast.utils.errors import CheckpointWriteError, PeerError
from holdfast.utils.files import DurableFile
from holdfast.utils.manifest import FileEntry, file_entries
from holdfast.utils.rng import seed_rng
from tests.engine.peak_memory import CAN_MEASURE, peak_growth_bytes
from tests.helpers import run_ranks

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

GROUP_TIMEOUT_S = 6.0


def sharded_state() -> DCPState:
    """A small FSDP2 model with AdamW, after a step."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return DCPState(model, optimizer)


def trained_state(features: int = 300, extra: bool = False) -> DCPState:
    """An unsharded model with AdamW after a step, with buffers of other kinds."""
    torch.manual_seed(0)
    model = nn.Linear(features, features)
    if extra:
        model.register_buffer("halves", torch.full((7,), 2.5, dtype=torch.bfloat16))
        model.register_buffer("view", torch.arange(100.0)[10:20])
        model.register_buffer("columns", torch.arange(100.0).view(10, 10)[:, 3])
        model.register_buffer("nothing", torch.empty(0, 3))
        model.register_buffer("flag", torch.tensor(True))
        model.register_buffer("conjugate", torch.tensor([1 + 2j]).conj())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, features)).sum().backward()
    optimizer.step()
    return DCPState(model, optimizer)


def _watched_save(rank: int, world_size: int, folder: str) -> tuple[list[str], list[FileEntry]]:
    """Save, and return all opens, renames and removals below ``folder``, and the entries that the
    saver returns.
    """
    seen: list[str] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove", "os.truncate") and str(args[0]).startswith(
            f"{folder}/"
        ):
            seen.append(
                f"{event} {Path(str(args[0])).name} {args[1] if event == 'open' else ''}".strip()
            )

    sizes, fsync = [], os.fsync

    def record(fd: int) -> None:
        sizes.append(os.fstat(fd).st_size)
        fsync(fd)

    os.fsync = record
    sys.addaudithook(watch)
    entries = DCPSaver().write(folder, sharded_state().state_dict())
    assert sizes == [entry.bytes for entry in entries], (
        "every file is fsynced once, when all of it is there"
    )
    return seen, entries


def test_each_file_is_created_once_and_nothing_is_renamed_removed_or_reread(tmp_path: Path) -> None:
    ranks = run_ranks(_watched_save, 2, str(tmp_path))
    assert ranks[0][0] == ["open __0_0.distcp x", "open .metadata x"]
    assert ranks[1][0] == ["open __1_0.distcp x"]
    entries = [entry for _, rank in ranks for entry in rank]
    assert sorted(entry.name for entry in entries) == sorted(os.listdir(tmp_path))
    assert entries == file_entries(tmp_path, [entry.name for entry in entries])


def _save(folder: Path, state: DCPState, saver: DCPSaver | None = None) -> list[FileEntry]:
    folder.mkdir()
    return (saver or DCPSaver()).write(folder, state.state_dict())


def test_stock_torch_reads_what_was_written_and_the_metadata_is_torchs_own(tmp_path: Path) -> None:
    state = trained_state(extra=True)
    _save(tmp_path / "ours", state)
    dcp.save({"dcp": state}, checkpoint_id=tmp_path / "stock")
    ours, stock = (
        dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "stock")
    )
    for metadata in (ours, stock):
        metadata.storage_meta = None
    for entry in stock.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            vars(entry.properties).pop(
                "strides", None
            )  # torch 2.15 adds them, and older versions cannot read them
    assert ours == stock
    expected = {name: tensor.clone() for name, tensor in state.live_tensors().items()}
    with torch.no_grad():
        for tensor in state.live_tensors().values():
            tensor.zero_()
    dcp.load({"dcp": state}, checkpoint_id=tmp_path / "ours")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.live_tensors().items())


def test_every_tensor_of_a_file_is_an_archive_for_weights_only_load(tmp_path: Path) -> None:
    state = trained_state(extra=True)
    _save(tmp_path / "a", state)
    metadata = dcp.FileSystemReader(tmp_path / "a").read_metadata()
    data, live = (tmp_path / "a" / "__0_0.distcp").read_bytes(), state.live_tensors()
    for index, place in metadata.storage_data.items():
        loaded = torch.load(
            io.BytesIO(data[place.offset : place.offset + place.length]), weights_only=True
        )
        if (name := index.fqn.removeprefix("dcp.")) in live:
            assert torch.equal(loaded, live.pop(name)), name
    assert not live


def test_a_file_that_is_there_fails_the_save_and_keeps_its_bytes(tmp_path: Path) -> None:
    state = trained_state()
    _save(tmp_path / "a", state)
    before = {name: (tmp_path / "a" / name).read_bytes() for name in os.listdir(tmp_path / "a")}
    for missing in ((), ("__0_0.distcp",)):
        for name in missing:
            (tmp_path / "a" / name).unlink()
        with pytest.raises(CheckpointWriteError, match="File exists"):
            DCPSaver().write(tmp_path / "a", trained_state().state_dict())
    assert {name: (tmp_path / "a" / name).read_bytes() for name in before} == before


def _plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets one entry per plan."""
    made: list[int] = []

    def counting(plan: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (made.append(1), plan(*args))[1]

    for name in ("plan_alone", "plan_together"):
        monkeypatch.setattr(save, name, counting(getattr(save, name)))
    return made


def _save_changing_states(rank: int, world_size: int, folder: str) -> list[int]:
    """Numbers of plans made before each of several saves."""
    group: Any = dist.new_group()
    counts: list[int] = []
    saver = DCPSaver()
    with pytest.MonkeyPatch.context() as patch:
        made = _plans(patch)

        def save(state: DCPState) -> None:
            path = Path(f"{folder}/{len(counts)}")
            with staged_folder(path, group) as staging:
                saver.write(staging, state.state_dict(), group)
            counts.append(len(made))
            parts = {
                name: local_tensor(tensor).detach() for name, tensor in state.live_tensors().items()
            }
            expected = {name: part.clone() for name, part in parts.items()}
            for part in parts.values():
                part.add_(1)
            load_dcp(path, state, group)
            assert all(torch.equal(part, expected[name]) for name, part in parts.items())

        state = sharded_state()
        save(state)
        save(state)
        if rank == 1:
            state.model.register_buffer("own", torch.ones(3))
        # Only tensors of every rank can be loaded, so this folder is only written.
        path = Path(f"{folder}/own")
        with staged_folder(path, group) as staging:
            saver.write(staging, state.state_dict(), group)
        counts.append(len(made))
        assert any(
            name.endswith("own")
            for name in dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        )
        if rank == 1:
            del state.model.own
        save(state)
        save(state)
    return counts


def test_a_plan_is_kept_until_the_structure_changes_on_any_rank(
    tmp_path: Path,
) -> None:
    assert run_ranks(_save_changing_states, 2, str(tmp_path)) == [[1, 1, 2, 3, 3]] * 2


@pytest.mark.parametrize("change", ["shape", "dtype", "name"])
def test_a_plan_is_made_anew_for_another_shape_dtype_or_name(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, saver, state = _plans(monkeypatch), DCPSaver(), trained_state()
    values = state.state_dict()
    (tmp_path / "a").mkdir()
    saver.write(tmp_path / "a", values)
    weight = values["model"].pop("weight")
    others = {
        "shape": ("weight", weight[:7]),
        "dtype": ("weight", weight.bfloat16()),
        "name": ("other", weight),
    }
    values["model"][others[change][0]] = others[change][1]
    (tmp_path / "b").mkdir()
    saver.write(tmp_path / "b", values)
    assert len(made) == 2
    name, tensor = others[change]
    into = {"dcp": {"model": {name: torch.zeros_like(tensor)}}}
    dcp.load(into, checkpoint_id=tmp_path / "b")
    assert torch.equal(into["dcp"]["model"][name], tensor)


def _save_with_others(rank: int, world_size: int, folder: str) -> list[str]:
    """Save on ranks 0 and 1, on 2 and 3, then on 0 and 3. Returns the names in the last folder."""
    saver, model = DCPSaver(), nn.Linear(3, 3)
    if rank == 1:
        model.register_buffer("own", torch.ones(3))
    groups: list[Any] = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 3))]
    for number, group in enumerate(groups):
        if dist.get_rank(group) >= 0:
            os.makedirs(f"{folder}/{number}", exist_ok=True)
            dist.barrier(group)
            saver.write(f"{folder}/{number}", DCPState(model).state_dict(), group)
    dist.barrier()
    return sorted(dcp.FileSystemReader(f"{folder}/2").read_metadata().state_dict_metadata)


def test_a_plan_that_was_made_with_other_ranks_is_not_used_again(tmp_path: Path) -> None:
    assert run_ranks(_save_with_others, 4, str(tmp_path))[0] == [
        "dcp.model.bias",
        "dcp.model.weight",
    ]


class _Named(nn.Linear):
    """A module with extra state of its own on each rank, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.bias.requires_grad_(False)
        self.told = ""

    def get_extra_state(self) -> Any:
        return {"told": self.told}

    def set_extra_state(self, state: Any) -> None:
        self.told = state["told"]


def _save_and_load_in_parts(
    rank: int, world_size: int, folder: str, n_peers: int
) -> tuple[tuple[float, str] | None, ...]:
    """Save on ranks 1 and 2, then load on 0 and 1. Returns what this rank drew after each, and the
    extra state.
    """
    found: list[tuple[float, str] | None] = []
    for ranks in ([1, 2], [0, 1]):
        group: Any = dist.new_group(ranks)  # waits for all ranks of the job
        if rank not in ranks:
            found.append(None)
            continue
        torch.manual_seed(0)
        model = _Named()
        optimizer = torch.optim.AdamW([model.weight])
        state = DCPState(model, optimizer, trainable_only=True, ranks_with_same_data=n_peers)
        number = ranks.index(rank)
        if ranks == [1, 2]:
            seed_rng(7 + number // n_peers)
            model.told = f"number {number}"
            save_dcp(folder, state, group)
        else:
            load_dcp(folder, state, group)
        found.append((torch.rand(1).item(), model.told))
    return tuple(found)


@pytest.mark.parametrize("n_peers", [1, 2])
def test_values_of_each_rank_are_numbered_in_the_group_that_saves(
    tmp_path: Path, n_peers: int
) -> None:
    folder = tmp_path / "saved"
    found = run_ranks(_save_and_load_in_parts, 3, str(folder), n_peers)
    saved = [found[rank][0] for rank in (1, 2)]
    assert saved == [found[rank][1] for rank in (0, 1)]
    assert [told for _, told in saved] == ["number 0", "number 1"]
    assert (saved[0][0] == saved[1][0]) == (n_peers == 2)

    # The share of the frozen parameter, which every rank holds, is the first rank's.
    names = read_layout(folder).names()
    assert {name for name in names if name.startswith("dcp.base_sample")} == {
        "dcp.base_sample.rank_00000",
        "dcp.base_sample.rank_00001",
    }


def _write_replicated(rank: int, world_size: int, folder: str) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(200, 200, bias=False) for _ in range(9)))
    values = DCPState(model).state_dict() | {"counters": torch.full((10,), rank, dtype=torch.uint8)}
    return DCPSaver().write(folder, values)[0].bytes


def test_replicated_tensors_are_written_once_and_evenly_small_ones_by_the_first(
    tmp_path: Path,
) -> None:
    sizes = run_ranks(_write_replicated, 3, str(tmp_path))
    assert max(sizes) < 1.02 * min(sizes)
    assert sum(sizes) < 1.02 * 9 * 200 * 200 * 4, "each once"
    counters = {"dcp": {"counters": torch.ones(10, dtype=torch.uint8)}}
    dcp.load(counters, checkpoint_id=tmp_path)
    assert not counters["dcp"]["counters"].any()


@pytest.mark.skipif(not CAN_MEASURE, reason="cannot reset the peak of memory")
def test_a_save_takes_hardly_any_memory_and_writes_each_byte_once(tmp_path: Path) -> None:
    state = trained_state(4096)
    _save(tmp_path / "a", state)
    shard_bytes = sum(tensor.nbytes for tensor in state.live_tensors().values())
    saver = DCPSaver()

    def save() -> None:
        entries = _save(tmp_path / "b", state, saver)
        assert shard_bytes < sum(entry.bytes for entry in entries) < shard_bytes + 100_000

    assert peak_growth_bytes(save) < 0.1 * shard_bytes


def _save_within_limits(rank: int, world_size: int, folder: str) -> int:
    """Save with a growing limit on file size until it succeeds. Returns the number of refusals."""
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
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
            load_dcp(path, state)
            return tries
    raise AssertionError("it never succeeded")


def test_a_refused_write_is_a_write_error_wherever_it_strikes(tmp_path: Path) -> None:
    assert run_ranks(_save_within_limits, 1, str(tmp_path))[0] > 40


def _strike(act: Callable[[], object], n_bytes: int) -> None:
    """Call ``act`` before the write that makes a data file of this process larger than
    ``n_bytes``.
    """
    write = DurableFile._write_pending

    def striking(self: DurableFile, views: list[memoryview]) -> None:
        if self.bytes + sum(map(len, views)) > n_bytes:
            act()
        write(self, views)

    DurableFile._write_pending = striking


def bug() -> None:
    """An error that does not come from the file system."""
    raise KeyError("bug")


class UnpicklableError(Exception):
    """Cannot be sent to other ranks."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("not this one")


def unpicklable_bug() -> None:
    """An error that does not come from the file system and cannot be pickled."""
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


@pytest.mark.slow
@pytest.mark.parametrize("how", ACTS)
def test_a_rank_that_fails_dies_or_hangs_fails_the_others_in_time(tmp_path: Path, how: str) -> None:
    if how in ("killed", "stopped"):
        with pytest.raises(AssertionError, match=r"rank 1|ranks \[1\] did not answer"):
            run_ranks(_one_rank_fails, 2, str(tmp_path), how, timeout_s=40)
    else:
        run_ranks(_one_rank_fails, 2, str(tmp_path), how)
    seconds, what = (tmp_path / "rank_0").read_text().split(" ", 1)
    assert float(seconds) < 2 * GROUP_TIMEOUT_S, what
    assert how != "bug" or "rank 1: KeyError: 'bug'" in what
    assert {name for name in os.listdir(tmp_path) if not name.startswith("rank_")} == set(), (
        "nothing is left behind"
    )
