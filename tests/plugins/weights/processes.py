"""The command ``holdfast-weights`` as a process, and requests to it."""

import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.limits import stretched

ROOT = Path(__file__).parents[3]
COMMAND = Path(sys.executable).with_name("holdfast-weights")


class Running:
    """A process that listens, as a context manager. It is killed at the end.

    Args:
        args: arguments of the command, without ``--listen``.
        command: another command in place of ``holdfast-weights``.
        env: further environment variables.
        listen: its address.

    Attributes:
        url: its address.
    """

    def __init__(
        self,
        *args: object,
        command: Sequence[object] = (COMMAND,),
        env: dict[str, str] | None = None,
        listen: str = "127.0.0.1:0",
    ) -> None:
        line = [*map(str, command), *map(str, args), "--listen", listen]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        self.process = subprocess.Popen(
            line,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self.log: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""
        if self._ready.wait(stretched(30)):
            found = re.search(r"listening on (\S+)", "".join(self.log))
            assert found, "".join(self.log)
            self.url = found[1]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if "listening on" in line:
                self._ready.set()
        self._ready.set()

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(stretched(20))
        self._reader.join(stretched(20))
        assert self.process.stdout is not None
        self.process.stdout.close()

    def request(
        self,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = 60,
    ) -> tuple[int, Any]:
        """Send a request: POST if there is a body. Returns the status and the parsed answer."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers or {})  # type: ignore[arg-type]
        try:
            with urllib.request.urlopen(request, timeout=stretched(timeout_s)) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def prepare(self, version: int, label: str, **options: Any) -> tuple[int, Any]:
        """Ask for a version."""
        return self.request("/prepare", {"version": version, "label": label}, **options)

    def memory(self) -> int:
        """Most bytes of memory that the process had, without mapped files."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # type: ignore[index]
