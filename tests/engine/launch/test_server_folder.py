"""Servers of other processes are found by the records of their keepers."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.launch import ServerFolder, ServerProcesses, ServerSpec
from holdfast.engine.launch import server_folder as server_folder_module
from holdfast.engine.launch.records import read_records, write_private
from holdfast.engine.servers import SGLangServer, VLLMServer
from holdfast.utils.errors import ConfigError


def entry(number: int, state: str = "up", **values: Any) -> dict[str, Any]:
    return {
        "name": f"server_{number}",
        "kind": "vllm",
        "transfer": None,
        "state": state,
        "since": 1.0,
        "error": None,
        "version": None,
        "restarts": 0,
        "started_in_s": 2.0,
        "log": None,
        "url": f"http://a:{number}",
        "mirror": None,
        "served_name": f"name-{number}",
        "api_key": "key",
        "admin_key": "admin",
        **values,
    }


def write(folder: Path, host: str, *servers: dict[str, Any], beat: float = 1.0) -> None:
    record = {"boot_id": "", "keeper": [1, "1"], "closed": False, "groups": []}
    write_private(folder / f"{host}.json", {**record, "beat": beat, "servers": list(servers)})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets a time pass."""
    now = [100.0]
    monkeypatch.setattr(server_folder_module.time, "monotonic", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def test_servers_of_all_hosts_are_found_and_keep_their_clients(tmp_path: Path) -> None:
    servers = ServerFolder(tmp_path)
    assert servers.servers() == []
    write(tmp_path, "one", entry(1), entry(2, "starting"))
    write(tmp_path, "other", entry(3, kind="sglang"), entry(4, "failed", error="it ended"))
    first, third = servers.servers()
    assert isinstance(first, VLLMServer) and isinstance(third, SGLangServer)
    assert (first.url, first.api_key, first.served_name) == ("http://a:1", "key", "name-1")
    assert third.admin_key == "admin"
    assert [str(report) for report in servers.absent()] == [
        "server_2 on one is starting (it is starting)",
        "server_4 on other is gone (it ended)",
    ]

    # The same server has the same client. A new start is a new server.
    mirrored = entry(1, mirror="http://m:1")
    write(tmp_path, "one", mirrored, entry(2, restarts=1, started_in_s=9.0))
    again, second, _ = servers.servers()
    assert again is first and first.mirror == "http://m:1"
    assert servers.stats() == {"servers_restarted": 1.0, "server_start_s": 9.0}
    write(tmp_path, "one", mirrored, entry(2, served_name="name-5", url="http://a:5"))
    assert servers.servers()[1] is not second


def test_a_relative_folder_stays_the_same_if_the_program_leaves_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    servers = ServerFolder(tmp_path.name)
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "one", entry(1))
    assert len(servers.servers()) == 1


def test_servers_whose_keeper_is_silent_are_removed(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    servers = ServerFolder(tmp_path, stale_s=60.0)
    write(tmp_path, "one", entry(1), beat=5.0)
    assert len(servers.servers()) == 1
    clock(59.0)
    assert len(servers.servers()) == 1
    write(tmp_path, "one", entry(1), beat=6.0)
    assert len(servers.servers()) == 1
    clock(61.0)
    assert servers.servers() == []
    assert "no sign of life" in str(servers.absent()[0])


def test_a_record_that_cannot_be_read_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "one", entry(1))
    (tmp_path / "two.json").write_text("{")
    (tmp_path / "three.json").write_text(json.dumps([]))
    assert list(read_records(tmp_path)) == ["one"]
    assert "two.json cannot be read" in caplog.text and "three.json" in caplog.text


def test_servers_stay_while_their_record_cannot_be_read_for_a_while(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    servers = ServerFolder(tmp_path, stale_s=60.0)
    write(tmp_path, "one", entry(1))
    before = servers.servers()
    (tmp_path / "one.json").write_text("{")
    assert servers.servers() == before
    clock(61.0)
    assert servers.servers() == []


def test_requests_without_an_answer_are_reported_to_the_keeper(tmp_path: Path) -> None:
    servers = ServerFolder(tmp_path)
    write(tmp_path, "one", entry(1))
    (client,) = servers.servers()
    client.connections.unanswered = 3
    servers.servers()
    assert (tmp_path / "one.server_1.suspect").exists()
    assert client.connections.unanswered == 0


def test_an_unknown_kind_of_server_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "one", entry(1, kind="tgi"))
    with pytest.raises(ConfigError, match="server_1 is a 'tgi'; expected 'vllm' or 'sglang'"):
        ServerFolder(tmp_path).servers()


@pytest.mark.parametrize("record", [{"state": "up"}, "server_0"], ids=["fewer", "no"])
def test_a_record_of_another_format_is_an_error(tmp_path: Path, record: Any) -> None:
    write(tmp_path, "one", record)
    with pytest.raises(ConfigError, match=r"host one in .* has another format"):
        ServerFolder(tmp_path).servers()


def test_no_server_is_started_beside_a_record_of_another_format(tmp_path: Path) -> None:
    host = socket.gethostname()
    (tmp_path / f"{host}.json").write_text('{"servers": [], "beat": 1.0}')
    spec = ServerSpec("vllm", "/models/base", device="cpu", max_model_len=8)
    with pytest.raises(ConfigError, match=f"host {host} in .* has another format"):
        ServerProcesses(spec, 1, tmp_path).start()


def test_servers_of_a_folder_take_no_turns_with_the_trainer(tmp_path: Path) -> None:
    servers = ServerFolder(tmp_path)
    servers.hold(False)
    with pytest.raises(ConfigError, match="cannot take turns"):
        servers.hold(True)
    with pytest.raises(ConfigError, match="stale_s"):
        ServerFolder(tmp_path, stale_s=1.0)
