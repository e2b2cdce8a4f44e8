"""`growth`: how saves and restores scale with the size of the model and the number of ranks.

Saves are measured on up to four real ranks. Planning of a save, and of a restore at the same world
size, is measured for up to 1,024 ranks: on rank 0 and on one other rank, with the structure and
files that a Qwen3 of four layers would have at that world size. The work that rank 0 does for all
ranks on manifest and files is measured the same way.
"""

import math
import os
import pickle
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import Shard

from holdfast.engine.api import StepInfo
from holdfast.engine.dcp.format import Destination, parse_metadata, read_layout
from holdfast.engine.dcp.reader import TensorReader
from holdfast.engine.dcp.save_plan import Structure, TensorStructure, plan_alone
from holdfast.recover import GenerationStore, RecoverInfo
from holdfast.utils.files import bytes_digest
from holdfast.utils.manifest import MANIFEST_NAME, FileEntry, write_entry

from . import ours
from .agreement import agreement
from .harness import Figure, Options, Times, interleave, over
from .limits import WarmBuffer
from .model import build_engine, training_tensors
from .ranks import Session, on_ranks
from .rivals import ArealDCP

RAW = "raw write+fsync"
LISTING = "listing the files"
TORCH_PLAN = "torch planner"
TORCH_READ = "torch read_metadata"
RANK_0 = "Holdfast rank 0"
RANK_N = "Holdfast other ranks"

# Enough rows for 1,024 ranks.
WIDTH = 4096
VOCABULARY = 32768

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name."""


def growth(options: Options) -> list[Figure]:
    """Measure all figures. Their names say what grows."""
    sizes = [1_000_000, 10_000_000]
    ranks = [1, 2, 4]
    simulated = [64, 256, 1024]
    if options.quick:
        sizes = [options.parameters]
        ranks = [1]
        simulated = [2, 4]

    # Real saves of models of several sizes, and of one size on several numbers of ranks.
    figures = []
    for size in sizes:
        figures.append(_save_figure(options, f"size.{size / 1e6:g}M", size, options.ranks))
    if options.device == "cpu":
        size = min(options.parameters, 20_000_000)
        for n_ranks in ranks:
            figures.append(_save_figure(options, f"ranks.{n_ranks}", size, n_ranks))

    # Planning and files of more ranks than there are, and once of more tensors.
    for n_ranks in simulated:
        figures += _simulate(options, n_ranks, f"{n_ranks}_ranks", layers=4)
    n_ranks = simulated[0]
    plan, *_ = _simulate(options, n_ranks, f"{n_ranks}_ranks_16_layers", layers=16)
    figures.append(plan)

    if options.device == "cpu":
        figures += agreement(options)
    return figures


def _save_figure(
    options: Options,
    what: str,
    parameters: int,
    ranks: int,
) -> Figure:
    seconds = on_ranks(_measure_save, options, parameters, ranks=ranks)["seconds"]
    return Figure(
        f"growth.save.{what}",
        f"bytes a second / raw write+fsync: {parameters / 1e6:g}M parameters, {ranks} rank(s)",
        "higher",
        over(RAW, seconds, inverse=True),
        seconds=seconds,
    )


def _measure_save(session: Session, parameters: int) -> Times:
    engine = build_engine(session, parameters=parameters)
    buffer = WarmBuffer(training_tensors(engine))
    folder = session.new_folder("growth")

    # A folder belongs to all ranks, and rank 0 removes it. A raw file belongs to one rank.
    def once(call: Callable[[], None], path: Path) -> dict[str, float]:
        timed = session.timed(call)
        session.barrier()
        if session.rank == 0 and path.is_dir():
            rmtree(path)
        elif path.is_file():
            path.unlink()
        session.barrier()
        return timed

    raw = folder / f"rank_{session.rank}"
    path = folder / "save"
    holdfast = ours.EngineSave(engine, "dcp")
    areal = ArealDCP(session, engine)
    ways = {
        RAW: lambda: once(lambda: buffer.write(raw), raw),
        ours.ENGINE_SAVE: lambda: once(lambda: holdfast.save(path), path),
        "AReaL dcp.save": lambda: once(lambda: areal.save(path), path),
    }
    times = interleave(ways, session.options.rounds)
    engine.destroy()
    return times


def _simulate(
    options: Options,
    n_ranks: int,
    what: str,
    *,
    layers: int,
) -> list[Figure]:
    shapes = _tensor_shapes(layers)
    folder = options.scratch / "simulated"
    rounds = options.rounds
    if n_ranks > 100:
        rounds = 1  # plans for so many ranks take long

    # A plan needs structures only, so that the tensors have no data.
    values: dict[str, Any] = {name: torch.empty((), device="meta") for name in shapes}
    metadata = plan_alone(_structure(shapes, n_ranks, 0), values).metadata
    ways = {
        TORCH_PLAN: lambda: _torch_plan(shapes, n_ranks),
        RANK_0: lambda: _timed_plan(shapes, n_ranks, 0, values),
        RANK_N: lambda: _timed_plan(shapes, n_ranks, n_ranks - 1, values),
    }
    seconds = interleave(ways, rounds)["seconds"]
    figure = Figure(
        f"growth.plan.{what}",
        f"seconds to plan a save / torch's global plan, on rank 0: {n_ranks} ranks, "
        f"{len(shapes)} tensors",
        "lower",
        over(TORCH_PLAN, seconds),
        seconds=seconds,
        note="ours is kept for all saves of a structure, torch's is made for every save. "
        "Rank 0 makes .metadata, too",
    )
    try:
        return [figure, *_simulate_files(metadata, shapes, folder, n_ranks, what, rounds)]
    finally:
        rmtree(folder)


def _timed_plan(
    shapes: Shapes,
    n_ranks: int,
    rank: int,
    values: Mapping[str, Any],
) -> dict[str, float]:
    """Seconds to digest and plan a structure that is not in the cache."""
    structure = _structure(shapes, n_ranks, rank)

    # A save digests its structure first, to find the plan of an earlier save of the same.
    def plan() -> None:
        _ = structure.digest  # computed at the first access
        plan_alone(structure, values)

    return _timed(plan)


def _structure(
    shapes: Shapes,
    n_ranks: int,
    rank: int,
) -> Structure:
    """Structure of tensors sharded by rows, as FSDP2 shards them. Numbers are on every rank."""
    properties = TensorProperties(dtype=torch.float32)
    mesh = tuple(range(n_ranks))
    tensors = []
    for name, shape in shapes.items():
        # Only tensors with rows are sharded over the mesh.
        if shape:
            tensor = TensorStructure(name, shape, properties, mesh, (Shard(0),))
        else:
            tensor = TensorStructure(name, shape, properties, None, ())
        tensors.append(tensor)
    return Structure(mesh, rank, tuple(tensors))


def _torch_plan(shapes: Shapes, n_ranks: int) -> dict[str, float]:
    plans = _local_plans(shapes, n_ranks)
    return _timed(lambda: DefaultSavePlanner().create_global_plan(plans))


def _tensor_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a training state by name: weights, two moments per weight, and a step count that
    all ranks share.
    """
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (WIDTH, WIDTH),
        "self_attn.v_proj": (WIDTH, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (3 * WIDTH, WIDTH),
        "mlp.up_proj": (3 * WIDTH, WIDTH),
        "mlp.down_proj": (WIDTH, 3 * WIDTH),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    weights = {}
    for index in range(layers):
        for name, shape in layer.items():
            weights[f"layers.{index}.{name}"] = shape
    weights["embed_tokens"] = (VOCABULARY, WIDTH)
    weights["lm_head"] = (VOCABULARY, WIDTH)
    weights["norm"] = (WIDTH,)

    # Names as in a checkpoint of the engine.
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in weights.items():
        state = f"dcp.optim.state.{name}"
        shapes[f"dcp.model.{name}"] = shape
        shapes[f"{state}.step"] = ()
        shapes[f"{state}.exp_avg"] = shape
        shapes[f"{state}.exp_avg_sq"] = shape
    return shapes


def _local_plans(shapes: Shapes, n_ranks: int) -> list[SavePlan]:
    """The plans that torch gathers on rank 0."""
    paths = {name: tuple(name.split(".")) for name in shapes}
    plans = []
    for rank in range(n_ranks):
        items = [_write_item(name, shape, n_ranks, rank) for name, shape in shapes.items()]
        plans.append(SavePlan(items, planner_data=paths))
    return plans


def _write_item(
    name: str,
    shape: tuple[int, ...],
    n_ranks: int,
    rank: int,
) -> WriteItem:
    whole = torch.Size(shape)
    offsets = torch.Size([0] * len(shape))
    sizes = whole
    kind = WriteItemType.TENSOR

    # Sharded by rows, as by FSDP2.
    if shape:
        n_rows, *others = shape
        rows = math.ceil(n_rows / n_ranks)
        begin = min(rank * rows, n_rows)
        offsets = torch.Size([begin, *offsets[1:]])
        sizes = torch.Size([min(rows, n_rows - begin), *others])
        kind = WriteItemType.SHARD

    return WriteItem(
        MetadataIndex(name, offsets),
        kind,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, sizes),
            TensorProperties(dtype=torch.float32),
            whole,
        ),
    )


def _simulate_files(
    metadata: bytes,
    shapes: Shapes,
    root: Path,
    n_ranks: int,
    what: str,
    rounds: int,
) -> list[Figure]:
    """Write metadata and manifest for ``n_ranks`` ranks. Data files have their real size, but no
    blocks on the disk.
    """
    store = GenerationStore(root)
    staging = store.open_staging(0)
    for folder in ("actor", "state"):
        (staging / folder).mkdir()
    # Data files, without their data.
    sizes: dict[str, int] = {}
    for name, n_bytes in parse_metadata(metadata).files.items():
        sizes[f"actor/{name}"] = n_bytes
    for rank in range(n_ranks):
        sizes[f"state/rank_{rank:05d}.pt"] = 10_000
    entries = []
    for name, size in sizes.items():
        (staging / name).touch()
        os.truncate(staging / name, size)
        entries.append(FileEntry(name, size, bytes_digest(b"")))

    # The files of rank 0, and the manifest.
    info = RecoverInfo(StepInfo(0, 0, 0, 1), "simulated", n_ranks)
    entries.append(write_entry(staging, "recover_info.json", info.to_json()))
    entries.append(write_entry(staging, "actor/.metadata", metadata))
    path = store.commit(staging, 0, entries, {"world_size": n_ranks}).path

    # Rank 0 chooses a generation for all.
    ways = {
        LISTING: lambda: _timed(lambda: _list(path)),
        "Holdfast choice of a generation": lambda: _timed(lambda: store.inspect(path)),
    }
    choice = interleave(ways, rounds)["seconds"]

    # Then it sends the layout to the others, and each rank plans its own reads.
    actor = path / "actor"
    sent = pickle.dumps(read_layout(actor))
    ways = {
        TORCH_READ: lambda: _timed(FileSystemReader(actor).read_metadata),
        RANK_0: lambda: _timed(lambda: _plan_restore(actor, None, shapes, n_ranks, 0)),
        RANK_N: lambda: _timed(lambda: _plan_restore(actor, sent, shapes, n_ranks, n_ranks - 1)),
    }
    restore = interleave(ways, rounds)["seconds"]

    manifest = (path / MANIFEST_NAME).stat().st_size / len(metadata)
    return [
        Figure(
            f"growth.choice.{what}",
            "seconds to compare names and sizes with the manifest / listing the files: "
            f"{n_ranks} ranks",
            "lower",
            over(LISTING, choice),
            seconds=choice,
        ),
        Figure(
            f"growth.restore.{what}",
            f"seconds to plan a restore / torch's unpickling of .metadata: {n_ranks} ranks",
            "lower",
            over(TORCH_READ, restore),
            seconds=restore,
            note="rank 0 parses .metadata once for all; the others get the layout, "
            "and look at their own files only",
        ),
        Figure(
            f"growth.manifest.{what}",
            f"bytes of the manifest / torch's .metadata: {n_ranks} ranks",
            "lower",
            {"Holdfast manifest": [manifest]},
        ),
    ]


def _plan_restore(
    folder: Path,
    sent: bytes | None,
    shapes: Shapes,
    n_ranks: int,
    rank: int,
) -> None:
    """Find this rank's part of every tensor. Without a layout in ``sent``, parse and pickle
    ``.metadata``.
    """
    if sent is None:
        parse_metadata.cache_clear()
        layout = read_layout(folder)
        pickle.dumps(layout)
    else:
        layout = pickle.loads(sent)
    # The tensors of a destination have no data either.
    structure = _structure(shapes, n_ranks, rank)
    assert structure.shards is not None
    destinations = {}
    for name, shards in zip(shapes, structure.shards, strict=True):
        assert shards is not None
        box = shards.boxes[rank]
        destinations[name] = Destination(box, torch.empty(box.sizes, device="meta"))
    TensorReader(folder, layout, destinations)


def _timed(call: Callable[[], object]) -> dict[str, float]:
    started = time.perf_counter()
    call()
    return {"seconds": time.perf_counter() - started}


def _list(path: Path) -> int:
    n_bytes = 0
    for folder, _, names in os.walk(path):
        for name in names:
            n_bytes += os.stat(os.path.join(folder, name)).st_size
    return n_bytes
