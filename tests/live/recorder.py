"""A proxy before a real server that records its completions."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

from tests.limits import stretched

_OF_ONE_CONNECTION = ("Connection", "Content-Length", "Host", "Transfer-Encoding")


@contextmanager
def recorded_server(url: str, path: str, record: Path) -> Iterator["Recorder"]:
    """Run a proxy before the server at ``url``.

    A request to ``path`` and its answer become a line of the file ``record``, as JSON, before the
    client gets the answer, or although it is gone.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="recorder", daemon=True)
    thread.start()
    proxy = Recorder(url, path, record)
    try:
        asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(stretched(20))
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(proxy.stop(), loop).result(stretched(20))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(stretched(20))
        loop.close()


class Recorder:
    """The proxy.

    Attributes:
        url: its address.
        in_flight: number of requests that the server has not answered.
    """

    def __init__(self, url: str, path: str, record: Path) -> None:
        self.url = ""
        self.in_flight = 0
        self._server = url
        self._path = path
        self._record = record
        record.touch()

    async def start(self) -> None:
        """Listen on a free port."""
        self._session = ClientSession(timeout=ClientTimeout(stretched(300)))
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{rest:.*}", self._forward)
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        """Close all connections."""
        await self._runner.cleanup()
        await self._session.close()

    async def _forward(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.in_flight += 1
        try:
            async with self._session.request(
                request.method,
                self._server + request.path_qs,
                headers=_kept(request.headers),
                data=body,
            ) as answer:
                data = await answer.read()
            if request.path == self._path and answer.status == 200:
                self._note({"request": json.loads(body), "answer": json.loads(data)})
        finally:
            self.in_flight -= 1
        return web.Response(status=answer.status, body=data, headers=_kept(answer.headers))

    def _note(self, line: Any) -> None:
        with open(self._record, "a") as file:
            file.write(f"{json.dumps(line)}\n")


def _kept(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in _OF_ONE_CONNECTION}
