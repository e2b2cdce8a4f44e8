"""`hf_save`, `hf_load`, `publish`: Hugging Face files out of the engine, back into it, and into a
server's model.
"""

import multiprocessing
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from shutil import rmtree

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from holdfast.engine import WeightUpdateMeta
from holdfast.engine.hf.versions import version_path
from holdfast.utils.processes import die_with_parent

from . import ours
from .harness import Figure, Options, Times, interleave, over
from .limits import WarmBuffer
from .model import build_engine, bytes_of, weight_tensors
from .ranks import Session, on_ranks
from .rivals import ArealHF, Saver, TorchHF

RAW_WRITE, CACHED, CAST = "raw pwrite+fsync", "plain cached read", "torch's cast alone, from memory"
RAW_PUBLISH = "raw pwrite+fsync, then one plain cached read"
HF_SAVE, HF_LOAD, PUBLISH = (
    "Holdfast engine.save",
    "Holdfast engine.load",
    "Holdfast update_weights",
)


def hf_save(options: Options) -> list[Figure]:
    """Measure an export, from the call until the folder is complete."""
    times = on_ranks(_measure_save, options)
    return [
        Figure(
            "hf_save.throughput",
            "bytes a second / raw parallel pwrite+fsync of as many bytes into one file",
            "higher",
            over(RAW_WRITE, times["throughput"], inverse=True),
            {HF_SAVE: 0.85},
            times["throughput"],
            note="the rivals' files are not fsynced",
        ),
        Figure(
            "hf_save.bfloat16",
            "the same of files in bfloat16, of weights in float32",
            "higher",
            over(RAW_WRITE, times["bfloat16"], inverse=True),
            seconds=times["bfloat16"],
            note="rank 0 casts what AReaL's way gathers",
        ),
    ]


def hf_load(options: Options) -> list[Figure]:
    """Measure an import of files that are in the page cache."""
    times = on_ranks(_measure_load, options)
    return [
        Figure(
            "hf_load.throughput",
            "bytes a second / plain cached read of as many bytes, every rank its share",
            "higher",
            over(CACHED, times["throughput"], inverse=True),
            {HF_LOAD: 0.6},
            times["throughput"],
            note="ours checks before anything changes that the files hold every tensor in its shape",
        ),
        Figure(
            "hf_load.bfloat16",
            "the same of files in bfloat16, into weights in float32",
            "higher",
            over(CACHED, times["bfloat16"], inverse=True),
            seconds=times["bfloat16"],
            note="twice the bytes of the file are written to memory, so that the cast alone takes longer than the read",
        ),
    ]


def publish(options: Options) -> list[Figure]:
    """Measure the way from the trainer's shards into the model of a server in another process."""
    seconds = on_ranks(_measure_publish, options)["seconds"]
    return [
        Figure(
            "publish.time",
            "time until the server has the weights / raw parallel pwrite+fsync and one process's cached read",
            "lower",
            over(RAW_PUBLISH, seconds),
            seconds=seconds,
            note="the same server loads both ways' folders; ours is durable, listed in a manifest, and confirmed",
        )
    ]


class _SharedFile:
    """One file for all ranks, in which each rank owns a byte range. Holds the raw bytes of the
    tensors.
    """

    def __init__(self, session: Session, tensors: list[torch.Tensor], folder: Path) -> None:
        sizes = session.all(bytes_of(tensors))
        self.path, self.total_bytes = folder / "raw", sum(sizes)
        self._buffer, self._offset = WarmBuffer(tensors), sum(sizes[: session.rank])
        self._buffer.copy()

    def write(self) -> None:
        """Write this rank's part."""
        self._buffer.write(self.path, self._offset)

    def read(self) -> None:
        """Read this rank's part."""
        self._buffer.read(self.path, self._offset)


def _new_folder(session: Session, name: str) -> Path:
    folder = session.options.scratch / name
    if session.rank == 0:
        folder.mkdir(exist_ok=True)
    session.barrier()
    return folder


def _remove(session: Session, path: Path) -> None:
    session.barrier()
    if session.rank == 0:
        rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    session.barrier()


def _measure_save(session: Session) -> Times:
    engine, folder = build_engine(session), _new_folder(session, "hf_save")
    path, weights = folder / "export", weight_tensors(engine)

    def measure(what: str, tensors: list[torch.Tensor], savers: Mapping[str, Saver]) -> Times:
        raw = _SharedFile(session, tensors, folder)

        def once(call: Callable[[], object], written: Path) -> dict[str, float]:
            seconds = session.seconds(call)
            _remove(session, written)
            return {what: seconds}

        ways = {RAW_WRITE: lambda: once(raw.write, raw.path)}
        ways |= {
            name: lambda saver=saver: once(lambda: saver.save(path), path)
            for name, saver in savers.items()
        }
        return interleave(ways, session.options.rounds)

    areal = "AReaL gather+save_pretrained"
    as_they_are: dict[str, Saver] = {
        HF_SAVE: ours.EngineSave(engine, "hf"),
        areal: ArealHF(session, engine),
        "torch HF writer+consolidation": TorchHF(session, engine),
    }
    cast: dict[str, Saver] = {
        HF_SAVE: ours.EngineSave(engine, "hf", "bfloat16"),
        areal: ArealHF(session, engine, torch.bfloat16),
    }
    times = measure("throughput", weights, as_they_are)
    times |= measure("bfloat16", [tensor.bfloat16() for tensor in weights], cast)
    engine.destroy()
    return times


def _measure_load(session: Session) -> Times:
    engine, folder = build_engine(session), _new_folder(session, "hf_load")
    weights = weight_tensors(engine)
    halves = [tensor.bfloat16() for tensor in weights]
    holdfast, areal = ours.EngineSave(engine, "hf"), ArealHF(session, engine)

    def measure(
        what: str, tensors: list[torch.Tensor], ways: dict[str, Callable[[], object]]
    ) -> Times:
        raw = _SharedFile(session, tensors, folder)
        raw.write()
        ways = {CACHED: raw.read, **ways}
        timed = {name: lambda way=way: {what: session.seconds(way)} for name, way in ways.items()}
        return interleave(timed, session.options.rounds)

    def load_ways(path: Path) -> dict[str, Callable[[], object]]:
        return {
            HF_LOAD: lambda: holdfast.load(path),
            "AReaL rank 0+broadcast": lambda: areal.load(path),
        }

    def cast() -> None:
        for weight, half in zip(weights, halves, strict=True):
            weight.copy_(half)

    path, half_path = folder / "float32", folder / "bfloat16"
    holdfast.save(path)
    ours.EngineSave(engine, "hf", "bfloat16").save(half_path)
    torch_reader = TorchHF(session, engine)
    times = measure(
        "throughput",
        weights,
        load_ways(path) | {"torch HF reader": lambda: torch_reader.load(path)},
    )
    times |= measure("bfloat16", halves, load_ways(half_path) | {CAST: cast})
    engine.destroy()
    return times


class _Server:
    """Client of a process that holds the whole model and loads folders on request, like vLLM and
    SGLang.
    """

    def __init__(self, config_folder: str, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, config_folder, device), daemon=True
        )
        self._process.start()
        theirs.close()

    def update_weights_from_disk(self, path: str, version: int) -> int:
        """Load a folder. Returns the version served."""
        self._pipe.send((path, version))
        served = self._pipe.recv()
        if isinstance(served, str):
            raise RuntimeError(f"the server could not load {path}: {served}")
        return served

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(30)


def _serve(pipe: Connection, config_folder: str, device: str) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(config_folder), dtype=torch.float32
    ).to(device)
    targets = {name: tensor.data for name, tensor in model.state_dict(keep_vars=True).items()}
    while True:
        try:
            path, version = pipe.recv()
        except EOFError:
            return
        try:
            for file in sorted(Path(path).glob("*.safetensors")):
                with safe_open(file, "pt", device=device) as tensors:
                    for name in tensors.keys():  # noqa: SIM118  (it is no dict)
                        targets[name].copy_(tensors.get_tensor(name))
            pipe.send(version)
        except (OSError, KeyError, RuntimeError) as error:
            pipe.send(f"{type(error).__name__}: {error}")


def _measure_publish(session: Session) -> Times:
    engine, folder = build_engine(session), _new_folder(session, "publish")
    raw, areal = _SharedFile(session, weight_tensors(engine), folder), ArealHF(session, engine)
    server = _Server(engine.config.path, str(session.device)) if session.rank == 0 else None
    everything = (
        WarmBuffer([torch.empty(raw.total_bytes, dtype=torch.uint8)]) if session.rank == 0 else None
    )
    engine.connect_engine(
        [server] if server else [], WeightUpdateMeta("disk", str(folder / "weights"), keep=1)
    )
    version = 0

    def raw_publish() -> None:
        raw.write()
        session.barrier()
        if everything is not None:
            everything.read(raw.path)

    def our_publish() -> None:
        nonlocal version
        version += 1
        engine.set_version(version)
        engine.update_weights()

    def areal_publish() -> None:
        path = folder / "areal"
        areal.save(path)
        if server is not None:
            server.update_weights_from_disk(str(path), 0)
        session.barrier()

    def once(call: Callable[[], None], written: Callable[[], Path]) -> dict[str, float]:
        seconds = session.seconds(call)
        _remove(session, written())
        return {"seconds": seconds}

    ways = {
        RAW_PUBLISH: lambda: once(raw_publish, lambda: raw.path),
        PUBLISH: lambda: once(our_publish, lambda: version_path(folder / "weights", version)),
        "AReaL save_pretrained, disk": lambda: once(areal_publish, lambda: folder / "areal"),
    }
    times = interleave(ways, session.options.rounds)
    if server is not None:
        server.close()
    engine.destroy()
    return times
