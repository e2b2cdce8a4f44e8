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

from . import ours
from .harness import Figure, Options
from .model import build_engine, bytes_of, folder_bytes, training_tensors, weight_tensors
from .ranks import Session, on_ranks
from .rivals import ArealDCP, ArealHF, TorchAsync, TorchAsyncKept, TorchHF, VerlShards

SAMPLE_S = 0.002

_Make = Callable[..., object]


@dataclass(frozen=True)
class _Case:
    """A way to save, and to load if ``load`` names that way."""

    make: _Make
    save: str
    load: str | None = None


def _dump(*, async_save: bool) -> _Make:
    return lambda session, engine: ours.Dump(
        session, engine, f"async-{async_save}", async_save=async_save
    )


def _engine_save(weight_format: str) -> _Make:
    return lambda session, engine: ours.EngineSave(engine, weight_format)


_DCP = {
    "dump": _Case(_dump(async_save=False), ours.SYNC_DUMP),
    "async dump": _Case(_dump(async_save=True), ours.DUMP),
    "engine": _Case(_engine_save("dcp"), "Holdfast engine.save", "Holdfast engine.load"),
    "areal": _Case(ArealDCP, "AReaL dcp.save", "AReaL dcp.load"),
    "async": _Case(TorchAsync, "torch async_save"),
    "kept": _Case(TorchAsyncKept, "torch async_save, kept stager"),
    "verl": _Case(VerlShards, "verl torch.save", "verl torch.load"),
}
_HF = {
    "engine": _Case(_engine_save("hf"), "Holdfast engine.save", "Holdfast engine.load"),
    "areal": _Case(ArealHF, "AReaL gather+save_pretrained", "AReaL rank 0+broadcast"),
    "torch": _Case(TorchHF, "torch HF writer+consolidation", "torch HF reader"),
}
_GROUPS = {"dcp": _DCP, "hf": _HF}


def memory(options: Options) -> list[Figure]:
    """Peak extra memory of the rank that needs most, divided by the size of its shard."""
    peaks: dict[str, dict[str, list[float]]] = {}
    for group, cases in _GROUPS.items():
        for key in cases:
            for name, peak in on_ranks(_measure_memory, options, group, key).items():
                peaks.setdefault(name, {}).update({way: [value] for way, value in peak.items()})
    shard = {"dcp": "shard of weights and optimizer", "hf": "shard of the weights"}
    needed = {
        "dcp_save": {ours.SYNC_DUMP: 0.1, "Holdfast engine.save": 0.1, ours.DUMP: 1.05},
        "dcp_load": {},
        "hf_save": {"Holdfast engine.save": 0.1},
        "hf_load": {"Holdfast engine.load": 0.1},
    }
    return [
        Figure(
            f"memory.{name}",
            f"peak extra host memory / {shard[name[: name.index('_')]]}",
            "lower",
            values,
            limits,
        )
        for name, limits in needed.items()
        for values in [peaks[name]]
    ]


def bytes_written(options: Options) -> list[Figure]:
    """Bytes written, divided by the bytes of the state. The model ties its embedding to its head."""
    figures = []
    for group, cases in _GROUPS.items():
        ratios = on_ranks(_measure_bytes, options, group)
        needed = {case.save: 1.005 for case in cases.values() if case.save.startswith("Holdfast")}
        note = "needed is 1.00: headers and metadata are a few thousandths at this size"
        title = (
            "bytes written / bytes of weights"
            + (" and optimizer state" if group == "dcp" else "")
            + ", tied"
        )
        figures.append(Figure(f"bytes.{group}", title, "lower", ratios, needed, note=note))
    return figures


def _measure_memory(session: Session, group: str, key: str) -> dict[str, dict[str, float]]:
    case, engine = _GROUPS[group][key], build_engine(session)
    tensors = training_tensors(engine) if group == "dcp" else weight_tensors(engine)
    shard_bytes, path = bytes_of(tensors), session.options.scratch / "memory"
    del tensors
    way: ours.EngineSave = case.make(session, engine)  # type: ignore[assignment]

    def save() -> None:
        way.save(path)
        way.wait()

    peaks = {f"{group}_save": {case.save: peak_bytes(session, save)}}
    if case.load is not None:
        peaks[f"{group}_load"] = {case.load: peak_bytes(session, lambda: way.load(path))}
    if isinstance(way, ours.Dump):
        way.close()
    engine.destroy()
    return {
        name: {way: max(session.all(peak / shard_bytes)) for way, peak in peak_of.items()}
        for name, peak_of in peaks.items()
    }


def _measure_bytes(session: Session, group: str) -> dict[str, list[float]]:
    engine = build_engine(session, tied=True)
    tensors = training_tensors(engine) if group == "dcp" else weight_tensors(engine)
    logical_bytes = sum(session.all(bytes_of(tensors)))
    ratios = {}
    for key, case in _GROUPS[group].items():
        way: ours.EngineSave = case.make(session, engine)  # type: ignore[assignment]
        path = way.root if isinstance(way, ours.Dump) else session.options.scratch / key
        session.barrier()
        before = _write_bytes()
        way.save(path)
        way.wait()
        written = sum(session.all(_write_bytes() - before))
        ratios[case.save] = [(written or folder_bytes(path)) / logical_bytes]
        session.barrier()
        if isinstance(way, ours.Dump):
            way.close()
        if session.rank == 0:
            rmtree(path)
    engine.destroy()
    return ratios


def peak_bytes(session: Session, call: Callable[[], object]) -> int:
    """Measure by how much the host memory of this rank grows during the call."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory would be reused and not show
    session.barrier()
    stop, peak, before = threading.Event(), [0], _unreclaimable_bytes()

    def sample() -> None:
        while not stop.wait(SAMPLE_S):
            peak[0] = max(peak[0], _unreclaimable_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        call()
    finally:
        stop.set()
        sampler.join()
    return max(0, peak[0] - before)


def _unreclaimable_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def _write_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"])
