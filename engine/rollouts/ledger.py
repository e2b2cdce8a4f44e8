"""The ledger: the tickets of all steps that are not trained yet, and their outcomes.

These are the steps from ``version`` to ``version + max_head_offpolicyness``, because version v of
the weights exists after v steps. A finished ticket keeps its trajectory, because no server would
sample it again bit for bit. A rejected ticket stays on record, and another one replaces it in the
next round.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

import xxhash

from ...utils.errors import BatchError, CheckpointMismatchError, ConfigError
from ..api import StateDict
from ..training.batch import IMAGES, with_images
from .trajectory import (
    IMAGE_DIGEST,
    Trajectory,
    check_trajectory,
    sampled_versions,
    without_choice,
)

_FORMAT = 1


@dataclass(frozen=True)
class Ticket:
    """One episode that a step waits for: a prompt with a number, so that a batch does not depend on
    arrival order.
    """

    # counts tickets in the order of hand-out, from 0
    number: int
    # index of the prompt in the dataset
    index: int
    # seed of its samples, see `derive_seed`
    seed: int
    # step that trains on it
    step: int
    # 1 for the replacement of a rejected ticket of round 0, and so on
    round: int = 0

    def __str__(self) -> str:
        return f"ticket {self.number} of step {self.step} (dataset index {self.index})"


def derive_seed(*parts: int) -> int:
    """Hash ``parts``, in order, to a seed from 0 to 2**31 - 1, which every server accepts."""
    text = ",".join(map(str, parts))
    return xxhash.xxh3_64_intdigest(text.encode()) >> 33


class Outcome(StrEnum):
    """Outcome of a ticket."""

    OUTSTANDING = "outstanding"
    FINISHED = "finished"
    REJECTED = "rejected"


@dataclass
class Entry:
    """A ticket and its outcome."""

    ticket: Ticket
    outcome: Outcome = Outcome.OUTSTANDING
    # only of a finished ticket
    trajectory: Trajectory | None = None
    # its episode was started in this process
    started: bool = False


class Ledger:
    """Tickets and their outcomes. The caller locks.

    Attributes:
        version: last version of the weights. None: not set yet.
        next_number, next_step: number of the next ticket, first step without tickets.
        drawn: dataset indices from the loader that have no ticket yet. Their order alone decides
            which ticket gets one.
        finished, rejected: number of tickets with this outcome in the whole run.
    """

    def __init__(self, batch_size: int, seed: int) -> None:
        self.batch_size = batch_size
        self.seed = seed
        self.version: int | None = None
        self.next_number = 0
        self.next_step = 0
        self.finished = 0
        self.rejected = 0
        self.drawn: list[int] = []
        self._entries: dict[int, Entry] = {}
        self._n_outstanding: Counter[int] = Counter()  # by step

    def set_version(self, version: int) -> None:
        """Note the weights after ``version`` steps, and drop the tickets of earlier steps."""
        self.version = version
        self.next_step = max(self.next_step, version)
        for number, entry in list(self._entries.items()):
            if entry.ticket.step < version:
                del self._entries[number]
        self._count()

    def hand_out(self, step: int, count: int) -> None:
        """Create the tickets of the next round of a step from the next ``count`` indices in
        `drawn`.
        """
        indices = self.drawn[:count]
        self.drawn = self.drawn[count:]
        assert len(indices) == count, "the caller draws first"

        rounds = (entry.ticket.round for entry in self.of_step(step))
        round = 1 + max(rounds, default=-1)
        for number, index in enumerate(indices, self.next_number):
            seed = derive_seed(self.seed, number)
            self._entries[number] = Entry(Ticket(number, index, seed, step, round))

        self.next_number += count
        self._n_outstanding[step] += count
        self.next_step = max(self.next_step, step + 1)

    def settle(self, number: int, trajectory: Trajectory | None) -> None:
        """Keep the trajectory of an outstanding ticket. None rejects the ticket."""
        entry = self._entries[number]
        assert entry.outcome is Outcome.OUTSTANDING, f"{entry.ticket} is {entry.outcome} already"
        entry.trajectory = trajectory
        if trajectory is None:
            entry.outcome = Outcome.REJECTED
            self.rejected += 1
        else:
            entry.outcome = Outcome.FINISHED
            self.finished += 1
        self._n_outstanding[entry.ticket.step] -= 1

    def of_step(self, step: int) -> list[Entry]:
        """The tickets of a step, by number."""
        return [entry for entry in self._entries.values() if entry.ticket.step == step]

    def numbers(self, outcome: Outcome) -> set[int]:
        """The numbers of the tickets with this outcome."""
        entries = self._entries.items()
        return {number for number, entry in entries if entry.outcome is outcome}

    def outstanding(self, steps: Iterable[int]) -> list[Ticket]:
        """The unfinished tickets of ``steps``, by number."""
        return [entry.ticket for entry in self._outstanding() if entry.ticket.step in steps]

    def not_started(self, steps: Iterable[int]) -> list[Entry]:
        """The `outstanding` tickets that were not started in this process."""
        entries = (entry for entry in self._outstanding() if entry.ticket.step in steps)
        return [entry for entry in entries if not entry.started]

    def decided(self, step: int) -> bool:
        """Whether no ticket of ``step`` is outstanding."""
        return not self._n_outstanding[step]

    def accepted(self, step: int) -> list[tuple[Ticket, Trajectory]]:
        """The finished tickets of a step, by number."""
        return [(e.ticket, e.trajectory) for e in self.of_step(step) if e.trajectory is not None]

    def missing(self, step: int) -> int:
        """Number of accepted tickets that a step lacks."""
        return self.batch_size - len(self.accepted(step))

    def resample_stale(self, max_head_offpolicyness: int) -> list[int]:
        """Sample finished tickets again if their tokens exceed the bound, as after a run with a
        larger one. Returns their numbers.
        """
        again = []
        for number, entry in self._entries.items():
            if entry.trajectory is None:
                continue
            oldest = entry.ticket.step - max_head_offpolicyness
            stale = sampled_versions(entry.trajectory) < oldest
            if stale.any():
                self._entries[number] = Entry(entry.ticket)
                again.append(number)
        self.finished -= len(again)
        self._count()
        return again

    def without_images(self) -> list[Entry]:
        """The finished tickets whose images were left out of a state."""
        found = []
        for entry in self._entries.values():
            trajectory = entry.trajectory or {}
            if IMAGE_DIGEST in trajectory and IMAGES not in trajectory:
                found.append(entry)
        return found

    def mark_without_routes(self) -> None:
        """Let the model route the tokens of finished tickets that have no routed experts."""
        for entry in self._entries.values():
            if entry.trajectory is not None:
                entry.trajectory = without_choice(entry.trajectory)

    def require_trained(self, step: int) -> None:
        """Raise ConfigError if a step with tickets is incomplete, so that it cannot have been
        trained.
        """
        tickets = self.of_step(step)
        missing = self.missing(step)
        if tickets and missing:
            raise ConfigError(
                f"weights after step {step} cannot be: {missing} of its "
                f"{self.batch_size} tickets are not finished, among {tickets[0].ticket}. Train on "
                f"next_batch({step}) first"
            )

    def _outstanding(self) -> list[Entry]:
        entries = self._entries.values()
        return [entry for entry in entries if entry.outcome is Outcome.OUTSTANDING]

    def _count(self) -> None:
        self._n_outstanding = Counter(entry.ticket.step for entry in self._outstanding())

    # State

    def state_dict(self) -> StateDict:
        """The ledger in plain values. Trajectories are not copied, because they never change.

        Images that can be made again are left out (`IMAGE_DIGEST`).
        """
        state: dict[str, Any] = {"format": _FORMAT}
        for name in _PLAIN:
            state[name] = getattr(self, name)

        state["tickets"] = []
        for entry in self._entries.values():
            trajectory = entry.trajectory
            if trajectory and IMAGE_DIGEST in trajectory:
                trajectory = with_images(trajectory, None)
            saved = asdict(entry.ticket)
            saved["outcome"] = entry.outcome.value
            saved["trajectory"] = trajectory
            state["tickets"].append(saved)
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a state, or raise CheckpointMismatchError and leave the ledger unchanged."""
        what = "the state of the rollouts"
        if not isinstance(state_dict, dict) or state_dict.get("format") != _FORMAT:
            raise CheckpointMismatchError(
                f"{what} is not one of format {_FORMAT}: it has {_contents(state_dict)}"
            )
        _require_types(what, state_dict, _PLAIN | {"format": int, "tickets": list})

        # Another size of a batch, or another seed, makes other tickets.
        for name in ("batch_size", "seed"):
            if state_dict[name] != getattr(self, name):
                raise CheckpointMismatchError(
                    f"the rollouts were saved with {name} {state_dict[name]}, this job has "
                    f"{getattr(self, name)}; tickets would be lost or repeated. Resume with "
                    f"{state_dict[name]}"
                )
        _require_counts(what, state_dict, _PLAIN.keys() - {"drawn", "seed"})
        for index in state_dict["drawn"]:
            if type(index) is not int or index < 0:
                raise CheckpointMismatchError(
                    f"{what} has drawn {index!r}, which is no dataset index"
                )

        # Every ticket is there once, and could have been handed out by the saved counters.
        n_tickets = state_dict["next_number"]
        steps = range(state_dict["version"] or 0, state_dict["next_step"])
        entries: dict[int, Entry] = {}
        for found in state_dict["tickets"]:
            entry = _read_entry(found)
            ticket = entry.ticket
            known = ticket.number < n_tickets and ticket.step in steps
            if ticket.number in entries or not known:
                raise CheckpointMismatchError(
                    f"the rollouts hold {ticket} twice, or it is not among "
                    f"{n_tickets} tickets of steps {steps.start} to {steps.stop - 1}"
                )
            if ticket.seed != derive_seed(self.seed, ticket.number):
                raise CheckpointMismatchError(
                    f"{ticket} has seed {ticket.seed}, which is not that of its number"
                )
            entries[ticket.number] = entry

        # No step after this one can fail.
        for name in _PLAIN:
            setattr(self, name, state_dict[name])
        self.drawn = list(self.drawn)
        self._entries = dict(sorted(entries.items()))
        self._count()


_PLAIN = {
    "version": (int, type(None)),
    "next_number": int,
    "next_step": int,
    "drawn": list,
    "finished": int,
    "rejected": int,
    "batch_size": int,
    "seed": int,
}
"""The attributes of a `Ledger` in its state, and their types."""


def _read_entry(found: Any) -> Entry:
    numbers = [field.name for field in fields(Ticket)]
    types: dict[str, Any] = dict.fromkeys(numbers, int)
    types["outcome"] = str
    types["trajectory"] = (dict, type(None))
    _require_types("a ticket", found, types)
    _require_counts("a ticket", found, numbers)
    ticket = Ticket(**{name: found[name] for name in numbers})

    # A finished ticket has a trajectory, and no other one has.
    outcome = found["outcome"]
    trajectory = found["trajectory"]
    finished = outcome == Outcome.FINISHED
    if outcome not in list(Outcome) or finished != (trajectory is not None):
        with_or_without = "with" if trajectory else "without"
        raise CheckpointMismatchError(f"{ticket} is {outcome!r} {with_or_without} a trajectory")
    if trajectory is None:
        return Entry(ticket, Outcome(outcome))
    try:
        check_trajectory(trajectory)
    except BatchError as error:
        raise CheckpointMismatchError(
            f"the trajectory of {ticket} cannot be trained on: {error}"
        ) from error
    return Entry(ticket, Outcome.FINISHED, trajectory)


def _require_types(what: str, found: Any, types: dict[str, Any]) -> None:
    if not isinstance(found, dict) or found.keys() != types.keys():
        raise CheckpointMismatchError(f"{what} has {_contents(found)}; expected {sorted(types)}")
    for name, expected in types.items():
        value = found[name]
        if not isinstance(value, expected) or isinstance(value, bool):
            raise CheckpointMismatchError(
                f"{what} has {name} {value!r}, which is a {type(value).__name__}"
            )


def _contents(found: Any) -> list[str] | str:
    if isinstance(found, dict):
        return sorted(found)
    return type(found).__name__


def _require_counts(what: str, found: dict[str, Any], names: Iterable[str]) -> None:
    for name in sorted(names):
        if (found[name] or 0) < 0:
            raise CheckpointMismatchError(f"{what} has {name} {found[name]}; expected 0 or more")
