"""`SharedRollouts`: one executor for the ranks of a torchrun job.

Rank 0 samples for all ranks, and every rank gets whole tickets of each batch. Ranks with the same
data get the same tickets. The ledger is state of rank 0 alone, so any number of ranks can resume.
Every rank needs the same loader of whole batches (``world_size`` 1). Rank 0's is read and saved,
and a resume sets the others to the same position.
"""

from collections.abc import Callable
from typing import Self

from torch.profiler import record_function

from ...utils.config import require_range
from ...utils.distributed import (
    all_ranks_succeed,
    get_rank,
    get_world_size,
    rank_zero_decides,
    rank_zero_decides_slowly,
)
from ...utils.record_log import RecordLog
from ..api import Batch, StateDict, TrainEngine
from .executor import RolloutExecutor
from .trajectory import concat_trajectories


class SharedRollouts:
    """The methods of `RolloutExecutor`, each called by all ranks.

        def make():
            return RolloutExecutor(config, loader, workflow, fleet)

        rollouts = SharedRollouts(make, engine)

    Args:
        make: creates the executor, on rank 0.
        engine: trains on the batches, and knows which ranks have the same data. None: every rank
            has its own.
    """

    def __init__(
        self, make: Callable[[], RolloutExecutor], engine: TrainEngine | None = None
    ) -> None:
        self._executor: RolloutExecutor | None = None

        # The share of this rank, and the number of shares.
        if engine is None:
            self._rank = get_rank()
            self._n_shares = get_world_size()
        else:
            self._rank = engine.data_parallel_rank
            self._n_shares = engine.data_parallel_world_size

        with all_ranks_succeed("making the RolloutExecutor"):
            if get_rank() == 0:
                self._executor = make()

    def set_version(self, version: int) -> None:
        """See `RolloutExecutor.set_version`. The first one after a resume may take long, because of
        restored images.
        """
        rank_zero_decides_slowly(lambda: self._leader.set_version(version))

    @record_function("sampling")
    def next_batch(self, step: int) -> Batch:
        """Return this rank's share of the batch: of n tickets, ``r * n // d`` up to ``(r + 1) * n
        // d`` for data rank r of d.
        """
        accepted = rank_zero_decides_slowly(lambda: self._leader.next_trajectories(step))
        n = len(accepted)
        require_range("batch_size", n, low=self._n_shares)

        first = n * self._rank // self._n_shares
        end = n * (self._rank + 1) // self._n_shares
        return concat_trajectories([trajectory for _, trajectory in accepted[first:end]])

    def pause(self) -> None:
        """See `RolloutExecutor.pause`."""
        rank_zero_decides(lambda: self._leader.pause())

    def resume(self) -> None:
        """See `RolloutExecutor.resume`."""
        rank_zero_decides(lambda: self._leader.resume())

    def stats(self) -> dict[str, float]:
        """See `RolloutExecutor.stats`. Covers the whole batch."""
        return rank_zero_decides(lambda: self._leader.stats())

    def close(self) -> None:
        """See `RolloutExecutor.close`. Each rank may call it alone."""
        if self._executor is not None:
            self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> StateDict:
        """The ledger on rank 0, an empty dict on other ranks."""
        if self._executor is None:
            return {}
        return self._executor.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """See `RolloutExecutor.load_state_dict`. Only rank 0 reads the state."""
        if self._executor is not None:
            self._executor.load_state_dict(state_dict)

    def follow_log(self, log: RecordLog | None, went_back: bool) -> None:
        """See `RolloutExecutor.follow_log`. Only rank 0 has a log."""
        if self._executor is not None:
            self._executor.follow_log(log, went_back)

    @property
    def _leader(self) -> RolloutExecutor:
        assert self._executor is not None, "called on rank 0 alone"
        return self._executor
