"""The GPU tests on a machine without GPU: they are skipped with a reason, or run on the CPU and
keep their figures.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.figures import BEGIN, END, JSON, NOTES, PAGE
from tests.limits import stretched

ROOT = Path(__file__).parents[2]
FORMATS = "tests/gpu/test_checkpoints.py::test_every_format_brings_back_what_it_was_given"


def run_list(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=stretched(120),
    )


@pytest.mark.slow
def test_without_a_gpu_every_test_listed_is_skipped_and_says_why() -> None:
    done = run_list(
        "-m", "gpu", "tests/gpu", CUDA_VISIBLE_DEVICES="", HOLDFAST_GPU_TESTS_DEVICE="cuda"
    )
    assert done.returncode == 0, done.stdout
    assert " passed" not in done.stdout
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert skipped and all("needs CUDA: torch" in line for line in skipped), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_on_the_cpu_the_list_runs_and_its_figures_are_kept(tmp_path: Path) -> None:
    done = run_list(FORMATS, HOLDFAST_GPU_TESTS_DEVICE="cpu", HOLDFAST_GPU_TESTS_OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout
    document = json.loads((tmp_path / JSON).read_text())
    assert document["tests"] == {"passed": 1, "failed": 0, "error": 0, "skipped": 0}
    assert {figure["unit"] for figure in document["figures"]} == {"GB/s"}
    assert len(document["figures"]) == 6 and all(
        figure["value"] > 0 for figure in document["figures"]
    )
    assert len((tmp_path / NOTES).read_text().splitlines()) == 6, "noted one by one, too"
    page = (tmp_path / PAGE).read_text()
    assert page.startswith(BEGIN) and page.endswith(f"{END}\n")
    for figure in document["figures"]:
        assert f"| {figure['name']} | " in page and figure["name"].split(":")[0] in done.stdout
    assert "belong nowhere" in done.stdout


def test_the_page_has_room_for_the_figures() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    assert page.index(BEGIN) < page.index(END)


@pytest.mark.slow
def test_an_unknown_device_is_refused() -> None:
    done = run_list("tests/gpu", HOLDFAST_GPU_TESTS_DEVICE="tpu")
    assert done.returncode != 0
    assert (
        "HOLDFAST_GPU_TESTS_DEVICE is 'tpu'; expected 'cuda' or 'cpu'" in done.stdout + done.stderr
    )
