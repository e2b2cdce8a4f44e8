"""The machine of the tests, and the folder of their figures.

``HOLDFAST_GPU_TESTS_DEVICE`` is ``cuda`` (default) or ``cpu``. ``HOLDFAST_GPU_TESTS_PARAMETERS`` is
the size of the model to save and load. ``HOLDFAST_GPU_TESTS_OUT`` is the folder for the figures
(default ``gpu_out``). On simulated devices (`tests.simulated_cuda`) sizes are small and no figures
are kept.
"""

import io
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.harness import Options, describe_machine
from tests.gpu.figures import JSON, PAGE, Figures
from tests.helpers import SIMULATED_DEVICES

DEVICE = os.environ.get("HOLDFAST_GPU_TESTS_DEVICE", "cuda")
IS_GPU = DEVICE == "cuda" and not SIMULATED_DEVICES
FOLDER = Path(os.environ.get("HOLDFAST_GPU_TESTS_OUT", "gpu_out"))
_FIGURES = pytest.StashKey[Figures]()


@dataclass(frozen=True)
class Machine:
    """The hardware for the tests.

    Attributes:
        device: ``cuda`` or ``cpu``.
        devices: number of GPUs. On the CPU, as many as the tests can use.
    """

    device: str
    devices: int

    @property
    def ranks(self) -> int:
        """Number of ranks for jobs with more than one, if possible."""
        return min(2, self.devices)

    @property
    def on(self) -> str:
        """Description of the device for the table of figures."""
        return f"{self.ranks} rank(s)"

    def options(self, scratch: Path) -> Options:
        """Benchmark options for the jobs with a model of configurable size."""
        parameters = float(
            os.environ.get("HOLDFAST_GPU_TESTS_PARAMETERS", "100e6" if IS_GPU else "1e6")
        )
        return Options(
            int(parameters), self.ranks, 5 if IS_GPU else 2, self.device, scratch, quick=not IS_GPU
        )


@pytest.fixture(scope="session")
def machine() -> Machine:
    """This machine. Skips the test if there is no GPU."""
    if DEVICE == "cpu":
        return Machine("cpu", 3)
    if not torch.cuda.is_available():
        pytest.skip(
            f"needs CUDA: torch {torch.__version__} sees no CUDA device (see docs/performance.md)"
        )
    return Machine("cuda", torch.cuda.device_count())


@pytest.fixture
def two_gpus(machine: Machine) -> Machine:
    """This machine. Skips the test if there are fewer than two GPUs."""
    if machine.devices < 2:
        pytest.skip(f"needs two CUDA GPUs, found {machine.devices}")
    return machine


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> Figures:
    """Collection of the measured figures."""
    return pytestconfig.stash[_FIGURES]


def pytest_configure(config: pytest.Config) -> None:
    """Create one collection of figures per session."""
    if DEVICE not in ("cuda", "cpu"):
        raise pytest.UsageError(
            f"HOLDFAST_GPU_TESTS_DEVICE is {DEVICE!r}; expected 'cuda' or 'cpu'"
        )
    config.stash[_FIGURES] = Figures(None if SIMULATED_DEVICES else FOLDER)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the figures, keep them, and say where they go."""
    figures = config.stash[_FIGURES]
    if not figures.all or SIMULATED_DEVICES:
        return
    outcomes = {
        name: len(terminalreporter.stats.get(name, ()))
        for name in ("passed", "failed", "error", "skipped")
    }
    machine = describe_machine(Options(0, 0, 0, DEVICE, FOLDER))
    gpu = (
        f"{torch.cuda.device_count()} x {machine['gpu']}"
        if DEVICE == "cuda"
        else "CPU, to see that the list works"
    )
    title = (
        f"{time.strftime('%Y-%m-%d')}: {gpu}, torch {torch.__version__}, {machine['cores']} cores."
    )
    figures.save(title, machine, outcomes)
    text = io.StringIO()
    width = max(100, terminalreporter._tw.fullwidth)
    Console(file=text, width=width, force_terminal=bool(terminalreporter.isatty)).print(
        figures.table(title)
    )
    terminalreporter.write_line("")
    terminalreporter.write(text.getvalue())
    kept = f"kept as {FOLDER / JSON} and {FOLDER / PAGE}"
    if DEVICE == "cpu":
        terminalreporter.write_line(f"{kept}; these are of a rehearsal and belong nowhere")
    else:
        terminalreporter.write_line(
            f'{kept}; the latter takes the place of the block under "On GPUs" in '
            "docs/performance.md"
        )
