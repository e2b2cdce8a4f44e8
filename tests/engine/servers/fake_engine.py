"""Common code of the fake vLLM and SGLang: weights, pauses, caches, requests in flight, and a
record of all.

A request has a KV cache that was computed with certain weights. A token sampled by other weights
than its cache is
*mixed*: its log-probability is wrong by `MIXED`, about as much as on a real server.
"""

import asyncio
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.engine.servers.fake_adapters import FakeAdapters, LoadedAdapter
from tests.engine.servers.fake_weights import (
    MIXED,
    HashedWeights,
    ModelWeights,
    Weights,
    load_weights,
)

Json = dict[str, Any]


@dataclass
class Faults:
    """Faults that a fake server commits after a request to do so.

    Attributes:
        lie: number of updates that are confirmed without any change.
        fail: path -> number of calls that fail with 500 and do nothing.
        slow: path -> seconds before a call is handled, unless the next request says otherwise.
        at_call: number of the call, counted from 0 at the request, at which ``does`` happens. None:
            never.
        does: ``die`` or ``stop`` (SIGKILL or SIGSTOP to itself).
        when: ``before`` the call is handled, or ``after`` it has taken effect, without an answer.
        keep_caches: whether a pause keeps caches, even if told to drop them.
        deaf: whether labels are accepted, but not kept.
        flush_fails: number of cache flushes that fail (SGLang).
        ignores_bias: whether ``logit_bias`` is ignored.
        ignores_adapters: whether the base answers requests for adapters.
        noise: standard deviation of what a log-probability of a prompt differs by each time, as on
            a busy server.
    """

    lie: int = 0
    fail: dict[str, int] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    at_call: int | None = None
    does: str = "die"
    when: str = "before"
    keep_caches: bool = False
    deaf: bool = False
    flush_fails: int = 0
    ignores_bias: bool = False
    ignores_adapters: bool = False
    noise: float = 0.0


@dataclass(eq=False)
class Generation:
    """A request in flight."""

    rid: str
    prompt: list[int]
    seed: int
    max_tokens: int
    stop: set[int]
    temperature: float
    salt: str | None
    adapter: LoadedAdapter | None = None
    bias: dict[str, float] = field(default_factory=dict)
    min_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    starts: list[tuple[str, int]] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    cache: str | None = None
    reason: str | None = None

    @property
    def spans(self) -> list[Json]:
        """Labels of tokens in the format of vLLM and SGLang."""
        ends = [start for _, start in self.starts[1:]] + [len(self.tokens)]
        return [
            {"version": label, "start": a, "end": b}
            for (label, a), b in zip(self.starts, ends, strict=True)
        ]


class FakeEngine:
    """One server without its HTTP.

    Args:
        log: file that gets a line of JSON for each call and each token.
        dtype: dtype of the model. None: `HashedWeights`.
        token_s: seconds per token.
        folder: folder served at first. None: hashed weights of version -1.
        of_version: whether hashed tokens depend on the version of the weights.
        dies_of_pieces: a token sampled from partially loaded weights ends the process (vLLM), or is
            garbage (SGLang).
    """

    def __init__(
        self,
        log: str,
        *,
        dtype: str | None = None,
        token_s: float = 0.0,
        folder: str | None = None,
        of_version: bool = True,
        dies_of_pieces: bool = True,
    ) -> None:
        self.faults, self.calls_seen = Faults(), 0
        self.label, self.in_pieces = "default", False
        self.mixed = False  # whether old and new weights are mixed, although no layer is in pieces
        self.received: set[str] = set()
        self._of_version = of_version
        self.folder = folder
        self.weights: Weights = HashedWeights(-1, of_version)
        self.weights_id = "default"
        if folder is not None:
            self.weights_id, self.weights = load_weights(folder, dtype, of_version)
        self.requests: set[Generation] = set()
        self.asleep: set[str] = set()
        self._shell: Weights | None = None  # weights whose values were dropped
        self._dropped = False
        self.adapters = FakeAdapters(folder, dtype, of_version)
        self._log = open(log, "a", buffering=1)  # noqa: SIM115 - as long as the process
        self._dtype, self._token_s, self._dies_of_pieces = dtype, token_s, dies_of_pieces
        self.prefixes: dict[tuple[str | None, tuple[int, ...]], str] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._idle = asyncio.Event()
        self._idle.set()

    def note(self, **what: Any) -> None:
        """Write a line of the record."""
        self._log.write(json.dumps(what) + "\n")

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    def pause(self, mode: str, drop_caches: bool) -> None:
        """``abort`` or ``keep`` the requests in flight, and optionally drop their caches and the
        prefix cache.
        """
        self._running.clear()
        drop_caches = drop_caches and not self.faults.keep_caches
        for request in list(self.requests):
            if mode == "abort":
                request.reason = "abort"
            elif drop_caches:
                request.cache = None
        if mode == "abort":
            self.requests.clear()
        if drop_caches:
            self.prefixes.clear()

    def set_label(self, label: str) -> None:
        """Report ``label`` as the version from now on."""
        if not self.faults.deaf:
            self.label = label

    def resume(self) -> None:
        self._running.set()

    def sleep(self, tags: set[str], keeps_weights: bool) -> None:
        """Free the memory of ``tags``."""
        assert self.paused, "it frees the memory of running requests"
        self.asleep |= tags
        if "weights" in tags and not keeps_weights:
            self._dropped = True

    def wake_up(self, tags: set[str]) -> None:
        """Take memory back. Weights that were not kept are garbage then, until a load."""
        self.asleep -= tags
        if "weights" in tags and self._dropped:
            self._shell = self.weights
            self.weights_id, self.weights, self.in_pieces, self._dropped = (
                "dropped",
                HashedWeights(None),
                True,
                False,
            )

    def _touch(self, *tags: str) -> None:
        """Read or write memory of these tags. Like a GPU, die if it was freed."""
        if freed := self.asleep.intersection(tags):
            self.note(died=f"an access to memory that was freed: {sorted(freed)}")
            os._exit(16)

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def load(self, folder: str) -> None:
        """Load a published folder, unless the fake lies. If the load fails, the weights are
        partially loaded.
        """
        self._touch("weights")
        if self.faults.lie > 0:
            self.faults.lie -= 1
            return
        try:
            self.weights_id, self.weights = load_weights(folder, self._dtype, self._of_version)
            self.in_pieces = self.mixed = False
            self.received.clear()
        except Exception:
            self.weights_id, self.weights, self.in_pieces = "pieces", HashedWeights(None), True
            raise

    def dismantle(self) -> None:
        """Take the layers apart, to receive weights in several parts."""
        self.in_pieces = self.mixed = True
        self.weights, self._shell = self._shell or self.weights, None

    def take(self, tensors: dict[str, Any]) -> None:
        """Load received tensors into the current model."""
        self._touch("weights")
        assert isinstance(self.weights, ModelWeights)
        self.weights.load(tensors)
        self.received |= tensors.keys()

    def put_back(self) -> None:
        """Put old weights back where no new ones arrived. The model is a mixture."""
        self.in_pieces = False
        self.received.clear()

    def is_complete(self) -> bool:
        """Whether all tensors were received."""
        return isinstance(self.weights, ModelWeights) and self.weights.names() == self.received

    def assemble(self) -> None:
        """Serve the received tensors. The layers stay apart if one is missing."""
        assert isinstance(self.weights, ModelWeights)
        if missing := self.weights.names() - self.received:
            raise ValueError(f"{sorted(missing)[0]} was not in it ({len(missing)} in all)")
        self.in_pieces = self.mixed = False
        self.received.clear()
        self.weights_id = f"received {self.weights_id}"

    def reset_prefixes(self) -> bool:
        """Drop cached prefixes, unless a request holds a cache."""
        if any(request.cache is not None for request in self.requests):
            return False
        self.prefixes.clear()
        return True

    def load_adapter(self, name: str, path: str) -> None:
        """Load one more adapter. With the fault ``lie``, keep the previous adapter or the base
        weights.

        Raises:
            Exception: the folder is missing or damaged. Nothing has changed.
        """
        lie, self.faults.lie = self.faults.lie > 0, max(0, self.faults.lie - 1)
        self.adapters.load(name, path, lie)

    def weights_of(self, adapter: LoadedAdapter | None) -> tuple[str, Weights]:
        """Weights of the base model, or with an adapter, which is read again if it was dropped from
        memory.
        """
        if adapter is None or self.faults.ignores_adapters:
            return self.weights_id, self.weights
        try:
            return self.adapters.use(adapter)
        except OSError:
            self.note(died="the folder of an adapter in use is gone")
            os._exit(14)

    def prompt_logprobs(self, ids: Sequence[int], adapter: LoadedAdapter | None) -> list[float]:
        """Log-probabilities of all tokens of a prompt but the first."""
        exact = self.weights_of(adapter)[1].prompt_logprobs(ids)
        return [logprob + random.gauss(0.0, self.faults.noise) for logprob in exact]

    def checksums(self) -> dict[str, str]:
        """Digests of the weights, without adapters."""
        self._touch("weights")
        if isinstance(self.weights, ModelWeights):
            return self.weights.checksums()
        return {"model.norm.weight": hashlib.sha256(self.weights_id.encode()).hexdigest()}

    async def generate(self, request: Generation) -> None:
        """Sample until the end. ``reason`` is then ``stop``, ``length`` or ``abort``."""
        self.requests.add(request)
        self._idle.clear()
        try:
            while request.reason is None:
                await asyncio.sleep(self._token_s)
                while (
                    self.paused or not self.adapters.begin(request.adapter, request)
                ) and request.reason is None:
                    await asyncio.sleep(0.002)
                if request.reason is None:
                    self._step(request)
        finally:
            self.adapters.end(request)
            self.requests.discard(request)
            if not self.requests:
                self._idle.set()

    async def ready(self) -> None:
        """Wait while the engine is paused. Die if the weights are partially loaded."""
        await self._running.wait()
        self._touch("weights", "kv_cache")
        if self.in_pieces and self._dies_of_pieces:
            self.note(died="a completion by weights in pieces")
            os._exit(13)

    def _step(self, request: Generation) -> None:
        self._touch("weights", "kv_cache")
        if self.in_pieces and self._dies_of_pieces:
            self.note(died="a completion by weights in pieces")
            os._exit(13)
        weights_id, weights = self.weights_of(request.adapter)
        if request.cache is None:
            prefix = (
                request.adapter.key if request.adapter else request.salt,
                tuple(request.prompt),
            )
            request.cache = (
                weights_id if request.tokens else self.prefixes.setdefault(prefix, weights_id)
            )
        position, mixed = len(request.tokens), request.cache != weights_id
        ids = [*request.prompt, *request.tokens]
        token, logprob = weights.next_token(ids, request.seed, position, request.temperature)
        if not self.faults.ignores_bias:
            token = _biased(token, request.bias)
        while position < request.min_tokens and token in request.stop:
            token += 1
        if mixed:
            logprob -= MIXED
        request.tokens.append(token)
        request.logprobs.append(logprob)
        request.versions.append(weights.version)
        if not request.starts or request.starts[-1][0] != self.label:
            request.starts.append((self.label, position))
        version = weights.version
        self.note(
            rid=request.rid,
            position=position,
            token=token,
            logprob=logprob,
            version=version,
            mixed=mixed,
        )
        if token in request.stop:
            request.reason = "stop"
        elif len(request.tokens) == request.max_tokens:
            request.reason = "length"

    def _fail(self) -> None:
        signals = {"die": signal.SIGKILL, "stop": signal.SIGSTOP}
        self.note(fault=self.faults.does)
        os.kill(os.getpid(), signals[self.faults.does])

    @web.middleware
    async def with_faults(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Record each call, and commit the requested faults."""
        if request.path == "/fake" and request.method == "GET":
            state = {"paused": self.paused, "label": self.label, "version": self.weights.version}
            state |= {
                "in_flight": len(self.requests),
                "in_pieces": self.in_pieces,
                "mixed": self.mixed,
            }
            state |= {"asleep": sorted(self.asleep)}
            return web.json_response(state | {"adapters": list(self.adapters.loaded)})
        if request.path == "/fake":
            self.faults, self.calls_seen = Faults(**await request.json()), 0
            return web.json_response({})
        struck = self.calls_seen == self.faults.at_call
        self.calls_seen += 1
        self.note(call=f"{request.method} {request.path_qs}", body=await request.text())
        if struck and self.faults.when == "before":
            self._fail()
        began = time.monotonic()
        while time.monotonic() - began < self.faults.slow.get(request.path, 0.0):
            await asyncio.sleep(0.005)
        if self.faults.fail.get(request.path, 0) > 0:
            self.faults.fail[request.path] -= 1
            return web.json_response({"error": {"message": "told to fail"}}, status=500)
        answer = await handler(request)
        if struck and self.faults.when == "after":
            self._fail()
        return answer


def _biased(token: int, bias: dict[str, float]) -> int:
    """The sampled token, or the next one that the bias does not exclude. A bias above 0 forces its
    token.
    """
    forced = [int(name) for name, value in bias.items() if value > 0]
    if forced:
        return forced[0]
    while str(token) in bias:
        token += 1
    return token


def folder_logprobs(folder: Path, dtype: str, ids: Sequence[int]) -> list[float]:
    """Log-probabilities that a server of this folder returns for a prompt, for comparisons."""
    return load_weights(str(folder), dtype)[1].prompt_logprobs(ids)
