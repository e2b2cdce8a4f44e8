"""`train`: gain of packing ragged sequences over padding them, and cost of their attention."""

import random
from collections.abc import Callable
from functools import partial

from holdfast.engine import FSDPEngine
from holdfast.engine.config import PACKED_ATTENTION

from .harness import Figure, Options, Times, interleave, over
from .model import TrainingSize, build_engine, ragged_batch, train, training_size
from .ranks import Session, on_ranks
from .steps import step_figures
from .trl_steps import HAS_TRL, TrlSteps

PACKED, PADDED = "Holdfast packed", "padded"
EQUAL, MASKED = "rows of equal length", "Holdfast packed, attn_impl sdpa"
TRL_PADDED, TRL_FREE = "TRL", "TRL, padding_free"
_MOST_PARAMETERS = 20_000_000  # on a CPU (see training_size): the ratio hardly depends on the model
_ATTENTION_PARAMETERS = 12_000_000
_GROWTH_PARAMETERS = 3_000_000
_GROWTH_TOKENS = (512, 1024, 2048, 4096)
_GROWTH_LENGTH = 64


def train_throughput(options: Options) -> list[Figure]:
    """Measure tokens per second of training steps on ragged batches, and how the cost grows with
    the row length.
    """
    seconds, longer = on_ranks(_measure, options)["seconds"], training_size(options, 0).longer
    tokens = Figure(
        "train.tokens",
        "tokens a second, packed / padded to the longest of a micro-batch",
        "higher",
        over(PADDED, seconds, inverse=True),
        seconds=seconds,
        note=f"16 sequences a rank, log-normal lengths around {40 * longer} tokens, at most {256 * longer}",
    )
    return [tokens, *_attention_figures(options), _growth_figure(options), *step_figures(options)]


def _measure(session: Session) -> Times:
    size = training_size(session.options, _MOST_PARAMETERS)
    engines = {
        name: build_engine(
            session, parameters=size.parameters, dtype=size.dtype, pack_sequences=packed
        )
        for name, packed in ((PADDED, False), (PACKED, True))
    }
    draw = random.Random(session.rank)
    lengths = [size.longer * min(256, 4 + int(draw.lognormvariate(3.7, 0.9))) for _ in range(16)]
    batch = ragged_batch(engines[PACKED], lengths)
    ways = {
        name: lambda engine=engine: {"seconds": session.seconds(lambda: train(engine, batch))}
        for name, engine in engines.items()
    }
    times = interleave(ways, session.options.rounds)
    for engine in engines.values():
        engine.destroy()
    return times


def _attention_figures(options: Options) -> list[Figure]:
    """Compare packed rows with a batch of equal lengths, and with TRL's steps on the same batch."""
    seconds = on_ranks(_measure_attention, options, ranks=1)["seconds"]
    longer = training_size(options, 0).longer
    note = f"16 sequences of {16 * longer} to {512 * longer} tokens on one rank, in one micro-batch"
    trl = "" if HAS_TRL else "; TRL is not installed (pip install 'holdfast[bench]')"
    figures = [
        Figure(
            "train.equal_rows",
            "tokens a second / those of a batch of as many rows and tokens, all of one length",
            "higher",
            over(EQUAL, seconds, inverse=True),
            {PACKED: 0.9},
            seconds,
            note + trl,
        )
    ]
    if HAS_TRL:
        ratios = over(
            TRL_FREE,
            {way: seconds[way] for way in (PACKED, MASKED, TRL_PADDED, TRL_FREE)},
            inverse=True,
        )
        title = "tokens a second / those of SFTTrainer's own step with padding_free"
        figures.append(Figure("train.trl", title, "higher", ratios, {PACKED: 1.3}, seconds, note))
    return figures


def _measure_attention(session: Session) -> Times:
    size = training_size(session.options, _ATTENTION_PARAMETERS)
    kind = {"parameters": size.parameters, "dtype": size.dtype}
    engines = {
        PACKED: build_engine(session, **kind),
        MASKED: build_engine(session, **kind, attn_impl="sdpa"),
        EQUAL: build_engine(session, **kind, pack_sequences=False),
    }
    attention = engines[PACKED].model.config._attn_implementation
    assert attention == PACKED_ATTENTION, attention
    batches = {way: ragged_batch(engine, _ragged_lengths(size)) for way, engine in engines.items()}
    batches[EQUAL] = ragged_batch(engines[EQUAL], [sum(_ragged_lengths(size)) // 16] * 16)
    ways: dict[str, Callable[[], dict[str, float]]] = {
        way: lambda engine=engine, batch=batches[way]: {
            "seconds": session.seconds(partial(train, engine, batch))
        }
        for way, engine in engines.items()
    }
    if HAS_TRL:
        for way, free in ((TRL_PADDED, False), (TRL_FREE, True)):
            steps = TrlSteps(
                engines[PACKED].config.path,
                batches[PACKED],
                padding_free=free,
                scratch=session.options.scratch,
                bf16=size.dtype == "bfloat16",
            )
            ways[way] = lambda steps=steps: {"seconds": steps.step()}
    times = interleave(ways, session.options.rounds)
    for engine in engines.values():
        engine.destroy()
    return times


def _ragged_lengths(size: TrainingSize) -> list[int]:
    """Lengths of 16 ragged sequences with as many tokens in total as 16 sequences of equal length."""
    draw = random.Random(0)
    lengths = [draw.randint(16, 512) for _ in range(16)]
    lengths[0] -= sum(lengths) % 16 if lengths[0] > 32 else sum(lengths) % 16 - 16
    return [size.longer * length for length in lengths]


def _growth_figure(options: Options) -> Figure:
    """Check that twice the tokens in a row cost twice as much while the sequences in it keep their
    length.
    """
    times = on_ranks(_measure_growth, options, ranks=1)
    size = training_size(options, _GROWTH_PARAMETERS)
    shortest, longest = size.longer * _GROWTH_TOKENS[0], size.longer * _GROWTH_TOKENS[-1]
    ratios, seconds = {}, {}
    for way, by_tokens in ((PACKED, times[PACKED]), (MASKED, times[MASKED])):
        for n_tokens in (size.longer * n for n in _GROWTH_TOKENS):
            name = f"{way}, {n_tokens} tokens"
            seconds[name] = by_tokens[str(n_tokens)]
            pairs = zip(by_tokens[str(n_tokens)], by_tokens[str(shortest)], strict=True)
            ratios[name] = [longer / n_tokens / (short / shortest) for longer, short in pairs]
    return Figure(
        "train.growth",
        f"seconds a token of a packed row / those of a row of {shortest} tokens",
        "lower",
        ratios,
        {f"{PACKED}, {longest} tokens": 1.25},
        seconds,
        f"sequences of {size.longer * _GROWTH_LENGTH} tokens on one rank, "
        f"{size.parameters / 1e6:g}M parameters at most",
    )


def _measure_growth(session: Session) -> Times:
    size = training_size(session.options, _GROWTH_PARAMETERS)
    kind = {"parameters": size.parameters, "dtype": size.dtype}
    engines = {
        PACKED: build_engine(session, **kind),
        MASKED: build_engine(session, **kind, attn_impl="sdpa"),
    }
    length = size.longer * _GROWTH_LENGTH
    rows = {size.longer * n: [length] * (n // _GROWTH_LENGTH) for n in _GROWTH_TOKENS}
    batches = {
        n_tokens: ragged_batch(engines[PACKED], lengths) for n_tokens, lengths in rows.items()
    }

    def measure(engine: FSDPEngine) -> dict[str, float]:
        return {
            str(n): session.seconds(partial(train, engine, batch)) for n, batch in batches.items()
        }

    ways = {way: lambda engine=engine: measure(engine) for way, engine in engines.items()}
    times = interleave(ways, session.options.rounds)
    for engine in engines.values():
        engine.destroy()
    return {way: {n: by_way[way] for n, by_way in times.items()} for way in engines}
