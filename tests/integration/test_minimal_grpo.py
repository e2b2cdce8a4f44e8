"""The examples that users copy first: killed, started again, and short enough to be read."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.sft_runs import kill_tree
from tests.limits import stretched
from tests.minimal import (
    DISTILL,
    DISTILL_OPTIONS,
    EXAMPLE,
    ON_RAY,
    SFT_STEPS,
    TORCHRUN,
    accuracy,
    arguments_of,
    environment,
    trained_model,
)

pytestmark = pytest.mark.timeout(330)  # two lives

STEP = re.compile(r"^step (\d+): reward ([\d.]+)(?:, kl [-\d.]+)?$", re.MULTILINE)
SHORT = ("freq_steps=3", "n_samples=4")


def live(command: list[str], log: Path, kill_after: int | None = None) -> list[int]:
    """Run a job to its end, or kill all its processes when it has printed a step.

    Returns:
        the steps that it printed.
    """
    imaginary = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 4, "GPU": 1}'}
    variables = environment() | {"RAY_USAGE_STATS_ENABLED": "0"} | imaginary
    end = time.monotonic() + stretched(300)
    with log.open("w") as output:
        job = subprocess.Popen(
            command, env=variables, stdout=output, stderr=subprocess.STDOUT, text=True
        )
    try:
        while job.poll() is None and time.monotonic() < end:
            if kill_after in steps_in(log):
                return steps_in(log)
            time.sleep(0.05)
        assert job.returncode == 0, log.read_text()[-3000:]
        return steps_in(log)
    finally:
        if job.poll() is None:
            kill_tree(job)


def steps_in(log: Path) -> list[int]:
    return [int(step) for step, _ in STEP.findall(log.read_text())]


def check_kill_and_resume(command: list[str], folder: Path, steps: int) -> None:
    """Kill a job after its fifth step, run it to its end, and load the model that it trained."""
    first = live(command, folder / "first.txt", kill_after=4)
    second = live(command, folder / "second.txt")
    assert first[:5] == list(range(5))
    assert second[0] in range(3, first[-1] + 3, 3)  # a snapshot comes before its line is printed
    assert second == list(range(second[0], steps))
    assert f"resumed at step {second[0]} from" in (folder / "second.txt").read_text()
    check_model(folder, steps)


def check_model(folder: Path, steps: int) -> None:
    """Load the model that a job wrote at its end."""
    trained = folder / "runs" / f"model_{steps}"  # so that a longer run writes its own
    model = AutoModelForCausalLM.from_pretrained(trained)
    assert len(AutoTokenizer.from_pretrained(trained)) == model.vocab_size


def test_the_minimal_example_trains_and_exports_its_model(tmp_path: Path) -> None:
    command = [*TORCHRUN[:-1], "--nproc_per_node=1", str(EXAMPLE), *arguments_of(tmp_path), *SHORT]
    assert live([*command, "epochs=1"], tmp_path / "log.txt") == list(range(5))
    check_model(tmp_path, steps=5)


@pytest.mark.slow
def test_two_ranks_of_the_minimal_example_resume_after_a_kill(tmp_path: Path) -> None:
    command = [*TORCHRUN, str(EXAMPLE), *arguments_of(tmp_path), *SHORT, "epochs=4"]
    check_kill_and_resume(command, tmp_path, steps=20)


@pytest.mark.slow
def test_the_minimal_example_on_ray_resumes_after_its_driver_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, str(ON_RAY), *arguments_of(tmp_path), *SHORT, "epochs=4", "ranks=2"]
    check_kill_and_resume(command, tmp_path, steps=24)


def teach(folder: Path, *options: str, steps: int) -> tuple[float, float, float]:
    """Kill and resume a job with a teacher, and return the accuracy of student before, teacher and
    student.
    """
    teacher = trained_model(folder / "teacher", 3, 100)
    command = [*TORCHRUN[:-1], "--nproc_per_node=1", str(DISTILL), *arguments_of(folder, SFT_STEPS)]
    command += [f"teacher={teacher}", *DISTILL_OPTIONS, *options]
    check_kill_and_resume(command, folder, steps)
    student = folder / "runs" / f"model_{steps}"
    return accuracy(folder / "model"), accuracy(teacher), accuracy(student)


@pytest.mark.slow
def test_the_minimal_example_of_distillation_resumes_after_a_kill_with_its_teacher(
    tmp_path: Path,
) -> None:
    teach(tmp_path, "epochs=2", "batch_size=5", "n_samples=2", "freq_steps=3", steps=10)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_student_reaches_the_accuracy_of_its_teacher(tmp_path: Path) -> None:
    before, teacher, student = teach(tmp_path, "freq_steps=3", steps=80)
    assert before < 0.9 < teacher
    assert student > teacher - 0.05


def test_the_minimal_examples_are_short_and_import_nothing_from_other_examples() -> None:
    examples = (EXAMPLE, ON_RAY, DISTILL)
    lengths = {path.name: len(path.read_text().splitlines()) for path in examples}
    assert lengths["minimal_grpo.py"] < 150
    assert lengths["minimal_distill.py"] <= lengths["minimal_grpo.py"] + 40
    assert lengths["minimal_grpo_ray.py"] <= lengths["minimal_grpo.py"] + 60
    for path in examples:
        imported = re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
        assert not set(imported) & {other.stem for other in EXAMPLE.parent.glob("*.py")}
        assert "examples" not in imported
