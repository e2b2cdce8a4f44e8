"""`examples/vision.py`: items with images by number, answers that are sampled and rewarded, and a
killed run.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from examples.chaos import GrpoRun, sha256
from tests.integration.killed_jobs import finish, finish_killed, stats_of

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def vision() -> Iterator[Any]:
    """Import the example as in one of its processes."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield import_module("vision")
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def folder(vision: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model, with random weights."""
    folder = vision.make_model(
        vision.VisionConfig(model_width=32), tmp_path_factory.mktemp("vision") / "model"
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    return folder


def test_a_number_is_always_the_same_item_and_no_image_is_both_held_out_and_trained_on(
    vision: Any, folder: Path
) -> None:
    task, again = (vision.VisionTask(1, 3, AutoTokenizer.from_pretrained(folder)) for _ in range(2))
    items = {
        held_out: [task.item(number, held_out) for number in range(40)]
        for held_out in (False, True)
    }
    for held_out, found in items.items():
        for number, item in enumerate(found):
            same = again.item(number, held_out)
            assert torch.equal(item["images"]["pixel_values"], same["images"]["pixel_values"])
            assert {**item, "images": None} == {**same, "images": None}
            assert item["prompt_ids"].count(vision.VOCABULARY.index("<|image_pad|>")) == 9
            assert item["images"]["image_grid_thw"].tolist() == [[1, 6, 6]]
    pixels = [
        {item["images"]["pixel_values"].numpy().tobytes() for item in found}
        for found in items.values()
    ]
    assert not pixels[0] & pixels[1]
    assert {item["data"]["answer"] for item in items[False]} == set("01234")


def test_the_right_number_alone_is_rewarded(vision: Any, folder: Path) -> None:
    task = vision.VisionTask(1, 3, AutoTokenizer.from_pretrained(folder))
    items = [task.item(number) for number in range(4)]
    right = [item["answer_ids"] for item in items]
    assert task.rewards(items, right) == [1.0] * 4
    wrong = [
        right[0][:-1],
        [*right[1][:-1], *right[1]],
        right[2][-1:],
        [vision.VOCABULARY.index("9"), right[3][-1]],
    ]
    assert task.rewards(items, wrong) == [0.0] * 4


def test_the_logprobs_of_sampled_answers_are_those_of_the_model_and_image_tokens_are_never_sampled(
    vision: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rollout.configure_logging", lambda level: None
    )  # it is meant for a separate process
    worker = import_module("tasks").TaskWorker(
        lambda tokenizer: vision.VisionTask(1, 3, tokenizer), str(folder)
    )
    worker.update_weights_from_disk(str(folder), 0)
    batch, _ = worker.sample([3, 4], n_samples=50, temperature=1.0, seed=0)
    sampled = batch["loss_mask"].bool()
    image, video = (vision.VOCABULARY.index(token) for token in ("<|image_pad|>", "<|video_pad|>"))
    assert not torch.isin(batch["input_ids"][sampled], torch.tensor([image, video])).any()
    for row in (0, 60):
        length = int(batch["attention_mask"][row].sum())
        ids = batch["input_ids"][row : row + 1, :length]
        logits = worker.model(
            input_ids=ids,
            **batch["multi_modal_input"][row],
            mm_token_type_ids=(ids == image).long(),
        )
        logits.logits[..., [image, video]] = -torch.inf
        expected = logits.logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        mask = sampled[row, :length]
        torch.testing.assert_close(
            batch["logprobs"][row, :length][mask], expected[mask[1:]], atol=1e-5, rtol=0
        )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_in_both_of_its_phases_ends_as_one_that_was_not(tmp_path: Path) -> None:
    sizes = (
        "batch_size=4",
        "sft_batch_size=8",
        "n_samples=4",
        "n_held_out=8",
        "eval_steps=3",
        "model_width=32",
    )
    settings = ("trackers=[]", *sizes, "total_steps=12", "sft_steps=6", "recover.freq_steps=2")
    reference, run = (
        GrpoRun(tmp_path / name, *settings, script=EXAMPLES / "vision.py", experiment="vision")
        for name in ("reference", "run")
    )
    finish(reference)
    finish_killed(run, trainer_after=2, driver_after=8)
    assert sha256(run.final_weights()) == sha256(reference.final_weights())
    stats = stats_of(run)
    assert stats == stats_of(reference) and [entry["step"] for entry in stats] == list(range(12))
    assert [entry["step"] for entry in stats if "held_out" in entry and "answer/5" in entry] == [
        2,
        5,
        8,
        11,
    ]
    assert ["reward" in entry for entry in stats] == [False] * 6 + [True] * 6
    assert (run.trial_root / "held_out.png").stat().st_size > 10_000
    assert (run.final_weights().parent / "preprocessor_config.json").exists()
