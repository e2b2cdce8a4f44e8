"""A stand-in for ``sgl_kernel``, SGLang's compiled kernels, whose wheels are built for CUDA.

Every name exists, so that SGLang can import it, and raises NotImplementedError when it is called.
No operator of ``torch.ops.sgl_kernel`` is registered, so SGLang computes with plain PyTorch.
Nothing is shown about the kernels for GPUs, or those for CPUs with AMX.
"""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: there are no kernels in this stand-in")

    missing.__name__ = name
    return missing
