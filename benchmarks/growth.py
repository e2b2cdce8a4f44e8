"""`growth`: what becomes of saves when the model grows, and when there are more ranks.

Saves are measured on real ranks, up to four. What a single process has to do for all of them (merge the plans, write
and read metadata and manifest, list the files) is measured up to 1,024, on the plans and the files that so many ranks
would make of a Qwen3 of four layers.
"""

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from holdfast.engine.api import StepInfo
from holdfast.engine.compat.torch_private import CURRENT_DCP_VERSION, StorageInfo
from holdfast.engine.dcp.metadata import read_metadata
from holdfast.engine.dcp.save_plan import spread
from holdfast.recover import GenerationStore, RecoverInfo
from holdfast.utils.files import bytes_digest
from holdfast.utils.manifest import MANIFEST_NAME, FileEntry, write_sealed

from . import ours
from .agreement import agreement
from .harness import Figure, Options, Times, interleave, over
from .limits import WarmBuffer
from .model import build_engine, training_tensors
from .ranks import Session, on_ranks
from .rivals import ArealDCP

RAW, LISTING = "raw write+fsync", "listing the files"
PLAN, TORCH_PLAN = "Holdfast planner", "torch planner"
WIDTH, VOCABULARY = 4096, 32768  # rows for each of 1,024 ranks


def growth(options: Options) -> list[Figure]:
    """All of it; figures are named after what grows."""
    sizes = [options.parameters] if options.quick else [1_000_000, 10_000_000]
    ranks = [1] if options.quick else [1, 2, 4]
    simulated = [2, 4] if options.quick else [4, 64, 1024]
    figures = [_save_figure(options, f"size.{size / 1e6:g}M", size, options.ranks) for size in sizes]
    if options.device == "cpu":
        size = min(options.parameters, 20_000_000)
        figures += [_save_figure(options, f"ranks.{n}", size, n) for n in ranks]
    for n_ranks in simulated:
        figures += _simulate(options, n_ranks, f"{n_ranks}_ranks", layers=4)
    figures += _simulate(options, simulated[1], f"{simulated[1]}_ranks_16_layers", layers=16)[:1]
    return figures + (agreement(options) if options.device == "cpu" else [])


def _save_figure(options: Options, what: str, parameters: int, ranks: int) -> Figure:
    seconds = on_ranks(_measure_save, options, parameters, ranks=ranks)["seconds"]
    title = f"bytes a second / raw write+fsync: {parameters / 1e6:g}M parameters, {ranks} rank(s)"
    return Figure(f"growth.save.{what}", title, "higher", over(RAW, seconds, inverse=True), seconds=seconds)


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
    savers = {ours.ENGINE_SAVE: ours.EngineSave(engine, "dcp"), "AReaL dcp.save": ArealDCP(session, engine)}
    ways = {RAW: lambda: once(lambda: buffer.write(raw), raw)}
    ways |= {name: lambda saver=saver: once(lambda: saver.save(path), path) for name, saver in savers.items()}
    times = interleave(ways, session.options.rounds)
    engine.destroy()
    return times


def _simulate(options: Options, n_ranks: int, what: str, *, layers: int) -> list[Figure]:
    names = _tensor_shapes(layers)
    metadata: list[Metadata] = []

    def plan(prepare: Callable[[list[SavePlan]], list[SavePlan]]) -> dict[str, float]:
        plans = _local_plans(names, n_ranks)
        started = time.perf_counter()
        metadata[:] = [DefaultSavePlanner().create_global_plan(prepare(plans))[1]]
        return {"seconds": time.perf_counter() - started}

    rounds = 1 if n_ranks > 100 else options.rounds
    seconds = interleave({TORCH_PLAN: lambda: plan(lambda plans: plans), PLAN: lambda: plan(spread)}, rounds)["seconds"]
    title = f"seconds of the global plan / torch's default planner: {n_ranks} ranks, {len(names)} tensors"
    note = "ours is kept for all saves of a structure, torch's is made for every save"
    figure = Figure(f"growth.plan.{what}", title, "lower", over(TORCH_PLAN, seconds), seconds=seconds, note=note)
    folder = options.scratch / "simulated"
    try:
        return [figure, *_simulate_files(metadata[0], folder, n_ranks, what, rounds)]
    finally:
        rmtree(folder)


def _tensor_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a training state by name: weights, two moments each, and a step count that all ranks have."""
    square, wide = (WIDTH, WIDTH), (3 * WIDTH, WIDTH)
    layer = {f"self_attn.{n}_proj": square for n in "qkvo"} | {"mlp.gate_proj": wide, "mlp.up_proj": wide}
    layer |= {"mlp.down_proj": wide[::-1], "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
    weights = {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    weights |= {"embed_tokens": (VOCABULARY, WIDTH), "lm_head": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in weights.items():
        shapes |= {f"dcp.model.{name}": shape, f"dcp.optim.state.{name}.step": ()}
        shapes |= {f"dcp.optim.state.{name}.{moment}": shape for moment in ("exp_avg", "exp_avg_sq")}
    return shapes


def _local_plans(shapes: dict[str, tuple[int, ...]], n_ranks: int) -> list[SavePlan]:
    paths = {name: tuple(name.split(".")) for name in shapes}
    properties = TensorProperties(dtype=torch.float32)
    plans = []
    for rank in range(n_ranks):
        items = []
        for name, shape in shapes.items():
            offsets, sizes, kind = torch.Size([0] * len(shape)), torch.Size(shape), WriteItemType.TENSOR
            if shape:  # sharded by rows, as FSDP2 does
                rows = -(-shape[0] // n_ranks)
                begin = min(rank * rows, shape[0])
                offsets = torch.Size([begin, *offsets[1:]])
                sizes = torch.Size([min(rows, shape[0] - begin), *shape[1:]])
                kind = WriteItemType.SHARD
            data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, torch.Size(shape))
            items.append(WriteItem(MetadataIndex(name, offsets), kind, tensor_data=data))
        plans.append(SavePlan(items, planner_data=paths))
    return plans


def _simulate_files(metadata: Metadata, root: Path, n_ranks: int, what: str, rounds: int) -> list[Figure]:
    """Metadata and manifest as so many ranks leave them; the data files are of their size, but empty on the disk."""
    store = GenerationStore(root)
    staging = store.open_staging(0)
    for folder in ("actor", "state"):
        (staging / folder).mkdir()
    metadata.version, metadata.storage_meta = CURRENT_DCP_VERSION, StorageMeta()
    metadata.storage_data = {
        MetadataIndex(name, chunk.offsets): StorageInfo(f"__{number}_0.distcp", 0, 4 * chunk.sizes.numel())
        for name, entry in metadata.state_dict_metadata.items()
        for number, chunk in enumerate(entry.chunks)  # type: ignore[union-attr]
    }
    sizes: dict[str, int] = {}
    for part in metadata.storage_data.values():
        sizes[f"actor/{part.relative_path}"] = max(part.length, sizes.get(f"actor/{part.relative_path}", 0))
    sizes |= {f"state/rank_{rank:05d}.pt": 10_000 for rank in range(n_ranks)}
    for name, size in sizes.items():
        (staging / name).touch()
        os.truncate(staging / name, size)
    entries = [FileEntry(name, size, bytes_digest(b"")) for name, size in sizes.items()]
    info = RecoverInfo(StepInfo(0, 0, 0, 1), "simulated", n_ranks)
    metadata_bytes = pickle.dumps(metadata)
    entries += [write_sealed(staging, "recover_info.json", info.to_json())]
    entries += [write_sealed(staging, "actor/.metadata", metadata_bytes)]
    path = store.commit(staging, 0, entries, {"world_size": n_ranks}).path
    actor = path / "actor"
    ways = {
        LISTING: lambda: _timed(lambda: _list(path)),
        "Holdfast choice of a generation": lambda: _timed(lambda: store.inspect(path)),
    }
    choice = interleave(ways, rounds)["seconds"]
    ways = {
        "torch read_metadata": lambda: _timed(FileSystemReader(actor).read_metadata),
        "Holdfast read_metadata": lambda: _timed(lambda: read_metadata(actor)),
    }
    reading = interleave(ways, rounds)["seconds"]
    manifest = (path / MANIFEST_NAME).stat().st_size / len(metadata_bytes)
    return [
        Figure(
            f"growth.choice.{what}",
            f"seconds to compare names and sizes with the manifest / listing the files: {n_ranks} ranks",
            "lower",
            over(LISTING, choice),
            seconds=choice,
        ),
        Figure(
            f"growth.metadata.{what}",
            f"seconds to read .metadata without running it / torch's unpickling: {n_ranks} ranks",
            "lower",
            over("torch read_metadata", reading),
            seconds=reading,
        ),
        Figure(
            f"growth.manifest.{what}",
            f"bytes of the manifest / torch's .metadata: {n_ranks} ranks",
            "lower",
            {"Holdfast manifest": [manifest]},
        ),
    ]


def _timed(call: Callable[[], object]) -> dict[str, float]:
    started = time.perf_counter()
    call()
    return {"seconds": time.perf_counter() - started}


def _list(path: Path) -> int:
    return sum(os.stat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)
