"""A process is killed at every system call of every writing operation: the old or the new state is
complete.

For each rank and each n, the rank gets SIGKILL just before its n-th call below the folder. If that
call writes, the kill is repeated after half of the data. The other rank is killed as soon as the
first is dead. New processes must then find exactly the old or exactly the new state, to the bit,
and succeed in repeating the operation. All calls have been tried when a run ends before its n-th
call. A share of all faults is a share of the calls.
"""

import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from tests.faults.nursery import Outcome, Stage
from tests.faults.scenarios import EVERY, make_scenario
from tests.faults.share import SHARE, pick
from tests.faults.shim import Call, write_half
from tests.faults.tally import Tally
from tests.faults.workshop import Built, Workshop, perform
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(3600)


@dataclass
class DieAt:
    """Kill this process at its n-th call.

    Attributes:
        moment: n, from 0.
        half: whether to write half of the call's data first. Calls of two threads may change
            places from one run to the next, and then the call may have no data.
        note: file that receives the call.
    """

    moment: int
    half: bool
    note: str
    _calls: int = 0

    def __call__(self, call: Call) -> None:
        self._calls += 1
        if self._calls > self.moment:
            Path(self.note).write_bytes(pickle.dumps(call))
            if self.half and call.data:
                write_half(call)
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Killed:
    """A killed rank and its folder.

    Attributes:
        rank: the killed rank.
        moment: index of the call, from 0.
        call: the call, or None if the run ended before.
        half: whether half of the call's data was written.
        root: the folder.
    """

    rank: int
    moment: int
    call: Call | None
    half: bool
    root: Path

    def __str__(self) -> str:
        when = "half-way through" if self.half else "before"
        return f"rank {self.rank} killed {when} its call {self.moment}: {self.call}"

    def judge(self, checked: list[bool]) -> bool:
        """Return whether the new state was there, according to the new ranks."""
        assert len(set(checked)) == 1, f"{self}: the ranks saw different things: {checked}"
        assert self.call is not None or checked[0], "an undisturbed run had no effect"
        shutil.rmtree(self.root)
        return checked[0]


def kill_at(built: Built, rank: int, moments: Iterable[int]) -> Iterator[tuple[Killed, bool]]:
    """Kill a rank at each of its calls numbered ``moments``, until a run ends before the call.

    The ranks that check the result of one kill are the victims of the next.

    Yields:
        The kill, and whether the new state was there.

    Raises:
        AssertionError: something was lost or is wrong. The message names the call.
    """
    left: Killed | None = None
    for moment in moments:
        for half in (False, True):
            if half and (left is None or len((left.call and left.call.data) or b"") < 2):
                continue  # no data to write half
            killed, checked = _kill(built, rank, moment, half, left)
            if left is not None:
                yield left, left.judge(checked)
            left = killed
        if left is None or left.call is None:
            break
    assert left is not None
    checked = _check_and(built, left).require_success()
    yield left, left.judge([results[0] for results in checked])


def _kill(
    built: Built, rank: int, moment: int, half: bool, left: Killed | None
) -> tuple[Killed, list[bool]]:
    root = built.copy()
    hook = DieAt(moment, half, f"{root}.died")
    outcome = _check_and(built, left, partial(perform, built.scenario, str(root), {rank: hook}))
    note = Path(hook.note)
    killed = Killed(
        rank, moment, pickle.loads(note.read_bytes()) if note.exists() else None, half, root
    )
    what = f"after {left}, or as {killed}"
    blame = "\n".join(outcome.errors)
    assert not outcome.timed_out, f"{what}: nobody noticed\n{blame}"
    assert left is None or all(outcome.results), f"{what}:\n{blame}"
    # The other rank may have noticed the death and raised before it was killed too.
    assert outcome.ends[rank] == (0 if killed.call is None else -signal.SIGKILL), (
        f"{what}: {outcome.ends}\n{blame}"
    )
    return killed, [results[0] for results in outcome.results if left is not None]


def _check_and(built: Built, left: Killed | None, *then: Stage) -> Outcome:
    checks = [] if left is None else [partial(built.scenario.check, root=str(left.root))]
    return built.workshop.ranks.run(*checks, *then)


# They resemble "snapshot that retires" and "publication".
ALIKE = ("first snapshot", "export")


@pytest.mark.parametrize("name", slow_but([n for n in EVERY if n not in ALIKE], EVERY))
def test_a_kill_at_any_system_call_leaves_the_old_or_new_state(
    shop: Workshop,
    name: str,
    tally: Tally,
    progress: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    built = shop.build(make_scenario(name, shop.model))
    recorded = built.record(built.copy())
    for rank in (0, 1):
        calls = [call for call in recorded if call.rank == rank]
        kills, found, ended = 0, [], False
        try:
            moments = count() if SHARE == 1 else pick(range(len(calls)), SHARE) or [0]
            for killed, new in kill_at(built, rank, moments):
                ended = killed.call is None
                found.append(new)
                if not ended:
                    tally.add("SIGKILL at a system call", injected=1, survived=1)
                    kills += 1
                progress(f"{name}: {killed}")
        except AssertionError:
            tally.add("SIGKILL at a system call", injected=1, lost=1)
            raise
        assert found == sorted(found), "the new state was there, and after a later kill it was not"
        assert ended or SHARE < 1
        say(f"{name}: rank {rank} makes {len(calls)} calls; it was killed {kills} times")
