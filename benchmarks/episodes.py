"""``python -m benchmarks.episodes``: the cost of the episode log, against its limits.

- ``answer``: time of the rollouts' loop for one answer of 512 tokens to a prompt of 4,096. It is
  the digest of the request and the record, because another thread writes.
- ``sampling``: time of 2,048 answers of a server in this process, 512 at a time, with the log and
  without it, in turns. The server needs 0.5 to 1.5 s for an answer, a tenth of a real one.
- ``state``: time of `RolloutExecutor.state_dict` with the records of unfinished tickets, which is
  the part of a snapshot that training waits for.
- ``dump``: how long `RecoverHandler.dump` blocks training with the log and without it, in turns,
  while three steps of 128 conversations are unfinished. Each has 3 answers of 512 tokens.
- ``reading``: speed of reading and decoding a log, as after a kill. The file is in the page cache,
  so this is the time of the processor.

Each figure is the best of several rounds, because other programs only add time.

``PYTHONPATH=plugins/vllm python -m benchmarks.episodes --kills 12`` drives runs of conversations
whose driver is killed so often, at random moments, and prints the tokens that were sampled for each
one that was trained: with the log, and without its answers (``rollout.replay: off``).
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from holdfast.engine import FinetuneSpec
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.rollouts import (
    EpisodeEngine,
    GenerationHyperparameters,
    ModelRequest,
    RolloutConfig,
    RolloutExecutor,
    Trajectory,
)
from holdfast.engine.rollouts.digests import request_digest
from holdfast.engine.rollouts.ledger import Ticket
from holdfast.engine.rollouts.recorded import Bounds, Kind, Place, Record, Recorded
from holdfast.engine.rollouts.requests import RequestSender, TicketEngine
from holdfast.engine.servers.api import ModelResponse
from holdfast.recover import RecoverConfig, RecoverHandler, ResumableDataLoader
from holdfast.utils.record_log import NO_PARENT, RecordLog

PROMPT_TOKENS = 4096
ANSWER_TOKENS = 512
N_ANSWERS = 2048
N_AT_A_TIME = 512
_ROUNDS = 3

# of the runs whose snapshots are timed
_N_STEPS = 3
_N_TICKETS = 32
_N_SIBLINGS = 4
_N_TURNS = 3
_N_DUMPS = 10
_N_KILLED_STEPS = 15
_GIVEN_UP_S = 120.0


class Limit(NamedTuple):
    """A figure and the most, or the least, that it may be."""

    name: str
    value: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the figure is within its limit."""
        if self.at_least:
            return self.value >= self.limit
        return self.value <= self.limit

    def __str__(self) -> str:
        mark = "met" if self.met else "NOT met"
        return (
            f"| {self.name} | {self.value:.3g} {self.unit} | {self.limit:g} {self.unit} | {mark} |"
        )


def _answer(number: int) -> ModelResponse:
    # Log-probabilities are float32, as those of a server.
    logprobs = []
    tokens = []
    for token in range(ANSWER_TOKENS):
        logprobs.append(-(number % 7 + token % 64) / 64)
        tokens.append((number + 31 * token) % 150_000)
    versions = [3] * ANSWER_TOKENS
    return ModelResponse([], tokens, logprobs, versions, "stop")


def _request(number: int) -> ModelRequest:
    ids = []
    for token in range(PROMPT_TOKENS):
        ids.append((number + token) % 150_000)
    gconfig = GenerationHyperparameters(max_new_tokens=ANSWER_TOKENS)
    return ModelRequest(ids, gconfig)


def answer_ms(folder: Path) -> float:
    """Milliseconds of the loop for one answer."""
    log = RecordLog(folder, sync_s=2.0)
    log.start(NO_PARENT)
    recorded = Recorded("exact")
    recorded.follow(log, [])
    recorded.confirm(3, "3-0123456789abcdef")
    request = _request(1)
    response = _answer(1)

    # Each ticket is another one, as if none had ended.
    best_s = float("inf")
    for nth in range(400):
        began_s = time.perf_counter()
        place = Place(nth, request_digest(request), 0, Kind.ANSWER)
        recorded.take(place, Bounds(3, 3))
        recorded.note_answer(place, request, response)
        best_s = min(best_s, time.perf_counter() - began_s)
    log.close()
    return best_s * 1e3


class _Server:
    """Answers after 0.5 to 1.5 s."""

    def __init__(self) -> None:
        self._n_asked = 0
        self._answers = [_answer(number) for number in range(7)]

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        # spread evenly, so that answers do not come in bursts
        number = self._n_asked
        self._n_asked += 1
        await asyncio.sleep(0.5 + number * 0.618 % 1)
        return self._answers[number % 7]


class _Unrecorded(Recorded):
    """Records nothing, as before there was a log."""

    def note_answer(
        self, place: Place, request: ModelRequest, response: ModelResponse
    ) -> ModelResponse:
        return response


def sampling_s(folder: Path | None) -> float:
    """Seconds for all answers."""
    recorded: Recorded = _Unrecorded("exact")
    log = None
    if folder is not None:
        recorded = Recorded("exact")
        log = RecordLog(folder, sync_s=2.0)
        log.start(NO_PARENT)
        recorded.follow(log, [])
    recorded.confirm(3, "3-0123456789abcdef")
    # The server waits, so that the loop has room for other work, as in a run.
    sender = RequestSender([_Server()], RolloutConfig())
    requests = [_request(number) for number in range(N_AT_A_TIME)]

    async def ask(worker: int) -> None:
        for number in range(N_ANSWERS // N_AT_A_TIME):
            ticket = Ticket(N_AT_A_TIME * number + worker, 0, 7, 3)
            engine = TicketEngine(ticket, Bounds(3, 3), sender, recorded)
            await engine.agenerate(requests[worker])

    # Each of them asks for the next answer when it has one.
    async def ask_all() -> None:
        await asyncio.gather(*map(ask, range(N_AT_A_TIME)))

    began_s = time.perf_counter()
    asyncio.run(ask_all())
    took_s = time.perf_counter() - began_s
    if log is not None:
        log.close()
    return took_s


def state_ms(n_answers: int) -> float:
    """Milliseconds to join the records of unfinished tickets for a snapshot."""
    recorded = Recorded("exact")
    request = _request(1)
    for number in range(n_answers):
        place = Place(number // 32, f"{number:032x}", 0, Kind.ANSWER)
        recorded.note_answer(place, request, _answer(number))
    return _best_s(recorded.state) * 1e3


def reading_mb_s(folder: Path) -> float:
    """Megabytes of log per second that a start reads and decodes."""
    log = RecordLog(folder, sync_s=2.0)
    log.start(NO_PARENT)
    for number in range(4 * N_ANSWERS):
        place = Place(number, f"{number:032x}", 0, Kind.ANSWER)
        record = Record.of_answer(place, _answer(number), {3: "3-ab"})
        log.append(record.data)
    log.close()

    # The file is in the page cache, so this is the speed of digests and heads.
    def read() -> None:
        again = RecordLog(folder, sync_s=2.0)
        Recorded("exact").load(again.read(NO_PARENT))

    return log.n_bytes / 1e6 / _best_s(read)


def _best_s(fn: Callable[[], Any]) -> float:
    """Seconds of this thread's processor."""
    best_s = float("inf")
    for _ in range(_ROUNDS):
        began_s = time.thread_time()
        fn()
        best_s = min(best_s, time.thread_time() - began_s)
    return best_s


class _Conversations:
    """Conversations of one prompt, whose last answers never come."""

    def __init__(self) -> None:
        self.n_answered = 0

    async def arun_episode(self, engine: EpisodeEngine, data: list[int]) -> Trajectory | None:
        await asyncio.gather(*(self._talk(engine, data) for _ in range(_N_SIBLINGS)))
        return None

    async def _talk(self, engine: EpisodeEngine, prompt: list[int]) -> None:
        ids = list(prompt)
        for _ in range(_N_TURNS):
            response = await engine.agenerate(ModelRequest(list(ids)))
            ids += response.output_tokens
            self.n_answered += 1
        await asyncio.Event().wait()


class _AtOnce:
    """A server that answers at once, with weights of version 0."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        return replace(_answer(len(request.input_ids)), output_versions=[0] * ANSWER_TOKENS)


class _Training:
    """A run with three steps of unfinished conversations, and a model of 8M parameters."""

    def __init__(self, folder: Path, with_log: bool) -> None:
        torch.manual_seed(0)
        model = nn.Linear(1 << 12, 1 << 11)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1 << 12)).sum().backward()
        optimizer.step()
        self._state = DCPState(model, optimizer)

        # The rollouts, with all their records or none.
        prompts = [[number, 7] for number in range(1000)]
        self._loader = ResumableDataLoader(prompts, _N_TICKETS, seed=1)
        workflow = _Conversations()
        ahead = RolloutConfig(_N_STEPS - 1)
        self._executor = RolloutExecutor(ahead, self._loader, workflow, [_AtOnce()])
        if not with_log:
            self._executor._recorded = _Unrecorded("exact")

        spec = FinetuneSpec(1, 1000, _N_TICKETS)
        log_s = 2.0 if with_log else None
        config = RecoverConfig(
            "e", "t", fileroot=str(folder), freq_steps=1, max_ckpt_to_keep=1, episode_log_s=log_s
        )
        self._handler = RecoverHandler(config, spec)
        self._handler.register("rollouts", self._executor)
        self._step = self._handler.first_step(
            self._handler.load(self._state, dataloader=self._loader)
        )
        self._executor.set_version(0)
        expected = _N_STEPS * _N_TICKETS * _N_SIBLINGS * _N_TURNS
        given_up_s = time.monotonic() + _GIVEN_UP_S
        while workflow.n_answered < expected:
            if time.monotonic() > given_up_s:
                raise RuntimeError(f"{workflow.n_answered} of {expected} answers came")
            time.sleep(0.05)

    def dump_ms(self) -> float:
        """Milliseconds for which a snapshot blocks training. Its write is not among them."""
        began_s = time.perf_counter()
        self._handler.dump(self._state, self._step, dataloader=self._loader)
        took_s = time.perf_counter() - began_s
        self._handler.wait()
        self._step = self._step.next()
        return took_s * 1e3

    def close(self) -> None:
        self._handler.close()
        self._executor.close()


def dumps_ms(folder: Path) -> tuple[float, float]:
    """Milliseconds that `RecoverHandler.dump` blocks, with the log and without it."""
    runs = [_Training(folder / "with", True), _Training(folder / "without", False)]
    # The first snapshot of each also allocates its buffers.
    taken: list[list[float]] = []
    for _ in range(1 + _N_DUMPS):
        taken.append([run.dump_ms() for run in runs])
    for run in runs:
        run.close()
    with_ms, without_ms = zip(*taken[1:], strict=True)
    return min(with_ms), min(without_ms)


def print_kills(folder: Path, kills: int) -> None:
    """Print the tokens that were sampled for each trained one, in runs that are killed."""
    from tests.integration.test_episode_kills import drive  # needs plugins/vllm in PYTHONPATH

    print("| steps ahead | steps between snapshots | with the log | without |")
    print("|---:|---:|---:|---:|")
    for ahead in (0, 2):
        for freq_steps in (1, 5):
            ratios = []
            for replay in ("exact", "off"):
                root = folder / f"{ahead}-{freq_steps}-{replay}"
                options = {"ahead": ahead, "freq_steps": freq_steps, "replay": replay}
                run = drive(root, kills, steps=_N_KILLED_STEPS, **options)
                ratios.append(f"{run.sampled_per_trained:.2f}")
            print(f"| {ahead} | {freq_steps} | {ratios[0]} | {ratios[1]} |", flush=True)


def main() -> int:
    """Measure everything and print a table. The exit code is 1 if a limit is not met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.episodes", description=__doc__)
    parser.add_argument("--kills", type=int, help="only the cost of so many kills of a run")
    kills = parser.parse_args().kills
    if kills is not None:
        with tempfile.TemporaryDirectory() as root:
            print_kills(Path(root), kills)
        return 0

    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        # In turns, because the machine may become slower or faster meanwhile.
        with_s = []
        without_s = []
        for round in range(_ROUNDS):
            without_s.append(sampling_s(None))
            with_s.append(sampling_s(folder / f"sampling-{round}"))
        share = min(with_s) / min(without_s)
        answer = answer_ms(folder / "answer")
        state = state_ms(N_ANSWERS)
        speed = reading_mb_s(folder / "reading")
        with_ms, without_ms = dumps_ms(folder / "dump")

    limits = [
        Limit("an answer on the loop", answer, 0.15, "ms"),
        Limit("2,048 answers with the log", share, 1.03, "of the time without"),
        Limit("2,048 answers in a state", state, 50.0, "ms"),
        Limit("what the log adds to dump", with_ms - without_ms, 30.0, "ms"),
        Limit("reading", speed, 200.0, "MB/s", at_least=True),
    ]
    print("| figure | value | limit | |")
    print("|---|---:|---:|---|")
    for limit in limits:
        print(limit)
    print(f"dump blocks for {with_ms:.1f} ms with the log, and {without_ms:.1f} ms without it")
    return int(not all(limit.met for limit in limits))


if __name__ == "__main__":
    raise SystemExit(main())
