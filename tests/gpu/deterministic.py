"""Run a script with deterministic arithmetic: ``python tests/gpu/deterministic.py SCRIPT
[arguments]``.

A kernel without a deterministic version ends it with torch's error, which names the kernel.
``CUBLAS_WORKSPACE_CONFIG`` must be set before CUDA starts (see torch.use_deterministic_algorithms).
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
