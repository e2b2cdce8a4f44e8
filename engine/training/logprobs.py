"""Per-token log-probabilities and entropies from a model's packed output.

With a vocabulary of 150k, ``[T, V]`` logits and their gradient are the largest tensors of a step. `score_tokens` never
has them whole: it computes ``[T]`` scores from hidden states, forward in chunks of tokens and backward in chunks of
words, and computes the logits of a chunk twice. `token_logprobs` starts from given logits and keeps no copy.

Both compute in float32 with ``z = logits / temperature``: ``log p = z[token] - logsumexp(z)``, ``H = -sum(p log p)``,
``d log p / dz = onehot - p`` and ``dH / dz = -p (log p + H)``. In the last two, log p is kept above -inf, so that a
logit of -inf gives 0 instead of NaN.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear

_CHUNK_ELEMENTS = 1 << 25
"""Number of float32 logits at a time: 128 MiB."""
_LOWEST = -1e30
"""Lower limit for log p where it is multiplied by a p of 0."""


def token_logprobs(
    output: Any,
    input_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each token given the earlier ones, and the entropy of that choice.

    Args:
        output: ``[T, V]`` logits, where row t predicts token t + 1. Or the `ModelOutput` of these tokens, which may not
            need logits.
        input_ids: ``[T]`` packed tokens.
        cu_seqlens: ``[n + 1]`` boundaries of the sequences.
        temperature: divisor of the sampler's logits.
        chunk_size: rows of logits upcast at a time. None: limited by `_CHUNK_ELEMENTS`.

    Returns:
        logprobs and entropy, both ``[T]`` float32, aligned with the token they describe, 0 at the first token of every
        sequence, and differentiable.
    """
    if not isinstance(output, torch.Tensor):
        return output.at(temperature)
    logprobs, entropy = score_logits(output, next_tokens(input_ids), temperature, chunk_size)
    return align_with_tokens(logprobs, cu_seqlens), align_with_tokens(entropy, cu_seqlens)


def score_logits(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0, chunk_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``log p(target)`` and the entropy for each row of ``logits [T, V]``, ``[T]`` float32. ``targets`` are as in
    `score_tokens`."""
    return _OfLogits.apply(logits, targets, temperature, chunk_size)


def score_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    first_word: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``log p(target)`` and the entropy for the logits ``hidden @ weight.T + bias``, which never exist whole.

    ``hidden`` is ``[T, H]``, ``weight`` ``[V, H]``, ``bias`` ``[V]`` or None, and ``targets`` ``[T]`` int64 the token
    that follows each row. Both results are ``[T]`` float32, differentiable with respect to ``hidden``, ``weight`` and
    ``bias``. Gradients of the latter two are summed in one product per chunk of words, so chunks cost no precision in
    bfloat16.

    If ``weight`` and ``bias`` are for some words, from ``first_word`` on, and the ranks of ``group`` have the others,
    each rank gets the scores over all words, and the whole gradient of ``hidden``. Two all-reduces of ``[T]`` numbers
    forward, one of ``[T, H]`` backward.
    """
    return _OfHead.apply(hidden, weight, bias, targets - first_word, temperature, chunk_size, group)


def next_tokens(input_ids: torch.Tensor) -> torch.Tensor:
    """``[T]`` int64: the next token at each position. The value at the last token of a sequence has no meaning."""
    return torch.roll(input_ids.long(), -1)


def align_with_tokens(per_prediction: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Move ``[T]`` values from the position that predicts a token to the token itself. The result is 0 at sequence
    starts."""
    return torch.roll(per_prediction, 1).index_fill(0, cu_seqlens[:-1].long(), 0.0)


def _chunks(length: int, width: int, elements: int) -> Iterator[slice]:
    """Cut ``length`` into chunks of at most ``elements`` elements (chunk x width), and at least one row."""
    size = max(1, elements // max(1, width))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _chunk_elements(words: int, chunk_size: int | None) -> int:
    return _CHUNK_ELEMENTS if chunk_size is None else chunk_size * words


def _score(z: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``[t]`` log p(target), entropy and logsumexp of ``z [t, V]``, float32. Overwrites ``z``."""
    total = z.logsumexp(dim=-1)
    log_p = z.sub_(total[:, None])
    target_log_p = log_p.gather(1, targets[:, None]).squeeze(1)
    log_p.clamp_(min=_LOWEST)
    return target_log_p, -torch.linalg.vecdot(log_p.exp(), log_p), total


def _over_all_words(scores: torch.Tensor, targets: torch.Tensor, words: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Combine the ``[3, t]`` results of `_score` for each rank's ``words``, with targets counted from its first."""
    target_log_p, entropy, total = scores
    highest = total.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shift = total - highest
    weight = shift.exp()
    here = (targets >= 0) & (targets < words)
    part = torch.where(weight > 0, weight * (entropy - shift), 0.0)  # 0 * inf, if no word here is possible
    sums = torch.stack([weight, part, torch.where(here, target_log_p + shift, 0.0)])
    dist.all_reduce(sums, group=group)
    weights, entropies, target = sums
    log_weights = weights.log()
    return torch.stack([target - log_weights, entropies / weights + log_weights, highest + log_weights])


def _grad_z(
    z: torch.Tensor,
    scores: tuple[torch.Tensor, torch.Tensor],
    grads: tuple[torch.Tensor | None, torch.Tensor | None],
    targets: torch.Tensor,
) -> torch.Tensor:
    """Gradient of ``z [t, v]`` float32, for any words of any tokens. Overwrites ``z``.

    ``scores`` are ``[t]`` entropy and logsumexp over all words, ``grads`` the ``[t]`` gradients of log p(target) and
    entropy (None for 0). ``targets`` ``[t]`` lie outside ``[0, v)`` if the target is not among these words.
    """
    entropy, total = scores
    grad_logprobs, grad_entropy = grads
    log_p = z.sub_(total[:, None])
    if grad_entropy is None:
        assert grad_logprobs is not None  # else no backward would be needed
        grad = log_p.exp_().mul_(-grad_logprobs[:, None])
    else:
        p = log_p.exp()
        factor = log_p.clamp_(min=_LOWEST).add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        grad = p.mul_(factor if grad_logprobs is None else factor.sub_(grad_logprobs[:, None]))
    if grad_logprobs is not None:
        inside = (targets >= 0) & (targets < grad.shape[1])
        places = targets.clamp(0, grad.shape[1] - 1)
        grad.scatter_add_(1, places[:, None], torch.where(inside, grad_logprobs, 0.0)[:, None])
    return grad


def _rows_of(values: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if values is None else values[rows]


class _OfLogits(torch.autograd.Function):
    """``(logits [T, V], targets [T], temperature, chunk_size)`` -> ``(log p(target), entropy)``, ``[T]`` float32."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float, chunk_size: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
        ctx.temperature, ctx.elements = temperature, _chunk_elements(logits.shape[1], chunk_size)
        for rows in _chunks(len(logits), logits.shape[1], ctx.elements):
            scores[:, rows] = torch.stack(_score(logits[rows].float() / temperature, targets[rows]))
        ctx.save_for_backward(logits, targets, scores)
        ctx.set_materialize_grads(False)
        return scores[0].clone(), scores[1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None]:
        logits, targets, (_, entropy, total) = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for rows in _chunks(len(logits), logits.shape[1], ctx.elements):
            grads = (_rows_of(grad_logprobs, rows), _rows_of(grad_entropy, rows))
            z = logits[rows].float() / ctx.temperature
            grad_logits[rows] = _grad_z(z, (entropy[rows], total[rows]), grads, targets[rows]) / ctx.temperature
        return grad_logits, None, None, None


class _OfHead(torch.autograd.Function):
    """`score_tokens`. The tensors saved for the backward have the size of ``hidden``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int | None,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.empty(3, len(hidden), dtype=torch.float32, device=hidden.device)
        ctx.temperature, ctx.elements, ctx.group = temperature, _chunk_elements(len(weight), chunk_size), group
        own_targets = targets.clamp(0, len(weight) - 1)
        for rows in _chunks(len(hidden), len(weight), ctx.elements):
            z = linear(hidden[rows], weight, bias).float().div_(temperature)
            scores[:, rows] = torch.stack(_score(z, own_targets[rows]))
        if group is not None:
            scores = _over_all_words(scores, targets, len(weight), group)
        ctx.save_for_backward(hidden, weight, bias, targets, scores)
        ctx.set_materialize_grads(False)
        return scores[0].clone(), scores[1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None, None, None]:
        hidden, weight, bias, targets, (_, entropy, total) = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        for words in _chunks(len(weight), len(hidden), ctx.elements):
            part = None if bias is None else bias[words]
            z = linear(hidden, weight[words], part).float().div_(ctx.temperature)
            grad = _grad_z(z, (entropy, total), (grad_logprobs, grad_entropy), targets - words.start)
            grad = grad.div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias[words] = grad.sum(0)
            grad = grad.to(hidden.dtype)
            if grad_weight is not None:
                grad_weight[words] = grad.T @ hidden
            if grad_hidden is not None:
                grad_hidden += grad @ weight[words]
        if grad_hidden is not None:
            if ctx.group is not None:
                dist.all_reduce(grad_hidden, group=ctx.group)
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None
