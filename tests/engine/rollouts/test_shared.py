"""One executor for the ranks of a torchrun job: shares of a batch, errors, a resume with another
number of ranks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast.engine.dcp.state import DCPState
from holdfast.engine.rollouts import SharedRollouts
from holdfast.utils.errors import ConfigError, RolloutError
from tests.engine.rollouts.lives import Lasting
from tests.engine.rollouts.servers import Echo, Server, make_executor, make_loader
from tests.helpers import run_ranks
from tests.recover.runs import make_handler, step_info

pytestmark = pytest.mark.timeout(120)


class Peers:
    """What an engine says of ranks of which ``n`` in a row have the same data."""

    def __init__(self, rank: int, world_size: int, n: int) -> None:
        self.data_parallel_rank, self.data_parallel_world_size = rank // n, world_size // n


def _steps(rank: int, world_size: int, root: str, steps: list[int], n: int = 1) -> list[Any]:
    """Sample and snapshot the steps. Returns the share of each step and the log's numbers.

    ``n`` ranks in a row have the same data.
    """
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,)))
    state = DCPState(model, torch.optim.AdamW(model.parameters()), ranks_with_same_data=n)
    loader, server = make_loader(), Server(jitter=rank)
    echo = Echo(rejects=lambda index: index % 4 == 0)
    engine: Any = Peers(rank, world_size, n) if n > 1 else None
    shared = SharedRollouts(
        lambda: make_executor([server], echo, loader, max_head_offpolicyness=1), engine
    )
    handler, found = make_handler(root, freq_steps=1), []
    handler.register("rollouts", shared)
    with shared, handler:
        info = handler.load(state, loader)
        assert (info.last_step_info.next().global_step if info else 0) == steps[0]
        for step in steps:
            server.version = step
            shared.set_version(step)
            found.append(
                (shared.next_batch(step)["input_ids"].tolist(), shared.stats()["rollouts/finished"])
            )
            handler.dump(state, step_info(step), loader)
    return found


def _whole(shares: list[list[Any]]) -> list[list[list[int]]]:
    """The batches of the steps, from the shares of all ranks."""
    assert len({tuple(n for _, n in share) for share in shares}) == 1, "all ranks log the same"
    return [[row for share in shares for row in share[step][0]] for step in range(len(shares[0]))]


def test_ranks_share_a_batch_and_any_number_of_them_resumes(tmp_path: Path) -> None:
    untouched = _whole(run_ranks(_steps, 1, str(tmp_path / "untouched"), [0, 1, 2, 3]))
    first = run_ranks(_steps, 2, str(tmp_path / "run"), [0, 1])
    assert [len(share[0][0]) for share in first] == [2, 2]
    rest, peer = run_ranks(_steps, 2, str(tmp_path / "run"), [2], 2)
    assert rest == peer, "ranks with the same data train on the same tickets"
    last = run_ranks(_steps, 3, str(tmp_path / "run"), [3])
    assert [len(share[0][0]) for share in last] == [1, 1, 2]
    assert _whole(first) + _whole([rest]) + _whole(last) == untouched


def _lasting(rank: int, world_size: int, root: str, steps: list[int], last: int) -> Any:
    """Sample the steps, with generations up to step ``last``. Returns the share of each step and
    the prompts that the server of rank 0 was asked.
    """
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,)))
    state = DCPState(model, torch.optim.AdamW(model.parameters()))
    loader, server = make_loader(), Lasting()
    shared = SharedRollouts(
        lambda: make_executor([server], Echo(), loader, max_head_offpolicyness=1)
    )
    handler, found = make_handler(root, freq_steps=1), []
    handler.register("rollouts", shared)
    with shared, handler:
        handler.load(state, loader)
        for step in steps:
            server.version = step
            shared.set_version(step)
            found.append(shared.next_batch(step)["input_ids"].tolist())
            if step <= last:
                handler.dump(state, step_info(step), loader)
        replayed = shared.stats()["rollouts/replayed"]
    return found, [request.input_ids[0] for request in server.seen], replayed


@pytest.mark.slow
def test_ranks_that_resume_take_the_answers_of_rank_0_from_its_log(tmp_path: Path) -> None:
    first = run_ranks(_lasting, 2, str(tmp_path), [0, 1], 0)
    second = run_ranks(_lasting, 2, str(tmp_path), [1], 0)
    assert [share[0][1] for share in first] == [share[0][0] for share in second]
    trained = {row[0] for found, _, _ in second for row in found[0]}
    asked = set(second[0][1])
    assert len(trained) == 4 and not asked & trained
    assert {replayed for _, _, replayed in second} <= {4.0, 5.0, 6.0, 7.0, 8.0}
    assert not first[1][1] and not second[1][1], "rank 1 asks no server"


def _failing(rank: int, world_size: int) -> None:
    with SharedRollouts(lambda: make_executor([], server_wait_s=0.1)) as shared:
        shared.set_version(0)
        with pytest.raises(RolloutError, match="no server could be used"):
            shared.next_batch(0)
    with SharedRollouts(
        lambda: make_executor([Server()], loader=make_loader(batch_size=1))
    ) as shared:
        shared.pause()
        shared.set_version(0)
        shared.resume()
        with pytest.raises(ConfigError, match="'batch_size' is 1; expected a value from 2"):
            shared.next_batch(0)


def test_a_failure_on_rank_0_is_a_failure_on_all() -> None:
    run_ranks(_failing, 2)
