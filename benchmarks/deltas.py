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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
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
WARM_UP = 25  # steps at a larger rate, so that the moments are those of a run
_CHUNK_BYTES = 64 << 10


class Network:
    """A network that carries ``bytes_per_s``, shared by all connections."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = Lock()

    def carry(self, n_bytes: int) -> None:
        """Wait as long as the network needs for ``n_bytes``."""
        # The bytes queue behind all that were given to the network before.
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            until = begin + n_bytes / self._bytes_per_s
            self._free_at = until
        time.sleep(max(0.0, until - time.monotonic()))


def _serving_over(network: Network) -> type[FileHandler]:
    """Handler of ``holdfast-weights serve`` behind a network."""

    class Handler(FileHandler):
        def setup(self) -> None:
            super().setup()
            self.connection: Any = _Throttled(self.connection, network)

    return Handler


class _Throttled:
    def __init__(
        self,
        connection: Any,
        network: Network,
    ) -> None:
        self._connection = connection
        self._network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def sendfile(
        self,
        file: Any,
        offset: int,
        count: int,
    ) -> int:
        for begin in range(0, count, _CHUNK_BYTES):
            n_bytes = min(_CHUNK_BYTES, count - begin)
            self._network.carry(n_bytes)
            sent = self._connection.sendfile(file, offset + begin, n_bytes)
            if sent < n_bytes:
                return 0
        return count


@contextmanager
def _mirrors(scratch: Path, gbits: float) -> Iterator[dict[str, Mirror]]:
    """Serve both folders over one network, each to a mirror of its own."""
    handler = _serving_over(Network(gbits * GBIT_BYTES))
    servers: list[Server] = []
    mirrors: dict[str, Mirror] = {}
    try:
        for kind in KINDS:
            published = scratch / kind
            local = scratch / f"{kind}_local"
            published.mkdir()
            local.mkdir()

            # The server of the published folder.
            server = Server("127.0.0.1:0", None, handler, published)
            servers.append(server)
            Thread(target=server.serve_forever, daemon=True).start()

            # The mirror, which fetches from it.
            mirrors[kind] = Mirror(Source(server.url), local)
            mirrors[kind].open()
        yield mirrors
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def measure(
    session: Session,
    rate: float,
    steps: int,
    gbits: float,
) -> list[dict[str, float]]:
    """Publish after every ``steps`` optimizer steps at ``rate``, in both ways."""
    # Steps at a larger rate come first (see `WARM_UP`).
    engine = build_engine(session)
    for _ in range(2 if session.options.quick else WARM_UP):
        _step(engine, 1e-4)
    copy = PublishedCopy()
    rounds = []

    # Rank 0 has the mirrors that count. Those of the other ranks stay empty.
    scratch = Path(session.all(str(session.options.scratch))[0])
    mirrored = scratch
    if session.rank != 0:
        mirrored = Path(tempfile.mkdtemp(dir=scratch))
    with _mirrors(mirrored, gbits) as mirrors:
        # The first delta is a full version, the second a warm-up.
        for version in range(session.options.rounds + 2):
            for _ in range(steps):
                _step(engine, rate)
            row: dict[str, float] = {}

            # The two kinds take turns in going first.
            for kind in KINDS if version % 2 else reversed(KINDS):
                figures = _publish(session, engine, scratch / kind, kind, version, copy)

                # The mirror fetches the version.
                label = weights_label(version_path(scratch / kind, version), version)
                fetch = partial(mirrors[kind].prepare, version, label)
                fetch_s = _seconds_on_rank_0(session, fetch)
                figures["ready s"] = figures["s"] + fetch_s

                # The server loads it. A server of deltas goes on while its mirror fetches.
                load = partial(_load, version_path(scratch / f"{kind}_local", version))
                paused_s = _seconds_on_rank_0(session, load)
                if kind != "delta":
                    paused_s += fetch_s
                figures["paused s"] = paused_s
                for name, value in figures.items():
                    row[f"{kind} {name}"] = value
            row["rss"] = max(session.all(_rss_bytes()))
            rounds.append(row)
    return rounds[2:]


def _seconds_on_rank_0(session: Session, call: Callable[[], object]) -> float:
    """Seconds of a call that only rank 0 makes. Collective."""
    return session.seconds(call if session.rank == 0 else lambda: None)


def _publish(
    session: Session,
    engine: FSDPEngine,
    folder: Path,
    kind: str,
    version: int,
    copy: PublishedCopy,
) -> dict[str, float]:
    meta = WeightUpdateMeta(
        "disk",
        str(folder),
        delta=kind == "delta",
        dtype="bfloat16",
        keep=2,
    )
    cpu_s = 0.0
    figures: dict[str, float] = {}

    # Processor time of this rank with all its threads, next to the time until all ranks are done.
    def publish() -> None:
        nonlocal cpu_s
        before_s = _cpu_s()
        written = write_version(engine.model, meta, version, session.group, copy=copy)
        figures.update(written.figures)
        cpu_s = _cpu_s() - before_s

    seconds = session.seconds(publish)
    if session.rank == 0:
        delete_old(str(folder), meta.keep)
    return {
        "s": seconds,
        "CPU s": sum(session.all(cpu_s)),
        "MB": figures["bytes"] / 1e6,
        "changed": figures.get("changed", 0.0),
        "alone": figures["delta"],
    }


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
    fields = Path("/proc/self/statm").read_text().split()
    n_pages = int(fields[1])
    return n_pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Print a row for each rate, number of steps and network."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deltas", description=__doc__)
    parser.add_argument("--parameters", type=float, default=127e6)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        default=[1, 5],
        help="steps between versions",
    )
    parser.add_argument(
        "--gbits",
        type=float,
        nargs="+",
        default=[1, 10],
        help="speeds of the network, in Gbit/s",
    )
    parser.add_argument("--folder", type=Path, help="where to publish; /dev/shm is memory")
    parser.add_argument("--quick", action="store_true", help="only check that everything works")
    args = parser.parse_args()
    folder: Path = args.folder or Path.cwd() / "bench_out"
    folder.mkdir(parents=True, exist_ok=True)

    # The table is printed as it grows, because a row takes minutes.
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" + "|---:" * (len(COLUMNS) - 1) + "|")
    for rate, steps, gbits in product(args.rates, args.steps, args.gbits):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            options = Options(
                parameters=int(args.parameters),
                ranks=2,
                rounds=args.rounds,
                device="cpu",
                scratch=Path(scratch),
                quick=args.quick,
            )
            rounds = on_ranks(measure, options, rate, steps, gbits)
        _report(rate, steps, gbits, rounds)


def _report(
    rate: float,
    steps: int,
    gbits: float,
    rounds: list[dict[str, float]],
) -> None:
    median = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
    worst = {key: max(row[key] for row in rounds) for key in rounds[0]}

    def ratio(key: str) -> float:
        return median[f"delta {key}"] / median[f"full {key}"]

    # A row of the table. Its cells are those of `COLUMNS`.
    size = ratio("MB")
    seconds = ratio("ready s")
    cells = [
        f"{rate:g}, {steps}, {gbits:g}",
        f"{100 * median['delta changed']:.2f} %",
        _pair(median, "MB"),
        f"{size:.4f}",
        _pair(median, "s"),
        f"{_pair(median, 'ready s')} (worst {_pair(worst, 'ready s')})",
        f"{seconds:.3f}",
        _pair(median, "paused s"),
        _pair(median, "CPU s"),
    ]
    print(f"| {' | '.join(cells)} |")

    # The table assumes that versions were deltas and that memory does not grow.
    n_alone = sum(row["delta alone"] for row in rounds)
    first = rounds[0]["rss"] / 1e6
    last = rounds[-1]["rss"] / 1e6
    print(
        f"<!-- {n_alone:.0f} of {len(rounds)} were deltas; a rank with its mirrors has "
        f"{first:.0f} MB at first, {last:.0f} MB at last -->",
        flush=True,
    )

    # The limits hold for one step at a small rate over a slow network.
    if rate <= 1e-6 and steps <= 1 and gbits == 1:
        _check("bytes", size, 1 / 20)
        _check("seconds over 1 Gbit/s", seconds, 1 / 5)


def _pair(values: dict[str, float], key: str) -> str:
    return f"{values[f'delta {key}']:.3g} / {values[f'full {key}']:.3g}"


def _check(
    what: str,
    ratio: float,
    limit: float,
) -> None:
    mark = "met" if ratio < limit else "NOT met"
    print(f"<!-- {what}: {ratio:.3f} of full, limit {limit:g}: {mark} -->")


if __name__ == "__main__":
    main()
