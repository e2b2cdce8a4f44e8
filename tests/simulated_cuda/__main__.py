"""Run the tests that have something to show on simulated CUDA devices: ``make test-simulated-gpu``.

Each mode is a session of pytest. Every process has the devices, so that ``device: auto`` trains on them.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.simulated_cuda.build import BuildError, built_library

ROOT = Path(__file__).parents[2]
MODES = ("late-copies", "late-kernels")
QUICK = ("tests/simulated_cuda/test_device.py", "tests/simulated_cuda/test_holdfast.py")
TESTS = (
    "tests/simulated_cuda",
    "tests/gpu/test_checkpoints.py",
    "tests/gpu/test_kills.py",
    "tests/engine/staging",
    "tests/engine/memory",
    "tests/engine/dcp/test_checkpoint.py",
    "tests/engine/dcp/test_direct_reader.py",
    "tests/engine/dcp/test_optimizer_state.py",
    "tests/engine/dcp/test_save.py",
    "tests/engine/hf/test_export.py",
    "tests/engine/hf/test_load.py",
    "tests/engine/servers/test_publish.py",
    "tests/engine/test_fsdp_engine.py",
    "tests/utils/test_devices.py",
    "tests/utils/test_rng.py",
)
TIER = "not slow and not matrix and not vllm and not peers"


def run_pytest(mode: str, *arguments: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    """Run pytest in ``mode``. The result has its output if ``quiet``."""
    env = os.environ | {"HOLDFAST_SIMULATED_CUDA": mode, "HOLDFAST_GPU_TESTS_DEVICE": "cuda"}
    command = [sys.executable, "-m", "pytest", "-m", TIER, "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=quiet)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated_cuda", description=__doc__)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--processes", default="2")
    parser.add_argument("tests", nargs="*", default=TESTS, help="files instead of all that are known to show something")
    given = parser.parse_args()
    try:
        built_library()
    except BuildError as error:
        print(f"no simulated CUDA devices here: {error}", file=sys.stderr)
        return 1
    parallel = ("-n", given.processes, "--dist", "loadfile")
    return max(run_pytest(mode, *parallel, *given.tests).returncode for mode in given.modes)


if __name__ == "__main__":
    sys.exit(main())
