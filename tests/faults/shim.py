"""Observe, count, record and disturb every call by which this process changes files below a folder.

`Shim` stands between Python and the operating system. It replaces the functions of `os` that open,
write, sync, rename and remove, and `open` itself, whose files become Python's usual buffers over a
raw file that reports each write(2). A hook sees every call *before* it is made. The hook may raise
an `OSError` instead, or end the process. Successful calls are recorded with all of their data, so
that `replay` can build the same folder again, and a simulator of power cuts can leave some of them
out.

Observed calls: open (also for reading, because it can fail), list (can fail too, but is not
recorded), write, pwrite, fsync, fdatasync, rename, link, symlink, unlink, mkdir, rmdir, truncate
and chmod. Variants have the same name: ``sendfile``, ``copy_file_range`` and ``writev`` are writes,
``replace`` is a rename, ``ftruncate`` and ``posix_fallocate`` are truncates. Descriptors are
resolved by ``/proc``, so this works only on Linux.

Calls inside native code are not observed: ``tokenizer.save_pretrained`` (tokenizers, Rust),
``save_file`` (safetensors, Rust), ``torch.save`` and ``numpy.ndarray.tofile`` with a file name,
memory maps. test_shim.py compares the record of each scenario with the output of strace.
"""

import builtins
import io
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fcntl import F_GETFL, fcntl
from pathlib import Path
from types import ModuleType
from typing import Any

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Call:
    """One system call on a path below the root of a `Shim`.

    Attributes:
        name: "open", "list", "write", "pwrite", "fsync", "fdatasync", "rename", "link", "symlink",
            "unlink", "mkdir", "rmdir", "truncate" or "chmod".
        path: absolute path, resolved from a descriptor if necessary. The old name for rename, the
            new one for link and symlink.
        target: the new name for rename, the existing file for link and symlink.
        offset: position in the file for write and pwrite (also if the caller gave none).
        data: bytes for write and pwrite. In a record, the bytes that were really written.
        size: new size for truncate, mode for chmod and mkdir.
        flags: flags of open (``os.O_CREAT`` ...).
        time_ns: CLOCK_MONOTONIC just before the call, comparable between processes.
        rank: rank of the process.
    """

    name: str
    path: str
    target: str | None = None
    offset: int | None = None
    data: bytes | None = None
    size: int | None = None
    flags: int | None = None
    time_ns: int = 0
    rank: int = 0

    def __str__(self) -> str:
        data = "" if self.data is None else f", {len(self.data)} bytes at {self.offset}"
        return (
            f"{self.name}({self.path}{data}{'' if self.target is None else f' -> {self.target}'})"
        )


Hook = Callable[[Call], None]


class Shim:
    """Report every call of this process on a path below ``root`` during the block.

    Args:
        root: an existing folder.
        hook: called before each call, by the same thread. The caller gets an `OSError` that it
            raises.
        log: file to which every successful call is appended, for `read_calls`. It survives the
            process.
        rank: value of `Call.rank`. None: the environment's ``RANK``, or 0.

    Attributes:
        calls: successful calls, in order.
    """

    def __init__(
        self,
        root: StrPath,
        hook: Hook | None = None,
        *,
        log: StrPath | None = None,
        rank: int | None = None,
    ) -> None:
        self.root = os.path.realpath(root)
        self.calls: list[Call] = []
        self._hook, self._log, self._log_fd = hook, log, -1
        self._rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self._lock = threading.RLock()
        self._real: dict[tuple[ModuleType, str], Any] = {}

    def __enter__(self) -> "Shim":
        if self._log is not None:
            self._log_fd = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for name in [name for name in vars(Shim) if name.startswith("_os_")]:
            self._put(os, name.removeprefix("_os_"), getattr(self, name))
        self._put(builtins, "open", self._open_file)
        self._put(io, "open", self._open_file)
        return self

    def __exit__(self, *_: object) -> None:
        for (module, name), real in self._real.items():
            setattr(module, name, real)
        if self._log is not None:
            os.close(self._log_fd)

    def path_of(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Absolute path of a name or descriptor, without following a last link. None if it is not
        below the root.
        """
        if isinstance(path, int):
            found = _readlink_or_none(f"/proc/self/fd/{path}")
            if found is None or found.endswith(" (deleted)"):
                return None
        else:
            base = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
            parent, name = os.path.split(os.path.normpath(os.path.join(base, os.fsdecode(path))))
            found = os.path.join(os.path.realpath(parent), name)
        return found if found == self.root or found.startswith(self.root + os.sep) else None

    def _put(self, module: ModuleType, name: str, replacement: Callable[..., Any]) -> None:
        self._real[module, name] = getattr(module, name)
        setattr(module, name, replacement)

    def _make(self, os_name: str, args: tuple, kwargs: dict[str, Any], call: Call | None) -> Any:
        """Report ``call`` and make it with the real function. None stands for a call that the shim
        ignores.
        """
        real = self._real[os, os_name]
        if call is None:
            return real(*args, **kwargs)
        call = replace(call, time_ns=time.monotonic_ns(), rank=self._rank)
        if self._hook is not None:
            with self._lock:
                self._hook(call)
        result = real(*args, **kwargs)
        if call.data is not None:
            call = replace(call, data=call.data[:result])
        with self._lock:
            if call.name == "list":
                return result
            self.calls.append(call)
            if self._log is not None:
                self._real[os, "write"](self._log_fd, pickle.dumps(call))
        return result

    # Each replaces the function of `os` with the same name, and passes all other arguments on.

    def _os_open(
        self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        found = self.path_of(path, dir_fd)
        call = None if found is None else Call("open", found, flags=flags, size=mode)
        return self._make("open", (path, flags, mode), {"dir_fd": dir_fd}, call)

    def _os_write(self, fd: int, data: Any) -> int:
        return self._make("write", (fd, data), {}, self._written("write", fd, data, None))

    def _os_writev(self, fd: int, buffers: Any) -> int:
        data = b"".join(bytes(buffer) for buffer in buffers)
        return self._make("writev", (fd, buffers), {}, self._written("write", fd, data, None))

    def _os_pwrite(self, fd: int, data: Any, offset: int) -> int:
        return self._make(
            "pwrite", (fd, data, offset), {}, self._written("pwrite", fd, data, offset)
        )

    def _os_sendfile(self, out_fd: int, in_fd: int, offset: int | None, count: int) -> int:
        data = self._copied(out_fd, in_fd, offset, count)
        return self._make(
            "sendfile",
            (out_fd, in_fd, offset, count),
            {},
            self._written("write", out_fd, data, None),
        )

    def _os_copy_file_range(
        self,
        src: int,
        dst: int,
        count: int,
        offset_src: int | None = None,
        offset_dst: int | None = None,
    ) -> int:
        call = self._written("write", dst, self._copied(dst, src, offset_src, count), offset_dst)
        return self._make("copy_file_range", (src, dst, count, offset_src, offset_dst), {}, call)

    def _copied(self, dst: int, src: int, offset: int | None, count: int) -> bytes:
        if self.path_of(dst) is None:
            return b""
        return os.pread(src, count, os.lseek(src, 0, os.SEEK_CUR) if offset is None else offset)

    def _written(self, name: str, fd: int, data: Any, offset: int | None) -> Call | None:
        """Build the call for ``data`` at ``offset``. None means the position of the descriptor."""
        path = self.path_of(fd)
        if path is None:
            return None
        if offset is None:
            at_end = fcntl(fd, F_GETFL) & os.O_APPEND
            offset = os.fstat(fd).st_size if at_end else os.lseek(fd, 0, os.SEEK_CUR)
        return Call(name, path, data=bytes(data), offset=offset)

    def _os_fsync(self, fd: Any) -> None:
        self._one_path("fsync", "fsync", fd if isinstance(fd, int) else fd.fileno())

    def _os_fdatasync(self, fd: Any) -> None:
        self._one_path("fdatasync", "fdatasync", fd if isinstance(fd, int) else fd.fileno())

    def _os_unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._one_path("unlink", "unlink", path, dir_fd=dir_fd)

    def _os_remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._one_path("remove", "unlink", path, dir_fd=dir_fd)

    def _os_rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._one_path("rmdir", "rmdir", path, dir_fd=dir_fd)

    def _os_mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._one_path("mkdir", "mkdir", path, mode, size=mode, dir_fd=dir_fd)

    def _os_chmod(self, path: Any, mode: int, **kwargs: Any) -> None:
        self._one_path("chmod", "chmod", path, mode, size=mode, **kwargs)

    def _os_fchmod(self, fd: int, mode: int) -> None:
        self._one_path("fchmod", "chmod", fd, mode, size=mode)

    def _os_truncate(self, path: Any, length: int) -> None:
        self._one_path("truncate", "truncate", path, length, size=length)

    def _os_ftruncate(self, fd: int, length: int) -> None:
        self._one_path("ftruncate", "truncate", fd, length, size=length)

    def _os_posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        size = max(offset + length, os.fstat(fd).st_size)
        self._one_path("posix_fallocate", "truncate", fd, offset, length, size=size)

    def _os_listdir(self, path: Any = ".") -> list[Any]:
        return self._listed("listdir", path)

    def _os_scandir(self, path: Any = ".") -> Any:
        return self._listed("scandir", path)

    def _listed(self, os_name: str, path: Any) -> Any:
        found = self.path_of("." if path is None else path)
        return self._make(os_name, (path,), {}, None if found is None else Call("list", found))

    def _one_path(
        self, os_name: str, name: str, path: Any, *rest: int, size: int | None = None, **kwargs: Any
    ) -> None:
        found = self.path_of(path, kwargs.get("dir_fd"))
        self._make(
            os_name, (path, *rest), kwargs, None if found is None else Call(name, found, size=size)
        )

    def _os_rename(self, src: Any, dst: Any, **dir_fds: Any) -> None:
        self._two_paths("rename", "rename", src, dst, dir_fds)

    def _os_replace(self, src: Any, dst: Any, **dir_fds: Any) -> None:
        self._two_paths("replace", "rename", src, dst, dir_fds)

    def _os_link(self, src: Any, dst: Any, **kwargs: Any) -> None:
        self._two_paths("link", "link", src, dst, kwargs)

    def _os_symlink(self, src: Any, dst: Any, *rest: Any, **kwargs: Any) -> None:
        found = self.path_of(dst, kwargs.get("dir_fd"))
        call = None if found is None else Call("symlink", found, target=os.fsdecode(src))
        self._make("symlink", (src, dst, *rest), kwargs, call)

    def _two_paths(
        self, os_name: str, name: str, src: Any, dst: Any, kwargs: dict[str, Any]
    ) -> None:
        old, new = (
            self.path_of(src, kwargs.get("src_dir_fd")),
            self.path_of(dst, kwargs.get("dst_dir_fd")),
        )
        call = None
        if (
            old is not None or new is not None
        ):  # a rename into the root, out of the root, or inside it
            old, new = (
                old or os.path.abspath(os.fsdecode(src)),
                new or os.path.abspath(os.fsdecode(dst)),
            )
            call = Call(name, old, target=new) if name == "rename" else Call(name, new, target=old)
        self._make(os_name, (src, dst), kwargs, call)

    # Files

    def _open_file(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """Do the same as the builtin `open`, over an observed raw file."""
        if self.path_of(file) is None:
            return self._real[io, "open"](
                file, mode, buffering, encoding, errors, newline, closefd, opener
            )
        raw_mode, text = mode.replace("b", "").replace("t", ""), "b" not in mode
        raw = _RawFile(file, raw_mode, closefd, opener or _open_as_builtin)
        if buffering == 0:
            if text:
                raw.close()
                raise ValueError("can't have unbuffered text I/O")
            return raw
        n_bytes = buffering if buffering > 1 else os.fstat(raw.fileno()).st_blksize
        buffer_type: Any = io.BufferedReader if raw_mode == "r" else io.BufferedWriter
        buffered = (io.BufferedRandom if "+" in raw_mode else buffer_type)(raw, n_bytes)
        return (
            io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)
            if text
            else buffered
        )


class _RawFile(io.FileIO):
    """A raw file that calls `os`, where the shim observes it."""

    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        os.ftruncate(self.fileno(), size)
        return size


def _open_as_builtin(path: Any, flags: int) -> int:
    return os.open(path, flags, 0o666)


def _readlink_or_none(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:  # not a descriptor, which the real call will report
        return None


def write_half(call: Call) -> None:
    """Write the first half of the data, like a process that is killed in the middle.

    For a hook that prevents the call itself. Bypasses the shim.
    """
    assert call.data is not None and call.offset is not None
    with io.FileIO(call.path, "r+") as file:
        file.seek(call.offset)
        file.write(call.data[: len(call.data) // 2])


@contextmanager
def record(
    root: StrPath, log: StrPath | None = None, *, rank: int | None = None
) -> Iterator[list[Call]]:
    """Record the calls of this process below ``root`` during the block, and in ``log`` for the case
    of a kill.
    """
    with Shim(root, log=log, rank=rank) as shim:
        yield shim.calls


def read_calls(*logs: StrPath) -> list[Call]:
    """Calls logged by several processes, ordered by time."""
    calls = []
    for log in logs:
        with open(log, "rb") as file:
            while True:
                try:
                    calls.append(pickle.load(file))
                except EOFError:
                    break
    return sorted(calls, key=lambda call: call.time_ns)


def not_durable(calls: Iterable[Call], final: str) -> list[str]:
    """Parts of the folder ``final`` that a power cut could still remove, after ``calls`` have
    renamed it into place.

    Every file must have been fsynced after its last write, and every folder after its last new
    entry, before the rename. The parent must have been fsynced after the rename. Ranks may sync for
    each other.

    Args:
        calls: calls of all ranks, ordered by time.
        final: absolute path of the folder.
    """
    calls = list(calls)
    renamed = max(
        i for i, call in enumerate(calls) if call.name == "rename" and call.target == final
    )
    staging, dirty = calls[renamed].path, dict[str, None]()
    for call in calls[:renamed]:
        if call.name in ("fsync", "fdatasync"):
            dirty.pop(call.path, None)
        elif call.path == staging or call.path.startswith(staging + os.sep):
            creates = call.name in ("mkdir", "link", "symlink") or (call.flags or 0) & os.O_CREAT
            if creates or call.name in ("write", "pwrite", "truncate"):
                dirty[call.path] = None
            if creates or call.name in ("unlink", "rmdir", "rename"):
                dirty[os.path.dirname(call.path)] = None
            if call.name in ("unlink", "rmdir", "rename"):
                dirty.pop(call.path, None)
    parent = os.path.dirname(final)
    last = any(call.name == "fsync" and call.path == parent for call in calls[renamed:])
    return [path for path in dirty if path.startswith(staging)] + [parent] * (not last)


def replay(calls: Iterable[Call], root: StrPath, into: StrPath) -> None:
    """Repeat calls that were recorded below ``root``, below the existing folder ``into``."""
    root = os.path.realpath(root)
    for call in calls:
        path = Path(into, os.path.relpath(call.path, root))
        match call.name:
            case "open" if call.flags is not None and call.flags & (os.O_CREAT | os.O_TRUNC):
                os.close(os.open(path, call.flags & ~os.O_EXCL, call.size or 0o666))
            case "write" | "pwrite":
                with io.FileIO(path, "r+") as file:
                    file.seek(call.offset or 0)
                    file.write(call.data or b"")
            case "truncate":
                os.truncate(path, call.size or 0)
            case "rename":
                os.rename(path, Path(into, os.path.relpath(call.target or "", root)))
            case "link":
                os.link(Path(into, os.path.relpath(call.target or "", root)), path)
            case "symlink":
                os.symlink(call.target or "", path)
            case "mkdir":
                os.mkdir(path, call.size or 0o777)
            case "unlink":
                os.unlink(path)
            case "rmdir":
                os.rmdir(path)
            case "chmod":
                os.chmod(path, call.size or 0)
