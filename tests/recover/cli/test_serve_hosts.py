"""``holdfast serve`` on other hosts than the driver.

The hosts are network namespaces of this machine, each with a host name of its own. No packet leaves
the machine. Needs root.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from holdfast.engine.launch import ServerFolder
from holdfast.engine.servers import ServerFleet
from tests.engine.launch.stand_in import stand_in_environment
from tests.engine.rollouts.servers import make_executor
from tests.engine.servers.scripted import write_published
from tests.integration.test_grpo_cut_off import can_make_namespaces, ip
from tests.limits import stretched, wait_until
from tests.recover.cli.commands import HOLDFAST
from tests.recover.triggers.jobs import Job, job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root and iproute2"),
]

CLONE_NEWNET = 0x40000000
STALE_S = 10.0
START_S = 60.0


class Host:
    """A network namespace with a link to the driver's. ``holdfast serve`` runs in it."""

    def __init__(self, name: str, driver: str, number: int) -> None:
        self.name = name
        self.address = f"10.231.{number}.2"
        link = ["type", "veth", "peer", "name", f"h{number}", "netns", driver]
        ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", name, *link)
        ip("-n", name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", driver, "addr", "add", f"10.231.{number}.1/24", "dev", f"h{number}")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", driver, "link", "set", f"h{number}", "up")

    def serve(self, folder: Path) -> None:
        """Start one server for the run in ``folder``."""
        words = [str(HOLDFAST), "serve", str(folder), "--run", str(folder / "run")]
        words += ["--host", self.address, "--python", sys.executable]
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"', "sh", *words]
        subprocess.Popen(
            ["ip", "netns", "exec", self.name, *named],
            env={**os.environ, **stand_in_environment(FAKE_VLLM_HASHED="1")},
            stdout=subprocess.DEVNULL,
        )

    def lose(self) -> None:
        """SIGKILL all of its processes at once."""
        pids = subprocess.check_output(["ip", "netns", "pids", self.name], text=True).split()
        assert len(pids) >= 3, "holdfast serve, a guard and a server"
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        pids = subprocess.check_output(["ip", "netns", "pids", self.name], text=True).split()
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)
        ip("netns", "del", self.name)


@pytest.fixture
def driver_namespace() -> Iterator[str]:
    name = f"hf-{uuid.uuid4().hex[:6]}"
    ip("netns", "add", name)
    ip("-n", name, "link", "set", "lo", "up")
    yield name
    ip("netns", "del", name)


@pytest.fixture
def hosts(driver_namespace: str) -> Iterator[tuple[Host, Host]]:
    """Two hosts for servers. They see the folders of this machine."""
    with ExitStack() as undo:
        made: list[Host] = []
        for number in (1, 2):
            host = Host(f"{driver_namespace}-{number}", driver_namespace, number)
            undo.callback(host.remove)
            made.append(host)
        yield made[0], made[1]


def train(pipe: Connection, namespace: str, folder: Path) -> None:
    """Run steps on the driver's host, each with a publication and rollouts, until the test says
    otherwise. Reports the URLs of the servers that serve.
    """
    with open(f"/var/run/netns/{namespace}") as file:
        assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
    servers = ServerFolder(folder / "run" / "servers", stale_s=STALE_S)
    with (
        closing(ServerFleet(servers, min_servers=1, probe_interval_s=0.1)) as fleet,
        make_executor(fleet) as executor,
    ):
        step = 0
        while not pipe.poll():
            fleet.update(write_published(folder / "weights", step), step, stretched(20))
            executor.set_version(step)
            executor.next_batch(step)
            names = sorted(server.name.rpartition(":")[0] for server in fleet.serving())
            pipe.send((step, names, [str(report) for report in fleet.states()]))
            step += 1
            time.sleep(0.1)


def next_report(running: Job) -> tuple[int, list[str], list[str]]:
    return running.receive(START_S)


def test_a_run_uses_the_servers_of_two_other_hosts_and_survives_the_loss_of_one(
    driver_namespace: str, hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    urls = [f"http://{host.address}" for host in hosts]
    for host in hosts:
        host.serve(tmp_path)
    with job(partial(train, namespace=driver_namespace, folder=tmp_path), tmp_path) as running:
        wait_until(lambda: next_report(running)[1] == urls, START_S)

        # Steps go on with the other host. The lost one is left out for good after a while.
        hosts[0].lose()
        wait_until(lambda: next_report(running)[1] == urls[1:], START_S)
        first, _, _ = next_report(running)
        silent = f"server_0 on {hosts[0].name} is gone (its `holdfast serve` gives no sign of life)"
        wait_until(lambda: silent in next_report(running)[2], START_S)
        last, names, _ = next_report(running)
        assert names == urls[1:] and last > first

        # The host comes back.
        hosts[0].serve(tmp_path)
        wait_until(lambda: next_report(running)[1] == urls, START_S)
        running.pipe.send("enough")
