"""`logits`: cost of log-probabilities and entropies with a large vocabulary, with and without whole
logits.

The model is small and its vocabulary large, so that head and loss dominate the step. All ways train
the same engine on the same batch and differ only in the loss function.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from holdfast.engine.api import Batch
from holdfast.engine.rl import count_loss_tokens
from holdfast.engine.training.logprobs import token_logprobs
from holdfast.engine.training.model_output import ModelOutput

from .footprint import peak_bytes
from .harness import OURS, Figure, Options, Times, interleave, over
from .model import build_engine, ragged_batch
from .ranks import Session, on_ranks

WITHOUT = OURS
WITH = f"{OURS} on whole logits"
_VOCABULARY = 151_936  # the vocabulary of Qwen
_WIDTH = 64
_LENGTHS = [256] * 8


def logits(options: Options) -> list[Figure]:
    """Measure peak memory and seconds of a step, relative to a step with whole logits."""
    times = on_ranks(_measure, options)
    share = times["logits"]["share"][0]
    note = (
        f"{sum(_LENGTHS)} tokens a rank, {_VOCABULARY} words; "
        f"logits alone are {share:.2f} of the memory of {WITH!r}"
    )
    return [
        Figure(
            "logits.memory",
            f"peak extra memory of a step / {WITH}",
            "lower",
            over(WITH, times["memory"]),
            needed={WITHOUT: 0.5},
            note=note,
        ),
        Figure(
            "logits.seconds",
            f"seconds of a step / {WITH}",
            "lower",
            over(WITH, times["seconds"]),
            seconds=times["seconds"],
            note=note,
        ),
    ]


def _measure(session: Session) -> Times:
    vocabulary = _VOCABULARY
    if session.options.quick:
        vocabulary = 32_000

    # Embedding and head have this many parameters, which makes the model as narrow as `_WIDTH`.
    parameters = 2 * _WIDTH * vocabulary
    engine = build_engine(session, parameters=parameters, vocabulary=vocabulary)
    batch = ragged_batch(engine, _LENGTHS)

    # One step gives both values of a way, because memory is sampled while the step is timed.
    def step(loss: Callable[[ModelOutput, Batch], Tensor]) -> dict[str, float]:
        values: dict[str, float] = {}

        def train() -> None:
            engine.train_batch(batch, loss, count_loss_tokens)

        def timed_train() -> None:
            values["seconds"] = session.seconds(train)

        peak = _peak_bytes(session, timed_train)
        values["memory"] = max(session.all(peak))
        return values

    losses = {
        WITHOUT: _ours,
        WITH: _ours_of_logits,
        "AReaL": _areal,
        "TRL": _trl,
    }
    ways = {way: partial(step, loss) for way, loss in losses.items()}
    times = interleave(ways, session.options.rounds)

    # Logits in float32, as a share of the memory of the step that has them.
    logits_bytes = 4.0 * sum(_LENGTHS) * vocabulary
    most_bytes = max(times["memory"][WITH])
    times["logits"] = {"share": [logits_bytes / most_bytes]}
    engine.destroy()
    return times


def _peak_bytes(session: Session, call: Callable[[], object]) -> int:
    """Measure by how much the memory in use grows during the call, where the model is."""
    if session.device.type == "cpu":
        return peak_bytes(session, call)
    torch.cuda.reset_peak_memory_stats(session.device)
    before = torch.cuda.memory_allocated(session.device)
    call()
    return torch.cuda.max_memory_allocated(session.device) - before


# The ways differ only in how they come from logits to log-probabilities and entropies.


def _loss(
    logprobs: Tensor,
    entropy: Tensor,
    mb: Batch,
) -> Tensor:
    """Policy loss on the log-probabilities. The entropy is computed, but not used."""
    is_finite = torch.isfinite(entropy)
    assert bool(is_finite.all())
    mask = mb["loss_mask"]
    return -(logprobs * mask).sum() / mask.sum()


def _ours(output: ModelOutput, mb: Batch) -> Tensor:
    return _loss(output.logprobs, output.entropy.detach(), mb)


def _ours_of_logits(output: ModelOutput, mb: Batch) -> Tensor:
    logprobs, entropy = token_logprobs(output.logits, mb["input_ids"], mb["cu_seqlens"])
    return _loss(logprobs, entropy.detach(), mb)


def _areal(output: ModelOutput, mb: Batch) -> Tensor:
    """AReaL's default: ``log_softmax`` under autograd, 1,024 rows at a time (AReaL also compiles
    it).
    """
    chunks = output.logits.split(1024)
    targets = _targets(mb).split(1024)
    logprobs = []
    entropies = []
    for rows, words in zip(chunks, targets, strict=True):
        log_p = torch.log_softmax(rows.float(), dim=-1)
        entropies.append(_entropy(log_p))
        selected = log_p.gather(-1, words[:, None])
        logprobs.append(selected.squeeze(-1))
    return _aligned_loss(torch.cat(logprobs), torch.cat(entropies), mb)


def _trl(output: ModelOutput, mb: Batch) -> Tensor:
    """TRL's way: selected logit minus logsumexp, row by row. Entropies without gradient, 128 rows
    at a time.
    """
    logits = output.logits
    words = _targets(mb)[:, None]

    # Logit of the word less the logarithm of the sum of all words' exponentials.
    selected = logits.gather(-1, words).squeeze(-1)
    normalizers = [row.logsumexp(-1) for row in logits]
    logprobs = selected - torch.stack(normalizers)

    # The entropies, whose logits keep no gradient.
    entropies = []
    with torch.no_grad():
        for rows in logits.split(128):
            log_p = torch.log_softmax(rows, dim=-1)
            entropies.append(_entropy(log_p))
    return _aligned_loss(logprobs, torch.cat(entropies), mb)


def _targets(mb: Batch) -> Tensor:
    """The next token of every position."""
    input_ids = mb["input_ids"].long()
    return torch.roll(input_ids, -1)


def _entropy(log_p: Tensor) -> Tensor:
    p = log_p.exp()
    return -(p * log_p).sum(-1)


def _aligned_loss(
    logprobs: Tensor,
    entropy: Tensor,
    mb: Batch,
) -> Tensor:
    """Average over the loss mask, which is 0 where a roll brings in a value of another sequence."""
    logprobs = torch.roll(logprobs, 1)
    entropy = torch.roll(entropy, 1)
    return _loss(logprobs, entropy.detach(), mb)
