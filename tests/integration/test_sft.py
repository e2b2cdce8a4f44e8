"""`examples/sft.py` under real torchrun: it learns, and SIGKILL at any moment does not change the
final bytes.
"""

import random
import runpy
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.chaos import untimed
from examples.copy_task import EOS_ID, CopyPrompts, encode, reward, write_model_folder
from holdfast.recover import RecoverConfig
from holdfast.utils.config import load_config
from holdfast.utils.errors import ConfigError
from holdfast.utils.folder_lock import FolderLock
from holdfast.utils.metrics import read_stats
from tests.integration.sft_runs import SCRIPT, finish, kill_after, start, tree_bytes
from tests.limits import stretched
from tests.recover.cli.commands import answer

STEPS = 60
OVERRIDES = ("trainer.total_epochs=6", "trainer.save_freq=7")
EXPORT = f"hf/global_step_{STEPS - 1}"


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_run_killed_at_two_random_moments_ends_with_the_same_bytes(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    reference = start(whole, 2, *OVERRIDES, "trainer.trackers=[tensorboard]")
    moments = [
        (random.randrange(0, 25), random.random() * 0.1),
        (random.randrange(27, 52), random.random() * 0.1),
    ]
    print(f"killing at (step, seconds after it) {moments}")
    for launcher_only, (step, delay_s) in zip((False, True), moments, strict=True):
        kill_after(
            start(killed, 2, *OVERRIDES), killed / "stats.jsonl", step, delay_s, launcher_only
        )
        assert not (killed / EXPORT).exists()
    resumed = finish(start(killed, 2, *OVERRIDES))
    finish(reference)

    assert f"step   0/{STEPS}" not in resumed, resumed
    assert tree_bytes(killed / EXPORT) == tree_bytes(whole / EXPORT)
    stats = untimed(read_stats(whole / "stats.jsonl"))
    assert untimed(read_stats(killed / "stats.jsonl")) == stats
    assert [entry["step"] for entry in stats] == list(range(STEPS))
    assert stats[-1]["loss"] < 0.2 * stats[0]["loss"]
    assert answer("top", killed)["spent_s"]["training"] > 0
    assert list((whole / "tensorboard").glob("events.*"))
    for run in (whole, killed):
        kept = sorted(path.name for path in (run / "recover").iterdir())
        assert kept == [
            "global_step_55",
            "global_step_59",
            "latest_checkpointed_iteration.txt",
            "run_id.txt",
        ]
    assert answers(killed / EXPORT, range(0, 1000, 7)) > 0.95
    on_one_rank = finish(start(killed, 1, *OVERRIDES))  # the same command has nothing left to do
    assert "this run has finished" in on_one_rank


def answers(export: Path, numbers: range) -> float:
    """Share of numbers that the exported model copies correctly with greedy decoding."""
    tokenizer = AutoTokenizer.from_pretrained(export)
    model: Any = AutoModelForCausalLM.from_pretrained(export)
    texts = [f"{number:03d}" for number in numbers]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
        for text in texts
    ]
    generated = model.generate(**tokenizer(prompts, return_tensors="pt"), max_new_tokens=5)
    completions = [tokenizer.decode(row[4:], skip_special_tokens=True) for row in generated]
    return sum(map(str.__eq__, completions, texts)) / len(texts)


@pytest.mark.slow
def test_a_chosen_step_of_the_job_is_traced(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    chosen = ("engine.profile.steps=[3]", f"engine.profile.path={traces}")
    finish(start(tmp_path / "run", 1, "trainer.total_epochs=1", *chosen))
    assert [path.name for path in traces.iterdir()] == ["step_3_rank_0.json"]


def test_the_task_rewards_exact_copies_and_its_tokenizer_and_folder_repeat(tmp_path: Path) -> None:
    digits = encode("407")
    for completion, expected in (
        ([*digits, EOS_ID], 1.0),
        ([*digits, digits[0]], 0.8),
        ([*digits, digits[0], EOS_ID], 0.8),
        ([*encode("417"), EOS_ID], 0.8 * 2 / 3 + 0.2),
        ([digits[0], EOS_ID], 0.8 / 3),
        ([EOS_ID], 0.0),
        ([], 0.0),
    ):
        assert reward(completion, "407") == pytest.approx(expected), completion
    for layers, name in (
        (2, "a"),
        (2, "b"),
        (5, "a"),
    ):  # the third finds a folder there and leaves it
        write_model_folder(tmp_path / name, layers)
    assert tree_bytes(tmp_path / "a") == tree_bytes(tmp_path / "b")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert tokenizer("407=").input_ids == encode("407=") == [8, 4, 11, 14]
    assert tokenizer.decode([*digits, EOS_ID], skip_special_tokens=True) == "407"
    prompts = CopyPrompts(50, seed=3)
    assert [prompts[i] for i in range(50)] == [CopyPrompts(50, seed=3)[i] for i in range(50)]
    assert all(
        tokenizer.decode(p["prompt_ids"]) == p["answer"] + "="
        for p in (prompts[i] for i in range(50))
    )
    assert prompts.fingerprint != CopyPrompts(50, seed=4).fingerprint


def test_resume_mode_disable_refuses_a_folder_with_snapshots_rather_than_starting_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    trainer_config = runpy.run_path(str(SCRIPT))["TrainerConfig"]
    config = trainer_config(default_local_dir=str(tmp_path), resume_mode="disable", save_freq=-1)
    recover = config.recover_config(RecoverConfig())
    assert (recover.recover_root, recover.freq_steps) == (tmp_path / "recover", None)
    (tmp_path / "recover" / "global_step_6").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"'disable', but .* holds snapshots"):
        config.recover_config(RecoverConfig())
    with pytest.raises(ConfigError, match=r"trainer\.resume_from_path"):
        trainer_config(resume_mode="resume_path")


def test_options_of_recovery_are_passed_on_unless_the_trainer_decides_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    job = runpy.run_path(str(SCRIPT))
    given = ["must_save_by=3h", "lock_timeout_s=90", "mirror_url=file:///copies"]
    overrides = [f"recover.{option}" for option in given]
    config = load_config(job["SFTConfig"], None, [*overrides, "trainer.save_freq=7"])
    recover = config.trainer.recover_config(config.recover)
    assert (recover.must_save_by, recover.lock_timeout_s) == ("3h", 90.0)
    assert (recover.mirror_url, recover.freq_steps) == ("file:///copies", 7)
    for option in ("freq_steps=3", "fileroot=elsewhere", "mode=off"):
        key, _, _ = option.partition("=")
        with pytest.raises(ConfigError, match=rf"'recover\.{key}' .*'trainer' decides"):
            load_config(job["SFTConfig"], None, [f"recover.{option}"])


@pytest.mark.slow
def test_a_job_that_finds_its_folder_in_use_ends_with_75_and_says_so(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "runs" / "recover.lock")
    lock.acquire(0)
    job = start(tmp_path / "runs", 1, "recover.lock_timeout_s=0.2")
    try:
        output, _ = job.communicate(timeout=stretched(80))
    finally:
        job.kill()
        lock.release()
    assert job.returncode == 75, output
    assert "is in use by pid" in output and "ends with code 75" in output
    assert "Traceback" not in output
