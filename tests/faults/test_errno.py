"""A system call fails, once or permanently, at every possible place: the error is reported and
nothing else breaks.

For each n, each rank and each errno, the n-th call of the rank below the folder fails. Or all calls
from the n-th on fail, on one rank or on all, until the attempt is over. All ranks must report the
same error, visible files must not change, partial files must be removed if that is possible, and
the next attempt without faults must succeed. An attempt that succeeds despite a failed call is
checked in the same way.
"""

import errno
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count

import pytest

from holdfast.utils.distributed import gather_objects
from tests.faults.nursery import GROUP_TIMEOUT_S
from tests.faults.sessions import SESSIONS, agree
from tests.faults.share import SHARE, pick
from tests.faults.shim import Call, Shim, not_durable
from tests.faults.snapshots import Snapshot
from tests.faults.tally import Tally
from tests.faults.workshop import Workshop
from tests.recover.runs import hidden
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(3600)

CODES = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.EACCES)


@dataclass
class FailAt:
    """Fail the n-th call.

    Attributes:
        moment: n, from 0.
        code: the errno.
        lasting: whether all later calls fail too.
        struck: the first call that failed.
    """

    moment: int
    code: int
    lasting: bool
    struck: Call | None = None
    _calls: int = 0

    def __call__(self, call: Call) -> None:
        self._calls += 1
        if self._calls == self.moment + 1 or (self.lasting and self._calls > self.moment):
            self.struck = self.struck or call
            raise OSError(self.code, os.strerror(self.code), call.path)


@dataclass(frozen=True)
class Report:
    """Observations of a stage.

    Attributes:
        faults: number of injected faults.
        reported: number of attempts that reported a failed write. The others succeeded despite the
            fault.
        slowest_s: duration of the longest attempt.
        state: digest of the rank's state at the end, and the step.
    """

    faults: int
    reported: int
    slowest_s: float
    state: tuple[int, str]


def fail_at_every_call(
    session_name: str,
    root: str,
    model: str,
    victims: tuple[int, ...],
    code: int,
    lasting: bool,
    share: float,
    rank: int,
) -> Report:
    """Stage: make attempts with a fault at another call each time, and one without a fault after
    each.
    """
    session = SESSIONS[session_name](rank, root, model)
    for _ in range(3):
        with Shim(root, rank=rank) as shim:
            assert agree(session.attempt())
        session.survey(True)
    n_calls = max(gather_objects(len(shim.calls))[victim] for victim in victims)
    tidy = not (lasting and 0 in victims)  # rank 0 cleans up
    faults, reported, slowest_s = 0, 0, 0.0
    for moment in count() if share == 1 else pick(range(n_calls), share):
        hook = FailAt(moment, code, lasting) if rank in victims else None
        started = time.monotonic()
        try:
            with Shim(root, hook, rank=rank) as shim:
                done = session.attempt()
            calls = list(
                chain.from_iterable(
                    gather_objects([replace(call, data=None) for call in shim.calls])
                )
            )
            slowest_s = max(slowest_s, time.monotonic() - started)
            struck = [
                call for call in gather_objects(hook.struck if hook else None) if call is not None
            ]
            agree(done)
            session.survey(done, tidy)
            lost = (
                not_durable(sorted(calls, key=lambda call: call.time_ns), session.newest)
                if done
                else []
            )
            assert not lost, f"reported as written, but a power cut could take away {lost}"
            if not struck:
                assert done
                break
            assert agree(session.attempt()), "the attempt after the error failed too"
            session.survey(True, tidy)
        except BaseException as error:
            error.add_note(
                f"{errno.errorcode[code]} at call {moment} of ranks {victims}, here: "
                f"{hook and hook.struck}"
            )
            raise
        faults, reported = faults + 1, reported + (not done)
    session.close()
    state = (session.step, session.digest) if session_name == "snapshot" else (0, "")
    return Report(faults, reported, slowest_s, state)


def come_back(root: str, states: list[tuple[int, str]], rank: int) -> None:
    """Stage: new ranks restore the last snapshot to the bit, and leftovers of failed removals are
    deleted.
    """
    step = states[0][0]
    digests = (*[()] * step, tuple(digest for _, digest in states))
    handler, _, resumed = Snapshot("again", base=step, digests=digests).resume(rank, root)
    assert resumed == step
    handler.close()
    assert hidden(root) == []


CASES = [((0,), False), ((1,), False), ((0,), True), ((1,), True), ((0, 1), True)]
"""Ranks whose calls fail, and whether all calls from the n-th on fail."""
FEW = 0.05
"""Below this share, each case has one or two errnos at more calls, and all cases together have all
of them.
"""
FAST = [
    ("snapshot", *CASES[0]),
    ("delta", *CASES[1]),
    ("export", *CASES[2]),
    ("publication", *CASES[3]),
]


@pytest.mark.parametrize(
    ("name", "victims", "lasting"),
    slow_but(FAST, [(name, *case) for name in SESSIONS for case in CASES]),
)
def test_an_error_at_any_system_call_is_reported_and_survived(
    shop: Workshop,
    name: str,
    victims: tuple[int, ...],
    lasting: bool,
    tally: Tally,
    say: Callable[[str], None],
) -> None:
    codes = CODES[CASES.index((victims, lasting)) :: len(CASES)] if SHARE < FEW else CODES
    share = min(1.0, SHARE * len(CODES) / len(codes))
    for code in codes:
        root = shop.new_path("root")
        root.mkdir()
        stage = partial(
            fail_at_every_call, name, str(root), shop.model, victims, code, lasting, share
        )
        outcome = shop.ranks.run(stage, timeout_s=1800)
        kind = f"{errno.errorcode[code]} from a system call"
        try:
            reports = [results[0] for results in outcome.require_success()]
            if name == "snapshot":
                shop.ranks.run(
                    partial(come_back, str(root), [report.state for report in reports])
                ).require_success()
        except AssertionError:
            tally.add(kind, injected=1, lost=1)
            raise
        faults, reported = reports[0].faults, reports[0].reported
        assert reported <= faults and reports[0].slowest_s < GROUP_TIMEOUT_S, (
            "noticed only by a timeout"
        )
        # Each of a few calls may be one that a save can do without, such as those of a removal.
        assert reported > 0 or (faults > 0 and SHARE < FEW)
        tally.add(kind, injected=faults, survived=faults)
        what = "all from a call on" if lasting else "one call"
        say(f"{name}: {kind}, {what}, of ranks {victims}: {faults} attempts, {reported} reported")
        shutil.rmtree(root)
