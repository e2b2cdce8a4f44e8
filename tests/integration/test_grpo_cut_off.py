"""The GRPO example on two nodes with separate networks, when the link between them is really cut.

Both nodes are network namespaces of this machine, created by the test and joined by a veth pair. No
packet leaves the machine. Needs root.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.chaos import GrpoRun, sha256
from tests.integration.test_grpo_nodes import (
    PATIENCE_S,
    SETTINGS,
    expected,
    report,
    train_until,
    wait_for_attempt,
)
from tests.limits import stretched
from tests.ray_helpers import SMALLEST_STORE_BYTES, running

__all__ = ["expected"]

HEAD, NODE = "10.231.7.1", "10.231.7.2"
LINK = "hf0"
"""Name of both ends of the link, because one variable gives it to gloo on both nodes."""
SILENCE_S = 6.0
"""Longest silence of a worker, and duration of its lease."""


def can_make_namespaces() -> bool:
    try:
        return (
            os.geteuid() == 0
            and subprocess.run(["ip", "netns"], capture_output=True).returncode == 0
        )
    except FileNotFoundError:
        return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root and iproute2"),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces with one link."""
    names = tuple(f"hf-{uuid.uuid4().hex[:6]}-{end}" for end in "ab")
    with ExitStack() as undo:
        for name in names:
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
        ip(
            "link",
            "add",
            LINK,
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            LINK,
            "netns",
            names[1],
        )
        for name, address in zip(names, (HEAD, NODE), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            ip("-n", name, "link", "set", LINK, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]


@pytest.fixture
def raylets(
    namespaces: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A head with room for all workers, and a node with room for one."""
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": uuid.uuid4().hex,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    for name, value in {**variables, "GLOO_SOCKET_IFNAME": LINK}.items():
        monkeypatch.setenv(name, value)
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block"]
    ray += ["--object-store-memory", str(SMALLEST_STORE_BYTES), "--disable-usage-stats"]
    head = [
        "--head",
        "--node-ip-address",
        HEAD,
        "--port",
        "6379",
        "--num-cpus",
        "3",
        "--include-dashboard",
        "false",
    ]
    node = ["--address", f"{HEAD}:6379", "--node-ip-address", NODE, "--num-cpus", "1"]
    processes = []
    try:
        for namespace, options in zip(
            namespaces, ([*head, "--resources", '{"sampler": 1}'], node), strict=True
        ):
            log = open(tmp_path / f"{namespace}.log", "wb")  # noqa: SIM115  (the process has it)
            command = ["ip", "netns", "exec", namespace, *ray, *options]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            wait_for(
                lambda path=log.name: "Ray runtime started" in Path(path).read_text(), "a raylet"
            )
        yield
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
            process.wait(stretched(60))


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + stretched(60)
    while not condition():
        assert time.monotonic() < end, f"{what} does not come"
        time.sleep(0.05)


def test_ranks_behind_a_cut_link_are_gone_before_others_start(
    expected: str, namespaces: tuple[str, str], raylets: None, tmp_path: Path
) -> None:
    own = [
        f"ray_address={HEAD}:6379",
        "strategy=SPREAD",
        "resources_per_rollout.sampler=1",
        "recover.freq_steps=5",
    ]
    run = GrpoRun(
        tmp_path / "run", *SETTINGS, *own, f"hang_timeout_s={SILENCE_S}", "recover.retries=1"
    )
    run._command[:0] = ["ip", "netns", "exec", namespaces[0]]
    try:
        run.start()
        train_until(run, 11)
        trainers = run.pids()["trainer"]
        ip("-n", namespaces[0], "link", "set", LINK, "down")
        cut = time.time()
        run.wait_until(lambda: not all(running(pid) for pid in trainers), PATIENCE_S)
        attempt = wait_for_attempt(run, 1)
        assert not any(running(pid) for pid in trainers)
        ip("-n", namespaces[0], "link", "set", LINK, "up")
        assert run.wait(PATIENCE_S) == 0, run.log_tail()
        assert sha256(run.final_weights()) == expected
        report(run, cut, attempt)
        assert "when their lease is over" in (run.fileroot / "output.log").read_text()
    finally:
        run.stop()
