"""`growth`: how saves and restores scale with the size of the model and the number of ranks.

Saves are measured on up to four real ranks. Planning of a save, and of a restore at the same world
size, is measured for up to 1,024 ranks: on rank 0 and on one other rank, with the structure and
files that a Qwen3 of four layers would have at that world size. The work that rank 0 does for all
ranks on manifest and files is measured the same way.
"""

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

RAW, LISTING = "raw write+fsync", "listing the files"
TORCH_PLAN, TORCH_READ = "torch planner", "torch read_metadata"
RANK_0, RANK_N = "Holdfast rank 0", "Holdfast other ranks"
WIDTH, VOCABULARY = 4096, 32768  # enough rows for 1,024 ranks


def growth(options: Options) -> list[Figure]:
    """Measure all figures. Their names say what grows."""
    sizes = [options.parameters] if options.quick else [1_000_000, 10_000_000]
    ranks = [1] if options.quick else [1, 2, 4]
    simulated = [2, 4] if options.quick else [64, 256, 1024]
    figures = [
        _save_figure(options, f"size.{size / 1e6:g}M", size, options.ranks) for size in sizes
    ]
    if options.device == "cpu":
        size = min(options.parameters, 20_000_000)
        figures += [_save_figure(options, f"ranks.{n}", size, n) for n in ranks]
    for n_ranks in simulated:
        figures += _simulate(options, n_ranks, f"{n_ranks}_ranks", layers=4)
    figures += _simulate(options, simulated[0], f"{simulated[0]}_ranks_16_layers", layers=16)[:1]
    return figures + (agreement(options) if options.device == "cpu" else [])


def _save_figure(options: Options, what: str, parameters: int, ranks: int) -> Figure:
    seconds = on_ranks(_measure_save, options, parameters, ranks=ranks)["seconds"]
    title = f"bytes a second / raw write+fsync: {parameters / 1e6:g}M parameters, {ranks} rank(s)"
    return Figure(
        f"growth.save.{what}", title, "higher", over(RAW, seconds, inverse=True), seconds=seconds
    )


def _measure_save(session: Session, parameters: int) -> Times:
    engine = build_engine(session, parameters=parameters)
    buffer, folder = WarmBuffer(training_tensors(engine)), session.options.scratch / "growth"
    if session.rank == 0:
        folder.mkdir(exist_ok=True)
    session.barrier()

    def once(call: Callable[[], None], path: Path) -> dict[str, float]:
        seconds = session.seconds(call)
        session.barrier()
        if session.rank == 0 and path.is_dir():
            rmtree(path)
        elif path.is_file():
            path.unlink()
        session.barrier()
        return {"seconds": seconds}

    raw, path = folder / f"rank_{session.rank}", folder / "save"
    savers = {
        ours.ENGINE_SAVE: ours.EngineSave(engine, "dcp"),
        "AReaL dcp.save": ArealDCP(session, engine),
    }
    ways = {RAW: lambda: once(lambda: buffer.write(raw), raw)}
    ways |= {
        name: lambda saver=saver: once(lambda: saver.save(path), path)
        for name, saver in savers.items()
    }
    times = interleave(ways, session.options.rounds)
    engine.destroy()
    return times


def _simulate(options: Options, n_ranks: int, what: str, *, layers: int) -> list[Figure]:
    shapes, folder = _tensor_shapes(layers), options.scratch / "simulated"
    rounds = 1 if n_ranks > 100 else options.rounds
    values: dict[str, Any] = {name: torch.empty((), device="meta") for name in shapes}
    metadata = plan_alone(_structure(shapes, n_ranks, 0), values).metadata
    ways = {
        TORCH_PLAN: lambda: _torch_plan(shapes, n_ranks),
        RANK_0: lambda: _timed_plan(shapes, n_ranks, 0, values),
        RANK_N: lambda: _timed_plan(shapes, n_ranks, n_ranks - 1, values),
    }
    seconds = interleave(ways, rounds)["seconds"]
    title = f"seconds to plan a save / torch's global plan, on rank 0: {n_ranks} ranks, {len(shapes)} tensors"
    note = "ours is kept for all saves of a structure, torch's is made for every save. Rank 0 makes .metadata, too"
    figure = Figure(
        f"growth.plan.{what}", title, "lower", over(TORCH_PLAN, seconds), seconds=seconds, note=note
    )
    try:
        return [figure, *_simulate_files(metadata, shapes, folder, n_ranks, what, rounds)]
    finally:
        rmtree(folder)


def _timed_plan(
    shapes: Mapping[str, Any], n_ranks: int, rank: int, values: Mapping[str, Any]
) -> dict[str, float]:
    """Seconds to digest and plan a structure that is not in the cache."""
    structure = _structure(shapes, n_ranks, rank)
    return _timed(lambda: (structure.digest, plan_alone(structure, values)))


def _structure(shapes: Mapping[str, tuple[int, ...]], n_ranks: int, rank: int) -> Structure:
    """Structure of tensors sharded by rows, as FSDP2 shards them. Numbers are on every rank."""
    properties, mesh = TensorProperties(dtype=torch.float32), tuple(range(n_ranks))
    tensors = [
        TensorStructure(
            name, shape, properties, mesh if shape else None, (Shard(0),) if shape else ()
        )
        for name, shape in shapes.items()
    ]
    return Structure(mesh, rank, tuple(tensors))


def _torch_plan(shapes: dict[str, tuple[int, ...]], n_ranks: int) -> dict[str, float]:
    plans = _local_plans(shapes, n_ranks)
    return _timed(lambda: DefaultSavePlanner().create_global_plan(plans))


def _tensor_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a training state by name: weights, two moments per weight, and a step count that
    all ranks share.
    """
    square, wide = (WIDTH, WIDTH), (3 * WIDTH, WIDTH)
    layer = {f"self_attn.{n}_proj": square for n in "qkvo"} | {
        "mlp.gate_proj": wide,
        "mlp.up_proj": wide,
    }
    layer |= {
        "mlp.down_proj": wide[::-1],
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    weights = {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    weights |= {
        "embed_tokens": (VOCABULARY, WIDTH),
        "lm_head": (VOCABULARY, WIDTH),
        "norm": (WIDTH,),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in weights.items():
        shapes |= {f"dcp.model.{name}": shape, f"dcp.optim.state.{name}.step": ()}
        shapes |= {
            f"dcp.optim.state.{name}.{moment}": shape for moment in ("exp_avg", "exp_avg_sq")
        }
    return shapes


def _local_plans(shapes: dict[str, tuple[int, ...]], n_ranks: int) -> list[SavePlan]:
    paths = {name: tuple(name.split(".")) for name in shapes}
    properties = TensorProperties(dtype=torch.float32)
    plans = []
    for rank in range(n_ranks):
        items = []
        for name, shape in shapes.items():
            offsets, sizes, kind = (
                torch.Size([0] * len(shape)),
                torch.Size(shape),
                WriteItemType.TENSOR,
            )
            if shape:  # sharded by rows, as by FSDP2
                rows = -(-shape[0] // n_ranks)
                begin = min(rank * rows, shape[0])
                offsets = torch.Size([begin, *offsets[1:]])
                sizes = torch.Size([min(rows, shape[0] - begin), *shape[1:]])
                kind = WriteItemType.SHARD
            data = TensorWriteData(
                ChunkStorageMetadata(offsets, sizes), properties, torch.Size(shape)
            )
            items.append(WriteItem(MetadataIndex(name, offsets), kind, tensor_data=data))
        plans.append(SavePlan(items, planner_data=paths))
    return plans


def _simulate_files(
    metadata: bytes,
    shapes: Mapping[str, tuple[int, ...]],
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
    sizes = {f"actor/{name}": n_bytes for name, n_bytes in parse_metadata(metadata).files.items()}
    sizes |= {f"state/rank_{rank:05d}.pt": 10_000 for rank in range(n_ranks)}
    for name, size in sizes.items():
        (staging / name).touch()
        os.truncate(staging / name, size)
    entries = [FileEntry(name, size, bytes_digest(b"")) for name, size in sizes.items()]
    info = RecoverInfo(StepInfo(0, 0, 0, 1), "simulated", n_ranks)
    entries += [write_entry(staging, "recover_info.json", info.to_json())]
    entries += [write_entry(staging, "actor/.metadata", metadata)]
    path = store.commit(staging, 0, entries, {"world_size": n_ranks}).path
    actor, sent = path / "actor", pickle.dumps(read_layout(path / "actor"))
    ways = {
        LISTING: lambda: _timed(lambda: _list(path)),
        "Holdfast choice of a generation": lambda: _timed(lambda: store.inspect(path)),
    }
    choice = interleave(ways, rounds)["seconds"]
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
            f"seconds to compare names and sizes with the manifest / listing the files: {n_ranks} ranks",
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
            note="rank 0 parses .metadata once for all; the others get the layout, and look at their own files only",
        ),
        Figure(
            f"growth.manifest.{what}",
            f"bytes of the manifest / torch's .metadata: {n_ranks} ranks",
            "lower",
            {"Holdfast manifest": [manifest]},
        ),
    ]


def _plan_restore(
    folder: Path, sent: bytes | None, shapes: Mapping[str, tuple[int, ...]], n_ranks: int, rank: int
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
    return sum(
        os.stat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(path)
        for name in names
    )
