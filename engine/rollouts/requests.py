"""Send the requests of episodes to usable servers, and repeat failed ones on other servers."""

import asyncio
import inspect
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
)

from ...utils.errors import (
    BusyServerError,
    CallLost,
    ConfigError,
    CutOffError,
    NoServerError,
    RolloutError,
    ServerError,
)
from ...utils.logging import get_logger
from ...utils.stopping import require_no_stop
from ..servers.api import (
    GenerationServer,
    ModelRequest,
    ModelResponse,
    TimeoutCounter,
    logprob_problem,
)
from .call_pool import UNPICKLABLE
from .config import RolloutConfig
from .digests import call_digest, request_digest
from .ledger import Ticket, derive_seed
from .recorded import Bounds, Kind, Place, Record, Recorded

logger = get_logger(__name__)

_LOOK_AGAIN_S = 0.1


class ServerPool(Protocol):
    """Servers of which not all can be used at any time, such as a `ServerFleet`."""

    def serving(self) -> Sequence[GenerationServer]:
        """The usable servers: they serve the newest weights and are not paused."""
        ...

    @property
    def is_away(self) -> bool:
        """Whether servers are just updated, or rest for a turn, so that requests have to wait."""
        ...


Servers = Sequence[GenerationServer] | ServerPool


class RequestSender:
    """Send the requests of all episodes, on one asyncio loop.

    An episode stays at one server, because that server caches its prefix. ``retried`` counts the
    repeated requests. ``wants_routes`` says whether they ask for routed experts. While ``open`` is
    not set, no new request is sent.
    """

    def __init__(self, servers: Servers, config: RolloutConfig) -> None:
        self.retried = 0
        self.wants_routes = config.return_routed_experts
        self._pool: ServerPool | None = None
        self._listed: Sequence[GenerationServer] = ()
        if isinstance(servers, Sequence):
            self._listed = servers
        elif hasattr(servers, "serving"):
            self._pool = servers
        else:
            raise ConfigError(
                f"servers is {servers!r:.200}; expected a list of servers, or an object with "
                "serving() and is_away, such as a ServerFleet"
            )
        self._config = config
        # Servers by their id(): the number of their requests, and those that were absent last.
        self._in_flight: Counter[int] = Counter()
        self._absent: set[int] = set()
        self.open = asyncio.Event()
        self.open.set()

    async def send(self, request: ModelRequest, episode: "TicketEngine") -> ModelResponse:
        """Return the answer of a server. See `TicketEngine.agenerate`."""
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._config.request_attempts),
            # no jitter: it draws from the training's generator
            wait=wait_exponential(multiplier=0.1, max=10.0),
            retry=retry_if_exception_type(ServerError),
            before_sleep=self._count,
            reraise=True,
        )
        return await retrying(self._send_once, request, episode)

    async def _send_once(self, request: ModelRequest, episode: "TicketEngine") -> ModelResponse:
        # A busy or absent server has not failed. Wait for it, or ask another one.
        limit_s = self._config.server_wait_s
        refused_since: float | None = None
        absent_since: float | None = None
        while True:
            if await self._was_paused():
                refused_since = None
            try:
                return await self._send_to_one(request, episode)
            except (BusyServerError, NoServerError) as error:
                now = time.monotonic()
                # A request that was cut off had been taken.
                if refused_since is None or isinstance(error, CutOffError):
                    refused_since = now
                left_s = refused_since + limit_s - now
                if left_s <= 0:
                    raise RolloutError(
                        f"no server took a request for {limit_s:g} s: {error}"
                    ) from error

                # The next attempt may go to another server.
                again_s = _LOOK_AGAIN_S
                if isinstance(error, BusyServerError):
                    again_s = max(error.retry_after_s, again_s)
                    absent_since = None
                elif absent_since is None or self._is_away():
                    absent_since = now
                if absent_since is not None and self._all_absent():
                    require_no_stop("an inference server", absent_since)
                await asyncio.sleep(min(again_s, left_s))

    async def _send_to_one(self, request: ModelRequest, episode: "TicketEngine") -> ModelResponse:
        server = await self._choose(episode)
        episode.server = server
        key = id(server)
        timeout_s = self._config.request_timeout_s
        self._in_flight[key] += 1
        try:
            async with asyncio.timeout(timeout_s):
                response = await server.agenerate(request)
            if key in self._absent:
                self._absent.remove(key)
                logger.info("%s answers requests again", _name(server))
            episode.check(response, server)
        except TimeoutError as error:
            episode.failed = server
            if isinstance(server, TimeoutCounter):
                server.note_timeout()
            raise ServerError(f"{_name(server)} has not answered within {timeout_s:g} s") from error
        except ServerError as error:
            episode.failed = server
            # Many requests find the same server absent. One line in the log is enough.
            if isinstance(error, NoServerError) and key not in self._absent:
                self._absent.add(key)
                logger.warning("requests wait for %s, or go to others: %s", _name(server), error)
            raise
        finally:
            self._in_flight[key] -= 1
        return response

    async def _choose(self, episode: "TicketEngine") -> GenerationServer:
        """The server of the episode, else the one with the fewest requests. Avoids the one that
        failed last.
        """
        limit_s = self._config.server_wait_s
        absent_since = time.monotonic()
        given_up_s = absent_since + limit_s
        serving = self.usable()
        while not serving:
            now = time.monotonic()
            if now > given_up_s:
                raise RolloutError(f"no server could be used for {limit_s:g} s")
            if self._is_away():
                absent_since = now
            else:
                require_no_stop("an inference server", absent_since)
            await asyncio.sleep(_LOOK_AGAIN_S)
            if await self._was_paused():
                absent_since = time.monotonic()
                given_up_s = absent_since + limit_s
            serving = self.usable()

        others = [server for server in serving if server is not episode.failed] or serving
        if any(server is episode.server for server in others):
            return episode.server
        return min(others, key=lambda server: self._in_flight[id(server)])

    async def _was_paused(self) -> bool:
        """Wait while requests may not be sent. Returns whether that was so."""
        if self.open.is_set():
            return False
        await self.open.wait()
        return True

    def usable(self) -> list[GenerationServer]:
        """The servers that may be asked now."""
        if self._pool is not None:
            return list(self._pool.serving())
        return list(self._listed)

    def _is_away(self) -> bool:
        return self._pool is not None and self._pool.is_away

    def _all_absent(self) -> bool:
        return all(id(server) in self._absent for server in self.usable())

    def _count(self, attempt: RetryCallState) -> None:
        self.retried += 1
        outcome = attempt.outcome
        error = outcome.exception() if outcome else None
        episode = attempt.args[1]
        logger.warning("%s: request %d failed: %s", episode, attempt.attempt_number, error)


class TicketEngine:
    """The `EpisodeEngine` of one ticket, whose tokens weights within ``bounds`` may sample."""

    def __init__(
        self, ticket: Ticket, bounds: Bounds, sender: RequestSender, recorded: Recorded
    ) -> None:
        # the server of this episode
        self.server: Any = None
        # the server that failed last
        self.failed: Any = None
        self._ticket = ticket
        self._bounds = bounds
        self._sender = sender
        self._recorded = recorded
        self._n_asked: Counter[str] = Counter()  # by digest
        # the object of a method that was called first, by digest
        self._objects: dict[str, Any] = {}
        # set when the ticket has its trajectory. What a workflow has left running is not recorded
        self.is_over = False

    def __str__(self) -> str:
        return str(self._ticket)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """See `EpisodeEngine`."""
        routes_from = None
        if self._sender.wants_routes:
            routes_from = request.routes_from or 0
        request = replace(request, routes_from=routes_from)
        place = self._place(request_digest(request), Kind.ANSWER)
        record = self._recorded.take(place, self._bounds)
        if record is not None:
            return record.response(request)

        # The seed does not depend on the order of calls either, so that a request in flight is sent
        # again with its seed.
        if request.seed is None:
            seed = derive_seed(self._ticket.seed, int(place.key, 16), place.nth)
        else:
            seed = derive_seed(self._ticket.seed, request.seed)
        rid = request.rid or f"ticket-{place.ticket}-{place.key[:8]}-{place.nth}"
        request = replace(request, seed=seed, rid=rid)
        try:
            response = await self._sender.send(request, self)
        except ServerError as error:
            raise RolloutError(
                f"no server completed request {request.rid}, the last one said: {error}"
            ) from error
        if self.is_over:
            return response
        return self._recorded.note_answer(place, request, response)

    async def call(
        self, fn: Callable[..., Any], /, *args: Any, once: bool = False, **kwargs: Any
    ) -> Any:
        """See `EpisodeEngine`."""
        try:
            key = call_digest(fn, args, kwargs)
        except (*UNPICKLABLE, ValueError, RecursionError) as error:
            if once:
                raise ConfigError(
                    f"{fn} cannot be called with once=True, because a repeated call could not be "
                    f"told from another one: {error}"
                ) from error
            self._recorded.warn_unrecorded(f"call of {fn}", error)
            return await _awaited(fn(*args, **kwargs))

        # The object of a method is not in the digest: its state may differ after a kill.
        owner = getattr(fn, "__self__", None)
        if self._objects.setdefault(key, owner) is not owner:
            self._recorded.warn_mixed(str(fn))

        place = self._place(key, Kind.CALL)
        record = self._recorded.take(place, self._bounds)
        if record is not None:
            return record.result()
        if once:
            await self._begin(fn, place._replace(kind=Kind.BEGUN))
        result = await _awaited(fn(*args, **kwargs))
        if self.is_over:
            return result
        try:
            record = Record.of_call(place, result)
            # as a later life reads it, so that the digests of later calls are the same
            result = record.result()
        except (ConfigError, ValueError, RecursionError) as error:
            self._recorded.warn_unrecorded(f"result of {fn}", error)
            return result
        self._recorded.note(record)
        return result

    def random(self, n: int) -> random.Random:
        """See `EpisodeEngine`."""
        return random.Random(derive_seed(self._ticket.seed, n))

    async def _begin(self, fn: Callable[..., Any], intent: Place) -> None:
        if self._recorded.take(intent, self._bounds) is not None:
            raise CallLost(
                f"{fn} was begun before the kill of {self._ticket}, and whether it took effect is "
                "not known. It is not made again; ask the outside"
            )
        # The sync may take seconds on a shared disk.
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._recorded.begin, intent)

    def check(self, response: ModelResponse, server: GenerationServer) -> None:
        """Raise ServerError if too old or too new weights sampled the answer of ``server``, an
        entry is missing, or a log-probability is no finite number.
        """
        versions = response.output_versions
        n_tokens = len(response.output_tokens)
        n_logprobs = len(response.output_logprobs)
        n_versions = len(versions)
        if not n_tokens == n_logprobs == n_versions:
            raise ServerError(
                f"{_name(server)} answered {n_tokens} tokens, "
                f"{n_logprobs} log-probabilities and "
                f"{n_versions} versions; expected as many of each"
            )

        # It would be recorded, and the trainer would refuse its batch after each restart.
        problem = logprob_problem(response.output_logprobs)
        if problem is not None:
            raise ServerError(f"an answer of {_name(server)} cannot be trained on: {problem}")

        wrong = self._bounds.outside(versions)
        if wrong is not None:
            oldest, newest = self._bounds
            raise ServerError(
                f"{_name(server)} sampled with weights of version {wrong}; "
                f"{self._ticket} takes versions {oldest} to {newest}"
            )

    def _place(self, key: str, kind: Kind) -> Place:
        nth = self._n_asked[key]
        self._n_asked[key] += 1
        return Place(self._ticket.number, key, nth, kind)


async def _awaited(result: Any) -> Any:
    if inspect.isawaitable(result):
        return await result
    return result


def _name(server: object) -> str:
    return getattr(server, "name", type(server).__name__)
