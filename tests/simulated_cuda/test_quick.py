"""The part of ``make test-simulated-gpu`` for every change: the device, and staging and blocks on
it, in all modes.
"""

import pytest

from tests.simulated_cuda.__main__ import MODES, QUICK, run_pytest
from tests.simulated_cuda.build import BuildError, built_library


@pytest.fixture(scope="module")
def builds() -> None:
    """Compile the device, or skip the test."""
    try:
        built_library()
    except BuildError as error:
        pytest.skip(f"no simulated CUDA devices here: {error}")


@pytest.mark.slow
@pytest.mark.timeout(300)  # with the build
@pytest.mark.parametrize("mode", MODES)
def test_staging_and_blocks_wait_wherever_cuda_requires_it(builds: None, mode: str) -> None:
    done = run_pytest(mode, "-q", *QUICK, quiet=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
