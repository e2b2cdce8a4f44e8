"""What the clients of all inference servers share: HTTP calls within one deadline, and errors that name the server.

A client holds a URL, keys and limits, and travels pickled to where it is used. The calls of an update, about ten, have
a connection each: vLLM closes a kept one after an error without a word, which would look like a failed load. Generation
has a pool of connections for each event loop.

A connection that could not be made is tried again, and a completion that broke off. A call of an update that broke off
is not: what it asked for may have happened.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from threading import Lock
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import httpx2
from tenacity import (
    AsyncRetrying,
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
)

from ...utils.config import require_range
from ...utils.errors import (
    BusyServerError,
    ConfigError,
    NoServerError,
    PublishError,
    ServerError,
    SlowServerError,
    UnreachableServerError,
)
from ...utils.remote import without_secrets

Json = dict[str, Any]

_UPDATE_TIMEOUT_S = 300.0
_CONNECT_TIMEOUT_S = 5.0
_NOT_CONNECTED = (httpx2.ConnectError, httpx2.ConnectTimeout)
_BROKE_OFF = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError)
_KEEPALIVE_S = 2.0
"""Servers close idle connections after 5 s (uvicorn's default); a request on one that is being closed is lost."""
_BODY_CHARS = 300
"""How much of a refusal's body an error quotes."""
_BUSY_S = 1.0
"""When a server that is busy, and does not say for how long, is asked again."""


@dataclass(eq=False, repr=False)
class HTTPServer:
    """A client of one server. What travels pickled is what it was made with.

    Attributes:
        url: of the server, ``http://host:port``; a user and password in it are sent, and shown nowhere.
        api_key: sent as bearer token.
        timeout_s: longest time that one update, or `check_generation`, may take; None: as long as the publication
            allows (`WeightUpdateMeta.timeout_s`), and 300 s without one.
        status_timeout_s: longest time that `status` may take; a prober waits so long for a server that hangs.
        generation_timeout_s: longest time that one completion may take, waiting on a paused server included.

    Raises:
        ConfigError: ``url`` is no HTTP URL of a host, has a query, or holds a user beside an ``api_key``; a limit is
            not positive.
    """

    url: str
    _: KW_ONLY
    api_key: str | None = None
    timeout_s: float | None = None
    status_timeout_s: float = 10.0
    generation_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        if not _leads_to_a_server(self.url):
            raise ConfigError(f"server URL {self.name!r} is unknown; expected http://host:port, or a path behind that")
        if self.api_key and "@" in self.url.partition("://")[2].partition("/")[0]:
            raise ConfigError(f"{self.name} is given with a user and with an api_key, but one header carries both")
        for key in ("timeout_s", "status_timeout_s", "generation_timeout_s"):
            require_range(key, getattr(self, key), low=1e-3)
        self._seconds: Mapping[str, float] = {}
        self._pools: WeakKeyDictionary[Any, httpx2.AsyncClient] = WeakKeyDictionary()
        self._updating = Lock()
        self._allowed_s = _UPDATE_TIMEOUT_S

    def __reduce__(self) -> tuple[partial["HTTPServer"], tuple[()]]:
        return partial(type(self), **{field.name: getattr(self, field.name) for field in fields(self)}), ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def name(self) -> str:
        """The URL without secrets."""
        return without_secrets(self.url)

    def allow(self, timeout_s: float) -> None:
        """Let each update from now on take ``timeout_s``, unless the client was made with a limit of its own."""
        self._allowed_s = timeout_s

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each phase of the last update."""
        return self._seconds

    @property
    def _update_limit_s(self) -> float:
        return self._allowed_s if self.timeout_s is None else self.timeout_s

    def _calls(self, what: str, limit_s: float, error: type[ServerError] = PublishError) -> "Calls":
        return Calls(self.url, f"{self.name}{what}", limit_s, error)

    @contextmanager
    def _update(self, path: str, version: int) -> Iterator["Calls"]:
        """The calls of one update; updates of one client wait for each other, so that none resumes what another loads.

        Raises:
            SlowServerError: the update before is still at it.
        """
        what, limit_s = f", told to load version {version} from {path}", self._update_limit_s
        if not self._updating.acquire(timeout=limit_s):
            raise SlowServerError(f"{self.name}{what}: the update before it has not ended within {limit_s:g} s")
        try:
            with self._calls(what, limit_s) as calls:
                self._seconds = calls.seconds
                yield calls
        finally:
            self._updating.release()

    async def _ask(self, path: str, body: Json | None = None, limit_s: float | None = None) -> Json:
        """POST ``body``, or GET without one, on the connections of this event loop; the JSON that comes back.

        Raises:
            NoServerError: no connection.
            UnreachableServerError: the connection broke, also if none could be made after that.
            SlowServerError: no answer within ``limit_s``, or ``generation_timeout_s``.
            ServerError: the server refused, or did not answer with a JSON object.
        """
        method, limit_s = "GET" if body is None else "POST", limit_s or self.generation_timeout_s
        what = f"{self.name}: {method} {path}"
        broke_off: list[httpx2.RequestError] = []

        async def send() -> httpx2.Response:
            try:
                return await self._pool().request(method, path, json=body, headers=bearer(self.api_key))
            except _BROKE_OFF as failure:
                broke_off.append(failure)
                raise

        try:
            async with asyncio.timeout(limit_s):
                answer = await AsyncRetrying(**_trying(limit_s, *_NOT_CONNECTED, *_BROKE_OFF))(send)
        except TimeoutError as failure:
            raise SlowServerError(f"{what} was not answered, all together within {limit_s:g} s") from failure
        except httpx2.RequestError as failure:
            raise _broken(broke_off[-1] if broke_off else failure, what, limit_s) from failure
        if answer.status_code == 429 or (answer.status_code == 503 and "Retry-After" in answer.headers):
            raise BusyServerError(f"{what} was answered with {answer.status_code}: it is busy", _wait_s(answer))
        return _parsed(answer, what, ServerError, "")

    def _reading(self, of: str) -> AbstractContextManager[None]:
        """A block that takes an answer apart; raises ServerError when something is missing in it."""
        return _reading(f"{self.name}: {of}", ServerError)

    def _pool(self) -> httpx2.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_S)
            timeout = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)  # `_ask` has the others
            self._pools[loop] = httpx2.AsyncClient(base_url=self.url, limits=limits, timeout=timeout)
        return self._pools[loop]


class Calls:
    """The calls of one operation on a server, within one deadline; a context manager.

    Args:
        url: of the server.
        what: the server and what it was asked for, for errors.
        limit_s: longest time of all calls together.
        error: what a refusal raises.

    Attributes:
        url: of the server.
        seconds: those of each phase, by its name.
    """

    def __init__(self, url: str, what: str, limit_s: float, error: type[ServerError]) -> None:
        self.url, self._what, self._limit_s, self._error = url, what, limit_s, error
        self._end = time.monotonic() + limit_s
        # vLLM closes a kept connection after an error, and does not say so.
        self._client = httpx2.Client(base_url=url, limits=httpx2.Limits(max_keepalive_connections=0))
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> "Calls":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, phase: str, path: str, **options: Any) -> Json:
        """`call` with GET."""
        return self.call(phase, "GET", path, **options)

    def post(self, phase: str, path: str, body: Json | None = None, **options: Any) -> Json:
        """`call` with POST."""
        return self.call(phase, "POST", path, body, **options)

    def call(
        self,
        phase: str,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        params: Mapping[str, str] | None = None,
        key: str | None = None,
        error: type[ServerError] | None = None,
        advice: str = "",
    ) -> Json:
        """The JSON object that the server answers with; an empty one for an answer without a body.

        Args:
            phase: its time counts towards this phase.
            method: of HTTP.
            path: of the endpoint.
            body: JSON to send.
            params: query parameters.
            key: sent as bearer token.
            error: what a refusal raises; None: as all refusals do.
            advice: what to do about a refusal.

        Raises:
            UnreachableServerError: no connection, or it broke.
            SlowServerError: no answer before the deadline.
            ServerError: a refusal, or an answer that is no JSON object.
        """
        answer = self._send(phase, method, path, json=body, params=params, headers=bearer(key))
        return _parsed(answer, f"{self._what}: {method} {path}", error or self._error, advice)

    def tell(self, phase: str, path: str, body: Json, *, key: str | None = None) -> None:
        """POST ``body``, and accept any successful answer, whatever its text. Arguments and errors as for `call`."""
        answer = self._send(phase, "POST", path, json=body, headers=bearer(key))
        _require_success(answer, f"{self._what}: POST {path}", self._error, "")

    def _send(self, phase: str, method: str, path: str, **options: Any) -> httpx2.Response:
        started = time.monotonic()
        try:
            return Retrying(**_trying(self._end - started, *_NOT_CONNECTED))(self._receive, method, path, **options)
        except httpx2.RequestError as failure:
            raise _broken(failure, f"{self._what}: {method} {path}", self._limit_s) from failure
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - started

    def _receive(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """One answer, all of it before the deadline: a limit of httpx begins anew with every byte that comes."""
        left_s = max(self._end - time.monotonic(), 1e-3)
        timeout, body = httpx2.Timeout(left_s, connect=min(left_s, _CONNECT_TIMEOUT_S)), bytearray()
        with self._client.stream(method, path, timeout=timeout, **options) as answer:
            for piece in answer.iter_raw():
                body += piece
                if time.monotonic() > self._end:
                    raise httpx2.ReadTimeout(f"only {len(body)} bytes came", request=answer.request)
        return httpx2.Response(answer.status_code, headers=answer.headers, content=bytes(body), request=answer.request)

    @contextmanager
    def reading(self, of: str) -> Iterator[None]:
        """A block that takes an answer apart; what is missing in it is a refusal."""
        with _reading(f"{self._what}: {of}", self._error):
            yield

    def refuse(self, problem: str, error: type[ServerError] | None = None) -> ServerError:
        """The error that the server answered, but not as it should; to be raised."""
        return (error or self._error)(f"{self._what}: {problem}")


def _leads_to_a_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises when it is none
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)


def _trying(limit_s: float, *again: type[Exception]) -> Json:
    """How often a call is tried, and after which failures."""
    return {
        "retry": retry_if_exception_type(again),
        "stop": stop_after_attempt(3) | stop_after_delay(limit_s),
        "wait": wait_exponential(0.25),
        "reraise": True,
    }


@contextmanager
def _reading(what: str, error: type[ServerError]) -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as failure:
        raise error(f"{what} cannot be used: {type(failure).__name__}: {failure}") from failure


def bearer(key: str | None) -> dict[str, str]:
    """The header that carries a key; none without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def _broken(failure: httpx2.RequestError, what: str, limit_s: float) -> ServerError:
    reason = f"{type(failure).__name__}: {failure}".rstrip(": ")
    if isinstance(failure, httpx2.TimeoutException) and not isinstance(failure, _NOT_CONNECTED):
        return SlowServerError(f"{what} was not answered, all together within {limit_s:g} s ({reason})")
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return UnreachableServerError(
            f"{what} found a server whose certificate is not trusted ({reason}); name the file with the certificate of "
            "who signed it, its own if it signed itself, in the environment variable SSL_CERT_FILE"
        )
    if isinstance(failure, _NOT_CONNECTED):
        return NoServerError(f"{what} found no server there ({reason}); start it, or look at the network")
    return UnreachableServerError(f"{what} broke off ({reason}); look at the log of the server: it may have died")


def _wait_s(answer: httpx2.Response) -> float:
    """The seconds in ``Retry-After``, which may be a date, too."""
    told = answer.headers.get("Retry-After", "")
    return float(told) if told.isdecimal() else _BUSY_S


def _require_success(answer: httpx2.Response, what: str, error: type[ServerError], advice: str) -> None:
    if answer.has_redirect_location:
        elsewhere = without_secrets(answer.headers["Location"])
        raise error(f"{what} was answered with {answer.status_code}: it has moved to {elsewhere}; give the URL of that")
    if not answer.is_success:
        raise error(f"{what} was answered with {answer.status_code} ({_excerpt(answer)}){advice and '; ' + advice}")


def _parsed(answer: httpx2.Response, what: str, error: type[ServerError], advice: str) -> Json:
    _require_success(answer, what, error, advice)
    try:
        parsed = answer.json() if answer.content else {}
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise error(f"{what} was answered with {_excerpt(answer)!r}; expected a JSON object: is it such a server?")
    if parsed.get("error"):  # what stands between may have made it a success
        raise error(f"{what} was answered with {answer.status_code} and an error ({_excerpt(answer)})")
    return parsed


def _excerpt(answer: httpx2.Response) -> str:
    return without_secrets(" ".join(answer.text[:_BODY_CHARS].split()))
