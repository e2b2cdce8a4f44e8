"""`RolloutConfig`."""

from dataclasses import dataclass

from ...utils.config import require_range


@dataclass(frozen=True)
class RolloutConfig:
    """How far sampling may run ahead of training, and how patient it is."""

    max_head_offpolicyness: int = 0
    """Steps that the weights which sampled a token may be older than those it trains; 0 is synchronous."""
    max_concurrent_rollouts: int = 128
    """Tickets that run at the same time."""
    total_steps: int | None = None
    """Length of the run: no ticket is handed out for a later step. None: the run has no known end."""
    seed: int = 0
    """Of the tickets' seeds."""
    max_rounds: int = 32
    """Times that rejected tickets of one step are replaced."""
    request_attempts: int = 8
    """Times that a request may fail at a server, each after the first at another one where there is one."""
    request_timeout_s: float = 600.0
    """A server that has not answered a request for so long has failed."""
    server_wait_s: float = 600.0
    """How long to wait while no server may be used, or while those that may are busy or not there."""
    batch_timeout_s: float = 3600.0
    """How long `next_batch` waits for the tickets of a step."""

    def __post_init__(self) -> None:
        require_range("max_head_offpolicyness", self.max_head_offpolicyness, low=0)
        require_range("max_concurrent_rollouts", self.max_concurrent_rollouts, low=1)
        require_range("total_steps", self.total_steps, low=1)
        require_range("max_rounds", self.max_rounds, low=0)
        require_range("request_attempts", self.request_attempts, low=1)
        for key in ("request_timeout_s", "server_wait_s", "batch_timeout_s"):
            require_range(key, getattr(self, key), low=0.01)
