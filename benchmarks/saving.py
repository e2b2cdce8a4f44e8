"""`save_stall`: cost of a snapshot for training. `save`: speed at which it reaches the disk.

The folder of a way is removed before the next way starts, and as many bytes are written, so that
all find the disk and the page cache in the same state. Neither is measured. Steps that are trained
during a background save share the machine with it. That cost counts, and is included in ``step``.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from shutil import rmtree

from . import ours
from .harness import Figure, Options, Times, Way, interleave, over
from .limits import WarmBuffer
from .model import build_engine, dense_batch, train, training_tensors
from .ranks import Session, on_ranks
from .rivals import TRAINING_STATE, Saver

COPY = "warm memcpy"
STEPS = "the same steps without"
RAW = "raw write+fsync"
_NEEDED = {ours.DUMP: 0.3, ours.NO_OVERLAP: 1.2}


def save_stall(options: Options) -> list[Figure]:
    """Measure how long training waits for a snapshot, and how much later the same steps end because
    of it.
    """
    times = on_ranks(_measure_stall, options)
    blocking = times["blocking"]
    alone = times["alone"]

    # How much later the steps end than the same steps a moment before, without a snapshot. Chance
    # may make that negative.
    extra = {COPY: blocking[COPY]}
    for way, values in times["total"].items():
        pairs = zip(values, alone[way], strict=True)
        extra[way] = [with_save_s - alone_s for with_save_s, alone_s in pairs]
    all_alone = list(chain.from_iterable(alone.values()))
    return [
        Figure(
            "save_stall.blocking",
            "time until training can go on / warm memcpy of the shard",
            "lower",
            over(COPY, blocking),
            _NEEDED,
            blocking,
        ),
        Figure(
            "save_stall.step",
            "snapshot and steps until it is written, less the same steps without / "
            "warm memcpy of the shard",
            "lower",
            over(COPY, extra),
            seconds={COPY: blocking[COPY], STEPS: all_alone, **extra},
            note="the steps beside a background save last longer than a raw write; "
            "what is left is waited for",
        ),
    ]


def save(options: Options) -> list[Figure]:
    """Measure the share of the disk's speed that a snapshot reaches, from the call until all bytes
    are written.
    """
    seconds = on_ranks(_measure_save, options)["seconds"]
    return [
        Figure(
            "save.throughput",
            "bytes a second until all is written / raw parallel write+fsync of as many bytes",
            "higher",
            over(RAW, seconds, inverse=True),
            {ours.DUMP: 0.85},
            seconds,
            note="ours are on stable storage and verified to be complete; verl's are not fsynced, "
            "AReaL's and torch's before they are flushed",
        )
    ]


class _Bench:
    """Engine, warm buffer and folder for both benchmarks."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.engine = build_engine(session)
        self.buffer = WarmBuffer(training_tensors(self.engine))
        self.folder = session.options.scratch / "save"
        self.dumps: list[ours.Dump] = []

    def dump(
        self,
        name: str,
        *,
        async_save: bool = True,
        overlap: bool = True,
    ) -> ours.Dump:
        """Create a handler, which `close` closes."""
        dump = ours.Dump(self.session, self.engine, name, async_save=async_save, overlap=overlap)
        self.dumps.append(dump)
        return dump

    def rivals(self) -> Mapping[str, Saver]:
        """Map names to all rivals."""
        return {name: make(self.session, self.engine) for name, make in TRAINING_STATE.items()}

    @contextmanager
    def clean(self) -> Iterator[Path]:
        """Yield a path for one save, which is removed afterwards on all ranks."""
        yield self.folder

        # No rank writes any more, and none starts again before the folder is gone.
        self.session.barrier()
        if self.session.rank == 0:
            rmtree(self.folder, ignore_errors=True)
            for dump in self.dumps:
                dump.remove_old()
        self.session.barrier()

    def raw(self) -> dict[str, float]:
        """Measure the limit of every save."""
        with self.clean() as folder:
            folder.mkdir(exist_ok=True)
            file = folder / f"rank_{self.session.rank}"
            return self.session.timed(lambda: self.buffer.write(file))

    def close(self) -> None:
        """Close the handlers."""
        for dump in self.dumps:
            dump.close()
        self.engine.destroy()


def _measure_stall(session: Session) -> Times:
    bench = _Bench(session)
    batch = dense_batch(bench.engine)

    # As many steps as a raw write lasts, so that a background save has time to end beside them.
    step_s = session.seconds(lambda: train(bench.engine, batch))
    n_steps = 1 + math.floor(bench.raw()["seconds"] / step_s)

    def steps() -> None:
        for _ in range(n_steps):
            train(bench.engine, batch)

    def stall(saver: Saver) -> dict[str, float]:
        # The machine's speed drifts, so that the steps without a snapshot come right before. The
        # raw write after them leaves the page cache as a save finds it that follows another one.
        alone = session.seconds(steps)
        bench.raw()

        # The time until training can go on is measured inside the total time.
        blocking = 0.0

        def save_and_train() -> None:
            nonlocal blocking
            started = time.perf_counter()
            saver.save(path)
            blocking = time.perf_counter() - started
            steps()
            saver.wait()

        with bench.clean() as path:
            total = session.seconds(save_and_train)
        return {"blocking": max(session.all(blocking)), "total": total, "alone": alone}

    savers: dict[str, Saver] = {
        ours.DUMP: bench.dump("overlapping"),
        ours.NO_OVERLAP: bench.dump("copying", overlap=False),
        ours.SYNC_DUMP: bench.dump("sync", async_save=False),
    }
    savers |= bench.rivals()

    ways: dict[str, Way] = {COPY: lambda: {"blocking": session.seconds(bench.buffer.copy)}}
    for name, saver in savers.items():
        ways[name] = partial(stall, saver)
    times = interleave(ways, session.options.rounds)
    bench.close()
    return times


def _measure_save(session: Session) -> Times:
    bench = _Bench(session)

    # Without the wait, a save in the background would look as fast as its copy.
    def durable(
        saver: Saver,
        *,
        digests: bool = True,
    ) -> dict[str, float]:
        def save_and_wait() -> None:
            saver.save(path)
            saver.wait()

        digesting = nullcontext() if digests else ours.without_digests()
        with bench.clean() as path, digesting:
            return session.timed(save_and_wait)

    sync = bench.dump("sync", async_save=False)
    savers: dict[str, Saver] = {
        ours.DUMP: bench.dump("dump"),
        ours.SYNC_DUMP: sync,
        ours.ENGINE_SAVE: ours.EngineSave(bench.engine, "dcp"),
    }
    savers |= bench.rivals()

    # The last way shows what the digests of the sync way cost.
    ways: dict[str, Way] = {RAW: bench.raw}
    for name, saver in savers.items():
        ways[name] = partial(durable, saver)
    ways[ours.NO_DIGEST] = partial(durable, sync, digests=False)
    times = interleave(ways, session.options.rounds, prepare=bench.raw)
    bench.close()
    return times
