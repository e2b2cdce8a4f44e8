"""Publications of all weights and of the changes alone, in turns: ``make bench-publish``.

Two ranks train a model of 127 million parameters in float32 and publish it in bfloat16 after every
step, once with all weights and once as a delta, to folders next to each other. A mirror of each
folder then fetches the version over HTTP, at the speed of a network. Its LOCAL is next to the
folder.

A server stands still while it loads its mirror's folder. Without a mirror, it also waits for the
network meanwhile. So "s paused" is the load of a delta with its mirror, and fetch and load of all
weights without one. The load is a read of all tensors into memory. A real server takes longer, for
both.

docs/performance.md has the results.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from holdfast_weights.mirror import Mirror
from holdfast_weights.service import FileHandler, Server
from holdfast_weights.source import Source
from safetensors.torch import load_file

from holdfast.engine import FSDPEngine, PublishedCopy, WeightUpdateMeta
from holdfast.engine.hf.versions import delete_old, version_path, write_version
from holdfast.engine.rl import count_loss_tokens, sft_loss_fn
from holdfast.engine.servers.api import weights_label

from .harness import Options
from .model import build_engine, dense_batch
from .ranks import Session, on_ranks

GBIT_BYTES = 1e9 / 8
KINDS = ("full", "delta")
COLUMNS = (
    "rate, steps, Gbit/s",
    "changed",
    "MB",
    "ratio",
    "s until written",
    "s until mirrored",
    "ratio",
    "s paused",
    "CPU s",
)
"""A pair is the value of the delta, and that of all weights."""
_PAIRS = ("MB", "s", "ready s", "paused s", "CPU s")
WARM_UP = 25  # steps at a larger rate, so that the moments are those of a run
_CHUNK_BYTES = 64 << 10


class Network:
    """A network that carries ``bytes_per_s``, shared by all connections."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_at, self._lock = bytes_per_s, 0.0, Lock()

    def carry(self, n_bytes: int) -> None:
        """Wait as long as the network needs for ``n_bytes``."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + n_bytes / self._bytes_per_s
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))


def _serving_over(network: Network) -> type[FileHandler]:
    """Handler of ``holdfast-weights serve`` behind a network."""

    class Handler(FileHandler):
        def setup(self) -> None:
            super().setup()
            self.connection: Any = _Throttled(self.connection, network)

    return Handler


class _Throttled:
    def __init__(self, connection: Any, network: Network) -> None:
        self._connection, self._network = connection, network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def sendfile(self, file: Any, offset: int, count: int) -> int:
        for begin in range(0, count, _CHUNK_BYTES):
            n_bytes = min(_CHUNK_BYTES, count - begin)
            self._network.carry(n_bytes)
            if self._connection.sendfile(file, offset + begin, n_bytes) < n_bytes:
                return 0
        return count


@contextmanager
def _mirrors(scratch: Path, gbits: float) -> Iterator[dict[str, Mirror]]:
    """Serve both folders over one network, each to a mirror of its own."""
    network, servers, mirrors = Network(gbits * GBIT_BYTES), list[Server](), dict[str, Mirror]()
    try:
        for kind in KINDS:
            for folder in (scratch / kind, scratch / f"{kind}_local"):
                folder.mkdir()
            server = Server("127.0.0.1:0", None, _serving_over(network), scratch / kind)
            servers.append(server)
            Thread(target=server.serve_forever, daemon=True).start()
            mirrors[kind] = Mirror(Source(server.url), scratch / f"{kind}_local")
            mirrors[kind].open()
        yield mirrors
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def measure(session: Session, rate: float, steps: int, gbits: float) -> list[dict[str, float]]:
    """Publish after every ``steps`` optimizer steps at ``rate``, in both ways."""
    engine = build_engine(session)
    for _ in range(2 if session.options.quick else WARM_UP):
        _step(engine, 1e-4)
    copy, rounds = PublishedCopy(), []
    scratch = Path(session.all(str(session.options.scratch))[0])
    with _mirrors(
        scratch if session.rank == 0 else Path(tempfile.mkdtemp(dir=scratch)), gbits
    ) as mirrors:
        for version in range(
            session.options.rounds + 2
        ):  # the first delta is a full version, the second a warm-up
            for _ in range(steps):
                _step(engine, rate)
            row = dict[str, float]()
            for kind in KINDS if version % 2 else reversed(KINDS):
                done = _publish(session, engine, scratch / kind, kind, version, copy)
                label = weights_label(version_path(scratch / kind, version), version)
                fetch = lambda kind=kind, label=label: mirrors[kind].prepare(version, label)  # noqa: E731, B023
                fetch_s = session.seconds(fetch if session.rank == 0 else lambda: None)
                done["ready s"] = done["s"] + fetch_s
                load = partial(_load, version_path(scratch / f"{kind}_local", version))
                load_s = session.seconds(load if session.rank == 0 else lambda: None)
                done["paused s"] = load_s if kind == "delta" else fetch_s + load_s
                row |= {f"{kind} {key}": value for key, value in done.items()}
            row["rss"] = max(session.all(_rss_bytes()))
            rounds.append(row)
    return rounds[2:]


def _publish(
    session: Session, engine: FSDPEngine, folder: Path, kind: str, version: int, copy: PublishedCopy
) -> dict[str, float]:
    meta = WeightUpdateMeta("disk", str(folder), delta=kind == "delta", dtype="bfloat16", keep=2)
    cpu_s, figures = 0.0, dict[str, float]()

    def publish() -> None:
        nonlocal cpu_s
        before_s = _cpu_s()
        figures.update(write_version(engine.model, meta, version, session.group, copy=copy).figures)
        cpu_s = _cpu_s() - before_s

    seconds = session.seconds(publish)
    if session.rank == 0:
        delete_old(meta.path or "", meta.keep)
    found = {"s": seconds, "CPU s": sum(session.all(cpu_s)), "MB": figures["bytes"] / 1e6}
    return found | {"changed": figures.get("changed", 0.0), "alone": figures["delta"]}


def _load(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        for tensor in load_file(path).values():
            tensor.clone()  # it is a view of the file until then


def _step(engine: FSDPEngine, rate: float) -> None:
    assert engine.optimizer is not None
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    engine.train_batch(dense_batch(engine), sft_loss_fn, count_loss_tokens)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Print a row for each rate, number of steps and network."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deltas", description=__doc__)
    parser.add_argument("--parameters", type=float, default=127e6)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[1, 5], help="steps between versions"
    )
    parser.add_argument(
        "--gbits", type=float, nargs="+", default=[1, 10], help="speeds of the network, in Gbit/s"
    )
    parser.add_argument("--folder", type=Path, help="where to publish; /dev/shm is memory")
    parser.add_argument("--quick", action="store_true", help="only check that everything works")
    args = parser.parse_args()
    folder: Path = args.folder or Path.cwd() / "bench_out"
    folder.mkdir(parents=True, exist_ok=True)
    print("| " + " | ".join(COLUMNS) + " |\n|---" + "|---:" * (len(COLUMNS) - 1) + "|")
    for rate in args.rates:
        for steps in args.steps:
            for gbits in args.gbits:
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    options = Options(
                        int(args.parameters), 2, args.rounds, "cpu", Path(scratch), args.quick
                    )
                    rounds = on_ranks(measure, options, rate, steps, gbits)
                _report(rate, steps, gbits, rounds)


def _report(rate: float, steps: int, gbits: float, rounds: list[dict[str, float]]) -> None:
    median = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
    ratio, faster = (median[f"delta {key}"] / median[f"full {key}"] for key in ("MB", "ready s"))
    pairs = [f"{median[f'delta {key}']:.3g} / {median[f'full {key}']:.3g}" for key in _PAIRS]
    worst = " / ".join(
        f"{max(row[f'{kind} ready s'] for row in rounds):.3g}" for kind in reversed(KINDS)
    )
    size, written, ready, paused, cpu = pairs
    name, changed = f"{rate:g}, {steps}, {gbits:g}", f"{100 * median['delta changed']:.2f} %"
    ready += f" (worst {worst})"
    print(
        f"| {name} | {changed} | {size} | {ratio:.4f} | {written} | {ready} | {faster:.3f} | "
        f"{paused} | {cpu} |"
    )
    n_alone = sum(row["delta alone"] for row in rounds)
    first, last = (rounds[number]["rss"] / 1e6 for number in (0, -1))
    print(f"<!-- {n_alone:.0f} of {len(rounds)} were deltas; a rank with its mirrors has {first:.0f} MB at first, "
          f"{last:.0f} MB at last -->", flush=True)  # fmt: skip
    if rate > 1e-6 or steps > 1 or gbits != 1:
        return
    for what, limit, value in (("bytes", 1 / 20, ratio), ("seconds over 1 Gbit/s", 1 / 5, faster)):
        print(
            f"<!-- {what}: {value:.3f} of full, limit {limit:g}: "
            f"{'met' if value < limit else 'NOT met'} -->"
        )


if __name__ == "__main__":
    main()
