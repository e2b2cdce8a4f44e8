"""Servers in this process that behave as a test wants, and published folders for them to load."""

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event, Lock

import numpy as np
from safetensors.numpy import save

from holdfast.engine.hf.versions import version_path
from holdfast.engine.servers.api import ServerStatus, weights_label
from holdfast.utils.errors import PublishError, ServerError
from holdfast.utils.files import remove_folder
from holdfast.utils.manifest import verify_folder, write_entry, write_manifest
from tests.limits import stretched


def write_published(root: Path, version: int, contents: str = "weights") -> Path:
    """Write the folder of a version as a publisher leaves it, replacing an existing one."""
    folder = version_path(root, version)
    remove_folder(folder)
    folder.mkdir(parents=True)
    weights = save({"contents": np.frombuffer(contents.encode(), np.uint8)})
    write_manifest(
        folder, [write_entry(folder, "model.safetensors", weights)], {"weight_version": version}
    )
    return folder


class PlainServer:
    """Loads the folder it is given. Cannot be asked for its version.

    Attributes:
        told: versions in the order in which they were given.
        answer: called with a version before it is loaded.
        go: while it is cleared, loads wait.
        most_at_once: largest number of simultaneous loads so far.
    """

    def __init__(
        self, name: str = "plain", answer: Callable[[int], object] = lambda version: None
    ) -> None:
        self.name, self.answer = name, answer
        self.told: list[int] = []
        self.began, self.go = Event(), Event()
        self.go.set()
        self.most_at_once = self._at_once = 0
        self._mutex = Lock()

    def update_weights_from_disk(self, path: str, version: int) -> int:
        with self._mutex:
            self.told.append(version)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self.began.set()
            assert self.go.wait(stretched(30))
            return self._load(path, version)
        finally:
            with self._mutex:
                self._at_once -= 1

    def _load(self, path: str, version: int) -> int:
        self.answer(version)
        verify_folder(path)
        return version


class ScriptedServer(PlainServer):
    """A server that can be asked for its version. An update pauses it until the load is complete.

    Attributes:
        alive: whether it can be reached.
        label, paused: its reported state.
    """

    def __init__(
        self, name: str = "scripted", answer: Callable[[int], object] = lambda version: None
    ) -> None:
        super().__init__(name, answer)
        self.restart()

    def restart(self) -> None:
        """Reset to the state after a start, without published weights."""
        self.alive, self.label, self.paused = True, None, False

    @property
    def seconds(self) -> Mapping[str, float]:
        return {"load": 0.25}

    def status(self) -> ServerStatus:
        self._reach()
        return ServerStatus(self.label, self.paused)

    def _load(self, path: str, version: int) -> int:
        self._reach()
        self.paused = True
        super()._load(path, version)
        self.label, self.paused = weights_label(path, version), False
        return version

    def _reach(self) -> None:
        if not self.alive:
            raise ServerError(f"{self.name} refused the connection")


def refuse(version: int) -> None:
    """An ``answer`` with which the load fails."""
    raise PublishError(f"version {version} cannot be loaded")
