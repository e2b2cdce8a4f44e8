"""Several ranks on one GPU, for tests of meshes where there is one: real kernels, and gloo in place
of NCCL.

NCCL refuses two ranks on a device. With ``HOLDFAST_SHARED_GPU=1`` every process that a test starts
has the collectives of ``collectives.cpp`` under NCCL's name, and takes the first device. They wait
for the device, so that this shows nothing about time, streams of collectives, or NCCL.
"""

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

VARIABLE = "HOLDFAST_SHARED_GPU"
NAME = "shared_gpu"
SOURCE = Path(__file__).with_name("collectives.cpp")


def install() -> None:
    """Let the ranks of this process share the first of its devices."""
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    made: Any = None

    def collectives(store: dist.Store, rank: int, size: int, options: Any) -> Any:
        nonlocal made
        if made is None:
            from tests.simulated_cuda.build import compiled, load

            made = load(NAME, compiled(NAME, SOURCE))
        return made.collectives(
            dist.ProcessGroupGloo(store, rank, size, options._timeout), rank, size
        )

    class _OfNccl(type):
        def __call__(cls, *arguments: Any) -> Any:
            return collectives(*arguments)

        def __instancecheck__(cls, backend: Any) -> bool:
            return made is not None and isinstance(backend, made.Collectives)

    class ProcessGroupNCCL(metaclass=_OfNccl):
        class Options:
            _timeout = dist.default_pg_timeout

    for module in (dist, distributed_c10d):
        module.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]

    from holdfast.utils import devices

    devices.require_devices_of_their_own = lambda reports: None
