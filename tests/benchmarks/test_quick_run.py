"""A quick run of all benchmarks of the project: they work, write all promised files and no
others.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.harness import OURS, Figure, Options, read_figures
from benchmarks.plot import CHARTS
from benchmarks.ranks import Session, on_ranks
from benchmarks.run import BENCHMARKS
from tests.limits import stretched
from tests.once import make_once

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
ROOT = Path(__file__).parents[2]

WAYS = {
    "save_stall.blocking": [
        "AReaL dcp.save",
        "torch async_save",
        "torch async_save, kept stager",
        "verl torch.save",
    ],
    "save_stall.step": [
        "AReaL dcp.save",
        "torch async_save",
        "torch async_save, kept stager",
        "verl torch.save",
    ],
    "save.throughput": [
        "AReaL dcp.save",
        "torch async_save",
        "verl torch.save",
        "Holdfast engine.save",
    ],
    "load.throughput": ["AReaL dcp.load", "verl torch.load"],
    "hf_save.throughput": ["AReaL gather+save_pretrained", "torch HF writer+consolidation"],
    "hf_load.throughput": ["AReaL rank 0+broadcast", "torch HF reader"],
    "hf_save.bfloat16": ["AReaL gather+save_pretrained"],
    "hf_load.bfloat16": ["AReaL rank 0+broadcast", "torch's cast alone, from memory"],
    "publish.time": ["AReaL save_pretrained, disk"],
    "memory.dcp_save": [
        "AReaL dcp.save",
        "torch async_save",
        "torch async_save, kept stager",
        "verl torch.save",
    ],
    "memory.dcp_load": ["AReaL dcp.load", "verl torch.load"],
    "memory.hf_save": ["AReaL gather+save_pretrained", "torch HF writer+consolidation"],
    "memory.hf_load": ["AReaL rank 0+broadcast", "torch HF reader"],
    "bytes.dcp": ["AReaL dcp.save", "verl torch.save"],
    "bytes.hf": ["AReaL gather+save_pretrained", "torch HF writer+consolidation"],
    "recover.first_step": [],
    "train.tokens": [],
    "train.equal_rows": ["Holdfast packed, attn_impl sdpa"],
    "train.growth": [],
    "train.shared_prompts": [],
    "train.shared_prompts_bytes": [],
    "train.speed.n_mbs_1": [],
    "train.collectives.n_mbs_8": [],
    "train.bytes.n_mbs_8": [],
    "growth.save.size.1M": ["AReaL dcp.save"],
    "growth.save.ranks.1": ["AReaL dcp.save"],
    "growth.plan.4_ranks": [],
    "growth.choice.4_ranks": [],
    "growth.restore.4_ranks": [],
    "growth.manifest.4_ranks": [],
    "growth.agreement.2_ranks": [],
    "growth.agreement.512_ranks": [],
}
"""Expected figures, and their ways."""
DIFFERENCES = ("save_stall.step",)
"""Figures that chance may make negative."""

PHASES = (
    "detect",
    "tear down",
    "start",
    "rendezvous",
    "build the model",
    "load",
    "publish",
    "first step and the rest",
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> Path:
        command = [
            sys.executable,
            "-m",
            "benchmarks",
            "--quick",
            "--rounds",
            "1",
            "--out",
            str(folder),
        ]
        run = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=stretched(580)
        )
        assert run.returncode == 0, run.stdout + run.stderr
        return folder

    return make_once(tmp_path_factory, "bench", make)


@pytest.fixture(scope="module")
def document(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def figures(document: dict[str, Any]) -> dict[str, Figure]:
    return {figure.name: figure for figure in read_figures(document)}


def test_every_figure_is_measured_beside_its_rivals(figures: dict[str, Figure]) -> None:
    assert {name.partition(".")[0] for name in figures} == BENCHMARKS.keys()
    for name, ways in WAYS.items():
        assert set(ways) <= figures[name].samples.keys(), name
        assert any(way.startswith(OURS) for way in figures[name].samples), name


def test_every_ratio_is_a_number_and_every_way_has_as_many(figures: dict[str, Figure]) -> None:
    for figure in figures.values():
        assert len({len(values) for values in figure.samples.values()}) == 1, figure.name
        values = [
            value
            for values in (*figure.samples.values(), *figure.seconds.values())
            for value in values
        ]
        assert all(math.isfinite(value) for value in values), figure
        assert figure.name in DIFFERENCES or min(values) >= 0, figure
        assert set(figure.needed) <= figure.samples.keys(), figure.name


def test_a_recovery_is_split_into_phases_that_add_up(figures: dict[str, Figure]) -> None:
    seconds = figures["recover.first_step"].seconds
    phases = [seconds[f"phase: {phase}"] for phase in PHASES]
    for number, total in enumerate(seconds["Holdfast supervisor"]):
        assert sum(phase[number] for phase in phases) == pytest.approx(total)


def test_the_page_shows_every_figure_and_the_plot_the_main_ones(
    out: Path, figures: dict[str, Figure]
) -> None:
    page, plot = (out / "performance.md").read_text(), (out / "performance.svg").read_text()
    ElementTree.fromstring(plot)
    for figure in figures.values():
        explained = [
            line for line in page.splitlines() if f"`{figure.name.partition('.')[2]}`" in line
        ]
        assert any(figure.title.partition(":")[0] in line for line in explained), figure.name
        assert (figure.name in plot) == (figure.name in CHARTS)
    assert figures.keys() >= set(CHARTS)


def test_nothing_else_is_left(out: Path) -> None:
    assert sorted(path.name for path in out.iterdir()) == [
        "performance.md",
        "performance.svg",
        "results.json",
    ]


def test_a_model_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "save",
        "--parameters",
        "1e13",
        "--out",
        str(tmp_path),
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=stretched(100))
    assert run.returncode == 1 and "GB free" in run.stderr and "--parameters" in run.stderr
    assert list(tmp_path.iterdir()) == []


def _fail_on_rank_1(session: Session) -> None:
    if session.rank == 1:
        raise ValueError("as it is told")
    session.barrier()


def test_an_error_of_one_rank_ends_all_and_is_shown(options: Options) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed:(.|\n)*ValueError: as it is told"):
        on_ranks(_fail_on_rank_1, options)
    assert list(options.scratch.iterdir()) == []


def _marked(mark: str) -> Iterator[int]:
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes().split(b"\0"):
                yield int(environ.parent.name)
        except OSError:
            continue  # it has ended, or belongs to another user


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_no_process_and_no_scratch(
    tmp_path: Path, stop: signal.Signals
) -> None:
    mark = uuid.uuid4().hex
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "save",
        "--quick",
        "--rounds",
        "10000",
        "--out",
        str(tmp_path),
    ]
    env = os.environ | {"HOLDFAST_BENCH_MARK": mark}
    run = subprocess.Popen(
        command, cwd=ROOT, env=env, start_new_session=True, stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + stretched(120)
        while not list(
            tmp_path.glob("scratch-*/*/experiment")
        ):  # a handler exists, so ranks are at work
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        if stop == signal.SIGINT:
            os.killpg(run.pid, stop)  # like a terminal
        else:
            run.send_signal(stop)
        assert run.wait(stretched(60)) == (130 if stop == signal.SIGINT else 143)
        assert list(tmp_path.iterdir()) == []
        while left := list(_marked(f"HOLDFAST_BENCH_MARK={mark}")):
            assert time.monotonic() < deadline + 30, left
            time.sleep(0.1)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
