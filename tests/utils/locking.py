"""A separate process with a `FolderLock`, controlled by the test."""

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from holdfast.utils.errors import FolderInUseError
from holdfast.utils.folder_lock import FolderLock
from tests.helpers import PRELOAD
from tests.limits import stretched


def acquire(lock: FolderLock, timeout_s: float) -> None:
    lock.acquire(timeout_s)


def release(lock: FolderLock) -> None:
    lock.release()


def become_nobody(lock: FolderLock) -> None:
    """Drop all privileges beyond file permissions."""
    if os.geteuid() == 0:
        os.seteuid(65534)


def fork(lock: FolderLock) -> dict[str, Any]:
    """Fork a child that uses its copy of the lock, reports the result, and stays alive."""
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        said = [f"held: {lock.held}"]
        lock.release()
        try:
            lock.acquire(0)
        except FolderInUseError as error:
            said.append(str(error))
        os.write(theirs, "; ".join(said).encode())
        time.sleep(60)
        os._exit(0)
    return {"pid": pid, "said": os.read(ours, 10_000).decode()}


def churn(lock: FolderLock, seconds: float) -> None:
    """Acquire and release the lock repeatedly."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            lock.acquire(0)
            lock.release()
        except FolderInUseError:
            pass


def _serve(path: Path, pipe: Connection) -> None:
    lock = FolderLock(path)
    while True:
        command, args = pipe.recv()
        try:
            pipe.send(("ok", command(lock, *args)))
        except Exception as error:
            pipe.send((type(error).__name__, str(error)))


class Job:
    """A process with a `FolderLock`, controlled by the test."""

    def __init__(self, path: Path) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(path, theirs), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def start(self, command: Callable[..., Any], *args: Any) -> None:
        self.pipe.send((command, args))

    def result(self, timeout_s: float = 20) -> tuple[str, Any]:
        assert self.pipe.poll(stretched(timeout_s)), "the job does not answer"
        return self.pipe.recv()

    def do(self, command: Callable[..., Any], *args: Any) -> tuple[str, Any]:
        self.start(command, *args)
        return self.result()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
