"""A guarded program and all its processes end when the program, the guard or the process that
started them ends.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from holdfast.utils.guard import __file__ as guard_file
from holdfast.utils.guard import end_guarded, guarded_pid, start_guarded
from tests.limits import stretched, wait_until
from tests.live_vllm.live_server import LiveServer
from tests.recover.triggers.jobs import job
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(60)

_SERVER = """
import http.server, os, signal, sys, time
folder, port, leaves = sys.argv[1:4]

def work(leave):
    if leave:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{folder}/{os.getpid()}", "w").close()
    while True:
        time.sleep(60)

def fork(leave=False):
    if os.fork() == 0:
        if os.fork() == 0:
            work(leave)
        work(False)

fork()
if leaves == "leaves":
    fork(leave=True)
open(f"{folder}/{os.getpid()}", "w").close()
handler = http.server.SimpleHTTPRequestHandler
http.server.HTTPServer(("127.0.0.1", int(port)), handler).serve_forever()
"""
"""A server with processes of its own, in two generations, each of which notes itself in a folder.
"""


@pytest.fixture
def server(tmp_path: Path) -> list[str]:
    (tmp_path / "server.py").write_text(_SERVER)
    (tmp_path / "pids").mkdir()
    return [sys.executable, "-S", str(tmp_path / "server.py"), str(tmp_path / "pids")]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Callable[[int], list[psutil.Process]]]:
    """A function that waits until ``count`` processes of the server run."""
    found: list[psutil.Process] = []

    def wait(count: int) -> list[psutil.Process]:
        end = time.monotonic() + stretched(20)
        while len(names := os.listdir(tmp_path / "pids")) < count:
            assert time.monotonic() < end, names
            time.sleep(0.01)
        found.extend(psutil.Process(int(name)) for name in names)
        return found

    yield wait
    for process in found:
        if process.is_running():
            process.kill()


def assert_ended(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=stretched(10))
    assert alive == []


_DRIVER = """
import sys, time
from holdfast.utils.guard import start_guarded
sheltered = sys.argv[1] == "sheltered"
start_guarded(sys.argv[2:], stop_timeout_s=0.5, sheltered=sheltered)
time.sleep(60)
"""


def test_all_processes_of_a_program_end_with_a_killed_driver(
    server: list[str], processes: Callable
) -> None:
    driver = subprocess.Popen([sys.executable, "-c", _DRIVER, "alone", *server, "0", "leaves"])
    started = processes(5)
    driver.kill()
    driver.wait()
    assert_ended(started)


def test_the_processes_of_a_program_that_was_killed_end_too(
    server: list[str], processes: Callable
) -> None:
    guard = start_guarded([*server, "0", "leaves"], stop_timeout_s=0.2)
    started = processes(5)
    os.kill(guarded_pid(guard), signal.SIGKILL)
    assert guard.wait(stretched(10)) == 128 + signal.SIGKILL
    assert_ended(started)


def test_a_keeper_ends_the_processes_of_a_guard_that_was_killed(
    server: list[str], processes: Callable
) -> None:
    guards = [start_guarded([*server, "0", "stays"]) for _ in range(2)]
    started = processes(6)
    guards[0].kill()
    began = time.monotonic()
    end_guarded(*guards)
    assert_ended(started)
    assert time.monotonic() - began < stretched(5), "SIGTERM is enough"


@pytest.mark.parametrize(
    ("who", "leaves", "count"),
    slow_but(
        [("shelter", "leaves", 5), ("program", "leaves", 5)],
        [("shelter", "leaves", 5), ("program", "leaves", 5), ("guard", "leaves", 5)],
    ),
)
def test_all_processes_of_a_sheltered_program_end_without_its_keeper(
    server: list[str], processes: Callable, who: str, leaves: str, count: int
) -> None:
    shelter = start_guarded([*server, "0", leaves], stop_timeout_s=0.2, sheltered=True)
    started = processes(count)
    program = guarded_pid(shelter, sheltered=True)
    assert program in [process.pid for process in started]
    victims = {"shelter": shelter.pid, "guard": guarded_pid(shelter), "program": program}
    os.kill(victims[who], signal.SIGKILL)
    assert_ended(started)
    shelter.wait()


@pytest.mark.slow
def test_a_sheltered_program_ends_with_a_driver_and_a_guard_that_are_killed_together(
    server: list[str], processes: Callable
) -> None:
    command = [sys.executable, "-c", _DRIVER, "sheltered", *server, "0", "leaves"]
    with subprocess.Popen(command) as driver:
        started = processes(5)
        (shelter,) = psutil.Process(driver.pid).children()
        (guard,) = shelter.children()
        for victim in (driver, guard):
            victim.kill()
        assert_ended([*started, shelter])


_SHARING = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=1)
open(sys.argv[1], "w").write(segment.name)
time.sleep(60)
"""


def test_shared_memory_goes_with_a_sheltered_program_whose_guard_is_killed(tmp_path: Path) -> None:
    named = tmp_path / "name"
    shelter = start_guarded([sys.executable, "-c", _SHARING, str(named)], sheltered=True)
    wait_until(lambda: named.exists() and named.read_text())
    segment = Path("/dev/shm") / named.read_text()
    assert segment.exists()
    os.kill(guarded_pid(shelter), signal.SIGKILL)
    shelter.wait(stretched(20))
    assert not segment.exists()


def test_a_keeper_ends_a_sheltered_program_and_gets_its_exit_code(
    server: list[str], processes: Callable
) -> None:
    shelter = start_guarded([*server, "0", "stays"], sheltered=True)
    started = processes(3)
    end_guarded(shelter)
    assert_ended(started)
    assert shelter.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("sheltered", [False, True])
def test_a_program_that_ends_at_once_is_noticed(sheltered: bool) -> None:
    guards = [start_guarded(["sh", "-c", "exit 3"], sheltered=sheltered) for _ in range(20)]
    assert [guard.wait(stretched(10)) for guard in guards] == [3] * 20


_SLOW_SHELTER = """
import os, runpy, sys, time
fork = os.fork

def fork_and_wait():
    pid = fork()
    if pid:
        time.sleep(0.5)
    return pid

os.fork = fork_and_wait
sys.argv = [sys.argv[1], str(os.getppid()), "1.0", "1", "sh", "-c", "exit 3"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A shelter that gets no processor time after its fork."""


def test_a_shelter_outlives_a_guard_that_is_faster_than_it() -> None:
    command = [sys.executable, "-c", _SLOW_SHELTER, guard_file]
    done = subprocess.run(command, start_new_session=True, timeout=stretched(20))
    assert done.returncode == 3


def test_a_program_that_does_not_exist_is_refused() -> None:
    with pytest.raises(FileNotFoundError, match="there is no program /nowhere/python"):
        start_guarded(["/nowhere/python"])


def run_live_server(pipe: Connection, server: list[str], folder: Path) -> None:
    live = LiveServer(folder, folder)
    live._command = [*server, "0", "stays"]
    live.start()
    pipe.poll(60)


def test_a_server_of_the_live_tests_ends_with_its_processes_if_they_are_killed(
    tmp_path: Path, server: list[str], processes: Callable
) -> None:
    with job(partial(run_live_server, server=server, folder=tmp_path), tmp_path) as driver:
        started = processes(3)
        driver.process.kill()
        driver.process.join()
        assert_ended(started)
