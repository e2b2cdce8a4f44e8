"""`train`: gain of packing ragged sequences over padding them, and cost of their attention."""

import random
from collections.abc import Mapping
from functools import partial

from holdfast.engine import FSDPEngine
from holdfast.engine.config import PACKED_ATTENTION

from .harness import Figure, Options, Times, Way, interleave, over
from .model import TrainingSize, build_engine, ragged_batch, train, training_size
from .prompts import prompt_figures
from .ranks import Session, on_ranks
from .steps import step_figures
from .trl_steps import HAS_TRL, TrlSteps

PACKED = "Holdfast packed"
MASKED = "Holdfast packed, attn_impl sdpa"
PADDED = "padded"
EQUAL = "rows of equal length"
TRL_PADDED = "TRL"
TRL_FREE = "TRL, padding_free"
_MOST_PARAMETERS = 20_000_000  # on a CPU (see training_size): the ratio hardly depends on the model
_ATTENTION_PARAMETERS = 12_000_000
_GROWTH_PARAMETERS = 3_000_000
_GROWTH_TOKENS = (512, 1024, 2048, 4096)
_GROWTH_LENGTH = 64


def train_throughput(options: Options) -> list[Figure]:
    """Measure tokens per second of training steps on ragged batches, and how the cost grows with
    the row length.
    """
    seconds = on_ranks(_measure, options)["seconds"]
    longer = training_size(options, 0).longer
    tokens = Figure(
        "train.tokens",
        "tokens a second, packed / padded to the longest of a micro-batch",
        "higher",
        over(PADDED, seconds, inverse=True),
        seconds=seconds,
        note=f"16 sequences a rank, log-normal lengths around {40 * longer} tokens, "
        f"at most {256 * longer}",
    )
    return [
        tokens,
        *_attention_figures(options),
        _growth_figure(options),
        *prompt_figures(options),
        *step_figures(options),
    ]


def _measure(session: Session) -> Times:
    size = training_size(session.options, _MOST_PARAMETERS)
    build = partial(build_engine, session, parameters=size.parameters, dtype=size.dtype)
    engines = {
        PADDED: build(pack_sequences=False),
        PACKED: build(),
    }

    # Lengths as those of answers: most are short, a few are long. Each rank has its own.
    draw = random.Random(session.rank)
    lengths = []
    for _ in range(16):
        length = 4 + int(draw.lognormvariate(3.7, 0.9))
        lengths.append(size.longer * min(256, length))
    batch = ragged_batch(engines[PACKED], lengths)

    ways = {}
    for name, engine in engines.items():
        ways[name] = partial(session.timed, partial(train, engine, batch))
    return _in_turns(session, engines, ways)


def _in_turns(
    session: Session,
    engines: Mapping[str, FSDPEngine],
    ways: Mapping[str, Way],
) -> Times:
    """Measure, then end the engines."""
    times = interleave(ways, session.options.rounds)
    for engine in engines.values():
        engine.destroy()
    return times


def _attention_figures(options: Options) -> list[Figure]:
    """Compare packed rows with a batch of equal lengths, and with TRL's steps on the same batch."""
    seconds = on_ranks(_measure_attention, options, ranks=1)["seconds"]
    longer = training_size(options, 0).longer
    note = f"16 sequences of {16 * longer} to {512 * longer} tokens on one rank, in one micro-batch"
    equal = Figure(
        "train.equal_rows",
        "tokens a second / those of a batch of as many rows and tokens, all of one length",
        "higher",
        over(EQUAL, seconds, inverse=True),
        {PACKED: 0.9},
        seconds,
        note,
    )
    if not HAS_TRL:
        equal.note += "; TRL is not installed (pip install 'holdfast[bench]')"
        return [equal]

    # TRL trains the ragged batch, so that the batch of equal lengths is no way here.
    compared = {way: seconds[way] for way in (PACKED, MASKED, TRL_PADDED, TRL_FREE)}
    trl = Figure(
        "train.trl",
        "tokens a second / those of SFTTrainer's own step with padding_free",
        "higher",
        over(TRL_FREE, compared, inverse=True),
        {PACKED: 1.3},
        seconds,
        note,
    )
    return [equal, trl]


def _measure_attention(session: Session) -> Times:
    size = training_size(session.options, _ATTENTION_PARAMETERS)
    build = partial(build_engine, session, parameters=size.parameters, dtype=size.dtype)
    engines = {
        PACKED: build(),
        MASKED: build(attn_impl="sdpa"),
        EQUAL: build(pack_sequences=False),
    }
    attention = engines[PACKED].model.config._attn_implementation
    assert attention == PACKED_ATTENTION, attention

    # All ways have as many rows and as many tokens.
    ragged = _ragged_lengths(size)
    equal = [sum(ragged) // len(ragged)] * len(ragged)
    lengths = {PACKED: ragged, MASKED: ragged, EQUAL: equal}
    batches = {way: ragged_batch(engine, lengths[way]) for way, engine in engines.items()}

    ways: dict[str, Way] = {}
    for way, engine in engines.items():
        ways[way] = partial(session.timed, partial(train, engine, batches[way]))

    # TRL measures its own seconds, without the start of a run.
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
    return _in_turns(session, engines, ways)


def _ragged_lengths(size: TrainingSize) -> list[int]:
    """Lengths of 16 ragged sequences with as many tokens in total as 16 of equal length."""
    draw = random.Random(0)
    lengths = [draw.randint(16, 512) for _ in range(16)]

    # The first one gives away the rest of the total, or fills it up to a multiple of 16.
    rest = sum(lengths) % 16
    if lengths[0] > 32:
        lengths[0] -= rest
    else:
        lengths[0] += 16 - rest
    return [size.longer * length for length in lengths]


def _growth_figure(options: Options) -> Figure:
    """Check that twice the tokens in a row cost twice as much while the sequences in it keep their
    length.
    """
    times = on_ranks(_measure_growth, options, ranks=1)
    size = training_size(options, _GROWTH_PARAMETERS)
    rows = [size.longer * n_tokens for n_tokens in _GROWTH_TOKENS]
    shortest = rows[0]
    longest = rows[-1]
    ratios = {}
    seconds = {}
    for way in (PACKED, MASKED):
        short_s = times[way][str(shortest)]
        for n_tokens in rows:
            name = f"{way}, {n_tokens} tokens"
            row_s = times[way][str(n_tokens)]
            seconds[name] = row_s

            # Seconds a token, over those of the shortest row in the same round.
            ratios[name] = []
            for long, short in zip(row_s, short_s, strict=True):
                ratios[name].append(long / n_tokens / (short / shortest))
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
    build = partial(build_engine, session, parameters=size.parameters, dtype=size.dtype)
    engines = {
        PACKED: build(),
        MASKED: build(attn_impl="sdpa"),
    }

    # A row has more sequences of one length, and no longer ones.
    length = size.longer * _GROWTH_LENGTH
    batches = {}
    for n_tokens in _GROWTH_TOKENS:
        n_sequences = n_tokens // _GROWTH_LENGTH
        name = str(size.longer * n_tokens)
        batches[name] = ragged_batch(engines[PACKED], [length] * n_sequences)

    def measure(engine: FSDPEngine) -> dict[str, float]:
        seconds = {}
        for name, batch in batches.items():
            seconds[name] = session.seconds(partial(train, engine, batch))
        return seconds

    ways = {way: partial(measure, engine) for way, engine in engines.items()}
    # Times are by row length first. The figures are by way.
    times = _in_turns(session, engines, ways)
    by_way: Times = {}
    for way in engines:
        by_way[way] = {name: measured[way] for name, measured in times.items()}
    return by_way
