"""Changes to torch and torchvision in every process of a server. Python imports this file when it
starts.

- ``torchvision`` of PyPI is built for CUDA. Its compiled part does not load beside a CPU build of
  torch, and its Python part asks for two operators of it. They are declared here, without code, so
  nothing can be shown about detection of objects, which no server of text does.
- SGLang pins the host memory of adapters, which torch refuses without an accelerator. Here
  ``pin_memory`` does nothing, so nothing is shown about copies from pinned memory to a device.
"""

import functools
import importlib.abc
import sys
from typing import Any

_PINNED = ("tensor", "empty", "zeros", "ones", "full")


def _declare_operators(torch: Any) -> None:
    signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", signature)


def _drop_pinning(torch: Any) -> None:
    for name in _PINNED:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor


def _without_pinning(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
        return make(*args, **options)

    return made


class _BeforeImport(importlib.abc.MetaPathFinder):
    """Changes torch just before a package is imported that needs it, and finds no package."""

    def __init__(self) -> None:
        self._changes = {"torchvision": _declare_operators, "sglang": _drop_pinning}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        change = self._changes.pop(fullname, None)
        if change is not None:
            import torch

            change(torch)


sys.meta_path.insert(0, _BeforeImport())
