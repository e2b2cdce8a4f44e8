"""The GRPO example, killed with SIGKILL at random moments, ends with the bytes of a run that nobody touched.

``HOLDFAST_KILLS=50 HOLDFAST_SEED=7 pytest tests/integration/test_grpo_kills.py -s`` makes a longer run of it.
"""

import os
import random
import time
from pathlib import Path

import pytest

from examples.chaos import GrpoRun, sha256
from holdfast.utils.stats import read_stats

KILLS = int(os.environ.get("HOLDFAST_KILLS", "10"))
SEED = int(os.environ.get("HOLDFAST_SEED", "0"))
STEPS = 40
# An epoch has 15 steps, so the run reshuffles twice; a snapshot every 4 steps is hit by kills now and then.
SETTINGS = (f"total_steps={STEPS}", "n_prompts=60", "batch_size=4", "n_samples=4", "recover.freq_steps=4")
VICTIMS = (("driver", 0), ("trainer", 0), ("trainer", 1), ("rollout", 0))
LONGEST_WAIT_S = 10.0
PATIENCE_S = 150.0


def wait_for_a_moment(run: GrpoRun, dice: random.Random) -> None:
    """One time in four any moment, start-up included; else one in the middle of training, a few steps on."""
    if dice.random() < 0.25:
        time.sleep(dice.uniform(0.0, LONGEST_WAIT_S))
        return
    started, attempts, steps = run.last_step(), len(run.attempts()), dice.randrange(8)

    def reached() -> bool:
        restarted = len(run.attempts()) > attempts
        return run.exit_code() is not None or run.last_step() >= started + steps or (restarted and steps == 0)

    run.wait_until(reached, PATIENCE_S)
    time.sleep(dice.uniform(0.0, 0.5))


def deliver_kill(run: GrpoRun, dice: random.Random) -> str | None:
    """Kill a random process at a random moment, and say which; None when the run has ended before."""
    wait_for_a_moment(run, dice)
    who, rank = dice.choice(VICTIMS)
    step, code = run.last_step(), run.exit_code()
    if code is not None:
        assert code == 0, run.log_tail()
        return None
    if not run.kill(who, rank):  # no workers yet: the driver is all there is to kill
        who = "driver"
        run.kill(who)
    if who == "driver":
        run.start()
    return f"{who} {rank} after step {step}"


@pytest.mark.timeout(300 + 40 * KILLS)
def test_killed_at_random_moments_the_run_ends_with_the_same_bytes(tmp_path: Path) -> None:
    reference = GrpoRun(tmp_path / "reference", *SETTINGS, "recover.mode=off")
    reference.start()
    assert reference.wait(PATIENCE_S) == 0, reference.log_tail()
    expected = sha256(reference.final_weights())
    dice, kills, runs = random.Random(SEED), [], 0
    while len(kills) < KILLS:
        run = GrpoRun(tmp_path / f"killed_{runs}", *SETTINGS, "recover.retries=100")
        run.start()
        while len(kills) < KILLS and (kill := deliver_kill(run, dice)) is not None:
            kills.append(kill)
            print(f"kill {len(kills)}: {kill}", flush=True)
        assert run.wait(PATIENCE_S) == 0, run.log_tail()
        assert sha256(run.final_weights()) == expected, kills
        assert [entry["step"] for entry in read_stats(run.trial_root / "stats" / "stats.jsonl")] == list(range(STEPS))
        leftovers = [path for path in run.trial_root.glob("*/.*") if not path.name.startswith(".rejected-")]
        assert all(path.name.startswith((".staging-", ".retired-")) for path in leftovers), leftovers
        assert not list(run.trial_root.glob("recover/.rejected-*"))
        runs += 1
    print(f"{len(kills)} kills over {runs} runs, every export {expected}")
