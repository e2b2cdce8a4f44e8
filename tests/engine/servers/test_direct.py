"""Weights sent to servers straight from the shards: what arrives, and what a death or a hang on either side leaves."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import torch
import torch.distributed as dist

from holdfast.engine import FinetuneSpec, FSDPEngine, TrainEngineConfig, WeightUpdateMeta
from holdfast.engine.hf.buckets import WeightGatherer
from holdfast.engine.hf.versions import version_path
from holdfast.engine.servers import ServerFleet, SGLangServer, VLLMServer
from holdfast.engine.servers.api import ServerState, ServerStatus, weights_label
from holdfast.engine.servers.publish import PublishedWeights
from holdfast.utils.errors import PeerError, PublishError
from tests.engine.models import build_reference, tiny_qwen3
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.folders import publish_model
from tests.engine.servers.scripted import wait_until
from tests.helpers import run_ranks
from tests.limits import stretched
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(120)

CLIENTS = {"vllm": VLLMServer, "sglang": SGLangServer}
OPTIONS: Mapping[str, Mapping[str, Any]] = {"vllm": {"plugin": True}, "sglang": {}}
BUCKET = "/update_weights"
TIMEOUT_S = stretched(20)
N_BUCKETS = 7
SERVING, BEHIND, PAUSED, GONE = ServerState

Kinds = Sequence[str]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model of 5.4 MB in float32, which is seven buckets of one MiB."""
    model = build_reference(tiny_qwen3(tied=False, vocab_size=1024, hidden_size=256))
    return publish_model(tmp_path_factory.mktemp("base"), 0, model, probe=False)


@pytest.fixture
def start(base: str, tmp_path: Path) -> Iterator[Callable[..., FakeServer]]:
    """Start servers of a kind that serve ``base``."""
    with ExitStack() as servers:

        def start_one(kind: str, **options: Any) -> FakeServer:
            told = {**OPTIONS[kind], **options}
            return servers.enter_context(FakeServer(kind, tmp_path, dtype="float32", folder=base, **told))

        yield start_one


def make_engine(base: str) -> FSDPEngine:
    engine = FSDPEngine(TrainEngineConfig(path=base, dtype="float32", optimizer=None))
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(1, 8, 1))
    return engine


def step(engine: FSDPEngine) -> None:
    """Change the weights. The engine's version counts the calls."""
    with torch.no_grad():
        for param in engine.model.parameters():
            param.mul_(1.01)
    engine.set_version(engine.get_version() + 1)


def clients(named: Sequence[tuple[str, str]]) -> list[VLLMServer | SGLangServer]:
    return [CLIENTS[kind](url) for kind, url in named]


def meta(root: str | None, **options: Any) -> WeightUpdateMeta:
    return WeightUpdateMeta("xccl", root, timeout_s=TIMEOUT_S, weight_chunked_mem_mb=1, **options)


def tell(url: str, **faults: Any) -> None:
    httpx2.post(f"{url}/fake", json=faults).raise_for_status()


def _publish_versions(
    rank: int, world_size: int, base: str, root: str | None, named: Sequence[tuple[str, str]], count: int
) -> list[PublishedWeights]:
    engine, done = make_engine(base), list[PublishedWeights]()
    with closing(ServerFleet(clients(named), probe_interval_s=None)) as fleet:
        engine.connect_engine(fleet, meta(root))
        for _ in range(count):
            step(engine)
            done.append(engine.update_weights())
    engine.destroy()
    return done


@pytest.mark.parametrize("ranks", [2])
def test_versions_are_served_over_groups_that_are_kept(ranks: int, base: str, start: Any, tmp_path: Path) -> None:
    fakes = [start("vllm"), start("sglang")]
    named = [("vllm", fakes[0].url), ("sglang", fakes[1].url)]
    done = run_ranks(_publish_versions, ranks, base, str(tmp_path / "w"), named, 2)[0]
    for fake, kind in zip(fakes, ("vllm", "sglang"), strict=True):
        joins = [call for call in fake.calls() if call.startswith("POST /init_weight")]
        buckets = [call for call in fake.calls() if call.startswith(f"POST {BUCKET}")]
        assert len(joins) == 1 and len(buckets) == 2 * N_BUCKETS
        status = CLIENTS[kind](fake.url).status()
        assert status == ServerStatus(weights_label(done[-1].path, 2), paused=False)
        assert any("generate" in call for call in fake.calls()), "contents were compared"
    assert [report.state for report in done[-1].servers] == [SERVING] * 2


class Outcome(NamedTuple):
    """What a publication with a fault did on one rank."""

    states: list[ServerState]
    error: str | None
    seconds: float
    served_after_s: float  # seconds until the last server had confirmed
    unchanged: bool  # whether all weights are as before it


def _publish_with_a_fault(
    rank: int, world_size: int, base: str, root: str | None, named: Sequence[tuple[str, str]], fault: dict[str, Any]
) -> Outcome:
    """Publish version 1, and version 2 while the first server commits ``fault``. One server must confirm.

    The last check is a collective, which would fail if the ranks were not in step.
    """
    engine = make_engine(base)
    with closing(ServerFleet(clients(named), probe_interval_s=None)) as fleet:
        engine.connect_engine(fleet, meta(root, min_servers=1))
        step(engine)
        engine.update_weights()
        if rank == 0:
            tell(named[0][1], **fault)
        step(engine)
        before = {name: param.detach().clone() for name, param in engine.model.named_parameters()}
        error, began = None, time.monotonic()
        try:
            engine.update_weights()
        except PublishError as failure:
            error = str(failure)
        seconds = time.monotonic() - began
        unchanged = all(torch.equal(before[name], param) for name, param in engine.model.named_parameters())
        states = [report.state for report in fleet.states()]
        served_after_s = max(
            (report.seconds["total"] for report in fleet.states() if report.error is None), default=0.0
        )
        in_step = torch.ones(1)
        dist.all_reduce(in_step)
        assert in_step.item() == world_size
    engine.destroy()
    return Outcome(states, error, seconds, served_after_s, unchanged)


def _first_bucket(kind: str) -> int:
    """Number of the call with the first bucket, in an update over a group that exists."""
    return {"vllm": 4, "sglang": 3}[kind]


STRIKES = [
    (kind, does, bucket, when)
    for kind, does, bucket, when in product(CLIENTS, ("die", "stop"), (0, 3, N_BUCKETS - 1), ("before", "after"))
]
FAST_STRIKES = [("vllm", "die", 3, "before"), ("vllm", "stop", 3, "before"), ("sglang", "die", 3, "after")]


@pytest.mark.parametrize("kind, does, bucket, when", slow_but(FAST_STRIKES, STRIKES))
def test_a_server_struck_in_a_bucket_harms_no_other_and_no_rank(
    kind: str, does: str, bucket: int, when: str, base: str, start: Any, tmp_path: Path
) -> None:
    struck, other = start(kind), start("vllm")
    named, root = [(kind, struck.url), ("vllm", other.url)], str(tmp_path / "w")
    fault = {"at_call": _first_bucket(kind) + bucket, "does": does, "when": when}
    outcomes = run_ranks(_publish_with_a_fault, 2, base, root, named, fault)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert all(outcome.unchanged for outcome in outcomes)
    assert outcomes[0].states[1] is SERVING and outcomes[0].states[0] is not SERVING
    assert outcomes[0].served_after_s < TIMEOUT_S / 2, "the other server waited for a quarter of the limit at most"
    assert VLLMServer(other.url).status() == ServerStatus(weights_label(version_path(root, 2), 2), paused=False)
    struck.restart() if does == "die" else struck.wake()
    (done,) = run_ranks(_publish_versions, 1, base, root, named, 1)
    assert [report.state for report in done[0].servers] == [SERVING, SERVING]


@pytest.mark.parametrize("path", [None, "w"])
def test_without_enough_servers_all_ranks_raise_and_go_on(
    path: str | None, base: str, start: Any, tmp_path: Path
) -> None:
    fakes = [start("vllm"), start("vllm")]
    named, root = [("vllm", fake.url) for fake in fakes], path and str(tmp_path / path)
    fakes[1].tell(fail={"/init_weight_transfer_engine": 9})
    fault = {"at_call": _first_bucket("vllm") + 2, "does": "die"}
    outcomes = run_ranks(_publish_with_a_fault, 2, base, root, named, fault)
    for outcome in outcomes:
        assert outcome.error is not None and "was confirmed by 0 of 2 inference servers" in outcome.error
        assert outcome.unchanged and outcome.seconds < TIMEOUT_S / 2, "nobody reads, so nobody gathers"


def _die_in_bucket(rank: int, world_size: int, base: str, root: str | None, url: str, dying: int, number: int) -> None:
    engine = make_engine(base)
    gather = WeightGatherer.gather

    def gather_or_die(self: WeightGatherer, bucket: Any, target: Any) -> None:
        if (rank, bucket.number) == (dying, number):
            os.kill(os.getpid(), signal.SIGKILL)
        gather(self, bucket, target)

    with closing(ServerFleet(clients([("vllm", url)]), probe_interval_s=None)) as fleet:
        engine.connect_engine(fleet, meta(root))
        step(engine)
        engine.update_weights()
        WeightGatherer.gather = gather_or_die
        step(engine)
        engine.update_weights()


@pytest.mark.parametrize("dying, bucket", slow_but([(0, 3), (1, 3)], list(product((0, 1), (0, 1, 3, N_BUCKETS - 1)))))
def test_a_trainer_that_dies_in_a_bucket_leaves_a_paused_server_that_the_next_repairs(
    dying: int, bucket: int, base: str, start: Any, tmp_path: Path
) -> None:
    fake, root = start("vllm"), str(tmp_path / "w")
    with pytest.raises(AssertionError, match=r"rank \d\n(.|\n)*exit code -9"):
        run_ranks(_die_in_bucket, 2, base, root, fake.url, dying, bucket)
    wait_until(lambda: not fake.state()["in_pieces"] or fake.state()["paused"])
    server = VLLMServer(fake.url)
    if bucket < 2:
        assert not fake.state()["mixed"] or fake.state()["paused"]
    else:
        assert server.status().paused and fake.state()["mixed"]
    assert server.status().label == weights_label(version_path(root, 1), 1), "what is not complete has no label"
    (done,) = run_ranks(_publish_versions, 1, base, root, [("vllm", fake.url)], 1)
    assert done[0].servers[0].state is SERVING and not fake.state()["mixed"]


def _fail_in_bucket(rank: int, world_size: int, base: str, root: str | None, url: str) -> list[str]:
    engine, own_rows, errors = make_engine(base), WeightGatherer._own_rows, list[str]()

    def fail(self: WeightGatherer, bucket: Any, target: Any) -> Any:
        if rank == 1 and bucket.number == 3:
            raise MemoryError("no memory for the rows")
        return own_rows(self, bucket, target)

    with closing(ServerFleet(clients([("vllm", url)]), probe_interval_s=None)) as fleet:
        engine.connect_engine(fleet, meta(root))
        step(engine)
        WeightGatherer._own_rows = fail
        with pytest.raises(MemoryError if rank == 1 else PeerError, match="no memory for the rows"):
            engine.update_weights()
        errors += [str(report.error) for report in fleet.states()]
        WeightGatherer._own_rows = own_rows
        engine.update_weights()
        errors += [str(report.error) for report in fleet.states()]
    engine.destroy()
    return errors


def test_a_rank_that_fails_poisons_the_server_until_the_next_publication(base: str, start: Any, tmp_path: Path) -> None:
    fake = start("vllm")
    failed, repaired = run_ranks(_fail_in_bucket, 2, base, str(tmp_path / "w"), fake.url)[0]
    assert "the trainers failed: PeerError" in failed and "its weights are in pieces, and it stays paused" in failed
    assert repaired == "None" and not fake.state()["mixed"]
