"""A process is killed at every system call of everything that writes: what there was is there, and so is what can be.

For each rank and each n, the rank is killed with SIGKILL just before its n-th call below the folder, and, where that
call writes, once more after half of the data was written. The other rank is killed as soon as the first is dead. Fresh
processes then find exactly the old state or exactly the new one, to the bit, and do the same again, which must succeed.
When a run comes to its end before its n-th call, all calls were tried. A share of all faults is that of the calls.
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

pytestmark = pytest.mark.timeout(3600)


@dataclass
class DieAt:
    """Kill this process at its n-th call.

    Attributes:
        moment: n, from 0.
        half: whether half of what the call would write is written first.
        note: file that is told which call it was.
    """

    moment: int
    half: bool
    note: str
    _calls: int = 0

    def __call__(self, call: Call) -> None:
        self._calls += 1
        if self._calls > self.moment:
            Path(self.note).write_bytes(pickle.dumps(call))
            if self.half:
                write_half(call)
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Killed:
    """A rank that was killed, and what it left.

    Attributes:
        rank: which one.
        moment: at which of its calls, from 0.
        call: that call; None: the run came to its end before it.
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
        """What fresh ranks found: whether the new state was there."""
        assert len(set(checked)) == 1, f"{self}: the ranks saw different things: {checked}"
        assert self.call is not None or checked[0], "an undisturbed run had no effect"
        shutil.rmtree(self.root)
        return checked[0]


def kill_at(built: Built, rank: int, moments: Iterable[int]) -> Iterator[tuple[Killed, bool]]:
    """Kill a rank at each of its calls numbered ``moments``, until a run comes to its end before.

    The fresh ranks that look at what one kill has left are those that the next one kills.

    Yields:
        what was killed, and whether the new state was there.

    Raises:
        AssertionError: something was lost, or is wrong; naming the call.
    """
    left: Killed | None = None
    for moment in moments:
        for half in (False, True):
            if half and (left is None or len((left.call and left.call.data) or b"") < 2):
                continue  # nothing to halve
            killed, checked = _kill(built, rank, moment, half, left)
            if left is not None:
                yield left, left.judge(checked)
            left = killed
        if left is None or left.call is None:
            break
    assert left is not None
    checked = _check_and(built, left).require_success()
    yield left, left.judge([results[0] for results in checked])


def _kill(built: Built, rank: int, moment: int, half: bool, left: Killed | None) -> tuple[Killed, list[bool]]:
    root = built.copy()
    hook = DieAt(moment, half, f"{root}.died")
    outcome = _check_and(built, left, partial(perform, built.scenario, str(root), {rank: hook}))
    note = Path(hook.note)
    killed = Killed(rank, moment, pickle.loads(note.read_bytes()) if note.exists() else None, half, root)
    what = f"after {left}, or as {killed}"
    blame = "\n".join(outcome.errors)
    assert not outcome.timed_out, f"{what}: nobody noticed\n{blame}"
    assert left is None or all(outcome.results), f"{what}:\n{blame}"
    # The other rank may have found out by itself, and raised, before it was killed too.
    assert outcome.ends[rank] == (0 if killed.call is None else -signal.SIGKILL), f"{what}: {outcome.ends}\n{blame}"
    return killed, [results[0] for results in outcome.results if left is not None]


def _check_and(built: Built, left: Killed | None, *then: Stage) -> Outcome:
    checks = [] if left is None else [partial(built.scenario.check, root=str(left.root))]
    return built.workshop.ranks.run(*checks, *then)


@pytest.mark.parametrize("name", EVERY)
def test_a_kill_at_any_system_call_leaves_the_old_or_new_state(
    shop: Workshop, name: str, tally: Tally, progress: Callable[[str], None], say: Callable[[str], None]
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
