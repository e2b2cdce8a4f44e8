"""Weights sent to servers straight from the shards, and deaths, hangs and errors on either side."""

import ctypes
import gc
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import torch
import torch.distributed as dist

from holdfast.engine import (
    FinetuneSpec,
    FSDPEngine,
    TrainEngineConfig,
    WeightUpdateMeta,
    publish_weights,
)
from holdfast.engine.hf.buckets import WeightGatherer
from holdfast.engine.hf.versions import version_path
from holdfast.engine.servers import ServerFleet, SGLangServer, VLLMServer, colocated, nccl
from holdfast.engine.servers.api import ServerState, ServerStatus, weights_label
from holdfast.engine.servers.groups import GlooGroup
from holdfast.engine.servers.publish import PublishedWeights
from holdfast.engine.servers.stream import FilledBucket
from holdfast.utils.errors import ConfigError, PeerError, PublishError
from tests.engine.hf.test_shard_ranges import _peak
from tests.engine.models import build_reference, tiny_qwen3
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.folders import publish_model, tiny_model
from tests.engine.servers.scripted import PlainServer
from tests.helpers import run_ranks
from tests.limits import stretched, wait_until
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(120)

CLIENTS = {"vllm": VLLMServer, "sglang": SGLangServer}
OPTIONS: Mapping[str, Mapping[str, Any]] = {"vllm": {"plugin": True}, "sglang": {}}
BUCKET = "/update_weights"
TIMEOUT_S = stretched(20)
N_BUCKETS = 7
SERVING, BEHIND, PAUSED = ServerState.SERVING, ServerState.BEHIND, ServerState.PAUSED

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
            return servers.enter_context(
                FakeServer(kind, tmp_path, dtype="float32", folder=base, **told)
            )

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
    return WeightUpdateMeta(
        "xccl", root, **{"timeout_s": TIMEOUT_S, "weight_chunked_mem_mb": 1, **options}
    )


def tell(url: str, **faults: Any) -> None:
    httpx2.post(f"{url}/fake", json=faults).raise_for_status()


def _publish_versions(
    rank: int,
    world_size: int,
    base: str,
    root: str | None,
    named: Sequence[tuple[str, str]],
    count: int,
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
def test_versions_are_served_over_groups_that_are_kept(
    ranks: int, base: str, start: Any, tmp_path: Path
) -> None:
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
    """Result of a publication with a fault, on one rank."""

    states: list[ServerState]
    error: str | None
    seconds: float
    served_after_s: float  # seconds until the last server had confirmed
    unchanged: bool  # whether all weights are as before it


def _publish_with_a_fault(
    rank: int,
    world_size: int,
    base: str,
    root: str | None,
    named: Sequence[tuple[str, str]],
    fault: dict[str, Any],
) -> Outcome:
    """Publish version 1, and version 2 while the first server commits ``fault``. One server must
    confirm.

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
        unchanged = all(
            torch.equal(before[name], param) for name, param in engine.model.named_parameters()
        )
        states = [report.state for report in fleet.states()]
        served_after_s = max(
            (report.seconds["total"] for report in fleet.states() if report.error is None),
            default=0.0,
        )
        in_step = torch.ones(1)
        dist.all_reduce(in_step)
        assert in_step.item() == world_size
    engine.destroy()
    return Outcome(states, error, seconds, served_after_s, unchanged)


def _first_bucket(kind: str) -> int:
    """Number of the call with the first bucket, in an update over a group that exists."""
    return {"vllm": 6, "sglang": 5}[kind]


STRIKES = [
    (kind, does, bucket, when)
    for kind, does, bucket, when in product(
        CLIENTS, ("die", "stop"), (0, 3, N_BUCKETS - 1), ("before", "after")
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("kind, does, bucket, when", STRIKES)
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
    assert outcomes[0].served_after_s < TIMEOUT_S / 2, (
        "the other server waited for a quarter of the limit at most"
    )
    assert VLLMServer(other.url).status() == ServerStatus(
        weights_label(version_path(root, 2), 2), paused=False
    )
    struck.restart() if does == "die" else struck.wake()
    (done,) = run_ranks(_publish_versions, 1, base, root, named, 1)
    assert [report.state for report in done[0].servers] == [SERVING, SERVING]


@pytest.mark.slow
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
        assert (
            outcome.error is not None
            and "was confirmed by 0 of 2 inference servers" in outcome.error
        )
        assert outcome.unchanged and outcome.seconds < TIMEOUT_S / 2, (
            "nobody reads, so nobody gathers"
        )


def _die_in_bucket(
    rank: int,
    world_size: int,
    base: str,
    root: str | None,
    named: tuple[str, str],
    dying: int,
    number: int,
) -> None:
    engine = make_engine(base)
    gather = WeightGatherer.gather

    def gather_or_die(self: WeightGatherer, bucket: Any, target: Any) -> None:
        if (rank, bucket.number) == (dying, number):
            os.kill(os.getpid(), signal.SIGKILL)
        gather(self, bucket, target)

    with closing(ServerFleet(clients([named]), probe_interval_s=None)) as fleet:
        engine.connect_engine(fleet, meta(root))
        step(engine)
        engine.update_weights()
        WeightGatherer.gather = gather_or_die
        step(engine)
        engine.update_weights()


DEATHS = list(product(CLIENTS, (0, 1), (0, 1, 3, N_BUCKETS - 1)))


@pytest.mark.slow
@pytest.mark.parametrize("kind, dying, bucket", DEATHS)
def test_a_trainer_that_dies_in_a_bucket_leaves_a_paused_server_that_the_next_repairs(
    kind: str, dying: int, bucket: int, base: str, start: Any, tmp_path: Path
) -> None:
    fake, root = start(kind), str(tmp_path / "w")
    with pytest.raises(AssertionError, match=r"rank \d\n(.|\n)*exit code -9"):
        run_ranks(_die_in_bucket, 2, base, root, (kind, fake.url), dying, bucket)
    state = fake.state()
    assert state["paused"] if bucket > 1 else state["paused"] or not state["mixed"], (
        "it could answer with a mixture"
    )
    assert state["label"] == weights_label(version_path(root, 1), 1), (
        "what is not complete has no label"
    )
    (done,) = run_ranks(_publish_versions, 1, base, root, [(kind, fake.url)], 1)
    assert done[0].servers[0].state is SERVING and not fake.state()["mixed"]


def _fail_in_bucket(
    rank: int, world_size: int, base: str, root: str | None, named: tuple[str, str]
) -> list[str]:
    engine, own_rows, errors = make_engine(base), WeightGatherer._own_rows, list[str]()

    def fail(self: WeightGatherer, bucket: Any, target: Any) -> Any:
        if rank == 1 and bucket.number == 3:
            raise MemoryError("no memory for the rows")
        return own_rows(self, bucket, target)

    with closing(ServerFleet(clients([named]), probe_interval_s=None)) as fleet:
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


@pytest.mark.parametrize("kind", slow_but(["vllm"], CLIENTS))
def test_a_rank_that_fails_poisons_the_server_until_the_next_publication(
    kind: str, base: str, start: Any, tmp_path: Path
) -> None:
    fake = start(kind)
    failed, repaired = run_ranks(_fail_in_bucket, 2, base, str(tmp_path / "w"), (kind, fake.url))[0]
    assert (
        "the trainers failed: PeerError" in failed
        and "its weights are in pieces, and it stays paused" in failed
    )
    assert repaired == "None" and not fake.state()["mixed"]


def _labels(
    rank: int, world_size: int, base: str, root: str, url: str
) -> tuple[list[str | None], bool]:
    """Labels of the same weights sent with and without a folder, and written. Whether the folder is
    temporary.
    """
    engine, found = make_engine(base), list[str | None]()
    fleet = ServerFleet(clients([("vllm", url)]), probe_interval_s=None)
    with closing(fleet):
        for how in (meta(None), meta(root), WeightUpdateMeta("disk", root, timeout_s=TIMEOUT_S)):
            step(engine) if not found else engine.set_version(1)
            path = engine_update(engine, fleet, how).path
            found += [report.label for report in fleet.states()]
            if rank == 0 and how.path is None:
                assert not list(path.glob("*.safetensors")) and (path / "config.json").exists()
                scratch = path
    engine.connect_engine([], meta(None))
    del fleet
    gc.collect()
    gone = rank != 0 or not scratch.exists()
    engine.destroy()
    return found, gone


def engine_update(
    engine: FSDPEngine, fleet: ServerFleet, how: WeightUpdateMeta
) -> PublishedWeights:
    engine.connect_engine(fleet, how)
    return engine.update_weights()


def test_the_label_is_that_of_the_content_whatever_carried_it(
    base: str, start: Any, tmp_path: Path
) -> None:
    fake = start("vllm")
    labels, gone = run_ranks(_labels, 2, base, str(tmp_path / "w"), fake.url)[0]
    assert len(labels) == 3 and len(set(labels)) == 1 and labels[0] is not None
    assert gone, "the temporary folder goes with the fleet"


def _restart_between(
    rank: int, world_size: int, base: str, root: str | None, url: str, pipe: str
) -> list[str]:
    engine, states = make_engine(base), list[str]()
    with closing(ServerFleet(clients([("vllm", url)]), probe_interval_s=0.1)) as fleet:
        engine.connect_engine(fleet, meta(root))
        step(engine)
        engine.update_weights()
        Path(pipe).touch()
        wait_until(lambda: fleet.states()[0].state is not SERVING)
        if root is not None:
            assert fleet.wait_serving(1, stretched(20))
        else:
            wait_until(lambda: fleet.states()[0].state is BEHIND)
            time.sleep(0.5)
        states.append(fleet.states()[0].state)
        step(engine)
        engine.update_weights()
        states.append(fleet.states()[0].state)
    engine.destroy()
    return states


@pytest.mark.slow
@pytest.mark.parametrize("path", ["w", None])
def test_a_restarted_server_loads_the_folder_or_waits_for_the_next_version(
    path: str | None, base: str, start: Any, tmp_path: Path
) -> None:
    fake, root = start("vllm"), path and str(tmp_path / path)

    def restart() -> None:
        wait_until((tmp_path / "published").exists)
        fake.restart()

    with ThreadPoolExecutor() as pool:
        restarted = pool.submit(restart)
        (states,) = run_ranks(
            _restart_between, 1, base, root, fake.url, str(tmp_path / "published")
        )
        restarted.result()
    assert states == [SERVING if path else BEHIND, SERVING]
    joins = [call for call in fake.calls() if call.startswith("POST /init_weight")]
    assert len(joins) == 2, "the group of the server before the restart was used"


class NcclOverGloo(GlooGroup):
    """`NcclGroup` for servers without GPUs. A fake server also reads ``timeout_s``."""

    def __init__(self, url: str, workers: int, limit_s: float, largest_bytes: int) -> None:
        super().__init__(url, workers, limit_s)
        self._packing = {
            "packed": True,
            "packed_buffer_size_bytes": largest_bytes,
            "packed_num_buffers": 1,
        }
        self._packing |= {"timeout_s": limit_s}

    @property
    def init_info(self) -> dict[str, Any]:
        return super().init_info | self._packing


def _publish_over_nccl(
    rank: int,
    world_size: int,
    base: str,
    root: str | None,
    url: str,
    faults: Sequence[dict[str, Any]],
) -> list[str]:
    """Publish a version for each of ``faults``, which the server commits meanwhile. Returns the
    errors.
    """
    nccl.NcclGroup = partial(NcclOverGloo, url)  # type: ignore[assignment, misc]
    engine, errors = make_engine(base), list[str]()
    with closing(ServerFleet([VLLMServer(url, transfer="nccl")], probe_interval_s=None)) as fleet:
        engine.connect_engine(fleet, meta(root))
        for fault in faults:
            step(engine)
            if rank == 0:
                tell(url, **fault)
            try:
                engine.update_weights()
                errors.append("")
            except PublishError as error:
                errors.append(str(error))
    engine.destroy()
    return errors


@pytest.mark.slow
def test_vllm_packs_and_loads_the_buckets_of_its_own_backend(
    base: str, start: Any, tmp_path: Path
) -> None:
    fake = start("vllm", plugin=False, nccl=True)
    faults = [{}, {"fail": {BUCKET: 1}}, {}]
    errors = run_ranks(_publish_over_nccl, 2, base, None, fake.url, faults)[0]
    assert not errors[0] and not errors[2]
    assert "its weights are in pieces, and it stays paused" in errors[1]
    (update,) = {
        json.loads(body)["update_info"].keys() == NCCL_INFO for body in bodies(fake, BUCKET)
    }
    assert update, "vLLM refuses other fields"
    calls = [call for call in fake.calls() if "weight_update" in call]
    closes_the_open_one = ("start", "finish", "start", "finish")
    assert calls == [
        f"POST /{name}_weight_update" for name in ("start", "finish", "start", *closes_the_open_one)
    ]


def bodies(fake: FakeServer, path: str) -> list[str]:
    return [line["body"] for line in fake.record() if line.get("call") == f"POST {path}"]


NCCL_INFO = {"names", "dtype_names", "shapes"}


def test_nccl_without_a_gpu_is_refused_before_vllm_is_paused(base: str, start: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    fake = start("vllm", plugin=False, nccl=True)
    with pytest.raises(
        AssertionError, match="rank 0 has no GPU, or a torch without NCCL; use the backend"
    ):
        run_ranks(_publish_to, 1, base, fake.url, "nccl")
    assert not any("pause?" in call for call in fake.calls())


def _publish_to(rank: int, world_size: int, base: str, url: str, transfer: str | None) -> None:
    engine = make_engine(base)
    with closing(ServerFleet([VLLMServer(url, transfer=transfer)], probe_interval_s=None)) as fleet:
        engine_update(engine, fleet, meta(None))


@pytest.mark.parametrize("version", slow_but(["0.31.2"], ["0.31.2", "0.1.dev1+g0", "unknown"]))
def test_an_old_vllm_is_refused_before_it_is_paused(version: str, base: str, start: Any) -> None:
    fake = start("vllm", plugin=False, nccl=True, version=version)
    (error,) = run_ranks(_publish_over_nccl, 1, base, None, fake.url, [{}])[0]
    assert (
        f"it is vLLM {version}, whose 'nccl' backend cannot be joined from here; expected "
        "0.32 or newer"
    ) in error
    assert not any("pause?" in call for call in fake.calls())


def test_workers_that_are_apart_are_refused_before_sglang_is_paused(
    base: str, start: Any, tmp_path: Path
) -> None:
    fake = start("sglang", dp_size=2)
    with pytest.raises(
        AssertionError, match=r"it was started with {'dp_size': 2}, and weights are"
    ):
        run_ranks(_publish_versions, 1, base, None, [("sglang", fake.url)], 1)
    assert not fake.state()["paused"]


def _send_changed(
    rank: int, world_size: int, base: str, url: str, bucket: int, **fault_before: Any
) -> tuple[str, bool]:
    """Change a byte of a bucket after its digest was computed. Returns the error, and whether the
    server is paused. With ``fault_before``, the server fails in a publication before.
    """
    engine, send, sent = make_engine(base), GlooGroup.send, [0]

    def change(self: GlooGroup, data: torch.Tensor) -> None:
        if sent[0] == bucket:
            data[0] ^= 1
        sent[0] += 1
        send(self, data)

    with closing(ServerFleet(clients([("vllm", url)]), probe_interval_s=None)) as fleet:
        engine.connect_engine(fleet, meta(None))
        if fault_before:
            tell(url, **fault_before)
            step(engine)
            with pytest.raises(PublishError, match="told to fail"):
                engine.update_weights()
            tell(url)
        step(engine)
        GlooGroup.send = change
        digest = FilledBucket.digest
        FilledBucket.digest = property(lambda self: digest.func(self))  # type: ignore[assignment]
        with pytest.raises(PublishError) as caught:
            engine.update_weights()
        paused = fleet.states()[0].state is PAUSED
    engine.destroy()
    return str(caught.value), paused


@pytest.mark.parametrize("bucket", slow_but([2], [0, 2]))
def test_tensors_that_arrive_changed_are_refused(bucket: int, base: str, start: Any) -> None:
    fake = start("vllm")
    ((error, paused),) = run_ranks(_send_changed, 1, base, fake.url, bucket)
    assert "the tensors that arrived have digest xxh3_128:" in error
    assert ("it goes on with the weights it has" in error) == (bucket == 0) == (not paused)
    assert fake.state()["mixed"] == paused


def test_a_server_left_paused_with_whole_weights_is_not_resumed_by_a_refused_bucket(
    base: str, start: Any
) -> None:
    fake = start("vllm")
    before = {"fail": {"/update_weight_version": 1}}
    send_changed = partial(_send_changed, **before)
    ((error, paused),) = run_ranks(send_changed, 1, base, fake.url, 0)
    assert "it stays paused as before" in error and paused
    assert fake.state()["paused"] and not fake.state()["mixed"]


def test_wrong_settings_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="type 'disk' needs a path"):
        WeightUpdateMeta("disk")
    with pytest.raises(ConfigError, match="weight_chunked_mem_mb"):
        WeightUpdateMeta("xccl", weight_chunked_mem_mb=0)
    with pytest.raises(ConfigError, match=r"type.*nccl"):
        WeightUpdateMeta("nccl", str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"inference server plain, a PlainServer, cannot be sent weights"
    ):
        publish_weights(tiny_model(), meta(str(tmp_path / "w")), 1, [PlainServer()])
    with pytest.raises(ConfigError, match="the servers of rank 0, which has none"):
        publish_weights(tiny_model(), meta(str(tmp_path / "w")), 1, [])
    assert not (tmp_path / "w").exists()
    with pytest.raises(ConfigError, match="transfer"):
        VLLMServer("http://127.0.0.1:1", transfer="gloo")


class _Hanging(PlainServer):
    def update_weights_from_distributed(self, path: str, version: int, buckets: Any) -> int:
        self.began.set()
        self.go.wait()
        return version


@pytest.mark.timeout(60)
def test_an_interrupt_waits_for_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = _Hanging()
    server.go.clear()

    def interrupted(*args: Any) -> None:
        assert server.began.wait(stretched(20))
        raise KeyboardInterrupt

    monkeypatch.setattr(WeightGatherer, "gather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publish_weights(tiny_model(), meta(None, timeout_s=600.0), 1, [server])
    server.go.set()


def _memory(rank: int, world_size: int, base: str, url: str) -> tuple[float, float]:
    """Peak growth of memory in the second of two publications, and bytes of a bucket."""
    engine = make_engine(base)
    with closing(ServerFleet(clients([("vllm", url)]), probe_interval_s=None)) as fleet:
        engine.connect_engine(fleet, meta(None, weight_chunked_mem_mb=8))
        step(engine)
        engine.update_weights()
        step(engine)
        how, group = meta(None, weight_chunked_mem_mb=8), engine.control_group
        ctypes.CDLL("libc.so.6").malloc_trim(
            0
        )  # else the peak is hidden in memory that was freed before
        with _peak() as peak:  # without the forward of the probe
            publish_weights(engine.model, how, 2, fleet, group)
    engine.destroy()
    return peak[0], 8 << 20


@pytest.mark.slow
def test_memory_is_two_buckets_on_rank_0_and_a_share_on_the_others(tmp_path: Path) -> None:
    config = tiny_qwen3(tied=False, vocab_size=2048, hidden_size=1024, layers=6)
    base = publish_model(tmp_path / "base", 0, build_reference(config), probe=False)
    weights = Path(base, "model.safetensors").stat().st_size
    with FakeServer("vllm", tmp_path, plugin=True, dtype="float32", folder=base) as fake:
        (first, bucket), (other, _) = run_ranks(_memory, 2, base, fake.url)
    assert weights > 12 * bucket
    print(
        f"{weights / 1e6:.0f} MB of weights, buckets of {bucket / 1e6:.1f} MB: {first / 1e6:.1f}, "
        f"{other / 1e6:.1f}"
    )
    assert first < 2 * bucket + 6e6 and other < bucket / 2 + 6e6


def _send_to_sleepers(
    rank: int, world_size: int, base: str, named: Sequence[tuple[str, str]], level: int
) -> list[PublishedWeights]:
    engine, done = make_engine(base), list[PublishedWeights]()
    with closing(ServerFleet(clients(named), probe_interval_s=None)) as fleet:
        engine.connect_engine(fleet, meta(None))
        for _ in range(2):
            step(engine)
            with colocated(engine, fleet, level).rollout() as published:
                done.append(published)
    engine.destroy()
    return done


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_servers_that_sleep_wake_up_and_receive_weights(level: int, base: str, start: Any) -> None:
    fakes = {kind: start(kind) for kind in CLIENTS}
    named = [(kind, fake.url) for kind, fake in fakes.items()]
    done = run_ranks(_send_to_sleepers, 2, base, named, level)[0]
    assert [[report.state for report in published.servers] for published in done] == [
        [SERVING] * 2
    ] * 2
    assert all({"kv_cache", "weights"} <= set(fake.state()["asleep"]) for fake in fakes.values())
    calls = fakes["sglang"].calls()
    joins, leaves = (
        calls.count(f"POST /{name}_weights_update_group") for name in ("init", "destroy")
    )
    assert joins - leaves == 1, "SGLang keeps groups until they are destroyed"


def _wake_without_a_folder(
    rank: int, world_size: int, base: str, named: Sequence[tuple[str, str]], other: str
) -> list[list[ServerState]]:
    """States after the servers woke up, later, and after something else was published to them while
    they slept.
    """
    engine, found = make_engine(base), list[list[ServerState]]()
    for strange in (False, True):
        interval_s = (
            None if strange else 0.1
        )  # a prober would command the servers while the other job does
        with closing(ServerFleet(clients(named), probe_interval_s=interval_s)) as fleet:
            engine.connect_engine(fleet, meta(None))
            step(engine)
            engine.update_weights()
            fleet.sleep(TIMEOUT_S)
            if strange:
                for server in clients(named):
                    server.update_weights_from_disk(other, 0)
                    server.sleep()
            found.append([report.state for report in fleet.wake_up(timeout_s=TIMEOUT_S)])
            time.sleep(0.5)
            found.append([report.state for report in fleet.states()])
    engine.destroy()
    return found


@pytest.mark.slow
def test_weights_without_a_folder_are_served_after_a_sleep_that_kept_them(
    base: str, start: Any
) -> None:
    fakes = {"vllm": start("vllm"), "sglang": start("sglang", cpu_backup=True)}
    named = [(kind, fake.url) for kind, fake in fakes.items()]
    (found,) = run_ranks(_wake_without_a_folder, 1, base, named, base)
    assert found == [[SERVING] * 2] * 2 + [[BEHIND] * 2] * 2


def _fail_at_the_end(rank: int, world_size: int, base: str, url: str) -> ServerStatus:
    engine, (server,) = make_engine(base), clients([("sglang", url)])
    with closing(ServerFleet([server], probe_interval_s=None)) as fleet:
        engine.connect_engine(fleet, meta(None))
        step(engine)
        engine.update_weights()
        fleet.sleep(TIMEOUT_S)
        tell(url, fail={"/end_weight_update": 1})
        with pytest.raises(PublishError), colocated(engine, fleet).rollout():
            raise AssertionError("entered")
        status = server.status()
        with colocated(engine, fleet).rollout():
            assert fleet.serving() == [server]
    engine.destroy()
    return status


def test_sglang_has_no_weights_until_a_session_has_ended(base: str, start: Any) -> None:
    fake = start("sglang", cpu_backup=True)
    (status,) = run_ranks(_fail_at_the_end, 1, base, fake.url)
    assert status == ServerStatus(None, paused=True, asleep=("weights", "kv_cache"))
