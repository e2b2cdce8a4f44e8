"""HTTP transport of all clients: calls within one deadline, and errors that name the server and the
request.

- `Calls` makes the calls of one update, about ten. Each opens its own connection, because vLLM
  closes a kept connection after an error without notice, and that would look like a failed load.
- `Connections` sends completions. It keeps one pool of connections for each event loop.

A failed connection attempt is repeated. A completion that broke off is repeated too. A call of an
update that broke off is not repeated, because the server may have acted on it.
"""

import asyncio
import errno
import re
import resource
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2
from tenacity import (
    AsyncRetrying,
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
)

from ...utils.errors import (
    BusyServerError,
    ConfigError,
    CutOffError,
    NoServerError,
    ServerError,
    SlowServerError,
    UnreachableServerError,
)
from ...utils.remote import without_secrets
from ...utils.timing import timed

Json = dict[str, Any]

_CONNECT_TIMEOUT_S = 5.0
_NOT_CONNECTED = (httpx2.ConnectError, httpx2.ConnectTimeout)
_NO_FILES = (errno.EMFILE, errno.ENFILE)
_MANY_FILES = 65_536
_BROKE_OFF = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError)
_KEEPALIVE_S = 2.0
"""Servers close idle connections after 5 s (default of uvicorn). A request on a closing connection
is lost.
"""
_MARKUP = re.compile(r"<(style|script)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
_NO_SERVER = "is an inference server at this URL, or a proxy or another web server?"
_BODY_CHARS = 300  # longest excerpt of a refusal's body in an error
_LOOK_EVERY_S = 0.05
_BUSY_S = 1.0  # pause before a busy server is asked again, if the server states none


class Calls:
    """The calls of one operation on a server, together within ``limit_s``. Use it as a context
    manager.

    Errors name ``what``, and a refusal raises ``error``. ``seconds`` holds the duration of each
    phase.
    """

    def __init__(self, url: str, what: str, limit_s: float, error: type[ServerError]) -> None:
        self.url = url
        self._what = what
        self.limit_s = limit_s
        self._error = error
        self._end = time.monotonic() + limit_s
        with _naming_proxies():
            self._client = httpx2.Client(
                base_url=url, limits=httpx2.Limits(max_keepalive_connections=0)
            )
        self.seconds: dict[str, float] = {}

    def restart_limit(self) -> None:
        """Count the limit from now on, after long work that the server has no part in."""
        self._end = time.monotonic() + self.limit_s

    def __enter__(self) -> "Calls":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(
        self, phase: str, path: str, *, key: str | None = None, advice: str = "", **options: Any
    ) -> Json:
        """Send a GET request. Otherwise as `post`. ``options`` go to the HTTP library."""
        answer = self._send(phase, "GET", path, key, **options)
        return _parsed(answer, self._named("GET", path), self._error, advice)

    def status_of(self, phase: str, path: str, *, key: str | None = None) -> int:
        """Send a GET request and return the status of the answer, also of a refusal. Otherwise as
        `post`.
        """
        return self._send(phase, "GET", path, key).status_code

    def post(
        self,
        phase: str,
        path: str,
        body: Json | None = None,
        *,
        params: Mapping[str, str] | None = None,
        key: str | None = None,
        error: type[ServerError] | None = None,
        advice: str = "",
    ) -> Json:
        """Send a POST request and return the JSON object of the answer, or an empty one if the
        answer has no body.

        ``phase`` is the key of ``seconds`` that the call adds to, ``key`` a bearer token. A refusal
        raises ``error`` instead of the error of this object, and its message ends with ``advice``.

        Raises:
            UnreachableServerError: no connection, or a broken one.
            SlowServerError: no answer before the deadline.
            ServerError: a refusal, or an answer without a JSON object.
        """
        answer = self._send(phase, "POST", path, key, json=body, params=params)
        return _parsed(answer, self._named("POST", path), error or self._error, advice)

    def tell(
        self, phase: str, path: str, body: Json, *, key: str | None = None, advice: str = ""
    ) -> None:
        """Send a POST request and accept any successful answer, whatever its text. Otherwise as
        `post`.
        """
        answer = self._send(phase, "POST", path, key, json=body)
        _require_success(answer, self._named("POST", path), self._error, advice)

    def _send(
        self, phase: str, method: str, path: str, key: str | None, **options: Any
    ) -> httpx2.Response:
        try:
            with timed(self.seconds, phase):
                again = Retrying(**_trying(self._end - time.monotonic(), *_NOT_CONNECTED))
                return again(self._receive, method, path, headers=bearer(key), **options)
        except httpx2.RequestError as failure:
            raise _broken(failure, self._named(method, path), self.limit_s) from failure

    def _named(self, method: str, path: str) -> str:
        return f"{self._what}: {method} {without_secrets(path)}"

    def _receive(self, method: str, path: str, **options: Any) -> httpx2.Response:
        # The read limit of httpx starts again with every byte, so the deadline is also checked
        # here.
        left_s = max(self._end - time.monotonic(), 1e-3)
        timeout = httpx2.Timeout(left_s, connect=min(left_s, _CONNECT_TIMEOUT_S))
        body = bytearray()
        with self._client.stream(method, path, timeout=timeout, **options) as answer:
            for piece in answer.iter_raw():
                body += piece
                if time.monotonic() > self._end:
                    raise httpx2.ReadTimeout(f"only {len(body)} bytes came", request=answer.request)
        return httpx2.Response(
            answer.status_code, headers=answer.headers, content=bytes(body), request=answer.request
        )

    def reading(self, of: str) -> AbstractContextManager[None]:
        """Read the answer named ``of`` in a block. A missing entry is raised as a refusal."""
        return readable(f"{self._what}: {of}", self._error)

    def refuse(self, problem: str, error: type[ServerError] | None = None) -> ServerError:
        """Return (not raise) the error for an answer with this ``problem``."""
        return (error or self._error)(f"{self._what}: {problem}")


class Connections:
    """Connections for completions, with the bearer token ``key`` and one pool per event loop. Each
    request in flight has its own, so the limit of open files is raised.

    ``unanswered`` counts the requests since the last answer that took too long.
    """

    def __init__(self, url: str, key: str | None) -> None:
        _allow_many_files()
        self.unanswered = 0
        self._url = url
        self._key = key
        # A request that is cut off leaves this table before it ends.
        self._in_flight: dict[asyncio.Timeout, asyncio.AbstractEventLoop] = {}
        self._given_up = False
        self._user: object = None
        self._changing_user = Lock()
        self._pools: dict[asyncio.AbstractEventLoop, _Pool] = {}

    async def ask(self, path: str, body: Json | None, limit_s: float) -> Json:
        """POST ``body``, or GET if it is None, and return the JSON object of the answer.

        Raises:
            NoServerError: no connection, or none is made any more after a `drain`.
            CutOffError: `drain` cut the request off.
            UnreachableServerError: the connection broke, and the retries failed too, or this
                process can open no more files.
            SlowServerError: no answer within ``limit_s``.
            BusyServerError: the server takes no request now.
            ServerError: a refusal, or an answer without a JSON object.
        """
        method = "GET" if body is None else "POST"
        what = f"{without_secrets(self._url)}: {method} {path}"
        broke_off: list[httpx2.RequestError] = []

        async def send() -> httpx2.Response:
            pool = await self._pool()
            try:
                return await pool.request(method, path, json=body, headers=bearer(self._key))
            except _BROKE_OFF as failure:
                broke_off.append(failure)
                raise

        # A retry may find no server any more. Then the error says how the connection broke.
        trying = AsyncRetrying(**_trying(limit_s, *_NOT_CONNECTED, *_BROKE_OFF))
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                self._in_flight[limit] = asyncio.get_running_loop()
                if self._given_up:
                    raise NoServerError(f"{what} was not sent: the server was removed")
                answer = await trying(send)
        except TimeoutError as failure:
            if limit not in self._in_flight:
                raise CutOffError(f"{what} was cut off: the server was removed") from failure
            self.unanswered += 1
            raise SlowServerError(
                f"{what} was not answered, all together within {limit_s:g} s"
            ) from failure
        except httpx2.RequestError as failure:
            reason = broke_off[-1] if broke_off else failure
            raise _broken(reason, what, limit_s) from failure
        finally:
            self._in_flight.pop(limit, None)
        self.unanswered = 0

        # A busy server or gateway may say when to ask again, as a number or as a date.
        told = answer.headers.get("Retry-After")
        if answer.status_code == 429 or (answer.status_code == 503 and told is not None):
            again_s = _BUSY_S
            if told is not None and told.isdecimal():
                again_s = float(told)
            raise BusyServerError(
                f"{what} was answered with {answer.status_code}: it is busy", again_s
            )
        return _parsed(answer, what, ServerError, "")

    def open(self, user: object) -> None:
        """Send requests for ``user``, such as a member of a fleet, also after a `drain`."""
        with self._changing_user:
            self._user = user
            self._given_up = False

    def drain(self, user: object, drain_s: float) -> None:
        """Wait until no request is in flight. After ``drain_s``, cut off those that are. Later
        requests are refused.

        Return early, and cut off nothing, if they were opened for another user than ``user``.
        """
        end = time.monotonic() + drain_s
        while self._in_flight and self._user is user and time.monotonic() < end:
            time.sleep(_LOOK_EVERY_S)

        # A request notes itself before it looks at the flag, so none is missed.
        with self._changing_user:
            if self._user is not user:
                return
            self._given_up = True
            for limit, loop in list(self._in_flight.items()):
                with suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(self._cut_off, limit, loop)

    def _cut_off(self, limit: asyncio.Timeout, loop: asyncio.AbstractEventLoop) -> None:
        if limit in self._in_flight and not limit.expired():
            del self._in_flight[limit]
            limit.reschedule(loop.time())

    async def _pool(self) -> httpx2.AsyncClient:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is not None:
            return pool.client

        # A pool refers to its loop, so those of loops that ended without closing it are left here.
        for other in list(self._pools):
            if other.is_closed():
                self._pools.pop(other, None)

        limits = httpx2.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_S
        )
        # `ask` limits the whole request.
        timeout = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        with _naming_proxies():
            client = httpx2.AsyncClient(base_url=self._url, limits=limits, timeout=timeout)
        closing = self._close_at_end(loop, client)
        self._pools[loop] = _Pool(client, closing)
        await anext(closing)
        return client

    async def _close_at_end(
        self, loop: asyncio.AbstractEventLoop, client: httpx2.AsyncClient
    ) -> AsyncGenerator[None]:
        """Close the connections of a loop when it ends: then it closes the generators that were
        begun in it (`asyncio.AbstractEventLoop.shutdown_asyncgens`).
        """
        try:
            yield
        finally:
            self._pools.pop(loop, None)
            await client.aclose()


class _Pool(NamedTuple):
    client: httpx2.AsyncClient
    closing: AsyncGenerator[None]
    """Closes the client. It is kept here, because a loop has only a weak reference."""


def require_server_url(what: str, url: str) -> None:
    """Raise ConfigError unless ``url`` of ``what`` is an HTTP URL of a host, without a query."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is no number
        is_http = parts.scheme in ("http", "https")
        leads_there = is_http and bool(parts.hostname) and not (parts.query or parts.fragment)
    except ValueError:
        leads_there = False
    if not leads_there:
        raise ConfigError(
            f"{what} URL {without_secrets(url)!r} is unknown; expected http://host:port, "
            "or a path behind that"
        )


def require_key(what: str, key: str | None) -> None:
    """Raise ConfigError unless the key ``what`` can be sent in a header. The key is not shown."""
    for place, letter in enumerate(key or "", start=1):
        if not "!" <= letter <= "~":
            raise ConfigError(
                f"{what} cannot be sent: its character {place} of {len(key or '')} is white space, "
                "or is not printable ASCII. If it was read from a file, strip its line break"
            )


@contextmanager
def _naming_proxies() -> Iterator[None]:
    """Make an HTTP client in this block. It takes its proxy from the environment."""
    try:
        yield
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        raise ConfigError(
            f"no HTTP client can be made ({without_secrets(str(error))}); correct the proxy in "
            "HTTP_PROXY, HTTPS_PROXY or ALL_PROXY, or name hosts without one in NO_PROXY"
        ) from error


@contextmanager
def readable(what: str, error: type[ServerError]) -> Iterator[None]:
    """Read an answer in this block. A missing or malformed entry is raised as ``error``, which
    names ``what``.
    """
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as failure:
        raise error(f"{what} cannot be used: {type(failure).__name__}: {failure}") from failure


def bearer(key: str | None) -> dict[str, str]:
    """The header that carries a key, or no header."""
    if not key:
        return {}
    require_key("a key", key)
    return {"Authorization": f"Bearer {key}"}


def _trying(limit_s: float, *again: type[Exception]) -> Json:
    return {
        "retry": retry_if_exception_type(again),
        "stop": stop_after_attempt(3) | stop_after_delay(limit_s),
        "wait": wait_exponential(0.25),
        "reraise": True,
    }


def _broken(failure: httpx2.RequestError, what: str, limit_s: float) -> ServerError:
    reason = f"{type(failure).__name__}: {failure}".rstrip(": ")
    found_none = isinstance(failure, _NOT_CONNECTED)
    if isinstance(failure, httpx2.TimeoutException) and not found_none:
        return SlowServerError(
            f"{what} was not answered, all together within {limit_s:g} s ({reason})"
        )
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return UnreachableServerError(
            f"{what} found a server whose certificate is not trusted ({reason}); name the file "
            "with the certificate of who signed it, its own if it signed itself, in the "
            "environment variable SSL_CERT_FILE"
        )
    no_files = _no_files(failure)
    if no_files is not None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return UnreachableServerError(
            f"{what} was not sent, because this process can open no more files ({no_files}); raise "
            f"their limit (ulimit -n), which is {files}, or let fewer requests run at a time "
            "(max_concurrent_rollouts)"
        )
    if found_none:
        return NoServerError(
            f"{what} found no server there ({reason}); start it, or look at the network"
        )
    return UnreachableServerError(
        f"{what} broke off ({reason}); look at the log of the server: it may have died"
    )


def _no_files(error: BaseException | None) -> OSError | None:
    """The error of a socket that could not be opened, among the causes of ``error``."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno in _NO_FILES:
        return error
    causes = [error.__cause__ or error.__context__]
    if isinstance(error, BaseExceptionGroup):  # of a host with several addresses
        causes += error.exceptions
    return next(filter(None, map(_no_files, causes)), None)


def _allow_many_files() -> None:
    """Raise the limit of open files, which is often 1,024. Not to the millions that a container may
    allow: programs that close every possible file would take minutes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with suppress(OSError, ValueError):  # a system may refuse it
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _require_success(
    answer: httpx2.Response, what: str, error: type[ServerError], advice: str
) -> None:
    if answer.has_redirect_location:
        elsewhere = without_secrets(answer.headers["Location"])
        raise error(
            f"{what} was answered with {answer.status_code}: it has moved to {elsewhere}; give "
            "the URL of that"
        )
    if answer.is_success:
        return

    # A web page is that of a proxy or of another program.
    parts = [f"{what} was answered with {answer.status_code} ({_excerpt(answer)})"]
    if advice:
        parts.append(advice)
    if _is_web_page(answer):
        parts.append(_NO_SERVER)
    raise error("; ".join(parts))


def _parsed(answer: httpx2.Response, what: str, error: type[ServerError], advice: str) -> Json:
    _require_success(answer, what, error, advice)

    # An empty answer counts as an empty object.
    parsed: Any = {}
    if answer.content:
        try:
            parsed = answer.json()
        except ValueError:
            parsed = None
    if not isinstance(parsed, dict):
        raise error(
            f"{what} was answered with {_excerpt(answer)!r}; expected a JSON object; {_NO_SERVER}"
        )

    # A gateway may have turned the status of an error into a success.
    if parsed.get("error"):
        raise error(
            f"{what} was answered with {answer.status_code} and an error ({_excerpt(answer)})"
        )
    return parsed


def _is_web_page(answer: httpx2.Response) -> bool:
    return "html" in answer.headers.get("Content-Type", "")


def _excerpt(answer: httpx2.Response) -> str:
    text = answer.text
    if _is_web_page(answer):
        text = "a web page: " + _MARKUP.sub(" ", text[: 20 * _BODY_CHARS])
    return without_secrets(" ".join(text[:_BODY_CHARS].split()))
