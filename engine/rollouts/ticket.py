"""`Ticket`: one prompt to sample for one step. Tickets have numbers, so a batch does not depend on arrival order."""

from dataclasses import dataclass

import xxhash


@dataclass(frozen=True)
class Ticket:
    """One episode that a step waits for."""

    number: int  # counts tickets in the order of hand-out, from 0
    index: int  # index of the prompt in the dataset
    seed: int  # seed of its samples, see `derive_seed`
    step: int  # step that trains on it
    round: int = 0  # 1 for the replacement of a rejected ticket of round 0, and so on

    def __str__(self) -> str:
        return f"ticket {self.number} of step {self.step} (dataset index {self.index})"


def derive_seed(*parts: int) -> int:
    """Hash ``parts``, in order, to a seed from 0 to 2**31 - 1, which every server accepts."""
    return xxhash.xxh3_64_intdigest(",".join(map(str, parts)).encode()) >> 33
