"""An engine gives its GPU to another process and takes it back."""

from pathlib import Path

import pytest

from benchmarks.ranks import on_ranks
from tests.gpu.conftest import IS_GPU, Machine
from tests.gpu.figures import Figures
from tests.gpu.jobs import away

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


def test_another_process_takes_the_memory_of_an_offloaded_engine(
    machine: Machine, figures: Figures, tmp_path: Path
) -> None:
    found = on_ranks(away, machine.options(tmp_path), IS_GPU)
    size = f"{found.state / 1e9:.3g} GB, {machine.on}"
    figures.add("offload", found.offload_s, "s", size)
    figures.add("onload", found.onload_s, "s", size)
    figures.add("memory left after an offload / state", found.left / found.state, "", size)
    assert found.left < 0.05 * found.state
    assert found.refused, "onload fails, and may be tried again, while the memory is taken"
    assert found.came_back
