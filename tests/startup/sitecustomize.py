"""Imported first by every Python that a test starts, so that deprecations are errors there too.

pytest's ``filterwarnings`` apply only to its own process. `tests.conftest` puts this folder on
``PYTHONPATH``, which ranks, Ray's workers and whole jobs inherit.

With ``HOLDFAST_SIMULATED_CUDA`` such a process also gets simulated CUDA devices, as soon as it has
imported torch, and with ``HOLDFAST_SHARED_GPU`` its ranks share a real one. With
``HOLDFAST_MUTATION`` one module of Holdfast has another text.
"""

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

for category in (DeprecationWarning, FutureWarning):
    warnings.filterwarnings("error", category=category, module=r"holdfast\b")


def _install(module: str) -> None:
    """Call ``install`` of a module of the tests, wherever this process was started."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    try:
        importlib.import_module(module).install()
    finally:
        del sys.path[0]


class _DevicesAfterTorch(MetaPathFinder):
    """Calls ``install`` of a module of the tests at the end of the import of torch."""

    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert isinstance(spec, ModuleSpec) and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_install(module: ModuleType) -> None:
            load(module)
            _install(self._module)

        spec.loader.exec_module = load_and_install  # type: ignore[method-assign]
        return spec


if os.environ.get("HOLDFAST_MUTATION"):
    _install("tests.simulated_cuda.mutated")
if os.environ.get("HOLDFAST_SIMULATED_CUDA"):
    sys.meta_path.insert(0, _DevicesAfterTorch("tests.simulated_cuda.device"))
elif os.environ.get("HOLDFAST_SHARED_GPU"):
    sys.meta_path.insert(0, _DevicesAfterTorch("tests.gpu.shared_gpu"))
