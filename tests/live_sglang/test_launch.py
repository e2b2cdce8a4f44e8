"""A real SGLang server that `ServerProcesses` starts, restarts after kills, and ends."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.engine.launch import ServerProcesses, ServerSpec, WatchLimits
from holdfast.engine.servers import ServerFleet, SGLangServer
from holdfast.utils.guard import _children
from holdfast.utils.processes import ProcessId, processes_of_group
from tests.engine.servers.call_table import Folders
from tests.limits import stretched, wait_until
from tests.live.trainer import TOLERANCE, Trainer, sample
from tests.live_sglang.live_server import CPU_ENVIRONMENT, CPU_FLAGS, PYTHON, STAND_INS

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

START_S = 300.0
GONE_S = 15.0
LIMITS = WatchLimits(max_restarts=50, hang_timeout_s=20.0, stop_timeout_s=5.0)
HANG_S = 2 * LIMITS.hang_timeout_s
"""Silence of a server, and the question that follows."""


@pytest.fixture(scope="module")
def launched(folders: Folders, scratch: Path) -> Iterator[ServerProcesses]:
    search = os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    spec = ServerSpec(
        "sglang",
        str(folders.base),
        str(PYTHON),
        dtype="float32",
        max_num_seqs=16,
        extra_flags=CPU_FLAGS,
        environment={**CPU_ENVIRONMENT, "PYTHONPATH": search},
    )
    with ServerProcesses(spec, 1, scratch / "launched", limits=LIMITS) as servers:
        servers.wait_until_up(stretched(START_S))
        yield servers


@pytest.fixture(scope="module")
def fleet(launched: ServerProcesses, trainer: Trainer) -> Iterator[ServerFleet]:
    with closing(ServerFleet(launched, probe_interval_s=0.5)) as fleet:
        trainer.publish_to(fleet)
        yield fleet


def test_its_keys_are_on_no_command_line_and_two_updates_reach_it(
    launched: ServerProcesses, fleet: ServerFleet, trainer: Trainer
) -> None:
    (client,) = fleet.serving()
    assert isinstance(client, SGLangServer)
    lines = []
    for member in processes_of_group(os.getpgid(launched.pids()["server_0"])):
        lines.append(Path(f"/proc/{member.pid}/cmdline").read_bytes().decode())
    assert len(lines) >= 3
    shown = "".join(lines)
    for key in (client.api_key, client.admin_key):
        assert key and key not in shown
    trainer.publish_to(fleet)
    assert trainer.error(sample(client)) < TOLERANCE


@pytest.mark.parametrize("who", ["api", "sglang::scheduler", "sglang::detokenizer", "guard"])
def test_a_killed_server_is_gone_and_serves_the_newest_weights_again(
    launched: ServerProcesses, fleet: ServerFleet, trainer: Trainer, who: str
) -> None:
    wait_until(fleet.serving, START_S)
    (before,) = fleet.serving()
    guard = os.getpgid(launched.pids()["server_0"])
    members = processes_of_group(guard)
    victim = pid_of(who, guard, members)
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()

    # Without its detokenizer SGLang answers nothing and does not end.
    wait_until(lambda: not any(member.alive() for member in members), GONE_S + HANG_S)
    gone_s = time.monotonic() - began
    wait_until(lambda: fleet.serving() not in ([], [before]), START_S)
    print(f"\n{who}: gone {gone_s:.1f} s, serving {time.monotonic() - began:.1f} s")
    (client,) = fleet.serving()
    assert client.url != before.url
    response = sample(client)
    assert trainer.error(response) < TOLERANCE
    assert set(response.output_versions) == {trainer.version}


def pid_of(who: str, guard: int, members: list[ProcessId]) -> int:
    """The process of a server with this title, its ``guard``, or the ``api`` that it started."""
    if who == "guard":
        return guard
    if who == "api":
        (pid,) = _children(guard)
        return pid
    (pid,) = [
        member.pid
        for member in members
        if who in Path(f"/proc/{member.pid}/cmdline").read_bytes().decode()
    ]
    return pid
