"""Seconds that agreement between ranks adds to a step in which nothing is due: `train_batch`, and
`dump` after it.

On real ranks, the control collectives of a step are recorded and then replayed alone, so that no
rank waits for another's forward. At larger world sizes the time is computed: the messages that
follow each other in gloo's algorithms, times `LATENCY_S`, without processor time. The rival is an
exchange of pickled objects for every agreement.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from holdfast.engine.api import StepInfo
from holdfast.recover import RecoverConfig, RecoverHandler

from .harness import Figure, Options, interleave, over
from .model import SPEC, build_engine, dense_batch, train
from .ranks import Session, on_ranks

LATENCY_S = 50e-6
"""Seconds that one message between two nodes takes over TCP."""
REPEATS = 20

# Functions of torch.distributed.
NUMBERS = "all_gather"
SUM = "all_reduce"
OBJECT = "all_gather_object"
DECISION = "broadcast_object_list"

OURS = "Holdfast agreement"
OBJECTS = "an exchange of objects for each agreement"
OF_OBJECTS = [OBJECT, OBJECT, OBJECT, SUM, OBJECT, SUM, OBJECT, OBJECT, DECISION]
"""Collectives of a step that pickles an object for every agreement.

In `train_batch`: success, number of micro-batches, names and sum of weights, names and sum of
losses. In `dump`: success, reasons to stop, and the decision about snapshots.
"""


def agreement(options: Options) -> list[Figure]:
    """Measure 2 and 4 ranks, compute 64 and 512."""
    figures = []
    ours: list[str] = []
    for n_ranks in (2,) if options.quick else (2, 4):
        seconds, ours = on_ranks(_measure, options, ranks=n_ranks)
        note = f"{n_ranks} processes of this machine"
        figures.append(_figure(n_ranks, seconds, ours, note))

    # A step has the same collectives at any world size.
    note = f"computed: {LATENCY_S * 1e6:g} us for each message"
    for n_ranks in (64, 512):
        seconds = {
            OURS: [_computed_s(ours, n_ranks)],
            OBJECTS: [_computed_s(OF_OBJECTS, n_ranks)],
        }
        figures.append(_figure(n_ranks, seconds, ours, note))
    return figures


def _figure(
    n_ranks: int,
    seconds: dict[str, list[float]],
    ours: list[str],
    note: str,
) -> Figure:
    names = ", ".join(ours)
    return Figure(
        f"growth.agreement.{n_ranks}_ranks",
        f"seconds a step of all agreement / with objects for each: {n_ranks} ranks",
        "lower",
        over(OBJECTS, seconds),
        seconds=seconds,
        note=f"{note}; {len(ours)} collectives ({names}), with objects {len(OF_OBJECTS)}",
    )


def _computed_s(kinds: list[str], n_ranks: int) -> float:
    # Messages that follow each other, around a ring or down a tree of ranks.
    ring = n_ranks - 1
    tree = math.ceil(math.log2(n_ranks))
    messages = {
        NUMBERS: ring,
        SUM: 2 * ring,
        OBJECT: 2 * ring,  # the size of the objects goes first
        DECISION: 2 * tree,
    }
    return LATENCY_S * sum(messages[kind] for kind in kinds)


def _measure(session: Session) -> tuple[dict[str, list[float]], list[str]]:
    engine = build_engine(session, parameters=1_000_000)
    batch = dense_batch(engine)
    group = engine.control_group

    # A snapshot is due never, so that `dump` only agrees on that.
    config = RecoverConfig(
        fileroot=str(session.options.scratch),
        trial_name="agreement",
        freq_steps=10**6,
        stop_signals=[],
    )
    with RecoverHandler(config, SPEC, group=group) as handler:
        handler.load(engine)
        with _recorded(group) as kinds:
            train(engine, batch)
            handler.dump(engine, StepInfo(0, 0, 0, SPEC.steps_per_epoch))
    ways = {
        OURS: lambda: _again(session, group, kinds),
        OBJECTS: lambda: _again(session, group, OF_OBJECTS),
    }
    seconds = interleave(ways, session.options.rounds)["seconds"]
    engine.destroy()
    return seconds, kinds


@contextmanager
def _recorded(group: dist.ProcessGroup) -> Iterator[list[str]]:
    """Record the names of the collectives on ``group`` inside the block. The model uses other
    groups.
    """
    kinds: list[str] = []
    originals = {kind: getattr(dist, kind) for kind in (NUMBERS, SUM, OBJECT, DECISION)}

    # A collective of this group is noted, and then done as before.
    def noting(kind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") is group:
                kinds.append(kind)
            return originals[kind](*args, **kwargs)

        return call

    for kind in originals:
        setattr(dist, kind, noting(kind))
    try:
        yield kinds
    finally:
        for kind, original in originals.items():
            setattr(dist, kind, original)


def _again(
    session: Session,
    group: dist.ProcessGroup,
    kinds: list[str],
) -> dict[str, float]:
    """Seconds of the collectives when nothing else runs."""
    # A few numbers, as an agreement has, and empty objects.
    own = torch.zeros(3, dtype=torch.float64)
    gathered = list(own.new_empty((session.world_size, 3)))
    objects = [None] * session.world_size
    calls = {
        NUMBERS: lambda: dist.all_gather(gathered, own, group=group),
        SUM: lambda: dist.all_reduce(own, group=group),
        OBJECT: lambda: dist.all_gather_object(objects, b"", group=group),
        DECISION: lambda: dist.broadcast_object_list([b""], group=group, group_src=0),
    }

    # Several steps, because one is shorter than the start of a measurement.
    def steps() -> None:
        for _ in range(REPEATS):
            for kind in kinds:
                calls[kind]()

    return {"seconds": session.seconds(steps) / REPEATS}
