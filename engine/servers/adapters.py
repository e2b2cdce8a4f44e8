"""Adapters on a server: one name per version, and which adapters requests use.

A request names its adapter and keeps it to its end. So an update pauses nothing and drops no cache, and the name says
which version sampled a token. The name holds the digest of the published folder, so other contents have another name.

A server may read an adapter again while requests use it, if it had to make room in memory. The folder stays until then.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from safetensors import SafetensorError, safe_open

from ...utils.errors import PublishError
from ..hf.adapter_folder import WEIGHTS

_PREFIX = "holdfast-v"


@dataclass(frozen=True)
class AdapterFacts:
    """Largest rank of published adapters, and sorted last parts of the names of the adapted layers."""

    rank: int
    modules: Sequence[str]


def read_facts(folder: str | os.PathLike[str]) -> AdapterFacts:
    """Read rank and target modules of the LoRA adapters in a published folder.

    Raises PublishError if the folder holds no adapters, or is damaged.
    """
    path = Path(folder) / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            rank = {key: file.get_slice(key).get_shape()[0] for key in file.keys() if ".lora_A." in key}  # noqa: SIM118
        return AdapterFacts(max(rank.values()), sorted({key.split(".")[-3] for key in rank}))
    except (OSError, SafetensorError, ValueError) as error:
        raise PublishError(f"{path} cannot be read ({error}); publish the version again") from error


def adapter_name(label: str) -> str:
    """Name on the server for the adapters of a published folder with this `weights_label`."""
    return _PREFIX + label


def adapter_label(name: str) -> str:
    """The label in an `adapter_name`."""
    return name.removeprefix(_PREFIX)


class AdaptersInUse:
    """The adapters that one client uses on its server, ``current`` (None: the base) for new requests. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.current: str | None = None
        self._folders: dict[str, str] = {}
        self._requests: Counter[str] = Counter()

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
            used = self._used()
            self._folders = {name: folder for name, folder in self._folders.items() if name in used}
            return set(self._folders.values())

    def _used(self) -> set[str]:
        used = {name for name, count in self._requests.items() if count > 0}
        return used if self.current is None else used | {self.current}
