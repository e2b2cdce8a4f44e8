"""A proxy in this process between a client and its server, which changes answers as a test
wants.
"""

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

from tests.limits import stretched

Answer = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


class Gateway:
    """Forwards requests under ``prefix`` to ``target``. A context manager.

    Args:
        target: URL of a server. None: there is no server.
        prefix: prefix of the paths, for example ``/v1/servers/3``.
        answer: called first. Its return value is the answer, unless it is None.
        host: address to listen at.
        port: port to listen at. 0 takes a free one.
        tls: whether to speak HTTPS.
        compress: whether to compress answers.
        close: whether to close each connection after an answer, without notice.
    """

    def __init__(
        self,
        target: str | None = None,
        prefix: str = "",
        answer: Answer | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        compress: bool = False,
        close: bool = False,
    ) -> None:
        self._target, self._prefix, self._answer, self._compress, self._close = (
            target,
            prefix,
            answer,
            compress,
            close,
        )
        self._place, self._tls = (host, port), tls
        self._loop, self._ready = asyncio.new_event_loop(), threading.Event()
        self.port = 0
        self.asked: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Gateway":
        self._thread.start()
        assert self._ready.wait(stretched(20))
        host = f"[{self._place[0]}]" if ":" in self._place[0] else self._place[0]
        self.url = f"http{'s' if self._tls else ''}://{host}:{self.port}{self._prefix}"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(stretched(20))

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, *self._place, ssl_context=self._tls).start()
        self.port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as self._session:
            self._ready.set()
            await self._end.wait()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path}")
        if self._answer is not None and (answer := await self._answer(request)) is not None:
            return answer
        if self._target is None or not request.path.startswith(self._prefix + "/"):
            return web.Response(
                status=404, text="<html>no such page</html>", content_type="text/html"
            )
        body: Any = await request.read()
        url = self._target + request.path_qs.removeprefix(self._prefix)
        kind = {"Content-Type": "application/json"}
        async with self._session.request(request.method, url, data=body, headers=kind) as got:
            answer = web.Response(
                status=got.status, body=await got.read(), content_type=got.content_type
            )
        if self._compress:
            answer.enable_compression(web.ContentCoding.gzip)
        if self._close:
            await answer.prepare(request)
            await answer.write_eof()
            assert request.transport is not None
            request.transport.close()
        return answer
