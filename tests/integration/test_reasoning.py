"""`examples/reasoning.py`: items by number, held-out ones apart, verifiers that fail, and runs that
are killed.
"""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from examples.chaos import GrpoRun, sha256
from examples.rollout import RolloutWorker
from examples.tiny_models import make_tokenizer, write_tiny_qwen3
from holdfast.utils.errors import ConfigError
from tests.integration.killed_jobs import PATIENCE_S, finish, finish_killed, stats_of
from tests.recover.cli.commands import answer

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = {
    "palindrome_generation": {"min_length": 3, "max_length": 4},
    "word_sorting": {"min_words": 2, "max_words": 2, "min_word_length": 3, "max_word_length": 4},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "spell_backward": {"min_word_len": 3, "max_word_len": 5},
}


@pytest.fixture(scope="module")
def modules() -> Iterator[Any]:
    """Import the example's modules as in one of its processes."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield import_module("reasoning"), import_module("reasoning_task")
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def tokenizer(modules: Any) -> Any:
    return make_tokenizer(modules[0].VOCABULARY, modules[0].CHAT_TEMPLATE)


def make_task(
    modules: Any,
    tokenizer: Any,
    names: tuple[str, ...] = tuple(OPTIONS),
    wrong: float = 0.0,
    **options: Any,
) -> Any:
    data = (names, {**OPTIONS, **options}, 1, (400, 100))
    return modules[1].ReasoningTask(*data, tokenizer, max_new_tokens=8, wrong=wrong)


@pytest.mark.slow
def test_a_number_is_always_the_same_item_and_no_question_is_both_held_out_and_trained_on(
    modules: Any, tokenizer: Any
) -> None:
    task, again = make_task(modules, tokenizer), make_task(modules, tokenizer)
    trained = [task.item(number) for number in range(400)]
    held_out = [task.item(number, held_out=True) for number in range(100)]
    assert trained == [again.item(number) for number in range(400)]
    assert held_out == [again.item(number, held_out=True) for number in range(100)]
    questions = [{tuple(item["prompt_ids"]) for item in items} for items in (trained, held_out)]
    assert not questions[0] & questions[1] and len(questions[1]) > 70
    assert [item["data"]["task"] for item in trained[:8]] == [*OPTIONS, *OPTIONS]
    for item in trained[:20]:
        instruction, *_, end = item["prompt_ids"]
        assert (
            tokenizer.decode([instruction]) in modules[0].INSTRUCTIONS
            and end == tokenizer.bos_token_id
        )
        assert item["answer_ids"][-1] == tokenizer.eos_token_id
        assert tokenizer.decode(item["answer_ids"][:-1]) == item["data"]["entry"]["answer"]
        assert tokenizer.unk_token_id not in item["prompt_ids"] + item["answer_ids"]


def test_a_share_of_the_supervised_answers_is_wrong_and_nothing_else_changes(
    modules: Any, tokenizer: Any
) -> None:
    right, spoiled = (
        make_task(modules, tokenizer, ("spell_backward",), wrong=share) for share in (0.0, 0.4)
    )
    pairs = [(right.item(number), spoiled.item(number)) for number in range(400)]
    wrong = [good["answer_ids"] != bad["answer_ids"] for good, bad in pairs]
    assert 0.3 < sum(wrong) / len(wrong) < 0.5
    assert all({**good, "answer_ids": bad["answer_ids"]} == bad for good, bad in pairs)
    answers = [bad["answer_ids"] for _, bad in pairs]
    assert spoiled.rewards([bad for _, bad in pairs], answers) == [
        float(not each) for each in wrong
    ]
    assert all(
        right.item(number, held_out=True) == spoiled.item(number, held_out=True)
        for number in range(100)
    )


def test_answers_are_scored_by_their_verifier_and_one_that_throws_costs_its_answer_alone(
    modules: Any, tokenizer: Any
) -> None:
    task = make_task(modules, tokenizer)
    items = [task.item(number) for number in range(6)]
    answers = [item["answer_ids"] for item in items]
    wrong = [*answers[1][:-1], *answers[1]]
    broken = {**items[1], "data": {**items[1]["data"], "entry": {}}}  # no answer to compare with
    rewards = task.rewards([*items, items[1], broken], [*answers, wrong, answers[1]])
    assert rewards[:6] == [1.0] * 6 and rewards[6:] == [0.0, 0.0]
    assert task.stats() == {"rewards/raised": 1, "rewards/lost": 0}


def test_with_answer_tags_only_what_stands_between_them_counts(modules: Any) -> None:
    entry = {"answer": "7", "metadata": {}}
    for completion, expected in (
        ("so <answer>7</answer>", 1.0),
        ("7", 0.0),
        ("<answer>8</answer> 7", 0.0),
    ):
        assert (
            modules[1].score("", completion, [], [], "chain_sum", entry, answer_tags=True)
            == expected
        )


def test_a_dataset_that_reasoning_gym_lacks_is_named(
    modules: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"names 'chain_sums', which reasoning-gym does not have; it has .*chain_sum",
    ):
        make_task(modules, tokenizer, ("chain_sums",))
    for options in ({"max_terms": 1, "min_terms": 2}, {"terms": 2}):
        with pytest.raises(ConfigError, match=r"task_options\.chain_sum"):
            make_task(modules, tokenizer, ("chain_sum",), chain_sum=options)
    monkeypatch.setattr(modules[1], "_HELD_OUT_ONE_IN", 1 << 40)
    with pytest.raises(
        ConfigError, match="'palindrome_generation' has too few questions for held-out items"
    ):
        make_task(modules, tokenizer).item(0, held_out=True)


def test_every_stop_token_of_the_model_folder_ends_an_answer(
    modules: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_qwen3(tmp_path / "model", tokenizer, layers=1, hidden=16, for_vllm=True)
    also = list(range(10, 40))
    GenerationConfig(eos_token_id=[tokenizer.eos_token_id, *also]).save_pretrained(folder)
    monkeypatch.setattr(
        "examples.rollout.configure_logging", lambda level: None
    )  # it is meant for a separate process
    worker = RolloutWorker(str(folder))
    worker.update_weights_from_disk(str(folder), 0)
    batch = worker.generate([[5, 60, 1]], 64, max_new_tokens=6, temperature=1.0, seed=0)
    stops = (
        torch.isin(batch["input_ids"], torch.tensor([tokenizer.eos_token_id, *also]))
        & batch["loss_mask"].bool()
    )
    assert (stops.sum(1) == (~batch["truncated"]).long()).all() and 0 < int(
        batch["truncated"].sum()
    ) < 64
    last = batch["attention_mask"].sum(1, keepdim=True) - 1
    assert (stops.gather(1, last)[:, 0] == ~batch["truncated"]).all()


def job(folder: Path, *overrides: str) -> GrpoRun:
    script = EXAMPLES / "reasoning.py"
    return GrpoRun(folder, "trackers=[]", *overrides, script=script, experiment="reasoning")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_in_both_of_its_phases_ends_as_one_that_was_not(tmp_path: Path) -> None:
    sizes = (
        "batch_size=4",
        "sft_batch_size=8",
        "n_samples=4",
        "n_held_out=8",
        "eval_steps=3",
        "model_layers=2",
    )
    settings = (*sizes, "total_steps=12", "sft_steps=6", "recover.freq_steps=2")
    reference, run = job(tmp_path / "reference", *settings), job(tmp_path / "run", *settings)
    finish(reference)
    finish_killed(run, trainer_after=2, driver_after=8)
    assert sha256(run.final_weights()) == sha256(reference.final_weights())
    stats = stats_of(run)
    assert stats == stats_of(reference) and [entry["step"] for entry in stats] == list(range(12))
    assert [entry["step"] for entry in stats if "held_out" in entry] == [2, 5, 8, 11]
    assert ["reward" in entry for entry in stats] == [False] * 6 + [True] * 6
    spent = answer("top", run.trial_root)["spent_s"]
    assert (
        spent.keys() == {"publishing", "sampling", "training", "evaluating"}
        and min(spent.values()) > 0
    )
    assert (run.trial_root / "held_out.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_settings_for_gpus_train_a_model_folder_with_a_chat_template(
    modules: Any, tmp_path: Path
) -> None:
    template = (
        "{% for message in messages %}<bos>{{ message['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<bos>{% endif %}"
    )
    tokenizer = make_tokenizer(modules[0].VOCABULARY, template)
    folder = write_tiny_qwen3(
        tmp_path / "model", tokenizer, hidden=32, for_vllm=True, max_length=4096
    )
    GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, 90], do_sample=True, top_p=0.8
    ).save_pretrained(folder)
    small = (
        "total_steps=2",
        "batch_size=2",
        "sft_batch_size=2",
        "n_samples=2",
        "n_held_out=2",
        "eval_steps=1",
    )
    here = ("gpus_per_trainer=0", "gpus_per_rollout=0", "actor.dtype=float32", "max_new_tokens=16")
    run = GrpoRun(
        tmp_path / "run",
        *("trackers=[]", f"actor.path={folder}", *small, *here),
        *("--config", str(EXAMPLES / "reasoning_gpu.yaml")),
        script=EXAMPLES / "reasoning.py",
        experiment="reasoning_gpu",
    )
    run.start()
    try:
        assert run.wait(PATIENCE_S) == 0, run.log_tail()
    finally:
        run.stop()
    stats = stats_of(run)
    assert [entry["held_out/gsm_symbolic"] for entry in stats] == [0.0, 0.0]  # an untrained model
    assert all(entry["reward"] == 0.0 and entry["n_updates"] == 2 for entry in stats)
    exported = json.loads((run.final_weights().parent / "generation_config.json").read_text())
    assert exported["eos_token_id"] == [tokenizer.eos_token_id, 90]
