"""`examples/ppo_critic.py`: actor and critic come back together from a SIGKILL, and end as if there had been none."""

import json
from pathlib import Path

import pytest

from examples.chaos import TIMES, GrpoRun, sha256
from holdfast.utils.metrics import read_stats
from tests.limits import stretched

STEPS = 8
SETTINGS = (f"total_steps={STEPS}", "n_prompts=64", "batch_size=8", "trackers=[]", "recover.freq_steps=2")
PATIENCE_S = stretched(240.0)
SCRIPT = Path(__file__).parents[2] / "examples" / "ppo_critic.py"


def job(folder: Path) -> GrpoRun:
    return GrpoRun(folder, *SETTINGS, script=SCRIPT, experiment="ppo_critic")


def last_generation(run: GrpoRun) -> dict[str, str]:
    """File -> digest, of what the last generation has of the engines, of the ranks and of the data cursor. Not of the
    driver, whose generators nobody seeds and nothing draws from."""
    manifest = json.loads((run.trial_root / "recover" / f"global_step_{STEPS - 1}" / "manifest.json").read_text())
    left_out = ("recover_info.json", "state/driver.pt")
    return {name: entry["digest"] for name, entry in manifest["files"].items() if name not in left_out}


def untimed(run: GrpoRun) -> list[dict[str, float]]:
    """The statistics, without those of the clock."""
    stats = read_stats(run.trial_root / "stats" / "stats.jsonl")
    return [{key: entry[key] for key in entry if key not in TIMES} for entry in stats]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_actor_and_critic_end_with_the_same_bytes_after_a_trainer_and_the_driver_were_killed(tmp_path: Path) -> None:
    reference, run = job(tmp_path / "reference"), job(tmp_path / "run")
    try:
        reference.start()
        assert reference.wait(PATIENCE_S) == 0, reference.log_tail()
        run.start()
        run.wait_until(lambda: run.last_step() >= 2 or run.exit_code() is not None, PATIENCE_S)
        assert run.kill("trainer", 1), run.log_tail()
        run.wait_until(lambda: len(run.attempts()) == 2 or run.exit_code() is not None, PATIENCE_S)
        run.wait_until(lambda: run.last_step() >= 5 or run.exit_code() is not None, PATIENCE_S)
        assert run.exit_code() is None, run.log_tail()
        run.kill("driver")
        run.start()
        assert run.wait(PATIENCE_S) == 0, run.log_tail()
    finally:
        reference.stop()
        run.stop()
    assert len(run.attempts()) == 3 and run.attempts()[1]["step"] > 0
    assert sha256(run.final_weights()) == sha256(reference.final_weights())
    files = last_generation(reference)
    assert {name.split("/")[0] for name in files} == {"actor", "critic", "data.pt", "state"}
    assert last_generation(run) == files
    stats = untimed(run)
    assert stats == untimed(reference)
    assert [entry["step"] for entry in stats] == list(range(STEPS))
    assert stats[-1]["critic/value_error"] < stats[0]["critic/value_error"]
