"""Fake inference servers in separate processes that can be killed, stopped, and told to commit
faults.
"""

import asyncio
import contextlib
import json
import multiprocessing as mp
import os
import signal
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx2
from aiohttp import web

from holdfast.utils.processes import die_with_parent
from tests.engine.servers import fake_sglang, fake_vllm
from tests.engine.servers.fake_engine import FakeEngine
from tests.helpers import PRELOAD
from tests.limits import stretched

_APPLICATIONS: dict[str, Callable[..., web.Application]] = {
    "vllm": fake_vllm.application,
    "sglang": fake_sglang.application,
}
_ENGINE_OPTIONS = ("dtype", "token_s", "folder", "of_version")


class FakeServer:
    """A running fake server. A context manager that kills it.

    Args:
        kind: ``vllm`` or ``sglang``.
        record: folder for the record of its calls and tokens, which remains after its end.
        options: options of `FakeEngine` and of the fake's ``application``.

    Attributes:
        url: its address, which stays the same after a restart.
    """

    def __init__(self, kind: str, record: Path, **options: Any) -> None:
        self._kind, self._options, self._log = (
            kind,
            options,
            record / f"{kind}-{uuid.uuid4().hex[:8]}.jsonl",
        )
        self._port = 0
        self._start()

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        ours, theirs = context.Pipe(duplex=False)
        arguments = (self._kind, self._port, str(self._log), self._options, theirs)
        self._process = context.Process(target=_main, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        assert ours.poll(stretched(60)), "the fake server did not start"
        self._port = ours.recv()
        self.url = f"http://127.0.0.1:{self._port}"

    def tell(self, **faults: Any) -> None:
        """Set the faults to commit from now on, as fields of `Faults`. Without arguments: none."""
        httpx2.post(f"{self.url}/fake", json=faults, timeout=stretched(20)).raise_for_status()

    def state(self) -> dict[str, Any]:
        """The real state: ``paused``, ``label``, ``version``, ``in_flight`` requests, and
        ``in_pieces``: whether the weights are partially loaded, and ``asleep``: the tags whose
        memory is free.
        """
        return httpx2.get(f"{self.url}/fake", timeout=stretched(20)).raise_for_status().json()

    def kill(self) -> None:
        """Kill it at once, also if it is stopped."""
        self._process.kill()
        self._process.join(stretched(20))

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Start it again at the same URL with the same options."""
        self.kill()
        self._start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def alive(self) -> bool:
        return self._process.is_alive()

    def died(self) -> bool:
        """Whether it ends by itself."""
        self._process.join(stretched(20))
        return not self._process.is_alive()

    def record(self) -> list[dict[str, Any]]:
        """All lines of its record: calls with their bodies, tokens and faults."""
        whole, _, _ = self._log.read_text().rpartition("\n")  # it may just be writing the next line
        return [json.loads(line) for line in whole.splitlines()]

    def calls(self) -> list[str]:
        """``"POST /pause?mode=keep"`` ..., in order, since its first start."""
        return [line["call"] for line in self.record() if "call" in line]

    def tokens(self) -> list[dict[str, Any]]:
        """Every token with ``rid``, ``position``, ``token``, ``logprob``, ``mixed``, and the
        ``version`` that really sampled it.
        """
        return [line for line in self.record() if "token" in line]

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _main(kind: str, port: int, log: str, options: dict[str, Any], pipe: Connection) -> None:
    die_with_parent()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(kind, port, log, options, pipe))


async def _serve(kind: str, port: int, log: str, options: dict[str, Any], pipe: Connection) -> None:
    of_engine = {key: options[key] for key in _ENGINE_OPTIONS if key in options}
    of_application = {key: value for key, value in options.items() if key not in of_engine}
    engine = FakeEngine(log, dies_of_pieces=kind == "vllm", **of_engine)
    runner = web.AppRunner(_APPLICATIONS[kind](engine, **of_application), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    assert runner.addresses
    pipe.send(runner.addresses[0][1])
    pipe.close()
    await asyncio.Event().wait()
