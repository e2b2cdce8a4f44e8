"""The lives of tickets in the traces of chosen steps (docs/performance.md)."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...utils.timeline import Life, timeline
from ..servers.api import ModelRequest, ModelResponse
from .ledger import Ticket
from .requests import TicketEngine
from .workflow import EpisodeEngine

_SAMPLING = "sampling"
_CALLS = "rewards, tools"
_WORKFLOW = "workflow"


class TicketLives:
    """The lives of the tickets of one executor. None is kept while the timeline of this process is
    off.

    A ticket is ``queued`` until its episode begins. The episode is ``sampling`` while a request is
    out, else at ``rewards, tools`` while a call is out, else in its ``workflow``. Then the ticket
    is ``waiting`` for its batch, and ``training`` until the weights that it has trained exist.
    """

    def __init__(self) -> None:
        self._lives: dict[int, Life] = {}  # by the number of the ticket

    def queue(self, ticket: Ticket) -> None:
        """Begin the life of a ticket."""
        if timeline.is_on:
            life = Life(ticket=ticket.number, step=ticket.step, index=ticket.index, versions=[])
            self._lives[ticket.number] = life
            timeline.begin(life, "queued")

    def begin(self, engine: TicketEngine, ticket: Ticket) -> EpisodeEngine:
        """Return what the episode of a ticket gets as its engine."""
        life = self._lives.get(ticket.number)
        if life is None:
            return engine
        return _WatchedEngine(engine, life)

    def settle(self, ticket: Ticket, accepted: bool) -> None:
        """Let a ticket wait for its batch. A rejected one ends."""
        life = self._lives.get(ticket.number)
        if life is None:
            return
        life.details["accepted"] = accepted
        if accepted:
            life.enter("waiting")
        else:
            self._end(ticket.number)

    def train(self, tickets: list[Ticket]) -> None:
        """Note that these tickets are the batch of a step."""
        for ticket in tickets:
            life = self._lives.get(ticket.number)
            if life is not None:
                life.enter("training")

    def end(self, before_step: float) -> None:
        """End the lives of tickets of earlier steps."""
        for number, life in list(self._lives.items()):
            if life.details["step"] < before_step:
                self._end(number)

    def _end(self, number: int) -> None:
        life = self._lives.pop(number, None)
        if life is not None:
            timeline.end(life)


class _WatchedEngine:
    """A `TicketEngine` whose requests and calls are phases of a life."""

    def __init__(self, engine: TicketEngine, life: Life) -> None:
        self._engine = engine
        self._life = life
        self._n_out: Counter[str] = Counter()  # requests and calls that are out
        self._enter()

    def __str__(self) -> str:
        return str(self._engine)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """See `EpisodeEngine`."""
        with self._out(_SAMPLING):
            response = await self._engine.agenerate(request)
        versions = {*self._life.details["versions"], *response.output_versions}
        self._life.details["versions"] = sorted(versions)
        return response

    async def call(
        self, fn: Callable[..., Any], /, *args: Any, once: bool = False, **kwargs: Any
    ) -> Any:
        """See `EpisodeEngine`."""
        with self._out(_CALLS):
            return await self._engine.call(fn, *args, once=once, **kwargs)

    def random(self, n: int) -> random.Random:
        """See `EpisodeEngine`."""
        return self._engine.random(n)

    @contextmanager
    def _out(self, phase: str) -> Iterator[None]:
        self._n_out[phase] += 1
        self._enter()
        try:
            yield
        finally:
            self._n_out[phase] -= 1
            self._enter()

    def _enter(self) -> None:
        # Requests that a workflow leaves running do not belong to its ticket.
        if self._engine.is_over:
            return
        if self._n_out[_SAMPLING]:
            self._life.enter(_SAMPLING)
        elif self._n_out[_CALLS]:
            self._life.enter(_CALLS)
        else:
            self._life.enter(_WORKFLOW)
