"""Snapshots, saves and loads of a model on GPUs: their cost, and their contents."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.ranks import on_ranks
from tests.gpu.conftest import Machine
from tests.gpu.figures import Figures
from tests.gpu.jobs import N_LATER, staging_memory, stalls, torn_snapshot, transfers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SLACK = 0.05
"""Memory that staging may need in addition to a shard, as a share of the shard."""
LARGE = 20_000_000
"""Parameters of a model whose copy on the CPU is slow enough for changes during the copy."""


def test_a_staged_snapshot_takes_the_host_memory_of_one_shard(
    machine: Machine, figures: Figures, tmp_path: Path
) -> None:
    options = machine.options(tmp_path)
    memory = on_ranks(staging_memory, replace(options, parameters=max(options.parameters, LARGE)))
    figures.add(
        "staging: pinned host bytes / shard bytes",
        memory.buffers + memory.pinned_by_torch,
        "",
        machine.on,
    )
    figures.add("staging: growth of the process / shard bytes", memory.resident, "", machine.on)
    assert memory.all_pinned or machine.device == "cpu"
    assert 1.0 <= memory.buffers + memory.pinned_by_torch <= 1.0 + SLACK, memory
    assert memory.resident <= 1.0 + 2 * SLACK, memory


def test_snapshots_are_written_in_the_background_and_committed(
    machine: Machine, figures: Figures, tmp_path: Path
) -> None:
    stall = on_ranks(stalls, machine.options(tmp_path))
    figures.add("buffers made when a run starts", stall.prepare_s, "s", machine.on)
    figures.add("stall of the first snapshot", stall.first_s, "s", machine.on)
    figures.add(
        "stall of later snapshots", stall.later_s, "s", f"{machine.on}, median of {N_LATER}"
    )
    figures.add(
        "stall of later snapshots / copy to warm host memory",
        stall.later_s / stall.copy_s,
        "",
        machine.on,
    )
    figures.add("snapshot until it is committed", stall.written_s, "s", machine.on)
    assert stall.committed == 2, "the newest two are kept"
    assert stall.later_s < stall.written_s, "it was written while training waited"


def test_every_format_brings_back_what_it_was_given(
    machine: Machine, figures: Figures, tmp_path: Path
) -> None:
    for name, transfer in on_ranks(transfers, machine.options(tmp_path)).items():
        gigabytes = transfer.n_bytes / 1e9
        size = f"{gigabytes:.3g} GB, {machine.on}"
        figures.add(f"{name}: save until it is durable", gigabytes / transfer.save_s, "GB/s", size)
        figures.add(f"{name}: load from the page cache", gigabytes / transfer.load_s, "GB/s", size)
        assert transfer.came_back, name


def test_a_write_between_a_snapshot_and_the_next_step_fails_that_snapshot(
    machine: Machine, tmp_path: Path
) -> None:
    options = machine.options(tmp_path)
    torn = on_ranks(torn_snapshot, replace(options, parameters=max(options.parameters, LARGE)))
    assert {error for error, _ in torn.errors} <= {"TornSnapshotError", "PeerError"}, torn.errors
    assert "TornSnapshotError" in {error for error, _ in torn.errors}, torn.errors
    assert torn.generations == ["global_step_0", "global_step_2"]
