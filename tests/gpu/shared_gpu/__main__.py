"""Run tests of engines on ranks that share one GPU: ``python -m tests.gpu.shared_gpu``, a part of
``make gpu``.
"""

import argparse
import os
import subprocess
import sys

from tests.gpu.shared_gpu import NAME, SOURCE, VARIABLE
from tests.simulated_cuda.__main__ import ROOT, TESTS, TIER, WITHOUT
from tests.simulated_cuda.build import BuildError, compiled

OWN = tuple(test for test in TESTS if not test.startswith(("tests/simulated_cuda", "tests/gpu")))
ON_PURPOSE = (
    "tests/utils/test_devices.py::test_ranks_of_two_kinds_or_with_one_gpu_are_refused_and_named"
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.shared_gpu", description=__doc__)
    parser.add_argument("--processes", default="4")
    parser.add_argument(
        "tests",
        nargs="*",
        default=OWN,
        help="files instead of all that are known to show something",
    )
    given = parser.parse_args()
    try:
        compiled(NAME, SOURCE)
    except BuildError as error:
        print(f"ranks cannot share a GPU here: {error}", file=sys.stderr)
        return 1
    path = os.pathsep.join(
        filter(None, [str(ROOT / "tests" / "startup"), os.environ.get("PYTHONPATH", "")])
    )
    env = os.environ | {VARIABLE: "1", "PYTHONPATH": path}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        TIER,
        "-n",
        given.processes,
        "--dist",
        "loadfile",
    ]
    command += [f"--deselect={test}" for test in (*WITHOUT, ON_PURPOSE)]
    return subprocess.run([*command, *given.tests], cwd=ROOT, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
