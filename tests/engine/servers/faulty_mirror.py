"""The mirror of ``holdfast-weights`` in this process, with faults on demand."""

import os
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from holdfast_weights.errors import FolderError
from holdfast_weights.mirror import Mirror
from holdfast_weights.service import MirrorHandler, Server
from holdfast_weights.source import Source


class FaultyMirror(Mirror):
    """A running mirror of ``source`` in ``local``. A context manager that stops it.

    Attributes:
        url: its address.
        asked: version and label of the accepted requests, in order.
        refuses: text of the refusals from now on. Empty: none.
        slow_s: seconds before each answer.
        answer: the answer to every request that succeeds, instead of the real one.
        before: called before each answer.
    """

    def __init__(self, source: Path, local: Path) -> None:
        super().__init__(Source(str(source)), local)
        self.open()
        self.asked: list[dict[str, Any]] = []
        self.refuses, self.slow_s = "", 0.0
        self.answer: Any = None
        self.before: Callable[[], object] = lambda: None
        mirror = self

        class Handler(MirrorHandler):
            def _answer(self, status: HTTPStatus, body: dict[str, Any]) -> None:
                super()._answer(
                    status,
                    body if status != HTTPStatus.OK or mirror.answer is None else mirror.answer,
                )

        self._server = Server("127.0.0.1:0", None, Handler, self)
        self.url = self._server.url
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def ask_for(self, token: str) -> None:
        """Require a token from now on."""
        self._server.token = token

    def prepare(self, version: int, label: str) -> Path:
        """See `Mirror.prepare`."""
        self.asked.append({"version": version, "label": label})
        self.before()
        time.sleep(self.slow_s)
        if self.refuses:
            raise FolderError(self.refuses)
        return super().prepare(version, label)

    def __enter__(self) -> "FaultyMirror":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        os.close(self._lock_fd)
