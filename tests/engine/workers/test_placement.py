"""Bundles for ranks: waited for, given to fewer ranks, never on an unhealthy node."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import ray
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.util import placement_group_table

from holdfast.engine.workers import nodes, placement
from holdfast.engine.workers.nodes import Raylet, ask_raylets, nodes_to_avoid
from holdfast.engine.workers.placement import PlacementRequest, WorkerResources, place
from holdfast.utils.errors import ConfigError, ResourcesUnavailable, WorkerLost
from tests.limits import stretched
from tests.ray_helpers import local_ray

__all__ = ["local_ray"]
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def nothing_stays_reserved() -> Iterator[None]:
    yield
    assert all(entry["state"] == "REMOVED" for entry in placement_group_table().values())


@pytest.mark.slow
def test_a_raylet_is_well_ended_or_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    (own,) = ray.nodes()
    assert ask_raylets([own["NodeID"]]) == {own["NodeID"]: Raylet.WELL}
    assert nodes_to_avoid() == {}
    with ExitStack() as sockets:
        mute = sockets.enter_context(
            socket.create_server(("127.0.0.1", 0))
        )  # like a stopped raylet
        gone = sockets.enter_context(socket.socket())
        gone.bind(("127.0.0.1", 0))  # no process can take the port, and none listens there
        ports = {"mute": mute.getsockname()[1], "gone": gone.getsockname()[1]}
        fakes = [
            {
                "NodeID": name,
                "NodeManagerAddress": "127.0.0.1",
                "NodeManagerPort": port,
                "Alive": True,
                "Resources": {},
            }
            for name, port in ports.items()
        ]
        monkeypatch.setattr(nodes, "PROBE_S", 0.2)
        monkeypatch.setattr(ray, "nodes", lambda: [own, *fakes])
        assert ask_raylets(["mute", "gone"]) == {"mute": Raylet.SILENT, "gone": Raylet.ENDED}
        assert nodes_to_avoid() == {"mute": Raylet.SILENT.value, "gone": Raylet.ENDED.value}


@pytest.mark.slow
def test_resources_that_the_jobs_own_ray_never_has_are_refused_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(
        ConfigError,
        match=r"'big' needs 5 x \{'CPU': 1\} \(PACK\), more than this Ray has, .*room for 4",
    ):
        place(PlacementRequest("big", 5, WorkerResources()), 60)
    assert time.monotonic() - began < stretched(5)


@pytest.mark.slow
def test_fewer_ranks_are_placed_and_the_rest_stays_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = PlacementRequest("thirds", 6, WorkerResources(), min_world_size=2, multiple_of=3)
    found = place(request, 60)
    assert found.world_size == 3, "there is room for 4"
    found.remove()
    found = place(PlacementRequest("elastic", 6, WorkerResources(), min_world_size=2), 60)
    assert (found.world_size, found.is_sound(), found.can_grow()) == (4, True, False)
    assert (
        "'elastic' goes on with 4 of 6 ranks, 6 x {'CPU': 1} (PACK): 1 node(s) have {'CPU': 4.0}"
        in caplog.text
    )
    states = sorted(e["state"] for e in placement_group_table().values() if e["state"] != "REMOVED")
    assert states == ["CREATED", "PENDING"]
    demands = get_cluster_status(
        ray.get_runtime_context().gcs_address
    ).resource_demands.placement_group_demand
    assert [bundles.count for demand in demands for bundles in demand.bundles_by_count] == [2], (
        "autoscalers see it"
    )
    found.remove()


@pytest.mark.slow
def test_a_placement_grows_when_the_rest_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    other = place(PlacementRequest("other", 2, WorkerResources()), 60)
    monkeypatch.setattr(placement, "_LOCAL_WAIT_S", 0.0)
    request = PlacementRequest("elastic", 4, WorkerResources(), min_world_size=1)
    found = place(request, 60, shrink_after_s=0.0)
    assert (found.world_size, found.can_grow()) == (2, False)
    other.remove()
    while not found.can_grow():
        time.sleep(0.05)
    found.grow()
    assert (found.world_size, found.is_sound(), len(found.ids())) == (4, True, 2)
    slots = [found.slot(rank) for rank in range(4)]
    assert [slot.placement_group_bundle_index for slot in slots] == [0, 1, 0, 1]
    with pytest.raises(ConfigError, match="more ranks than the 4 placed"):
        found.slot(4)
    found.remove()


@pytest.mark.slow
def test_a_wait_ends_with_one_error_that_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = place(PlacementRequest("other", 3, WorkerResources()), 60)
    monkeypatch.setattr(placement, "_LOCAL_WAIT_S", 0.5)
    with pytest.raises(
        ResourcesUnavailable,
        match=r"within 0.5 s: 1 node.*room for 4 rank.*free are .*room for 1\. ",
    ):
        place(PlacementRequest("late", 2, WorkerResources()), 60)
    other.remove()


@pytest.mark.slow
def test_nobody_waits_for_resources_once_the_job_has_ended() -> None:
    other = place(PlacementRequest("other", 3, WorkerResources()), 60)
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(WorkerLost, match="the job has ended"):
        place(PlacementRequest("late", 2, WorkerResources()), 60, stop=stop)
    other.remove()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"world_size": 0}, "expected at least one"),
        ({"strategy": "LINE"}, "strategy"),
        ({"min_world_size": 3}, "expected 1 to world_size, 2"),
        ({"multiple_of": 4}, r"asks for 2 rank\(s\); expected a multiple of multiple_of, 4"),
        (
            {"min_world_size": 1, "strategy": "STRICT_PACK"},
            "places all ranks at once; use PACK or SPREAD",
        ),
    ],
)
def test_requests_that_make_no_sense_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        PlacementRequest(
            **{"name": "odd", "world_size": 2, "resources": WorkerResources(), **options}
        )
