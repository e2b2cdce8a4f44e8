"""Public names, and imports between packages: few names, one direction, few files for ray."""

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torch.distributed.checkpoint.stateful import Stateful

from holdfast.engine import DCPState, FSDPEngine
from holdfast.recover import RecoverHandler
from tests.limits import stretched

ROOT = Path(__file__).parents[1]
LAYERS = (
    "utils",
    "engine",
    "recover",
    "integrations",
)  # each may import itself and those before it
MAY_IMPORT_RAY = {
    "utils/compat/ray_private.py",
    "engine/workers/actor.py",
    "engine/workers/rank_answers.py",
    "engine/workers/group.py",
    "engine/workers/nodes.py",
    "engine/workers/placement.py",
    "engine/workers/termination.py",
    "recover/supervisor.py",
    "utils/trackers.py",
}

PRODUCT_FILES = sorted(
    path.relative_to(ROOT).as_posix() for layer in LAYERS for path in (ROOT / layer).rglob("*.py")
)


def imported_modules(file: str) -> Iterator[str]:
    """Absolute names of the modules that ``file`` imports anywhere, functions included."""
    package = ["holdfast", *Path(file).parent.parts]
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("layer", LAYERS)
def test_all_is_sorted_and_is_what_the_package_exports(layer: str) -> None:
    package = importlib.import_module(f"holdfast.{layer}")
    assert package.__doc__
    assert package.__all__ == sorted(set(package.__all__))
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
    bound = {
        name
        for name, value in vars(package).items()
        if name[0] != "_" and not isinstance(value, ModuleType)
    }
    assert bound - set(package.__all__) == set(), "bound in __init__.py, but not in __all__"


def test_imports_point_one_way() -> None:
    wrong = [
        f"{file} imports {module}"
        for file in PRODUCT_FILES
        for module in imported_modules(file)
        for layer in LAYERS[LAYERS.index(file.split("/")[0]) + 1 :]
        if module.startswith(f"holdfast.{layer}")
    ]
    assert wrong == []


def test_product_code_imports_itself_relatively_and_neither_tests_nor_examples() -> None:
    outside = ("tests", "examples", "benchmarks", *LAYERS)
    wrong = [
        f"{file} imports {module}"
        for file in PRODUCT_FILES
        for module in imported_modules(file)
        if module.split(".")[0] in outside
    ]
    assert wrong == []


def test_only_files_for_workers_and_trackers_import_ray() -> None:
    importers = {
        f for f in PRODUCT_FILES for module in imported_modules(f) if module.split(".")[0] == "ray"
    }
    assert importers <= MAY_IMPORT_RAY


@pytest.mark.slow
def test_engine_and_recover_import_where_ray_is_not_installed(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['ray'] = None\nfrom holdfast.engine import *\nfrom "
        "holdfast.recover import *"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=stretched(100),
    )
    assert result.returncode == 0, result.stderr


def test_workers_that_do_not_train_import_no_fsdp(tmp_path: Path) -> None:
    script = (
        "import sys\nimport holdfast.engine.workers.group\n"
        "print([name for name in sys.modules if name.startswith('torch.distributed.fsdp')])"
    )
    command = [sys.executable, "-c", script]
    found = subprocess.check_output(command, cwd=tmp_path, text=True, timeout=stretched(100))
    assert found.strip() == "[]"


def test_the_names_of_the_parts_that_trainers_embed_stay() -> None:
    assert issubclass(DCPState, Stateful)
    assert list(inspect.signature(FSDPEngine.save).parameters)[:2] == ["self", "meta"]
    assert list(inspect.signature(FSDPEngine.load).parameters) == ["self", "meta"]
    assert list(inspect.signature(RecoverHandler.load).parameters) == [
        "self",
        "engine",
        "dataloader",
    ]
    assert list(inspect.signature(RecoverHandler.dump).parameters)[:4] == [
        "self",
        "engine",
        "step_info",
        "dataloader",
    ]
