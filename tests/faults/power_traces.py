"""Scenarios recorded for the power-loss model, and the oracle for the state after a power cut.

The recorded run is its own reference: only its initial and final contents, to the byte, may ever be
visible.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.recover import GenerationStore
from holdfast.utils.manifest import MANIFEST_NAME
from holdfast.utils.plain_values import unpack_plain
from holdfast.utils.record_log import FRAME, NO_PARENT, RecordLog
from tests.faults.fsync_purposes import HINT, MIRROR, fsync_purposes
from tests.faults.power_loss import (
    Effort,
    PowerLoss,
    State,
    Tree,
    read_tree,
    relative_to,
    write_tree,
)
from tests.faults.scenarios import (
    SCENARIOS,
    WITH_LOG,
    Action,
    Delta,
    Logged,
    Publication,
    Scenario,
    Snapshot,
    make_scenario,
)
from tests.faults.shim import Call, Shim, read_calls
from tests.faults.workshop import Workshop
from tests.recover.runs import step_info

_NUMBERED = re.compile(r"((?:[^./][^/]*/)*)(?:global_step_|v)(\d+)")
REPLACING = "snapshot that replaces the only one"
MIRRORED = "snapshot that is mirrored"
DELTA = "delta"
FIRST_WITH_LOG = "first dump with a log"
POWER_SCENARIOS = (*SCENARIOS, WITH_LOG, FIRST_WITH_LOG, DELTA, REPLACING, MIRRORED)
"""Scenarios that `record` can record."""
RECOVER = "e/t/recover"
"""Folder of snapshots, relative to the root."""
LOG = f"{RECOVER}/episodes/diary"
"""Folder of the log in `Logged`, relative to the root."""


def visible(tree: Tree) -> dict[str, Tree]:
    """Numbered folders that are not hidden by a dot, with their files."""
    found: dict[str, Tree] = {path: {} for path in tree if _NUMBERED.fullmatch(path)}
    for path, contents in tree.items():
        for folder in found:
            if path.startswith(f"{folder}/") and contents is not None:
                found[folder][path.removeprefix(f"{folder}/")] = contents
    return found


def number(path: str) -> int:
    """The step or version of a numbered folder."""
    match = _NUMBERED.fullmatch(path)
    assert match is not None
    return int(match[2])


@dataclass(frozen=True)
class Mirrored(Snapshot):
    """A snapshot with its copy to another folder."""

    def handler(self, root: str, **options: Any) -> Any:
        return super().handler(root, mirror_url=f"file://{root}/mirror", **options)

    def arm(self, rank: int, root: str) -> Action:
        handler, trainee, step = self.resume(rank, root)
        trainee.train()

        def dump() -> None:
            handler.dump(trainee.engines, step_info(step + 1), trainee.loader)
            handler.close()

        return dump


@dataclass(frozen=True)
class Kept:
    """Oracle: every visible folder is complete, and the newest one is the old or the new one. After
    the promise, the new one.

    The same holds for copies, which are visible if they have a manifest.

    Args:
        wanted: numbered folder -> its files.
        newest: allowed numbers of the newest folder. -1: there may be no folder.
        promised: required number after the promise.
    """

    wanted: Mapping[str, Tree]
    newest: Collection[int]
    promised: int

    def __call__(self, state: State, scratch: Path) -> str | None:
        """Return the fault of a state, or None. ``scratch`` is an unused path."""
        shown = visible(state.tree)
        copies = {path: files for path, files in shown.items() if path.startswith(MIRROR)}
        own = {path: files for path, files in shown.items() if path not in copies}
        complete = {path: files for path, files in copies.items() if MANIFEST_NAME in files}
        mirrors = any(path.startswith(MIRROR) for path in self.wanted)
        for there in (own, complete) if mirrors else (own,):
            if problem := self._problem(there, state.promised):
                return problem
        if RECOVER not in state.tree:
            return None
        below = f"{RECOVER}/"
        recover = {
            path.removeprefix(below): data
            for path, data in state.tree.items()
            if path.startswith(below)
        }
        write_tree(recover, scratch)
        problem = self._store_disagrees(GenerationStore(scratch), max(map(number, own), default=-1))
        shutil.rmtree(scratch)
        return problem

    def _problem(self, there: Mapping[str, Tree], promised: bool) -> str | None:
        for path, files in there.items():
            if files != self.wanted[path]:
                differ = sorted(name for name, _ in files.items() ^ self.wanted[path].items())
                return f"{path} is visible and not whole: {differ[0]}"
        newest = max(map(number, there), default=-1)
        allowed = {self.promised} if promised else {*self.newest, self.promised}
        return (
            None
            if newest in allowed
            else f"the newest is {newest}, expected one of {sorted(allowed)}: {[*there]}"
        )

    def _store_disagrees(self, store: GenerationStore, newest: int) -> str | None:
        found = store.newest_valid()
        step = -1 if found is None else found[0].step
        if step != newest or store.quarantined():
            return (
                f"the store found step {step} instead of {newest}, and refused "
                f"{store.quarantined()}"
            )
        return None


@dataclass(frozen=True)
class KeptWithLog:
    """Oracle: as `Kept`, and every entry that was synced is in the newest generation or in the log
    that follows it.

    Args:
        kept: oracle for the generations.
        synced: entry -> when its fdatasync was called, in ns.
    """

    kept: Kept
    synced: Mapping[str, int]

    @property
    def wanted(self) -> Mapping[str, Tree]:
        """See `Kept`."""
        return self.kept.wanted

    @property
    def newest(self) -> Collection[int]:
        """See `Kept`."""
        return self.kept.newest

    def __call__(self, state: State, scratch: Path) -> str | None:
        """Return the fault of a state, or None. ``scratch`` is an unused path."""
        problem = self.kept(state, scratch)
        if problem is not None:
            return problem
        due = {entry for entry, time_ns in self.synced.items() if time_ns <= state.after_ns}
        lost = due - self._entries(state.tree, scratch)
        return f"synced entries are lost: {sorted(lost)}" if lost else None

    def _entries(self, tree: Tree, scratch: Path) -> set[str]:
        """The entries that the next start would find."""
        found: set[str] = set()
        log_id: str | None = NO_PARENT
        shown = visible(tree)
        own = [path for path in shown if path.startswith(RECOVER)]
        if own:
            state = diary_state(shown[max(own, key=number)])
            found |= set(state["entries"])
            log_id = state["log"]

        # The files of the log, as they are on the disk.
        scratch.mkdir()
        for path, data in tree.items():
            if path.startswith(f"{LOG}/") and data is not None:
                (scratch / Path(path).name).write_bytes(data)
        log = RecordLog(scratch, 1.0)
        found |= {payload.decode() for payload in log.read(log_id)}
        shutil.rmtree(scratch)
        return found


def diary_state(files: Tree) -> dict[str, Any]:
    """The state of the diary in a generation's files."""
    data = files["state/rank_00000.pt"]
    assert data is not None
    process = unpack_plain(data, "rank 0")
    return unpack_plain(process["user"]["diary"], "diary")


def synced_entries(calls: list[Call]) -> dict[str, int]:
    """When each entry of the log was synced: entry -> time of the fdatasync, in ns."""
    waiting: dict[str, list[str]] = {}
    synced: dict[str, int] = {}
    for call in calls:
        if not call.path.startswith(f"{LOG}/"):
            continue
        if call.name == "write":
            assert call.data is not None
            payload = call.data[FRAME.size :]
            waiting.setdefault(call.path, []).append(payload.decode())
        elif call.name == "fdatasync":
            for entry in waiting.pop(call.path, []):
                synced[entry] = call.time_ns
    assert synced, "the scenario has synced nothing"
    return synced


@dataclass(frozen=True)
class Recorded:
    """A performed scenario.

    Attributes:
        scenario: the scenario.
        loss: its states after power cuts.
        oracle: the requirements for these states.
    """

    scenario: Scenario
    loss: PowerLoss
    oracle: Callable[[State, Path], str | None]

    def without(self, *dropped: int) -> "Recorded":
        """Return the same recording without the calls of these indices."""
        return replace(self, loss=self.loss.without(dropped))


@dataclass
class Survey:
    """Results of an oracle for the states of a trace.

    Attributes:
        points: number of moments at which the power was cut.
        states: number of different states that the oracle has seen.
        losses: faults, with the story of each state.
    """

    points: int = 0
    states: int = 0
    losses: list[str] = field(default_factory=list)


def survey(
    recorded: Recorded, effort: Effort, *, since: int = 0, until_first_loss: bool = False
) -> Survey:
    """Show every state to the oracle, beginning with the last moments, and none before the first
    ``since`` calls.
    """
    done, seen = Survey(), set[bytes]()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="holdfast-power-loss-") as scratch:
        for point in recorded.loss.points(effort, since):
            done.points += 1
            for state in recorded.loss.states(point, effort):
                if (key := state.key()) in seen:
                    continue
                seen.add(key)
                done.states += 1
                if problem := recorded.oracle(state, Path(scratch) / "recover"):
                    done.losses.append(f"{problem} ({state.story})")
                if done.losses and until_first_loss:
                    return done
    return done


def record(shop: Workshop, name: str, switch: Callable[[], None] | None = None) -> Recorded:
    """Perform one of `POWER_SCENARIOS` on top of durable files, and record all calls.

    The recording includes the changes of resuming, but not the versions that a delta is from, which
    ranks publish again to know their bytes. It has no fsync of a hint, because nothing may depend
    on those. A first snapshot starts in an empty folder, so the folders above it must be durable
    too when it returns.

    Args:
        shop: two ranks and a folder.
        name: name of the scenario.
        switch: called by each rank before it begins, to break some part of the product in that
            process.
    """
    own: dict[str, Snapshot] = {
        REPLACING: Snapshot(REPLACING, base=0, keep=1),
        MIRRORED: Mirrored(MIRRORED, base=1),
        FIRST_WITH_LOG: Logged(FIRST_WITH_LOG, base=-1),
    }
    built = shop.build(own[name] if name in own else make_scenario(name, shop.model))
    if isinstance(built.scenario, Snapshot) and built.scenario.base < 0:
        root = shop.new_path("empty")
        root.mkdir()
    else:
        root = built.copy()
    before = read_tree(root)
    if isinstance(built.scenario, Delta):
        calls = relative_to(root, built.record(root))
    else:
        calls = _perform(shop, partial(_act, built.scenario, switch), root)
    old = visible(before)
    wanted = old | visible(read_tree(root))
    kept = Kept(wanted, {max(map(number, old), default=-1)}, max(map(number, wanted)))
    oracle: Callable[[State, Path], str | None] = kept
    if isinstance(built.scenario, Logged):
        oracle = KeptWithLog(kept, synced_entries(calls))
    whole = Recorded(built.scenario, PowerLoss(before, calls, _promise(built.scenario)), oracle)
    return whole.without(*(i for i, purpose in fsync_purposes(calls).items() if purpose == HINT))


def record_second_life(shop: Workshop, first: Recorded, n_calls: int) -> Recorded:
    """Kill the job after ``n_calls`` calls and resume it without a reboot. Returns one trace of
    both lives.

    The second life can see files that are not on stable storage yet.
    """
    found, root = first.loss.undisturbed(n_calls), shop.new_path("second-life")
    write_tree(found, root)
    calls = first.loss.calls[:n_calls] + _perform(shop, first.scenario.check, root)
    left, made = visible(found), visible(read_tree(root))
    wanted = {**first.oracle.wanted, **left, **made}
    oracle = Kept(wanted, {*first.oracle.newest, *map(number, left)}, max(map(number, made)))
    return Recorded(first.scenario, PowerLoss(first.loss.before, calls), oracle)


def _promise(scenario: Scenario) -> Callable[[Call], bool] | None:
    """When the promise is made: a snapshot or export when its call returns, a publication when a
    server reads it.
    """
    if not isinstance(scenario, Publication | Delta):
        return None
    return lambda call: call.name == "open" and call.path == f"weights/v00000003/{MANIFEST_NAME}"


def _perform(shop: Workshop, act: Callable[[int, str], object], root: Path) -> list[Call]:
    logs = [shop.new_path("calls") for _ in range(2)]
    shop.ranks.run(partial(_under_shim, act, str(root), logs)).require_success()
    return relative_to(root, read_calls(*logs))


def _under_shim(act: Callable[[int, str], object], root: str, logs: list[Path], rank: int) -> None:
    with Shim(root, log=logs[rank], rank=rank):
        act(rank, root)


def _act(scenario: Scenario, switch: Callable[[], None] | None, rank: int, root: str) -> None:
    if switch is not None:
        switch()
    scenario.arm(rank, root)()
