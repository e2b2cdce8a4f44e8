"""``python -m benchmarks.episodes``: the cost of the episode log, against its limits.

- ``answer``: time of the rollouts' loop for one answer of 512 tokens to a prompt of 4,096. It is
  the digest of the request and the record, because another thread writes.
- ``sampling``: time of 2,048 answers of a server in this process, 512 at a time, with the log and
  without it, in turns. The server needs 0.5 to 1.5 s for an answer, a tenth of a real one.
- ``state``: time of `RolloutExecutor.state_dict` with the records of unfinished tickets, which is
  the part of a snapshot that training waits for.
- ``reading``: speed of reading and decoding a log, as after a kill.

Each figure is the best of several rounds, because other programs only add time.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.engine.rollouts import GenerationHyperparameters, ModelRequest
from holdfast.engine.rollouts.config import RolloutConfig
from holdfast.engine.rollouts.digests import request_digest
from holdfast.engine.rollouts.ledger import Ticket
from holdfast.engine.rollouts.recorded import Bounds, Kind, Place, Record, Recorded
from holdfast.engine.rollouts.requests import RequestSender, TicketEngine
from holdfast.engine.servers.api import ModelResponse
from holdfast.utils.record_log import NO_PARENT, RecordLog

PROMPT_TOKENS = 4096
ANSWER_TOKENS = 512
N_ANSWERS = 2048
N_AT_A_TIME = 512
_ROUNDS = 3


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
        recorded.note_answer(place, response)
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

    def note_answer(self, place: Place, response: ModelResponse) -> None:
        return


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
    for number in range(n_answers):
        place = Place(number // 32, f"{number:032x}", 0, Kind.ANSWER)
        recorded.note_answer(place, _answer(number))
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
    best_s = float("inf")
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        fn()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def main() -> int:
    """Measure everything and print a table. The exit code is 1 if a limit is not met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.episodes", description=__doc__)
    parser.parse_args()
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

    limits = [
        Limit("an answer on the loop", answer, 0.15, "ms"),
        Limit("2,048 answers with the log", share, 1.03, "of the time without"),
        Limit("2,048 answers in a state", state, 50.0, "ms"),
        Limit("reading", speed, 200.0, "MB/s", at_least=True),
    ]
    print("| figure | value | limit | |")
    print("|---|---:|---:|---|")
    for limit in limits:
        print(limit)
    return int(not all(limit.met for limit in limits))


if __name__ == "__main__":
    raise SystemExit(main())
