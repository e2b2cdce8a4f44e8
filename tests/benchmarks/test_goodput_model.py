"""The computed goodput of larger jobs: its formula against a simulation, and its tables."""

import random
from pathlib import Path

import pytest

from benchmarks import goodput_model
from benchmarks.goodput_model import INPUTS, JOBS, WAYS, Costs, best, goodput_at, lines

ROOT = Path(__file__).parents[2]
VALUES = {name: given.value for name, given in INPUTS.items()}


def _simulated(interval_s: float, costs: Costs, mean_s: float, n_intervals: int) -> float:
    """Share of time on steps that count. Every part is done again from its start if it fails."""
    dice = random.Random(1)
    now_s = 0.0
    fails_at_s = dice.expovariate(1 / mean_s)
    for _ in range(n_intervals):
        needed_s = interval_s + costs.stall_s
        while fails_at_s < now_s + needed_s:
            now_s = fails_at_s
            fails_at_s = now_s + dice.expovariate(1 / mean_s)
            needed_s = costs.trainer_s + costs.commit_s + interval_s + costs.stall_s
        now_s += needed_s
    return n_intervals * interval_s / now_s


@pytest.mark.parametrize("mean_s", [300.0, 3000.0])
def test_the_formula_is_what_a_simulation_of_failures_gives(mean_s: float) -> None:
    costs = Costs(stall_s=5.0, commit_s=20.0, trainer_s=60.0, server_s=0.0)
    simulated = _simulated(120.0, costs, mean_s, 40_000)
    assert goodput_at(120.0, costs, mean_s) == pytest.approx(simulated, rel=0.01)


def test_the_best_interval_is_near_youngs_when_failures_are_rare() -> None:
    result = best(JOBS[0], WAYS[0], 30 * 86400, VALUES)
    assert result.n_steps == pytest.approx(result.young, rel=0.02)


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_what_is_added_to_a_way_never_costs_goodput(job: goodput_model.Job) -> None:
    found = {way.name: best(job, way, 3600.0, VALUES).goodput for way in WAYS}
    assert found["whole job again, blocking"] < found["Holdfast, blocking"] < found["Holdfast"]
    assert found["Holdfast"] < found["Holdfast + standby workers"] < found["Holdfast + both"]
    assert found["Holdfast"] < found["Holdfast + memory tier"] < found["Holdfast + both"]


def test_an_input_is_given_by_name_and_the_table_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert goodput_model.main(["step=30"]) == 0
    assert "| step | 30 s | given | a step of GRPO |" in capsys.readouterr().out
    for argument, expected in (
        ("steps=30", "there is no input 'steps'"),
        ("step=fast", "step is 'fast'; expected a number"),
        ("step=0", "step is '0'; expected a number above 0"),
        ("step=inf", "step is 'inf'; expected a number above 0 that is finite"),
        ("bytes=1e9", "is committed after"),
        ("start=1e9", "the inputs are too extreme for the formula"),
    ):
        with pytest.raises(SystemExit):
            goodput_model.main([argument])
        assert expected in capsys.readouterr().err


def test_the_page_has_the_tables_that_the_model_prints() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert "\n".join(lines(VALUES)) in page
