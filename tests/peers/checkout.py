"""Checkouts of other projects, named by environment variables, and the modules of their tests."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest


def checkout(variable: str, file: str) -> Path:
    """Path of a file in the checkout that an environment variable names. Without it, the module's
    tests are skipped.
    """
    if not (root := os.environ.get(variable)):
        pytest.skip(f"{variable} names no checkout; see make test-peers", allow_module_level=True)
    path = Path(root) / file
    assert path.is_file(), f"{variable}={root} has no {file}: use a commit that has it"
    return path


def load(path: Path) -> ModuleType:
    """Import a test module of a checkout. Its relative imports work, and its package is not called
    ``tests``.
    """
    package = ModuleType("peer")
    package.__path__ = [str(path.parent)]
    sys.modules["peer"] = package
    return importlib.import_module(f"peer.{path.stem}")
