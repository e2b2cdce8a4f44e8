"""Which rank verifies which files of a generation: each rank its own files first, and each file by
one rank.
"""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.recover import RecoverHandler
from holdfast.recover.engines import RankEngines
from holdfast.recover.resuming.check import check_bytes, share_of
from holdfast.utils.manifest import read_manifest
from tests.helpers import run_ranks
from tests.recover.runs import Tiny, make_handler, newest, step_info

pytestmark = pytest.mark.timeout(60)


def generation(ranks: int, engines: int = 1) -> dict[str, int]:
    """Names and sizes of the files of a generation with ``ranks`` ranks. Shards of higher ranks are
    larger.
    """
    shards = {
        f"engine{e}/__{r}_0.distcp": 1000 * (r + 1) for e in range(engines) for r in range(ranks)
    }
    small = {f"state/rank_{r:05d}.pt": 20 for r in range(ranks)} | {
        f"engine{e}/.metadata": 300 for e in range(engines)
    }
    return shards | small | {"recover_info.json": 50, "data.pt": 700, "state/driver.pt": 20}


@pytest.mark.parametrize(
    ("saved", "now"), [(1, 1), (2, 2), (3, 3), (12, 12), (2, 3), (3, 2), (4, 1), (1, 4)]
)
def test_at_the_same_world_size_each_file_is_verified_by_its_rank(saved: int, now: int) -> None:
    files = generation(saved, engines=2)
    shares = [share_of(files, rank, now) for rank in range(now)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    if saved == now:
        for rank, share in enumerate(shares):
            own = {
                f"engine0/__{rank}_0.distcp",
                f"engine1/__{rank}_0.distcp",
                f"state/rank_{rank:05d}.pt",
            }
            assert own <= set(share)
    else:
        loads = [sum(files[name] for name in share) for share in shares]
        assert max(loads) - min(loads) <= max(files.values())


def test_files_of_no_rank_go_to_the_rank_with_the_fewest_bytes() -> None:
    shares = [share_of(generation(3), rank, 3) for rank in range(3)]
    assert set(shares[0]) > {"data.pt", "engine0/.metadata"} and shares[2] == [
        "engine0/__2_0.distcp",
        "state/rank_00002.pt",
    ]


def _damages(rank: int, world_size: int, root: str) -> list[Any]:
    handler, tiny = make_handler(root, freq_steps=1), Tiny()
    handler.load(tiny.state)
    handler.dump(tiny.state, step_info(0))
    folder, found = newest(root), []
    files = read_manifest(folder)["files"]
    for name in (
        "default/__0_0.distcp",
        "default/__1_0.distcp",
        "state/rank_00000.pt",
        "state/rank_00001.pt",
    ):
        good = (folder / name).read_bytes()
        dist.barrier()
        if rank == 0:
            (folder / name).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        dist.barrier()
        found.append(check_bytes(tiny.state, str(folder), files) is not None)
        dist.barrier()
        if rank == 0:
            (folder / name).write_bytes(good)
    return found


def test_a_rank_finds_the_damage_of_its_own_files(tmp_path: Path) -> None:
    first, second = run_ranks(_damages, 2, str(tmp_path))
    assert first == [True, False, True, False] and second == [False, True, False, True]


def _damages_of_a_part(rank: int, world_size: int, root: str, ranks: list[int]) -> list[str]:
    """The damaged files that no rank of the handler's group finds."""
    group: Any = dist.new_group(ranks)
    if rank not in ranks:
        return []
    plain, tiny = make_handler(root, freq_steps=1, async_save=False), Tiny()
    with RecoverHandler(plain.config, plain.ft_spec, group=group) as handler:
        handler.load(tiny.state)
        assert handler.dump(tiny.state, step_info(0))
    folder, missed = newest(root), []
    files, target = (
        read_manifest(folder)["files"],
        RankEngines({"default": tiny.state}, group=group),
    )
    for name in sorted(files):
        good, found = (folder / name).read_bytes(), [False] * len(ranks)
        dist.barrier(group)
        if rank == ranks[0]:
            (folder / name).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        dist.barrier(group)
        dist.all_gather_object(found, check_bytes(target, str(folder), files) is not None, group)
        if rank == ranks[0]:
            (folder / name).write_bytes(good)
        missed += [] if any(found) else [name]
    return missed


@pytest.mark.parametrize("ranks", [[0, 1], [1, 2]])
def test_ranks_of_a_part_of_the_job_find_every_files_damage(
    tmp_path: Path, ranks: list[int]
) -> None:
    assert run_ranks(_damages_of_a_part, 3, str(tmp_path), ranks) == [[]] * 3
