"""Private names of other libraries: all in one place, and a missing name is reported at import."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from holdfast.utils.compat import (
    Private,
    peft_private,
    ray_private,
    require,
    torch_private,
    trainer_private,
    transformers_private,
)
from holdfast.utils.errors import UnsupportedVersionError
from tests.engine.models import HAS_PLANS
from tests.limits import stretched

ROOT = Path(__file__).parents[2]
LIBRARIES = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "verl",
    "ray",
    "huggingface_hub",
    "fsspec",
    "safetensors",
    "omegaconf",
)
LISTS = {
    "torch": torch_private.NAMES,
    "transformers": transformers_private.NAMES,
    "transformers, Trainer": trainer_private.NAMES,
    "transformers, meshes": transformers_private.PARALLEL if HAS_PLANS else [],
    "ray": ray_private.NAMES,
    "peft": peft_private.NAMES,
}
NAMES = [(library.split(",")[0], name) for library, names in LISTS.items() for name in names]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(path: Path) -> Iterator[str]:
    """Yield private names that a file takes from another library, or from objects other than its
    own.

    A file's own names are those that it gives ``self`` or a class, or defines.
    """
    tree = ast.parse(path.read_text())
    own = {"_exit", "_replace", "_fields"}  # documented by os and collections.namedtuple
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            own.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] in LIBRARIES
        ):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from (f"{path}:{node.lineno}: {name}" for name in names if is_private(name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in (
            "getattr",
            "hasattr",
            "setattr",
        ):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                yield f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_private_names_of_other_libraries_are_used_in_compat_only() -> None:
    files = [
        path
        for top in ("engine", "integrations", "recover", "utils")
        for path in (ROOT / top).rglob("*.py")
    ]
    outside = [path for path in files if path.parent.name != "compat"]
    assert [use for path in outside for use in private_uses(path)] == []
    found = {path.name for path in files if path not in outside and list(private_uses(path))}
    libraries = ("peft", "ray", "torch", "trackio", "trainer", "transformers", "trl")
    assert found == {f"{library}_private.py" for library in libraries}, "the scan sees nothing"


def test_a_function_that_takes_nothing_any_more_is_reported() -> None:
    with pytest.raises(UnsupportedVersionError, match="has no parameter 'entries'"):
        require("torch", [Private("gc:isenabled", "test this", ("entries",))])


def test_parameters_that_are_not_known_are_taken_as_they_are() -> None:
    """In torch 2.11, ``_StridedShard`` is a class in C++, which inspect cannot look into."""
    require("torch", [Private("builtins:dict", "test this", ("entries",))])


@pytest.mark.parametrize(
    ("library", "private"), NAMES, ids=lambda value: getattr(value, "name", value)
)
def test_a_name_that_a_release_removed_is_reported(
    library: str, private: Private, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(library, [private])
    gone = Private(f"{private.name}_as_it_was", private.use, private.parameters)
    with pytest.raises(UnsupportedVersionError) as caught:
        require(library, [gone])
    message = str(caught.value)
    assert message.startswith(
        f"{library} {metadata.version(library)} does not fit: {gone.name} is not there, which"
    )
    assert (
        f"needs to {private.use}. Install another version of {library} (supported: {library}"
        in message
    )
    if private.parameters:
        monkeypatch.setattr(sys.modules[__name__], "changed", lambda other: None, raising=False)
        with pytest.raises(
            UnsupportedVersionError, match=f"has no parameter '{private.parameters[0]}'"
        ):
            require(library, [Private(f"{__name__}:changed", private.use, private.parameters)])


@pytest.mark.slow
def test_a_name_that_torch_took_away_stops_the_import_of_the_engine(tmp_path: Path) -> None:
    """Remove each name in a fresh process: the import of the engine fails and names it."""
    (module, name) = ("torch.nn.modules.dropout", "_DropoutNd")
    assert f"{module}:{name}" in {private.name for private in torch_private.NAMES}
    script = f"import {module} as module\ndel module.{name}\nfrom holdfast.engine import FSDPEngine"
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=stretched(120),
    )
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1
    assert "UnsupportedVersionError: torch " in last and f"{module}:{name} is not there" in last


def test_libraries_whose_private_names_are_used_have_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["ray"], *extras["lora"]]
    bounds = {entry.split(">=")[0]: entry for entry in required}
    assert all(
        ">=" in bounds[name] and "<" in bounds[name]
        for name in ("torch", "transformers", "ray", "peft")
    )
