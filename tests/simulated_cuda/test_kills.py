"""A job of two ranks on simulated devices, killed at random moments, ends with the bytes of an
undisturbed run.

    python -m tests.simulated_cuda --tier slow tests/simulated_cuda/test_kills.py

``HOLDFAST_KILLS=20 HOLDFAST_SEED=7`` sets the number of kills and the moments.
"""

import os
import random
from pathlib import Path

import pytest

from examples.chaos import sha256
from tests.integration.sft_runs import finish, kill_after, start

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.slow, pytest.mark.timeout(1200)]

KILLS = int(os.environ.get("HOLDFAST_KILLS", "5"))
SEED = int(os.environ.get("HOLDFAST_SEED", "0"))
STEPS = 120
SETTINGS = (
    "engine.device=cuda",
    "trainer.total_epochs=12",
    "trainer.save_freq=3",
    "engine.attn_impl=eager",
)
PATIENCE_S = 300.0


def _digest(run: Path) -> str:
    return sha256(run / "hf" / f"global_step_{STEPS - 1}" / "model.safetensors")


def test_random_kills_leave_no_trace(tmp_path: Path) -> None:
    finish(start(tmp_path / "untouched", 2, *SETTINGS), PATIENCE_S)
    moments, run = random.Random(SEED), tmp_path / "killed"
    for step in sorted(moments.sample(range(STEPS - 20), KILLS)):
        kill_after(start(run, 2, *SETTINGS), run / "stats.jsonl", step, moments.uniform(0, 0.3))
        assert not (run / "hf").exists(), "the job ended before it was killed"
    finish(start(run, 2, *SETTINGS), PATIENCE_S)
    assert _digest(run) == _digest(tmp_path / "untouched")
