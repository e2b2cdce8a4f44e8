"""The handler under torchrun: every rank calls it, on real gloo ranks with real sharded engines."""

import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from holdfast.engine import OptimizerConfig
from holdfast.engine.api import SaveLoadMeta
from holdfast.engine.dcp import base_model
from holdfast.engine.dcp import state as dcp_state
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.staging import host_buffers
from holdfast.engine.staging.staged_state import Staging
from holdfast.recover import ResumableDataLoader
from holdfast.utils.errors import (
    CheckpointMismatchError,
    CheckpointWriteError,
    ConfigError,
    DatasetMismatchError,
    HoldfastError,
    PeerError,
)
from holdfast.utils.rng import seed_rng
from tests.engine.models import build_reference, tiny_qwen3, write_model_folder
from tests.helpers import run_ranks
from tests.limits import stretched
from tests.recover.cli.commands import holdfast
from tests.recover.runs import (
    Job,
    Meter,
    Tiny,
    draw,
    hidden,
    make_engine,
    make_handler,
    make_loader,
    names,
    newest,
    step_info,
    stream,
    train_steps,
)

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    write_model_folder(folder, tiny_qwen3())
    return str(folder)


def _resume(
    rank: int, world_size: int, model: str, root: str, kind: str, engines: tuple[str, ...]
) -> Any:
    seed_rng(100 + rank)
    loader, job, handler = (
        make_loader(kind, rank, world_size),
        Job(model, engines),
        make_handler(root),
    )
    handler.register("meter", job.meter)
    assert handler.load(job.engine, loader) is None
    batches = stream(loader)
    list(train_steps(job, batches, 0, 4))
    assert handler.dump(job.engine, step_info(3), loader, force=True)
    expected = [record for _, record in train_steps(job, batches, 4, 6)]  # into the next epoch

    seed_rng(rank)
    loader, job, handler = (
        make_loader(kind, rank, world_size),
        Job(model, engines),
        make_handler(root),
    )
    handler.register("meter", job.meter)
    info = handler.load(job.engine, loader)
    assert info is not None and info.last_step_info.next() == step_info(4)
    assert info.weight_versions == dict.fromkeys(engines, 4) and info.world_size == world_size
    resumed = [record for _, record in train_steps(job, stream(loader), 4, 6)]
    for step, (one, other) in enumerate(zip(expected, resumed, strict=True), start=4):
        assert one == other, f"step {step}"
    assert not handler.dump(job.engine, step_info(9), loader)
    assert handler.dump(job.engine, step_info(9), loader, force=True)
    return resumed


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("kind", "engines"),
    [pytest.param("own", ("default",), marks=pytest.mark.slow), ("torchdata", ("actor", "critic"))],
)
def test_a_resumed_run_repeats_every_number_of_one_that_went_on(
    kind: str, engines: tuple[str, ...], model: str, tmp_path: Path
) -> None:
    first, second = run_ranks(_resume, 2, model, str(tmp_path), kind, engines)
    assert all(
        a["draws"] != b["draws"] and a["ids"] != b["ids"]
        for a, b in zip(first, second, strict=True)
    )
    assert len({record["digest"] for record in first}) == 6
    folder = newest(tmp_path).with_name("global_step_3")
    assert len(torch.load(folder / "data.pt", weights_only=True)["states"]) == (
        1 if kind == "own" else 2
    )
    of_ranks = [name for name in sorted(os.listdir(folder / "state")) if name.startswith("rank_")]
    assert of_ranks == ["rank_00000.pt", "rank_00001.pt"]
    for name in engines:
        assert {".metadata", "__0_0.distcp", "__1_0.distcp"} == set(os.listdir(folder / name))
    if kind == "own":  # torch's own reader reads it
        reference = build_reference(tiny_qwen3(), seed=9)
        tensors = {name: param.detach() for name, param in reference.named_parameters()}
        dcp.load({"dcp": {"model": tensors}}, checkpoint_id=folder / "default", no_dist=True)
        exported = run_ranks(_load_whole, 1, model, str(folder / "default"))[0]
        assert all(torch.equal(tensors[name], exported[name]) for name in tensors)


def _load_whole(rank: int, world_size: int, model: str, folder: str) -> dict[str, torch.Tensor]:
    engine = make_engine(model)
    engine.load(SaveLoadMeta(folder, "dcp", with_optim=True))
    params: Any = engine.model.named_parameters()
    return {name: param.full_tensor().detach().clone() for name, param in params}


def _run_in_a_part(
    rank: int, world_size: int, model: str, root: str, ranks: list[int]
) -> tuple[float, ...] | None:
    """Take the next step of a run on some ranks of the job. Returns what this rank draws after a
    snapshot that it made, or after one that it has restored.
    """
    group: Any = dist.new_group(ranks)
    if rank not in ranks:
        return None
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if len(ranks) > 1:
        fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("fsdp",)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    meter = Meter()
    seed_rng(rank)
    with make_handler(root, freq_steps=1, group=group) as handler:
        handler.register("meter", meter)
        info = handler.load((module, optimizer))
        if info is not None:
            facts = info.engines["default"]
            assert facts.moved and "0" * 16 not in facts.fingerprints.values()
            assert meter.seen == [ranks.index(rank)]
            return draw()
        for param in module.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        meter.seen.append(ranks.index(rank))
        assert handler.dump((module, optimizer), step_info(0))
        return draw()


@pytest.mark.parametrize(
    ("saved_by", "resumed_by"), [([1], [1]), ([1, 2], [1, 2]), ([1, 2], [0, 1])], ids=str
)
def test_a_handler_of_any_ranks_of_the_job_resumes_and_its_generations_are_exported(
    saved_by: list[int], resumed_by: list[int], model: str, tmp_path: Path
) -> None:
    saved = run_ranks(_run_in_a_part, 3, model, str(tmp_path), saved_by)
    resumed = run_ranks(_run_in_a_part, 3, model, str(tmp_path), resumed_by)
    assert [saved[rank] for rank in saved_by] == [resumed[rank] for rank in resumed_by]

    # The ranks are numbered in the group, and the first of them has packed the model's files.
    folder = newest(tmp_path)
    of_ranks = [f"rank_{number:05d}" for number in range(len(saved_by))]
    files = sorted(os.listdir(folder / "state"))
    assert files == ["model_files_default.pt", *(f"{name}.pt" for name in of_ranks)]
    assert list(json.loads((folder / "recover_info.json").read_text())["rng"]) == of_ranks
    code, _, err = holdfast("export", folder, "--to", tmp_path / "exported")
    assert code == 0, err
    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")


@contextmanager
def file_size_limit(n_bytes: int, active: bool) -> Iterator[None]:
    """Limit the size of files of this process. As on a full disk, writes fail half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes if active else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _fail(rank: int, world_size: int, model: str, root: str) -> None:
    job, loader = Job(model), make_loader("own", rank, world_size)
    handler = make_handler(root, freq_steps=1, save_failures_allowed=0)
    handler.register("meter", job.meter)
    handler.load(job.engine, loader)
    batches = stream(loader)

    def dump_fails(
        step: int, own: type[HoldfastError], others: type[HoldfastError], culprit: int
    ) -> None:
        kept = names(Path(root))
        with pytest.raises(own if rank == culprit else others):
            handler.dump(job.engine, step_info(step), loader, force=True)
        torch.distributed.barrier()
        assert names(Path(root)) == kept and hidden(root) == []

    job.train(next(batches))
    handler.dump(job.engine, step_info(0), loader)
    for culprit in range(world_size):
        job.meter.mean = threading.Lock() if rank == culprit else job.meter.mean  # type: ignore[assignment]
        dump_fails(1, ConfigError, PeerError, culprit)
        job.meter.mean = torch.zeros(2)
        with file_size_limit(200, rank == culprit):  # even the state of the rank does not fit
            dump_fails(1, CheckpointWriteError, PeerError, culprit)
        with file_size_limit(40_000, rank == culprit):  # the state fits, the shard does not
            dump_fails(1, CheckpointWriteError, CheckpointWriteError, culprit)
    job.train(next(batches))
    saved = job.snapshot()
    assert handler.dump(job.engine, step_info(1), loader, force=True)

    changed = job.train(next(batches))["digest"]
    data = list(range(24)) if rank == 0 else list(range(1, 25))
    other = ResumableDataLoader(data, 4, seed=3, rank=rank, world_size=world_size)
    with pytest.raises(DatasetMismatchError if rank == 1 else PeerError):
        make_handler(root).load(job.engine, other)
    with pytest.raises(
        CheckpointMismatchError, match=r"holds engines \['default'\], this job has \['actor'\]"
    ):
        make_handler(root).load({"actor": job.engine})
    assert job.snapshot()["digest"] == changed
    assert (
        make_handler(root).load(job.engine, loader) and job.snapshot()["digest"] == saved["digest"]
    )


def test_a_failure_on_one_rank_fails_that_dump_on_all_ranks(model: str, tmp_path: Path) -> None:
    run_ranks(_fail, 2, model, str(tmp_path))


def _fail_beside_a_frozen_base(rank: int, world_size: int, root: str) -> None:
    """Snapshots that leave out a frozen base are collective while they are captured."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    engines = {name: DCPState(model, optimizer, trainable_only=True) for name in ("one", "two")}
    meter = Meter()

    def fails(work: Callable[[], object], error: type[Exception], culprit: int) -> None:
        started = time.monotonic()
        with pytest.raises(error if rank == culprit else PeerError) as caught:
            work()
        assert f"rank {culprit}: {error.__name__}" in str(caught.value) or rank == culprit
        assert time.monotonic() - started < stretched(15), "the other rank waited for it"
        torch.distributed.barrier()

    def refuse(error: Exception) -> Callable[..., Any]:
        def refused(*_: object) -> Any:
            raise error

        return refused

    for culprit in range(world_size):
        handler = make_handler(root, freq_steps=1, async_save=True)
        handler.register("meter", meter)
        with pytest.MonkeyPatch.context() as patch:
            if rank == culprit:  # in the same call of every rank
                patch.setattr(host_buffers, "host_copies_of", refuse(OSError("no memory")))
            fails(lambda handler=handler: handler.load(engines), OSError, culprit)

        handler.load(engines)
        dump = partial(handler.dump, engines, step_info(culprit), force=True)
        meter.mean = threading.Lock() if rank == culprit else torch.zeros(2)  # type: ignore[assignment]
        fails(dump, ConfigError, culprit)
        meter.mean = torch.zeros(2)
        with pytest.MonkeyPatch.context() as patch:
            if rank == culprit:
                patch.setattr(base_model, "_part_sums", refuse(torch.OutOfMemoryError("full")))
            fails(dump, torch.OutOfMemoryError, culprit)
        with pytest.MonkeyPatch.context() as patch:
            if rank == culprit:
                patch.setattr(Staging, "wait", refuse(OSError("the device is lost")))
            fails(dump, OSError, culprit)
        assert dump()
        handler.close()

        # Without a handler.
        with pytest.MonkeyPatch.context() as patch:
            if rank == culprit:
                patch.setattr(dcp_state, "materialize_state", refuse(OSError("no memory")))
            with pytest.raises(PeerError, match=f"failed on rank {culprit}: OSError: no memory"):
                save_dcp(f"{root}/{culprit}", engines["one"])
        torch.distributed.barrier()


def test_a_failure_on_one_rank_beside_a_frozen_base_keeps_no_rank_waiting(tmp_path: Path) -> None:
    run_ranks(_fail_beside_a_frozen_base, 2, str(tmp_path))


def _reference_model(rank: int, world_size: int, model: str, root: str) -> None:
    """An actor, and a reference model without an optimizer whose weights and version are restored
    too.
    """

    def make_pair() -> dict[str, Any]:
        return {"actor": make_engine(model), "ref": make_engine(model, optimizer=None)}

    pair = make_pair()
    handler = make_handler(root, freq_steps=1)
    handler.load(pair)
    with torch.no_grad():
        for param in pair["ref"].model.parameters():
            param.add_(1.0)
    pair["ref"].set_version(5)
    handler.dump(pair, step_info(0))
    fresh = make_pair()
    info = make_handler(root).load(fresh)
    assert (
        info and info.weight_versions == {"actor": 0, "ref": 5} and fresh["ref"].get_version() == 5
    )
    for one, other in zip(
        pair["ref"].model.parameters(), fresh["ref"].model.parameters(), strict=True
    ):
        assert torch.equal(one.to_local(), other.to_local())
    pair["ref"] = make_engine(model, optimizer=OptimizerConfig())
    with pytest.raises(CheckpointMismatchError, match="holds a model only, no optimizer state"):
        make_handler(root).load(pair)


@pytest.mark.slow
def test_an_engine_without_an_optimizer_is_snapshotted_too(model: str, tmp_path: Path) -> None:
    run_ranks(_reference_model, 2, model, str(tmp_path))


def _per_rank_data(rank: int, world_size: int, model: str, root: str) -> None:
    loader, job = make_loader("torchdata", rank, world_size), Job(model)
    handler = make_handler(root, freq_steps=1)
    if world_size == 2:
        handler.load(job.engine, loader)
        next(stream(loader))
        handler.dump(job.engine, step_info(0), loader)
    else:
        with pytest.raises(
            CheckpointMismatchError, match="states of 2 ranks with different data, now there are 1"
        ):
            handler.load(job.engine, loader)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_cursors_that_differ_by_rank_do_not_move_to_another_world_size(
    model: str, tmp_path: Path
) -> None:
    run_ranks(_per_rank_data, 2, model, str(tmp_path))
    run_ranks(_per_rank_data, 1, model, str(tmp_path))


def _loaders_with(rank: int, world_size: int, root: str, change: str) -> None:
    samples = list(range(24))
    seed = 3
    if change == "seed":
        seed = rank
    elif change == "dataset_fingerprint":
        samples = samples[rank::world_size]
    loader = ResumableDataLoader(samples, 4, seed=seed)
    if rank == 0:  # positions may differ, as those of SharedRollouts do
        next(iter(loader))
    with make_handler(root) as handler:
        if not change:
            handler.load(Tiny().state, loader)
            return
        with pytest.raises(ConfigError, match=rf"of rank\(s\) \[1\] has another {change} than"):
            handler.load(Tiny().state, loader)


@pytest.mark.parametrize("change", ["seed", "dataset_fingerprint", ""])
def test_loaders_that_only_their_own_rank_could_resume_are_refused_on_all_ranks(
    change: str, tmp_path: Path
) -> None:
    run_ranks(_loaders_with, 2, str(tmp_path), change)


def _idle_dump(rank: int, world_size: int, root: str) -> list[int]:
    tiny, handler = Tiny(), make_handler(root, freq_steps=10)
    handler.load(tiny.state)
    group, costs = dist.group.WORLD, []
    assert group is not None
    for step in range(3):
        before = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        assert not handler.dump(tiny.state, step_info(step))
        costs.append(group._get_sequence_number_for_group() - before)  # type: ignore[attr-defined]
    handler.close()
    return costs


def test_a_dump_with_nothing_due_costs_one_collective(tmp_path: Path) -> None:
    assert run_ranks(_idle_dump, 2, str(tmp_path)) == [[1, 1, 1]] * 2


def _one_rank_forces(rank: int, world_size: int, root: str) -> list[bool]:
    tiny, handler = Tiny(), make_handler(root, freq_steps=10)
    handler.load(tiny.state)
    taken = []
    for step in range(world_size):
        tiny.step()
        taken.append(handler.dump(tiny.state, step_info(step), force=step == rank))
    handler.close()
    return taken


def test_a_snapshot_that_one_rank_forces_is_taken_by_all(tmp_path: Path) -> None:
    assert run_ranks(_one_rank_forces, 2, str(tmp_path)) == [[True, True]] * 2
    assert names(tmp_path) == ["global_step_0", "global_step_1"]
