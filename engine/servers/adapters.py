"""Adapters on a server: one name per version, and which adapters requests use.

A request names its adapter and keeps it to its end. So an update pauses nothing and drops no cache,
and the name says which version sampled a token. The name holds the digest of the published folder,
so other contents have another name.

A server may read an adapter again while requests use it, if it had to make room in memory. The
folder stays until then.
"""

import json
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from safetensors import SafetensorError, safe_open

from ...utils.errors import PublishError, SlowServerError
from ...utils.files import StrPath
from ..hf.adapter_folder import CONFIG, WEIGHTS
from ..hf.versions import AMPLIFIED_PREFIX

_PREFIX = "holdfast-v"


@dataclass(frozen=True)
class AdapterFacts:
    """Largest rank of published adapters, and sorted last parts of the names of their layers."""

    rank: int
    modules: Sequence[str]


def read_facts(folder: StrPath) -> AdapterFacts:
    """Read rank and target modules of the LoRA adapters in a published folder.

    Raises PublishError if the folder holds no adapters, or is damaged.
    """
    with _open(Path(folder) / WEIGHTS) as file:
        # A is [rank, inputs]. Its key is ...q_proj.lora_A.weight.
        keys = [key for key in file.keys() if ".lora_A." in key]  # noqa: SIM118
        rank = max(file.get_slice(key).get_shape()[0] for key in keys)
        modules = {key.split(".")[-3] for key in keys}
        return AdapterFacts(rank, sorted(modules))


@contextmanager
def amplified(folder: StrPath, size: float) -> Iterator[Path | None]:
    """Make a folder beside ``folder``, with the same adapters and a larger factor: each adds about
    ``size`` to a layer.

    None if they change nothing at any factor, as before the first training step. Raises OSError or
    PublishError.
    """
    path = Path(folder)
    config = json.loads((path / CONFIG).read_bytes())
    strength = _strength(path / WEIGHTS)
    if strength is None:
        yield None
        return

    # PEFT scales all adapters by lora_alpha, or by a value of alpha_pattern in its place.
    divisor = config["r"]
    if config.get("use_rslora"):
        divisor = config["r"] ** 0.5
    scaling = config["lora_alpha"] / divisor
    factor = max(1, math.ceil(size / (scaling * strength)))
    config["lora_alpha"] *= factor
    for layer in config.get("alpha_pattern") or ():
        config["alpha_pattern"][layer] *= factor

    # The server reads the folder as another user, perhaps.
    made = Path(tempfile.mkdtemp(prefix=f"{AMPLIFIED_PREFIX}{path.name}-", dir=path.parent))
    try:
        made.chmod(0o755)
        (made / CONFIG).write_text(json.dumps(config))
        try:
            os.link(path / WEIGHTS, made / WEIGHTS)
        except OSError:  # not all file systems have links
            shutil.copyfile(path / WEIGHTS, made / WEIGHTS)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _strength(file: Path) -> float | None:
    """Median size that adapters add to a layer for inputs of size 1, without their scaling. None if
    all add 0.
    """
    strengths: list[float] = []
    with _open(file) as weights:
        names = set(weights.keys())
        for name in sorted(names):
            other = name.replace(".lora_A.", ".lora_B.")
            if name == other or other not in names:
                continue
            a = weights.get_tensor(name).double()
            b = weights.get_tensor(other).double()

            # The squared Frobenius norm of b @ a, from matrices as small as the rank.
            squared = ((a @ a.T) * (b.T @ b)).sum().item()
            strength = math.sqrt(max(squared, 0.0) / len(b))
            if strength > 0:
                strengths.append(strength)
    if not strengths:
        return None
    return sorted(strengths)[len(strengths) // 2]


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError, ValueError) as error:
        raise PublishError(f"{file} cannot be read ({error}); publish the version again") from error


@contextmanager
def explained_wait() -> Iterator[None]:
    """Add the most likely reason to the error if a server is too slow for an adapter."""
    try:
        yield
    except SlowServerError as error:
        raise SlowServerError(
            f"{error}; if it waits for requests of older versions to end, let it compute with more "
            "versions at a time (--max-loras of vLLM, --max-loras-per-batch of SGLang)"
        ) from error


def adapter_name(label: str) -> str:
    """Name on the server for the adapters of a published folder with this `weights_label`."""
    return _PREFIX + label


def adapter_label(name: str) -> str:
    """The label in an `adapter_name`."""
    return name.removeprefix(_PREFIX)


class AdaptersInUse:
    """The adapters that one client uses on its server, ``current`` (None: the base) for new
    requests. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self.current: str | None = None
        self._folders: dict[str, str] = {}  # name -> folder
        self._requests: Counter[str] = Counter()  # requests in flight by name

    def switch(self, name: str | None, folder: str = "") -> None:
        """Use the adapter ``name``, loaded from ``folder``, for new requests. None: the base."""
        with self._lock:
            self.current = name
            if name is not None:
                self._folders[name] = folder

    @contextmanager
    def request(self) -> Iterator[str | None]:
        """Yield the adapter for one request and keep it in use until the block ends."""
        with self._lock:
            name = self.current
            if name is not None:
                self._requests[name] += 1
        try:
            yield name
        finally:
            if name is not None:
                with self._lock:
                    self._requests[name] -= 1

    def idle(self, loaded: Iterable[str]) -> list[str]:
        """The published adapters among ``loaded`` that no request uses any more."""
        with self._lock:
            used = self._used()
            return [name for name in loaded if name.startswith(_PREFIX) and name not in used]

    def folders(self) -> set[str]:
        """Folders of the adapters in use."""
        with self._lock:
            for name in self._folders.keys() - self._used():
                del self._folders[name]
            return set(self._folders.values())

    def _used(self) -> set[str]:
        used = set(+self._requests)  # of a positive count
        if self.current is not None:
            used.add(self.current)
        return used
