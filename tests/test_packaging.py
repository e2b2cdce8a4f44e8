"""An installation has all files of the repository, as a wheel and editable, seen from outside the
checkout.
"""

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.limits import stretched

ROOT = Path(__file__).parents[1]
PACKAGE_DIRS = ("engine", "integrations", "recover", "utils")
PLUGINS = ("convert", "vllm", "weights")
ALONE = ("vllm", "weights")
"""Those that need no Holdfast."""


def source_files(root: Path) -> set[str]:
    """Python files of the packages, named as in a wheel."""
    return {
        f"holdfast/{path.relative_to(root).as_posix()}"
        for name in PACKAGE_DIRS
        for path in (root / name).rglob("*.py")
    }


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=stretched(150)
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def fresh_python(folder: Path) -> Path:
    """A new environment with the dependencies of this one, but without its editable Holdfast and
    its scripts.

    A folder named in a .pth file is searched, but .pth files in it (an editable install is one) are
    not read.
    """
    venv.create(folder, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def import_packages(python: Path, cwd: Path) -> list[str]:
    """Import every package of Holdfast in a process that starts in ``cwd``. Returns the file of
    each.
    """
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    script = (
        f"import importlib\nfor name in {packages!r}: print(importlib.import_module(name).__file__)"
    )
    return run(python, "-c", script, cwd=cwd).splitlines()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all inputs of a build, so that nothing is built in the repository and no old files
    are used.
    """
    root = tmp_path_factory.mktemp("checkout")
    for name in PACKAGE_DIRS:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root / name)
    return root


def test_the_packages_listed_are_the_packages_on_disk() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = {Path(file).parent.as_posix().replace("/", ".") for file in source_files(ROOT)}
    assert sorted(setuptools["packages"]) == sorted(on_disk)
    assert all(
        (ROOT / name.removeprefix("holdfast.").replace(".", "/") / "__init__.py").exists()
        for name in on_disk
    )
    assert setuptools["package-dir"] == {f"holdfast.{name}": name for name in PACKAGE_DIRS}


@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_packages_of_a_plugin_are_listed(plugin: str) -> None:
    facts = tomllib.loads((ROOT / "plugins" / plugin / "pyproject.toml").read_text())
    folders = {path.parent.name for path in (ROOT / "plugins" / plugin).glob("holdfast_*/*.py")}
    assert facts["tool"]["setuptools"]["packages"] == sorted(folders)
    assert facts["project"]["name"] == f"holdfast-{plugin}"
    assert (ROOT / "plugins" / plugin / facts["project"]["readme"]).is_file()


def test_type_checker_links_lead_to_the_packages() -> None:
    for name in PACKAGE_DIRS:
        assert (ROOT / ".typing" / "holdfast" / name).resolve() == ROOT / name


def test_tests_folders_are_packages() -> None:
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.slow
def test_wheel_holds_every_module_and_imports_outside_the_checkout(
    checkout: Path, tmp_path: Path
) -> None:
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        tmp_path,
        checkout,
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("holdfast-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.endswith(".py")} == source_files(checkout)
    assert {f"holdfast/{name}/py.typed" for name in PACKAGE_DIRS} <= names
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)

    python = fresh_python(tmp_path / "venv")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=tmp_path,
    )
    files = import_packages(python, cwd=tmp_path)
    assert files and all(Path(file).is_relative_to(tmp_path / "venv") for file in files)


@pytest.mark.slow
def test_editable_install_imports_the_sources_from_outside_the_checkout(
    checkout: Path, tmp_path: Path
) -> None:
    python = fresh_python(tmp_path / "venv")
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
    ]
    run(*install, "--no-build-isolation", "-e", checkout, cwd=tmp_path)
    files = import_packages(python, cwd=tmp_path)
    assert files and all(Path(file).is_relative_to(checkout) for file in files)


@pytest.mark.slow
def test_the_plugins_install_together_without_holdfast(tmp_path: Path) -> None:
    python = fresh_python(tmp_path / "venv")
    for plugin in ALONE:
        shutil.copytree(
            ROOT / "plugins" / plugin,
            tmp_path / plugin,
            ignore=shutil.ignore_patterns("*.egg-info"),
        )
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
    ]
    run(*install, "--no-build-isolation", *(tmp_path / plugin for plugin in ALONE), cwd=tmp_path)
    assert "0.1.0" in run(tmp_path / "venv" / "bin" / "holdfast-weights", "--version", cwd=tmp_path)
    script = (
        "import sys, holdfast_vllm.published, holdfast_weights.cli as c; "
        "print(c.__file__, 'torch' in sys.modules)"
    )
    file, torch = run(python, "-c", script, cwd=tmp_path).split()
    assert Path(file).is_relative_to(tmp_path / "venv") and torch == "False"


@pytest.mark.slow
def test_the_converter_installs_beside_holdfast_and_adds_its_command(
    checkout: Path, tmp_path: Path
) -> None:
    python = fresh_python(tmp_path / "venv")
    converter = shutil.copytree(
        ROOT / "plugins" / "convert",
        tmp_path / "convert",
        ignore=shutil.ignore_patterns("*.egg-info"),
    )
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps")
    run(*install, "--no-index", "--no-build-isolation", checkout, cwd=tmp_path)
    command = (tmp_path / "venv" / "bin" / "holdfast", "convert", "--help")
    assert "in the distribution holdfast-convert" in run(*command, cwd=tmp_path)
    run(*install, "--no-index", "--no-build-isolation", converter, cwd=tmp_path)
    assert "--steps-per-epoch" in run(*command, cwd=tmp_path)
    script = "import holdfast_convert as c; print(c.__file__, c.convert.__module__)"
    file, module = run(python, "-c", script, cwd=tmp_path).split()
    assert Path(file).is_relative_to(tmp_path / "venv")
    assert module == "holdfast_convert.conversion"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_repository_has_no_large_files() -> None:
    """Such as checkpoints of a run that was killed in the checkout."""
    tracked = [ROOT / name for name in run("git", "ls-files", "-z", cwd=ROOT).split("\0") if name]
    assert [path for path in tracked if path.is_file() and path.stat().st_size > 200_000] == []
