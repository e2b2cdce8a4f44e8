"""`Ticket`: one prompt to sample for one step. Tickets are numbered: a batch depends on no order of arrival."""

from dataclasses import dataclass

import xxhash


@dataclass(frozen=True)
class Ticket:
    """One episode that a step waits for.

    Attributes:
        number: tickets are numbered from 0 in the order they are handed out.
        index: of the sample in the dataset.
        seed: of all that is sampled for it; see `derive_seed`.
        step: the step that trains on it.
        round: 0 in the step's first draw; 1 in place of a rejected ticket of round 0, and so on.
    """

    number: int
    index: int
    seed: int
    step: int
    round: int = 0

    def __str__(self) -> str:
        return f"ticket {self.number} of step {self.step} (dataset index {self.index})"


def derive_seed(*parts: int) -> int:
    """A seed from 0 to 2**31 - 1, which every server accepts, that depends on all ``parts`` and their order."""
    return xxhash.xxh3_64_intdigest(",".join(map(str, parts)).encode()) >> 33
