"""`colocated`: a trainer and inference servers take turns on the same GPUs.

A turn of the servers begins when the engine has left the GPUs, and ends when the servers sleep.
Only then does the engine come back. A turn is state of no snapshot: a job that is killed in one
starts on its device, and its first turn finds the servers as the killed job left them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...utils.config import require_choice
from ...utils.distributed import all_ranks_succeed, rank_zero_decides_slowly
from ...utils.errors import ConfigError
from ..api import WeightUpdateMeta
from .api import WEIGHTS
from .fleet import ServerFleet
from .publish import PublishedWeights


@dataclass(frozen=True)
class Colocated:
    """An engine and the fleet on its GPUs. Made by `colocated`."""

    engine: Any
    fleet: ServerFleet
    level: int

    @contextmanager
    def rollout(self, meta: WeightUpdateMeta | None = None) -> Iterator[PublishedWeights]:
        """Give the GPUs to the servers, with the current weights, and take them back at the end.
        All ranks enter it.

            with colocated(engine, fleet).rollout():
                batch = rollouts.next_batch(step)
            actor.ppo_update(actor.compute_advantages(batch))

        The engine is offloaded, the servers wake up their weights, load those of the engine, and
        wake up their KV caches. At the end, also after an error, the servers sleep and the engine
        is onloaded. After an interrupt (Ctrl-C) nothing more is done, because the other ranks may
        not come to it.

        Yields:
            The result of `FSDPEngine.update_weights`.

        Raises:
            ConfigError: `connect_engine` was not called with this fleet, a server cannot sleep,
                level 2 would drop the base model of adapters, or the engine is offloaded already.
                Nothing was done.
            ServerError: too few servers woke up, or one does not sleep. Raised on all ranks.
            PublishError: see `FSDPEngine.update_weights`. Raised on all ranks.
            PeerError: the block failed on another rank.
            RuntimeError: see `FSDPEngine.onload`.
        """
        engine = self.engine
        group = engine.control_group

        # The turn is refused before anything is done if it cannot succeed.
        with all_ranks_succeed("a turn of the inference servers", group):
            how: WeightUpdateMeta = engine.publication_to(self.fleet, meta)
            self.fleet.require_sleep(self.level, how.type)
            self.fleet.require_support("delta" if how.delta else how.type)
            if WEIGHTS in engine.offloaded:
                raise ConfigError(
                    "the engine is offloaded already: end the turn before, or call its onload"
                )

        # The engine leaves the GPUs before the servers take memory there, in the order of the
        # docstring.
        try:
            engine.offload()
            rank_zero_decides_slowly(
                lambda: self.fleet.wake_up((WEIGHTS,), how.timeout_s, how.min_servers), group
            )
            published = engine.update_weights(how)
            with all_ranks_succeed("a turn of the inference servers", group):
                yield published
        except Exception:
            self._end(how)
            raise
        self._end(how)

    def _end(self, how: WeightUpdateMeta) -> None:
        # A server that does not sleep is an error, but the engine comes back in any case.
        try:
            rank_zero_decides_slowly(
                lambda: self.fleet.sleep(how.timeout_s, self.level), self.engine.control_group
            )
        except Exception:
            self.engine.onload()
            raise
        self.engine.onload()


def colocated(engine: Any, fleet: ServerFleet, level: int = 1) -> Colocated:
    """Let an engine and the inference servers on its GPUs take turns. See `Colocated.rollout`.

    Args:
        engine: an `FSDPEngine` to which the fleet is connected (`connect_engine`).
        fleet: servers that can sleep. Rank 0's is used.
        level: how deep they sleep, see `VLLMServer.sleep`. With 2 the host needs no memory for
            their weights.
    """
    require_choice("level", level, (1, 2))
    return Colocated(engine, fleet, level)
