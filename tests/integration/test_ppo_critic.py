"""`examples/ppo_critic.py`: actor and critic recover together from a SIGKILL, and end as if there
had been none.
"""

from pathlib import Path

import pytest

from examples.chaos import GrpoRun, sha256
from tests.integration.killed_jobs import finish, finish_killed, last_generation, stats_of
from tests.recover.cli.commands import answer

STEPS = 8
SETTINGS = (
    f"total_steps={STEPS}",
    "n_prompts=64",
    "batch_size=8",
    "trackers=[]",
    "recover.freq_steps=2",
)
SCRIPT = Path(__file__).parents[2] / "examples" / "ppo_critic.py"


def job(folder: Path) -> GrpoRun:
    return GrpoRun(folder, *SETTINGS, script=SCRIPT, experiment="ppo_critic")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_actor_and_critic_end_with_the_same_bytes_after_a_trainer_and_the_driver_were_killed(
    tmp_path: Path,
) -> None:
    reference, run = job(tmp_path / "reference"), job(tmp_path / "run")
    finish(reference)
    finish_killed(run, trainer_after=2, driver_after=5)
    assert run.attempts()[1]["step"] > 0
    assert sha256(run.final_weights()) == sha256(reference.final_weights())
    files = last_generation(reference, STEPS - 1)
    assert {name.split("/")[0] for name in files} == {"actor", "critic", "data.pt", "state"}
    assert last_generation(run, STEPS - 1) == files
    stats = stats_of(run)
    assert stats == stats_of(reference)
    assert [entry["step"] for entry in stats] == list(range(STEPS))
    spent = answer("top", run.trial_root)["spent_s"]
    assert spent.keys() == {"publishing", "sampling", "training"} and all(
        seconds > 0 for seconds in spent.values()
    )
    assert stats[-1]["critic/value_error"] < stats[0]["critic/value_error"]
