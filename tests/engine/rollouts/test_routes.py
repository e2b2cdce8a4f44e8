"""Experts of servers on their way into a batch: turns, records, ledgers."""

import operator
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.engine.api import Batch
from holdfast.engine.rollouts import CallPool, MultiTurnWorkflow
from holdfast.engine.rollouts.digests import request_digest
from holdfast.engine.rollouts.trajectory import (
    TokenSequence,
    concat_trajectories,
    to_trajectory,
)
from holdfast.engine.servers.api import GenerationHyperparameters, ModelRequest, ModelResponse
from holdfast.utils.errors import BatchError
from tests.engine.rollouts import user_code
from tests.engine.rollouts.lives import Chat, Lasting, Trial
from tests.engine.rollouts.servers import make_executor, make_loader
from tests.engine.servers.fake_routes import FakeRoutes
from tests.limits import wait_until

pytestmark = pytest.mark.timeout(60)

ROUTES = FakeRoutes()


class Routed(Lasting):
    """A server that returns experts if it is asked for them."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        response = await super().agenerate(request)
        if request.routes_from is None:
            return response
        return routed(response, request.routes_from, self.version)


def routed(response: ModelResponse, start: int, version: int) -> ModelResponse:
    ids = [*response.input_tokens, *response.output_tokens[:-1]]
    routes = ROUTES.of(ids, [version] * len(ids), start)
    return replace(response, routed_experts=routes.astype(np.uint8))


def check(batch: Batch, version: int = 0) -> None:
    """Every token but the last of a row has the experts of its place. Padding has none."""
    found = batch["routed_experts"]
    assert found.dtype == torch.uint8
    for row, ids in enumerate(batch["input_ids"].tolist()):
        length = int(batch["attention_mask"][row].sum())
        expected = ROUTES.of(ids[: length - 1], [version] * (length - 1))
        assert np.array_equal(found[row, : length - 1].numpy(), expected)
        assert not found[row, length - 1 :].any()


@pytest.fixture(scope="module")
def pool() -> Iterator[CallPool]:
    with CallPool(n_processes=1) as pool:
        yield pool


def test_each_turn_asks_for_the_experts_that_are_not_known_yet(pool: CallPool) -> None:
    server = Routed()
    gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=2)
    workflow = MultiTurnWorkflow(user_code.length_reward, user_code.say_answer, gconfig, pool=pool)
    with make_executor([server], workflow, make_loader(2), return_routed_experts=True) as executor:
        executor.set_version(0)
        check(executor.next_batch(0))
    # A tool says two tokens, and the token before them was the last sampled one.
    starts = {len(request.input_ids): request.routes_from for request in server.seen}
    assert starts == {2: 0, 6: 3, 10: 7, 14: 11}


def test_experts_are_asked_for_only_with_the_key(pool: CallPool) -> None:
    server = Routed()
    with make_executor([server], Chat(), make_loader(2)) as executor:
        executor.set_version(0)
        assert "routed_experts" not in executor.next_batch(0)
    assert {request.routes_from for request in server.seen} == {None}


def test_tokens_keep_the_experts_of_the_first_answer_that_had_them() -> None:
    for asks in (True, False):
        sequence = TokenSequence()
        sequence.extend_given([1, 2, 3])
        expected = []
        for version in (1, 2):
            ids = list(sequence.input_ids)
            start = sequence.n_routed if asks else 0
            plain = ModelResponse(ids, [7, 8], [-0.1, -0.1], [version] * 2, "stop")
            sequence.extend_sampled(routed(plain, start, version))
            sequence.extend_given([9])
            expected += [version] * (4 if version == 1 else 3)
        found = np.concatenate(sequence.routed_experts)
        assert np.array_equal(found, ROUTES.of(sequence.input_ids[:7], expected))
    with pytest.raises(BatchError, match=r"known up to token 7, .* begin at 8; ask with"):
        late = ModelResponse(list(sequence.input_ids), [7, 8], [-0.1, -0.1], [2] * 2, "stop")
        sequence.extend_sampled(routed(late, 8, 2))


@pytest.mark.parametrize("asks", [True, False])
def test_a_turn_adds_its_experts_and_neither_copies_nor_keeps_those_of_turns_before(
    asks: bool,
) -> None:
    sequence = TokenSequence()
    sequence.extend_given([1, 2, 3])
    for turn in range(5):
        before = list(sequence.routed_experts)
        plain = ModelResponse(list(sequence.input_ids), [7, 8], [-0.1] * 2, [1] * 2, "stop")
        sequence.extend_sampled(routed(plain, sequence.n_routed if asks else 0, 1))
        *earlier, added = sequence.routed_experts
        assert len(earlier) == turn and all(map(operator.is_, earlier, before))
        assert added.base is None and len(added) == (4 if turn == 0 else 3)
        sequence.extend_given([9])
    found = to_trajectory([sequence], [1.0])["routed_experts"][0]
    assert np.array_equal(found[:16], ROUTES.of(sequence.input_ids[:16], [1] * 16))
    assert found.shape[0] == 18 and not found[16:].any()


def test_answers_of_one_episode_by_models_of_other_layers_are_refused() -> None:
    sequence = TokenSequence()
    sequence.extend_given([1, 2, 3])
    for n_layers in (3, 1):
        plain = ModelResponse(list(sequence.input_ids), [7, 8], [-0.1] * 2, [1] * 2, "stop")
        answer = routed(plain, sequence.n_routed, 1)
        assert answer.routed_experts is not None
        sequence.extend_sampled(replace(answer, routed_experts=answer.routed_experts[:, :n_layers]))
    with pytest.raises(BatchError, match=r"\[\(1, 2\), \(3, 2\)\]; expected the same"):
        to_trajectory([sequence], [1.0])


@pytest.mark.parametrize("limit", [0, 3, 5])
def test_a_restart_has_the_experts_of_recorded_answers_and_finished_tickets(
    limit: int, tmp_path: Path
) -> None:
    trial = Trial(tmp_path)
    workflow = Chat(siblings=2, turns=2)
    options: Any = {"return_routed_experts": True, "max_head_offpolicyness": 0}
    server = Routed(limit=limit or None)
    with trial.life(server, workflow, **options) as life:
        life.serve(0)
        if limit:
            wait_until(lambda: server.taken == limit)
        else:
            life.executor.next_batch(0)
            life.commit()
    later = Routed()
    with trial.life(later, workflow, **options) as life:
        life.serve(0)
        check(life.executor.next_batch(0))
        assert life.stat("replayed") == limit
        assert bool(later.seen) == bool(limit), "a finished ticket was sampled again"


def test_a_run_that_begins_to_ask_does_not_use_answers_without_experts() -> None:
    request = ModelRequest([1, 2, 3])
    without = request_digest(request)
    assert request_digest(replace(request, routes_from=0)) != without
    assert request_digest(replace(request, routes_from=None)) == without


def test_a_run_that_begins_to_ask_trains_on_the_finished_tickets_before(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    workflow = Chat(turns=1)
    options: Any = {"max_head_offpolicyness": 0}
    with trial.life(Routed(), workflow, **options) as life:
        life.serve(0)
        before = life.executor.next_batch(0)
        life.commit()
    assert "routed_experts" not in before

    later = Routed()
    with trial.life(later, workflow, return_routed_experts=True, **options) as life:
        life.serve(0)
        batch = life.executor.next_batch(0)
        assert not later.seen and torch.equal(batch["input_ids"], before["input_ids"])
        found = batch["routed_experts"]
        assert found.dtype == torch.uint8 and found.shape == (*batch["input_ids"].shape, 0, 0)

        # A part of the batch may have some.
        old = [trajectory for _, trajectory in life.executor.next_trajectories(0)]
        life.commit()
        life.serve(1)
        new = [trajectory for _, trajectory in life.executor.next_trajectories(1)]
        check(concat_trajectories(new), version=1)
        for mixed in ([*old, *new], [*new, *old]):
            found = concat_trajectories(mixed)["routed_experts"]
            assert found.shape[2:] == (3, 2)
            assert found.flatten(1).any(1).sum() == len(new)
    with trial.life(Routed(), workflow, return_routed_experts=True, **options) as life:
        life.serve(0)
        assert life.executor.next_batch(0)["routed_experts"].shape[2:] == (0, 0)


def test_trajectories_without_experts_count_as_tokens_without_a_choice() -> None:
    found: list[Any] = []
    for answer in ([7, 8], [7, 8, 9]):
        sequence = TokenSequence()
        sequence.extend_given([1, 2, 3])
        plain = ModelResponse([1, 2, 3], answer, [-0.1] * len(answer), [1] * len(answer), "stop")
        sequence.extend_sampled(routed(plain, 0, 1) if len(answer) == 2 else plain)
        found.append(to_trajectory([sequence], [1.0]))
    batch = concat_trajectories(found)
    assert batch["routed_experts"].dtype == torch.uint8
    assert batch["routed_experts"].shape == (2, 6, 3, 2)
    assert batch["routed_experts"][0].any() and not batch["routed_experts"][1].any()
    assert batch["input_ids"].dtype == torch.int64


def test_experts_of_other_models_are_refused_with_both_shapes() -> None:
    found: list[Any] = []
    for n_layers, top_k in ((3, 2), (4, 2), (3, 3)):
        sequence = TokenSequence()
        sequence.extend_given([1, 2, 3])
        plain = ModelResponse([1, 2, 3], [7, 8], [-0.1, -0.1], [1, 1], "stop")
        routes = FakeRoutes(n_layers, top_k).of([1, 2, 3, 7], [1] * 4).astype(np.uint8)
        sequence.extend_sampled(replace(plain, routed_experts=routes))
        found.append(to_trajectory([sequence], [1.0]))
    for other, shape in ((found[1], "1, 5, 4, 2"), (found[2], "1, 5, 3, 3")):
        words = rf"shapes \[1, 5, 3, 2\] and \[{shape}\]; expected the same decoder layers"
        with pytest.raises(BatchError, match=words):
            concat_trajectories([found[0], other])


def test_responses_with_experts_can_be_compared() -> None:
    plain = ModelResponse([1, 2, 3], [7, 8], [-0.1, -0.1], [1, 1], "stop")
    assert routed(plain, 0, 1) == routed(plain, 0, 1)
    assert routed(plain, 0, 1) != replace(routed(plain, 0, 1), output_tokens=[7, 9])
