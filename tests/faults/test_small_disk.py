"""A disk that is really full, and real limits on file size: the kernel fails the calls instead of a
hook.

The disk is a small tmpfs in a separate mount namespace, which any user may create if the kernel
allows it. Ballast leaves more and more room, by page or by inode, or appears in the middle of an
attempt, after all checks of the free space. Without the ballast, the next attempt must succeed. The
same is tested with a limit on file size, for one rank or both, at sizes that cut every write.
"""

import contextlib
import ctypes
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from pathlib import Path

import pytest
import torch.distributed as dist

from holdfast.utils.distributed import rank_zero_decides
from tests.faults.sessions import SESSIONS, Session, agree
from tests.faults.share import SHARE, pick
from tests.faults.shim import Call, Shim
from tests.faults.tally import Tally
from tests.faults.workshop import Workshop, workshop
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(1800)

DISK_BYTES = 2 << 20
DISK_INODES = 400
PAGE_BYTES = 4096
STRIDE_BYTES = 500
"""Difference between limits on the size of files."""
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000


def mount_small_disk(path: str) -> None:
    """Mount a private tmpfs at ``path`` for this process, which must have no threads, and its
    children.

    Raises:
        OSError: the kernel does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *args: bytes | int) -> None:
        if getattr(libc, function)(*args) != 0:
            raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")

    user, group = os.getuid(), os.getgid()
    call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    call(
        "mount",
        b"none",
        path.encode(),
        b"tmpfs",
        0,
        f"size={DISK_BYTES},nr_inodes={DISK_INODES}".encode(),
    )


@dataclass(frozen=True)
class SmallDisk:
    """Ranks that see a small file system.

    Attributes:
        path: its mount point for the ranks.
    """

    shop: Workshop
    path: Path


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    path = tmp_path_factory.mktemp("disk")
    probe = os.fork()
    if probe == 0:
        try:
            mount_small_disk(str(path))
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(probe, 0)[1]):
        pytest.skip(f"this kernel lets no ordinary user mount a file system: {os.strerror(code)}")
    with workshop(partial(mount_small_disk, str(path))) as opened:
        yield SmallDisk(opened, path)


@dataclass
class Ballast:
    """Data that fills a disk.

    Attributes:
        folder: a folder on that disk.
        inodes: whether to use up inodes instead of bytes.
        room: number of pages or inodes to leave.
    """

    folder: Path
    inodes: bool
    room: int

    def load(self) -> None:
        self.folder.mkdir()
        if self.inodes:
            while os.statvfs(self.folder).f_ffree > self.room:
                (self.folder / str(len(os.listdir(self.folder)))).touch()
        else:
            with open(self.folder / "ballast", "wb") as file:
                status = os.statvfs(self.folder)
                if (size := status.f_bavail * status.f_frsize - self.room * PAGE_BYTES) > 0:
                    os.posix_fallocate(file.fileno(), 0, size)

    def drop(self) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def __call__(self, call: Call) -> None:
        """Fill the disk when the first file is created (as a hook)."""
        if call.name == "open" and (call.flags or 0) & os.O_CREAT and not self.folder.exists():
            self.load()


def fill_the_disk(
    session_name: str, disk: str, model: str, inodes: bool, late: bool, share: float, rank: int
) -> tuple[int, int]:
    """Stage: make attempts with more and more room until one succeeds. Returns the numbers of
    attempts and failures.
    """
    root = Path(disk, f"{session_name}-{inodes}-{late}")
    if rank == 0:
        root.mkdir()
    dist.barrier()
    session: Session = SESSIONS[session_name](rank, str(root), model)
    for _ in range(3):
        assert agree(session.attempt())
        session.survey(True)
    faults = 0
    enough = _taken(Path(session.newest), inodes)
    for room in count() if share == 1 else pick(range(enough), share):
        ballast = Ballast(Path(disk, "ballast"), inodes, room)
        if not late:
            rank_zero_decides(ballast.load)
        with Shim(root, ballast) if late and rank == 0 else contextlib.nullcontext():
            done = agree(session.attempt())
        rank_zero_decides(ballast.drop)
        session.survey(done)
        if done:
            break
        faults += 1
        assert agree(session.attempt()), "there is room again"
        session.survey(True)
    session.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(root)
    return faults, room


def _taken(folder: Path, inodes: bool) -> int:
    """Number of pages or inodes used by the files of a folder. An attempt with less room fails."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return len(files) if inodes else sum(-(-file.stat().st_size // PAGE_BYTES) for file in files)


FAST = [
    ("snapshot", "pages", "amidst"),
    ("export", "pages", "before"),
    ("publication", "inodes", "amidst"),
    ("delta", "pages", "before"),
]


@pytest.mark.parametrize(
    ("name", "lack", "when"),
    slow_but(FAST, product(SESSIONS, ("pages", "inodes"), ("before", "amidst"))),
)
def test_a_disk_full_to_its_last_page_or_inode_costs_one_attempt(
    disk: SmallDisk, name: str, lack: str, when: str, tally: Tally, say: Callable[[str], None]
) -> None:
    stage = partial(
        fill_the_disk,
        name,
        str(disk.path),
        disk.shop.model,
        lack == "inodes",
        when == "amidst",
        SHARE,
    )
    outcome = disk.shop.ranks.run(stage, timeout_s=900)
    _count(outcome.errors, "full disk", tally)
    faults, room = outcome.require_success()[0][0]
    assert faults > 0
    tally.add("full disk", injected=faults, survived=faults)
    say(f"{name}: {faults} attempts failed on a full disk; {room} {lack} are enough")


def _limit_files(
    session_name: str, root: str, model: str, victims: tuple[int, ...], share: float, rank: int
) -> tuple[int, int]:
    """Stage: make attempts with a growing limit on file size until one succeeds."""
    session: Session = SESSIONS[session_name](rank, root, model)
    for _ in range(3):
        assert agree(session.attempt())
        session.survey(True)
    faults = 0
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    largest = max(file.stat().st_size for file in Path(session.newest).rglob("*") if file.is_file())
    some = [0, *pick(range(STRIDE_BYTES, largest, STRIDE_BYTES), share)]
    for limit in count(0, STRIDE_BYTES) if share == 1 else some:
        if rank in victims:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            done = session.attempt()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        session.survey(agree(done))
        if done:
            break
        faults += 1
        assert agree(session.attempt()), "the limit is gone"
        session.survey(True)
    session.close()
    return faults, limit


@pytest.mark.parametrize(
    ("name", "victims"),
    slow_but(
        [("snapshot", (0, 1)), ("delta", (0,)), ("export", (1,))],
        product(SESSIONS, [(0,), (1,), (0, 1)]),
    ),
)
def test_a_limit_on_the_size_of_files_costs_only_the_attempt(
    shop: Workshop, name: str, victims: tuple[int, ...], tally: Tally, say: Callable[[str], None]
) -> None:
    root = shop.new_path("root")
    root.mkdir()
    stage = partial(_limit_files, name, str(root), shop.model, victims, SHARE)
    outcome = shop.ranks.run(stage, timeout_s=900)
    _count(outcome.errors, "RLIMIT_FSIZE", tally)
    faults, limit = outcome.require_success()[0][0]
    assert faults > 0
    tally.add("RLIMIT_FSIZE", injected=faults, survived=faults)
    say(f"{name}: {faults} attempts failed on a limit of ranks {victims}; {limit} bytes are enough")


def _count(errors: list[str], kind: str, tally: Tally) -> None:
    if any(errors):
        tally.add(kind, injected=1, lost=1)
