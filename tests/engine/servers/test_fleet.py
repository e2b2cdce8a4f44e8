"""Servers are updated together, their state is known, and missed servers are brought up to date."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Barrier, Condition, Event
from types import SimpleNamespace

import pytest

from holdfast.engine.hf.versions import delete_old, published_versions
from holdfast.engine.servers import ServerFleet, fleet_member
from holdfast.engine.servers.api import (
    InferenceServer,
    ObservableServer,
    ServerState,
    ServerStatus,
    weights_label,
)
from holdfast.engine.servers.fleet_member import FleetMember
from holdfast.utils.errors import (
    CheckpointCorruptError,
    ConfigError,
    PublishError,
    StopRequested,
    WorkerLost,
)
from holdfast.utils.heartbeat import beat, seconds_since_beat
from holdfast.utils.stopping import forget_stop, note_stop
from holdfast.utils.threads import on_daemon_thread
from tests.engine.servers.scripted import (
    PlainServer,
    ScriptedServer,
    refuse,
    write_published,
)
from tests.limits import stretched, wait_until

pytestmark = pytest.mark.timeout(60)

LIMIT_S = stretched(20)
"""Limit for updates that should succeed."""
SERVING, BEHIND, PAUSED, GONE = (
    ServerState.SERVING,
    ServerState.BEHIND,
    ServerState.PAUSED,
    ServerState.GONE,
)

MakeFleet = Callable[..., ServerFleet]


@pytest.fixture
def make_fleet() -> Iterator[MakeFleet]:
    """Makes `ServerFleet`s with a frequent prober, closed at the end."""
    fleets: list[ServerFleet] = []

    def make(
        *servers: InferenceServer,
        min_servers: int | None = None,
        probe_interval_s: float | None = 0.05,
    ) -> ServerFleet:
        fleets.append(ServerFleet(servers, min_servers, probe_interval_s))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


def states(fleet: ServerFleet) -> list[ServerState]:
    return [report.state for report in fleet.states()]


def hang(server: PlainServer, fleet: ServerFleet, folder: Path, version: int) -> None:
    """Make an update that a server gets, but does not answer in time."""
    server.go.clear()
    server.began.clear()
    with pytest.raises(PublishError, match=r"is gone: it did not load .* within 0.2 s"):
        fleet.update(folder, version, 0.2)
    assert server.began.wait(LIMIT_S)


def test_all_servers_are_told_at_once_and_confirm(tmp_path: Path, make_fleet: MakeFleet) -> None:
    together = Barrier(3)
    servers = [ScriptedServer(f"s{i}", lambda version: together.wait(LIMIT_S)) for i in range(3)]
    fleet = make_fleet(*servers)
    assert fleet.serving() == [] and states(fleet) == [BEHIND] * 3, "nobody was told anything yet"
    reports = fleet.update(folder := write_published(tmp_path, 1), 1, LIMIT_S)
    assert fleet.serving() == servers and reports == fleet.states()
    assert {report.label for report in reports} == {weights_label(folder, 1)}
    assert isinstance(servers[0], ObservableServer) and not isinstance(
        PlainServer(), ObservableServer
    )


def test_too_few_confirmations_name_each_server_and_why(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    def leak(version: int) -> None:
        raise ConnectionError("http://me:secret@bad/load broke off")

    good, bad, off = (
        PlainServer("good"),
        ScriptedServer("http://me:secret@bad", leak),
        ScriptedServer("off"),
    )
    off.alive = False
    fleet, folder = make_fleet(good, bad, off, probe_interval_s=None), write_published(tmp_path, 4)
    with pytest.raises(PublishError) as caught:
        fleet.update(folder, 4, LIMIT_S)
    wait_until(
        lambda: states(fleet) == [SERVING, PAUSED, GONE]
    )  # the first failure has ended the update
    known = [str(report) for report in fleet.states()]
    assert known[1] == "http://bad is paused (ConnectionError: http://bad/load broke off)"
    assert known[2] == "off is gone (off refused the connection)"
    message = str(caught.value)
    assert f"{folder} stays" in message and "3 are needed" in message and "secret" not in message
    assert "http://bad is" in message or "off is" in message


def test_a_server_that_confirms_another_version_has_not_confirmed(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    server = PlainServer()
    server._load = lambda path, version: version - 1
    with pytest.raises(
        PublishError,
        match=r"plain is behind: it serves version 2 after it was told to load version 3",
    ):
        make_fleet(server).update(write_published(tmp_path, 3), 3, LIMIT_S)


def test_one_server_of_two_may_be_gone_where_one_is_enough(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    alive, dead = ScriptedServer("alive"), ScriptedServer("dead")
    dead.alive = False
    fleet, folder = make_fleet(alive, dead), write_published(tmp_path, 1)
    with pytest.raises(PublishError, match=r"dead is gone: dead refused the connection"):
        fleet.update(folder, 1, LIMIT_S)
    fleet.update(folder, 1, LIMIT_S, min_servers=1)
    assert fleet.serving() == [alive]
    wait_until(lambda: states(fleet) == [SERVING, GONE])
    dead.restart()
    assert fleet.wait_serving(2, LIMIT_S)
    assert dead.label == weights_label(folder, 1)


def test_a_restarted_server_is_brought_up_without_a_publication(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    server = ScriptedServer()
    fleet, folder = make_fleet(server), write_published(tmp_path, 1)
    fleet.update(folder, 1, LIMIT_S)
    server.go.clear()
    server.restart()
    wait_until(lambda: states(fleet) == [BEHIND])
    assert fleet.serving() == []
    server.go.set()
    assert fleet.wait_serving(1, LIMIT_S)
    assert server.status() == ServerStatus(weights_label(folder, 1), paused=False)


def test_a_server_left_paused_is_updated_again(tmp_path: Path, make_fleet: MakeFleet) -> None:
    server = ScriptedServer()
    fleet, folder = make_fleet(server, probe_interval_s=None), write_published(tmp_path, 1)
    for _ in range(2):
        fleet.update(folder, 1, LIMIT_S)
        assert not server.paused
        server.paused = (
            True  # the label is right, but a publisher was killed between pause and load
        )
    assert server.told == [1, 1], "an update goes to all of them, whatever their label is"
    probed = make_fleet(server)
    probed.update(folder, 1, LIMIT_S)
    server.go.clear()
    server.paused = True
    wait_until(lambda: states(probed) == [PAUSED])
    server.go.set()
    assert probed.wait_serving(1, LIMIT_S) and not server.paused


def test_a_server_that_another_job_publishes_to_is_warned_of_and_brought_back(
    tmp_path: Path, make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    server = ScriptedServer()
    fleet, folder = make_fleet(server), write_published(tmp_path / "ours", 7)
    fleet.update(folder, 7, LIMIT_S)
    theirs = write_published(tmp_path / "theirs", 7, "other weights")
    # At once, so that no look finds it paused.
    server.label = weights_label(theirs, 7)
    wait_until(lambda: server.told == [7, 7])
    assert fleet.wait_serving(1, LIMIT_S) and server.label == weights_label(folder, 7)
    told = f"it serves {weights_label(theirs, 7)}, published by somebody else since it confirmed"
    assert told in caplog.text and "let one job publish to a server" in caplog.text


def test_a_right_label_is_not_believed_after_a_failed_update(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    server, healed = ScriptedServer(), Event()
    load = server._load

    def label_and_fail(path: str, version: int) -> int:
        load(path, version)
        if not healed.is_set():
            raise PublishError("it answers by other weights")
        return version

    server._load = label_and_fail
    fleet = make_fleet(server)
    with pytest.raises(PublishError, match="scripted is behind: it answers by other weights"):
        fleet.update(folder := write_published(tmp_path, 1), 1, LIMIT_S)
    assert server.label == weights_label(folder, 1) and states(fleet) != [SERVING]
    healed.set()
    assert fleet.wait_serving(1, LIMIT_S)
    assert len(server.told) > 1, "the prober has told it again"


def test_a_server_that_hangs_is_gone_until_it_answers(
    tmp_path: Path, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_member, "_SILENCE_S", 0.1)
    server, awake = ScriptedServer(), Event()
    fleet = make_fleet(server)
    fleet.update(write_published(tmp_path, 1), 1, LIMIT_S)
    status = server.status
    server.status = lambda: (awake.wait(LIMIT_S), status())[1]
    wait_until(lambda: states(fleet) == [GONE])
    awake.set()
    assert fleet.wait_serving(1, LIMIT_S)
    assert server.told == [1], "it has kept what it had confirmed"


@pytest.mark.parametrize("kind", [PlainServer, ScriptedServer])
def test_a_late_answer_counts_and_no_server_gets_two_updates_at_once(
    tmp_path: Path, make_fleet: MakeFleet, kind: type[PlainServer]
) -> None:
    server = kind()
    fleet = make_fleet(server)
    hang(server, fleet, write_published(tmp_path, 1), 1)
    assert states(fleet) == [GONE]
    time.sleep(0.2)  # the prober has had time to update it
    server.go.set()
    assert fleet.wait_serving(1, LIMIT_S)
    assert server.told == [1]


@pytest.mark.parametrize("kind", [PlainServer, ScriptedServer])
def test_a_late_answer_to_an_older_version_is_followed_by_the_newest(
    tmp_path: Path, make_fleet: MakeFleet, kind: type[PlainServer]
) -> None:
    server = kind()
    fleet = make_fleet(server)
    hang(server, fleet, write_published(tmp_path, 1), 1)
    with pytest.raises(PublishError, match=r"did not load .*v00000002 within 0.2 s"):
        fleet.update(newest := write_published(tmp_path, 2), 2, 0.2)
    assert server.told == [1], "it is still busy"
    server.go.set()
    assert fleet.wait_serving(1, LIMIT_S)
    assert (server.told, server.most_at_once) == ([1, 2], 1)
    assert fleet.states()[0].label == weights_label(newest, 2)


def test_an_update_waits_for_an_earlier_one_within_its_time(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    server = ScriptedServer("slow", lambda version: time.sleep(0.4 if version == 1 else 0))
    fleet = make_fleet(server, probe_interval_s=None)
    with pytest.raises(PublishError, match=r"slow is gone: it did not load .* within 0.1 s"):
        fleet.update(write_published(tmp_path, 1), 1, 0.1)
    fleet.update(write_published(tmp_path, 2), 2, LIMIT_S)
    assert (server.told, server.most_at_once) == ([1, 2], 1)
    assert states(fleet) == [SERVING]


def test_servers_that_did_not_serve_before_are_waited_for_only_while_needed(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    good, hung = ScriptedServer("good"), ScriptedServer("hung")
    fleet = make_fleet(good, hung, probe_interval_s=None)
    fleet.update(write_published(tmp_path, 1), 1, LIMIT_S)
    hung.go.clear()
    started = time.monotonic()
    fleet.update(write_published(tmp_path, 2), 2, 0.3, min_servers=1)
    assert time.monotonic() - started >= 0.3, "it had served, so it got its time"
    assert states(fleet) == [SERVING, GONE]
    started = time.monotonic()
    fleet.update(write_published(tmp_path, 3), 3, LIMIT_S, min_servers=1)
    assert time.monotonic() - started < LIMIT_S / 2
    assert fleet.serving() == [good]
    hung.go.set()
    assert fleet.wait_serving(2, LIMIT_S), "it hears of the newest when it has answered"
    assert hung.told == [1, 2, 3]


def test_a_server_that_missed_an_update_is_looked_at_at_once(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    good, late = ScriptedServer("good"), ScriptedServer("late")
    late.answer = lambda version: refuse(version) if late.told == [1] else None
    fleet = make_fleet(good, late, probe_interval_s=600.0)
    fleet.update(write_published(tmp_path, 1), 1, LIMIT_S, min_servers=1)
    assert fleet.wait_serving(2, LIMIT_S)


def test_a_plain_server_that_failed_is_tried_again(tmp_path: Path, make_fleet: MakeFleet) -> None:
    server = PlainServer(answer=refuse)
    fleet = make_fleet(server)
    with pytest.raises(PublishError, match="plain is behind: version 1 cannot be loaded"):
        fleet.update(write_published(tmp_path, 1), 1, LIMIT_S)
    wait_until(lambda: len(server.told) >= 3)
    server.answer = lambda version: None
    assert fleet.wait_serving(1, LIMIT_S)


def test_a_load_that_goes_on_failing_is_tried_less_and_less_often_and_logged_once(
    tmp_path: Path, make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    server = ScriptedServer(answer=refuse)
    fleet = make_fleet(server, probe_interval_s=0.02)
    with pytest.raises(PublishError, match="scripted is paused: version 1 cannot be loaded"):
        fleet.update(write_published(tmp_path, 1), 1, LIMIT_S)
    end = time.monotonic() + 1.0
    wait_until(lambda: time.monotonic() > end)
    assert 3 <= len(server.told) <= 8, "not the fifty times that it was looked at"
    assert fleet.states()[0].error == "version 1 cannot be loaded"
    assert caplog.text.count("version 1 cannot be loaded") == 1


def test_a_server_that_comes_and_goes_is_logged_in_full_once(
    tmp_path: Path, make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    server = ScriptedServer(answer=refuse)
    fleet = make_fleet(server, probe_interval_s=0.02)
    with pytest.raises(PublishError):
        fleet.update(write_published(tmp_path, 1), 1, LIMIT_S)
    for _ in range(2):
        server.alive = False
        wait_until(lambda: states(fleet) == [GONE])
        told = len(server.told)
        server.restart()
        wait_until(lambda told=told: len(server.told) > told and states(fleet) == [PAUSED])
    wait_until(
        lambda: caplog.text.count("scripted is paused as before (it was ") == 2
    )  # logged after the state is set
    assert caplog.text.count("version 1 cannot be loaded") == 1


def test_the_loss_of_a_worker_is_told_as_such_when_it_is_the_reason(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    def die(version: int) -> None:
        raise WorkerLost("rollout", [0], "died during the update")

    good, lost, other = PlainServer("good"), PlainServer("lost", die), PlainServer("other")
    fleet, folder = (
        make_fleet(good, lost, other, probe_interval_s=None),
        write_published(tmp_path, 1),
    )
    with pytest.raises(WorkerLost) as caught:
        fleet.update(folder, 1, LIMIT_S)
    assert (caught.value.group, caught.value.ranks) == ("rollout", [0])
    assert "lost is gone: worker group 'rollout' lost rank(s) [0]" in str(caught.value.__cause__)
    fleet.update(folder, 1, LIMIT_S, min_servers=2)
    assert fleet.serving() == [good, other]


def test_a_version_published_again_replaces_the_weights_of_all_servers(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    servers = [ScriptedServer("a"), ScriptedServer("b"), PlainServer("c")]
    fleet = make_fleet(*servers)
    fleet.update(write_published(tmp_path, 7), 7, LIMIT_S)
    servers[1].paused = True
    for version, contents in ((7, "of another life"), (5, "of an older step")):
        fleet.withdraw(version)
        assert fleet.serving() == [], "what they serve was taken back"
        folder = write_published(tmp_path, version, contents)
        fleet.update(folder, version, LIMIT_S)
        assert {report.label for report in fleet.states()} == {weights_label(folder, version)}
        assert fleet.serving() == servers and not servers[0].paused and not servers[1].paused


def test_publishing_a_version_again_warns_of_nothing(
    tmp_path: Path, make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    server = ScriptedServer("one")
    fleet, folder = make_fleet(server), write_published(tmp_path, 1)
    fleet.update(folder, 1, LIMIT_S)
    fleet.withdraw(1)
    assert states(fleet) == [BEHIND] and not caplog.records, (
        "it serves what is about to be replaced"
    )
    fleet.update(folder, 1, LIMIT_S)
    assert states(fleet) == [SERVING] and not caplog.records


def test_a_status_that_comes_after_a_withdrawal_brings_no_server_back(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    server = ScriptedServer()
    asked = Event()
    go = Event()

    def late_status() -> ServerStatus:
        status = ScriptedServer.status(server)
        asked.set()
        assert go.wait(LIMIT_S)
        return status

    fleet = make_fleet(server)
    fleet.update(write_published(tmp_path, 7), 7, LIMIT_S)
    server.status = late_status
    assert asked.wait(LIMIT_S)
    fleet.withdraw(7)
    go.set()
    wait_until(lambda: not fleet._members[0].busy.locked())
    assert fleet.serving() == []
    assert states(fleet) == [BEHIND]


def test_withdrawing_a_newer_version_leaves_the_published_one_alone(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    server = ScriptedServer()
    fleet = make_fleet(server)
    fleet.update(write_published(tmp_path, 1), 1, LIMIT_S)
    fleet.withdraw(2)
    assert fleet.serving() == [server]
    server.restart()
    wait_until(lambda: len(server.told) == 2)
    assert fleet.wait_serving(1, LIMIT_S), "the prober goes on with it"


def test_a_folder_that_is_replaced_while_it_is_loaded_is_not_confirmed(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    server = ScriptedServer(
        answer=lambda version: write_published(tmp_path, version, "other contents")
    )
    with pytest.raises(PublishError, match="was replaced while it was loaded"):
        make_fleet(server, probe_interval_s=None).update(write_published(tmp_path, 1), 1, LIMIT_S)


def test_a_folder_that_is_being_loaded_is_not_deleted(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    good, slow = ScriptedServer("good"), ScriptedServer("slow")
    fleet = make_fleet(good, slow)
    slow.go.clear()
    for version, limit_s in ((1, 0.2), (2, LIMIT_S), (3, LIMIT_S)):
        fleet.update(write_published(tmp_path, version), version, limit_s, min_servers=1)
        delete_old(str(tmp_path), 1, fleet.folders_in_use())
    assert published_versions(tmp_path) == [1, 3]
    slow.go.set()
    assert fleet.wait_serving(2, LIMIT_S)
    assert slow.told == [1, 3]
    delete_old(str(tmp_path), 1, fleet.folders_in_use())
    assert published_versions(tmp_path) == [3]


def test_a_version_is_withdrawn_only_when_no_server_loads_it_any_more(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    slow = ScriptedServer("slow")
    fleet, folder = make_fleet(slow), write_published(tmp_path, 2)
    slow.go.clear()
    with pytest.raises(PublishError, match="did not load"):
        fleet.update(folder, 2, 0.2)
    fleet.withdraw(3)
    for limit_s in (None, 0.1):  # the limit of the update, or another one
        with pytest.raises(
            PublishError, match=rf"server slow is still loading {folder} after another 0\.[12] s"
        ):
            fleet.withdraw(1, limit_s)

    withdrawn = on_daemon_thread(lambda: fleet.withdraw(2, LIMIT_S), "withdraw")
    time.sleep(0.1)
    assert not withdrawn.done() and fleet.folders_in_use() == {folder}
    slow.go.set()
    withdrawn.result(LIMIT_S)
    assert fleet.folders_in_use() == set() and slow.told == [2]


def test_a_job_that_is_to_stop_does_not_wait_for_a_load_to_end(
    tmp_path: Path, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.utils.stopping.PATIENCE_S", 0.1)
    slow = ScriptedServer("slow")
    fleet = make_fleet(slow)
    slow.go.clear()
    with pytest.raises(PublishError, match="did not load"):
        fleet.update(write_published(tmp_path, 1), 1, 0.2)
    note_stop("SIGTERM")
    try:
        with pytest.raises(StopRequested, match="SIGTERM came while the job waited for inference"):
            fleet.withdraw(1, LIMIT_S)
    finally:
        forget_stop()
        slow.go.set()


def test_a_removed_server_keeps_no_version_from_being_withdrawn(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    stuck = ScriptedServer("stuck")
    fleet = make_fleet(stuck)
    stuck.go.clear()
    with pytest.raises(PublishError, match="did not load"):
        fleet.update(write_published(tmp_path, 1), 1, 0.2)
    withdrawn = on_daemon_thread(lambda: fleet.withdraw(1, LIMIT_S), "withdraw")
    fleet.remove("stuck")
    withdrawn.result(1.0)
    stuck.go.set()


def test_statistics_count_states_and_time_the_slowest(
    tmp_path: Path, make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    good, bad, off = ScriptedServer("good"), ScriptedServer("bad", refuse), ScriptedServer("off")
    off.alive = False
    fleet = make_fleet(good, bad, off, PlainServer(), probe_interval_s=None)
    fleet.update(folder := write_published(tmp_path, 1), 1, LIMIT_S, min_servers=2)
    wait_until(lambda: states(fleet) == [SERVING, PAUSED, GONE, SERVING])
    stats = fleet.stats()
    total_s = stats.pop("update_total_s")
    numbers = {"serving": 2, "behind": 0, "paused": 1, "asleep": 0, "gone": 1, "starting": 0}
    assert stats == {"update_load_s": 0.25} | {
        f"servers_{state}": number for state, number in numbers.items()
    }
    assert 0 < total_s < LIMIT_S
    lines = [record.getMessage() for record in caplog.records]
    assert f"inference server good is serving {weights_label(folder, 1)} (it was behind)" in lines
    assert "inference server bad is paused (version 1 cannot be loaded) (it was behind)" in lines


def test_invalid_fleets_and_versions_are_refused(tmp_path: Path, make_fleet: MakeFleet) -> None:
    with pytest.raises(ConfigError, match="inference server x is named twice"):
        ServerFleet([PlainServer("x"), PlainServer("x")])
    with pytest.raises(ConfigError, match="min_servers is 2, but there are 1 inference servers"):
        ServerFleet([PlainServer()], min_servers=2)
    with pytest.raises(ConfigError, match="'min_servers' is 0; expected a value from 1"):
        ServerFleet([PlainServer()], min_servers=0)
    fleet = make_fleet(server := PlainServer())
    with pytest.raises(
        ConfigError, match="holds weight version 1; it was to be published as version 2"
    ):
        fleet.update(write_published(tmp_path, 1), 2, LIMIT_S)
    with pytest.raises(CheckpointCorruptError, match="was never committed"):
        fleet.update(tmp_path / "v00000009", 9, LIMIT_S)
    assert server.told == []


def test_looking_at_servers_is_no_progress_of_the_process(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    server = ScriptedServer(answer=refuse)
    fleet = make_fleet(server)
    with pytest.raises(PublishError):
        fleet.update(write_published(tmp_path, 1), 1, LIMIT_S)
    beat()
    begun = time.monotonic()
    server._load = lambda path, version: version
    assert fleet.wait_serving(1, LIMIT_S)
    assert seconds_since_beat() >= time.monotonic() - begun - 0.01, (
        "a rank that hangs would not be found"
    )


def test_a_closed_fleet_updates_no_server(tmp_path: Path, make_fleet: MakeFleet) -> None:
    server = ScriptedServer()
    fleet = make_fleet(server)
    fleet.update(write_published(tmp_path, 1), 1, LIMIT_S)
    fleet.close()
    server.restart()
    time.sleep(0.3)
    assert server.label is None


def test_a_fleet_without_servers_has_nothing_to_wait_for(
    tmp_path: Path, make_fleet: MakeFleet
) -> None:
    fleet = make_fleet()
    assert fleet.update(write_published(tmp_path, 1), 1, LIMIT_S) == []
    assert fleet.wait_serving(0, 0.0) and not fleet.wait_serving(1, 0.0)


def test_a_status_request_may_end_while_its_duration_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    member = FleetMember(PlainServer(), Condition())
    member._asked_at = 0.0

    def ends() -> float:
        member._asked_at = None
        return 1e9

    monkeypatch.setattr(fleet_member, "time", SimpleNamespace(monotonic=ends))
    member.note_silence()
    assert member.report.state is GONE


def test_a_load_may_fail_any_number_of_times() -> None:
    member = FleetMember(PlainServer(), Condition())
    member._failures = 5000
    assert member._retry_at(1.0) == 300.0
