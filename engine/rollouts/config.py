"""`RolloutConfig`."""

from dataclasses import dataclass

from ...utils.config import require_at_least, require_choice, require_numbers

_REPLAYS = ("exact", "all", "off")


@dataclass(frozen=True)
class RolloutConfig:
    """Bounds on how far sampling may run ahead of training, and on its waits."""

    max_head_offpolicyness: int = 0
    """Most steps between the weights that sample a token and the weights that it trains. 0 is
    synchronous.
    """
    max_concurrent_rollouts: int = 128
    """Most tickets that run at the same time."""
    total_steps: int | None = None
    """Length of the run. No ticket is handed out for a later step. None: unknown."""
    seed: int = 0
    """Seed that the seeds of the tickets are derived from."""
    max_rounds: int = 32
    """Most rounds of replacements for rejected tickets of one step."""
    request_attempts: int = 8
    """Most attempts of a request. After a failure the request goes to another server if there is
    one.
    """
    request_timeout_s: float = 600.0
    """Longest time that a server may take to answer a request."""
    server_wait_s: float = 600.0
    """Longest wait for a server while all are unusable, busy or absent."""
    batch_timeout_s: float = 3600.0
    """Longest wait of `next_batch` for the tickets of a step."""
    return_routed_experts: bool = False
    """Keep the experts that servers choose, for ``router_replay: {mode: R3}``. They must have been
    started with ``--enable-return-routed-experts``.
    """
    replay: str = "exact"
    """Which recorded answers a start uses. ``exact``: those whose weights exist in this run, in the
    restored generation or made again bit for bit. ``all``: also those of lost weights, for kernels
    whose sums do not repeat, if nothing about training was changed. ``off``: none
    but those of ``once`` calls.
    """

    def __post_init__(self) -> None:
        require_numbers(self)
        require_choice("replay", self.replay, _REPLAYS)
        require_at_least(
            self,
            max_head_offpolicyness=0,
            max_concurrent_rollouts=1,
            total_steps=1,
            max_rounds=0,
            request_attempts=1,
            request_timeout_s=0.01,
            server_wait_s=0.01,
            batch_timeout_s=0.01,
        )
