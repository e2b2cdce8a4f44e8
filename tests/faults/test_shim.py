"""The shim sees everything: replaying its record makes the same folder, and the kernel has seen no
other calls.
"""

import builtins
import ctypes
import errno
import os
import re
import shutil
import subprocess
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from holdfast.recover.storage.journal import JOURNAL_NAME
from tests.faults.scenarios import EVERY, WITH_LOG, Scenario, make_scenario
from tests.faults.shim import Call, Shim, not_durable, read_calls, record, replay, write_half
from tests.faults.workshop import Workshop
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(300)

KINDS = {
    "openat": "open",
    "write": "write",
    "writev": "write",
    "sendfile": "write",
    "copy_file_range": "write",
    "pwrite64": "pwrite",
    "fsync": "fsync",
    "fdatasync": "fdatasync",
    "rename": "rename",
    "renameat": "rename",
    "renameat2": "rename",
    "link": "link",
    "linkat": "link",
    "symlink": "symlink",
    "symlinkat": "symlink",
    "unlink": "unlink",
    "unlinkat": "unlink",
    "mkdir": "mkdir",
    "mkdirat": "mkdir",
    "rmdir": "rmdir",
    "truncate": "truncate",
    "ftruncate": "truncate",
    "fallocate": "truncate",
    "chmod": "chmod",
    "fchmod": "chmod",
    "fchmodat": "chmod",
    "creat": "open",
    "open": "open",
    "pwritev": "pwrite",
    "pwritev2": "pwrite",
    "io_submit": "write",
}
"""System call -> name in the shim."""


def contents(root: Path) -> dict[str, bytes | None]:
    """Path -> bytes, or None for a folder.

    The lock file, which names its holder, and the journal, which is never read again, are left out.
    They are written when a scenario is armed, before the recording begins.
    """
    paths = [path for path in root.rglob("*") if path.name not in ("recover.lock", JOURNAL_NAME)]
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in paths
    }


@pytest.mark.parametrize("name", slow_but(["snapshot that retires"], EVERY))
def test_replaying_what_was_recorded_makes_the_same_folder(
    shop: Workshop, tmp_path: Path, name: str
) -> None:
    built = shop.build(make_scenario(name, shop.model))
    replay(built.calls, built.base, tmp_path)
    assert contents(tmp_path) == contents(built.base), "from an empty folder"
    root = built.copy()
    calls = built.record(root)
    made = contents(root)
    assert made != contents(built.base), "nothing was done"
    replay(calls, root, tmp_path)
    again = contents(tmp_path)
    if name == WITH_LOG:
        # The file of the records before the snapshot is begun when the scenario is armed.
        armed = made.keys() - again.keys()
        assert [Path(path).suffix for path in armed] == [".log"]
        made.pop(armed.pop())
    assert again == made


@pytest.mark.parametrize("name", slow_but(["snapshot that retires"], EVERY))
def test_the_kernel_saw_the_same_calls(shop: Workshop, name: str) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    built = shop.build(make_scenario(name, shop.model))
    root = built.copy()
    outcome = shop.ranks.run(partial(_perform_traced, built.scenario, str(root)), timeout_s=120)
    if any("cannot be traced" in error for error in outcome.errors):
        pytest.skip("this kernel lets no process trace another")
    outcome.require_success()
    for rank in (0, 1):
        seen = changing(read_calls(f"{root}.calls.{rank}"))
        assert traced(Path(f"{root}.strace.{rank}"), root) == seen
        assert rank == 1 or seen.total() > 10


def _perform_traced(scenario: Scenario, root: str, rank: int) -> None:
    action = scenario.arm(rank, root)
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))  # PR_SET_PTRACER, PR_SET_PTRACER_ANY
    options = ["-f", "-y", "-s", "0", "-e", f"trace={','.join('?' + name for name in KINDS)}"]
    output = f"{root}.strace.{rank}"
    tracer = subprocess.Popen(
        ["strace", *options, "-o", output, "-p", str(os.getpid())], stderr=subprocess.PIPE
    )
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    assert b"attached" in said, f"this process cannot be traced: {said!r}"
    with Shim(root, log=f"{root}.calls.{rank}", rank=rank):
        action()
    tracer.terminate()  # it detaches from this process first
    tracer.wait(30)


def traced(log: Path, root: Path) -> Counter[str]:
    """Count successful calls by kind that changed or synced a file below ``root``."""
    found: Counter[str] = Counter()
    begun: dict[str, str] = {}
    for line in log.read_text().splitlines():
        thread, _, text = line.partition(" ")
        if text.endswith("<unfinished ...>"):  # other threads came between
            begun[thread] = text.removesuffix("<unfinished ...>")
            continue
        text = begun.pop(thread, "") + re.sub(r"<\.\.\. \w+ resumed>", "", text)
        call = re.match(r"\s*(\w+)\(.*\)\s+= (-?\d+)", text)
        if (
            call is None
            or int(call[2]) < 0
            or f"{root}/" not in text.replace(f"{root}>", f"{root}/")
        ):
            continue
        kind = KINDS[call[1]]
        if kind != "open" or re.search("O_CREAT|O_TRUNC|O_WRONLY|O_RDWR", text):
            found["rmdir" if "AT_REMOVEDIR" in text else kind] += 1
    return found


def changing(calls: list[Call]) -> Counter[str]:
    """Count recorded calls in the same way, without opens for reading (the kernel counts listing a
    folder as one).
    """
    writes = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_RDWR
    return Counter(call.name for call in calls if call.name != "open" or (call.flags or 0) & writes)


def _do_everything(root: Path) -> None:
    (root / "a").mkdir()
    (root / "a" / "text").write_text("line\n" * 10_000)
    with open(root / "a" / "f", "xb") as file:
        file.write(b"x" * 10)
        file.truncate(20)
        file.seek(15)
        file.write(b"z")
        file.flush()
        os.fsync(file)
    with open(root / "a" / "f", "ab", buffering=0) as file:
        file.write(b"end")
    with open(root / "a" / "f", "r+b") as file:
        file.write(b"start")
        assert file.read(3) == b"xxx"
        file.write(b"Q")
    torch.save(torch.ones(3), open(root / "tensor", "wb"))  # noqa: SIM115
    fd = os.open("p", os.O_RDWR | os.O_CREAT, dir_fd=(folder := os.open(root, os.O_RDONLY)))
    os.pwrite(fd, b"hello", 100)
    os.writev(fd, [b"one", memoryview(b"two")])
    os.posix_fallocate(fd, 0, 5000)
    os.ftruncate(fd, 4000)
    os.copy_file_range(fd, fd, 3, 0, 200)
    os.fdatasync(fd)
    os.rename("p", "q", src_dir_fd=folder, dst_dir_fd=folder)
    os.close(fd)
    os.close(folder)
    os.symlink("q", root / "link")
    os.link(root / "q", root / "hard")
    os.replace(root / "hard", root / "harder")
    shutil.copyfile(root / "q", root / "copied")
    os.chmod(root / "copied", 0o600)
    shutil.copytree(root / "a", root / "tree")
    shutil.move(root / "tree", root / "moved")
    shutil.rmtree(root / "a")
    os.unlink(root / "copied")


def test_every_way_of_changing_a_file_is_recorded_and_replayed(tmp_path: Path) -> None:
    root, into = tmp_path / "root", tmp_path / "into"
    root.mkdir()
    into.mkdir()
    real = open, os.write, os.scandir
    with record(root, tmp_path / "log", rank=3) as calls:
        _do_everything(root)
        (tmp_path / "elsewhere").write_text("not of interest")
    assert (builtins.open, os.write, os.scandir) == real, "all is as it was"
    replay(calls, root, into)
    assert contents(into) == contents(root) and (into / "link").is_symlink()
    assert {call.name for call in calls} >= set(KINDS.values()) - {"truncate"} and {
        call.rank for call in calls
    } == {3}
    assert read_calls(tmp_path / "log") == calls, "what a killed process leaves"


def test_a_hook_can_fail_any_call_and_write_half(tmp_path: Path) -> None:
    def hook(call: Call) -> None:
        if call.data is not None:
            write_half(call)
            raise OSError(errno.ENOSPC, "full")

    with Shim(tmp_path, hook) as shim, pytest.raises(OSError, match="full"):
        Path(tmp_path, "file").write_bytes(b"12345678")
    assert (tmp_path / "file").read_bytes() == b"1234"
    assert [call.name for call in shim.calls] == ["open"], "what did not succeed is not recorded"


@pytest.mark.parametrize("forgotten", ["nothing", "file", "folder", "sub", "parent"])
def test_files_without_an_fsync_are_not_durable(tmp_path: Path, forgotten: str) -> None:
    def sync(path: Path, name: str) -> None:
        if name != forgotten:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    staging, final = tmp_path / ".staging", tmp_path / "final"
    with record(tmp_path) as calls:
        (staging / "sub").mkdir(parents=True)
        (staging / "sub" / "file").write_bytes(b"data")
        for name, path in {
            "file": staging / "sub" / "file",
            "sub": staging / "sub",
            "folder": staging,
        }.items():
            sync(path, name)
        os.rename(staging, final)
        sync(tmp_path, "parent")
    lost = {
        "nothing": [],
        "file": [staging / "sub" / "file"],
        "folder": [staging],
        "sub": [staging / "sub"],
    }
    assert not_durable(calls, str(final)) == [str(path) for path in lost.get(forgotten, [tmp_path])]
