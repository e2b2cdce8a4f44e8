"""Conversations of four turns with a real vLLM server, whose driver is killed twice.

A proxy records what the server has answered. After a kill the driver takes its own records instead.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from holdfast.engine import FSDPEngine, WeightUpdateMeta
from holdfast.engine.api import Batch
from holdfast.engine.servers import VLLMServer
from tests.engine.test_fsdp_engine import loss_tokens, nll
from tests.helpers import PRELOAD
from tests.integration.episode_job import EFFECTS, SIGKILLED, EpisodeJob, drive
from tests.integration.test_episode_kills import Run, rids_in_log
from tests.limits import stretched, wait_until
from tests.live.recorder import recorded_server
from tests.live.trainer import started_trainer
from tests.live_vllm.live_server import LiveServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

GENERATE = "/inference/v1/generate"
KILLS = (70, 60)
"""Answers after which a life is killed. A step has 48 of them."""


class EngineTrainer:
    """The trainer of a job, with a real engine."""

    def __init__(self, engine: FSDPEngine, root: str) -> None:
        self.engine = engine
        self._meta = WeightUpdateMeta("disk", f"{root}/weights", timeout_s=stretched(120))

    def step(self, batch: Batch, lr: float, noisy: bool) -> None:
        """Train once. The learning rate is that of the engine."""
        self.engine.train_batch(batch, nll, loss_tokens)
        self.engine.set_version(self.engine.get_version() + 1)

    def publish(self, job: EpisodeJob, server: VLLMServer, version: int) -> None:
        """Let the server load the weights."""
        assert self.engine.get_version() == version
        self.engine.connect_engine([server], self._meta)
        self.engine.update_weights()

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The weights."""
        return self.engine.model.state_dict()


def drive_engine(job: EpisodeJob, model: Path) -> None:
    """Run the job from its current state."""
    meta = WeightUpdateMeta("disk", f"{job.root}/weights", timeout_s=stretched(120))
    with started_trainer(model, meta) as trainer:
        drive(job, EngineTrainer(trainer.engine, job.root))


class Completion(NamedTuple):
    """Tokens that the server sampled after a prompt, with their log-probabilities in 32 bits."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@pytest.fixture
def server(model_folder: Path, tmp_path: Path) -> Iterator[LiveServer]:
    live = LiveServer(model_folder, tmp_path, "--logprobs-mode", "processed_logprobs")
    with live.running():
        yield live


def test_a_killed_driver_of_conversations_trains_on_what_the_server_sampled(
    server: LiveServer, model_folder: Path, tmp_path: Path
) -> None:
    root, record = tmp_path / "run", tmp_path / "answers.jsonl"
    root.mkdir()
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    replayed = []
    with recorded_server(server.url, GENERATE, record) as proxy:
        job = EpisodeJob(str(root), proxy.url, steps=4, ahead=1, freq_steps=2)
        for n_answers in (*KILLS, None):
            known = rids_in_log(root)
            begin = len(answers(record))
            process: Any = context.Process(target=drive_engine, args=(job, model_folder))
            process.start()
            if n_answers is not None:
                limit = begin + n_answers
                wait_until(lambda limit=limit: len(answers(record)) >= limit, 240)
                process.kill()
            process.join(stretched(240))
            wait_until(lambda: proxy.in_flight == 0)
            assert process.exitcode == (0 if n_answers is None else SIGKILLED)

            # What was recorded is not asked for again.
            asked = Counter(line["request"]["request_id"] for line in answers(record)[begin:])
            assert max(asked.values()) == 1 and not known & asked.keys()
            replayed.append(len(known))
    assert min(replayed[1:]) > 0

    # Every trained token is one that the server sampled, bit for bit.
    run = Run(job, [])
    assert [entry["step"] for entry in run.trained] == [0, 1, 2, 3]
    assert run.trained[-1]["stats"]["rollouts/replayed"] > 0
    theirs = completions(record)
    for entry in run.trained:
        for sample in entry["samples"]:
            assert trained_completions(sample) <= theirs
    orders = (root / EFFECTS).read_text().splitlines()
    assert max(Counter(orders).values()) == 1


def answers(record: Path) -> list[Any]:
    """The lines of the record that belong to tickets. Checks of the weights ask, too."""
    whole, _, _ = record.read_text().rpartition("\n")
    lines = [json.loads(line) for line in whole.splitlines()]
    return [line for line in lines if line["request"].get("request_id", "").startswith("ticket-")]


def completions(record: Path) -> set[Completion]:
    """What the server sampled."""
    found = set()
    for line in answers(record):
        (choice,) = line["answer"]["choices"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        prompt = tuple(line["request"]["token_ids"])
        found.add(Completion(prompt, tuple(choice["token_ids"]), narrow(logprobs)))
    return found


def trained_completions(sample: dict[str, Any]) -> set[Completion]:
    """What was trained on, of all rows of a ticket."""
    found = set()
    for ids, mask, logprobs in zip(
        sample["input_ids"], sample["loss_mask"], sample["logprobs"], strict=True
    ):
        begin = 0
        for is_sampled, places in groupby(range(len(ids)), key=mask.__getitem__):
            end = begin + len(list(places))
            if is_sampled:
                own = Completion(
                    tuple(ids[:begin]), tuple(ids[begin:end]), narrow(logprobs[begin:end])
                )
                found.add(own)
            begin = end
    return found


def narrow(logprobs: list[float]) -> tuple[float, ...]:
    return tuple(torch.tensor(logprobs, dtype=torch.float32).tolist())
