"""A job of two ranks on simulated devices, killed at random moments, ends with the bytes of an undisturbed run.

``HOLDFAST_KILLS=20 HOLDFAST_SEED=7`` sets the number of kills and the moments.
"""

import os
import random
import time
from pathlib import Path

import pytest

from examples.chaos import sha256
from tests.integration.sft_runs import finish, kill_tree, start

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.slow, pytest.mark.timeout(1200)]

KILLS = int(os.environ.get("HOLDFAST_KILLS", "5"))
SEED = int(os.environ.get("HOLDFAST_SEED", "0"))
STEPS = 60
SETTINGS = ("engine.device=cuda", "trainer.total_epochs=6", "trainer.save_freq=3", "engine.attn_impl=eager")
PATIENCE_S = 300.0


def _digest(run: Path) -> str:
    return sha256(run / "hf" / f"global_step_{STEPS - 1}" / "model.safetensors")


def test_random_kills_leave_no_trace(tmp_path: Path) -> None:
    started = time.monotonic()
    finish(start(tmp_path / "untouched", 2, *SETTINGS), PATIENCE_S)
    whole_s = time.monotonic() - started
    moments, run, resumed = random.Random(SEED), tmp_path / "killed", 0
    for _ in range(KILLS):
        job = start(run, 2, *SETTINGS)
        time.sleep(moments.uniform(0.3, 1.0) * whole_s)
        if job.poll() is not None:
            break  # it was faster than the first
        kill_tree(job)
        resumed += 1
    finish(start(run, 2, *SETTINGS), PATIENCE_S)
    assert resumed, "no kill met the job"
    assert _digest(run) == _digest(tmp_path / "untouched")
