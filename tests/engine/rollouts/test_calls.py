"""Calls, random draws and clocks of a workflow that runs again after a kill."""

import asyncio
import functools
import pickle
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.engine.rollouts import CallPool, MultiTurnWorkflow
from holdfast.engine.servers.api import GenerationHyperparameters, ModelRequest, ModelResponse
from holdfast.utils.errors import CallLost, RolloutError
from holdfast.utils.record_log import FRAME, ReadCounts, log_files, read_records, split_payload
from tests.engine.rollouts import user_code
from tests.engine.rollouts.lives import TWO_TOKENS, Chat, Lasting, Trial
from tests.engine.rollouts.servers import make_executor, make_loader
from tests.engine.rollouts.test_workflows import Tokenizer
from tests.limits import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def pool() -> Iterator[CallPool]:
    with CallPool(n_processes=1) as pool:
        yield pool


class Asking(Chat):
    """One answer, then ``ask(engine)`` whose results are kept by ticket, then another answer."""

    def __init__(self, ask: Any) -> None:
        super().__init__(1, 2, self._say)
        self._ask = ask
        self.found: dict[str, Any] = {}

    async def _say(self, engine: Any, sibling: int, turn: int) -> list[int]:
        if turn == 0:
            self.found[str(engine)] = await self._ask(engine)
        return [7]


def two_lives(trial: Trial, ask: Any, server: Lasting | None = None) -> tuple[Asking, Asking, Any]:
    """Ask in a life that is killed before it trains, and in the next one."""
    first, second = Asking(ask), Asking(ask)
    server = server or Lasting(limit=3)
    options: dict[str, Any] = {"max_head_offpolicyness": 0}
    with trial.life(server, first, **options) as life:
        life.serve(0)
        wait_until(lambda: server.taken == server.limit and len(first.found) == 2)
    with trial.life(Lasting(), second, **options) as life:
        life.serve(0)
        life.executor.next_batch(0)
        return first, second, life


def test_a_call_that_returned_is_not_made_again(tmp_path: Path) -> None:
    made: list[int] = []

    async def search(query: int) -> dict[str, Any]:
        made.append(query)
        return {"hits": (query, [1.5, None, "x"]), "n": len(made)}

    first, second, life = two_lives(Trial(tmp_path), lambda engine: engine.call(search, 4))
    assert len(made) == 2 and second.found == first.found
    assert life.stat("replayed") == 3, "calls are not answers"


def test_a_plain_function_and_the_clock_are_recorded_too(tmp_path: Path) -> None:
    first, second, _ = two_lives(Trial(tmp_path), lambda engine: engine.call(time.time))
    assert second.found == first.found and len(set(first.found.values())) == 2


def test_a_call_that_a_kill_interrupts_is_made_again(tmp_path: Path) -> None:
    begun: list[int] = []

    async def slow(engine: Any) -> int:
        async def search() -> int:
            begun.append(1)
            await asyncio.sleep(0 if len(begun) > 2 else 3600)
            return 5

        return await engine.call(search)

    trial, server = Trial(tmp_path), Lasting()
    with trial.life(server, Asking(slow), max_head_offpolicyness=0) as life:
        life.serve(0)
        wait_until(lambda: len(begun) == 2)
    with trial.life(Lasting(), Asking(slow), max_head_offpolicyness=0) as life:
        life.serve(0)
        life.executor.next_batch(0)
        assert life.stat("replayed") == 2
    assert len(begun) == 4


def test_an_error_of_a_call_is_not_recorded(tmp_path: Path) -> None:
    made: list[int] = []

    def fails() -> None:
        made.append(1)
        raise KeyError("no hit")

    async def ask(engine: Any) -> str:
        try:
            await engine.call(fails)
        except KeyError as error:
            return str(error)
        raise AssertionError

    first, second, _ = two_lives(Trial(tmp_path), ask)
    assert len(made) == 4 and second.found == first.found


def test_equal_calls_of_an_episode_are_told_apart(tmp_path: Path) -> None:
    made: list[int] = []

    def draw() -> int:
        made.append(len(made))
        return made[-1]

    async def ask(engine: Any) -> list[int]:
        return [await engine.call(draw) for _ in range(3)]

    first, second, _ = two_lives(Trial(tmp_path), ask)
    assert len(made) == 6 and second.found == first.found
    assert all(len(set(found)) == 3 for found in first.found.values())


def test_a_result_that_is_no_plain_value_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[int] = []

    def look() -> set[int]:
        made.append(1)
        return {1}

    _, second, _ = two_lives(Trial(tmp_path), lambda engine: engine.call(look))
    assert len(made) == 4 and set(map(type, second.found.values())) == {set}
    assert caplog.text.count("the result of") == 2, "once in each life"


class Verdict(StrEnum):
    GOOD = "good"


SUBCLASSES = {
    "an enum": (1, Verdict.GOOD),
    "a key": {Verdict.GOOD: 1},
    "a value": {"verdict": Verdict.GOOD},
    "a number with many digits": 10**5000,
}


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_a_result_of_which_json_loses_the_type_is_made_again(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judged: list[int] = []
    orders: list[Any] = []

    def judge() -> Any:
        judged.append(1)
        return SUBCLASSES[kind]

    async def ask(engine: Any) -> Any:
        found = await engine.call(judge)
        await engine.call(orders.append, found, once=True)
        return pickle.dumps(found)

    first, second, _ = two_lives(Trial(tmp_path), ask)
    assert second.found == first.found and len(judged) == 4
    assert len(orders) == 2, "a call with this result was found again"
    assert caplog.text.count("is made again after a kill, or ends in CallLost") == 2


def test_numbers_of_numpy_are_pythons_in_each_life(tmp_path: Path) -> None:
    orders: list[Any] = []

    def judge() -> Any:
        return [np.float64(0.75), np.float32(0.5), np.int64(3), np.bool_(True), np.str_("good")]

    async def ask(engine: Any) -> Any:
        found = await engine.call(judge)
        await engine.call(orders.append, found, once=True)
        return [type(value) for value in found]

    first, second, life = two_lives(Trial(tmp_path), ask)
    assert second.found == first.found
    assert list(first.found.values()) == [[float, float, int, bool, str]] * 2
    assert len(orders) == 2 and life.stat("unused") == 0


def test_a_workflow_sees_the_recorded_result_also_when_it_is_made(tmp_path: Path) -> None:
    orders: list[Any] = []
    shared: list[list[Any]] = []

    def look() -> Any:
        shared.append(["\ud83d\ude00", 1])  # JSON joins two halves of a character
        return shared[-1]

    async def ask(engine: Any) -> Any:
        found = await engine.call(look)
        shared[-1].append(2)
        await engine.call(orders.append, found, once=True)
        return found

    first, second, life = two_lives(Trial(tmp_path), ask)
    assert second.found == first.found and list(first.found.values()) == [["\U0001f600", 1]] * 2
    assert len(orders) == 2 and life.stat("unused") == 0


class Loose(Lasting):
    """A server in this process whose numbers are not those of the interface."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        response = await super().agenerate(request)
        tokens: Any = np.array(response.output_tokens)
        return replace(response, output_tokens=tokens, output_logprobs=[0, -1])


def test_an_answer_has_the_same_types_in_both_lives(tmp_path: Path) -> None:
    orders: list[Any] = []

    async def ask(engine: Any) -> Any:
        said = await engine.agenerate(ModelRequest([1, 2, 3], TWO_TOKENS))
        answer = [said.output_tokens, said.output_logprobs, said.output_versions]
        await engine.call(orders.append, answer, once=True)
        return repr(answer)

    first, second, _ = two_lives(Trial(tmp_path), ask, Loose(limit=5))
    assert second.found == first.found and len(orders) == 2


def test_the_state_of_an_episode_is_built_again_by_direct_calls(tmp_path: Path) -> None:
    class Sandbox(Asking):
        """Each episode has a list that its calls fill."""

        def __init__(self) -> None:
            super().__init__(self.run)
            self.boxes: dict[str, list[int]] = {}

        async def run(self, engine: Any) -> list[int]:
            box = self.boxes.setdefault(str(engine), [])
            box.append(len(box))
            return list(box)

    trial, server = Trial(tmp_path), Lasting(limit=3)
    with trial.life(server, Sandbox(), max_head_offpolicyness=0) as life:
        life.serve(0)
        wait_until(lambda: server.taken == 3)
    again = Sandbox()
    with trial.life(Lasting(), again, max_head_offpolicyness=0) as life:
        life.serve(0)
        life.executor.next_batch(0)
        assert life.stat("replayed") == 3, "its outputs were the same, so the answers still fit"
    assert list(again.boxes.values()) == [[0], [0]]


def test_draws_depend_on_the_ticket_and_their_number_alone(tmp_path: Path) -> None:
    async def ask(engine: Any) -> list[float]:
        return [engine.random(n).random() for n in (0, 1, 0)]

    first, second, _ = two_lives(Trial(tmp_path), ask)
    assert second.found == first.found
    one, other = first.found.values()
    assert one[0] == one[2] and len({*one, *other}) == 4


# Calls with an outside effect


class Outside:
    """The world, which counts what happened to it."""

    def __init__(self) -> None:
        self.effects: Counter[str] = Counter()

    async def send(self, text: str) -> str:
        self.effects[text] += 1
        return f"sent {text}"


async def _order(engine: Any, outside: Outside) -> list[str]:
    """Place two orders. An order is "unknown" if it may have been placed before."""
    found = []
    for text in ("a", "b"):
        try:
            found.append(await engine.call(outside.send, text, once=True))
        except CallLost as error:
            assert "was begun before the kill" in str(error)
            found.append("unknown")
    return found


def boundaries(folder: Path) -> tuple[bytes, list[int], list[str]]:
    """The only file with records, the ends of its records, and their kinds."""
    (file,) = [file for file in log_files(folder) if file.path.stat().st_size]
    ends, kinds = [0], []
    for payload in read_records(file.path, ReadCounts()):
        ends.append(ends[-1] + FRAME.size + len(payload))
        kinds.append(split_payload(payload)[0]["kind"])
    return file.path.read_bytes(), ends, kinds


def test_a_kill_at_any_record_makes_no_order_twice(tmp_path: Path) -> None:
    whole = Outside()
    workflow = Asking(lambda engine: _order(engine, whole))
    with Trial(tmp_path / "whole", batch_size=1).life(
        Lasting(), workflow, max_head_offpolicyness=0
    ) as life:
        life.serve(0)
        life.executor.next_batch(0)
    (result,) = workflow.found.values()
    data, ends, kinds = boundaries(tmp_path / "whole")
    assert kinds == ["answer", "begun", "call", "begun", "call", "answer"]

    n_unknown = 0
    for n, end in enumerate(ends):
        for torn in (0, 9):
            folder = tmp_path / f"cut-{n}-{torn}"
            folder.mkdir()
            (folder / "00000001-0000aaaa-00000000.log").write_bytes(data[: end + torn])
            # An order that was begun counts as placed.
            outside = Outside()
            begun = [text for text, at in (("a", 2), ("b", 4)) if n >= at]
            outside.effects.update(begun)
            server = Lasting()
            again = Asking(lambda engine, outside=outside: _order(engine, outside))
            with Trial(folder, batch_size=1).life(server, again, max_head_offpolicyness=0) as life:
                life.serve(0)
                life.executor.next_batch(0)
                n_answers = kinds[:n].count("answer")
                n_lost = kinds[:n].count("begun") - kinds[:n].count("call")
                assert life.stat("replayed") == n_answers - (n_lost and n == 6)
            assert outside.effects == {"a": 1, "b": 1}
            (found,) = again.found.values()
            assert found.count("unknown") == n_lost
            assert [one for one in found if one != "unknown"] == [
                one for one, own in zip(result, found, strict=True) if own != "unknown"
            ]
            n_unknown += n_lost
    assert n_unknown == 4


def test_a_start_that_ignores_records_makes_no_order_twice(tmp_path: Path) -> None:
    outside = Outside()
    trial = Trial(tmp_path, batch_size=1)
    for replay in ("exact", "off"):
        workflow = Asking(lambda engine: _order(engine, outside))
        with trial.life(Lasting(), workflow, max_head_offpolicyness=0, replay=replay) as life:
            life.serve(0)
            life.executor.next_batch(0)
            assert life.stat("replayed") == 0
        assert list(workflow.found.values()) == [["sent a", "sent b"]]
    assert outside.effects == {"a": 1, "b": 1}


@pytest.mark.parametrize("replay", ["exact", "off"])
def test_a_finished_ticket_that_is_sampled_again_makes_no_order_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, replay: str
) -> None:
    outside = Outside()
    trial = Trial(tmp_path)

    def make(number: int) -> Asking:
        async def ask(engine: Any) -> list[str]:
            # An order may depend on another call, or on answers, which are others in another life.
            came_s = await engine.call(time.time) if replay == "exact" else 0
            texts = (f"{engine} at {came_s}", f"{engine} in life {number}")
            return [await engine.call(outside.send, text, once=True) for text in texts]

        return Asking(ask)

    # All steps finish. The next life needs none of their records, and hands them on.
    with trial.life(Lasting(), make(1), max_head_offpolicyness=2, total_steps=3) as life:
        life.serve(0)
        for step in range(3):
            life.executor.next_batch(step)
        life.commit()
    with trial.life(Lasting(), make(2), max_head_offpolicyness=2, total_steps=3) as life:
        life.serve(0)
        life.commit()

    # With a smaller bound, the two tickets of step 2 are too stale.
    again = make(3)
    server = Lasting(1)
    with trial.life(server, again, max_head_offpolicyness=1, total_steps=3, replay=replay) as life:
        life.serve(1)
        life.executor.next_batch(2)
        own = [name for name in outside.effects if name.endswith("in life 3")]
        assert len(server.seen) == 4 and len(own) == len(again.found) == 2
        assert set(outside.effects.values()) == {1}

        # After its training nothing is kept.
        assert "records" in life.executor.state_dict()
        life.serve(3)
        assert "records" not in life.executor.state_dict()
    assert "did not ask for" not in caplog.text, "its answers were dropped, so it may ask others"


def test_an_order_whose_result_is_damaged_is_not_made_again(tmp_path: Path) -> None:
    outside = Outside()

    def make() -> Asking:
        return Asking(lambda engine: _order(engine, outside))

    trial = Trial(tmp_path, batch_size=1)
    with trial.life(Lasting(), make(), max_head_offpolicyness=0) as life:
        life.serve(0)
        life.executor.next_batch(0)
    data, ends, _ = boundaries(tmp_path)
    flipped = bytearray(data)
    flipped[ends[3] - 2] ^= 1  # in the result of the first order
    (file,) = [file for file in log_files(tmp_path) if file.path.stat().st_size]
    file.path.write_bytes(flipped)
    again = make()
    with trial.life(Lasting(), again, max_head_offpolicyness=0) as life:
        life.serve(0)
        life.executor.next_batch(0)
    assert list(again.found.values()) == [["unknown", "sent b"]]
    assert outside.effects == {"a": 1, "b": 1}


def test_the_intent_of_an_order_is_on_disk_before_it(tmp_path: Path) -> None:
    kinds: list[list[str]] = []

    async def order() -> None:
        kinds.append(boundaries(tmp_path)[2])

    workflow = Asking(lambda engine: engine.call(order, once=True))
    with Trial(tmp_path, batch_size=1).life(Lasting(), workflow, max_head_offpolicyness=0) as life:
        life.serve(0)
        life.executor.next_batch(0)
    assert kinds == [["answer", "begun"]], "with the answer that led to it"


def test_without_a_log_no_order_is_made() -> None:
    outside = Outside()
    workflow = Asking(lambda engine: _order(engine, outside))
    with make_executor([Lasting()], workflow, make_loader(1)) as executor:
        executor.set_version(0)
        with pytest.raises(RolloutError, match="once=True needs the episode log"):
            executor.next_batch(0)
    assert not outside.effects


def test_while_the_log_is_given_up_no_order_is_made(tmp_path: Path) -> None:
    outside = Outside()
    trial = Trial(tmp_path / "log", batch_size=1)
    workflow = Asking(lambda engine: _order(engine, outside))
    with trial.life(Lasting(), workflow) as life:
        wait_until(lambda: len(log_files(trial.folder)) == 1)
        shutil.rmtree(trial.folder)
        trial.folder.write_text("no folder")
        life.log.rotate()
        wait_until(lambda: life.log.failed)
        life.serve(0)
        with pytest.raises(RolloutError, match="a record is not on stable storage"):
            life.executor.next_batch(0)
        assert life.stat("log_failed") == 1
    assert not outside.effects


class Judge:
    """Gives the same mark to every text."""

    n_scored = 0

    def __init__(self, mark: float) -> None:
        self.mark = mark

    async def score(self, text: str) -> float:
        Judge.n_scored += 1
        return self.mark


def test_two_objects_that_make_the_same_call_cause_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judges = Judge(1.0), Judge(2.0)

    async def ask(engine: Any) -> list[float]:
        return [await engine.call(judge.score, "text") for judge in judges]

    two_lives(Trial(tmp_path), ask)
    assert caplog.text.count("Judge.score") == 2, "once in each life"
    assert "give call functools.partial(object.method)" in caplog.text


def test_two_objects_in_partials_have_results_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    order = [1.0, 2.0]
    Judge.n_scored = 0

    async def ask(engine: Any) -> dict[float, float]:
        return {
            mark: await engine.call(functools.partial(Judge(mark).score), "text") for mark in order
        }

    trial = Trial(tmp_path)
    first, second = Asking(ask), Asking(ask)
    server = Lasting(limit=3)
    with trial.life(server, first, max_head_offpolicyness=0) as life:
        life.serve(0)
        wait_until(lambda: server.taken == server.limit and len(first.found) == 2)
    # Siblings may ask in another order after a kill.
    order.reverse()
    with trial.life(Lasting(), second, max_head_offpolicyness=0) as life:
        life.serve(0)
        life.executor.next_batch(0)
    assert list(second.found.values()) == [{1.0: 1.0, 2.0: 2.0}] * 2
    assert Judge.n_scored == 4, "in the first life alone"
    assert "two objects" not in caplog.text


@pytest.mark.parametrize("once", [False, True])
def test_a_lambda_is_not_recorded_and_refused_with_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, once: bool
) -> None:
    made = []
    workflow = Asking(lambda engine: engine.call(lambda: made.append(1), once=once))
    with Trial(tmp_path, batch_size=1).life(Lasting(), workflow) as life:
        life.serve(0)
        if once:
            with pytest.raises(RolloutError, match="could not be told from another one: it is a"):
                life.executor.next_batch(0)
        else:
            life.executor.next_batch(0)
            assert "cannot be recorded" in caplog.text and "it is a lambda" in caplog.text
    assert made == [] if once else made
    assert all_kinds(tmp_path)["call"] == 0


def test_an_order_that_cannot_be_told_from_another_is_refused(tmp_path: Path) -> None:
    outside = Outside()

    async def ask(engine: Any) -> Any:
        return await engine.call(outside.send, lambda: None, once=True)

    with Trial(tmp_path, batch_size=1).life(Lasting(), Asking(ask)) as life:
        life.serve(0)
        with pytest.raises(RolloutError, match="could not be told from another one"):
            life.executor.next_batch(0)
    assert not outside.effects


# The included workflows


def all_kinds(folder: Path) -> Counter[str]:
    """Number of records of each kind."""
    found: Counter[str] = Counter()
    for file in log_files(folder):
        for payload in read_records(file.path, ReadCounts()):
            found[split_payload(payload)[0]["kind"]] += 1
    return found


TWO = GenerationHyperparameters(n_samples=2, max_new_tokens=2)


def talk(pool: CallPool, counter: Path, folder: Path, limit: int | None, **options: Any) -> Any:
    """A life of a conversation of up to 3 turns whose tool and reward count their calls."""
    workflow = MultiTurnWorkflow(
        user_code.counted_reward, user_code.counted_tool, TWO, max_turns=3, pool=pool, **options
    )
    server, loader_data = Lasting(limit=limit), [{"input_ids": [1, 2], "counter": str(counter)}]
    n_before = all_kinds(folder)["call"]
    with Trial(folder, batch_size=1).life(server, workflow, max_head_offpolicyness=0) as life:
        life.loader.dataset = loader_data * 24
        life.serve(0)
        if limit is not None:
            # Every answer is followed by a call of the tool or of the reward.
            wait_until(lambda: all_kinds(folder)["call"] == n_before + limit)
            return server
        life.executor.next_batch(0)
        return server


@pytest.mark.parametrize("once", [False, True])
def test_tools_and_rewards_of_a_conversation_are_called_once(
    pool: CallPool, tmp_path: Path, once: bool
) -> None:
    counter = tmp_path / "counter"
    servers = [
        talk(pool, counter, tmp_path / "log", limit, tool_once=once) for limit in (1, 1, 2, None)
    ]
    asked = sum((server.answered for server in servers), Counter())
    assert set(asked.values()) == {1} and asked.total() == 6
    calls = Counter(counter.read_text().splitlines())
    assert set(calls.values()) == {1} and calls.total() == 6


def test_a_finished_conversation_calls_nothing_again(pool: CallPool, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    talk(pool, counter, tmp_path / "log", None)
    before = counter.read_text()
    assert not talk(pool, counter, tmp_path / "log", None).seen
    assert counter.read_text() == before and len(before.splitlines()) == 2 * 2 + 2


def test_a_tool_may_answer_with_a_subclass_of_text(
    pool: CallPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workflow = MultiTurnWorkflow(
        user_code.zero_reward, user_code.say_enum, TWO, Tokenizer(), max_turns=2, pool=pool
    )
    with Trial(tmp_path, batch_size=1).life(Lasting(), workflow) as life:
        life.loader.dataset = [{"messages": []}] * 24
        life.serve(0)
        ids = life.executor.next_batch(0)["input_ids"]
    assert ids[:, 4:7].tolist() == [[97, 98, 99]] * 2
    assert "cannot be recorded" not in caplog.text


def test_a_tool_with_an_effect_is_tried_once(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with CallPool(n_processes=1) as pool:
        with pytest.raises(CallLost, match=r"die_once has ended its process .*, once"):
            asyncio.run(pool.call_once(user_code.die_once, str(marker)))
        assert pool.n_lost == 1
        assert asyncio.run(pool.call_once(user_code.die_once, str(marker))) == "done"
