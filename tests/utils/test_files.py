"""A reader, or a crash, sees the old or the new file, never a mixture. Existing files are not
overwritten.
"""

import errno
import os
import random
import resource
import signal
import stat
import tempfile
import time
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import xxhash

from holdfast.utils.atomic_folder import staged_folder
from holdfast.utils.errors import CheckpointExistsError, CheckpointWriteError
from holdfast.utils.files import (
    DurableFile,
    commit_folder,
    file_digest,
    make_durably,
    map_window,
    remove_folder,
    remove_or_log,
    replace_atomically,
    require_free_space,
    staging_path,
    walk_files,
    write_durably,
)
from tests.helpers import PRELOAD, run_ranks
from tests.limits import stretched

pytestmark = pytest.mark.timeout(120)


def test_write_durably_refuses_to_write_over_a_file(tmp_path: Path) -> None:
    write_durably(tmp_path / "a", b"1")
    with pytest.raises(FileExistsError):
        write_durably(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"1"


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of every file at the moment it is fsynced."""
    sizes, fsync = [], os.fsync

    def record(fd: int) -> None:
        sizes.append(os.fstat(fd).st_size)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    return sizes


def test_a_durable_file_is_digested_while_written_and_fsynced_once_complete(
    tmp_path: Path, synced: list[int]
) -> None:
    pieces = [
        b"",
        b"x",
        memoryview(os.urandom(3_000_001)),
        bytearray(b"yz" * 50),
        memoryview(b"abcdefgh").cast("I"),
    ]
    with DurableFile(tmp_path / "a") as file:
        total = 0
        for piece in pieces:
            file.write(piece)
            total += memoryview(piece).nbytes
            assert file.bytes == total
        assert not synced
        file.close()
        file.close()
    assert (tmp_path / "a").read_bytes() == b"".join(map(bytes, pieces))
    assert (file.bytes, file.digest, synced) == (total, file_digest(tmp_path / "a"), [total])
    with pytest.raises(FileExistsError):
        DurableFile(tmp_path / "a")


def test_a_durable_file_whose_block_fails_is_closed_and_not_synced(
    tmp_path: Path, synced: list[int]
) -> None:
    with pytest.raises(KeyError), DurableFile(tmp_path / "a") as file:
        file.write(b"never flushed")
        raise KeyError
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file_number(file))
    assert synced == [] and (tmp_path / "a").read_bytes() == b""


@pytest.mark.parametrize("most", [None, 3000], ids=["whole writes", "short writes"])
def test_views_of_any_size_are_appended_in_order_in_even_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    monkeypatch.setattr("holdfast.utils.files._BLOCK_BYTES", 10_000)
    ends, writev, dice = [], os.writev, random.Random(0)

    def record(fd: int, views: list[memoryview]) -> int:
        ends.append(os.lseek(fd, 0, os.SEEK_CUR) + sum(map(len, views)))
        return writev(fd, views if most is None else [views[0][:most]])

    monkeypatch.setattr(os, "writev", record)
    sizes = [0, 1, 9_999, 25_000, 10_000, *(dice.randrange(300) for _ in range(3000)), 40_001, 0]
    views = [dice.randbytes(size) for size in sizes]
    with DurableFile(tmp_path / "a") as file:
        file.write(b"first")
        file.write_views(views)
        file.write_views([])
        file.write(b"last")
    expected = b"".join([b"first", *views, b"last"])
    assert (tmp_path / "a").read_bytes() == expected and file.bytes == len(expected)
    assert file.digest == file_digest(tmp_path / "a")
    assert all(end % 10_000 == 0 for end in ends if end < len(expected) - len(b"last"))


def file_number(file: DurableFile) -> int:
    """The descriptor, or -1 once it is closed."""
    try:
        return file._file.fileno()
    except ValueError:
        return -1


def _write_beyond_a_limit(rank: int, world_size: int, folder: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    for name, pieces in (("in write", [b"x" * 100_000, b"y"]), ("in close", [b"x" * 1001])):
        with (
            pytest.raises(OSError, match="File too large") as caught,
            DurableFile(Path(folder) / name) as file,
        ):
            for piece in pieces:
                file.write(piece)
        assert caught.value.errno == errno.EFBIG and caught.value.__context__ is None, (
            "it was tried again"
        )
        assert file_number(file) == -1
        del file
        with open(Path(folder) / f"{name} after", "xb") as other:  # may get the same descriptor
            assert other.tell() == 0
        assert (Path(folder) / f"{name} after").stat().st_size == 0


def test_a_refused_write_is_reported_once_and_the_file_is_closed(tmp_path: Path) -> None:
    run_ranks(_write_beyond_a_limit, 1, str(tmp_path))


def test_free_space_is_measured_at_the_nearest_existing_folder(tmp_path: Path) -> None:
    require_free_space(tmp_path / "not" / "there", 1)
    status = os.statvfs(tmp_path)
    with pytest.raises(
        CheckpointWriteError, match=r"not/there needs \d+ bytes, its file system has \d+ free"
    ):
        require_free_space(tmp_path / "not" / "there", status.f_blocks * status.f_frsize + 1)
    require_free_space("/proc", 1 << 60)  # it does not count blocks


def test_a_file_system_without_free_space_figures_is_a_write_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: object) -> os.statvfs_result:
        raise OSError(
            errno.ESTALE, os.strerror(errno.ESTALE)
        )  # a network file system without its server

    monkeypatch.setattr(os, "statvfs", stale)
    with pytest.raises(
        CheckpointWriteError, match=r"cannot ask for the free space of .*Stale file handle"
    ):
        require_free_space(tmp_path, 1)


def test_replace_atomically_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    for data in (b"first", b"", b"x" * 100_000):
        replace_atomically(tmp_path / "tracker", data)
        assert (tmp_path / "tracker").read_bytes() == data
    assert os.listdir(tmp_path) == ["tracker"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_atomically(tmp_path / "folder", b"")
    assert sorted(os.listdir(tmp_path)) == ["folder", "tracker"]


def _write_for_ever(path: Path, started: Any) -> None:
    for i in count():
        replace_atomically(path, bytes([i % 251]) * 300_000)
        if i == 0:
            started.set()


def test_a_killed_writer_leaves_the_whole_old_or_the_whole_new_contents(tmp_path: Path) -> None:
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    path, rng = tmp_path / "tracker", random.Random(0)
    for _ in range(5):
        started = context.Event()
        writer = context.Process(target=_write_for_ever, args=(path, started))
        writer.start()
        assert started.wait(stretched(30))
        time.sleep(rng.uniform(0, 0.05))
        writer.kill()
        writer.join()
        contents = path.read_bytes()
        assert contents == contents[:1] * 300_000


def test_digest_is_xxh3_128_of_the_bytes_whatever_the_size(tmp_path: Path) -> None:
    for size in (0, 1, (8 << 20) - 1, (8 << 20) + 1):
        data = os.urandom(size)
        (tmp_path / "data").write_bytes(data)
        assert file_digest(tmp_path / "data") == f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"


def test_a_window_of_a_file_holds_its_bytes_none_behind_its_end(tmp_path: Path) -> None:
    data = os.urandom(20_000)
    (tmp_path / "data").write_bytes(data)
    with open(tmp_path / "data", "rb") as file:
        for begin, length in ((0, 20_000), (1, 1), (5000, 15_000), (8192, 4096)):
            window = map_window(file.fileno(), begin, length)
            assert window is not None and bytes(window) == data[begin : begin + length]
            window[:1] = bytes([data[begin] ^ 1])  # for this process alone
        assert map_window(file.fileno(), 16_384, 10_000) is None
    assert (tmp_path / "data").read_bytes() == data


def test_replace_atomically_writes_over_what_a_killed_writer_left(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(b"half")
    replace_atomically(tmp_path / "tracker", b"whole", tmp_path / "part")
    assert (tmp_path / "tracker").read_bytes() == b"whole" and os.listdir(tmp_path) == ["tracker"]


def test_commit_makes_a_staged_folder_visible_and_refuses_an_existing_name(tmp_path: Path) -> None:
    final = tmp_path / "global_step_1"
    staging = staging_path(final)
    assert (
        staging.parent == tmp_path
        and staging.name.startswith(".staging-")
        and staging != staging_path(final)
    )
    (staging / "actor").mkdir(parents=True)
    write_durably(staging / "actor" / "x", b"1")
    commit_folder(staging, final)
    assert os.listdir(tmp_path) == ["global_step_1"] and list(walk_files(final)) == ["actor/x"]

    (again := staging_path(final)).mkdir()
    with pytest.raises(FileExistsError, match="never written over"):
        commit_folder(again, final)
    assert again.exists() and (final / "actor" / "x").read_bytes() == b"1"


@pytest.mark.parametrize("name", [".", "", None])
def test_the_current_folder_is_not_replaced_even_if_it_is_empty(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    final = tmp_path if name is None else name
    with pytest.raises(CheckpointExistsError, match="choose another path"), staged_folder(final):
        pass
    assert Path.cwd() == tmp_path and not os.listdir(tmp_path)


def test_commit_replaces_an_empty_folder_and_keeps_its_permissions(tmp_path: Path) -> None:
    final, staging = Path(tempfile.mkdtemp(dir=tmp_path)), tmp_path / ".staging"
    staging.mkdir()
    (staging / "x").touch()
    commit_folder(staging, final)
    assert (
        os.listdir(final) == ["x"]
        and stat.S_IMODE(final.stat().st_mode) == 0o700
        and not staging.exists()
    )


def test_commit_refuses_a_link_to_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "final").symlink_to(tmp_path / "empty")
    (tmp_path / ".staging").mkdir()
    with pytest.raises(FileExistsError):
        commit_folder(tmp_path / ".staging", tmp_path / "final")


def test_commit_refuses_a_dangling_link_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "final").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".staging").mkdir()
    with pytest.raises(FileExistsError):
        commit_folder(tmp_path / ".staging", tmp_path / "final")


def test_remove_folder_removes_visible_hidden_and_missing_folders(tmp_path: Path) -> None:
    for name in ("global_step_1", ".staging-x"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "file").write_bytes(b"1")
        remove_folder(tmp_path / name)
    remove_folder(tmp_path / "missing")
    assert os.listdir(tmp_path) == []


def test_walk_files_is_sorted_and_sees_hidden_files_but_no_folders(tmp_path: Path) -> None:
    for name in ("b", "a/z", "a/.metadata", "c/d/e"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert list(walk_files(tmp_path)) == ["a/.metadata", "a/z", "b", "c/d/e"]


def test_new_parents_are_made_and_what_cannot_be_removed_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_durably(tmp_path / "a" / "b" / "c")
    make_durably(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "a", tmp_path / "file", tmp_path / "missing"):
        remove_or_log(path)
    assert list(tmp_path.iterdir()) == []
    remove_or_log("/proc/self/mem")
    assert "cannot remove /proc/self/mem" in caplog.text
