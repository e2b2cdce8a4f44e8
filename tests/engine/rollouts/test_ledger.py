"""The executor's state: its contents, its restoration, and refused states."""

import asyncio
from typing import Any

import pytest
import torch

from holdfast.engine.rollouts import RolloutExecutor, Ticket
from holdfast.engine.servers.api import ModelRequest, ModelResponse
from holdfast.utils.errors import CheckpointMismatchError, ConfigError
from holdfast.utils.plain_values import pack_plain, unpack_plain
from tests.engine.rollouts.servers import Cut, Echo, Server, make_executor, make_loader
from tests.limits import wait_until

pytestmark = pytest.mark.timeout(60)


class Gated(Server):
    """Answers only prompts whose first token ``open`` accepts."""

    def __init__(self, version: int = 0) -> None:
        super().__init__(version)
        self.open = lambda first: True

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.seen.append(request)
        await asyncio.sleep(0.0 if self.open(request.input_ids[0]) else 3600.0)
        return await super().agenerate(request)


def saved(executor: RolloutExecutor, loader: Any) -> tuple[Any, Any]:
    """States of executor and loader, as in a generation."""
    return tuple(
        unpack_plain(pack_plain("state", thing.state_dict()), "state")
        for thing in (executor, loader)
    )


def half_done(version: int = 3, **options: Any) -> tuple[Any, Any, Gated]:
    """Server, and states after a step with finished, outstanding and rejected tickets ahead."""
    loader, server = make_loader(), Gated(version)
    server.open = lambda first: first % 2 == 0
    rejects = Echo(rejects=lambda index: index % 6 == 0)
    with make_executor([server], rejects, loader, max_head_offpolicyness=2, **options) as executor:
        executor.set_version(version)
        wait_until(lambda: len(rejects.indices) == 12)
        wait_until(
            lambda: executor.stats()["rollouts/running"] == sum(i % 2 for i in rejects.indices)
        )
        states = saved(executor, loader)
    return *states, server


def restored(
    states: tuple[Any, Any], server: Server, workflow: Any = None, **options: Any
) -> RolloutExecutor:
    loader = make_loader()
    loader.load_state_dict(states[1])
    executor = make_executor(
        [server], workflow or Echo(), loader, **{"max_head_offpolicyness": 2} | options
    )
    executor.load_state_dict(states[0])
    return executor


def test_finished_tickets_come_back_and_the_others_are_sampled_with_their_seeds() -> None:
    state, data, before = half_done()
    outcomes = {entry["number"]: entry["outcome"] for entry in state["tickets"]}
    assert sorted(outcomes) == list(range(12)) and set(outcomes.values()) == {
        "finished",
        "outstanding",
        "rejected",
    }
    after, workflow = Server(3), Echo()
    with restored((state, data), after, workflow) as executor:
        assert not workflow.indices, "nothing starts before the servers serve the restored weights"
        executor.set_version(3)
        found = (
            executor.next_trajectories(3)
            + executor.next_trajectories(4)
            + executor.next_trajectories(5)
        )
    finished = {
        e["number"]: e["trajectory"] for e in state["tickets"] if e["outcome"] == "finished"
    }
    for ticket, trajectory in found:
        if ticket.number in finished:
            assert all(
                torch.equal(trajectory[name], finished[ticket.number][name]) for name in trajectory
            )
    asked = {(tuple(request.input_ids), request.seed) for request in before.seen}
    again = {(tuple(request.input_ids), request.seed) for request in after.seen}
    outstanding = {n for n, outcome in outcomes.items() if outcome == "outstanding"}
    n_replaced = sum(ticket.number >= 12 for ticket, _ in found)
    assert len(again & asked) == len(outstanding) and len(again) == len(outstanding) + n_replaced
    assert n_replaced == sum(outcome == "rejected" for outcome in outcomes.values()) > 0


def _divides_by_three(index: int) -> bool:
    return index % 3 == 0


def test_a_run_that_is_restored_draws_the_tickets_of_one_that_is_not() -> None:
    def tickets(restart_at: int | None) -> list[list[Ticket]]:
        loader, found = make_loader(), []
        options: Any = {"max_head_offpolicyness": 2, "max_concurrent_rollouts": 3}
        executor = make_executor(
            [server := Server(jitter=restart_at)], Echo(_divides_by_three), loader, **options
        )
        for step in range(6):
            if step == restart_at:
                states = saved(executor, loader)
                executor.close()
                executor = restored(states, server, Echo(_divides_by_three), **options)
            server.version = step
            executor.set_version(step)
            found.append([ticket for ticket, _ in executor.next_trajectories(step)])
        executor.close()
        return found

    untouched = tickets(None)
    assert all(tickets(restart_at) == untouched for restart_at in range(1, 6))


def test_a_batch_taken_before_the_snapshot_of_the_step_before_is_not_lost() -> None:
    loader = make_loader()
    with make_executor([server := Server()], None, loader, max_head_offpolicyness=1) as executor:
        executor.set_version(0)
        executor.next_batch(0)
        early = executor.next_batch(1)
        states = saved(executor, loader)  # state of step 0
    with restored(states, server, max_head_offpolicyness=1) as executor:
        executor.set_version(1)
        assert torch.equal(executor.next_batch(1)["versions"], early["versions"])


def test_an_older_ledger_without_truncated_flags_loads_and_makes_batches() -> None:
    state, data, _ = half_done()
    kept = [entry["trajectory"] for entry in state["tickets"] if entry["trajectory"] is not None]
    for trajectory in kept:
        del trajectory["truncated"]  # older versions did not have it
    with restored((state, data), Cut(3)) as executor:
        executor.set_version(3)
        batches = [executor.next_batch(step) for step in (3, 4, 5)]
    n_kept = sum(len(trajectory["rewards"]) for trajectory in kept)
    truncated = torch.cat([batch["truncated"] for batch in batches])
    assert (
        n_kept > 0 and int((truncated == 0).sum()) == n_kept and int(truncated.sum()) == 12 - n_kept
    )


def test_the_state_holds_no_more_steps_than_staleness_allows() -> None:
    server = Server()
    with make_executor([server], max_head_offpolicyness=2) as executor:
        for step in range(5):
            server.version = step
            executor.set_version(step)
            executor.next_batch(step)
            steps = {entry["step"] for entry in executor.state_dict()["tickets"]}
            assert steps == {step, step + 1, step + 2}


def test_a_smaller_bound_samples_too_stale_tickets_again() -> None:
    state, data, _ = half_done(version=3)
    server = Server(5)
    with restored((state, data), server, max_head_offpolicyness=0) as executor:
        for step in (3, 4, 5):
            server.version = step
            executor.set_version(step)
            versions = executor.next_batch(step)["versions"]
            assert set(versions.flatten().tolist()) == {-1, step}


def test_a_smaller_bound_asks_for_nothing_of_a_step_that_is_trained() -> None:
    loader, server, workflow = make_loader(), Server(), Echo()
    with make_executor([server], None, loader, max_head_offpolicyness=2) as executor:
        executor.set_version(0)
        for step in range(3):
            executor.next_batch(step)
            server.version = min(step + 1, 2)
            executor.set_version(server.version)
        states = saved(executor, loader)  # state of step 2, whose tokens are from version 0
    server.version = 3
    with restored(states, server, workflow, max_head_offpolicyness=0) as executor:
        executor.set_version(3)
        assert set(executor.next_batch(3)["versions"].flatten().tolist()) == {-1, 3}
    trained = {ticket["index"] for ticket in states[0]["tickets"] if ticket["step"] == 2}
    assert not trained & set(workflow.indices)


def test_a_larger_bound_keeps_everything() -> None:
    state, data, _ = half_done(version=3)
    server = Server(3)
    with restored((state, data), server, max_head_offpolicyness=3) as executor:
        executor.set_version(3)
        numbers = {
            ticket.number for step in range(3, 7) for ticket, _ in executor.next_trajectories(step)
        }
    assert numbers >= {e["number"] for e in state["tickets"] if e["outcome"] != "rejected"}


def test_indices_that_were_drawn_and_given_to_no_ticket_are_state() -> None:
    loader = make_loader()
    rejects = Echo(rejects=lambda index: index == next(iter(make_loader().index_batches()))[0])
    with make_executor([Server()], rejects, loader) as executor:
        executor.set_version(0)
        executor.next_batch(0)
        state = executor.state_dict()
    assert len(state["drawn"]) == 3 and loader.state_dict()["cursor"] == 8


def _change(**changes: Any) -> Any:
    def change(state: dict[str, Any]) -> None:
        state.update(changes)

    return change


def _change_ticket(**changes: Any) -> Any:
    def change(state: dict[str, Any]) -> None:
        finished = next(entry for entry in state["tickets"] if entry["outcome"] == "finished")
        finished.update(changes)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change(format=2), "not one of format 1"),
        (_change(extra=1), r"has \['batch_size', .*expected"),
        (_change(next_number="7"), "next_number '7', which is a str"),
        (_change(batch_size=8), r"saved with batch_size 8, this job has 4.*Resume with 8"),
        (_change(seed=9), "saved with seed 9"),
        (_change(next_number=2), "is not among 2 tickets"),
        (_change(next_step=4), "steps 3 to 3"),
        (_change_ticket(outcome="lost"), "is 'lost' with a trajectory"),
        (_change_ticket(outcome="outstanding"), "is 'outstanding' with a trajectory"),
        (_change_ticket(trajectory=None), "is 'finished' without a trajectory"),
        (
            _change_ticket(trajectory={"input_ids": torch.ones(1, 2)}),
            "cannot be trained on: the trajectory has no",
        ),
        (_change_ticket(index=1.5), "index 1.5, which is a float"),
        (_change_ticket(number=0, step=4), "ticket 0 of step 4 .* twice"),
        (_change_ticket(seed=7), "has seed 7, which is not that of its number"),
        (_change_ticket(index=-1), "a ticket has index -1; expected 0 or more"),
        (_change(finished=-1), "has finished -1; expected 0 or more"),
        (_change(drawn=["3"]), "has drawn '3', which is no dataset index"),
    ],
)
def test_a_state_that_cannot_be_taken_over_is_refused_in_words(change: Any, message: str) -> None:
    state, _, _ = half_done(version=3)
    change(state)
    with make_executor([Server()], max_head_offpolicyness=2) as executor:
        before = executor.state_dict()
        with pytest.raises(CheckpointMismatchError, match=message):
            executor.load_state_dict(state)
        assert executor.state_dict() == before


def test_a_state_is_not_loaded_into_an_executor_that_has_begun() -> None:
    state, _, _ = half_done(version=3)
    with make_executor([Server()]) as executor:
        executor.set_version(0)
        with pytest.raises(ConfigError, match="has begun already"):
            executor.load_state_dict(state)
