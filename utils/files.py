"""Durable files on a local (or NFS) folder: fsync, atomic replace, digests, and staged folders.

POSIX makes a rename atomic but not durable: the data, the file's name and the renamed folder each need
an fsync of their own, in that order (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014).
"""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import xxhash

from .logging import get_logger

logger = get_logger(__name__)

_READ_BYTES = 8 << 20


def fsync_file(path: str | os.PathLike[str]) -> None:
    """Force the contents of a file to stable storage."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_dir(path: str | os.PathLike[str]) -> None:
    """Force a folder's entries (names, renames, removals) to stable storage."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_durably(folder: str | os.PathLike[str]) -> None:
    """Make a folder and its parents, the name of each on stable storage."""
    folder = Path(folder)
    if not folder.is_dir():
        make_durably(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_dir(folder.parent)


def fsync_tree(path: str | os.PathLike[str]) -> None:
    """Fsync every folder below and including ``path``, deepest first; files are their writers' business."""
    for folder, _, _ in os.walk(path, topdown=False):
        fsync_dir(folder)


def write_durably(path: str | os.PathLike[str], data: bytes) -> None:
    """Create ``path`` with ``data`` and fsync it. The caller fsyncs the folder.

    Raises:
        FileExistsError: ``path`` exists; nothing is ever written over.
    """
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Make ``path`` hold ``data``: a reader, or a crash, sees the old contents or the new, never a mixture."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_durably(temporary, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)


def file_digest(path: str | os.PathLike[str]) -> str:
    """``"xxh3_128:<hex>"`` of a file's bytes, read in bounded chunks."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return f"xxh3_128:{digest.hexdigest()}"


def staging_path(final: str | os.PathLike[str]) -> Path:
    """A fresh hidden sibling of ``final`` to write into before `commit_folder`; not created."""
    final = Path(final)
    return final.with_name(f".staging-{final.name}-{uuid.uuid4().hex[:12]}")


def commit_folder(staging: str | os.PathLike[str], final: str | os.PathLike[str]) -> None:
    """Make a completely written folder visible under its final name, durably.

    The files must have been fsynced by those who wrote them; this fsyncs the folders, renames, and
    fsyncs the parent.

    Raises:
        FileExistsError: ``final`` exists; nothing is ever written over.
    """
    fsync_tree(staging)
    if os.path.lexists(final):
        raise FileExistsError(f"{final} exists already and is never written over")
    os.rename(staging, final)
    fsync_dir(Path(final).parent)


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Remove a folder so that no reader sees half of it: rename it to a hidden name first, then delete."""
    path = Path(path)
    doomed = path if path.name.startswith(".") else path.with_name(f".retired-{path.name}-{uuid.uuid4().hex[:12]}")
    with contextlib.suppress(FileNotFoundError):
        if doomed != path:
            os.rename(path, doomed)
            fsync_dir(path.parent)
        shutil.rmtree(doomed)


def remove_or_log(path: str | os.PathLike[str]) -> None:
    """`remove_folder`, or remove a file; what cannot be removed is logged and left: it costs space, not the run."""
    try:
        if os.path.isdir(path):
            remove_folder(path)
        else:
            Path(path).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("cannot remove %s: %s", path, error)


def walk_files(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Every regular file below ``folder``, as sorted POSIX paths relative to it."""
    root = Path(folder)
    yield from sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
