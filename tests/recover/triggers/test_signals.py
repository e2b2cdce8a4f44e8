"""Signals, notices and deadlines: the run stops at the next step boundary, and in time."""

import fcntl
import logging
import os
import random
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from holdfast.recover.triggers import (
    SAVE_MARGIN,
    SLACK_S,
    UNMEASURED_SAVE_S,
    StopNotice,
    StopRequests,
)
from holdfast.utils.errors import ConfigError
from tests.limits import stretched
from tests.recover.triggers.jobs import Job, job

pytestmark = pytest.mark.timeout(60)

ALL_SIGNALS = ["SIGTERM", "SIGUSR1", "SIGINT"]


class Clock:
    """Unix time controlled by the test."""

    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


def train_until_asked(pipe: Connection) -> None:
    """Train with output to standard error, then take a snapshot."""
    stop = StopRequests(ALL_SIGNALS, None)
    stop.signals.install()
    pipe.send("training")
    while (reason := stop.due(0, 0)) is None:
        for _ in range(20):
            sys.stderr.write("step\n")
    try:
        pipe.send(reason)
        pipe.poll(20)  # the snapshot
        pipe.send("saved")
    except KeyboardInterrupt:
        pipe.send("interrupted")


def fork_a_child(pipe: Connection, work: Callable[[], object] = lambda: time.sleep(60)) -> None:
    """A job with a child, like a data loader's worker. The child works, and then exits with 0."""
    stop = StopRequests(ALL_SIGNALS, None)
    stop.signals.install()
    if (pid := os.fork()) == 0:
        signal.alarm(120)  # ends the child in any case
        pipe.send("child runs")
        try:
            work()
        except KeyboardInterrupt:
            os._exit(3)
        os._exit(0)
    status = os.waitpid(pid, 0)[1] if pipe.poll(stretched(20)) and pipe.recv() == pid else None
    pipe.send((status, stop.due(0, 0)))


def fork_a_child_in_a_long_call(pipe: Connection) -> None:
    fork_a_child(pipe, lambda: sum(range(10**11)))  # an hour without a bytecode


def fork_a_child_in_a_blocking_read(pipe: Connection) -> None:
    reading, _ = os.pipe()
    fork_a_child(pipe, lambda: os.read(reading, 1))


N_CHILDREN = 100


def fork_children_and_end_them_at_once(pipe: Connection) -> None:
    stop = StopRequests(ALL_SIGNALS, None)
    stop.signals.install()
    for _ in range(N_CHILDREN):
        if (pid := os.fork()) == 0:
            signal.alarm(120)
            time.sleep(60)
            os._exit(0)
        os.kill(pid, signal.SIGTERM)
        pipe.send(
            os.waitpid(pid, 0)[1]
        )  # one by one: on a busy machine all of them take long, a lost signal 60 s
    pipe.send(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    stop.signals.uninstall()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_stops_the_run_at_the_next_step_boundary(tmp_path: Path, name: str) -> None:
    with job(train_until_asked, tmp_path) as running:
        assert running.receive() == "training"
        assert not running.pipe.poll(0.1)
        running.send_signal(getattr(signal, name))
        assert running.receive(timeout_s=2) == name
        running.send_signal(getattr(signal, name))  # schedulers repeat signals
        running.pipe.send("saved")
        assert running.receive() == "saved"
    assert set(running.stderr.read_text().splitlines()) == {"step"}


def test_the_first_ctrl_c_explains_itself_the_second_stops_at_once(tmp_path: Path) -> None:
    with job(train_until_asked, tmp_path) as running:
        assert running.receive() == "training"
        running.send_signal(signal.SIGINT)
        assert running.receive(timeout_s=2) == "SIGINT"
        said = [line for line in running.stderr.read_text().splitlines() if "holdfast" in line]
        assert said == ["holdfast: finishing the step, then a snapshot; Ctrl-C again stops at once"]
        running.send_signal(signal.SIGINT)
        assert running.receive(timeout_s=2) == "interrupted"


def test_ctrl_c_while_the_run_writes_to_a_full_pipe_is_harmless(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stderr")
    reader = os.open(tmp_path / "stderr", os.O_RDONLY | os.O_NONBLOCK)
    with job(train_until_asked, tmp_path) as running:
        assert running.receive() == "training"
        _wait_for(lambda: _unread_bytes(reader) > 0.99 * fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ))
        time.sleep(0.1)
        running.send_signal(
            signal.SIGINT
        )  # a handler that used sys.stderr would enter it twice and raise
        time.sleep(0.2)
        _wait_for(lambda: bool(os.read(reader, 1 << 16)) and running.pipe.poll(0.01))
        assert running.receive() == "SIGINT"
        running.pipe.send("saved")
        assert running.receive() == "saved"
    os.close(reader)


def _unread_bytes(fd: int) -> int:
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_ctrl_c_after_another_signal_is_still_the_first(tmp_path: Path) -> None:
    with job(train_until_asked, tmp_path) as running:
        assert running.receive() == "training"
        running.send_signal(signal.SIGTERM)
        assert running.receive(timeout_s=2) == "SIGTERM"
        running.send_signal(signal.SIGINT)
        assert not running.pipe.poll(0.3)
        running.pipe.send("saved")
        assert running.receive() == "saved"


@pytest.mark.parametrize(
    "run", [fork_a_child, fork_a_child_in_a_long_call, fork_a_child_in_a_blocking_read]
)
def test_a_forked_child_ends_by_the_signals_of_its_parent(
    tmp_path: Path, run: Callable[[Connection], None]
) -> None:
    with job(run, tmp_path) as running:
        pid = _child_of(running)
        os.kill(pid, signal.SIGTERM)
        running.pipe.send(pid)
        status, reason = running.receive()
        assert os.WTERMSIG(status) == signal.SIGTERM and reason is None


def test_a_child_that_is_ended_right_after_its_fork_ends(tmp_path: Path) -> None:
    with job(fork_children_and_end_them_at_once, tmp_path) as running:
        assert {running.receive() for _ in range(N_CHILDREN)} == {signal.SIGTERM}
        assert running.receive() == set()


def test_a_child_forked_after_the_handlers_were_given_back_has_those_of_its_parent(
    usr1_handler: list[int],
) -> None:
    stop = StopRequests(["SIGUSR1"], None)
    stop.signals.install()
    stop.signals.uninstall()
    if (pid := os.fork()) == 0:
        signal.raise_signal(signal.SIGUSR1)
        os._exit(len(usr1_handler))
    assert os.WEXITSTATUS(os.waitpid(pid, 0)[1]) == 1


def test_a_forked_child_goes_on_ignoring_what_its_parent_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # like nohup
    stop = StopRequests(["SIGHUP"], None)
    stop.signals.install()
    try:
        if (pid := os.fork()) == 0:
            signal.raise_signal(signal.SIGHUP)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        stop.signals.uninstall()
        signal.signal(signal.SIGHUP, before)


def test_a_forked_child_leaves_the_first_ctrl_c_to_its_parent(tmp_path: Path) -> None:
    with job(fork_a_child, tmp_path) as running:
        pid = _child_of(running)
        os.kill(pid, signal.SIGINT)
        time.sleep(0.3)
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
        os.kill(pid, signal.SIGINT)
        running.pipe.send(pid)
        status, reason = running.receive()
        assert os.WEXITSTATUS(status) == 3 and reason is None
    assert running.stderr.read_text() == ""


def _child_of(running: Job) -> int:
    assert running.receive() == "child runs"
    pid = running.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


@pytest.fixture
def usr1_handler() -> Iterator[list[int]]:
    """Install an earlier handler of SIGUSR1, and yield the signals that it gets."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    yield seen
    signal.signal(signal.SIGUSR1, before)


def test_handlers_that_were_there_are_not_called_but_put_back(usr1_handler: list[int]) -> None:
    names = ["SIGUSR1", "SIGUSR2", "SIGINT"]
    before = [signal.getsignal(getattr(signal, name)) for name in names]
    stop = StopRequests(names, None)
    stop.signals.install()
    stop.signals.install()
    signal.raise_signal(signal.SIGUSR1)
    assert stop.due(0, 0) == "SIGUSR1" and usr1_handler == []
    stop.signals.grant()
    stop.signals.uninstall()
    assert [signal.getsignal(getattr(signal, name)) for name in names] == before
    signal.raise_signal(signal.SIGUSR1)
    assert usr1_handler == [signal.SIGUSR1]
    stop.signals.uninstall()


def test_a_handler_installed_later_is_left_alone(usr1_handler: list[int]) -> None:
    stop = StopRequests(["SIGUSR1"], None)
    stop.signals.install()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    stop.signals.uninstall()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_it_can_be_installed_again(usr1_handler: list[int]) -> None:
    stop = StopRequests(["SIGUSR1"], None)
    for _ in range(2):
        stop.signals.install()
        stop.signals.uninstall()
    stop.signals.install()
    signal.raise_signal(signal.SIGUSR1)
    assert stop.due(0, 0) == "SIGUSR1" and usr1_handler == []
    stop.signals.uninstall()


def test_another_thread_installs_nothing_but_may_ask_for_a_stop(
    usr1_handler: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    stop, before = StopRequests(["SIGUSR1"], None), signal.getsignal(signal.SIGUSR1)

    def work() -> None:
        stop.signals.install()
        stop.signals.uninstall()
        stop.request(StopNotice("the node is drained"))

    with caplog.at_level(logging.DEBUG, logger="holdfast"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "not in the main thread" in caplog.text
    assert signal.getsignal(signal.SIGUSR1) == before
    assert stop.due(0, 0) == "the node is drained"


def uninstalled_by_another_thread(usr1_handler: list[int]) -> StopRequests:
    stop = StopRequests(["SIGUSR1"], None)
    stop.signals.install()
    thread = threading.Thread(target=stop.signals.uninstall)
    thread.start()
    thread.join()
    return stop


def test_signals_that_come_after_another_thread_has_uninstalled_reach_the_handler_before(
    usr1_handler: list[int],
) -> None:
    stop = uninstalled_by_another_thread(usr1_handler)
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    assert usr1_handler == [signal.SIGUSR1] * 2 and stop.due(0, 0) is None
    stop = uninstalled_by_another_thread(usr1_handler)
    stop.signals.install()
    signal.raise_signal(signal.SIGUSR1)
    assert stop.due(0, 0) == "SIGUSR1" and len(usr1_handler) == 2
    stop.signals.uninstall()  # passes the signal on
    signal.raise_signal(signal.SIGUSR1)
    assert len(usr1_handler) == 4


def end_by_a_signal_after_another_thread_has_uninstalled(pipe: Connection) -> None:
    stop = StopRequests(["SIGTERM"], None)
    stop.signals.install()
    if pipe.recv() == "signalled":
        signal.raise_signal(signal.SIGTERM)
    thread = threading.Thread(target=stop.signals.uninstall)
    thread.start()
    thread.join()
    pipe.send("uninstalled")
    for _ in range(200):  # Python sees a signal that comes right before a wait at its end
        pipe.poll(stretched(0.1))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_ends_by_a_signal_though_another_thread_has_uninstalled(
    tmp_path: Path, when: str
) -> None:
    with job(end_by_a_signal_after_another_thread_has_uninstalled, tmp_path) as running:
        if when == "before":
            running.pipe.send("signalled")
        else:
            running.pipe.send("go on")
            assert running.receive() == "uninstalled"
            running.send_signal(signal.SIGTERM)
        running.process.join(stretched(15))
        assert running.process.exitcode == -signal.SIGTERM


def test_the_first_reason_is_kept_and_asking_again_gives_it_again() -> None:
    stop = StopRequests([], None)
    assert stop.due(0, 0) is None
    stop.request(StopNotice("first"))
    stop.request(StopNotice("second"))
    assert [stop.due(0, 0) for _ in range(3)] == ["first"] * 3


def test_the_earliest_end_of_the_process_is_kept_whatever_the_first_reason_told() -> None:
    clock = Clock()
    stop = StopRequests([], None, clock=clock)
    stop.request(StopNotice("SIGTERM"))
    assert stop.left_s() is None
    for after_s in (60, 30, 90):
        stop.request(StopNotice("spot instance reclaimed", by=clock.now_s + after_s))
    assert stop.left_s() == pytest.approx(30 - SLACK_S) and stop.due(0, 0) == "SIGTERM"


def test_a_notice_stops_the_run_at_once_and_says_until_when() -> None:
    by = datetime(2031, 5, 6, 7, 8, 9).timestamp()
    answers = [None, StopNotice("spot instance reclaimed", by=by)]
    stop = StopRequests([], None, [lambda: None, lambda: answers.pop(0)])
    assert stop.due(1, 1) is None
    _wait_for(lambda: stop.due(1, 1) is not None)
    reason = stop.due(1, 1)
    assert reason is not None and reason.startswith(
        "spot instance reclaimed, which ends the process at 2031-05-06T07:08"
    )


def test_notices_are_asked_at_most_once_a_second() -> None:
    asked: list[None] = []
    stop = StopRequests([], None, [lambda: asked.append(None)])
    began = time.monotonic()
    while time.monotonic() < began + 2.5:
        stop.due(1, 1)
    assert 2 <= len(asked) <= time.monotonic() - began + 1


def _wait_for(condition: Callable[[], bool], timeout_s: float = 5) -> None:
    end = time.monotonic() + stretched(timeout_s)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_deadline_stops_the_run_as_late_as_is_safe() -> None:
    rng = random.Random(0)
    for _ in range(300):
        clock, step_s, save_s = Clock(), rng.uniform(0.1, 30), rng.uniform(0.1, 100)
        began, length = clock.now_s, rng.uniform(300, 2000)
        stop = StopRequests([], datetime.fromtimestamp(began + length).isoformat(), clock=clock)
        assert stop.deadline is not None and abs(stop.deadline - (began + length)) < 0.001
        while (reason := stop.due(save_s, step_s)) is None:
            clock.now_s += step_s
        left_s = stop.deadline - clock.now_s
        assert left_s > save_s * SAVE_MARGIN
        assert left_s < 2 * step_s + save_s * SAVE_MARGIN + 10 or clock.now_s == began
        assert reason.startswith("recover.must_save_by ") and f"a save of {save_s:.1f} s" in reason


def test_a_save_that_was_never_measured_counts_as_a_minute() -> None:
    clock = Clock()
    in_five_minutes = datetime.fromtimestamp(clock.now_s + 300).isoformat()
    stop = StopRequests([], in_five_minutes, clock=clock)
    assert UNMEASURED_SAVE_S == 60
    clock.now_s += 203
    assert stop.due(0, 1) is None
    clock.now_s += 2
    assert stop.due(1, 1) is None
    reason = stop.due(0, 1)
    assert reason is not None and "a first save, for which 90.0 s are kept" in reason


def test_a_short_job_keeps_no_more_than_a_third_of_its_time_for_a_first_save() -> None:
    clock = Clock()
    in_three_minutes = datetime.fromtimestamp(clock.now_s + 180).isoformat()
    stop = StopRequests([], in_three_minutes, clock=clock)
    clock.now_s += 113
    assert stop.due(0, 1, n_saves=2) is None
    clock.now_s += 2
    reason = stop.due(0, 1, n_saves=2)
    assert reason is not None and "for which 60.0 s are kept" in reason
    assert stop.due(30, 1, n_saves=2) is not None  # a measured one counts in full


def test_a_deadline_that_is_missed_still_stops_the_run() -> None:
    clock = Clock()
    stop = StopRequests([], datetime.fromtimestamp(clock.now_s + 60).isoformat(), clock=clock)
    clock.now_s += 3600
    assert stop.due(1, 1) is not None


@pytest.mark.parametrize(
    "name", ["SIGFOO", "TERM", "15", "", "SIGKILL", "SIGSTOP", "SIGSEGV", "SIG_IGN"]
)
def test_signals_that_are_unknown_or_cannot_be_caught_are_refused(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"'recover.stop_signals' has '{name}'; expected one of SIGALRM, .*SIGTERM",
    ):
        StopRequests(["SIGTERM", name], None)
