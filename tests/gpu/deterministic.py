"""Run a script with the same arithmetic each time: ``python tests/gpu/deterministic.py SCRIPT [arguments]``.

Kernels that have no deterministic way end it with torch's error, which names them. ``CUBLAS_WORKSPACE_CONFIG`` has to
be set before CUDA starts; see torch.use_deterministic_algorithms.
"""

import runpy
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
