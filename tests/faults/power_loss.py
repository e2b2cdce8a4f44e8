"""Every legal state of the disk after a power cut during a recorded trace, built and shown to an
oracle.

The model follows ALICE (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014) and
CrashMonkey/B3 (Mohan et al., OSDI 2018). It assumes only the guarantees of POSIX. A file system
that keeps more order leaves fewer states.

- A call changes one inode: a file's bytes or size (write, truncate), or a folder's entries (create,
  mkdir, rename, unlink, rmdir). The change is certain only after an fsync *of that inode* has
  returned, and only if the call came before the fsync. An fsync of a file does not persist its
  name, and an fsync of a folder does not persist its files.
- Uncertain changes may or may not have happened, each independently and in any order: a later one
  may be there without an earlier one. A write may also be torn (only its first half), or have set
  the size without the bytes, which are then zeros.
- A symbolic link appears with its target. No program can fsync a link.
- A rename is atomic: either the old name is gone and the new one exists, or neither. A rename
  between two folders is certain after both folders were fsynced.
- Reachability follows from inodes: an entry in a folder that has no name is unreachable, and so is
  a file whose name was removed.

n uncertain changes have more than 2**n outcomes. Up to a bound of n, all are built. Above it: none,
all, every prefix (a file system that keeps order), each change lost alone, each present alone, each
write torn alone, names without bytes, bytes without names, and a seeded sample. A state before a
call other than fsync is also a state after it, with that call's change lost. So new states appear
only before an fsync and at the end. A short run looks only before every fsync of a folder and at
the end, because the effect of a file's fsync is invisible until its folder shows the file.

Cost: a state is a folder of the scenario's size in memory (``/dev/shm`` if it exists), about 5 ms
with its oracle.
"""

import hashlib
import os
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path, PurePosixPath

from tests.faults.share import SHARE, pick
from tests.faults.shim import Call


class Link(bytes):
    """Target of a symbolic link, which appears together with its name."""


Tree = dict[str, bytes | None]
"""POSIX path relative to the recorded root -> contents, None for a folder."""

WHOLE, HALF, ZEROS = HOW = ("whole", "half", "zeros")
FSYNCS = ("fsync", "fdatasync")
_ROOT = 0


def read_tree(root: Path) -> Tree:
    """Read everything below ``root``."""
    found: Tree = {}
    for folder, folders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        for name in (*folders, *files):
            path = Path(folder) / name
            if path.is_symlink():
                found[(here / name).as_posix()] = Link(os.fsencode(os.readlink(path)))
            else:
                found[(here / name).as_posix()] = None if name in folders else path.read_bytes()
    return found


def write_tree(tree: Tree, root: Path) -> None:
    """Build ``tree`` in the new folder ``root``."""
    root.mkdir()
    for path, contents in sorted(tree.items()):
        if contents is None:
            os.mkdir(f"{root}/{path}")
        elif isinstance(contents, Link):
            os.symlink(contents, f"{root}/{path}")
        else:
            with open(f"{root}/{path}", "xb", buffering=0) as file:
                file.write(contents)


@dataclass(frozen=True, eq=False)
class Change:
    """Effect of one call on one inode (or on two, for a rename between folders).

    Attributes:
        call: index of the call.
        kind: ``write``, ``resize``, ``link``, ``unlink`` or ``rename``.
        node: the written file, or the file that the name belongs to.
        folder, name: the entry that is added or removed. The old entry of a ``rename``.
        to_folder, to_name: the new entry of a ``rename``.
        offset, data: arguments of a ``write``. For a ``resize``, ``offset`` is the new size.
        certain_at: index of the fsync that makes the change certain, or None.
    """

    call: int
    kind: str
    node: int
    folder: int = -1
    name: str = ""
    to_folder: int = -1
    to_name: str = ""
    offset: int = 0
    data: bytes = b""
    certain_at: int | None = None

    @property
    def is_data(self) -> bool:
        """True if it changes a file, False if it changes a folder."""
        return self.kind in ("write", "resize")

    def inodes(self) -> set[int]:
        """Inodes that must be fsynced to make the change certain."""
        return {self.node} if self.is_data else {self.folder, self.to_folder} - {-1}


Fate = dict[Change, str]
"""Uncertain change that happened -> its extent, one of `HOW`. Missing changes were lost."""


class _Disk:
    """Inodes: files with bytes, folders with entries."""

    def __init__(self, tree: Tree) -> None:
        self.files: dict[int, bytes] = {}
        self.folders: dict[int, dict[str, int]] = {_ROOT: {}}
        for path, contents in sorted(tree.items()):
            node = len(self.files) + len(self.folders)
            self.folders[self.find(str(PurePosixPath(path).parent))][PurePosixPath(path).name] = (
                node
            )
            if contents is None:
                self.folders[node] = {}
            else:
                self.files[node] = contents

    def copy(self) -> "_Disk":
        twin = _Disk({})
        twin.files = dict(self.files)
        twin.folders = {node: dict(entries) for node, entries in self.folders.items()}
        return twin

    def find(self, path: str) -> int:
        """Return the inode at ``path``, or -1."""
        node = _ROOT
        for part in PurePosixPath(path).parts:
            node = self.folders.get(node, {}).get(part, -1)
        return node

    def entry(self, path: str) -> tuple[int, str]:
        """Return the folder of a path's last name, and the name."""
        return self.find(str(PurePosixPath(path).parent)), PurePosixPath(path).name

    def existing(self, call: Call) -> int:
        """Return the inode that existed at the path of a call."""
        if (node := self.find(call.path)) < 0:
            raise ValueError(f"the trace has {call}, but nothing made that path before")
        return node

    def know_inodes_of(self, later: "_Disk") -> None:
        """Add the inodes of ``later``, empty and without names."""
        empty = {
            node: data if isinstance(data, Link) else b"" for node, data in later.files.items()
        }
        self.files = empty | self.files
        self.folders = {node: {} for node in later.folders} | self.folders

    def make_file(self, contents: bytes = b"") -> int:
        """Add a file without a name."""
        self.files[node := len(self.files) + len(self.folders)] = contents
        return node

    def make_folder(self) -> int:
        """Add a folder without a name."""
        self.folders[node := len(self.files) + len(self.folders)] = {}
        return node

    def apply(self, change: Change, how: str = WHOLE) -> None:
        """Apply a change, independently of the changes before it."""
        match change.kind:
            case "write":
                self.files[change.node] = _written(self.files[change.node], change, how)
            case "resize":
                self.files[change.node] = self.files[change.node][: change.offset].ljust(
                    change.offset, b"\0"
                )
            case "link":
                self.folders[change.folder][change.name] = change.node
            case "unlink":
                self.folders[change.folder].pop(change.name, None)
            case "rename":
                self.folders[change.folder].pop(change.name, None)
                self.folders[change.to_folder][change.to_name] = change.node

    def tree(self, node: int = _ROOT, at: str = "") -> Tree:
        """Everything that can be reached from the root."""
        found: Tree = {}
        for name, child in self.folders[node].items():
            if child in self.files:
                found[at + name] = self.files[child]
            else:
                found |= {at + name: None, **self.tree(child, f"{at}{name}/")}
        return found


def _written(before: bytes, change: Change, how: str) -> bytes:
    data, end = change.data, change.offset + len(change.data)
    if how == ZEROS:
        return before.ljust(end, b"\0")
    data = data[: len(data) // 2] if how == HALF else data
    before = before.ljust(change.offset, b"\0")
    return before[: change.offset] + data + before[change.offset + len(data) :]


@dataclass(frozen=True)
class Effort:
    """Bounds for the number of states.

    Attributes:
        subsets_of: largest number of uncertain changes of which all subsets are built.
        samples: number of random outcomes above that.
        all_points: cut the power before every call. Otherwise before every fsync of a folder, and
            at the end.
        share: share of these moments, in addition to the end.
    """

    subsets_of: int = 5
    samples: int = 6
    all_points: bool = False
    share: float = 1.0


QUICK, FULL = Effort(), Effort(subsets_of=7, samples=64, all_points=True, share=SHARE)


@dataclass(frozen=True)
class State:
    """One possible state after a power cut.

    Attributes:
        tree: contents of the disk.
        promised: whether the result had already been reported as durable.
        story: the next call, and the changes that were lost or torn.
        after_ns: when the last call was made that has returned, in ns.
    """

    tree: Tree
    promised: bool
    story: str
    after_ns: int = 0

    def key(self) -> bytes:
        """Equal for states that no oracle can distinguish."""
        digest = hashlib.blake2b(bytes([self.promised]), digest_size=16)
        for path, contents in sorted(self.tree.items()):
            digest.update(
                f"{path}\0{'' if contents is None else len(contents)}\0".encode()
                + (contents or b"")
            )
        return digest.digest()


class PowerLoss:
    """The possible states of a trace after a power cut.

    Args:
        before: contents of stable storage when the recording began.
        calls: calls of all ranks, ordered by time. See `relative_to`.
        promise: whether a call is only made after the promise. None: the promise comes after the
            last call.

    Attributes:
        before, calls: as given.
        changes: effects of the calls, in order.
    """

    def __init__(
        self, before: Tree, calls: Iterable[Call], promise: Callable[[Call], bool] | None = None
    ) -> None:
        self.before, self.calls, self._promise = before, list(calls), promise
        told = (i for i, call in enumerate(self.calls) if promise is not None and promise(call))
        self._promised = next(told, len(self.calls))
        self._before = _Disk(before)
        after = self._before.copy()
        self.changes, self._folder_fsyncs = _changes(after, self.calls)
        self._before.know_inodes_of(after)

    def without(self, dropped: Collection[int]) -> "PowerLoss":
        """Return the same trace without the calls of these indices."""
        kept = [call for i, call in enumerate(self.calls) if i not in dropped]
        return PowerLoss(self.before, kept, self._promise)

    def undisturbed(self, point: int) -> Tree:
        """Return the visible state after the first ``point`` calls while the power is on."""
        disk = self._before.copy()
        for change in self.changes:
            if change.call < point:
                disk.apply(change)
        return disk.tree()

    def points(self, effort: Effort, since: int = 0) -> list[int]:
        """Numbers of returned calls at which to cut the power, ``since`` or more, starting with the
        end.
        """
        looked_at = range(since, len(self.calls))
        moments = [i for i in looked_at if effort.all_points or i in self._folder_fsyncs]
        return [len(self.calls), *reversed(pick(moments, effort.share))]

    def states(self, point: int, effort: Effort) -> Iterator[State]:
        """Yield the possible states if the power fails after the first ``point`` calls, some of
        them more than once.
        """
        past = [change for change in self.changes if change.call < point]
        doubtful = [
            change for change in past if change.certain_at is None or change.certain_at >= point
        ]
        certain = dict.fromkeys(past, WHOLE)
        for change in doubtful:
            del certain[change]
        after_ns = self.calls[point - 1].time_ns if point else 0
        for fate in _fates(doubtful, effort, random.Random(point)):
            disk, happened = self._before.copy(), certain | fate
            for change in past:
                if change in happened:
                    disk.apply(change, happened[change])
            story = self._story(point, doubtful, fate)
            yield State(disk.tree(), point >= self._promised, story, after_ns)

    def _story(self, point: int, doubtful: list[Change], fate: Fate) -> str:
        end = (
            "after the last call"
            if point == len(self.calls)
            else f"before call {point}: {self.calls[point]}"
        )
        lost = [
            f"{fate.get(c, 'none')} of {c.call}: {self.calls[c.call]}"
            for c in doubtful
            if fate.get(c) != WHOLE
        ]
        return (
            f"power lost {end}; of {len(doubtful)} uncertain changes there was "
            f"{', '.join(lost) or 'each'}"
        )


def relative_to(root: Path, calls: Iterable[Call]) -> list[Call]:
    """Calls of a `Shim` over ``root``, with relative paths."""
    base = os.path.realpath(root)

    def relative(call: Call) -> Call:
        target = (
            call.target
            if call.name not in ("rename", "link")
            else os.path.relpath(call.target or "", base)
        )
        return replace(call, path=os.path.relpath(call.path, base), target=target)

    return [relative(call) for call in calls]


def _fates(doubtful: list[Change], effort: Effort, draw: random.Random) -> Iterator[Fate]:
    whole: Fate = dict.fromkeys(doubtful, WHOLE)
    writes = [change for change in doubtful if change.kind == "write"]
    yield whole
    yield {}
    for i, change in enumerate(doubtful):
        yield {other: WHOLE for other in doubtful if other is not change}
        yield {change: WHOLE}
        yield dict.fromkeys(doubtful[:i], WHOLE)
    for change in writes:
        yield whole | {change: HALF}
        yield whole | {change: ZEROS}
    yield {change: WHOLE for change in doubtful if not change.is_data}
    yield {change: WHOLE for change in doubtful if change.is_data}
    yield whole | dict.fromkeys(writes, ZEROS)
    if len(doubtful) <= effort.subsets_of:
        for size in range(2, len(doubtful) - 1):
            yield from (dict.fromkeys(some, WHOLE) for some in combinations(doubtful, size))
    else:
        for _ in range(effort.samples):
            likely = draw.random()
            some = [change for change in doubtful if draw.random() < likely]
            yield {change: draw.choice(HOW) if change.kind == "write" else WHOLE for change in some}


def _changes(disk: _Disk, calls: list[Call]) -> tuple[list[Change], set[int]]:
    """Effects of all calls if nothing is lost, with the fsync that makes each certain, and the
    fsyncs of folders.
    """
    changes: list[Change] = []
    folder_fsyncs: set[int] = set()
    waiting: dict[int, set[int]] = {}  # index of a change -> inodes that still need an fsync
    for i, call in enumerate(calls):
        if call.name in FSYNCS:
            node = disk.existing(call)
            folder_fsyncs |= {i} if node in disk.folders else set()
            for index in [index for index, inodes in waiting.items() if node in inodes]:
                waiting[index].remove(node)
                if not waiting[index]:
                    del waiting[index]
                    changes[index] = replace(changes[index], certain_at=i)
        elif (change := _change(disk, i, call)) is not None:
            waiting[len(changes)] = change.inodes()
            changes.append(change)
            disk.apply(change)
    return changes, folder_fsyncs


def _change(disk: _Disk, index: int, call: Call) -> Change | None:
    """Effect of a successful call, None if it changes nothing in the model."""
    folder, name = disk.entry(call.path)
    match call.name:
        case "open" if disk.find(call.path) < 0:
            return Change(index, "link", disk.make_file(), folder, name)
        case "open" if (call.flags or 0) & os.O_TRUNC:
            return Change(index, "resize", disk.existing(call))
        case "mkdir":
            return Change(index, "link", disk.make_folder(), folder, name)
        case "write" | "pwrite":
            return Change(
                index, "write", disk.existing(call), offset=call.offset or 0, data=call.data or b""
            )
        case "truncate":
            return Change(index, "resize", disk.existing(call), offset=call.size or 0)
        case "rename":
            to_folder, to_name = disk.entry(call.target or "")
            return Change(index, "rename", disk.existing(call), folder, name, to_folder, to_name)
        case "link":
            return Change(index, "link", disk.find(call.target or ""), folder, name)
        case "unlink" | "rmdir":
            return Change(index, "unlink", disk.existing(call), folder, name)
        case "symlink":
            return Change(
                index, "link", disk.make_file(Link(os.fsencode(call.target or ""))), folder, name
            )
    return None
