"""`load`: speed at which a training state is read back from files in the page cache."""

from functools import partial

from . import ours
from .harness import Figure, Options, Times, interleave, over
from .limits import WarmBuffer
from .model import build_engine, training_tensors
from .ranks import Session, on_ranks
from .rivals import ArealDCP, VerlShards

CACHED = "plain cached read"


def load(options: Options) -> list[Figure]:
    """Measure a verified load next to loads that do not verify."""
    seconds = on_ranks(_measure, options)["seconds"]
    return [
        Figure(
            "load.throughput",
            "bytes a second / plain cached read of as many bytes into warm memory",
            "higher",
            over(CACHED, seconds, inverse=True),
            {"Holdfast engine.load": 0.6},
            seconds,
            note="ours compares every byte with its digest before anything changes",
        )
    ]


def _measure(session: Session) -> Times:
    engine = build_engine(session)
    buffer = WarmBuffer(training_tensors(engine))
    folder = session.new_folder("load")
    ways = {
        "Holdfast engine.load": ours.EngineSave(engine, "dcp"),
        "AReaL dcp.load": ArealDCP(session, engine),
        "verl torch.load": VerlShards(session, engine),
    }
    # Every way reads its own files, next to a raw file of each rank.
    raw = folder / f"rank_{session.rank}"
    buffer.write(raw)
    for number, way in enumerate(ways.values()):
        way.save(folder / str(number))
    # All files are in the page cache now.
    measured = {CACHED: lambda: session.timed(lambda: buffer.read(raw))}
    for number, (name, way) in enumerate(ways.items()):
        path = folder / str(number)
        measured[name] = partial(session.timed, partial(way.load, path))
    times = interleave(measured, session.options.rounds)
    engine.destroy()
    return times
