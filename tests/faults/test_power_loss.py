"""Power cuts at every moment of a snapshot, an export, a publication: promised data is there,
visible data is complete.

The first tests check the model itself, which power_loss.py describes.
"""

import os
import random
from collections.abc import Callable
from functools import partial

import pytest

from tests.faults.power_loss import FULL, QUICK, Effort, PowerLoss, Tree, write_tree
from tests.faults.power_traces import (
    DELTA,
    FIRST_WITH_LOG,
    MIRRORED,
    POWER_SCENARIOS,
    REPLACING,
    Recorded,
    record_second_life,
    survey,
)
from tests.faults.scenarios import Scenario
from tests.faults.share import SHARE, pick
from tests.faults.shim import Call
from tests.faults.tally import Tally
from tests.faults.workshop import Workshop
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(1800)

BRIEF = Effort(subsets_of=3, samples=2)
EVERYTHING = Effort(subsets_of=20, all_points=True)


def _left(before: Tree, *calls: Call) -> list[Tree]:
    """All states that a power cut can leave after the calls, each once."""
    trace = PowerLoss(before, calls)
    found: list[Tree] = []
    for state in trace.states(len(calls), EVERYTHING):
        if state.tree not in found:
            found.append(state.tree)
    return found


def _create(path: str) -> Call:
    return Call("open", path, flags=os.O_CREAT | os.O_WRONLY)


def _write(path: str, data: bytes, offset: int = 0) -> Call:
    return Call("write", path, data=data, offset=offset)


def test_fsynced_files_are_there_and_nothing_else_is_possible() -> None:
    calls = _create("a"), _write("a", b"data"), Call("fsync", "a"), Call("fsync", ".")
    assert _left({}, *calls) == [{"a": b"data"}]


def test_a_write_not_fsynced_is_there_or_lost_torn_or_zeros() -> None:
    left = _left({"a": b"old"}, _write("a", b"more", 3))
    assert sorted(tree["a"] or b"" for tree in left) == [
        b"old",
        b"old\0\0\0\0",
        b"oldmo",
        b"oldmore",
    ]


def test_fsynced_files_can_lose_their_names_fsynced_folders_hold_empty_files() -> None:
    made = _create("a"), _write("a", b"data")
    assert {} in _left({}, *made, Call("fsync", "a"))
    assert {"a": b""} in _left({}, *made, Call("fsync", "."))


def test_an_fsync_makes_nothing_certain_that_comes_after_it() -> None:
    calls = _create("a"), Call("fsync", "."), Call("fsync", "a"), _write("a", b"data")
    assert {"a": b""} in _left({}, *calls)


def test_a_rename_is_seen_whole_or_not_at_all() -> None:
    assert _left({"a": b"1", "b": b"2"}, Call("rename", "a", target="b")) == [
        {"b": b"1"},
        {"a": b"1", "b": b"2"},
    ]


def test_a_rename_can_be_there_without_the_data_written_before_it() -> None:
    calls = (
        _create("a.tmp"),
        _write("a.tmp", b"new"),
        Call("rename", "a.tmp", target="a"),
        Call("fsync", "."),
    )
    assert {"a": b""} in _left({"a": b"old"}, *calls)


def test_files_in_a_folder_without_a_name_are_unreachable() -> None:
    made = Call("mkdir", "f", size=0o777), _create("f/a")
    assert {} in _left({}, *made, Call("fsync", "f/a"), Call("fsync", "f"))
    assert all("f" in tree for tree in _left({}, *made, Call("fsync", ".")))


def test_files_can_be_gone_from_a_folder_whose_new_name_was_lost() -> None:
    calls = Call("rename", "f", target=".f"), Call("unlink", ".f/a"), Call("rmdir", ".f")
    left = _left({"f": None, "f/a": b"1"}, *calls)
    assert {"f": None} in left and {} in left
    assert {"f": None} not in _left(
        {"f": None, "f/a": b"1"}, calls[0], Call("fsync", "."), *calls[1:]
    )


def test_a_file_system_that_keeps_order_is_among_the_possible_ones() -> None:
    calls = [_create(name) for name in "abcdefghijklmnopqrstuvwxyz"]
    states = [state.tree for state in PowerLoss({}, calls).states(len(calls), QUICK)]
    for length in range(len(calls) + 1):
        assert {call.path: b"" for call in calls[:length]} in states


def _judge(
    recorded: Recorded, tally: Tally, say: Callable[[str], None], effort: Effort, since: int = 0
) -> None:
    found = survey(recorded, effort, since=since)
    lost = len(found.losses)
    say(
        f"power loss, {recorded.scenario.name}: {found.points} moments, {found.states} states, "
        f"{lost} lost"
    )
    tally.add("power loss", injected=found.states, survived=found.states - lost, lost=lost)
    assert not lost, "\n".join(found.losses[:5])


# They resemble the other snapshots and dumps.
ALIKE = (MIRRORED, REPLACING, FIRST_WITH_LOG)


@pytest.mark.parametrize(
    "name", slow_but([n for n in POWER_SCENARIOS if n not in ALIKE], POWER_SCENARIOS)
)
def test_a_power_cut_leaves_the_old_or_new_and_what_was_promised(
    name: str, recorded: Callable[[str], Recorded], tally: Tally, say: Callable[[str], None]
) -> None:
    _judge(recorded(name), tally, say, FULL)


# No job resumes from an export. After a delta, the next life writes other files under the same
# name.
BACK = [name for name in POWER_SCENARIOS if name not in ("export", DELTA, MIRRORED)]


@pytest.mark.parametrize("name", slow_but(["publication"], [*BACK, MIRRORED]))
def test_a_job_that_comes_back_trusts_nothing_not_yet_on_disk(
    name: str,
    shop: Workshop,
    recorded: Callable[[str], Recorded],
    tally: Tally,
    say: Callable[[str], None],
) -> None:
    first = recorded(name)
    for n_calls in pick(_kills(first.loss.calls), SHARE):
        _judge(record_second_life(shop, first, n_calls), tally, say, BRIEF, since=n_calls)


def _kills(calls: list[Call]) -> list[int]:
    """Moments after a name was created and before an fsync made it certain."""
    return [i + 1 for i, call in enumerate(calls) if call.name in ("mkdir", "rename")]


@pytest.mark.parametrize("name", slow_but(("snapshot that retires", "export"), POWER_SCENARIOS))
def test_ranks_go_on_from_what_a_power_cut_left(
    name: str, shop: Workshop, recorded: Callable[[str], Recorded], tally: Tally
) -> None:
    scenario, trace = recorded(name).scenario, recorded(name).loss
    states = [state for point in trace.points(QUICK) for state in trace.states(point, QUICK)]
    different = list({state.key(): state for state in states}.values())
    for state in pick(random.Random(name).sample(different, min(60, len(different))), SHARE):
        root = shop.new_path("left")
        write_tree(state.tree, root)
        outcome = shop.ranks.run(partial(_check, scenario, str(root)))
        survived = not any(outcome.ends)
        tally.add("power loss, resumed", injected=1, survived=survived, lost=not survived)
        assert survived, f"{state.story}: {outcome.errors}"


def _check(scenario: Scenario, root: str, rank: int) -> None:
    scenario.check(rank, root)
