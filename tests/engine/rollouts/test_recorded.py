"""Records of a killed driver: which answers it uses again, and which requests it sends again.

Servers never give an answer twice (`Lasting`), so that a second answer to a recorded request shows.
"""

import asyncio
import json
import os
import random
import struct
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine.rollouts import CallPool, RLVRWorkflow
from holdfast.engine.rollouts.digests import call_digest, request_digest
from holdfast.engine.rollouts.recorded import Bounds, Kind, Place, Record, Recorded, split_records
from holdfast.engine.rollouts.trajectory import TokenSequence, to_trajectory
from holdfast.engine.servers.api import (
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    PromptImages,
)
from holdfast.utils.errors import CheckpointMismatchError, ConfigError, RolloutError, ServerError
from tests.engine.processors import make_processor, picture
from tests.engine.rollouts import user_code
from tests.engine.rollouts.lives import Chat, Lasting, Life, Trial, key_of
from tests.limits import stretched, wait_until

pytestmark = pytest.mark.timeout(120)

ONE = GenerationHyperparameters(max_new_tokens=2)


def rows(life: Life, step: int) -> list[list[int]]:
    return [
        row
        for _, trajectory in life.executor.next_trajectories(step)
        for row in trajectory["input_ids"].tolist()
    ]


def killed_after(trial: Trial, limit: int, workflow: Any, **options: Any) -> Lasting:
    """Run a life up to ``limit`` answers."""
    server = Lasting(limit=limit)
    with trial.life(server, workflow, **options) as life:
        life.serve(0)
        wait_until(lambda: server.taken == limit)
    return server


def finish(trial: Trial, workflow: Any, **options: Any) -> tuple[Lasting, list[list[int]], Life]:
    """Run a life to the end of step 0."""
    server = Lasting()
    with trial.life(server, workflow, **options) as life:
        life.serve(0)
        found = rows(life, 0)
        stats = life.executor.stats()
    life.stats = {name.partition("/")[2]: value for name, value in stats.items()}
    return server, found, life


# Finding an answer again


@pytest.mark.parametrize("limit", range(0, 19, 3))
def test_siblings_with_one_prompt_are_sampled_once_each(tmp_path: Path, limit: int) -> None:
    trial = Trial(tmp_path)
    before = killed_after(trial, limit, Chat(siblings=3, turns=3), max_head_offpolicyness=0)
    after, found, life = finish(trial, Chat(siblings=3, turns=3), max_head_offpolicyness=0)

    assert life.stats["replayed"] == limit and life.stats["replayed_tokens"] == 2 * limit
    assert not before.answered & after.asked, "a recorded answer was sampled again"
    assert before.answered.total() + after.answered.total() == 2 * 3 * 3
    assert before.asked - before.answered <= after.asked, "a seed has changed"
    assert life.stats["dropped"] == life.stats["unused"] == 0
    assert all(len(set(row[2:])) == 6 for row in found), "an answer was given out twice"


def test_nested_gathers_find_their_answers_in_any_order(tmp_path: Path) -> None:
    class Nested(Chat):
        async def arun_episode(self, engine: Any, data: Any) -> Any:
            async def pair(prompt: list[int]) -> list[TokenSequence]:
                return await asyncio.gather(*(self._talk(engine, prompt, n) for n in range(2)))

            prompts = [[*data["input_ids"], n] for n in range(3)]
            pairs = await asyncio.gather(*map(pair, prompts))
            return to_trajectory([one for pair in pairs for one in pair], [0.0] * 6)

    trial, seen = Trial(tmp_path), Counter[Any]()
    for seed in range(3):
        server = Lasting(limit=7)
        draw = random.Random(seed)
        server.delay = lambda draw=draw: draw.choice([0.0, 0.001, 0.003])
        with trial.life(server, Nested(), max_head_offpolicyness=0) as life:
            life.serve(0)
            wait_until(lambda server=server: server.taken == 7)
        assert not seen & server.asked
        seen += server.answered
    after, _, life = finish(trial, Nested(), max_head_offpolicyness=0)
    assert not seen & after.asked and life.stats["replayed"] == 21
    assert seen.total() + after.answered.total() == 2 * 6 * 2


def test_a_prompt_that_an_episode_repeats_gets_its_answers_in_order(tmp_path: Path) -> None:
    class Repeating:
        def __init__(self) -> None:
            self.found: list[list[int]] = []

        async def arun_episode(self, engine: Any, data: Any) -> Any:
            sequence = TokenSequence()
            sequence.extend_given(data["input_ids"])
            for _ in range(4):
                answer = await engine.agenerate(ModelRequest(data["input_ids"], ONE))
                self.found.append(answer.output_tokens)
                sequence.extend_sampled(answer)
            return to_trajectory([sequence], [0.0])

    trial, first, second = Trial(tmp_path, batch_size=1), Repeating(), Repeating()
    before = killed_after(trial, 3, first, max_head_offpolicyness=0)
    after, _, _ = finish(trial, second, max_head_offpolicyness=0)
    assert len(first.found) == 3 and second.found[:3] == first.found
    assert len(after.seen) == 1 and len({seed for _, seed in before.asked | after.asked}) == 4


def test_an_explicit_seed_is_part_of_the_request(tmp_path: Path) -> None:
    one, other = (ModelRequest([1, 2], ONE, seed) for seed in (1, 2))
    assert request_digest(one) != request_digest(other)
    assert request_digest(one) == request_digest(ModelRequest((1, 2), ONE, 1, "name", {"x": 1}))


def test_a_request_is_what_a_server_samples_from() -> None:
    images = PromptImages([1], [b"a"], [9])
    requests = [
        ModelRequest([1, 2], ONE),
        ModelRequest([1, 3], ONE),
        ModelRequest([1], ONE),
        ModelRequest([1, 2], GenerationHyperparameters(max_new_tokens=3)),
        ModelRequest([1, 2], ONE, images=images),
        ModelRequest([1, 2], ONE, images=PromptImages([1], [b"b"], [9])),
        ModelRequest([1, 2], ONE, images=PromptImages([1], [b"a"], [8])),
        ModelRequest([1, 2], ONE, images=PromptImages([2], [b"a"], [9])),
    ]
    assert len(set(map(request_digest, requests))) == len(requests)
    more = GenerationHyperparameters(max_new_tokens=2, n_samples=8)
    assert request_digest(ModelRequest([1, 2], more)) == request_digest(requests[0])


def test_a_workflow_with_random_prompts_samples_again_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def draw(engine: Any, sibling: int, turn: int) -> list[int]:
        return [random.SystemRandom().randrange(1000, 1 << 20)]

    trial = Trial(tmp_path)
    killed_after(trial, 8, Chat(2, 3, draw), max_head_offpolicyness=0)
    after, _, life = finish(trial, Chat(2, 3, draw), max_head_offpolicyness=0)
    assert life.stats["replayed"] == 4, "the first turns"
    assert life.stats["unused"] == 4 and after.answered.total() == 8
    warnings = [r.getMessage() for r in caplog.records if "did not ask for" in r.getMessage()]
    assert len(warnings) == 1 and "ticket" in warnings[0]


def test_of_two_records_of_one_request_the_later_one_counts(tmp_path: Path) -> None:
    place = Place(0, "k", 0, Kind.ANSWER)

    def record(token: int) -> bytes:
        return Record.of_answer(place, ModelResponse([1], [token], [-0.5], [0], "stop"), {}).data

    recorded = Recorded("exact")
    recorded.load([record(5), record(6)])
    recorded.confirm(0, None)
    found = recorded.take(place, Bounds(0, 0))
    assert found is not None and found.response(ModelRequest([1])).output_tokens == [6]
    assert recorded.take(place, Bounds(0, 0)) is None, "an answer is given out once"


# Versions and weights


def by_two_versions(trial: Trial, **options: Any) -> tuple[list[list[int]], Lasting]:
    """A life that commits step 0, trains steps 1 and 2, and is killed in step 3.

    The first turn of step s is sampled by version s - 1, the second one by version s. Returns the
    rows of step 2.
    """
    server, workflow = Lasting(), Chat()
    workflow.hold = lambda step, turn: turn == 1 and server.version < step
    with trial.life(server, workflow, **options) as life:
        life.serve(0)
        rows(life, 0)
        wait_until(lambda: server.taken == 6)
        life.commit()
        for version in (1, 2):
            life.serve(version)
            found = rows(life, version)
            wait_until(lambda version=version: server.taken == 6 + 4 * version)
    return found, server


def test_answers_of_weights_that_were_made_again_are_used_when_these_exist(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    lost, before = by_two_versions(trial)
    after = Lasting()
    with trial.life(after, Chat()) as life:
        life.serve(1)
        rows(life, 1)
        wait_until(lambda: life.stat("running") == 0)
        assert not after.seen, "step 2 waits for version 2"
        life.serve(2)
        assert rows(life, 2) == lost
        wait_until(lambda: life.stat("running") == 0)
        assert life.stat("replayed") == 2 + 2 + 4 + 2 and life.stat("dropped") == 0
    assert after.answered.total() == 2 and not before.answered & after.asked


def test_answers_of_weights_that_were_not_made_again_are_dropped(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    lost, _ = by_two_versions(trial)
    after = Lasting()
    with trial.life(after, Chat()) as life:
        life.serve(1)
        rows(life, 1)
        after.contents = "b"
        life.serve(2)
        again = rows(life, 2)
        wait_until(lambda: life.stat("running") == 0)
        assert life.stat("dropped") == 4 and life.stat("unused") == 0
    assert [row[:4] for row in again] == [row[:4] for row in lost], "version 1 is the same"
    assert not {t for row in again for t in row[4:]} & {t for row in lost for t in row[4:]}
    assert after.answered.total() == 2 + 4


def test_a_version_that_no_life_made_drops_what_came_after_it(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    by_two_versions(trial)
    after = Lasting()
    # version 1 of this run needs no label, version 2 differs
    with trial.life(after, Chat(), max_head_offpolicyness=2) as life:
        life.serve(1)
        after.contents = "b"
        rows(life, 1)
        life.serve(2)
        wait_until(lambda: life.stat("running") == 0)
        assert life.stat("dropped") == 4, "of steps 2 and 3, which had waited for version 2"


def test_weights_that_differ_drop_the_answers_of_all_later_ones() -> None:
    places, records = {}, []
    for version in (1, 2, 3):
        places[version] = Place(version, "k", 0, Kind.ANSWER)
        answer = ModelResponse([1], [5], [-0.5], [version], "stop")
        records.append(Record.of_answer(places[version], answer, {version: f"{version}-a"}).data)
    recorded = Recorded("exact")
    recorded.load(records)
    for label in ("1-a", "2-b", "3-a"):
        recorded.confirm(int(label[0]), label)
    found = [n for n, place in places.items() if recorded.take(place, Bounds(0, 3)) is not None]
    assert found == [1] and recorded.dropped == 2, "version 3 came after a version that is lost"


def test_without_a_label_only_the_restored_weights_are_known(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    by_two_versions(trial)

    class Silent(Lasting):
        def status(self) -> Any:
            raise ServerError("it does not answer")

    after = Silent()
    with trial.life(after, Chat()) as life:
        life.serve(1)
        rows(life, 1)
        life.serve(2)
        rows(life, 2)
        wait_until(lambda: life.stat("running") == 0)
        assert life.stat("dropped") == 4 and life.stat("replayed") == 6


def test_before_the_first_generation_even_version_0_needs_its_label(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    killed_after(trial, 4, Chat(), max_head_offpolicyness=0)
    server = Lasting(contents="b")
    with trial.life(server, Chat(), max_head_offpolicyness=0) as life:
        life.serve(0)
        rows(life, 0)
        assert life.stat("dropped") == 4 and life.stat("replayed") == 0


def test_a_smaller_bound_drops_the_answers_that_are_too_stale(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    by_two_versions(trial)
    after = Lasting()
    with trial.life(after, Chat(), max_head_offpolicyness=0) as life:
        for version in (1, 2):
            life.serve(version)
            batch = life.executor.next_batch(version)
            assert set(batch["versions"].flatten().tolist()) == {-1, version}
        assert life.stat("dropped") == 4, "the first turns"
    assert after.answered.total() == 8


@pytest.mark.parametrize(("replay", "replayed"), [("all", 10), ("off", 0)])
def test_replay_decides_what_becomes_of_lost_weights(
    tmp_path: Path, replay: str, replayed: int
) -> None:
    trial = Trial(tmp_path)
    by_two_versions(trial)
    after = Lasting(contents="b")
    with trial.life(after, Chat(), replay=replay) as life:
        for version in (1, 2):
            life.serve(version)
            rows(life, version)
        wait_until(lambda: life.stat("running") == 0)
        assert life.stat("replayed") == replayed and life.stat("dropped") == 0
    assert after.answered.total() == 2 + 10 - replayed


def test_all_records_are_not_taken_into_another_branch(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    by_two_versions(trial)
    with (
        pytest.raises(ConfigError, match="replay='all' with resume_path"),
        trial.life(Lasting(), Chat(), went_back=True, replay="all"),
    ):
        pass
    with pytest.raises(ConfigError, match="'replay' is 'some'; expected one of 'exact', 'all'"):
        trial.life(Lasting(), Chat(), replay="some").__enter__()


def test_an_answer_that_comes_before_its_version_is_set_gets_its_label(tmp_path: Path) -> None:
    trial, server, workflow = Trial(tmp_path), Lasting(), Chat()
    workflow.hold = lambda step, turn: turn == 1 and server.version < step
    with trial.life(server, workflow) as life:
        life.serve(0)
        rows(life, 0)
        life.commit()
        life.serve(1)
        rows(life, 1)
        wait_until(lambda: life.stat("running") == 2)  # the tickets of step 2, in their first turns
        server.version = 2  # published, and they end before it is set
        wait_until(lambda: life.stat("running") == 0)
        answered = server.answered.copy()  # those of step 3 may be cut off by the kill
        life.executor.set_version(2)
        lost = rows(life, 2)
    after = Lasting()
    with trial.life(after, Chat()) as life:
        for version in (1, 2):
            life.serve(version)
            again = rows(life, version)
        assert life.stat("dropped") == 0
    assert again == lost and not answered & after.asked


# Tickets that wait for weights take no slot


@pytest.mark.parametrize("picky", [False, True])
def test_tickets_that_wait_for_weights_take_no_slot(tmp_path: Path, picky: bool) -> None:
    def rejects(index: int) -> bool:
        return picky and index % 2 == 0

    trial, server, workflow = Trial(tmp_path), Lasting(), Chat()
    workflow.rejects = rejects
    workflow.hold = lambda step, turn: turn == 1 and server.version < step
    with trial.life(server, workflow, max_head_offpolicyness=2) as life:
        for version in range(3):
            life.serve(version)
            found = rows(life, version)
            if version == 0:
                life.commit()
        answered = server.answered.copy()  # later ones may be cut off by the kill
        wait_until(lambda: server.taken >= answered.total())
    after, workflow = Lasting(), Chat()
    workflow.rejects = rejects
    with trial.life(after, workflow, max_head_offpolicyness=2, max_concurrent_rollouts=1) as life:
        for version in (1, 2, 3):
            life.serve(version)
            again = rows(life, version)
            if version == 2:
                assert again == found, "the samples of lost weights that were made again"
    assert not answered & after.asked


def test_a_step_that_is_asked_for_before_its_version_is_sampled_now(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    lost, _ = by_two_versions(trial)
    after = Lasting(1)
    with trial.life(after, Chat(), max_concurrent_rollouts=1) as life:
        life.serve(1)
        again = rows(life, 2)
        assert life.stat("dropped") == 2
    assert [row[:4] for row in again] == [row[:4] for row in lost]
    assert after.answered.total() == 2, "the second turn of step 2"


# States and records


def test_records_outlive_the_log_that_had_them(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    server = Lasting(limit=10)
    with trial.life(server, Chat(turns=3)) as life:
        life.serve(0)
        wait_until(lambda: server.taken == 10)
        life.commit()
    for file in tmp_path.rglob("*.log"):
        file.unlink()
    after = Lasting()
    with trial.life(after, Chat(turns=3)) as life:
        life.serve(0)
        rows(life, 0)
        rows(life, 1)
        assert life.stat("replayed") > 0
    assert not server.answered & after.asked and after.answered.total() == 2


def test_records_of_tickets_that_come_later_stay_in_the_state(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    lost, before = by_two_versions(trial)
    middle = Lasting()
    with trial.life(middle, Chat()) as life:
        life.serve(1)
        rows(life, 1)
        life.commit()
    after = Lasting()
    with trial.life(after, Chat()) as life:
        life.serve(2)
        assert rows(life, 2) == lost, "found through the state of a life that did not need them"
        assert life.stat("replayed") == 6
    assert not middle.seen and not before.answered & after.asked


def test_records_of_ended_tickets_are_in_no_state(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    with trial.life(Lasting(), Chat()) as life:
        life.serve(0)
        rows(life, 0)
        rows(life, 1)
        life.commit()
    assert "records" not in trial.generation[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log": 7}, "log 7, which is no id of a log"),
        ({"records": [b"x"]}, r"records of type list; expected a \[n\] uint8 tensor"),
        ({"records": torch.zeros(3, dtype=torch.uint8)}, "end after 3 bytes"),
        ({"records": torch.full((9,), 255, dtype=torch.uint8)}, "end after 9 bytes"),
    ],
)
def test_a_state_with_other_records_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    trial = Trial(tmp_path)
    with trial.life(Lasting(limit=3), Chat()) as life:
        life.serve(0)
        wait_until(lambda: life.server.taken == 3)
        life.commit()
    trial.generation[0].update(change)
    with pytest.raises(CheckpointMismatchError, match=message):
        trial.life(Lasting(), Chat()).__enter__()


def test_a_state_without_records_loads(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    with trial.life(Lasting(limit=3), Chat()) as life:
        life.serve(0)
        wait_until(lambda: life.server.taken == 3)
        life.commit()
    for name in ("log", "records"):
        del trial.generation[0][name]
    after, _, life = finish(trial, Chat())
    assert life.stats["replayed"] == 0 and after.answered.total() >= 4


LOGPROBS = {"narrow": [-0.5, -0.25, float("-inf")], "wide": [-0.1, -0.5, -1e-300]}


@pytest.mark.parametrize("kind", LOGPROBS)
def test_a_record_has_every_bit_of_an_answer(kind: str) -> None:
    response = ModelResponse([1, 2], [7, 0, 2**32 - 1], LOGPROBS[kind], [3, 3, 4], "length")
    place = Place(12, "ab", 1, Kind.ANSWER)
    record = Record.decode(Record.of_answer(place, response, {3: "3-x", 9: "9-y"}).data)
    assert record.response(ModelRequest([1, 2])) == response
    assert record.place == place and record.versions == (3, 4)
    assert (
        record.label(3) == "3-x"
        and record.label(4) is None
        and record.head["labels"] == {"3": "3-x"}
    )
    assert record.head["wide"] is (kind == "wide")
    state = b"".join(struct.pack("<I", len(record.data)) + record.data for _ in range(2))
    assert split_records(state) == [record.data] * 2


def changed(**changes: Any) -> bytes:
    response = ModelResponse([1], [7, 8], [-0.5, -0.25], [3, 4], "stop")
    record = Record.of_answer(Place(0, "ab", 0, Kind.ANSWER), response, {})
    end = 4 + struct.unpack_from("<I", record.data)[0]
    text = json.dumps({**record.head, **changes}).encode()
    return struct.pack("<I", len(text)) + text + record.data[end:]


ODD = {
    "no head": b"abc",
    "a huge head": struct.pack("<I", 2**32 - 1) + b"{}",
    "a list": struct.pack("<I", 2) + b"[]",
    "ticket": changed(ticket=-1),
    "key": changed(key=None),
    "nth": changed(nth=True),
    "kind": changed(kind="odd"),
    "tokens": changed(tokens=2**40),
    "versions": changed(versions=[[3, 2**40], [4, 2 - 2**40]]),
    "a run": changed(versions=[[3, 2, 1]]),
    "labels": changed(labels={"3": 3}),
    "stop": changed(stop="bored"),
    "wide": changed(wide=True),
    "a result": changed(kind="call"),
    "deep": struct.pack("<I", 100_000) + b"[" * 100_000,
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_record_is_left_out(name: str, caplog: pytest.LogCaptureFixture) -> None:
    recorded = Recorded("exact")
    recorded.load([ODD[name]])
    assert recorded.state() == b"" and "a record cannot be read" in caplog.text


# Images and calls


def test_an_answer_that_cannot_be_trained_on_is_in_no_record(tmp_path: Path) -> None:
    class Sick(Lasting):
        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            answer = await super().agenerate(request)
            answer.output_logprobs[0] = float("nan")
            return answer

    trial = Trial(tmp_path)
    with trial.life(Sick(), Chat(turns=1), request_attempts=1) as life:
        life.serve(0)
        life.commit()
        with pytest.raises(RolloutError, match="expected a finite number"):
            life.executor.next_batch(0)

    # The server was repaired.
    with trial.life(Lasting(), Chat(turns=1)) as life:
        life.serve(0)
        assert life.executor.next_batch(0)["logprobs"].isfinite().all()
        assert life.stat("replayed") == 0


def test_images_are_encoded_again_and_a_changed_one_is_asked_again(tmp_path: Path) -> None:
    file = tmp_path / "one.png"
    file.write_bytes(picture(1, 56, 28))
    content = [{"type": "text", "text": "w1"}, {"type": "image"}]
    sample = {"messages": [{"role": "user", "content": content}], "images": [str(file)]}
    gconfig = GenerationHyperparameters(n_samples=4, max_new_tokens=2)
    seen = []
    with CallPool(n_processes=1) as pool:
        for limit, n_answered in ((3, 3), (None, 1), (None, 4)):
            if n_answered == 4:
                file.write_bytes(picture(2, 56, 28))
            trial = Trial(tmp_path / "log", batch_size=1)
            server = Lasting(limit=limit)
            workflow = RLVRWorkflow(
                user_code.zero_reward, gconfig, pool=pool, processor=make_processor()
            )
            with trial.life(server, workflow, max_head_offpolicyness=0) as life:
                life.loader.dataset = [sample] * 24
                life.serve(0)
                wait_until(lambda s=server, n=n_answered: s.taken == n)
            seen.append(server)
    first, second, third = seen
    assert not first.answered & second.asked
    assert len({key_of(request) for request in third.seen}) == 4


def test_arguments_that_cannot_be_pickled_are_called_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def look(lock: Any) -> int:
        calls.append(lock)
        return 5

    async def say(engine: Any, sibling: int, turn: int) -> list[int]:
        return [await engine.call(look, threading.Lock())]

    trial = Trial(tmp_path)
    killed_after(trial, 3, Chat(1, 3, say), max_head_offpolicyness=0)
    before = len(calls)
    _, _, life = finish(trial, Chat(1, 3, say), max_head_offpolicyness=0)
    assert before >= 2 and len(calls) == before + 2 * 3 and life.stats["replayed"] == 3
    assert caplog.text.count("cannot be recorded") == 2, "once in each life"


def test_a_call_is_its_function_and_its_arguments_in_every_process() -> None:
    assert call_digest(len, [[1, 2]], {}) == call_digest(len, ([1, 2],), {})
    different = [
        (len, ["ab"], {}),
        (max, ["ab"], {}),
        (len, ["ab"], {"key": 1}),
        (len, [["ab"]], {}),
        (len, [[1, 2]], {}),
        (len, [[1, 2.0]], {}),
        (len, [{1, 2}], {}),
        (len, [frozenset([1])], {}),
    ]
    assert len({call_digest(*call) for call in different}) == len(different)
    shared = "".join(["a", "b!"])
    assert call_digest(len, [shared, shared], {}) == call_digest(len, ["ab!", "".join("ab!")], {})


@pytest.mark.slow
def test_sets_and_tensors_have_one_digest_in_every_process() -> None:
    code = (
        "import torch\n"
        "from holdfast.engine.rollouts.digests import call_digest\n"
        "numbers = [torch.arange(6).view(2, 3)[:, 1], torch.ones(2, dtype=torch.bfloat16)]\n"
        "numbers += [torch.tensor(True), torch.zeros(0)]\n"
        "print(call_digest(len, [{'w': {c * 3 for c in 'abcdefgh'}}, numbers], {}))\n"
        "assert call_digest(len, numbers[1:2], {}) != call_digest(len, [numbers[1] * 2], {})"
    )
    found = set()
    for seed in ("1", "2", "3"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
            timeout=stretched(60),
        )
        found.add(run.stdout)
    assert len(found) == 1
