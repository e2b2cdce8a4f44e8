"""The start time of a process, and the processes that end with torchrun."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.utils.processes import process_started_at, processes_of_group


def test_the_start_is_what_the_operating_system_says() -> None:
    assert abs(process_started_at() - psutil.Process().create_time()) < 1
    assert process_started_at() < time.time()


def test_the_start_is_the_same_at_every_call() -> None:
    assert len({process_started_at() for _ in range(100)}) == 1


ROOT = Path(__file__).parents[2]
_RANK = """
import ctypes, subprocess, sys
from holdfast.utils.processes import die_with_torchrun
die_with_torchrun()
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
print(number.value, flush=True)
if len(sys.argv) == 2:
    subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[1], "the last one"])
"""


def test_a_rank_ends_with_torchrun_and_what_the_rank_has_started_does_not() -> None:
    rank = [sys.executable, "-c", _RANK, _RANK]
    env = os.environ | {"TORCHELASTIC_RUN_ID": "one"}
    found = subprocess.run(rank, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["9", "0"]


def test_processes_that_proc_hides_are_no_members_of_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_text = Path.read_text

    def hiding(path: Path, *args: Any, **options: Any) -> str:
        if path == Path("/proc/1/stat"):  # as proc(5) does with hidepid=1
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", hiding)
    own = [member.pid for member in processes_of_group(os.getpgrp())]
    assert os.getpid() in own
