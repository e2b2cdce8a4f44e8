"""``holdfast serve`` keeps servers running beside a job, and ``top`` and ``why`` show them."""

import json
import os
import signal
import socket
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.launch import ServerFolder
from holdfast.engine.launch.records import read_records, write_private
from holdfast.engine.servers import ServerFleet
from holdfast.recover.storage.journal import JOURNAL_NAME
from holdfast.utils.processes import processes_of_group
from tests.engine.launch.stand_in import stand_in_environment
from tests.engine.servers.scripted import write_published
from tests.limits import stretched, wait_until
from tests.recover.cli.commands import answer, finish, holdfast, start

pytestmark = pytest.mark.timeout(120)

LIMIT_S = stretched(20)
START_S = 40.0


def records(run: Path) -> list[dict[str, Any]]:
    found = read_records(run / "servers").get(socket.gethostname())
    return [] if found is None else found["servers"]


def serve(tmp_path: Path, *options: str, **variables: str) -> Any:
    environment = {**os.environ, **stand_in_environment(FAKE_VLLM_HASHED="1", **variables)}
    command = ("serve", tmp_path, "--run", tmp_path / "run", "--python", sys.executable)
    return start(*command, *options, env=environment)


def test_a_record_of_another_format_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "recover").mkdir()
    (tmp_path / "journal.jsonl").touch()
    (tmp_path / "servers").mkdir()
    (tmp_path / "servers" / "node-7.json").write_text('{"servers": [{}], "beat": 1.0}')
    for command in ("top", "why"):
        code, _, err = holdfast(command, tmp_path)
        assert code == 2 and "host node-7" in err and "another format" in err


@pytest.mark.slow
def test_a_fleet_finds_the_servers_and_follows_them_until_the_command_is_ended(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    process = serve(tmp_path)
    try:
        wait_until(lambda: [one for one in records(run) if one["state"] == "up"], START_S)
        servers = ServerFolder(run / "servers")
        with closing(ServerFleet(servers, probe_interval_s=0.1)) as fleet:
            fleet.update(write_published(tmp_path / "weights", 1), 1, LIMIT_S)
            before = fleet.serving()[0]

            # It comes back at another address, with the newest weights.
            record = json.loads((run / "servers" / f"{socket.gethostname()}.json").read_text())
            ((group, _),) = record["groups"]
            os.killpg(group, signal.SIGKILL)
            wait_until(lambda: fleet.serving() not in ([], [before]), START_S)
            assert fleet.stats()["servers_restarted"] == 1
            assert fleet.serving()[0].status().label == fleet.states()[0].label

        ((group, _),) = read_records(run / "servers")[socket.gethostname()]["groups"]
        assert processes_of_group(group) != []
        process.send_signal(signal.SIGTERM)
        code, out, err = finish(process)
        assert code == 130 and "1 servers are starting" in out
        assert "server_0 is up at http://127.0.0.1:" in err
        assert processes_of_group(group) == []
    finally:
        process.kill()


@pytest.mark.slow
def test_a_server_that_cannot_start_ends_the_command_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    process = serve(tmp_path, "--", "--no-such-flag")
    code, _, err = finish(process)
    assert code == 2 and "unrecognized arguments: --no-such-flag" in err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one server that serves and one that has failed."""
    root = tmp_path / "exp" / "trial"
    (root / "servers" / "node").mkdir(parents=True)
    (root / "recover").mkdir()
    (root / JOURNAL_NAME).write_text("")
    log = root / "servers" / "node" / "server_1.6.log"
    log.write_text("loading, api_key='the key'\nCUDA error: out of memory\n")
    common = {"since": time.time() - 90.0, "version": None, "log": None, "error": None}
    common |= {"api_key": "the key", "admin_key": None}
    up = {**common, "name": "server_0", "state": "up", "version": 7, "restarts": 0}
    failed = {**common, "name": "server_1", "state": "failed", "restarts": 5, "log": str(log)}
    failed["error"] = "it ended with exit code 1"
    record = {"closed": False, "beat": time.time(), "servers": [up, failed]}
    write_private(root / "servers" / "node.json", record)
    return root


def test_top_has_a_row_for_each_server(run: Path) -> None:
    first, second = answer("top", run)["servers"]
    assert (first["state"], first["version"], second["restarts"]) == ("up", 7, 5)
    _, out, _ = holdfast("top", run, "--once")
    assert "server_0 on node" in out and "up for 1.5 min, version 7" in out
    assert "failed for 1.5 min, restarted 5 times, it ended with exit code 1" in out


def test_top_says_that_a_keeper_has_ended(run: Path) -> None:
    record = read_records(run / "servers")["node"]
    write_private(run / "servers" / "node.json", {**record, "beat": time.time() - 120.0})
    assert [one["state"] for one in answer("top", run)["servers"]] == [
        "ended with its keeper",
        "failed",
    ]


def test_why_ends_with_the_log_of_a_failed_server(run: Path) -> None:
    _, out, _ = holdfast("why", run)
    assert "server_1 on node has failed: it ended with exit code 1" in out
    assert out.rstrip().endswith("loading, api_key='***'\nCUDA error: out of memory")
    (failed,) = answer("why", run)["failed_servers"]
    assert failed["name"] == "server_1" and failed["log_end"] in out
