"""The examples train on the GPU, to the end."""

import statistics
import time
from pathlib import Path

import pytest

from examples.chaos import GrpoRun
from holdfast.utils.metrics import read_stats
from tests.gpu.conftest import Machine
from tests.gpu.figures import Figures
from tests.integration.sft_runs import finish, start

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

STEPS = 20
PATIENCE_S = 500.0


def test_supervised_fine_tuning_learns_on_the_device(
    machine: Machine, figures: Figures, tmp_path: Path
) -> None:
    started = time.monotonic()
    settings = (f"engine.device={machine.device}", "trainer.total_epochs=2", "trainer.save_freq=7")
    output = finish(start(tmp_path, machine.ranks, *settings), PATIENCE_S)
    took_s = time.monotonic() - started
    figures.add(f"examples/sft.py, {STEPS} steps, with start and export", took_s, "s", machine.on)
    assert f"computing on {machine.device}" in output, output
    losses = [entry["loss"] for entry in read_stats(tmp_path / "stats.jsonl")]
    assert len(losses) == STEPS
    assert losses[-1] < 0.8 * losses[0]
    assert (tmp_path / "hf" / f"global_step_{STEPS - 1}" / "model.safetensors").exists()


def grpo_settings(machine: Machine) -> list[str]:
    """Trainer and rollout worker share a single GPU. With two, each has one. With three, there are
    two trainers.
    """
    trainers = 2 if machine.devices >= 3 else 1
    gpus = 0.0 if machine.device == "cpu" else 0.5 if machine.devices == 1 else 1.0
    keys = {
        "n_trainers": trainers,
        "gpus_per_trainer": gpus,
        "gpus_per_rollout": gpus,
        "actor.device": machine.device,
    }
    return [f"{key}={value}" for key, value in keys.items()]


def test_grpo_trains_and_samples_on_the_device(
    machine: Machine, figures: Figures, tmp_path: Path
) -> None:
    settings = (f"total_steps={STEPS}", "log_level=INFO", "trackers=[]", "recover.freq_steps=7")
    run = GrpoRun(tmp_path / "run", *settings, *grpo_settings(machine))
    run.start()
    try:
        assert run.wait(PATIENCE_S) == 0, run.log_tail()
    finally:
        run.stop()
    output = (run.fileroot / "output.log").read_text(errors="replace")
    assert f"computing on {machine.device}" in output, "no trainer told its device"
    stats = read_stats(run.trial_root / "stats" / "stats.jsonl")
    assert [entry["step"] for entry in stats] == list(range(STEPS))
    assert all(entry["update_skipped"] == 0 for entry in stats)
    assert run.final_weights().exists()
    seconds = statistics.median(entry["seconds"] for entry in stats[5:])
    figures.add(
        "examples/grpo.py, a step (publish, sample, train)",
        seconds,
        "s",
        ", ".join(grpo_settings(machine)[:3]),
    )
