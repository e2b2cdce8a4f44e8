"""Real vLLM servers that `ServerProcesses` starts, restarts after kills, and ends."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from holdfast.engine.launch import ServerProcesses, ServerSpec, WatchLimits
from holdfast.engine.servers import ModelRequest, ServerFleet
from holdfast.engine.servers.api import GenerationHyperparameters
from holdfast.utils.errors import ConfigError, ServerError
from holdfast.utils.guard import _children
from holdfast.utils.processes import ProcessId, processes_of_group
from tests.limits import stretched, wait_until
from tests.live.trainer import Trainer
from tests.live_vllm.live_server import PYTHON
from tests.recover.triggers.jobs import job

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

START_S = 300.0
GONE_S = 15.0
LIMITS = WatchLimits(max_restarts=50, hang_timeout_s=8.0, stop_timeout_s=5.0)
_SHARED = re.compile(r"/dev/shm/\S+")


def spec_of(model: Path, **options: object) -> ServerSpec:
    return ServerSpec(
        "vllm",
        str(model),
        str(PYTHON),
        dtype="float32",
        max_model_len=64,
        device="cpu",
        environment={"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        **options,  # type: ignore
    )


class Tree:
    """The processes of a server and their files in shared memory, as they were once."""

    def __init__(self, group: int) -> None:
        self.members = processes_of_group(group)
        self.guard = group
        self.shared: set[str] = set()
        for member in self.members:
            mapped = _SHARED.findall(Path(f"/proc/{member.pid}/maps").read_text())
            self.shared.update(path for path in mapped if os.path.exists(path))

    def find(self, who: str) -> int:
        """The pid of ``guard``, ``api``, ``EngineCore`` or ``Worker``.

        Raises:
            KeyError: the server has not started it yet.
        """
        if who == "guard":
            return self.guard
        if who == "api":
            (pid,) = _children(self.guard)
            return pid
        for member in self.members:
            title = Path(f"/proc/{member.pid}/cmdline").read_bytes()
            if f"VLLM::{who}".encode() in title:
                return member.pid
        raise KeyError(who)

    def gone(self) -> bool:
        alive = [member for member in self.members if member.alive()]
        return not alive and not any(os.path.exists(path) for path in self.shared)


@pytest.fixture(scope="module")
def launched(model_folder: Path, scratch: Path) -> Iterator[ServerProcesses]:
    with ServerProcesses(
        spec_of(model_folder), 1, scratch / "launched", limits=LIMITS
    ) as processes:
        processes.wait_until_up(stretched(START_S))
        yield processes


@pytest.fixture(scope="module")
def fleet(launched: ServerProcesses, trainer: Trainer) -> Iterator[ServerFleet]:
    with closing(ServerFleet(launched, probe_interval_s=0.5)) as fleet:
        trainer.publish_to(fleet)
        yield fleet


def ask(fleet: ServerFleet, seed: int = 1):  # noqa: ANN201
    request = ModelRequest([1, 2, 3], GenerationHyperparameters(max_new_tokens=8), seed=seed)
    return asyncio.run(fleet.serving()[0].agenerate(request))


@pytest.mark.parametrize("who", ["api", "EngineCore", "Worker", "guard"])
def test_a_killed_server_is_gone_and_serves_the_newest_weights_again(
    launched: ServerProcesses, fleet: ServerFleet, trainer: Trainer, who: str
) -> None:
    check_restart(launched, fleet, trainer, who, signal.SIGKILL)


@pytest.mark.parametrize("who", ["api", "EngineCore", "Worker"])
def test_a_server_that_hangs_is_gone_and_serves_the_newest_weights_again(
    launched: ServerProcesses, fleet: ServerFleet, trainer: Trainer, who: str
) -> None:
    check_restart(launched, fleet, trainer, who, signal.SIGSTOP)


def check_restart(
    launched: ServerProcesses, fleet: ServerFleet, trainer: Trainer, who: str, number: int
) -> None:
    wait_until(fleet.serving, START_S)
    tree = Tree(os.getpgid(launched.pids()["server_0"]))
    before = fleet.serving()[0]
    assert len(tree.members) >= 4 and len(tree.shared) >= 2
    killed = ProcessId.of(tree.find(who))
    assert killed.alive()
    os.kill(killed.pid, number)
    began = time.monotonic()

    # A stopped engine leaves requests without an answer, and a stopped API server everything.
    if number == signal.SIGSTOP and who != "api":
        before.generation_timeout_s = 1.0
        for _ in range(3):
            with pytest.raises(ServerError, match="not answered"):
                request = ModelRequest([1, 2, 3], GenerationHyperparameters(max_new_tokens=8))
                asyncio.run(before.agenerate(request))
    wait_until(lambda: tree.gone(), GONE_S + (LIMITS.hang_timeout_s if number == 19 else 0) * 3)
    gone_s = time.monotonic() - began
    wait_until(lambda: fleet.serving() not in ([], [before]), START_S)
    serving_s = time.monotonic() - began
    print(f"\n{who} {signal.Signals(number).name}: gone {gone_s:.1f} s, serving {serving_s:.1f} s")

    assert not killed.alive()
    assert fleet.serving()[0].url != before.url
    assert trainer.error(ask(fleet)) < 1e-5
    assert {trainer.version} == set(ask(fleet).output_versions)


def run_servers(pipe: Connection, spec: ServerSpec, folder: Path, until_up: bool) -> None:
    with ServerProcesses(spec, 1, folder, limits=LIMITS) as processes:
        if until_up:
            processes.wait_until_up(stretched(START_S))
        wait_until(lambda: processes.pids(), START_S)
        group = os.getpgid(processes.pids()["server_0"])
        wait_until(lambda: len(processes_of_group(group)) >= 4, START_S)
        pipe.send(group)
        pipe.poll(3600)


@pytest.mark.parametrize("until_up", [True, False], ids=["ready", "starting"])
@pytest.mark.parametrize("with_guard", [False, True], ids=["driver", "driver and guard"])
def test_nothing_is_left_of_the_servers_of_a_killed_driver(
    model_folder: Path, tmp_path: Path, until_up: bool, with_guard: bool
) -> None:
    run = partial(
        run_servers, spec=spec_of(model_folder), folder=tmp_path / "servers", until_up=until_up
    )
    with job(run, tmp_path) as driver:
        group = driver.receive(START_S)
        tree = Tree(group)
        assert len(tree.members) >= 4
        if with_guard:
            os.kill(group, signal.SIGKILL)
        driver.process.kill()
        driver.process.join()
        began = time.monotonic()
        if with_guard:
            # The next start of the job ends them.
            time.sleep(2.0)
            assert not tree.gone()
            nowhere = ServerSpec("vllm", "/nowhere", "/nowhere/python")
            with ServerProcesses(nowhere, 1, tmp_path / "servers"):
                pass
        wait_until(tree.gone, GONE_S)
        print(f"\ngone {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize(
    ("options", "model", "expected"),
    [
        ({"extra_flags": ("--no-such-flag",)}, None, "no-such-flag"),
        ({}, "/nowhere/model", "/nowhere/model"),
    ],
)
def test_a_server_that_cannot_start_is_an_error_with_the_end_of_its_log(
    model_folder: Path, tmp_path: Path, options: dict, model: str | None, expected: str
) -> None:
    spec = spec_of(Path(model or model_folder), **options)
    with ServerProcesses(spec, 1, tmp_path) as processes:
        with pytest.raises(ConfigError, match="ended with exit code") as caught:
            processes.wait_until_up(stretched(START_S))
        assert expected in str(caught.value)
