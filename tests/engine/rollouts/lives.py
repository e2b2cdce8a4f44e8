"""Lives of one run, each with an executor, its log and servers, for tests of what a kill costs."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from holdfast.engine.rollouts import RolloutExecutor, Trajectory
from holdfast.engine.rollouts.trajectory import TokenSequence, to_trajectory
from holdfast.engine.servers.api import (
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    ServerStatus,
)
from holdfast.utils.plain_values import pack_plain, unpack_plain
from holdfast.utils.record_log import RecordLog
from tests.engine.rollouts.servers import Server, make_executor, make_loader

_FRESH = count()


class Lasting(Server):
    """A server that reports the label of its weights, and never gives an answer twice: a request
    that is sampled again shows.

    Attributes:
        contents: second part of the label. Other weights have another one.
        limit: number of answers after which it hangs, as if the driver were killed there.
        answered: how often each prompt was answered, with its seed.
        taken: number of answers that have reached the driver, which records them.
    """

    def __init__(self, version: int = 0, *, contents: str = "a", limit: int | None = None) -> None:
        super().__init__(version)
        self.contents, self.limit = contents, limit
        self.answered: Counter[tuple[Any, ...]] = Counter()
        self.taken = 0
        self._counting: set[asyncio.Task[None]] = set()
        self.seconds: dict[str, float] = {}

    def update_weights_from_disk(self, path: str, version: int) -> int:
        self.version = version
        return version

    def status(self) -> ServerStatus:
        return ServerStatus(f"{self.version}-{self.contents}", paused=False)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.seen.append(request)
        await asyncio.sleep(self.delay())
        if self.limit is not None and self.answered.total() >= self.limit:
            await asyncio.sleep(3600)
        self.answered[key_of(request)] += 1
        counting = asyncio.create_task(self._count())
        self._counting.add(counting)
        counting.add_done_callback(self._counting.discard)
        tokens = [100 + next(_FRESH) for _ in range(2)]
        return ModelResponse(
            list(request.input_ids), tokens, [-0.1, -0.5], [self.version] * 2, "stop"
        )

    async def _count(self) -> None:
        for _ in range(30):  # an answer passes fewer callbacks of the loop on its way
            await asyncio.sleep(0)
        self.taken += 1

    @property
    def asked(self) -> Counter[tuple[Any, ...]]:
        """How often each prompt was asked, with its seed."""
        return Counter(map(key_of, self.seen))


class Trial:
    """What outlives a driver: the log, and the newest generation."""

    def __init__(self, folder: Path, batch_size: int = 2) -> None:
        self.folder, self.batch_size = folder, batch_size
        folder.mkdir(exist_ok=True)
        self.generation: Any = None

    @contextmanager
    def life(
        self, server: Any, workflow: Any, went_back: bool = False, **options: Any
    ) -> Iterator["Life"]:
        """Run a driver from the newest generation and log. The end of the block kills it."""
        loader = make_loader(self.batch_size)
        options.setdefault("max_head_offpolicyness", 1)
        executor = make_executor([server], workflow, loader, **options)
        if self.generation is not None:
            states, loader_state = self.generation
            loader.load_state_dict(loader_state)
            executor.load_state_dict(states)
        log = open_log(self.folder)
        with executor:
            try:
                executor.follow_log(log, went_back)
                yield Life(self, executor, loader, log, server)
            finally:
                log.close()


class Life:
    """One life of the driver of a `Trial`."""

    def __init__(
        self, trial: Trial, executor: RolloutExecutor, loader: Any, log: RecordLog, server: Any
    ) -> None:
        self.trial, self.executor, self.loader, self.log = trial, executor, loader, log
        self.server = server
        self.stats: dict[str, float] = {}  # at the end, without the prefix

    def serve(self, version: int) -> None:
        """Publish a version."""
        self.server.version = version
        self.executor.set_version(version)

    def commit(self) -> None:
        """Write a generation."""
        self.log.rotate()
        self.trial.generation = tuple(
            unpack_plain(pack_plain("state", thing.state_dict()), "state")
            for thing in (self.executor, self.loader)
        )

    def stat(self, name: str) -> float:
        return self.executor.stats()[f"rollouts/{name}"]


def open_log(folder: Path) -> RecordLog:
    return RecordLog(folder, sync_s=0.1)


def key_of(request: ModelRequest) -> tuple[Any, ...]:
    return tuple(request.input_ids), request.seed


class Chat:
    """A workflow with ``siblings`` conversations of ``turns`` answers. The model reads everything
    before, and ``say(engine, sibling, turn)`` may add tokens after each answer.

    Attributes:
        hold: whether a turn of a step waits, polled.
        rejects: whether an episode with this prompt is rejected.
    """

    def __init__(self, siblings: int = 1, turns: int = 2, say: Any = None) -> None:
        self.siblings, self.turns, self.say = siblings, turns, say
        self.hold: Callable[[int, int], bool] = lambda step, turn: False
        self.rejects: Callable[[int], bool] = lambda index: False

    async def arun_episode(self, engine: Any, data: Any) -> Trajectory | None:
        prompt = data["input_ids"]
        talks = [self._talk(engine, prompt, n) for n in range(self.siblings)]
        sequences = await asyncio.gather(*talks)
        if self.rejects(prompt[0]):
            return None
        return to_trajectory(sequences, [0.0] * len(sequences))

    async def _talk(self, engine: Any, prompt: list[int], sibling: int) -> TokenSequence:
        step = int(str(engine).split("of step ")[1].split()[0])
        sequence = TokenSequence()
        sequence.extend_given(prompt)
        for turn in range(self.turns):
            while self.hold(step, turn):
                await asyncio.sleep(0.001)
            sequence.extend_sampled(
                await engine.agenerate(ModelRequest(list(sequence.input_ids), TWO_TOKENS))
            )
            if self.say is not None:
                sequence.extend_given(await self.say(engine, sibling, turn))
        return sequence


TWO_TOKENS = GenerationHyperparameters(max_new_tokens=2)
