"""A real inference server as a process that can be killed and started again."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

from holdfast.utils.guard import start_guarded
from tests.helpers import free_port
from tests.limits import stretched

_START_S = 300


def environment_python(name: str, default: str) -> Path:
    """Python of an environment of its own: the folder that the variable ``name`` says, or
    ``default`` in the checkout.
    """
    folder = os.environ.get(name, Path(__file__).parents[2] / default)
    return Path(folder) / "bin" / "python"


class LiveProcess:
    """One server and its port, which stays the same over restarts.

    Subclasses set the command and the environment.

    Args:
        kind: name of the server, for its log.
        scratch: folder for its log and its switches.
    """

    def __init__(self, kind: str, scratch: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = scratch / f"{kind}-{self.port}.log"
        self._switch = scratch / f"switch-{self.port}"
        self._slow = self._switch.with_name(self._switch.name + ".slow")
        self._command: Sequence[str | Path] = ()
        self._environment: Mapping[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. `wait_until_ready` waits for the server."""
        with open(self.log, "ab") as log:
            environment = {**os.environ, **self._environment}
            self._process = start_guarded(self._command, log, env=environment)

    def wait_until_ready(self) -> None:
        """Wait until it answers requests. Raises AssertionError with the end of its log if it does
        not.
        """
        deadline = time.monotonic() + stretched(_START_S)
        while True:
            try:
                if httpx2.get(f"{self.url}/health", timeout=stretched(5)).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            running = self.alive() and time.monotonic() < deadline
            assert running, self.log.read_text(errors="replace")[-4000:]
            time.sleep(0.2)

    def alive(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the server."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL all processes of the server, and wait for their end."""
        if self.alive():
            self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(stretched(20))
            self._process = None

    def restart(self) -> None:
        """Kill it, start it again with its initial folder, and wait until it is ready."""
        self.kill()
        self.start()
        self.wait_until_ready()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start it, wait until it is ready, and kill it at the end of the block."""
        try:
            self.start()
            self.wait_until_ready()
            yield
        finally:
            self.kill()

    @contextmanager
    def slow(self) -> Iterator[None]:
        """Let each step of the model take as long as a larger model's in the block.

        Steps of a tiny model are so short that vLLM 0.32 answers nothing else until a request is
        done.
        """
        self._slow.touch()
        try:
            yield
        finally:
            self._slow.unlink()

    def post(self, route: str, body: object = None, timeout_s: float = 60) -> httpx2.Response:
        """Send one request."""
        return httpx2.post(self.url + route, json=body, timeout=stretched(timeout_s))


def plugin_distribution(folder: Path, group: str, source: str) -> Path:
    """Make a folder for ``PYTHONPATH`` in which a server finds a module of tests as an installed
    plugin.

    Args:
        folder: where to make it.
        group: group of entry points.
        source: file of the module, whose function ``register`` is the entry point.
    """
    facts = folder / "holdfast_test_plugin-1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: holdfast-test-plugin\nVersion: 1\n"
    )
    (facts / "entry_points.txt").write_text(f"[{group}]\ntests = holdfast_test_plugin:register\n")
    (folder / "holdfast_test_plugin.py").write_text(Path(source).read_text())
    return folder
