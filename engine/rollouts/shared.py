"""`SharedRollouts`: one executor for the ranks of a torchrun job.

Rank 0 samples for all and its tickets are those of the run; every rank gets whole tickets of each batch. The ledger is
rank 0's state, so that any number of ranks can resume. Every rank has the same loader, one that gives whole batches
(``world_size`` 1): that of rank 0 is read and saved, the others are put back to the same place.
"""

from collections.abc import Callable
from typing import Any, Self

from ...utils.config import require_range
from ...utils.distributed import (
    all_ranks_succeed,
    get_rank,
    get_world_size,
    rank_zero_decides,
    rank_zero_decides_slowly,
)
from ..api import Batch
from .executor import RolloutExecutor
from .trajectory import concat_trajectories


class SharedRollouts:
    """The methods of `RolloutExecutor`, each called by all ranks.

    Args:
        make: makes the executor; called on rank 0.
    """

    def __init__(self, make: Callable[[], RolloutExecutor]) -> None:
        self._executor: RolloutExecutor | None = None
        with all_ranks_succeed("making the RolloutExecutor"):
            if get_rank() == 0:
                self._executor = make()

    def set_version(self, version: int) -> None:
        """See `RolloutExecutor.set_version`."""
        rank_zero_decides(lambda: self._leader.set_version(version))

    def next_batch(self, step: int) -> Batch:
        """This rank's share of `RolloutExecutor.next_batch`: of n tickets those from ``r * n // w`` to
        ``(r + 1) * n // w``."""
        accepted = rank_zero_decides_slowly(lambda: self._leader.next_trajectories(step))
        rank, world_size = get_rank(), get_world_size()
        require_range("batch_size", len(accepted), low=world_size)
        first, last = (len(accepted) * share // world_size for share in (rank, rank + 1))
        return concat_trajectories([trajectory for _, trajectory in accepted[first:last]])

    def pause(self) -> None:
        """See `RolloutExecutor.pause`."""
        rank_zero_decides(lambda: self._leader.pause())

    def resume(self) -> None:
        """See `RolloutExecutor.resume`."""
        rank_zero_decides(lambda: self._leader.resume())

    def stats(self) -> dict[str, float]:
        """See `RolloutExecutor.stats`; of the whole batch."""
        return rank_zero_decides(lambda: self._leader.stats())

    def close(self) -> None:
        """See `RolloutExecutor.close`; each rank for itself."""
        if self._executor is not None:
            self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """The ledger on rank 0; nothing on the others."""
        return {} if self._executor is None else self._executor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `RolloutExecutor.load_state_dict`; only rank 0 reads it."""
        if self._executor is not None:
            self._executor.load_state_dict(state_dict)

    @property
    def _leader(self) -> RolloutExecutor:
        assert self._executor is not None, "called on rank 0 alone"
        return self._executor
