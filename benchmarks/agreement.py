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

NUMBERS, SUM, OBJECT, DECISION = (
    "all_gather",
    "all_reduce",
    "all_gather_object",
    "broadcast_object_list",
)
OURS, OBJECTS = "Holdfast agreement", "an exchange of objects for each agreement"
OF_OBJECTS = [OBJECT, OBJECT, OBJECT, SUM, OBJECT, SUM, OBJECT, OBJECT, DECISION]
"""Collectives of a step that pickles an object for every agreement.

In `train_batch`: success, number of micro-batches, names and sum of weights, names and sum of
losses. In `dump`: success, reasons to stop, and the decision about snapshots.
"""


def agreement(options: Options) -> list[Figure]:
    """Measure 2 and 4 ranks, compute 64 and 512."""
    figures, ours = [], list[str]()
    for n_ranks in (2,) if options.quick else (2, 4):
        seconds, ours = on_ranks(_measure, options, ranks=n_ranks)
        figures.append(_figure(n_ranks, seconds, ours, f"{n_ranks} processes of this machine"))
    for n_ranks in (64, 512):
        seconds = {
            way: [_computed_s(kinds, n_ranks)]
            for way, kinds in ((OURS, ours), (OBJECTS, OF_OBJECTS))
        }
        figures.append(
            _figure(n_ranks, seconds, ours, f"computed: {LATENCY_S * 1e6:g} us for each message")
        )
    return figures


def _figure(n_ranks: int, seconds: dict[str, list[float]], ours: list[str], note: str) -> Figure:
    title = f"seconds a step of all agreement / with objects for each: {n_ranks} ranks"
    note += f"; {len(ours)} collectives ({', '.join(ours)}), with objects {len(OF_OBJECTS)}"
    return Figure(
        f"growth.agreement.{n_ranks}_ranks",
        title,
        "lower",
        over(OBJECTS, seconds),
        seconds=seconds,
        note=note,
    )


def _computed_s(kinds: list[str], n_ranks: int) -> float:
    ring, tree = n_ranks - 1, math.ceil(math.log2(n_ranks))
    # the size of the objects goes first
    messages = {NUMBERS: ring, SUM: 2 * ring, OBJECT: 2 * ring, DECISION: 2 * tree}
    return LATENCY_S * sum(messages[kind] for kind in kinds)


def _measure(session: Session) -> tuple[dict[str, list[float]], list[str]]:
    engine = build_engine(session, parameters=1_000_000)
    batch, group = dense_batch(engine), engine.control_group
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
        name: lambda kinds=kinds: _again(session, group, kinds)
        for name, kinds in ((OURS, kinds), (OBJECTS, OF_OBJECTS))
    }
    seconds = interleave(ways, session.options.rounds)["seconds"]
    engine.destroy()
    return seconds, kinds


@contextmanager
def _recorded(group: dist.ProcessGroup) -> Iterator[list[str]]:
    """Record the names of the collectives on ``group`` inside the block. The model uses other
    groups.
    """
    kinds, originals = (
        list[str](),
        {kind: getattr(dist, kind) for kind in (NUMBERS, SUM, OBJECT, DECISION)},
    )

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


def _again(session: Session, group: dist.ProcessGroup, kinds: list[str]) -> dict[str, float]:
    """Seconds of the collectives when nothing else runs."""
    own = torch.zeros(3, dtype=torch.float64)
    gathered, objects = list(own.new_empty((session.world_size, 3))), [None] * session.world_size
    calls = {
        NUMBERS: lambda: dist.all_gather(gathered, own, group=group),
        SUM: lambda: dist.all_reduce(own, group=group),
        OBJECT: lambda: dist.all_gather_object(objects, b"", group=group),
        DECISION: lambda: dist.broadcast_object_list([b""], group=group, group_src=0),
    }

    def steps() -> None:
        for _ in range(REPEATS):
            for kind in kinds:
                calls[kind]()

    return {"seconds": session.seconds(steps) / REPEATS}
