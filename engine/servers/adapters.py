"""Adapters on a server: each version under a name of its own, and which of them requests use.

A request names the adapter that is to answer it, and keeps it to its end, whatever is loaded meanwhile. So an update
pauses nothing and drops no cache: new requests name the new version, those in flight end on the one that they began
with, and a name says which version sampled a token. A name has the digest of the published folder in it: a version that
is published anew with other contents is another adapter.

A server may read an adapter again while requests use it, when it had to make room in memory: its folder stays so long.
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
    """What a server has to be started for.

    Attributes:
        rank: the largest.
        modules: last parts of the names of the adapted layers, sorted.
    """

    rank: int
    modules: Sequence[str]


def read_facts(folder: str | os.PathLike[str]) -> AdapterFacts:
    """The facts of a published folder of adapters.

    Raises:
        PublishError: it is none, or is damaged.
    """
    path = Path(folder) / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            rank = {key: file.get_slice(key).get_shape()[0] for key in file.keys() if ".lora_A." in key}  # noqa: SIM118
        return AdapterFacts(max(rank.values()), sorted({key.split(".")[-3] for key in rank}))
    except (OSError, SafetensorError, ValueError) as error:
        raise PublishError(f"{path} cannot be read ({error}); publish the version again") from error


def adapter_name(label: str) -> str:
    """What a server calls the adapters of a published folder with this `weights_label`."""
    return _PREFIX + label


def adapter_label(name: str) -> str:
    """The label in an `adapter_name`."""
    return name.removeprefix(_PREFIX)


def refuse_adapters(folder: str | os.PathLike[str]) -> None:
    """See that a folder that a server is to take all its weights from has them.

    Raises:
        PublishError: it has adapters alone; nobody was told of it.
    """
    if (Path(folder) / WEIGHTS).exists():
        raise PublishError(f"{folder} holds adapters alone; tell servers of it by update_adapters_from_disk")


class AdaptersInUse:
    """The adapters that one client has its server use; all methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._current: str | None = None
        self._folders: dict[str, str] = {}
        self._requests: Counter[str] = Counter()

    @property
    def current(self) -> str | None:
        """Name of the adapter that new requests use; None: they are answered by the base."""
        return self._current

    def switch(self, name: str | None, folder: str = "") -> None:
        """Have new requests use the adapter ``name``, loaded from ``folder``; None: the base."""
        with self._lock:
            self._current = name
            if name is not None:
                self._folders[name] = folder

    @contextmanager
    def request(self) -> Iterator[str | None]:
        """A request; yields the adapter that it is to name, which is in use until the block ends."""
        with self._lock:
            name = self._current
            if name is not None:
                self._requests[name] += 1
        try:
            yield name
        finally:
            if name is not None:
                with self._lock:
                    self._requests[name] -= 1

    def idle(self, loaded: Iterable[str]) -> list[str]:
        """Those of the ``loaded`` adapters that were published and that no request uses any more."""
        with self._lock:
            used = self._used()
            return [name for name in loaded if name.startswith(_PREFIX) and name not in used]

    def folders(self) -> set[str]:
        """Folders of the adapters that are in use."""
        with self._lock:
            used = self._used()
            self._folders = {name: folder for name, folder in self._folders.items() if name in used}
            return set(self._folders.values())

    def _used(self) -> set[str]:
        return {self._current} - {None} | {name for name, count in self._requests.items() if count > 0}  # type: ignore[return-value]
