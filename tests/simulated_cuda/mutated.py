"""Import one module of Holdfast with another text: the finder behind
`tests.simulated_cuda.mutations`.

``HOLDFAST_MUTATION`` is a JSON list: the module, the text that is replaced, and the text in its
place. Every Python that a test starts reads it (``tests/startup/sitecustomize.py``), so that ranks
are mutated too.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

VARIABLE = "HOLDFAST_MUTATION"


def mutated(text: str, old: str, new: str) -> str:
    """``text`` with the only occurrence of ``old`` replaced.

    Raises:
        ValueError: ``old`` does not occur exactly once.
    """
    if text.count(old) != 1:
        raise ValueError(f"{old!r} occurs {text.count(old)} times; expected 1")
    return text.replace(old, new)


class MutatedModule(MetaPathFinder):
    """Finds one module and lets its loader compile the changed text."""

    def __init__(self, module: str, old: str, new: str) -> None:
        self._module, self._old, self._new = module, old, new

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> Any:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and isinstance(spec.loader, SourceFileLoader), name
        source = mutated(Path(spec.loader.path).read_text(), self._old, self._new)
        code = compile(source, spec.loader.path, "exec")

        def get_code(_: str) -> CodeType:
            return code

        spec.loader.get_code = get_code  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Add the finder that ``HOLDFAST_MUTATION`` describes."""
    sys.meta_path.insert(0, MutatedModule(*json.loads(os.environ[VARIABLE])))
