"""The lives of tickets in traces of steps: real traces, with an executor in the same process."""

import asyncio
import json
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine import ProfileConfig
from holdfast.engine.rollouts import Trajectory
from holdfast.engine.rollouts.requests import TicketEngine
from holdfast.engine.training.profiling import StepProfiler
from holdfast.utils.timeline import Life, add_lives, timeline
from tests.engine.rollouts.servers import Echo, Server, make_executor

pytestmark = pytest.mark.timeout(60)

CLOCKS_DIFFER_US = 10_000
"""The profiler converts the clock of the processor, by a measurement of its own."""


async def judge(tokens: list[int]) -> float:
    await asyncio.sleep(0.01)
    return float(tokens[-1])


class Judged(Echo):
    """`Echo` with a call after its answer. Rejects the first ``n_rejected`` tickets, and keeps the
    engines that it got.
    """

    def __init__(self, n_rejected: int = 0) -> None:
        super().__init__()
        self.n_rejected = n_rejected
        self.engines: list[Any] = []

    async def arun_episode(self, engine: Any, data: Any) -> Trajectory | None:
        self.engines.append(engine)
        trajectory = await super().arun_episode(engine, data)
        assert trajectory is not None
        await engine.call(judge, trajectory["input_ids"][0].tolist())
        self.n_rejected -= 1
        return None if self.n_rejected >= 0 else trajectory


def train(steps: int, workflow: Echo, profiler: StepProfiler | None, ahead: int = 1) -> None:
    """Sample the batches of some steps, ``ahead`` of their time."""
    server = Server()
    server.delay = lambda: 0.01
    with make_executor([server], workflow, max_head_offpolicyness=ahead) as executor:
        for step in range(steps):
            if profiler is not None:
                profiler.at(step)
            server.version = step
            executor.set_version(step)
            executor.next_batch(step)


def slices(trace: Path) -> dict[int, list[Any]]:
    """Slices by the number of their ticket, in the order of time."""
    found = defaultdict(list)
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") == "life":
            found[event["args"]["ticket"]].append(event)
    for events in found.values():
        events.sort(key=lambda event: event["ts"])
    return found


def test_a_trace_has_the_phases_of_the_tickets_on_the_clock_of_the_profiler(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileConfig([1], str(tmp_path)), 0, torch.device("cpu"))
    train(3, Judged(), profiler)
    profiler.close()
    trace = tmp_path / "step_1_rank_0.json"
    tickets = slices(trace)

    # Tickets of step 0 end with its weights, and those of step 2 start.
    assert set(tickets) == set(range(12))
    last = {number: events[-1]["name"] for number, events in tickets.items()}
    assert {last[number] for number in range(8)} == {"training"}
    assert [event["name"] for event in tickets[4]] == [
        "queued",
        "workflow",
        "sampling",
        "workflow",
        "rewards, tools",
        "workflow",
        "waiting",
        "training",
    ]
    details = tickets[4][0]["args"]
    assert details.items() >= {"ticket": 4, "step": 1, "accepted": True}.items()
    assert set(details["versions"]) <= {0, 1} and details["versions"]

    # A ticket is in one phase at each moment, and alone on its track.
    tracks = defaultdict(list)
    for events in tickets.values():
        for one, next_one in pairwise(events):
            assert one["ts"] + one["dur"] == pytest.approx(next_one["ts"], abs=1)
        tracks[events[0]["tid"]].append((events[0]["ts"], events[-1]["ts"] + events[-1]["dur"]))
    for lives in tracks.values():
        lives.sort()
        for (_, end), (begin, _) in pairwise(lives):
            assert end <= begin + 1
    assert len(tracks) <= 12

    # Tickets go to training at the end of the wait for their batch.
    events = json.loads(trace.read_text())["traceEvents"]
    (wait,) = (e for e in events if e["name"] == "sampling" and e["cat"] == "user_annotation")
    trained_at = tickets[4][-1]["ts"]
    since_us = trained_at - wait["ts"]
    assert -CLOCKS_DIFFER_US < since_us < wait["dur"] + CLOCKS_DIFFER_US


def test_a_rejected_ticket_ends_and_its_replacement_is_in_the_trace(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileConfig([0], str(tmp_path)), 0, torch.device("cpu"))
    train(1, Judged(n_rejected=1), profiler, ahead=0)
    profiler.close()
    tickets = slices(tmp_path / "step_0_rank_0.json")
    ends = {number: events[-1] for number, events in tickets.items()}
    assert set(ends) == set(range(5))
    (rejected,) = (number for number, end in ends.items() if not end["args"]["accepted"])
    assert rejected < 4 and ends.pop(rejected)["name"] == "workflow"
    assert {end["name"] for end in ends.values()} == {"training"}


def test_nothing_is_kept_of_a_ticket_when_no_step_is_to_be_traced() -> None:
    assert not timeline.is_on
    workflow = Judged()
    train(1, workflow, None)
    assert all(type(engine) is TicketEngine for engine in workflow.engines)
    assert not timeline.stop_trace()


def test_a_file_in_another_format_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text('{"events": []}')
    life = Life(ticket=1)
    life.enter("queued")
    add_lives(trace, "rollout tickets", [life], until_ns=time.monotonic_ns())
    assert trace.read_text() == '{"events": []}'
    assert f"no rollout tickets in {trace}: its format is not known" in caplog.text
