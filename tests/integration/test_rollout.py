"""The rollout worker's data about its samples agrees with the trainer."""

import resource
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from examples.copy_task import MAX_NEW_TOKENS, CopyPrompts, make_tokenizer
from examples.rollout import RolloutWorker
from holdfast.engine import FinetuneSpec, FSDPEngine, TrainEngineConfig
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.helpers import run_ranks

TEMPERATURE = 0.7


def _sample_and_compare(rank: int, world_size: int, folder: str) -> None:
    rollout = RolloutWorker(folder)
    assert rollout.update_weights_from_disk(folder, 3) == 3
    prompts = [CopyPrompts(8, seed=0)[i]["prompt_ids"] for i in range(8)]
    batch = rollout.generate(prompts, 4, MAX_NEW_TOKENS, TEMPERATURE, seed=1)
    again = rollout.generate(prompts, 4, MAX_NEW_TOKENS, TEMPERATURE, seed=1)
    other = rollout.generate(prompts, 4, MAX_NEW_TOKENS, TEMPERATURE, seed=2)
    assert all(torch.equal(batch[key], again[key]) for key in batch)
    assert not torch.equal(batch["input_ids"][:, :9], other["input_ids"][:, :9])
    engine = FSDPEngine(
        TrainEngineConfig(path=folder, dtype="float32", temperature=TEMPERATURE, optimizer=None)
    )
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(1, 8, 1))
    sampled = batch["loss_mask"].bool()
    assert torch.allclose(
        engine.forward_batch(batch)[sampled], batch["logprobs"][sampled], atol=1e-5
    )
    assert set(batch["versions"][sampled].tolist()) == {3}
    assert (batch["versions"][~sampled] == -1).all()
    lengths = sampled.sum(1)
    assert (
        1 <= int(lengths.min()) < int(lengths.max()) == MAX_NEW_TOKENS
    )  # some ended early with their end token
    last = batch["attention_mask"].sum(1) - 1
    ends = batch["input_ids"].gather(1, last[:, None])[:, 0] == rollout.tokenizer.eos_token_id
    assert (ends | (lengths == MAX_NEW_TOKENS)).all()


def test_sampled_log_probabilities_are_the_trainers_whatever_the_folder_says_of_sampling(
    tmp_path: Path,
) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    make_tokenizer().save_pretrained(tmp_path / "model")
    GenerationConfig(do_sample=True, top_p=0.5, top_k=3, repetition_penalty=1.5).save_pretrained(
        tmp_path / "model"
    )
    run_ranks(_sample_and_compare, 1, str(tmp_path / "model"))


def _memory_of_samples(rank: int, world_size: int, folder: str, n_words: int) -> float:
    """Peak memory of sampling, divided by the bytes of all scores."""

    def peak_bytes() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    rollout = RolloutWorker(folder)
    rollout.update_weights_from_disk(folder, 0)
    before = peak_bytes()
    rollout.generate([[4, 5, 6]], n_samples=64, max_new_tokens=40, temperature=1.0, seed=1)
    return (peak_bytes() - before) / (64 * 40 * n_words * 4)


@pytest.mark.slow
def test_log_probabilities_of_samples_take_little_memory_beside_the_scores(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3(vocab_size=20_000))
    make_tokenizer().save_pretrained(tmp_path / "model")
    (copies,) = run_ranks(_memory_of_samples, 1, str(tmp_path / "model"), 20_000)
    assert copies < 3
