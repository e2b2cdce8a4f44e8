"""Compile extensions in C++, once per version of torch and of the sources (half a minute), into
``.simulated_cuda``.
"""

import fcntl
import hashlib
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

NAME = "simulated_cuda"
SOURCES = Path(__file__).parent / "csrc"
CACHE = Path(__file__).parents[2] / ".simulated_cuda"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
_DEFINES = ("USE_C10D", "USE_DISTRIBUTED", "USE_C10D_GLOO")
_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")


class BuildError(RuntimeError):
    """The extension does not compile here."""


def built_library() -> Path:
    """The simulated device for this torch. Compiles it if needed.

    Raises:
        BuildError: torch has CUDA, the platform is not Linux, there is no g++, or torch's private
            names differ.
    """
    if torch.version.cuda or torch.version.hip:
        raise BuildError(
            f"torch {torch.__version__} is built for real devices; a simulated one needs a CPU "
            "build"
        )
    return compiled(NAME, SOURCES / "module.cpp")


def compiled(name: str, source: Path) -> Path:
    """The extension of ``source`` and headers of `SOURCES`. Processes that need it at the same time
    compile it once.
    """
    if sys.platform != "linux":
        raise BuildError(f"it is for Linux, not {sys.platform}")
    library = CACHE / _digest(source) / f"{name}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = library.with_suffix(".partial")
            _compile(name, source, partial)
            partial.rename(library)
    return library


def load(name: str, library: Path) -> ModuleType:
    """Import a compiled extension."""
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _digest(source: Path) -> str:
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {_FLAGS} {_DEFINES}".encode())
    for path in (source, *sorted(SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(name: str, source: Path, target: Path) -> None:
    root = Path(torch.__file__).parent
    includes = [
        root / "include",
        root / "include/torch/csrc/api/include",
        sysconfig.get_paths()["include"],
    ]
    command = [
        "g++",
        *_FLAGS,
        *(f"-D{define}" for define in (f"TORCH_EXTENSION_NAME={name}", *_DEFINES)),
    ]
    command += [argument for folder in includes for argument in ("-isystem", str(folder))]
    command += [str(source), "-o", str(target)]
    command += [
        f"-L{root / 'lib'}",
        f"-Wl,-rpath,{root / 'lib'}",
        *(f"-l{name}" for name in _LIBRARIES),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise BuildError("there is no g++") from error
    if done.returncode:
        first = next(
            (line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()
        )
        raise BuildError(f"g++ and torch {torch.__version__}: {first}")
