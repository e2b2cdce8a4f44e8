"""Jobs in separate processes that are killed, forked from a process that has already imported the
hosts.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.helpers import free_port
from tests.limits import stretched

PRELOAD = ("tests.integrations.trainer_job",)


def run_job(
    job: Callable[..., None], folder: Path, *args: Any, ranks: int = 1, timeout_s: float = 120
) -> list[int]:
    """Run ``job(folder, *args)`` in one process, or in ``ranks`` processes like torchrun. Returns
    their exit codes.

    If one fails, the others are killed. Their output is in ``folder/log``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes = []
    for rank in range(ranks):
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
        }
        given = (
            {key: str(value) for key, value in (environment | {"MASTER_PORT": port}).items()}
            if ranks > 1
            else {}
        )
        processes.append(context.Process(target=_run, args=(folder, given, job, args)))
        processes[-1].start()
    deadline = time.monotonic() + stretched(timeout_s)
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                time.sleep(0.2)
                break
            time.sleep(0.02)
        else:
            assert time.monotonic() < deadline, (
                f"still running after {timeout_s} s:\n{(folder / 'log').read_text()}"
            )
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [process.exitcode or 0 for process in processes]


def run_killed(
    job: Callable[..., None], folder: Path, kills: list[tuple[Any, ...]], *last: Any, ranks: int = 1
) -> None:
    """Run ``job`` with each of ``kills`` as its arguments, which must end in SIGKILL, then with
    ``last`` to its end.
    """
    for args in kills:
        codes = run_job(job, folder, *args, ranks=ranks)
        assert -signal.SIGKILL in codes, (
            f"{args} ended with {codes}:\n{(folder / 'log').read_text()[-4000:]}"
        )
    codes = run_job(job, folder, *last, ranks=ranks)
    assert codes == [0] * ranks, f"{codes}:\n{(folder / 'log').read_text()[-4000:]}"


def _run(
    folder: Path, environment: Mapping[str, str], job: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    job(folder, *args)
