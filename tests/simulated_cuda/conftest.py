"""The simulated device for the tests of this folder, in the mode of the run or of the test."""

from collections.abc import Callable, Iterator

import pytest

from tests.helpers import SIMULATED_DEVICES
from tests.simulated_cuda import device


@pytest.fixture
def in_mode() -> Iterator[Callable[[str], None]]:
    """Function that sets the mode of the device for one test."""
    yield device.install
    device.install()


@pytest.fixture
def faults() -> Iterator[Callable[[str, int], None]]:
    """`device.inject` for one test."""
    yield device.inject
    for fault in device.FAULTS:
        device.inject(fault, 0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need the device in this process, in a session without it."""
    if item.get_closest_marker("simulated_gpu") and not SIMULATED_DEVICES:
        pytest.skip("needs simulated CUDA devices: make test-simulated-gpu")
