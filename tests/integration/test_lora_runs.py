"""A job with adapters that is killed and resumed ends with the same bits."""

import json
from pathlib import Path

import pytest

from examples.chaos import GrpoRun, untimed
from examples.copy_task import write_model_folder
from holdfast.utils.metrics import read_stats
from tests.integration.sft_runs import finish, kill_after, start, tree_bytes
from tests.limits import stretched

REASONING = Path(__file__).parents[2] / "examples" / "reasoning.py"
STEPS = 30
SFT = ("trainer.total_epochs=3", "trainer.save_freq=4")
ADAPTERS = (
    "engine.use_lora=true",
    "engine.lora_rank=8",
    "engine.lora_alpha=16",
    "engine.init_from_scratch=true",
)


def digests(run: Path) -> dict[str, str]:
    """File -> digest of the last generation, without files that contain times."""
    manifest = json.loads(
        (run / "recover" / f"global_step_{STEPS - 1}" / "manifest.json").read_text()
    )
    return {
        name: entry["digest"]
        for name, entry in manifest["files"].items()
        if name != "recover_info.json"
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_lora_job_killed_twice_ends_with_the_same_adapters_moments_and_merged_export(
    tmp_path: Path,
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = (
        *SFT,
        *ADAPTERS,
        f"engine.path={write_model_folder(tmp_path / 'model')}",
    )  # a generation names its base
    finish(start(whole, 2, *settings))
    for step in (6, 17):
        kill_after(start(killed, 2, *settings), killed / "stats.jsonl", step, 0.02)
    resumed = finish(start(killed, 2, *settings))
    assert f"step   0/{STEPS}" not in resumed, resumed
    assert digests(killed) == digests(whole)
    export = f"hf/global_step_{STEPS - 1}"
    assert tree_bytes(killed / export) == tree_bytes(whole / export)
    stats = untimed(read_stats(whole / "stats.jsonl"))
    assert (
        untimed(read_stats(killed / "stats.jsonl")) == stats
        and stats[-1]["loss"] < 0.95 * stats[0]["loss"]
    )


def held_out(folder: Path, *overrides: str) -> tuple[float, Path]:
    """Share of right answers to held-out questions at the end of a run of the reasoning-gym
    example, and its export.
    """
    run = GrpoRun(
        folder,
        "trackers=[]",
        "eval_steps=1000",
        *overrides,
        script=REASONING,
        experiment="reasoning",
    )
    try:
        run.start()
        assert run.wait(stretched(400.0)) == 0, run.log_tail()
    finally:
        run.stop()
    *_, last = read_stats(run.trial_root / "stats" / "stats.jsonl")
    return last["held_out"], run.final_weights().parent


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_grpo_with_adapters_reaches_what_grpo_of_all_weights_reaches(tmp_path: Path) -> None:
    before, base = held_out(tmp_path / "base", "total_steps=600", "sft_steps=600")
    grpo = (
        "sft_steps=0",
        "total_steps=40",
        f"actor.path={base}",
        "actor.optimizer.lr_scheduler_type=constant",
    )
    every, _ = held_out(tmp_path / "all", *grpo, "actor.optimizer.lr=3e-4")
    lora = (
        "actor.use_lora=true",
        "actor.lora_rank=32",
        "actor.lora_alpha=32",
        "actor.optimizer.lr=1e-3",
    )
    adapters, _ = held_out(tmp_path / "adapters", *grpo, *lora)
    print(
        f"right on held-out questions: {before:.1%} before, {every:.1%} by all weights, "
        f"{adapters:.1%} by adapters"
    )
    assert before < 0.6 and every > 0.8 and adapters > every - 0.05
