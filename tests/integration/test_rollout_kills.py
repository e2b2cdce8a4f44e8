"""The driver of asynchronous rollouts killed at any moment, with real processes, sockets and files.

Always checked: the batch of a step has exactly the tickets of that step, each ticket is trained
once, no token is staler than allowed, and the recorded version of every token is the version that
the server wrote down.

The weights are checked to be bitwise equal to an undisturbed run if the servers answer a repeated
request with the same tokens. Samples that were unfinished in the restored generation are drawn
again, and must come out the same. There are four cases:

- `synchronous`: without off-policyness, a step is always sampled with its own version. It is enough
  that servers repeat themselves with the same weights.
- `asynchronous`: a repeated sample may meet other versions, so the fakes' tokens must not depend on
  the version.
- `versioned`: tokens depend on the version, so two runs are two samples of the same process and
  their weights are not compared.
- `seeing`: prompts have images, as files and bytes. All trajectories are compared bit by bit, with
  their pixels.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.processors import IMAGE
from tests.engine.servers.fake_images import Eyes
from tests.engine.servers.fakes import FakeServer
from tests.integration.rollout_job import (
    BATCH_SIZE,
    N_SAMPLES,
    TRAINED,
    WEIGHTS,
    Job,
    Kill,
    live,
    make_loader,
    trained,
)

SIGKILLED = -9


@dataclass(frozen=True)
class Kind:
    """Kind of a run (see the module)."""

    ahead: int
    versioned: bool
    picky: bool = False
    sees: bool = False


KINDS = {
    "synchronous": Kind(ahead=0, versioned=True),
    "asynchronous": Kind(ahead=2, versioned=False),
    "picky": Kind(ahead=2, versioned=False, picky=True),
    "versioned": Kind(ahead=2, versioned=True),
    "seeing": Kind(ahead=2, versioned=False, sees=True),
}


def run(root: Path, kind: Kind, steps: int, kills: int = 0) -> list[dict[str, Any]]:
    """Drive a run to its end through ``kills`` killed lives. Returns the servers' records."""
    root.mkdir()
    draw = random.Random(kills)
    options: dict[str, Any] = {"token_s": 0.01, "of_version": kind.versioned, "eyes": Eyes(IMAGE)}
    with FakeServer("vllm", root, **options) as one, FakeServer("vllm", root, **options) as other:
        job = Job(str(root), [one.url, other.url], steps, kind.ahead, kind.picky, kind.sees)
        for _ in range(kills):
            kill = Kill(draw.choice([-1, 1, 2, 2, 3]), draw.uniform(0.0, 1.5))
            assert live(job, kill) == SIGKILLED
        assert live(job) == 0
        return one.tokens() + other.tokens()


def assert_exact(root: Path, kind: Kind, steps: int, tokens: list[dict[str, Any]]) -> None:
    """Check the properties of every run."""
    found = trained(root)
    assert [entry["step"] for entry in found] == list(range(steps))
    numbers = [sample["number"] for entry in found for sample in entry["samples"]]
    rejected = [number for entry in found for number in entry["rejected"]]
    assert len(numbers) == steps * BATCH_SIZE and len(set(numbers)) == len(numbers)
    assert sorted(numbers + rejected) == list(range(len(numbers) + len(rejected))), (
        "a ticket was lost or repeated"
    )
    if not kind.picky:
        batches = make_loader().index_batches()
        order = [next(batches) for _ in range(steps)]
        assert [[sample["index"] for sample in entry["samples"]] for entry in found] == order
        assert numbers == list(range(steps * BATCH_SIZE)) and rejected == []
    keys = ("position", "token", "version")
    sampled = {
        (_ticket(token["rid"]), *(token[key] for key in keys), round(token["logprob"], 6))
        for token in tokens
        if not token["mixed"]
    }
    staleness = []
    for entry in found:
        for sample in entry["samples"]:
            assert sample["step"] == entry["step"]
            for n in range(N_SAMPLES):
                rows = [sample[name][n] for name in ("input_ids", "logprobs", "versions")]
                for position, (token, logprob, version) in enumerate(zip(*rows, strict=True)):
                    own = (sample["number"], position, token, version, round(logprob, 6))
                    assert own in sampled
                    staleness.append(entry["step"] - version)
    assert min(staleness) >= 0 and max(staleness) <= kind.ahead
    assert max(entry["stats"]["rollouts/staleness_max"] for entry in found) == max(staleness)


def _ticket(rid: str) -> int:
    return int(rid.split("-")[1])


def n_resumed(root: Path) -> int:
    """Number of lives that resumed after step 0 and trained."""
    lines = [json.loads(line) for line in (root / TRAINED).read_text().splitlines()]
    first = {line["life"]: line["step"] for line in reversed(lines)}
    return sum(step > 0 for step in first.values())


def tickets(root: Path) -> list[list[int]]:
    """Ticket numbers by step."""
    return [[sample["number"] for sample in entry["samples"]] for entry in trained(root)]


def trajectories(root: Path) -> list[list[str]]:
    """Digests of the trajectories by step."""
    return [[sample["whole"] for sample in entry["samples"]] for entry in trained(root)]


def check(tmp_path: Path, name: str, steps: int, kills: int) -> None:
    kind = KINDS[name]
    tokens = run(tmp_path / "untouched", kind, steps)
    assert_exact(tmp_path / "untouched", kind, steps, tokens)
    tokens = run(tmp_path / "killed", kind, steps, kills)
    assert_exact(tmp_path / "killed", kind, steps, tokens)
    assert n_resumed(tmp_path / "killed") > kills // 3, (
        "most lives began anew: nothing of a ledger was restored"
    )
    one, other = (torch.load(tmp_path / life / WEIGHTS) for life in ("untouched", "killed"))
    if name != "versioned":
        assert all(torch.equal(one[key], other[key]) for key in one), (
            "the weights are not those of the untouched run"
        )
        assert tickets(tmp_path / "untouched") == tickets(tmp_path / "killed")
    if kind.sees:  # a ticket may be sampled again by other weights, whose tokens are the same here
        assert trajectories(tmp_path / "untouched") == trajectories(tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_killed_driver_trains_every_ticket_once_in_its_step(tmp_path: Path) -> None:
    check(tmp_path, "picky", steps=14, kills=3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_driver_trains_on_the_same_pixels(tmp_path: Path) -> None:
    check(tmp_path, "seeing", steps=40, kills=10)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(KINDS.keys() - {"seeing"}))
def test_fifty_kills_at_random_moments_lose_and_repeat_nothing(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, steps=180, kills=50)
