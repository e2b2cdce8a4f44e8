"""Servers are started, watched, restarted with a budget, and ended, whatever ends first."""

import asyncio
import errno
import json
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.launch import ServerProcesses, ServerSpec, WatchLimits
from holdfast.engine.launch import keeper as keeper_module
from holdfast.engine.launch import program as program_module
from holdfast.engine.launch import watched as watched_module
from holdfast.engine.launch.program import LocalRun, Program, Run
from holdfast.engine.launch.watched import WatchedServer
from holdfast.engine.servers import ModelRequest, ServerFleet, VLLMServer
from holdfast.engine.servers.api import GenerationHyperparameters
from holdfast.utils.errors import ConfigError, NoServerError, RolloutError, ServerError
from holdfast.utils.processes import processes_of_group
from tests.engine.launch.stand_in import quick_limits, stand_in_spec
from tests.engine.servers.scripted import write_published
from tests.limits import stretched, wait_until
from tests.recover.triggers.jobs import job

pytestmark = pytest.mark.timeout(120)

START_S = 40.0
LIMIT_S = stretched(20)
REQUEST = ModelRequest([1, 2], GenerationHyperparameters(max_new_tokens=2), seed=1)


@pytest.fixture(scope="module", autouse=True)
def often() -> Iterator[None]:
    """Look at servers more often than every five seconds, and restart them sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watched_module, "_LOOK_EVERY_S", 0.2)
        patch.setattr(watched_module, "_LOOK_LIMIT_S", stretched(0.5))
        patch.setattr(watched_module, "_LONGEST_PAUSE_S", 0.2)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `launched`."""
    return tmp_path_factory.mktemp("launched")


@pytest.fixture(scope="module")
def launched(folder: Path) -> Iterator[ServerProcesses]:
    """One server that answers, of all tests that leave one."""
    with ServerProcesses(
        stand_in_spec(folder), 1, folder / "servers", limits=quick_limits()
    ) as processes:
        processes.wait_until_up(stretched(START_S))
        yield processes


def record_of(folder: Path) -> dict:
    return json.loads((folder / "servers" / f"{socket.gethostname()}.json").read_text())


def client_of(processes: ServerProcesses) -> VLLMServer:
    (client,) = processes.servers()
    assert isinstance(client, VLLMServer)
    return client


def group_of(processes: ServerProcesses, name: str = "server_0") -> int:
    return os.getpgid(processes.pids()[name])


def wait_for_another(processes: ServerProcesses, before: VLLMServer) -> VLLMServer:
    wait_until(lambda: processes.servers() not in ([], [before]), START_S)
    return client_of(processes)


def test_a_server_answers_its_own_client_alone(launched: ServerProcesses, folder: Path) -> None:
    client = client_of(launched)
    assert client.status().label is None
    stranger = VLLMServer(client.url, api_key="another", served_name=client.served_name)
    with pytest.raises(ServerError, match="401"):
        asyncio.run(stranger.agenerate(REQUEST))
    assert launched.stats()["server_start_s"] > 0

    # The file has the keys, and its owner alone may read it.
    file = folder / "servers" / f"{socket.gethostname()}.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (entry,) = record_of(folder)["servers"]
    assert (entry["state"], entry["url"], entry["api_key"]) == ("up", client.url, client.api_key)


def test_a_killed_server_gets_a_new_address_name_and_key(launched: ServerProcesses) -> None:
    before = client_of(launched)
    restarted = launched.stats()["servers_restarted"]
    group = group_of(launched)
    os.killpg(group, signal.SIGKILL)
    after = wait_for_another(launched, before)
    assert processes_of_group(group) == []
    assert after.url != before.url
    assert after.served_name != before.served_name and after.api_key != before.api_key
    assert launched.stats()["servers_restarted"] == restarted + 1


@pytest.mark.slow
def test_a_server_that_answers_nothing_is_restarted(launched: ServerProcesses) -> None:
    before = client_of(launched)
    group = group_of(launched)
    for process in processes_of_group(group):
        if process.pid != group:
            os.kill(process.pid, signal.SIGSTOP)
    wait_for_another(launched, before)
    assert processes_of_group(group) == []


@pytest.mark.slow
def test_a_server_that_cannot_be_restarted_at_once_is_tried_again(
    launched: ServerProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = client_of(launched)
    start, failed = program_module.start_guarded, threading.Event()

    def busy_once(*args: Any) -> Any:
        if failed.is_set():
            return start(*args)
        failed.set()
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(program_module, "start_guarded", busy_once)
    restarted = launched.stats()["servers_restarted"]
    os.killpg(group_of(launched), signal.SIGKILL)
    wait_for_another(launched, before)
    assert failed.is_set()
    assert launched.stats()["servers_restarted"] == restarted + 2


def no_launch(*args: Any) -> Any:
    raise AssertionError("nothing is started here")


def tell(client: VLLMServer, **faults: object) -> None:
    import httpx2

    httpx2.post(f"{client.url}/fake", json=faults, timeout=LIMIT_S).raise_for_status()


def leave_unanswered(client: VLLMServer) -> None:
    client.generation_timeout_s = 0.05
    for _ in range(3):
        with pytest.raises(ServerError, match="not answered"):
            asyncio.run(client.agenerate(REQUEST))


@pytest.mark.slow
def test_a_server_whose_engine_hangs_is_restarted_after_three_timeouts(
    launched: ServerProcesses,
) -> None:
    before = client_of(launched)
    tell(before, slow={"/inference/v1/generate": 600.0})
    time.sleep(1.0)
    assert client_of(launched) is before, "nobody has asked it for a token"
    leave_unanswered(before)
    after = wait_for_another(launched, before)
    assert after.connections.unanswered == 0


def test_a_slow_server_is_asked_for_one_token_and_stays(launched: ServerProcesses) -> None:
    before = client_of(launched)
    tell(before, slow={"/inference/v1/generate": 0.3})
    leave_unanswered(before)
    wait_until(lambda: before.connections.unanswered == 0)
    assert client_of(launched) is before
    tell(before)


def test_a_server_that_is_paused_is_not_taken_for_one_that_hangs(
    launched: ServerProcesses,
) -> None:
    before = client_of(launched)
    with before._calls("", LIMIT_S) as calls:
        before._pause(calls, "pause")
    leave_unanswered(before)
    wait_until(lambda: before.connections.unanswered == 0)
    assert client_of(launched) is before
    with before._calls("", LIMIT_S) as calls:
        before._go_on(calls)
    before.generation_timeout_s = LIMIT_S


def test_a_server_that_ends_at_its_first_start_is_an_error_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    spec = stand_in_spec(tmp_path)
    (tmp_path / "ends").write_text("there are no GPUs here")
    with (
        ServerProcesses(spec, 1, tmp_path / "servers", limits=quick_limits()) as processes,
        closing(ServerFleet(processes, probe_interval_s=0.1)) as fleet,
    ):
        with pytest.raises(ConfigError, match="ended with exit code 3") as caught:
            processes.wait_until_up(stretched(START_S))
        assert "there are no GPUs here" in str(caught.value)
        assert "server_0.1.log ends with" in str(caught.value)
        expected = "No server is started again before all have answered once"
        assert expected in str(caught.value)
        with pytest.raises(ConfigError, match="there are no GPUs here"):
            fleet.update(write_published(tmp_path / "weights", 1), 1, LIMIT_S)
        with pytest.raises(ConfigError, match="there are no GPUs here"):
            fleet.serving()


def test_a_flag_that_the_server_does_not_know_is_an_error_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    spec = stand_in_spec(tmp_path, extra_flags=["--no-such-flag"])
    with (
        ServerProcesses(spec, 1, tmp_path / "servers", limits=quick_limits()) as processes,
        pytest.raises(ConfigError, match="unrecognized arguments: --no-such-flag"),
    ):
        processes.wait_until_up(stretched(START_S))


def test_an_environment_without_the_server_is_an_error(tmp_path: Path) -> None:
    spec = ServerSpec("vllm", "/model", python="/nowhere/python")
    with (
        ServerProcesses(spec, 1, tmp_path) as processes,
        pytest.raises(ConfigError, match="there is no program /nowhere/python"),
    ):
        processes.wait_until_up(stretched(START_S))


def test_a_host_without_room_for_a_server_is_an_error_without_other_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(program_module, "start_guarded", no_memory)
    with (
        ServerProcesses(ServerSpec("vllm", "/model"), 1, tmp_path) as processes,
        pytest.raises(ConfigError, match=r"server_0: .*Cannot allocate memory$"),
    ):
        processes.wait_until_up(stretched(START_S))


@pytest.mark.slow
def test_a_server_whose_port_was_taken_is_started_on_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_port = program_module._free_port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [taken.getsockname()[1]]
        monkeypatch.setattr(
            program_module, "_free_port", lambda host: ports.pop() if ports else free_port(host)
        )
        with ServerProcesses(
            stand_in_spec(tmp_path), 1, tmp_path / "servers", limits=quick_limits()
        ) as processes:
            wait_until(lambda: not ports)
            processes.wait_until_up(stretched(START_S))
            assert client_of(processes).url != f"http://127.0.0.1:{taken.getsockname()[1]}"
            assert processes.stats()["servers_restarted"] == 1


@pytest.mark.slow
def test_a_server_serves_without_a_log_if_none_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "servers"
    folder.mkdir()
    (folder / socket.gethostname()).write_text("a file where the folder should be")
    with ServerProcesses(stand_in_spec(tmp_path), 1, folder, limits=quick_limits()) as processes:
        processes.wait_until_up(stretched(START_S))
    assert "server_0 runs without a log" in caplog.text


@pytest.mark.slow
def test_nothing_is_left_running_if_the_servers_cannot_be_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = stand_in_spec(tmp_path)
    with ServerProcesses(spec, 1, tmp_path / "servers", limits=quick_limits()) as processes:
        processes.wait_until_up(stretched(START_S))
        group = group_of(processes)

        def fail(*args: Any) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(processes._servers[0], "_problem", fail)
        wait_until(lambda: record_of(tmp_path)["closed"], START_S)
        assert processes_of_group(group) == []
        with pytest.raises(RolloutError, match=r"could not be watched: .*a defect"):
            processes.servers()


def test_servers_have_their_time_to_end_and_the_record_is_closed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, bool]] = []
    end = program_module.end_guarded

    def note(*guards: Any, timeout_s: float = 15.0) -> None:
        processes._try_to_write_record()
        seen.append((timeout_s, record_of(tmp_path)["closed"]))
        end(*guards, timeout_s=timeout_s)

    monkeypatch.setattr(program_module, "end_guarded", note)
    limits = WatchLimits(stop_timeout_s=30.0)
    processes = ServerProcesses(stand_in_spec(tmp_path), 1, tmp_path / "servers", limits=limits)
    with processes:
        wait_until(processes.pids)
    assert seen == [(35.0, False)]
    assert record_of(tmp_path)["closed"]


def test_slow_looks_at_servers_do_not_delay_the_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def look(hold: bool) -> bool:
        time.sleep(0.1)
        events.append("look")
        return False

    monkeypatch.setattr(keeper_module, "BEAT_S", 0.05)
    processes = ServerProcesses(ServerSpec("vllm", "/model"), 3, tmp_path)
    for server in processes._servers:
        monkeypatch.setattr(server, "step", look)
    monkeypatch.setattr(processes, "_try_to_write_record", lambda: events.append("write"))
    with processes:
        wait_until(lambda: len(events) > 5)
    assert events[:4] == ["look", "write", "look", "write"]


def test_keys_in_a_log_are_for_its_owner_and_in_no_message(tmp_path: Path) -> None:
    server = watched_module.WatchedServer(
        0, ServerSpec("vllm", "/m"), tmp_path, quick_limits(), no_launch
    )
    keys = [server.identity.key, server.identity.admin_key]
    run = LocalRun(Program("server_0", lambda *_: ["echo", *keys], {}, tmp_path, 0.5), "127.0.0.1")
    server.run = run
    wait_until(run.problem)
    assert run.log is not None and stat.S_IMODE(run.log.stat().st_mode) == 0o600
    assert server.describe().endswith("server_0.1.log ends with\n*** ***")


def test_the_keys_of_sglang_are_in_a_file_of_its_user_and_not_on_its_command_line(
    tmp_path: Path,
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 600\n")
    python.chmod(0o700)
    folder = tmp_path / "servers"
    spec = ServerSpec("sglang", "/model", str(python))
    with ServerProcesses(spec, 1, folder, limits=quick_limits()) as processes:
        wait_until(processes.pids)
        (file,) = (folder / socket.gethostname()).glob("*.yaml")

        def words() -> bytes:
            members = processes_of_group(group_of(processes))
            return b"".join(Path(f"/proc/{one.pid}/cmdline").read_bytes() for one in members)

        # A process has no command line while it is being started.
        wait_until(lambda: f"--config\0{file}".encode() in words())
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        (entry,) = record_of(tmp_path)["servers"]
        keys = {"api-key": entry["api_key"], "admin-api-key": entry["admin_key"]}
        assert json.loads(file.read_text()) == keys
        assert not any(key.encode() in words() for key in keys.values())


def test_each_start_has_a_log_and_five_are_kept(tmp_path: Path) -> None:
    for number in range(1, 9):
        log = program_module._new_log(tmp_path, "server_0")
        assert log == tmp_path / f"server_0.{number}.log"
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"server_0.{number}.log" for number in range(4, 9)]


@pytest.mark.slow
def test_a_server_that_always_ends_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    limits = WatchLimits(max_restarts=2, stop_timeout_s=0.5)
    with ServerProcesses(
        stand_in_spec(tmp_path), 2, tmp_path / "servers", limits=limits
    ) as processes:
        processes.wait_until_up(stretched(START_S))
        first, second = processes.servers()
        (tmp_path / "ends").write_text("the disk has gone")
        os.killpg(group_of(processes), signal.SIGKILL)
        wait_until(lambda: "failed" in str(record_of(tmp_path)["servers"][0]["state"]), START_S)
        assert processes.servers() == [second] and first is not second
        (report,) = processes.absent()
        assert str(report) == (
            "server_0 is gone (it was restarted too often; it ended with exit code 3)"
        )
        assert processes.stats()["servers_restarted"] == 2

        # Without the last one, the run cannot go on.
        os.killpg(group_of(processes, "server_1"), signal.SIGKILL)

        def too_few() -> bool:
            try:
                processes.servers()
            except RolloutError as error:
                assert "0 inference servers are left, 1 are needed" in str(error)
                assert str(error).count("the disk has gone") == 2
                return True
            return False

        wait_until(too_few, START_S)


def test_pauses_grow_and_a_long_run_does_not_use_the_restarts_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(watched_module.time, "monotonic", lambda: now)
    monkeypatch.setattr(watched_module, "_LONGEST_PAUSE_S", 60.0)
    limits = WatchLimits(max_restarts=8)
    server = watched_module.WatchedServer(0, ServerSpec("vllm", "/m"), tmp_path, limits, no_launch)
    pauses = []
    for _ in range(8):
        server.note_end("it ended")
        pauses.append(server._start_at - now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    now += 3601.0
    server.note_end("it ended")
    assert server._start_at - now == 1.0 and server.state == "waiting"
    for _ in range(8):
        server.note_end("it ended")
    assert server.state == "failed"


def test_any_number_of_restarts_may_be_allowed(tmp_path: Path) -> None:
    limits = WatchLimits(max_restarts=5000)
    server = watched_module.WatchedServer(0, ServerSpec("vllm", "/m"), tmp_path, limits, no_launch)
    for _ in range(1100):
        server.note_end("it ended")
    assert server.state == "waiting"


@pytest.mark.slow
def test_nothing_is_started_while_the_trainer_has_the_memory(
    launched: ServerProcesses,
) -> None:
    before = client_of(launched)
    launched.hold(True)
    os.killpg(group_of(launched), signal.SIGKILL)
    wait_until(lambda: launched.servers() == [])
    time.sleep(1.5)
    assert launched.pids() == {}
    launched.hold(False)
    wait_for_another(launched, before)


def test_a_server_that_is_starting_ends_while_the_trainer_has_the_memory(tmp_path: Path) -> None:
    spec = stand_in_spec(tmp_path, environment={"FAKE_VLLM_SLOW": "600"})
    with ServerProcesses(spec, 1, tmp_path / "servers", limits=quick_limits()) as processes:
        wait_until(processes.pids)
        group = group_of(processes)
        processes.hold(True)
        assert processes_of_group(group) == [] and processes.pids() == {}
        assert processes.servers() == [], "it is no error before all have answered once"
        time.sleep(0.5)
        assert processes.pids() == {}
        processes.hold(False)
        wait_until(processes.pids)
        assert processes.stats()["servers_restarted"] == 0


def run_servers(pipe: Connection, folder: Path) -> None:
    with ServerProcesses(
        stand_in_spec(folder), 1, folder / "servers", limits=quick_limits()
    ) as processes:
        processes.wait_until_up(stretched(START_S))
        pipe.send(group_of(processes))
        pipe.poll(600)


@pytest.mark.slow
@pytest.mark.parametrize("with_guard", [False, True], ids=["driver", "and guard"])
def test_nothing_is_left_of_the_servers_of_a_killed_driver(
    tmp_path: Path, with_guard: bool
) -> None:
    with job(partial(run_servers, folder=tmp_path), tmp_path) as driver:
        group = driver.receive(START_S)
        assert len(processes_of_group(group)) >= 2
        if with_guard:
            os.kill(group, signal.SIGKILL)
        driver.process.kill()
        driver.process.join()
        if with_guard:
            time.sleep(0.5)
            assert processes_of_group(group) != []
            nowhere = ServerSpec("vllm", "/model", python="/nowhere/python")
            with ServerProcesses(nowhere, 1, tmp_path / "servers"):
                assert processes_of_group(group) == []
        wait_until(lambda: processes_of_group(group) == [])


def test_a_second_job_is_refused_in_the_same_folder(
    launched: ServerProcesses, folder: Path
) -> None:
    other = ServerProcesses(stand_in_spec(folder), 1, folder / "servers")
    with pytest.raises(ConfigError, match="keeps servers in"):
        other.start()
    with pytest.raises(ConfigError, match="were started before"):
        launched.start()


def test_the_folder_of_a_job_that_has_ended_may_be_used_again(tmp_path: Path) -> None:
    spec = ServerSpec("vllm", "/model", python="/nowhere/python")
    for _ in range(2):
        with ServerProcesses(spec, 1, tmp_path):
            pass


def test_an_address_that_other_hosts_cannot_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'0\.0\.0\.0', which makes a URL that other hosts"):
        ServerProcesses(ServerSpec("vllm", "/model"), 1, tmp_path, host="0.0.0.0")


def test_gpus_are_shared_among_the_servers(tmp_path: Path) -> None:
    spec = ServerSpec("vllm", "/model", tensor_parallel_size=2)
    processes = ServerProcesses(spec, 2, tmp_path, gpus="0,1,4,5")
    assert [server._gpus for server in processes._servers] == ["0,1", "4,5"]
    with pytest.raises(ConfigError, match="gpus names 3 devices, and 2 servers of 2 take 4"):
        ServerProcesses(spec, 2, tmp_path, gpus="0,1,4")


@pytest.mark.slow
def test_a_restarted_server_serves_the_newest_weights_to_the_fleet(
    launched: ServerProcesses, tmp_path: Path
) -> None:
    with closing(ServerFleet(launched, probe_interval_s=0.1)) as fleet:
        fleet.update(write_published(tmp_path / "weights", 1), 1, LIMIT_S)
        before = fleet.serving()[0]
        os.killpg(group_of(launched), signal.SIGKILL)
        wait_until(lambda: fleet.serving() not in ([], [before]), START_S)
        response = asyncio.run(fleet.serving()[0].agenerate(REQUEST))
        assert set(response.output_versions) == {1}
        assert fleet.stats()["servers_serving"] == 1
        with pytest.raises(NoServerError):
            asyncio.run(before.agenerate(REQUEST))

        # An update waits for a server that is starting.
        os.killpg(group_of(launched), signal.SIGKILL)
        fleet.update(write_published(tmp_path / "weights", 2), 2, LIMIT_S)
        response = asyncio.run(fleet.serving()[0].agenerate(REQUEST))
        assert set(response.output_versions) == {2}


def test_a_server_is_asked_again_before_it_counts_as_silent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper may not have looked for a while: it ends other servers, or was stopped."""

    def never(program: Program, run: Run | None) -> Run:
        raise AssertionError("nothing is started")

    limits = quick_limits()
    server = WatchedServer(0, stand_in_spec(folder), folder, limits, never)
    server.client = VLLMServer("http://127.0.0.1:9")
    limit_s = limits.hang_timeout_s
    monkeypatch.setattr(server, "_answers", lambda: False)
    assert server._hang(1000.0) is None
    assert server._hang(1000.0 + limit_s / 2) is None
    assert "it has not answered for" in str(server._hang(1001.0 + limit_s))
