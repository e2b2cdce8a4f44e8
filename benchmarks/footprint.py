"""`memory`: peak host memory that a save or a load adds to the model. `bytes`: bytes written per
byte of state.

Memory is the peak of ``RssAnon + RssShmem`` (/proc/self/status, every 2 ms) above the level right
before the call: pages without a file, which the kernel cannot take back. The kernel's own peak
(``VmHWM``, reset through /proc/self/clear_refs) also counts mapped pages of files, which cost
nothing, and would put ways that map files at a disadvantage. Every way runs in fresh processes, so
that it cannot reuse memory that another way has allocated.

Written bytes are ``write_bytes`` of /proc/self/io: the bytes handed to the block layer, including
files that are removed later. On a file system that does not report them (tmpfs), the sizes of the
remaining files are added up.
"""

import ctypes
import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

from torch import Tensor

from holdfast.engine import FSDPEngine

from . import ours
from .harness import Figure, Options
from .model import build_engine, bytes_of, folder_bytes, training_tensors, weight_tensors
from .ranks import Session, on_ranks
from .rivals import ArealDCP, ArealHF, TorchAsync, TorchAsyncKept, TorchHF, VerlShards

SAMPLE_S = 0.002


@dataclass(frozen=True)
class _Case:
    """A way to save, and to load if ``load`` names that way."""

    make: Callable[..., object]
    save: str
    load: str | None = None


def _sync_dump(session: Session, engine: FSDPEngine) -> ours.Dump:
    return ours.Dump(session, engine, "async-False", async_save=False)


def _async_dump(session: Session, engine: FSDPEngine) -> ours.Dump:
    return ours.Dump(session, engine, "async-True", async_save=True)


def _engine_dcp(session: Session, engine: FSDPEngine) -> ours.EngineSave:
    return ours.EngineSave(engine, "dcp")


def _engine_hf(session: Session, engine: FSDPEngine) -> ours.EngineSave:
    return ours.EngineSave(engine, "hf")


# Ways to keep a training state, and ways to export weights.
_DCP = {
    "dump": _Case(_sync_dump, ours.SYNC_DUMP),
    "async dump": _Case(_async_dump, ours.DUMP),
    "engine": _Case(_engine_dcp, "Holdfast engine.save", "Holdfast engine.load"),
    "areal": _Case(ArealDCP, "AReaL dcp.save", "AReaL dcp.load"),
    "async": _Case(TorchAsync, "torch async_save"),
    "kept": _Case(TorchAsyncKept, "torch async_save, kept stager"),
    "verl": _Case(VerlShards, "verl torch.save", "verl torch.load"),
}
_HF = {
    "engine": _Case(_engine_hf, "Holdfast engine.save", "Holdfast engine.load"),
    "areal": _Case(ArealHF, "AReaL gather+save_pretrained", "AReaL rank 0+broadcast"),
    "torch": _Case(TorchHF, "torch HF writer+consolidation", "torch HF reader"),
}
_GROUPS = {"dcp": _DCP, "hf": _HF}


def memory(options: Options) -> list[Figure]:
    """Peak extra memory of the rank that needs most, divided by the size of its shard."""
    # Fresh processes for every way. Figures are `dcp_save`, `dcp_load`, `hf_save` and `hf_load`.
    peaks: dict[str, dict[str, list[float]]] = {}
    for group, cases in _GROUPS.items():
        for key in cases:
            measured = on_ranks(_measure_memory, options, group, key)
            for name, peak_of in measured.items():
                figure = peaks.setdefault(name, {})
                for way, peak in peak_of.items():
                    figure[way] = [peak]

    needed = {
        "dcp_save": {ours.SYNC_DUMP: 0.1, "Holdfast engine.save": 0.1, ours.DUMP: 1.05},
        "dcp_load": {},
        "hf_save": {"Holdfast engine.save": 0.1},
        "hf_load": {"Holdfast engine.load": 0.1},
    }
    figures = []
    for name, limits in needed.items():
        shard = "shard of the weights"
        if name.startswith("dcp"):
            shard = "shard of weights and optimizer"
        title = f"peak extra host memory / {shard}"
        figures.append(Figure(f"memory.{name}", title, "lower", peaks[name], limits))
    return figures


def bytes_written(options: Options) -> list[Figure]:
    """Bytes written, divided by the bytes of the state. Embedding and head are tied."""
    # A way may pad and describe its data, but not write it twice.
    titles = {
        "dcp": "bytes written / bytes of weights and optimizer state, tied",
        "hf": "bytes written / bytes of weights, tied",
    }
    note = "needed is 1.00: headers and metadata are a few thousandths at this size"
    figures = []
    for group, title in titles.items():
        ratios = on_ranks(_measure_bytes, options, group)
        needed = {way: 1.005 for way in ratios if way.startswith("Holdfast")}
        figures.append(Figure(f"bytes.{group}", title, "lower", ratios, needed, note=note))
    return figures


def _measure_memory(
    session: Session,
    group: str,
    key: str,
) -> dict[str, dict[str, float]]:
    case = _GROUPS[group][key]
    engine = build_engine(session)
    shard_bytes = bytes_of(_tensors(engine, group))
    path = session.options.scratch / "memory"
    way: ours.EngineSave = case.make(session, engine)  # type: ignore[assignment]

    # A save in the background needs its memory until it is written.
    def save() -> None:
        way.save(path)
        way.wait()

    peaks = {f"{group}_save": {case.save: peak_bytes(session, save)}}
    if case.load is not None:
        peaks[f"{group}_load"] = {case.load: peak_bytes(session, lambda: way.load(path))}
    if isinstance(way, ours.Dump):
        way.close()
    engine.destroy()

    # The rank that needs most.
    ratios: dict[str, dict[str, float]] = {}
    for name, peak_of in peaks.items():
        ratios[name] = {}
        for saved_by, peak in peak_of.items():
            share = peak / shard_bytes
            ratios[name][saved_by] = max(session.all(share))
    return ratios


def _tensors(engine: FSDPEngine, group: str) -> list[Tensor]:
    """This rank's shards of what the ways of a group save."""
    return training_tensors(engine) if group == "dcp" else weight_tensors(engine)


def _measure_bytes(session: Session, group: str) -> dict[str, list[float]]:
    engine = build_engine(session, tied=True)
    logical_bytes = sum(session.all(bytes_of(_tensors(engine, group))))
    ratios = {}
    for key, case in _GROUPS[group].items():
        way: ours.EngineSave = case.make(session, engine)  # type: ignore[assignment]
        path = session.options.scratch / key
        if isinstance(way, ours.Dump):
            path = way.root

        # Without the barrier, one rank could count its bytes after another has begun.
        session.barrier()
        before = _write_bytes()
        way.save(path)
        way.wait()

        # Some file systems do not count.
        own_bytes = _write_bytes() - before
        written = sum(session.all(own_bytes))
        if not written:
            written = folder_bytes(path)
        ratios[case.save] = [written / logical_bytes]

        # All have read the size of the folder before rank 0 removes it.
        session.barrier()
        if isinstance(way, ours.Dump):
            way.close()
        if session.rank == 0:
            rmtree(path)
    engine.destroy()
    return ratios


def peak_bytes(session: Session, call: Callable[[], object]) -> int:
    """Measure by how much the host memory of this rank grows during the call."""
    # Garbage of earlier calls would be collected during this one.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory would be reused and not show
    session.barrier()
    before = _unreclaimable_bytes()
    peak = 0

    # A thread samples while the call runs.
    stop = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not stop.wait(SAMPLE_S):
            peak = max(peak, _unreclaimable_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        call()
    finally:
        stop.set()
        sampler.join()
    return max(0, peak - before)


def _unreclaimable_bytes() -> int:
    fields = _proc_fields("status")
    return 1024 * (fields["RssAnon"] + fields["RssShmem"])


def _write_bytes() -> int:
    return _proc_fields("io")["write_bytes"]


def _proc_fields(file: str) -> dict[str, int]:
    """The numbers in a file of this process, whose lines are ``name: number unit``."""
    fields = {}
    text = Path("/proc/self", file).read_text()
    for line in text.splitlines():
        # Some values are words, or several numbers.
        name, _, value = line.partition(":")
        number, _, _ = value.strip().partition(" ")
        if number.isdecimal():
            fields[name] = int(number)
    return fields
