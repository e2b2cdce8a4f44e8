"""Which generations stay: the union of the rules, and never fewer than rules over the whole history
would keep.
"""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.recover.config import RecoverConfig
from holdfast.recover.storage.generations import RetentionRules, reasons_to_keep, steps_to_keep
from tests.recover.runs import Tiny, make_handler, step_info

History = dict[int, dict[str, float]]


def history(**values: float | None) -> History:
    """``s3=0.5``: step 3 with reward 0.5. None: without a reward."""
    return {
        int(step[1:]): {} if value is None else {"reward": value} for step, value in values.items()
    }


def plain(steps: range) -> History:
    return {step: {} for step in steps}


def random_history(rng: random.Random) -> History:
    """Steps with gaps and few distinct values, so that there are ties. Some are NaN, infinite or
    missing.
    """
    steps = sorted(rng.sample(range(200), rng.randint(1, 40)))
    values = [0.0, 0.25, 0.5, 0.75, 1.0, -1.0, math.nan, math.inf, None]
    return {
        s: {"other": 1.0} | ({} if (v := rng.choice(values)) is None else {"reward": v})
        for s in steps
    }


def random_rules(rng: random.Random) -> RetentionRules:
    best = rng.choice([None, 1, 2, 5])
    return RetentionRules(
        last=rng.choice([0, 1, 2, 3, 10, None]),
        every_steps=rng.choice([None, 1, 3, 10, 50]),
        best=best,
        metric=None if best is None else "reward",
        mode=rng.choice(["max", "min"]),
    )


def cases() -> Iterator[tuple[History, RetentionRules]]:
    rng = random.Random(0)
    for _ in range(2000):
        yield random_history(rng), random_rules(rng)


def kept_commit_by_commit(
    whole: History, rules: RetentionRules, have: History | None = None
) -> set[int]:
    """The final generations if the rules are applied after every commit to the generations that
    still exist.
    """
    disk: History = dict(have or {})
    for step in sorted(whole):
        disk[step] = whole[step]
        disk = {kept: disk[kept] for kept in steps_to_keep(disk, rules)}
    return set(disk)


@pytest.mark.parametrize(
    ("last", "kept"),
    [(1, {9}), (2, {8, 9}), (10, set(range(10))), (99, set(range(10))), (None, set(range(10)))],
)
def test_the_newest_stay_and_without_a_number_all(last: int | None, kept: set[int]) -> None:
    assert steps_to_keep(plain(range(10)), RetentionRules(last)) == kept


def test_every_so_many_steps_counts_from_the_start_of_the_run() -> None:
    assert steps_to_keep(plain(range(450)), RetentionRules(1, every_steps=100)) == {
        99,
        199,
        299,
        399,
        449,
    }


def test_the_best_stay_whichever_end_is_best() -> None:
    generations = history(s0=0.1, s1=0.9, s2=0.5, s3=0.7, s4=0.2)
    assert steps_to_keep(generations, RetentionRules(1, best=2, metric="reward")) == {1, 3, 4}
    assert steps_to_keep(generations, RetentionRules(1, best=2, metric="reward", mode="min")) == {
        0,
        4,
    }
    assert steps_to_keep(generations, RetentionRules(1, best=2, metric="loss")) == {4}


def test_of_equals_the_newer_is_better() -> None:
    generations = history(s0=0.5, s1=0.5, s2=0.5, s3=0.1)
    assert steps_to_keep(generations, RetentionRules(1, best=2, metric="reward")) == {1, 2, 3}
    generations = history(s0=0.5, s1=0.5, s2=0.5, s3=0.9)
    assert steps_to_keep(generations, RetentionRules(1, best=2, metric="reward", mode="min")) == {
        1,
        2,
        3,
    }


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_generation_without_the_metric_or_with_nan_is_never_best(mode: str) -> None:
    generations = history(s0=math.nan, s1=0.3, s2=None, s3=math.nan, s4=None)
    assert steps_to_keep(generations, RetentionRules(1, best=3, metric="reward", mode=mode)) == {
        1,
        4,
    }


def test_it_is_told_once_when_no_generation_has_the_metric_of_keep_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"freq_steps": 1, "async_save": False, "max_ckpt_to_keep": 1}
    options |= {"keep_best": 1, "best_metric": "eval_loss", "best_mode": "min"}
    tiny = Tiny()
    with make_handler(tmp_path, **options) as handler:
        handler.load(tiny.state)
        for step in range(4):
            tiny.step()
            assert handler.dump(tiny.state, step_info(step), metrics={"loss": 1.0})
    told = [record for record in caplog.messages if "has the metric 'eval_loss'" in record]
    assert len(told) == 1 and "(they have ['loss'])" in told[0]


def test_a_generation_stays_when_any_rule_wants_it() -> None:
    generations = history(s0=0.9, s1=0.1, s2=0.1, s3=0.1, s4=0.1, s5=0.1)
    assert steps_to_keep(
        generations, RetentionRules(2, every_steps=3, best=1, metric="reward")
    ) == {0, 2, 4, 5}


def test_an_empty_history_keeps_nothing() -> None:
    assert steps_to_keep({}, RetentionRules(2, every_steps=3, best=1, metric="reward")) == set()


def test_the_rules_of_a_run_are_those_of_its_configuration() -> None:
    config = RecoverConfig(
        max_ckpt_to_keep=None,
        keep_every_steps=7,
        keep_best=3,
        best_metric="eval/loss",
        best_mode="min",
    )
    assert RetentionRules.from_config(config) == RetentionRules(None, 7, 3, "eval/loss", "min")
    assert RetentionRules.from_config(RecoverConfig()) == RetentionRules(2)


def test_whatever_the_rules_the_newest_stays_and_nothing_is_made_up() -> None:
    for generations, rules in cases():
        kept = steps_to_keep(generations, rules)
        assert max(generations) in kept <= set(generations)


def test_order_and_repetition_change_nothing() -> None:
    rng = random.Random(1)
    for generations, rules in cases():
        kept = steps_to_keep(generations, rules)
        shuffled = dict(rng.sample(sorted(generations.items()), len(generations)))
        assert steps_to_keep(shuffled, rules) == kept
        assert steps_to_keep({step: generations[step] for step in kept}, rules) == kept


def test_more_generous_rules_keep_all_that_stricter_ones_do() -> None:
    for generations, r in cases():
        kept = steps_to_keep(generations, r)
        more = [
            RetentionRules(None, r.every_steps, r.best, r.metric, r.mode),
            RetentionRules(
                None if r.last is None else r.last + 1, r.every_steps, r.best, r.metric, r.mode
            ),
            RetentionRules(r.last, r.every_steps, (r.best or 0) + 1, "reward", r.mode),
        ]
        divisors = [
            d
            for d in range(1, (r.every_steps or 0) + 1)
            if r.every_steps and r.every_steps % d == 0
        ]
        more += [RetentionRules(r.last, d, r.best, r.metric, r.mode) for d in divisors or [4]]
        for generous in more:
            assert kept <= steps_to_keep(generations, generous)


def test_rules_applied_at_every_commit_keep_the_same_as_rules_applied_once() -> None:
    for generations, rules in cases():
        assert kept_commit_by_commit(generations, rules) == steps_to_keep(generations, rules)


def test_after_a_restart_with_other_rules_generations_kept_by_both_stay() -> None:
    rng = random.Random(2)
    for generations, before in cases():
        after, cut = random_rules(rng), rng.choice(sorted(generations))
        early = {step: metrics for step, metrics in generations.items() if step <= cut}
        late = {step: metrics for step, metrics in generations.items() if step > cut}
        disk = kept_commit_by_commit(early, before)
        kept = kept_commit_by_commit(late, after, {step: early[step] for step in disk})
        if late:
            assert (
                steps_to_keep(generations, after) & (steps_to_keep(early, before) | set(late))
                <= kept
            )


def test_each_generation_is_told_which_rules_want_it() -> None:
    generations = {9: {"reward": 0.5}, 19: {"reward": 0.9}, 24: {}, 25: {"reward": 0.1}, 26: {}}
    rules = RetentionRules(2, every_steps=10, best=1, metric="reward")
    assert reasons_to_keep(generations, rules) == {
        26: ["newest", "last 2"],
        25: ["last 2"],
        24: [],
        19: ["every 10 steps", "best 1 by reward"],
        9: ["every 10 steps"],
    }
    assert reasons_to_keep({1: {}, 0: {}}, RetentionRules(None)) == {
        1: ["newest", "all"],
        0: ["all"],
    }
