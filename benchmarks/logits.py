"""`logits`: cost of log-probabilities and entropies with a large vocabulary, with and without whole
logits.

The model is small and its vocabulary large, so that head and loss dominate the step. All ways train
the same engine on the same batch and differ only in the loss function.
"""

from collections.abc import Iterator

import torch

from holdfast.engine import FSDPEngine
from holdfast.engine.api import Batch
from holdfast.engine.rl import count_loss_tokens
from holdfast.engine.training.logprobs import token_logprobs
from holdfast.engine.training.model_output import ModelOutput

from .footprint import peak_bytes
from .harness import OURS, Figure, Options, Times, interleave, over
from .model import build_engine, ragged_batch
from .ranks import Session, on_ranks

WITHOUT, WITH = OURS, f"{OURS} on whole logits"
_VOCABULARY = 151_936  # the vocabulary of Qwen
_WIDTH = 64
_LENGTHS = [256] * 8


def logits(options: Options) -> list[Figure]:
    """Measure peak memory and seconds of a step, relative to a step with whole logits."""
    times = on_ranks(_measure, options)
    note = f"{sum(_LENGTHS)} tokens a rank, {_VOCABULARY} words; logits alone are {{}} of the memory of {WITH!r}"
    share = times.pop("logits")["share"][0]
    return [
        Figure(
            f"logits.{what}",
            f"{title} / {WITH}",
            "lower",
            over(WITH, times[what]),
            needed={WITHOUT: 0.5} if what == "memory" else {},
            seconds=times[what] if what == "seconds" else {},
            note=note.format(f"{share:.2f}"),
        )
        for what, title in (
            ("memory", "peak extra memory of a step"),
            ("seconds", "seconds of a step"),
        )
    ]


def _measure(session: Session) -> Times:
    vocabulary = 32_000 if session.options.quick else _VOCABULARY
    engine = build_engine(session, parameters=2 * _WIDTH * vocabulary, vocabulary=vocabulary)
    batch = ragged_batch(engine, _LENGTHS)
    losses = {WITHOUT: _ours, WITH: _ours_of_logits, "AReaL": _areal, "TRL": _trl}

    def step(way: str) -> dict[str, float]:
        seconds: list[float] = []
        peak = peak_bytes(
            session, lambda: seconds.append(session.seconds(lambda: _train(engine, batch, way)))
        )
        return {"memory": max(session.all(peak)), "seconds": seconds[0]}

    def _train(engine: FSDPEngine, batch: Batch, way: str) -> None:
        engine.train_batch(batch, losses[way], count_loss_tokens)

    times = interleave({way: lambda way=way: step(way) for way in losses}, session.options.rounds)
    times["logits"] = {"share": [4.0 * sum(_LENGTHS) * vocabulary / max(times["memory"][WITH])]}
    engine.destroy()
    return times


def _loss(logprobs: torch.Tensor, entropy: torch.Tensor, mb: Batch) -> torch.Tensor:
    """Policy loss on the log-probabilities. The entropy is computed, but the loss does not use it."""
    assert bool(torch.isfinite(entropy).all())
    return -(logprobs * mb["loss_mask"]).sum() / mb["loss_mask"].sum()


def _ours(output: ModelOutput, mb: Batch) -> torch.Tensor:
    return _loss(output.logprobs, output.entropy.detach(), mb)


def _ours_of_logits(output: ModelOutput, mb: Batch) -> torch.Tensor:
    logprobs, entropy = token_logprobs(output.logits, mb["input_ids"], mb["cu_seqlens"])
    return _loss(logprobs, entropy.detach(), mb)


def _areal(output: ModelOutput, mb: Batch) -> torch.Tensor:
    """AReaL's default: ``log_softmax`` under autograd, 1,024 rows at a time (AReaL also compiles
    it).
    """
    parts = []
    for rows, targets in _rows(output.logits, mb, 1024):
        log_p = torch.log_softmax(rows.float(), dim=-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        parts.append((log_p.gather(-1, targets[:, None]).squeeze(-1), entropy))
    return _aligned_loss(parts, mb)


def _trl(output: ModelOutput, mb: Batch) -> torch.Tensor:
    """TRL's way: selected logit minus logsumexp, row by row. Entropies without gradient, 128 rows
    at a time.
    """
    logits, parts = output.logits, []
    targets = torch.roll(mb["input_ids"].long(), -1)
    selected = logits.gather(-1, targets[:, None]).squeeze(-1)
    logprobs = selected - torch.stack([row.logsumexp(-1) for row in logits])
    with torch.no_grad():
        for rows, _ in _rows(logits, mb, 128):
            log_p = torch.log_softmax(rows, dim=-1)
            parts.append(-(log_p.exp() * log_p).sum(-1))
    return _aligned_loss([(logprobs, torch.cat(parts))], mb)


def _rows(
    logits: torch.Tensor, mb: Batch, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    targets = torch.roll(mb["input_ids"].long(), -1)
    return zip(logits.split(size), targets.split(size), strict=True)


def _aligned_loss(parts: list[tuple[torch.Tensor, torch.Tensor]], mb: Batch) -> torch.Tensor:
    """Average over the loss mask, which is 0 where a roll brings in a value of another sequence."""
    logprobs, entropy = (torch.roll(torch.cat(values), 1) for values in zip(*parts, strict=True))
    return _loss(logprobs, entropy.detach(), mb)
