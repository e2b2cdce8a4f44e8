"""The tickets of a batch, their start, and the handling of failed requests and tickets."""

import asyncio
import math
import re
import threading
import time
from typing import Any

import pytest
import torch

from holdfast.engine.rollouts import RolloutConfig, Ticket, rewards_differ
from holdfast.engine.servers.api import ModelRequest, ModelResponse
from holdfast.utils.errors import (
    BusyServerError,
    ConfigError,
    CutOffError,
    RolloutError,
    RolloutTimeout,
    ServerError,
    StopRequested,
)
from holdfast.utils.rng import capture_rng, rng_digest
from holdfast.utils.stopping import forget_stop, note_stop
from tests.engine.rollouts.servers import Echo, Pool, Prompts, Server, make_executor, make_loader
from tests.limits import wait_until

pytestmark = pytest.mark.timeout(60)


def run(steps: int, server: Server, executor: Any) -> list[list[tuple[Ticket, Any]]]:
    """Tickets and trajectories of the steps, with each version served before its step."""
    found = []
    for step in range(steps):
        server.version = step
        executor.set_version(step)
        found.append(executor.next_trajectories(step))
    executor.close()
    return found


def test_a_batch_is_the_tickets_of_its_step_whatever_arrives_first() -> None:
    found = []
    for jitter in (1, 2, 3):
        server = Server(jitter=jitter)
        executor = make_executor([server], max_head_offpolicyness=2, max_concurrent_rollouts=5)
        found.append(run(8, server, executor))
    for steps in found:
        assert [[t.number for t, _ in step] for step in steps] == [
            list(range(4 * s, 4 * s + 4)) for s in range(8)
        ]
        assert [t for step in steps for t, _ in step] == [t for step in found[0] for t, _ in step]
        for step, first in zip(steps, found[0], strict=True):
            for (_, one), (_, other) in zip(step, first, strict=True):
                assert torch.equal(one["input_ids"], other["input_ids"]) and torch.equal(
                    one["rewards"], other["rewards"]
                )
    indices = [ticket.index for step in found[0] for ticket, _ in step]
    batches = make_loader().index_batches()
    assert indices == [index for _ in range(8) for index in next(batches)]


def test_a_batch_has_the_shapes_that_training_expects() -> None:
    with make_executor([Server()], Echo(n_samples=3)) as executor:
        executor.set_version(0)
        batch = executor.next_batch(0)
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "input_ids": ((12, 6), torch.int64),
        "attention_mask": ((12, 6), torch.int64),
        "loss_mask": ((12, 6), torch.int64),
        "logprobs": ((12, 6), torch.float32),
        "versions": ((12, 6), torch.int64),
        "rewards": ((12,), torch.float32),
        "truncated": ((12,), torch.int64),
    }
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1, 1, 1]] * 12
    assert batch["versions"].tolist() == [[-1, -1, 0, 0, 0, 0]] * 12
    assert batch["rewards"].tolist() == batch["input_ids"][:, 2].float().tolist()


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_ticket_starts_earlier_than_staleness_allows(ahead: int) -> None:
    server, workflow = Server(), Echo()
    with make_executor([server], workflow, max_head_offpolicyness=ahead) as executor:
        for step in range(5):
            server.version = step
            executor.set_version(step)
            executor.next_batch(step)
            wait_until(lambda step=step: executor.stats()["rollouts/running"] == 0)
            assert len(workflow.indices) == 4 * (step + 1 + ahead)
            assert executor.stats()["rollouts/staleness_max"] == min(step, ahead)


def test_no_ticket_is_handed_out_for_a_step_after_the_last() -> None:
    server, workflow = Server(), Echo()
    with make_executor([server], workflow, max_head_offpolicyness=4, total_steps=2) as executor:
        executor.set_version(0)
        executor.next_batch(1)
        assert len(workflow.indices) == 8
        with pytest.raises(ConfigError, match="total_steps is 2"):
            executor.next_batch(2)


def test_no_more_tickets_run_at_a_time_than_allowed() -> None:
    running, most, lock = 0, 0, threading.Lock()

    class Counting(Server):
        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            answer = await super().agenerate(request)
            with lock:
                running -= 1
            return answer

    server = Counting(jitter=0)
    run(4, server, make_executor([server], max_head_offpolicyness=3, max_concurrent_rollouts=3))
    assert most == 3


def test_rejected_tickets_are_replaced_in_an_order_that_arrival_does_not_change() -> None:
    found = []
    for jitter in (1, 2, 3):
        server, workflow = Server(jitter=jitter), Echo(rejects=lambda index: index % 3 == 0)
        executor = make_executor(
            [server], workflow, max_head_offpolicyness=2, max_concurrent_rollouts=3
        )
        found.append([[ticket for ticket, _ in step] for step in run(6, server, executor)])
    assert found[0] == found[1] == found[2]
    for step in found[0]:
        assert len(step) == 4 and all(ticket.index % 3 for ticket in step)
        assert [ticket.number for ticket in step] == sorted(ticket.number for ticket in step)
    assert {ticket.round for step in found[0] for ticket in step} > {0, 1}


def test_every_prompt_is_trained_or_rejected_once_an_epoch() -> None:
    server, workflow = Server(), Echo(rejects=lambda index: index % 4 == 0)
    executor = make_executor([server], workflow, max_head_offpolicyness=1)
    steps = run(3, server, executor)  # includes the tickets ahead, so 20 of the 24 prompts
    trained = [ticket.index for step in steps for ticket, _ in step]
    assert len(set(trained)) == len(trained) == 12
    assert len(set(workflow.indices)) == len(workflow.indices), "no prompt was drawn twice"
    assert set(workflow.indices) >= set(trained)


def test_groups_with_equal_rewards_are_drawn_again() -> None:
    server = Server()
    executor = make_executor([server], Echo(n_samples=2), accept=rewards_differ, seed=3)
    steps = run(3, server, executor)
    assert all(rewards_differ(trajectory) for step in steps for _, trajectory in step)
    assert executor.stats()["rollouts/rejected"] > 0


def test_a_step_that_rejects_everything_ends_in_an_error() -> None:
    with make_executor([Server()], Echo(rejects=lambda _: True), max_rounds=3) as executor:
        executor.set_version(0)
        with pytest.raises(RolloutError, match="step 0 lacks 4 of 4 tickets after 3 rounds"):
            executor.next_batch(0)


def test_a_failed_request_moves_to_another_server() -> None:
    broken, sound = Server(), Server()
    broken.broken = True
    with make_executor([broken, sound]) as executor:
        executor.set_version(0)
        batch = executor.next_batch(0)
        assert executor.stats()["rollouts/retried"] > 0
    with make_executor([sound]) as alone:
        alone.set_version(0)
        assert torch.equal(alone.next_batch(0)["input_ids"], batch["input_ids"])
    assert broken.seen and {r.seed for r in broken.seen} <= {r.seed for r in sound.seen}


def test_a_request_that_fails_everywhere_ends_in_one_error_with_the_ticket() -> None:
    server = Server()
    server.broken = True
    with make_executor([server], request_attempts=2) as executor:
        executor.set_version(0)
        expected = (
            r"ticket \d of step 0 \(dataset index \d+\) cannot be finished: .*server-\d+ is broken"
        )
        with pytest.raises(RolloutError, match=expected):
            executor.next_batch(0)


def test_a_server_that_hangs_is_given_up_for_another() -> None:
    class Hanging(Server):
        timeouts = 0

        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            self.delay = lambda: 3600.0
            return await super().agenerate(request)

        def note_timeout(self) -> None:
            self.timeouts += 1

    hanging = Hanging()
    with make_executor([hanging, Server()], request_timeout_s=0.2) as executor:
        executor.set_version(0)
        executor.next_batch(0)
    assert hanging.timeouts == len(hanging.seen) > 0, "whoever started it can look after it"


def test_a_run_whose_servers_cannot_be_started_again_ends_with_the_reason() -> None:
    lost = threading.Event()

    def serving() -> list[Server]:
        if lost.is_set():
            raise RolloutError("0 inference servers are left")
        return []

    with make_executor(Pool(serving)) as executor:
        executor.set_version(0)
        lost.set()
        with pytest.raises(RolloutError, match=r"ticket \d .*0 inference servers are left"):
            executor.next_batch(0)


def test_servers_that_come_back_are_waited_for() -> None:
    serving: list[Server] = []
    with make_executor(serving) as executor:
        executor.set_version(0)
        threading.Timer(0.2, serving.append, [Server()]).start()
        executor.next_batch(0)


def test_a_function_instead_of_the_fleet_is_refused_with_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"servers is <function .*such as a ServerFleet"):
        make_executor(lambda: [Server()])


def test_no_server_at_all_ends_in_an_error() -> None:
    with make_executor([], server_wait_s=0.1) as executor:
        executor.set_version(0)
        with pytest.raises(RolloutError, match=r"no server could be used for 0\.1 s"):
            executor.next_batch(0)


def test_a_job_that_is_to_stop_waits_for_no_server_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.utils.stopping.PATIENCE_S", 0.1)
    with make_executor(Pool(lambda: [])) as executor:
        executor.set_version(0)
        note_stop("SIGTERM")
        try:
            with pytest.raises(StopRequested, match="SIGTERM came while the job waited for an inf"):
                executor.next_batch(0)
        finally:
            forget_stop()
    assert "failed" not in caplog.text


def test_a_request_that_is_cut_off_after_a_long_time_goes_to_another_server() -> None:
    class Removed(Server):
        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            self.seen.append(request)
            await asyncio.sleep(0.5)
            raise CutOffError("it was cut off: the server was removed")

    removed = Removed()
    with make_executor([removed, Server()], server_wait_s=0.2) as executor:
        executor.set_version(0)
        assert len(executor.next_trajectories(0)) == 4
    assert removed.seen


def test_a_pause_is_no_time_in_which_servers_refuse_requests() -> None:
    class Busy(Server):
        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            if request not in self.seen:
                self.seen.append(request)
                raise BusyServerError("429", 0.0)
            return await super().agenerate(request)

    with make_executor([Busy()], server_wait_s=0.3) as executor:
        executor.pause()
        executor.set_version(0)
        time.sleep(0.5)
        executor.resume()
        assert len(executor.next_trajectories(0)) == 4


def test_an_answer_is_blamed_on_the_server_that_gave_it(caplog: pytest.LogCaptureFixture) -> None:
    class Stale(Server):
        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            self.seen.append(request)
            if len(self.seen) == 1:
                await asyncio.sleep(0.1)
                raise ServerError("the first request fails, and the episode moves on")
            await asyncio.sleep(0.5)
            return await super().agenerate(request)

    stale, sound = Stale(9), Server(0)
    stale.name, sound.name = "stale", "sound"
    workflow = Echo(n_samples=2)
    with make_executor([stale, sound], workflow, make_loader(batch_size=1)) as executor:
        executor.set_version(0)
        executor.next_batch(0)
    assert "stale sampled with weights of version 9" in caplog.text
    assert "sound sampled with" not in caplog.text


def test_a_trajectory_that_cannot_be_copied_ends_the_wait_at_once() -> None:
    class Elsewhere(Echo):
        async def arun_episode(self, engine: Any, data: Any) -> Any:
            trajectory: Any = await super().arun_episode(engine, data)
            return trajectory | {"extra": torch.empty(1, device="meta")}

    with make_executor([Server()], Elsewhere()) as executor:
        executor.set_version(0)
        with pytest.raises(RolloutError, match=r"ticket 0 .* Cannot copy out of meta tensor"):
            executor.next_batch(0)


@pytest.mark.parametrize("version", [2, 6])
def test_an_answer_of_stale_or_future_weights_is_not_taken(version: int) -> None:
    liar, sound = Server(version), Server(4)
    with make_executor([liar, sound], max_head_offpolicyness=1) as executor:
        executor.set_version(4)
        batch = executor.next_batch(4)
    assert liar.seen and set(batch["versions"].flatten().tolist()) == {-1, 4}


def test_an_answer_without_a_version_for_each_token_is_not_taken() -> None:
    class Silent(Server):
        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            answer = await super().agenerate(request)
            answer.output_versions.pop()
            return answer

    with make_executor([Silent()], request_attempts=1) as executor:
        executor.set_version(0)
        with pytest.raises(RolloutError, match="4 tokens, 4 log-probabilities and 3 versions"):
            executor.next_batch(0)


@pytest.mark.parametrize("odd", [None, math.nan, 1e300, "-0.5"], ids=repr)
def test_an_answer_whose_log_probability_is_no_finite_number_is_not_taken(odd: Any) -> None:
    class Sick(Server):
        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            answer = await super().agenerate(request)
            answer.output_logprobs[2] = odd
            return answer

    sick = Sick()
    with make_executor([sick, Server()]) as executor:
        executor.set_version(0)
        assert executor.next_batch(0)["logprobs"].isfinite().all()
    assert sick.seen
    with make_executor([sick], request_attempts=1) as executor:
        executor.set_version(0)
        shown = re.escape(repr(odd))
        expected = rf"{sick.name} cannot be trained on: .* token 2 is {shown}; expected a finite"
        with pytest.raises(RolloutError, match=expected):
            executor.next_batch(0)


def test_a_workflow_that_raises_ends_the_wait_at_once() -> None:
    class Raising(Echo):
        async def arun_episode(self, engine: Any, data: Any) -> Any:
            raise KeyError("answer")

    with make_executor([Server()], Raising()) as executor:
        executor.set_version(0)
        with pytest.raises(
            RolloutError, match=r"ticket 0 of step 0 .*KeyError: 'answer'"
        ) as caught:
            executor.next_batch(0)
        assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()], ids=repr)
def test_a_workflow_that_would_end_the_loop_ends_the_wait_like_any_other(
    error: BaseException,
) -> None:
    class Leaving(Echo):
        async def arun_episode(self, engine: Any, data: Any) -> Any:
            raise error

    with make_executor([Server()], Leaving()) as executor:
        executor.set_version(0)
        with pytest.raises(RolloutError, match=rf"ticket 0 of step 0 .*{type(error).__name__}"):
            executor.next_batch(0)


@pytest.mark.parametrize("awaited", [True, False])
def test_a_task_of_a_workflow_that_would_end_the_loop_ends_no_other_episode(awaited: bool) -> None:
    class Leaving(Echo):
        async def arun_episode(self, engine: Any, data: Any) -> Any:
            left = asyncio.ensure_future(self.leave())
            while not left.done():
                await asyncio.sleep(0)
            if awaited:
                await asyncio.gather(left)
            assert isinstance(left.exception(), SystemExit)
            return await super().arun_episode(engine, data)

        async def leave(self) -> None:
            raise SystemExit("bad answer")

    executor = make_executor([Server()], Leaving())
    executor.set_version(0)
    if awaited:
        with pytest.raises(RolloutError, match=r"ticket \d of step 0 .* SystemExit: bad answer"):
            executor.next_batch(0)
    else:
        assert len(executor.next_trajectories(0)) == 4
    executor.close()
    assert not executor._loop._thread.is_alive()


PER_TOKEN = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions")
RESULTS = {
    "the trajectory has no .*'rewards'": {"input_ids": torch.zeros(1, 3, dtype=torch.int64)},
    "the workflow returned a list; expected a dict of tensors, or None": [],
    "the batch is empty": {name: torch.zeros(0, 3, dtype=torch.int64) for name in PER_TOKEN}
    | {"rewards": torch.zeros(0)},
}


@pytest.mark.parametrize("message", RESULTS)
def test_a_workflow_whose_result_cannot_be_trained_on_is_refused(message: str) -> None:
    class Bare(Echo):
        async def arun_episode(self, engine: Any, data: Any) -> Any:
            return RESULTS[message]

    with make_executor([Server()], Bare()) as executor:
        executor.set_version(0)
        with pytest.raises(RolloutError, match=message):
            executor.next_batch(0)


def test_tickets_that_are_not_finished_in_time_are_named() -> None:
    server = Server()
    server.delay = lambda: 3600.0
    with make_executor([server], batch_timeout_s=0.2) as executor:
        executor.set_version(0)
        with pytest.raises(
            RolloutTimeout, match=r"4 of the tickets of step 0 .* the first is ticket 0"
        ):
            executor.next_batch(0)


def test_no_request_is_sent_while_paused() -> None:
    server = Server()
    with make_executor([server], batch_timeout_s=0.3) as executor:
        executor.pause()
        executor.set_version(0)
        with pytest.raises(RolloutTimeout):
            executor.next_batch(0)
        assert not server.seen
        executor.resume()
        wait_until(lambda: executor.stats()["rollouts/running"] == 0)
        assert len(server.seen) == 4 and len(executor.next_batch(0)["rewards"]) == 4


def test_steps_that_may_not_be_asked_for_are_refused() -> None:
    server = Server()
    with make_executor([server], max_head_offpolicyness=1) as executor:
        with pytest.raises(ConfigError, match="before set_version"):
            executor.next_batch(0)
        executor.set_version(0)
        with pytest.raises(ConfigError, match="expected a step from 0 to 1"):
            executor.next_batch(2)
        executor.next_batch(0)
        executor.set_version(1)
        with pytest.raises(ConfigError, match="expected a step from 1 to 2"):
            executor.next_batch(0)
        with pytest.raises(ConfigError, match=r"set_version\(0\) after version 1"):
            executor.set_version(0)
    with pytest.raises(ConfigError, match="closed"):
        executor.set_version(1)


def test_a_version_after_a_step_that_was_not_sampled_is_refused() -> None:
    server, workflow = Server(), Echo()
    server.delay = lambda: 3600.0
    with make_executor([server], workflow) as executor:
        executor.set_version(0)
        with pytest.raises(
            ConfigError, match=r"4 of its 4 tickets are not finished.*next_batch\(0\)"
        ):
            executor.set_version(1)


def test_a_batch_may_be_changed_by_the_training() -> None:
    with make_executor([Server()]) as executor:
        executor.set_version(0)
        executor.next_batch(0)["input_ids"].zero_()
        assert executor.next_batch(0)["input_ids"].any()


def test_sampling_draws_from_no_generator_of_the_training() -> None:
    before = rng_digest(capture_rng())
    broken, sound = Server(), Server(jitter=1)
    broken.broken = True
    with make_executor([broken, sound]) as executor:
        executor.set_version(0)
        executor.next_batch(0)
    assert rng_digest(capture_rng()) == before


def test_seeds_of_a_ticket_depend_on_call_and_sample_only() -> None:
    servers = [Server(jitter=1), Server(jitter=2)]
    for server in servers:
        with make_executor([server], Echo(n_samples=3)) as executor:
            executor.set_version(0)
            executor.next_batch(0)
    one, other = ({(tuple(r.input_ids), r.seed) for r in server.seen} for server in servers)
    assert one == other and len({seed for _, seed in one}) == 12
    assert all(seed is not None and 0 <= seed < 2**31 for _, seed in one)


def test_without_offpolicyness_the_order_of_calls_is_the_synchronous_one() -> None:
    calls: list[str] = []

    class Noting(Server):
        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            calls.append(f"generate {self.version}")
            return await super().agenerate(request)

    server = Noting(jitter=5)
    with make_executor([server]) as executor:
        for step in range(3):
            server.version = step
            calls.append(f"publish {step}")
            executor.set_version(step)
            executor.next_batch(step)
            calls.append(f"train {step}")
    assert calls == [
        call
        for step in range(3)
        for call in (f"publish {step}", *[f"generate {step}"] * 4, f"train {step}")
    ]


def test_a_value_out_of_range_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="max_head_offpolicyness"):
        RolloutConfig(max_head_offpolicyness=-1)


def test_samples_of_the_dataset_are_read_in_the_thread_that_calls() -> None:
    threads = set()

    class Watched(Prompts):
        def __getitem__(self, index: int) -> dict[str, Any]:
            threads.add(threading.get_ident())
            return super().__getitem__(index)

    loader = make_loader()
    loader.dataset = Watched()
    with make_executor([Server()], Echo(rejects=lambda index: index % 2 == 0), loader) as executor:
        executor.set_version(0)
        executor.next_batch(0)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("token", [-100, 2**32, 5.0])
def test_a_prompt_with_an_id_that_no_model_has_ends_the_wait_at_once(token: Any) -> None:
    server = Server()
    loader = make_loader()
    loader.dataset = [{"input_ids": [5, token]}] * 24
    with make_executor([server], loader=loader) as executor:
        executor.set_version(0)
        with pytest.raises(
            RolloutError, match=rf"ticket 0 .*PromptError: .* has {token} at place 1 .*padding"
        ):
            executor.next_batch(0)
    assert server.seen == []


def test_an_error_that_is_no_server_error_is_not_tried_again() -> None:
    class Wrong(Server):
        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            self.seen.append(request)
            raise OSError("a fault of the client")

    server = Wrong()
    with make_executor([server], max_concurrent_rollouts=1) as executor:
        executor.set_version(0)
        with pytest.raises(RolloutError, match="OSError: a fault of the client"):
            executor.next_batch(0)
    assert len(server.seen) == 1
