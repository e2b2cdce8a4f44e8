"""The provided workflows: requests, results, and failing rewards and tools."""

import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast.engine.rollouts import (
    CallPool,
    MultiTurnWorkflow,
    RLVRWorkflow,
    Trajectory,
    call_pool,
)
from holdfast.engine.servers.api import GenerationHyperparameters
from holdfast.utils.errors import ConfigError, RolloutError
from tests.engine.rollouts import user_code
from tests.engine.rollouts.servers import Cut, Server, make_executor, make_loader

pytestmark = pytest.mark.timeout(60)

TWO = GenerationHyperparameters(n_samples=2, max_new_tokens=4)


class Tokenizer:
    """A tokenizer with numbers as words. The chat template shows the roles."""

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        return [2, 2]

    def decode(self, ids: list[int]) -> str:
        return "<user>2+2</user><assistant>" if ids == [2, 2] else " ".join(map(str, ids))

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]


@pytest.fixture(scope="module")
def pool() -> Iterator[CallPool]:
    with CallPool(n_processes=1) as pool:
        yield pool


def first_step(
    workflow: Any, server: Server, data: list[Any] | None = None, batch_size: int = 4
) -> list[Trajectory]:
    loader = make_loader(batch_size)
    if data is not None:
        loader.dataset = data * 24
    with make_executor([server], workflow, loader) as executor:
        executor.set_version(0)
        return [trajectory for _, trajectory in executor.next_trajectories(0)]


def test_rlvr_samples_each_prompt_and_rewards_each_completion(pool: CallPool) -> None:
    server = Server()
    for trajectory in first_step(RLVRWorkflow(user_code.length_reward, TWO, pool=pool), server):
        first = int(trajectory["input_ids"][0, 0])
        assert trajectory["input_ids"][:, :2].tolist() == [[first, first + 1]] * 2
        assert trajectory["loss_mask"].long().tolist() == [[0, 0, 1, 1, 1, 1]] * 2
        assert trajectory["rewards"].tolist() == [100.0 * (first % 5) + 4] * 2
        assert trajectory["input_ids"][0].tolist() != trajectory["input_ids"][1].tolist()
    assert len({request.seed for request in server.seen}) == len(server.seen) == 8


@pytest.mark.parametrize(("server", "cut"), [(Server, False), (Cut, True)])
def test_rlvr_says_which_completions_the_server_cut_off(
    pool: CallPool, server: type[Server], cut: bool
) -> None:
    for trajectory in first_step(RLVRWorkflow(user_code.length_reward, TWO, pool=pool), server()):
        assert trajectory["truncated"].dtype == torch.bool and trajectory["truncated"].tolist() == [
            cut,
            cut,
        ]


def test_rlvr_applies_the_chat_template_and_decodes_for_the_reward(pool: CallPool) -> None:
    data = [{"messages": [{"role": "user", "content": "2+2"}]}]
    workflow = RLVRWorkflow(user_code.text_reward, TWO, Tokenizer(), pool)
    for trajectory in first_step(workflow, Server(), data):
        assert trajectory["input_ids"][:, :2].tolist() == [[2, 2]] * 2 and trajectory[
            "rewards"
        ].tolist() == [1.0, 1.0]


def test_a_sample_without_a_prompt_is_named(pool: CallPool) -> None:
    workflow = RLVRWorkflow(user_code.length_reward, TWO, pool=pool)
    with pytest.raises(RolloutError, match=r"the sample has no 'input_ids'; it has \['question'\]"):
        first_step(workflow, Server(), [{"question": "2+2"}])


def test_a_reward_that_ends_its_process_counts_as_lost() -> None:
    with CallPool(n_processes=1) as pool:
        workflow = RLVRWorkflow(
            user_code.die, GenerationHyperparameters(max_new_tokens=2), pool=pool, lost_reward=-1.0
        )
        (trajectory,) = first_step(workflow, Server(), batch_size=1)
        assert trajectory["rewards"].tolist() == [-1.0] and pool.n_lost == 2
        assert workflow.stats() == {"rewards/raised": 0, "rewards/lost": 1}


def test_a_reward_that_raises_costs_its_completion_alone_and_is_counted(pool: CallPool) -> None:
    workflow = RLVRWorkflow(user_code.fussy_reward, TWO, pool=pool, lost_reward=-1.0)
    with make_executor([Server()], workflow, make_loader(24)) as executor:
        executor.set_version(0)
        trajectories = [trajectory for _, trajectory in executor.next_trajectories(0)]
        stats = executor.stats()
    expected = [[1.0, -1.0, -1.0, -1.0, 1.0][int(t["input_ids"][0, 0]) % 5] for t in trajectories]
    assert [t["rewards"].tolist() for t in trajectories] == [[reward] * 2 for reward in expected]
    assert stats["rewards/raised"] == 2 * expected.count(-1.0) > 0 and stats["rewards/lost"] == 0


def test_a_reward_function_that_fails_every_call_ends_the_run(pool: CallPool) -> None:
    workflow = RLVRWorkflow(user_code.refuse, TWO, pool=pool)  # it takes one argument
    with pytest.raises(
        RolloutError, match=r"refuse.* has failed each of its first 16 calls, .* TypeError: refuse"
    ):
        first_step(workflow, Server(), batch_size=8)


def fail_starts(patch: pytest.MonkeyPatch, errors: list[Exception]) -> None:
    """Let the next processes of pools not start."""
    started = call_pool._Process

    def start() -> call_pool._Process:
        if errors:
            raise errors.pop()
        return started()

    patch.setattr(call_pool, "_Process", start)
    patch.setattr(call_pool, "_START_AGAIN_S", 0.001)


def test_a_reward_gets_its_process_although_one_cannot_be_started_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_starts(monkeypatch, [OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), EOFError()])
    with CallPool(n_processes=1) as pool:
        workflow = RLVRWorkflow(user_code.length_reward, TWO, pool=pool)
        (trajectory,) = first_step(workflow, Server(), batch_size=1)
    first = int(trajectory["input_ids"][0, 0])
    assert trajectory["rewards"].tolist() == [100.0 * (first % 5) + 4] * 2


def test_a_run_without_processes_for_its_rewards_ends_and_trains_on_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_starts(monkeypatch, [OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))] * 100)
    with CallPool(n_processes=1) as pool:
        workflow = RLVRWorkflow(user_code.length_reward, TWO, pool=pool)
        with pytest.raises(
            RolloutError, match="no process could be started for a call, 4 times: BlockingIOError"
        ):
            first_step(workflow, Server(), batch_size=1)


def test_model_and_tool_take_turns_in_one_sequence(pool: CallPool) -> None:
    server = Server()
    workflow = MultiTurnWorkflow(user_code.length_reward, user_code.say_answer, TWO, pool=pool)
    for trajectory in first_step(workflow, server):
        first = int(trajectory["input_ids"][0, 0])
        # prompt 2, completion 4, tool 2, completion 4, tool 2, completion 4
        assert (
            trajectory["loss_mask"].long().tolist()
            == [[0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]] * 2
        )
        assert trajectory["input_ids"][:, 6:8].tolist() == [[77, 6]] * 2
        assert trajectory["input_ids"][:, 12:14].tolist() == [[77, 12]] * 2
        assert ((trajectory["versions"] == -1) == (trajectory["loss_mask"] == 0)).all()
        assert trajectory["rewards"].tolist() == [100.0 * (first % 5) + 16] * 2
        prefixes = [r.input_ids for r in server.seen if r.input_ids[0] == first]
        rows = trajectory["input_ids"].tolist()
        assert all(any(row[: len(prefix)] == prefix for row in rows) for prefix in prefixes)
    assert len({request.seed for request in server.seen}) == len(server.seen) == 24


def test_seeds_of_turns_do_not_depend_on_the_order_of_answers(pool: CallPool) -> None:
    found = []
    for jitter in (1, 2):
        server = Server(jitter=jitter)
        first_step(
            MultiTurnWorkflow(user_code.length_reward, user_code.say_answer, TWO, pool=pool), server
        )
        found.append({(tuple(request.input_ids), request.seed) for request in server.seen})
    assert found[0] == found[1]


def test_an_episode_ends_after_its_last_turn(pool: CallPool) -> None:
    workflow = MultiTurnWorkflow(
        user_code.length_reward, user_code.say_answer, TWO, max_turns=2, pool=pool
    )
    for trajectory in first_step(workflow, Server()):
        assert trajectory["input_ids"].shape[1] == 12 and trajectory["truncated"].tolist() == [
            False,
            False,
        ]


def test_an_episode_ends_where_there_is_no_room_for_a_token(pool: CallPool) -> None:
    workflow = MultiTurnWorkflow(
        user_code.length_reward, user_code.say_answer, TWO, max_tokens=9, pool=pool
    )
    for trajectory in first_step(workflow, Server()):
        # prompt 2, completion 4, tool 2, completion 1: no room for what the tool says then
        assert trajectory["input_ids"].shape[1] == 9
        assert trajectory["loss_mask"].long().tolist() == [[0, 0, 1, 1, 1, 1, 0, 0, 1]] * 2
        assert trajectory["truncated"].tolist() == [True, True]


@pytest.mark.parametrize(("max_tokens", "length"), [(7, 6), (8, 8)])
def test_an_answer_of_a_tool_that_does_not_fit_is_left_out(
    max_tokens: int, length: int, pool: CallPool
) -> None:
    workflow = MultiTurnWorkflow(
        user_code.length_reward, user_code.say_answer, TWO, max_tokens=max_tokens, pool=pool
    )
    for trajectory in first_step(workflow, Server()):
        # prompt 2, completion 4, tool 2
        assert trajectory["input_ids"].shape[1] == length
        assert trajectory["loss_mask"].sum(1).tolist() == [4, 4]
        assert trajectory["truncated"].tolist() == [True, True]


def test_an_episode_ends_with_a_completion_that_is_cut_off(pool: CallPool) -> None:
    workflow = MultiTurnWorkflow(user_code.length_reward, user_code.say_answer, TWO, pool=pool)
    for trajectory in first_step(workflow, Cut()):
        assert trajectory["input_ids"].shape == (2, 6) and trajectory["truncated"].tolist() == [
            True,
            True,
        ]


def test_an_episode_whose_tool_is_lost_ends_there() -> None:
    with CallPool(n_processes=1) as pool:
        gconfig = GenerationHyperparameters(max_new_tokens=4)
        workflow = MultiTurnWorkflow(
            user_code.length_reward, user_code.die, gconfig, pool=pool, lost_reward=-2.0
        )
        (trajectory,) = first_step(workflow, Server(), batch_size=1)
    assert trajectory["input_ids"].shape == (1, 6) and trajectory["rewards"].tolist() == [-2.0]


def test_text_of_a_tool_is_encoded(pool: CallPool) -> None:
    data = [{"messages": [{"role": "user", "content": "2+2"}]}]
    workflow = MultiTurnWorkflow(
        user_code.text_reward, user_code.say_text, TWO, Tokenizer(), max_turns=2, pool=pool
    )
    for trajectory in first_step(workflow, Server(), data):
        assert trajectory["input_ids"][:, 6:9].tolist() == [[97, 98, 99]] * 2


def test_text_of_a_tool_without_a_tokenizer_is_refused(pool: CallPool) -> None:
    workflow = MultiTurnWorkflow(user_code.length_reward, user_code.say_text, TWO, pool=pool)
    with pytest.raises(
        RolloutError, match="ConfigError: the tool said 'abc', but there is no tokenizer"
    ):
        first_step(workflow, Server())
    with pytest.raises(ConfigError, match="max_turns"):
        MultiTurnWorkflow(user_code.length_reward, user_code.say_text, TWO, max_turns=0)
