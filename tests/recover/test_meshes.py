"""Ranks with the same data: they share generators and dataloaders, count once, and any mesh resumes
another's run.
"""

import json
import os
import random
import signal
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine import SaveLoadMeta
from holdfast.engine.dcp.format import read_layout
from holdfast.utils.errors import CheckpointMismatchError, ConfigError, PeerError
from holdfast.utils.rng import capture_rng, derive_rng, rng_digest, seed_rng
from tests.engine.meshes import mesh_options
from tests.engine.models import HAS_PLANS, tiny_qwen3_moe, write_model_folder
from tests.helpers import run_ranks
from tests.recover.runs import (
    SPEC,
    Job,
    make_batch,
    make_engine,
    make_handler,
    make_loader,
    newest,
    nll,
    step_info,
    stream,
    token_count,
    train_steps,
)
from tests.tiers import slow_but

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

RANKS = {"fsdp:d1": 1, "fsdp:d2": 2, "fsdp:d1c2": 2, "fsdp:d4": 4, "fsdp:d2c2": 4, "fsdp:d1c4": 4}
if HAS_PLANS:
    RANKS |= {"fsdp:d1t2": 2, "fsdp:d2t2": 4, "fsdp:d1c2t2": 4, "fsdp:d4e2": 4}
"""Backend -> number of ranks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "qwen3_moe"
    write_model_folder(folder, tiny_qwen3_moe())
    return str(folder)


class MeshJob(Job):
    """A job on a mesh, with generators and a dataloader of its data rank."""

    loss = staticmethod(nll)

    def __init__(self, model: str, kind: str, backend: str, seed: int) -> None:
        super().__init__(model, **mesh_options(backend))
        engine = self.engines["default"]
        seed_rng(seed, engine.data_parallel_rank)
        self.loader = make_loader(kind, engine.data_parallel_rank, engine.data_parallel_world_size)


def _resume(rank: int, world_size: int, model: str, root: str, kind: str, backend: str) -> Any:
    job, handler = MeshJob(model, kind, backend, 100), make_handler(root)
    handler.register("meter", job.meter)
    assert handler.load(job.engine, job.loader) is None
    batches = stream(job.loader)
    list(train_steps(job, batches, 0, 3))
    random.seed(rank)  # code for some ranks alone may draw
    job.meter.seen.append(rank)
    assert handler.dump(job.engine, step_info(2), job.loader, force=True)
    expected = [record for _, record in train_steps(job, batches, 3, 5)]

    job, handler = MeshJob(model, kind, backend, 7), make_handler(root)
    handler.register("meter", job.meter)
    assert handler.load(job.engine, job.loader)
    resumed = [record for _, record in train_steps(job, stream(job.loader), 3, 5)]
    assert resumed == expected
    return resumed


@pytest.mark.parametrize(
    ("backend", "kind"),
    slow_but(
        [],
        [
            (backend, kind)
            for backend, ranks in RANKS.items()
            if ranks > 1
            for kind in ("own", "torchdata")
        ],
    ),
)
def test_a_resumed_run_repeats_every_number_of_one_that_went_on(
    model: str, tmp_path: Path, backend: str, kind: str
) -> None:
    n_ranks = RANKS[backend]
    n_data = int(backend[len("fsdp:d")])
    found = run_ranks(_resume, n_ranks, model, str(tmp_path), kind, backend)
    n_sharing = n_ranks // n_data
    for rank, records in enumerate(found):
        head = found[rank - rank % n_sharing]
        for record, of_head in zip(records, head, strict=True):
            assert record["ids"] == of_head["ids"] and record["draws"][1:] == of_head["draws"][1:]
    assert len({tuple(records[0]["ids"]) for records in found}) == n_data
    assert len({records[0]["draws"][1] for records in found}) == n_data
    folder = newest(tmp_path)
    assert len(torch.load(folder / "data.pt", weights_only=True)["states"]) == (
        1 if kind == "own" else n_data
    )
    names = {
        name.split(".")[2]
        for name in read_layout(folder / "default").tensors
        if name.startswith("dcp.rng.")
    }
    assert names == {f"rank_{number:05d}" for number in range(n_data)}
    files = [
        torch.load(path, weights_only=True) for path in sorted((folder / "state").glob("rank_*.pt"))
    ]
    shared = {} if n_sharing == 1 else {"ranks_with_same_data": n_sharing}
    assert len(files) == n_ranks and all(
        file.keys() - {"rng", "user"} == shared.keys() for file in files
    )
    assert all(file.get("ranks_with_same_data", 1) == n_sharing for file in files)


def _save_generators(rank: int, world_size: int, model: str, root: str, backend: str) -> Any:
    """Save with a handler, and with the engine alone, at once and in the background."""
    job, handler = MeshJob(model, "own", backend, 100), make_handler(root, freq_steps=1)
    handler.register("meter", job.meter)
    handler.load(job.engine, job.loader)
    job.meter.seen = [job.engine.data_parallel_rank]
    handler.dump(job.engine, step_info(0), job.loader)
    job.engine.save(SaveLoadMeta(f"{root}/now", "dcp", with_optim=True))
    job.engine.save(SaveLoadMeta(f"{root}/later", "dcp", with_optim=True), blocking=False)
    job.engine.wait_for_save()
    return capture_rng()


def _load_generators(rank: int, world_size: int, model: str, root: str, backend: str) -> Any:
    job, found = MeshJob(model, "own", backend, 7), []
    handler = make_handler(root)
    handler.register("meter", job.meter)
    assert handler.load(job.engine, job.loader)
    found.append(rng_digest(capture_rng()))
    for name in ("now", "later"):
        seed_rng(rank)
        job.engine.load(SaveLoadMeta(f"{root}/{name}", "dcp", with_optim=True))
        found.append(rng_digest(capture_rng()))
    return job.engine.data_parallel_rank, job.meter.seen, found


ACROSS = [("fsdp:d2", "fsdp:d1c2"), ("fsdp:d1c2", "fsdp:d2")]
LARGE = [
    name
    for name in ("fsdp:d4", "fsdp:d2c2", "fsdp:d1c4", "fsdp:d2t2", "fsdp:d4e2")
    if name in RANKS
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [*ACROSS, *((one, other) for one in LARGE for other in (*LARGE, "fsdp:d1c2", "fsdp:d1"))],
)
def test_a_data_rank_gets_its_generators_on_every_mesh(
    model: str, tmp_path: Path, saved: str, loaded: str
) -> None:
    states = run_ranks(_save_generators, RANKS[saved], model, str(tmp_path), saved)
    n_saved = int(saved[len("fsdp:d")])
    of_data_rank = states[:: RANKS[saved] // n_saved]
    digests = [rng_digest(state) for state in of_data_rank]
    assert len(set(digests)) == n_saved
    for data_rank, seen, found in run_ranks(
        _load_generators, RANKS[loaded], model, str(tmp_path), loaded
    ):
        own = data_rank < n_saved
        expected = digests[data_rank] if own else rng_digest(derive_rng(states[0], data_rank))
        assert found == [expected] * 3 and seen == [data_rank if own else 0]


def _train(
    rank: int,
    world_size: int,
    model: str,
    root: str,
    attempt: int,
    backend: str,
    steps: int,
    victim: int | None,
) -> None:
    """Train up to ``steps`` with a snapshot of every other step, and note the samples of each. The
    ``victim`` is killed some time after its first snapshot.
    """
    engine = make_engine(model, **mesh_options(backend))
    d, n = engine.data_parallel_rank, engine.data_parallel_world_size
    loader, handler = make_loader("own", d, n), make_handler(root, freq_steps=2)
    info = handler.load(engine, loader)
    first = info.last_step_info.global_step + 1 if info else 0
    timer = threading.Timer(
        random.Random(attempt).uniform(0, 0.4), os.kill, (os.getpid(), signal.SIGKILL)
    )
    with open(f"{root}/samples_{attempt}_{rank}.jsonl", "w") as file:
        for step, ids in zip(range(first, steps), stream(loader), strict=False):
            engine.train_batch(make_batch(ids), nll, token_count)
            file.write(json.dumps([step, d, ids]) + "\n")
            file.flush()
            if (
                handler.dump(engine, step_info(step), loader)
                and rank == victim
                and timer.ident is None
            ):
                timer.start()
    handler.close()


def _samples(root: Path, n_attempts: int) -> dict[int, list[int]]:
    """Step -> sorted samples, as it was trained last. Those of ranks with the same data count
    once.
    """
    last: dict[int, dict[int, list[int]]] = {}
    for attempt in range(n_attempts):
        trained: dict[int, dict[int, list[int]]] = {}
        for path in root.glob(f"samples_{attempt}_*.jsonl"):
            for step, d, ids in map(json.loads, path.read_text().splitlines()):
                assert trained.setdefault(step, {}).setdefault(d, ids) == ids, (
                    "ranks of one data rank differ"
                )
        last |= trained
    return {step: sorted(chain(*shares.values())) for step, shares in sorted(last.items())}


@pytest.mark.parametrize(
    "backends",
    slow_but(
        [(("fsdp:d2", "fsdp:d1c2", "fsdp:d2"),)],
        [
            (("fsdp:d2", "fsdp:d1c2", "fsdp:d2"),),
            (("fsdp:d1c2", "fsdp:d2", "fsdp:d1t2"),),
            (("fsdp:d4", "fsdp:d2c2", "fsdp:d1", "fsdp:d2t2", "fsdp:d1c4"),),
            (("fsdp:d1c2t2", "fsdp:d4e2", "fsdp:d1c2", "fsdp:d2c2"),),
        ],
    ),
)
def test_a_killed_run_that_goes_on_with_another_mesh_loses_no_sample(
    model: str, tmp_path: Path, backends: tuple[str, ...]
) -> None:
    backends = tuple(backend for backend in backends if backend in RANKS)
    for attempt, backend in enumerate(backends[:-1]):
        arguments = str(tmp_path), attempt, backend, 10_000, attempt % RANKS[backend]
        with pytest.raises(AssertionError, match="died without a word"):
            run_ranks(_train, RANKS[backend], model, *arguments, timeout_s=30)
    steps = max(_samples(tmp_path, len(backends) - 1)) + SPEC.steps_per_epoch
    run_ranks(
        _train,
        RANKS[backends[-1]],
        model,
        str(tmp_path),
        len(backends) - 1,
        backends[-1],
        steps,
        None,
    )
    whole = stream(make_loader("own", 0, 1))
    assert _samples(tmp_path, len(backends)) == {step: sorted(next(whole)) for step in range(steps)}


def _elastic(
    rank: int, world_size: int, model: str, root: str, backend: str, words: str | None
) -> list[int]:
    job, handler = MeshJob(model, "torchdata", backend, 1), make_handler(root, freq_steps=1)
    if words is not None:
        with pytest.raises(CheckpointMismatchError, match=words):
            handler.load(job.engine, job.loader)
        return []
    info = handler.load(job.engine, job.loader)
    ids = next(stream(job.loader))
    handler.dump(
        job.engine, step_info(info.last_step_info.global_step + 1 if info else 0), job.loader
    )
    return ids


@pytest.mark.slow
def test_cursors_that_differ_by_rank_move_to_a_mesh_with_as_many_data_ranks(
    model: str, tmp_path: Path
) -> None:
    trained = [
        run_ranks(_elastic, RANKS[name], model, str(tmp_path), name, None)
        for name in ("fsdp:d1", "fsdp:d1c2")
    ]
    assert trained[1][0] == trained[1][1] and not set(trained[0][0]) & set(trained[1][0])
    words = "holds dataloader states of 1 ranks with different data, now there are 2"
    run_ranks(_elastic, 2, model, str(tmp_path), "fsdp:d2", words)


def _head_has_data(rank: int, world_size: int, model: str, root: str) -> list[list[int]]:
    """Only the head reads data, and gives its batches to the other ranks."""
    found = []
    for attempt in range(2):
        engine, handler = (
            make_engine(model, **mesh_options("fsdp:d1c2")),
            make_handler(root, freq_steps=1),
        )
        loader = make_loader("torchdata", 0, 1) if rank == 0 else None
        info = handler.load(engine, loader)
        assert (info is not None) == (attempt == 1)
        batch = engine.broadcast_batch(None if loader is None else make_batch(next(stream(loader))))
        found.append(batch["input_ids"].tolist())
        engine.train_batch(batch, nll, token_count)
        handler.dump(engine, step_info(attempt), loader)
        handler.close()
    of_peer = make_loader("torchdata", 0, 1) if rank == 1 else None
    with pytest.raises(
        CheckpointMismatchError if rank == 0 else PeerError, match="data starts over"
    ):
        make_handler(root).load(engine, of_peer)
    return found


@pytest.mark.slow
def test_only_the_head_of_a_data_rank_needs_a_dataloader(model: str, tmp_path: Path) -> None:
    first, second = run_ranks(_head_has_data, 2, model, str(tmp_path))
    assert first == second and first[0] != first[1]


def _different_meshes(rank: int, world_size: int, model: str, root: str) -> None:
    engines = {
        "actor": make_engine(model, **mesh_options("fsdp:d1c2")),
        "critic": make_engine(model),
    }
    with pytest.raises(
        ConfigError, match=r"different numbers of ranks: \{'actor': 2, 'critic': 1\}"
    ):
        make_handler(root).load(engines)


def test_engines_with_different_data_ranks_are_refused(model: str, tmp_path: Path) -> None:
    run_ranks(_different_meshes, 2, model, str(tmp_path))
