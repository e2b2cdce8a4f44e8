"""`train`: what packing ragged sequences gains over padding them."""

import random

from .harness import Figure, Options, Times, interleave, over
from .model import build_engine, ragged_batch, train
from .ranks import Session, on_ranks

PACKED, PADDED = "Holdfast packed", "padded"
_MOST_PARAMETERS = 20_000_000  # the ratio hardly depends on the model; a step of a larger one takes long on a CPU


def train_throughput(options: Options) -> list[Figure]:
    """Tokens a second of whole training steps on the same ragged batches."""
    seconds = on_ranks(_measure, options)["seconds"]
    return [
        Figure(
            "train.tokens",
            "tokens a second, packed / padded to the longest of a micro-batch",
            "higher",
            over(PADDED, seconds, inverse=True),
            seconds=seconds,
            note="16 sequences a rank, log-normal lengths around 40 tokens, at most 256",
        )
    ]


def _measure(session: Session) -> Times:
    parameters = min(session.options.parameters, _MOST_PARAMETERS)
    engines = {
        name: build_engine(session, parameters=parameters, pack_sequences=packed)
        for name, packed in ((PADDED, False), (PACKED, True))
    }
    draw = random.Random(session.rank)
    lengths = [min(256, 4 + int(draw.lognormvariate(3.7, 0.9))) for _ in range(16)]
    batch = ragged_batch(engines[PACKED], lengths)
    ways = {
        name: lambda engine=engine: {"seconds": session.seconds(lambda: train(engine, batch))}
        for name, engine in engines.items()
    }
    times = interleave(ways, session.options.rounds)
    for engine in engines.values():
        engine.destroy()
    return times
