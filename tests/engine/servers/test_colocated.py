"""Turns of a trainer and its servers on the same GPUs: exact weights, no error half-way, and kills
at every call.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine import FSDPEngine, OptimizerConfig, WeightUpdateMeta
from holdfast.engine.hf import deltas
from holdfast.engine.hf.versions import holds_delta_alone, version_path
from holdfast.engine.servers import ServerFleet, SGLangServer, VLLMServer, colocated
from holdfast.engine.servers.api import GenerationHyperparameters, ModelRequest, ServerState
from holdfast.engine.servers.http import Calls
from holdfast.utils.distributed import rank_zero_decides
from holdfast.utils.errors import ConfigError, PeerError, PublishError, ServerError
from holdfast.utils.files import walk_files
from holdfast.utils.manifest import file_entries, write_manifest
from holdfast.utils.rng import seed_rng
from tests.engine.hf.test_deltas import _allow_any_size
from tests.engine.lora.engines import train
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.faulty_mirror import FaultyMirror
from tests.engine.staging.test_offload import contents, make_engine, same, values_of
from tests.helpers import run_ranks
from tests.limits import stretched
from tests.recover.runs import Job, make_handler, newest, step_info
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(180)

LIMIT_S = stretched(30)
CLIENTS: dict[str, Any] = {"vllm": VLLMServer, "sglang": SGLangServer}
BOTH = frozenset({"weights", "optimizer"})


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A model folder in float32, with the manifest that a fake with adapters reads."""
    folder = tmp_path / "base"
    write_model_folder(folder, tiny_qwen3(tied=False, vocab_size=64))
    write_manifest(folder, file_entries(folder, list(walk_files(folder))), {"weight_version": -1})
    return str(folder)


def make_fleet(kind: str, urls: list[str], **options: Any) -> ServerFleet[Any]:
    return ServerFleet([CLIENTS[kind](url, timeout_s=LIMIT_S) for url in urls], **options)


def ask(server: Any, number: int) -> Any:
    request = ModelRequest(
        [number + 1, 2, 3], GenerationHyperparameters(max_new_tokens=4), seed=number
    )
    return asyncio.run(server.agenerate(request))


def states(fleet: ServerFleet[Any]) -> set[ServerState]:
    return {report.state for report in fleet.states()}


def _takes_turns(
    rank: int, world_size: int, base: str, kind: str, urls: list[str], root: Path, mirror: Any
) -> None:
    lora = {"use_lora": True, "lora_rank": 4} if kind == "adapter" else {}
    meta = "adapter" if kind == "adapter" else "disk"
    fleet = ServerFleet(
        [CLIENTS.get(kind, VLLMServer)(url, timeout_s=LIMIT_S, mirror=mirror) for url in urls]
    )
    engine, twin = make_engine(base, **lora), make_engine(base, **lora)
    deltas._MOST_OF_FULL = (
        1000.0  # in this process alone: whatever changed, the mirror gets only that
    )
    engine.connect_engine(
        fleet, WeightUpdateMeta(meta, str(root / "turns"), delta=kind == "mirror")
    )
    twin.connect_engine([], WeightUpdateMeta(meta, str(root / "twin")))
    if rank == 0:
        fleet.sleep()
    for number, level in ((1, 1), (2, 1), (3, 1 if lora else 2)):
        engine.set_version(number)
        twin.set_version(number)
        twin.update_weights()
        with colocated(engine, fleet, level).rollout() as published:
            assert engine.offloaded == BOTH and published.version == number
            if rank == 0:
                assert states(fleet) == {ServerState.SERVING} and len(fleet.serving()) == len(urls)
                assert all(
                    ask(server, number).output_versions == [number] * 4
                    for server in fleet.serving()
                )
        assert engine.offloaded == frozenset()
        assert rank != 0 or (states(fleet) == {ServerState.ASLEEP} and fleet.serving() == [])
        assert train(engine, 1) == train(twin, 1)
        assert same(values_of(engine), values_of(twin))
    if rank == 0:
        for number in (2, 3):
            assert holds_delta_alone(version_path(root / "turns", number)) == (kind == "mirror")
            place = "local" if kind == "mirror" else "turns"
            ours, theirs = (
                contents(version_path(root / folder, number)) for folder in (place, "twin")
            )
            assert {name for name in ours if not name.startswith("delta/")} == theirs.keys()
            assert [
                name for name in theirs if ours[name] != theirs[name] and name != "manifest.json"
            ] == []
    fleet.close()
    engine.destroy()


@pytest.mark.parametrize("kind", slow_but([], ["vllm", "mirror", "sglang", "adapter"]))
def test_turns_change_no_bit_of_the_trainer_and_publish_its_weights(
    kind: str, base: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"dtype": "float32"}
    if kind == "adapter":
        options |= {"lora": True, "folder": base}
    server = "sglang" if kind == "sglang" else "vllm"
    with (
        FakeServer(server, tmp_path, **options) as one,
        FakeServer(server, tmp_path, **options) as other,
        FaultyMirror(tmp_path / "turns", tmp_path / "local") as mirror,
    ):
        url = mirror.url if kind == "mirror" else None
        run_ranks(_takes_turns, 2, base, kind, [one.url, other.url], tmp_path, url)
        for fake in (one, other):
            assert {"weights", "kv_cache"} <= set(fake.state()["asleep"])
            assert not any(token["mixed"] for token in fake.tokens())


def _publishes_while_away(
    rank: int, world_size: int, base: str, way: str, urls: list[str], root: Path
) -> None:
    """An engine that is offloaded publishes to one server, a twin that stays to the other."""
    _allow_any_size()
    engine, twin = (make_engine(base, optimizer=OptimizerConfig(lr=1e-6)) for _ in range(2))
    fleets = [make_fleet("vllm", [url], probe_interval_s=None) for url in urls] or [
        make_fleet("vllm", [])
    ] * 2
    for each, fleet, place in ((engine, fleets[0], "away"), (twin, fleets[1], "here")):
        meta = WeightUpdateMeta(
            "xccl" if way == "xccl" else "disk", str(root / place), keep=3, timeout_s=LIMIT_S
        )
        each.connect_engine(
            fleet, replace(meta, delta=way == "delta", dtype="bfloat16" if way == "delta" else None)
        )
    for number in (1, 2, 3):
        for each in (engine, twin):
            train(each, number)
            each.set_version(number)
        engine.offload()
        figures = engine.update_weights().figures
        twin.update_weights()
        assert figures.get("delta", False) == (way == "delta" and number > 1)
        if rank == 0:
            away, here = (
                contents(version_path(root / place, number)) for place in ("away", "here")
            )
            assert away.keys() == here.keys()
            assert [
                name
                for name in here
                if away[name] != here[name] and Path(name).name != "manifest.json"
            ] == []
            labels = {fleet.states()[0].label for fleet in fleets if fleet.states()}
            assert way == "delta" or (len(labels) == 1 and None not in labels), (
                "the digest of all files"
            )
        engine.onload()
    assert same(values_of(engine), values_of(twin))
    engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["delta", "xccl"])
def test_an_offloaded_engine_publishes_the_bytes_of_one_that_is_not(
    way: str, base: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"dtype": "float32", "plugin": True, "folder": base}
    with (
        FakeServer("vllm", tmp_path, **options) as one,
        FakeServer("vllm", tmp_path, **options) as other,
    ):
        urls = [one.url, other.url] if way == "xccl" else []
        run_ranks(_publishes_while_away, 2, base, way, urls, tmp_path / "weights")


def _fails(rank: int, world_size: int, base: str, fakes: list[FakeServer], root: Path) -> None:
    fleet = make_fleet("vllm", [fake.url for fake in fakes], probe_interval_s=None)
    engine = make_engine(base)
    meta = WeightUpdateMeta("disk", str(root / "w"), timeout_s=LIMIT_S)
    other_fleet = pytest.raises(
        ConfigError, match="this fleet is not the one that the engine publishes to"
    )
    with other_fleet, colocated(engine, fleet).rollout():
        raise AssertionError("entered")
    with pytest.raises(ConfigError, match="'level' is 0"):
        colocated(engine, fleet, 0)
    engine.connect_engine(fleet, meta)
    changes = replace(meta, delta=True)
    with (
        pytest.raises(ConfigError, match="has no mirror"),
        colocated(engine, fleet).rollout(changes),
    ):
        raise AssertionError("entered")
    assert engine.offloaded == frozenset()
    if rank == 0:
        assert not any(fake.state()["asleep"] for fake in fakes)
        fleet.sleep()
    expected = values_of(engine)

    def fails(error: type[Exception], match: str, asleep: int = 2, **faults: Any) -> None:
        if faults and rank == 0:
            fakes[0].tell(**faults)
        with pytest.raises(error, match=match), colocated(engine, fleet).rollout():
            raise AssertionError("entered")
        assert engine.offloaded == frozenset() and same(values_of(engine), expected)
        if rank == 0:
            fakes[0].tell()
            assert (
                sum(fake.state()["asleep"] != [] for fake in fakes) == asleep
                and fleet.serving() == []
            )

    fails(
        ServerError,
        "1 of 2 inference servers woke up, 2 are needed: .*answered with 500",
        fail={"/wake_up": 1},
    )
    fails(
        PublishError,
        "confirmed by [01] of 2 inference servers.*answered with 500",
        fail={"/collective_rpc": 1},
    )
    for failing in (0, 1):
        error = (
            (ValueError, "no reward")
            if rank == failing
            else (PeerError, f"failed on rank {failing}: ValueError: no reward")
        )
        with pytest.raises(error[0], match=error[1]), colocated(engine, fleet).rollout():
            if rank == failing:
                raise ValueError("no reward")
        assert engine.offloaded == frozenset() and same(values_of(engine), expected)
        assert rank != 0 or states(fleet) == {ServerState.ASLEEP}
    awake = pytest.raises(
        ServerError, match="1 of 2 inference servers may still have the memory of their GPUs"
    )
    with awake, colocated(engine, fleet).rollout():
        if rank == 0:
            fakes[0].tell(fail={"/sleep": 1})
    assert engine.offloaded == frozenset(), "what did not sleep is for the caller to end"
    assert rank != 0 or fleet.serving() == []
    with (
        pytest.raises(ConfigError, match="the inference servers sleep")
        if rank == 0
        else pytest.raises(PeerError)
    ):
        engine.update_weights()
    with colocated(engine, fleet).rollout():
        assert rank != 0 or len(fleet.serving()) == 2
    train(engine, 1)
    engine.destroy()


@pytest.mark.slow
def test_an_error_in_a_turn_is_raised_on_all_ranks_and_ends_the_turn(
    base: str, tmp_path: Path
) -> None:
    with (
        FakeServer("vllm", tmp_path, dtype="float32") as one,
        FakeServer("vllm", tmp_path, dtype="float32") as other,
    ):
        run_ranks(_fails, 2, base, [_Remote(one.url), _Remote(other.url)], tmp_path)


class _Remote(FakeServer):
    """A fake of another process, which a rank may tell and ask."""

    def __init__(self, url: str) -> None:
        self.url = url


STEPS, KILLED_TURN = 4, 2
CALLS = [
    *(
        "GET /weight_info",
        "POST /sleep",
        "POST /wake_up",
        "POST /update_weight_version",
    ),  # the weights wake up
    *("GET /weight_info", "GET /is_paused"),  # the fleet looks
    *("POST /pause", "GET /weight_info", "POST /update_weight_version"),  # the update begins
    *("POST /collective_rpc", "POST /reset_prefix_cache"),
    *(
        "POST /update_weight_version",
        "POST /wake_up",
        "POST /update_weight_version",
        "POST /resume",
    ),  # the KV cache
    *("GET /weight_info", "GET /is_paused", "POST /inference/v1/generate"),  # the check
    *("GET /server_info", "GET /weight_info", "GET /is_paused"),  # the end of the turn
    *("POST /update_weight_version", "POST /sleep", "GET /weight_info", "GET /is_paused"),
]
"""Calls of one turn to one server, in order."""
KILLS: dict[str, int] = {f"{place} {call}": place for place, call in enumerate(CALLS)}
KILLS |= {"offload": -1, "body": -2, "onload": -3}


def _run(
    rank: int, world_size: int, base: str, root: Path, url: str, kill: int | None
) -> dict[str, Any]:
    seed_rng(1, rank)
    fleet = make_fleet("vllm", [url], probe_interval_s=None)
    if rank == 0:
        fleet.sleep()  # whatever a killed life left
    job = Job(base)
    engine, handler = job.engine, make_handler(root, freq_steps=1)
    engine.connect_engine(fleet, WeightUpdateMeta("disk", str(root / "w"), timeout_s=LIMIT_S))
    info = handler.load(job)
    record: dict[str, Any] = {}
    for number in range(0 if info is None else info.last_step_info.global_step + 1, STEPS):
        doomed = number == KILLED_TURN and rank == 0
        made = _watch(kill if doomed else None)
        with colocated(engine, fleet).rollout():
            answer = rank_zero_decides(
                lambda number=number: ask(fleet.serving()[0], number).output_tokens
            )
            if doomed and kill == -2:
                _die()
        if doomed and kill == -3:
            _die()
        assert rank != 0 or [_plain(call) for call in made] == CALLS
        record = job.train([token % 24 for token in answer])
        handler.dump(job, step_info(number))
    handler.close()
    return record


def _plain(call: tuple[str, str]) -> str:
    return " ".join(call)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _watch(
    kill: int | None, send: Any = Calls._send, offload: Any = FSDPEngine.offload
) -> list[tuple[str, str]]:
    """Note all calls from now on, and die after the answer to call ``kill``."""
    made: list[tuple[str, str]] = []

    def watched(self: Calls, phase: str, method: str, path: str, *args: Any, **options: Any) -> Any:
        answer = send(self, phase, method, path, *args, **options)
        made.append((method, path))
        if len(made) - 1 == kill:
            _die()
        return answer

    def offloaded(self: FSDPEngine, *args: Any) -> None:
        offload(self, *args)
        if kill == -1:
            _die()

    Calls._send, FSDPEngine.offload = watched, offloaded  # type: ignore[method-assign]
    return made


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, list[dict[str, Any]], list[Any]]]:
    """A model folder, the last records of a run that nothing killed, and the tokens that it
    sampled.
    """
    root = tmp_path_factory.mktemp("undisturbed")
    write_model_folder(root / "base", tiny_qwen3(tied=False, vocab_size=64))
    with FakeServer("vllm", root, dtype="float32") as fake:
        records = run_ranks(_run, 2, str(root / "base"), root, fake.url, None)
        yield str(root / "base"), records, _sampled(fake)


def _sampled(fake: FakeServer) -> list[Any]:
    """Token and log-probability of the last four sampled tokens."""
    return [[token["token"], token["logprob"]] for token in fake.tokens()[-4:]]


@pytest.mark.slow
@pytest.mark.parametrize("kill", KILLS)
def test_a_run_that_is_killed_in_a_turn_ends_as_if_it_had_not_been(
    kill: str, undisturbed: Any, tmp_path: Path
) -> None:
    base, expected, sampled = undisturbed
    with FakeServer("vllm", tmp_path, dtype="float32") as fake:
        with pytest.raises(AssertionError, match="died without a word"):
            run_ranks(_run, 2, base, tmp_path, fake.url, KILLS[kill])
        assert newest(tmp_path).name.endswith(f"_{KILLED_TURN - 1}")
        assert run_ranks(_run, 2, base, tmp_path, fake.url, None) == expected
        assert (
            fake.alive()
            and fake.state()["asleep"] == ["kv_cache", "weights"]
            and _sampled(fake) == sampled
        )
        assert not any(token["mixed"] for token in fake.tokens())


def _samples_only_while_awake(rank: int, world_size: int, base: str, url: str, root: Path) -> None:
    fleet = make_fleet("vllm", [url])
    engine = make_engine(base)
    engine.connect_engine(fleet, WeightUpdateMeta("disk", str(root / "w")))
    with closing(fleet), colocated(engine, fleet, level=2).rollout():
        (server,) = fleet.serving()
        ask(server, 1)
    with pytest.raises(ServerError, match="sleeps, and takes requests after"):
        ask(server, 1)
    engine.destroy()


def test_one_rank_takes_turns_alone(base: str, tmp_path: Path) -> None:
    with FakeServer("vllm", tmp_path, dtype="float32") as fake:
        run_ranks(_samples_only_while_awake, 1, base, fake.url, tmp_path)


def _enters_wrongly(rank: int, world_size: int, base: str, url: str, root: Path) -> None:
    fleet = make_fleet("vllm", [url], probe_interval_s=None)
    engine = make_engine(base, use_lora=True, lora_rank=4)
    engine.connect_engine(fleet, WeightUpdateMeta("adapter", str(root / "w")))
    with (
        pytest.raises(ConfigError, match="level 2 drops the base"),
        colocated(engine, fleet, level=2).rollout(),
    ):
        raise AssertionError("entered")
    assert engine.offloaded == frozenset()
    with colocated(engine, fleet).rollout():
        with (
            pytest.raises(ConfigError, match="the engine is offloaded already"),
            colocated(engine, fleet).rollout(),
        ):
            raise AssertionError("entered")
        assert engine.offloaded == BOTH
        assert rank != 0 or states(fleet) == {ServerState.SERVING}
    assert engine.offloaded == frozenset()
    engine.destroy()


@pytest.mark.slow
def test_a_turn_that_would_go_wrong_does_not_begin(base: str, tmp_path: Path) -> None:
    with FakeServer("vllm", tmp_path, dtype="float32", lora=True, folder=base) as fake:
        run_ranks(_enters_wrongly, 2, base, fake.url, tmp_path)
        assert fake.state()["asleep"] == ["kv_cache", "weights"]


def _is_interrupted(rank: int, world_size: int, base: str, url: str, root: Path) -> None:
    fleet = make_fleet("vllm", [url], probe_interval_s=None)
    engine = make_engine(base)
    engine.connect_engine(fleet, WeightUpdateMeta("disk", str(root / "w")))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(KeyboardInterrupt),
        colocated(engine, fleet).rollout(),
    ):
        patch.setattr(fleet, "sleep", interrupted)
    assert engine.offloaded == BOTH, "to onload takes all ranks, and others may not come to it"
    fleet.sleep()
    engine.onload()
    engine.destroy()


def test_an_interrupt_at_the_end_of_a_turn_leaves_the_engine_offloaded(
    base: str, tmp_path: Path
) -> None:
    with FakeServer("vllm", tmp_path, dtype="float32") as fake:
        run_ranks(_is_interrupted, 1, base, fake.url, tmp_path)
