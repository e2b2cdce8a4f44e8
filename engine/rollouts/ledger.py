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
from ..training.batch import IMAGES, with_images
from .trajectory import IMAGE_DIGEST, Trajectory, check_trajectory, sampled_versions

_FORMAT = 1


@dataclass(frozen=True)
class Ticket:
    """One episode that a step waits for: a prompt with a number, so that a batch does not depend on
    arrival order.
    """

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
    trajectory: Trajectory | None = None  # only of a finished ticket
    started: bool = False  # its episode was started in this process


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
        self.batch_size, self.seed = batch_size, seed
        self.version: int | None = None
        self.next_number = self.next_step = self.finished = self.rejected = 0
        self.drawn: list[int] = []
        self._entries: dict[int, Entry] = {}
        self._n_outstanding: Counter[int] = Counter()  # by step

    def set_version(self, version: int) -> None:
        """Note the weights after ``version`` steps, and drop the tickets of earlier steps."""
        self.version, self.next_step = version, max(self.next_step, version)
        self._entries = {
            n: entry for n, entry in self._entries.items() if entry.ticket.step >= version
        }
        self._count()

    def hand_out(self, step: int, count: int) -> None:
        """Create the tickets of the next round of a step from the next ``count`` indices in
        `drawn`.
        """
        indices, self.drawn = self.drawn[:count], self.drawn[count:]
        assert len(indices) == count, "the caller draws first"
        round = 1 + max((entry.ticket.round for entry in self.of_step(step)), default=-1)
        for index in indices:
            number = self.next_number
            self._entries[number] = Entry(
                Ticket(number, index, derive_seed(self.seed, number), step, round)
            )
            self.next_number += 1
        self._n_outstanding[step] += count
        self.next_step = max(self.next_step, step + 1)

    def settle(self, number: int, trajectory: Trajectory | None) -> None:
        """Keep the trajectory of an outstanding ticket. None rejects the ticket."""
        entry = self._entries[number]
        assert entry.outcome is Outcome.OUTSTANDING, f"{entry.ticket} is {entry.outcome} already"
        entry.outcome = Outcome.REJECTED if trajectory is None else Outcome.FINISHED
        entry.trajectory = trajectory
        self.rejected += trajectory is None
        self.finished += trajectory is not None
        self._n_outstanding[entry.ticket.step] -= 1

    def of_step(self, step: int) -> list[Entry]:
        """The tickets of a step, by number."""
        return [entry for entry in self._entries.values() if entry.ticket.step == step]

    def outstanding(self, steps: Iterable[int]) -> list[Ticket]:
        """The unfinished tickets of ``steps``, by number."""
        tickets = (e.ticket for e in self._entries.values() if e.outcome is Outcome.OUTSTANDING)
        return [ticket for ticket in tickets if ticket.step in steps]

    def not_started(self, steps: Iterable[int]) -> list[Entry]:
        """The `outstanding` tickets that were not started in this process."""
        entries = (self._entries[ticket.number] for ticket in self.outstanding(steps))
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

    def resample_stale(self, max_head_offpolicyness: int) -> None:
        """Sample finished tickets again if their tokens exceed the bound, as after a run with a
        larger one.
        """
        for number, entry in self._entries.items():
            oldest = entry.ticket.step - max_head_offpolicyness
            if entry.trajectory is not None and bool(
                (sampled_versions(entry.trajectory) < oldest).any()
            ):
                self._entries[number] = Entry(entry.ticket)
                self.finished -= 1
        self._count()

    def without_images(self) -> list[Entry]:
        """The finished tickets whose images were left out of a state."""
        finished = (entry for entry in self._entries.values() if entry.trajectory is not None)
        return [
            e
            for e in finished
            if e.trajectory and IMAGE_DIGEST in e.trajectory and IMAGES not in e.trajectory
        ]

    def require_trained(self, step: int) -> None:
        """Raise ConfigError if a step with tickets is incomplete, so that it cannot have been
        trained.
        """
        tickets = self.of_step(step)
        if tickets and self.missing(step):
            raise ConfigError(
                f"weights after step {step} cannot be: {self.missing(step)} of its "
                f"{self.batch_size} tickets are not finished, among {tickets[0].ticket}. Train on "
                f"next_batch({step}) first"
            )

    def _count(self) -> None:
        outstanding = (
            e.ticket.step for e in self._entries.values() if e.outcome is Outcome.OUTSTANDING
        )
        self._n_outstanding = Counter(outstanding)

    # State

    def state_dict(self) -> dict[str, Any]:
        """The ledger in plain values. Trajectories are not copied, because they never change.

        Images that can be made again are left out (`IMAGE_DIGEST`).
        """
        entries = [
            asdict(entry.ticket)
            | {"outcome": entry.outcome.value, "trajectory": _without_images(entry.trajectory)}
            for entry in self._entries.values()
        ]
        return {
            "format": _FORMAT,
            **{name: getattr(self, name) for name in _PLAIN},
            "tickets": entries,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state, or raise CheckpointMismatchError and leave the ledger unchanged."""
        if not isinstance(state_dict, dict) or state_dict.get("format") != _FORMAT:
            raise CheckpointMismatchError(
                f"the state of the rollouts is not one of format {_FORMAT}: it has "
                f"{sorted(state_dict) if isinstance(state_dict, dict) else type(state_dict).__name__}"
            )
        _require_types(
            "the state of the rollouts", state_dict, _PLAIN | {"format": int, "tickets": list}
        )
        for name in ("batch_size", "seed"):
            if state_dict[name] != getattr(self, name):
                raise CheckpointMismatchError(
                    f"the rollouts were saved with {name} {state_dict[name]}, this job has "
                    f"{getattr(self, name)}; tickets would be lost or repeated. Resume with "
                    f"{state_dict[name]}"
                )
        _require_counts("the state of the rollouts", state_dict, _PLAIN.keys() - {"drawn", "seed"})
        if bad := [index for index in state_dict["drawn"] if type(index) is not int or index < 0]:
            raise CheckpointMismatchError(
                f"the state of the rollouts has drawn {bad[0]!r}, which is no dataset index"
            )
        entries = {}
        for found in state_dict["tickets"]:
            entry = _read_entry(found)
            ticket, steps = entry.ticket, range(state_dict["version"] or 0, state_dict["next_step"])
            if (
                ticket.number in entries
                or ticket.number >= state_dict["next_number"]
                or ticket.step not in steps
            ):
                raise CheckpointMismatchError(
                    f"the rollouts hold {ticket} twice, or it is not among "
                    f"{state_dict['next_number']} tickets of steps {steps.start} to "
                    f"{steps.stop - 1}"
                )
            if ticket.seed != derive_seed(self.seed, ticket.number):
                raise CheckpointMismatchError(
                    f"{ticket} has seed {ticket.seed}, which is not that of its number"
                )
            entries[ticket.number] = entry
        for name in _PLAIN:
            setattr(self, name, state_dict[name])
        self.drawn, self._entries = list(self.drawn), dict(sorted(entries.items()))
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


def _without_images(trajectory: Trajectory | None) -> Trajectory | None:
    return (
        with_images(trajectory, None) if trajectory and IMAGE_DIGEST in trajectory else trajectory
    )


def _read_entry(found: Any) -> Entry:
    ticket_types: dict[str, Any] = dict.fromkeys((field.name for field in fields(Ticket)), int)
    _require_types(
        "a ticket", found, ticket_types | {"outcome": str, "trajectory": (dict, type(None))}
    )
    _require_counts("a ticket", found, ticket_types)
    ticket = Ticket(**{name: found[name] for name in ticket_types})
    outcome, trajectory = found["outcome"], found["trajectory"]
    if outcome not in list(Outcome) or (outcome == Outcome.FINISHED) != (trajectory is not None):
        raise CheckpointMismatchError(
            f"{ticket} is {outcome!r} with{'' if trajectory else 'out'} a trajectory"
        )
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
        keys = sorted(found) if isinstance(found, dict) else type(found).__name__
        raise CheckpointMismatchError(f"{what} has {keys}; expected {sorted(types)}")
    for name, expected in types.items():
        if not isinstance(found[name], expected) or isinstance(found[name], bool):
            raise CheckpointMismatchError(
                f"{what} has {name} {found[name]!r}, which is a {type(found[name]).__name__}"
            )


def _require_counts(what: str, found: dict[str, Any], names: Iterable[str]) -> None:
    for name in sorted(names):
        if (found[name] or 0) < 0:
            raise CheckpointMismatchError(f"{what} has {name} {found[name]}; expected 0 or more")
