"""`hf_save`, `hf_load`, `publish`: Hugging Face files out of the engine, back into it, and into a
server's model.
"""

import multiprocessing
import signal
from collections.abc import Callable, Mapping
from functools import partial
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

RAW_WRITE = "raw pwrite+fsync"
CACHED = "plain cached read"
CAST = "torch's cast alone, from memory"
RAW_PUBLISH = "raw pwrite+fsync, then one plain cached read"
HF_SAVE = "Holdfast engine.save"
HF_LOAD = "Holdfast engine.load"
PUBLISH = "Holdfast update_weights"


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
            note="ours checks before anything changes that the files hold every tensor in "
            "its shape",
        ),
        Figure(
            "hf_load.bfloat16",
            "the same of files in bfloat16, into weights in float32",
            "higher",
            over(CACHED, times["bfloat16"], inverse=True),
            seconds=times["bfloat16"],
            note="twice the bytes of the file are written to memory, so that the cast alone "
            "takes longer than the read",
        ),
    ]


def publish(options: Options) -> list[Figure]:
    """Measure the way from the trainer's shards into the model of a server in another process."""
    seconds = on_ranks(_measure_publish, options)["seconds"]
    return [
        Figure(
            "publish.time",
            "time until the server has the weights / raw parallel pwrite+fsync and "
            "one process's cached read",
            "lower",
            over(RAW_PUBLISH, seconds),
            seconds=seconds,
            note="the same server loads both ways' folders; ours is durable, listed in a manifest, "
            "and confirmed",
        )
    ]


class _SharedFile:
    """One file for all ranks, in which each rank owns a byte range. Holds the raw bytes of the
    tensors.
    """

    def __init__(
        self,
        session: Session,
        tensors: list[torch.Tensor],
        folder: Path,
    ) -> None:
        sizes = session.all(bytes_of(tensors))
        self.path = folder / "raw"
        self.total_bytes = sum(sizes)
        self._offset = sum(sizes[: session.rank])
        self._buffer = WarmBuffer(tensors)
        self._buffer.copy()

    def write(self) -> None:
        """Write this rank's part."""
        self._buffer.write(self.path, self._offset)

    def read(self) -> None:
        """Read this rank's part."""
        self._buffer.read(self.path, self._offset)


def _remove(session: Session, path: Path) -> None:
    # Between barriers, so that no rank still writes or starts again.
    session.barrier()
    if session.rank == 0:
        if path.is_dir():
            rmtree(path)
        else:
            path.unlink(missing_ok=True)
    session.barrier()


def _measure_save(session: Session) -> Times:
    engine = build_engine(session)
    weights = weight_tensors(engine)
    folder = session.new_folder("hf_save")
    path = folder / "export"

    # The limit moves the same bytes as the savers, so that it is measured for each dtype.
    def measure(
        what: str,
        tensors: list[torch.Tensor],
        savers: Mapping[str, Saver],
    ) -> Times:
        raw = _SharedFile(session, tensors, folder)

        def once(call: Callable[[], object], written: Path) -> dict[str, float]:
            seconds = session.seconds(call)
            _remove(session, written)
            return {what: seconds}

        write_raw = partial(once, raw.write, raw.path)
        ways = {RAW_WRITE: write_raw}
        for name, saver in savers.items():
            ways[name] = partial(once, partial(saver.save, path), path)
        return interleave(ways, session.options.rounds, prepare=write_raw)

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
    halves = [tensor.bfloat16() for tensor in weights]
    times |= measure("bfloat16", halves, cast)
    engine.destroy()
    return times


def _measure_load(session: Session) -> Times:
    engine = build_engine(session)
    folder = session.new_folder("hf_load")
    weights = weight_tensors(engine)
    halves = [tensor.bfloat16() for tensor in weights]
    holdfast = ours.EngineSave(engine, "hf")
    areal = ArealHF(session, engine)

    def measure(
        what: str,
        tensors: list[torch.Tensor],
        ways: dict[str, Callable[[], object]],
    ) -> Times:
        # The write leaves the raw file in the page cache, as the saves do theirs.
        raw = _SharedFile(session, tensors, folder)
        raw.write()
        ways = {CACHED: raw.read, **ways}

        def once(way: Callable[[], object]) -> dict[str, float]:
            return {what: session.seconds(way)}

        timed = {name: partial(once, way) for name, way in ways.items()}
        return interleave(timed, session.options.rounds)

    def load_ways(path: Path) -> dict[str, Callable[[], object]]:
        return {
            HF_LOAD: partial(holdfast.load, path),
            "AReaL rank 0+broadcast": partial(areal.load, path),
        }

    def cast() -> None:
        for weight, half in zip(weights, halves, strict=True):
            weight.copy_(half)

    # All ways read the files that Holdfast has written.
    path = folder / "float32"
    half_path = folder / "bfloat16"
    holdfast.save(path)
    ours.EngineSave(engine, "hf", "bfloat16").save(half_path)

    ways = load_ways(path)
    ways["torch HF reader"] = partial(TorchHF(session, engine).load, path)
    times = measure("throughput", weights, ways)

    half_ways = load_ways(half_path)
    half_ways[CAST] = cast
    times |= measure("bfloat16", halves, half_ways)
    engine.destroy()
    return times


class _Server:
    """Client of a process that holds the whole model and loads folders on request, like vLLM and
    SGLang.
    """

    def __init__(
        self,
        config_folder: str,
        device: str,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, config_folder, device), daemon=True
        )
        self._process.start()
        theirs.close()

    def update_weights_from_disk(
        self,
        path: str,
        version: int,
    ) -> int:
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


def _serve(
    pipe: Connection,
    config_folder: str,
    device: str,
) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(config_folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    state = model.state_dict(keep_vars=True)
    targets = {name: tensor.data for name, tensor in state.items()}

    # A request is a folder and its version. The answer is the version, or the reason of a failure.
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
    engine = build_engine(session)
    folder = session.new_folder("publish")
    weights_folder = folder / "weights"
    areal_folder = folder / "areal"
    raw = _SharedFile(session, weight_tensors(engine), folder)
    areal = ArealHF(session, engine)

    # Rank 0 has the server, and memory for the whole raw file, which a server would read.
    server = None
    everything = None
    if session.rank == 0:
        server = _Server(engine.config.path, str(session.device))
        everything = WarmBuffer([torch.empty(raw.total_bytes, dtype=torch.uint8)])
    servers = [server] if server else []
    engine.connect_engine(servers, WeightUpdateMeta("disk", str(weights_folder), keep=1))
    version = 0

    # The limit: every rank writes its share, and one process reads them all.
    def raw_publish() -> None:
        raw.write()
        session.barrier()
        if everything is not None:
            everything.read(raw.path)

    # The engine writes a new version, and returns when the server has confirmed it.
    def our_publish() -> None:
        nonlocal version
        version += 1
        engine.set_version(version)
        engine.update_weights()

    def areal_publish() -> None:
        areal.save(areal_folder)
        if server is not None:
            server.update_weights_from_disk(str(areal_folder), 0)
        session.barrier()

    # Ours chooses the name of its folder, which is known after the call.
    def once(call: Callable[[], None], written: Callable[[], Path]) -> dict[str, float]:
        timed = session.timed(call)
        _remove(session, written())
        return timed

    ways = {
        RAW_PUBLISH: lambda: once(raw_publish, lambda: raw.path),
        PUBLISH: lambda: once(our_publish, lambda: version_path(weights_folder, version)),
        "AReaL save_pretrained, disk": lambda: once(areal_publish, lambda: areal_folder),
    }
    times = interleave(ways, session.options.rounds)
    if server is not None:
        server.close()
    engine.destroy()
    return times
