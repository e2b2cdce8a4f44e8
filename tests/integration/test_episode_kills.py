"""A driver of conversations that is killed again and again, judged by the record of its server.

Checked for every life:

- no answer that was recorded when the life began is asked for again,
- every trained token, with its log-probability and version, is one that the server sampled under
  this version, by weights with the label that the run's version has in the end,
- each ticket is trained once and within the staleness bound, and each order is made at most once.

If arithmetic repeats, the weights in the end are those of an undisturbed run, and few tokens are
sampled in vain.
"""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from holdfast.engine.hf.versions import version_path
from holdfast.engine.servers.api import weights_label
from holdfast.utils.record_log import ReadCounts, log_files, read_records, split_payload
from tests.engine.servers.fakes import FakeServer
from tests.integration.episode_job import (
    BATCH_SIZE,
    EFFECTS,
    MAX_CONCURRENT,
    N_SIBLINGS,
    N_TOKENS,
    N_TURNS,
    SIGKILLED,
    TRAINED,
    WEIGHTS,
    EpisodeJob,
    Kill,
    live,
)

TOKENS_PER_TICKET = N_SIBLINGS * N_TURNS * N_TOKENS
LATE_TOKENS = 100
"""Tokens that are sampled until a kill has happened, at most."""


@dataclass(frozen=True)
class Run:
    """A run that has ended, with the server's record of it."""

    job: EpisodeJob
    record: list[dict[str, Any]]

    @property
    def trained(self) -> list[dict[str, Any]]:
        """The steps behind the final weights: of each step, the last one that was trained."""
        kept: dict[int, Any] = {}
        for line in (Path(self.job.root) / TRAINED).read_text().splitlines():
            entry = json.loads(line)
            kept = {step: one for step, one in kept.items() if step < entry["step"]}
            kept[entry["step"]] = entry
        return [kept[step] for step in sorted(kept)]

    @property
    def n_sampled(self) -> int:
        return sum("token" in line for line in self.record)

    @property
    def sampled_per_trained(self) -> float:
        """Tokens that were sampled for each one that was trained."""
        return self.n_sampled / (self.job.steps * BATCH_SIZE * TOKENS_PER_TICKET)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return torch.load(Path(self.job.root) / WEIGHTS)


@dataclass(frozen=True)
class Known:
    """The ids of recorded requests, and the length of the server's record, when a life begins."""

    rids: set[str]
    n_lines: int


def drive(
    root: Path,
    kills: int,
    change: Callable[[EpisodeJob], EpisodeJob] | None = None,
    share: float | None = None,
    **options: Any,
) -> Run:
    """Drive a run to its end through killed lives. ``change`` is made to the job after the first
    one. Each kill comes after a random part of the work, or after this ``share`` of the rest.
    """
    root.mkdir()
    draw = random.Random(kills)
    with FakeServer("vllm", root, token_s=0.005, of_version=False) as server:
        job = EpisodeJob(str(root), server.url, **options)
        (record,) = root.glob("vllm-*.jsonl")
        rest = job.steps * BATCH_SIZE * TOKENS_PER_TICKET
        for number in range(kills + 1):
            if number == 1 and change is not None:
                job = change(job)
            known = recorded(root, server)

            # Every life samples a share of the rest, so that it ends before the run does.
            kill = None
            if number < kills:
                n_tokens = draw.randrange(3 * rest // (2 * (kills + 1 - number)))
                if share is not None:
                    n_tokens = int(share * rest)
                kill = Kill(n_tokens, draw.uniform(0.0, 0.1), draw.randrange(job.ranks))
                rest -= n_tokens + LATE_TOKENS
            assert live(job, record, kill) == (SIGKILLED if kill else 0)
            may_drop = job.noisy or job.lr != EpisodeJob.lr or job.replay == "off"
            check_life(server, known, may_drop)
        return Run(job, server.record())


def recorded(root: Path, server: FakeServer) -> Known:
    """Read the log as the next life finds it."""
    return Known(rids_in_log(root), len(server.record()))


def rids_in_log(root: Path) -> set[str]:
    """The ids of recorded requests. Answers that lack a label may be dropped, and are left out."""
    rids = set()
    for file in log_files(root / "e" / "t" / "recover" / "episodes" / "rollouts"):
        for payload in read_records(file.path, ReadCounts()):
            head = split_payload(payload)[0]
            if head["kind"] != "answer":
                continue
            if {str(version) for version, _ in head["versions"]} <= head["labels"].keys():
                rids.add(f"ticket-{head['ticket']}-{head['key'][:8]}-{head['nth']}")
    return rids


def check_life(server: FakeServer, known: Known, may_drop: bool) -> None:
    """Compare the requests of a life with the records that it found."""
    again = Counter(rid for rid, _ in requests(server.record()[known.n_lines :]))
    assert max(again.values(), default=0) <= 1, "one life asked for an answer twice"
    twice = known.rids & again.keys()
    assert may_drop or not twice, f"{len(twice)} of {len(known.rids)} answers were sampled again"


def requests(lines: list[dict[str, Any]]) -> list[tuple[str, tuple[int, ...]]]:
    """Id and prompt of each request that reached the server."""
    found = []
    for line in lines:
        if "call" in line and line["body"].startswith("{"):
            body = json.loads(line["body"])
            if body.get("request_id", "").startswith("ticket-"):
                found.append((body["request_id"], tuple(body["token_ids"])))
    return found


class Sampled(NamedTuple):
    """A token as the server sampled it."""

    prompt: tuple[int, ...]
    position: int
    token: int
    logprob: float
    label: str


def sampled(record: list[dict[str, Any]]) -> set[Sampled]:
    """All tokens of the server's record."""
    prompts = dict(requests(record))
    label = ""
    found = set()
    for line in record:
        if "/update_weight_version" in line.get("call", ""):
            label = json.loads(line["body"])["new_version"]
        if "token" in line and line["rid"] in prompts:
            assert label.startswith(f"{line['version']}-")
            logprob = round(line["logprob"], 6)
            prompt = prompts[line["rid"]]
            found.add(Sampled(prompt, line["position"], line["token"], logprob, label))
    return found


def check_trained(run: Run, kills: int) -> None:
    """Compare the trained tokens with the server's record."""
    job = run.job
    assert [entry["step"] for entry in run.trained] == list(range(job.steps))
    numbers = [sample["number"] for entry in run.trained for sample in entry["samples"]]
    assert numbers == list(range(job.steps * BATCH_SIZE)), "a ticket was lost or repeated"

    # The label of each version in the end.
    labels = {
        version: weights_label(version_path(f"{job.root}/weights", version), version)
        for version in range(job.steps)
    }
    theirs = sampled(run.record)
    for entry in run.trained:
        for sample in entry["samples"]:
            rows = (sample[name] for name in ("input_ids", "loss_mask", "logprobs", "versions"))
            for ids, mask, logprobs, versions in zip(*rows, strict=True):
                begin = 0
                for at, token in enumerate(ids):
                    if not mask[at]:
                        begin = at + 1
                        continue
                    version = versions[at]
                    assert 0 <= entry["step"] - version <= job.ahead
                    own = Sampled(
                        tuple(ids[:begin]),
                        at - begin,
                        token,
                        round(logprobs[at], 6),
                        labels[version],
                    )
                    assert own in theirs, f"{own} was not sampled by these weights"

    orders = (Path(job.root) / EFFECTS).read_text().splitlines()
    assert max(Counter(orders).values()) == 1, "an order was made twice"
    # A kill may come between the intent and the order of each sibling in flight.
    n_missing = len(numbers) * N_SIBLINGS - len(orders)
    assert 0 <= n_missing <= kills * MAX_CONCURRENT * N_SIBLINGS


def check(
    tmp_path: Path,
    kills: int,
    change: Callable[[EpisodeJob], EpisodeJob] | None = None,
    share: float | None = None,
    **options: Any,
) -> None:
    """Kill a run whose arithmetic repeats, and compare it with an undisturbed one."""
    untouched = drive(tmp_path / "untouched", 0, **options)
    check_trained(untouched, 0)
    killed = drive(tmp_path / "killed", kills, change, share, **options)
    check_trained(killed, kills)
    check_equal(untouched, killed)
    check_ratio(killed, kills)


def check_equal(one: Run, other: Run) -> None:
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    assert one.n_sampled == one.job.steps * BATCH_SIZE * TOKENS_PER_TICKET


def check_ratio(killed: Run, kills: int) -> None:
    ratio = killed.sampled_per_trained
    print(f"{kills} kills: {ratio:.3f} tokens were sampled for each one that was trained")
    assert ratio <= 1.10


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_killed_driver_samples_no_recorded_answer_again(tmp_path: Path) -> None:
    check(tmp_path, steps=4, kills=2, ahead=2, freq_steps=3)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_rank_samples_no_recorded_answer_again(tmp_path: Path) -> None:
    check(tmp_path, steps=8, kills=6, ahead=2, freq_steps=3, ranks=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_goes_back_takes_its_answers_along(tmp_path: Path, ranks: int) -> None:
    def go_back(job: EpisodeJob) -> EpisodeJob:
        # Further starts name the same generation, and go on with what this branch has written.
        folders = (Path(job.root) / "e" / "t" / "recover").glob("global_step_*")
        older, _ = sorted(folders, key=lambda folder: int(folder.name.rpartition("_")[2]))
        return replace(job, resume_path=str(older))

    check(tmp_path, 2, go_back, share=0.5, steps=10, ahead=1, freq_steps=2, ranks=ranks)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("freq_steps", [1, 5])
@pytest.mark.parametrize("ahead", [0, 2])
def test_twelve_kills_cost_only_what_was_in_flight(
    tmp_path: Path, ahead: int, freq_steps: int
) -> None:
    check(tmp_path, steps=15, kills=12, ahead=ahead, freq_steps=freq_steps)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ahead", "freq_steps"), [(0, 5), (2, 5), (2, 1)])
def test_fifty_kills_cost_only_what_was_in_flight(
    tmp_path: Path, ahead: int, freq_steps: int
) -> None:
    check(tmp_path, steps=60, kills=50, ahead=ahead, freq_steps=freq_steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_weights_that_come_out_otherwise_drop_the_answers_of_the_lost_ones(tmp_path: Path) -> None:
    run = drive(tmp_path / "noisy", 8, steps=15, ahead=2, freq_steps=5, noisy=True)
    check_trained(run, 8)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_new_learning_rate_after_a_kill_drops_the_answers_of_the_lost_weights(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"steps": 4, "ahead": 1, "freq_steps": 10}
    run = drive(tmp_path / "run", 1, partial(replace, lr=0.02), share=0.8, **options)
    check_trained(run, 1)
    assert run.trained[-1]["stats"]["rollouts/dropped"] > 0
