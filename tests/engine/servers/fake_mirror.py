"""A mirror next to a fake server: it makes the files of published versions, also of deltas, in its own folder."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from holdfast.engine.hf.versions import version_path
from holdfast.engine.servers.api import weights_label
from tests.engine.hf.delta_reader import files_of_version


class FakeMirror:
    """A running mirror of ``source`` in ``local``. A context manager that stops it.

    Attributes:
        url: its address.
        asked: bodies of the requests, in order.
        refuses: text of the refusals from now on. Empty: none.
        slow_s: seconds before each answer.
        token: the bearer token that requests must have.
        answer: the answer to every request, instead of the real one.
        before: called before each answer.
    """

    def __init__(self, source: Path, local: Path) -> None:
        self.source, self.local = source, local
        self.asked: list[dict[str, Any]] = []
        self.refuses, self.slow_s = "", 0.0
        self.token: str | None = None
        self.answer: Any = None
        self.before: Callable[[], object] = lambda: None
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = mirror._answer(self.path, self.headers.get("Authorization"), body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, path: str, authorization: str | None, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(body)
        self.before()
        time.sleep(self.slow_s)
        if path != "/prepare":
            return 404, {"error": f"there is no {path}"}
        if self.token is not None and authorization != f"Bearer {self.token}":
            return 401, {"error": "the token is wrong"}
        if self.refuses:
            return 409, {"error": self.refuses}
        if self.answer is not None:
            return 200, self.answer
        source = version_path(self.source, body["version"])
        if weights_label(source, body["version"]) != body["label"]:
            return 409, {"error": f"{source} has another label"}
        return 200, {"path": str(self._make(body["version"]))}

    def _make(self, version: int) -> Path:
        folder = version_path(self.local, version)
        if not folder.exists():
            files = files_of_version(self.source, version)
            files["manifest.json"] = (version_path(self.source, version) / "manifest.json").read_bytes()
            for name, data in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
        return folder

    def __enter__(self) -> "FakeMirror":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
