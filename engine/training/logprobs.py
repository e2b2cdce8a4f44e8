"""Per-token log-probabilities and entropies from a model's packed output.

With a vocabulary of 150k, ``[T, V]`` logits and their gradient are the largest tensors of a step.
`score_tokens` never has them whole: it computes ``[T]`` scores from hidden states, forward in
chunks of tokens and backward in chunks of words, and computes the logits of a chunk twice.
`token_logprobs` starts from given logits and keeps no copy.

Both compute in float32 with ``z = logits / temperature``: ``log p = z[token] - logsumexp(z)``, ``H
= -sum(p log p)``, ``d log p / dz = onehot - p`` and ``dH / dz = -p (log p + H)``. ``-p log p`` is 0
for a logit of -inf (``entr``).

The passes over a chunk take some rows at a time, so that their float32 copies are small. With
``compiled`` they become one kernel each way, which has none.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import linear
from torch.special import entr

from .compilation import compiled as compiled_

CHUNK_ELEMENTS = 1 << 26
"""Number of logits in a product of matrices: 128 MiB in bfloat16."""
PASS_ELEMENTS = 1 << 23
"""Number of logits in a pass over them: 32 MiB for each copy in float32."""


def token_logprobs(
    output: Any,
    input_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each token given the earlier ones, and the entropy of that choice.

    Args:
        output: ``[T, V]`` logits, where row t predicts token t + 1. Or the `ModelOutput` of these
            tokens, which may not need logits.
        input_ids: ``[T]`` packed tokens.
        cu_seqlens: ``[n + 1]`` boundaries of the sequences.
        temperature: divisor of the sampler's logits.
        chunk_size: rows of logits upcast at a time. None: limited by `CHUNK_ELEMENTS`.

    Returns:
        logprobs and entropy, both ``[T]`` float32, aligned with the token they describe, 0 at the
        first token of every sequence, and differentiable.
    """
    if not isinstance(output, torch.Tensor):
        return output.at(temperature)
    logprobs, entropy = score_logits(output, next_tokens(input_ids), temperature, chunk_size)
    return align_with_tokens(logprobs, cu_seqlens), align_with_tokens(entropy, cu_seqlens)


def score_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    uses: "Uses | None" = None,
    compiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``log p(target)`` and the entropy for each row of ``logits [T, V]``, ``[T]`` float32.
    ``targets`` and ``uses`` are as in `score_tokens`.
    """
    return _OfLogits.apply(logits, targets, temperature, chunk_size, uses or Uses(), compiled)


def score_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    first_word: int = 0,
    group: dist.ProcessGroup | None = None,
    uses: "Uses | None" = None,
    compiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``log p(target)`` and the entropy for the logits ``hidden @ weight.T + bias``, which never
    exist whole.

    ``hidden`` is ``[T, H]``, ``weight`` ``[V, H]``, ``bias`` ``[V]`` or None, and ``targets``
    ``[T]`` int64 the token that follows each row. Both results are ``[T]`` float32, differentiable
    with respect to ``hidden``, ``weight`` and ``bias``. Gradients of the latter two are summed in
    one product per chunk of words, so chunks cost no precision in bfloat16.

    If ``weight`` and ``bias`` are for some words, from ``first_word`` on, and the ranks of
    ``group`` have the others, each rank gets the scores over all words, and the whole gradient of
    ``hidden``. Two all-reduces of ``[T]`` numbers forward, one of ``[T, H]`` backward.

    If both results are stacked for their way through a model, give ``uses`` to this function and to
    `columns`.
    """
    given = (temperature, chunk_size, group, uses or Uses(), compiled)
    return _OfHead.apply(hidden, weight, bias, targets - first_word, *given)


class Uses:
    """Whether the loss of a backward depends on entropies. `columns` finds out, before
    `score_tokens` needs to know.
    """

    entropy = True


def columns(scores: torch.Tensor, uses: Uses) -> tuple[torch.Tensor, torch.Tensor]:
    """Split ``scores [T, 2]`` into log-probabilities and entropies. An unused column gets a
    gradient of zeros, so that only ``uses`` shows that it costs nothing.
    """
    return _Columns.apply(scores, uses)


def next_tokens(input_ids: torch.Tensor) -> torch.Tensor:
    """``[T]`` int64: the next token at each position. The value at the last token of a sequence has
    no meaning.
    """
    return torch.roll(input_ids.long(), -1)


def align_with_tokens(per_prediction: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Move ``[T]`` values from the position that predicts a token to the token itself. The result
    is 0 at sequence starts.
    """
    return torch.roll(per_prediction, 1).index_fill(0, cu_seqlens[:-1].long(), 0.0)


def _chunks(length: int, width: int, elements: int) -> Iterator[slice]:
    """Cut ``length`` into chunks of at most ``elements`` elements (chunk x width), and at least one
    row.
    """
    size = max(1, elements // max(1, width))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def chunk_elements(words: int, chunk_size: int | None) -> int:
    """Most logits at a time, for ``chunk_size`` tokens (None: the default) with ``words`` logits
    each.
    """
    return CHUNK_ELEMENTS if chunk_size is None else chunk_size * words


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits.float() if logits.dtype == torch.float64 else logits
    if temperature == 1 and not torch.compiler.is_compiling():  # a graph has no other for 1
        return logits
    return logits.to(torch.float32, copy=True).div_(temperature)


def _score(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, compiled: bool
) -> torch.Tensor:
    """`_score_rows`, a few rows at a time."""
    if (
        compiled and min(logits.shape) > 1
    ):  # a single token (a dummy) or word would take a graph of its own
        return compiled_(_score_rows)(logits, targets, temperature)
    blocks = _chunks(len(logits), logits.shape[1], PASS_ELEMENTS)
    return torch.cat(
        [_score_rows(logits[rows], targets[rows], temperature) for rows in blocks], dim=1
    )


def _score_rows(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """``[3, t]`` float32: log p(target), entropy and logsumexp of ``logits [t, V] / temperature``."""
    z = _scaled(logits, temperature)
    highest = z.amax(dim=-1).float()
    highest = torch.where(highest > -torch.inf, highest, 0.0)
    below = torch.sub(z, highest[:, None], out=None if z is logits else z)
    below_target = below.gather(1, targets[:, None]).squeeze(1)
    weights = below.exp_()
    total = weights.sum(dim=-1)
    log_total = total.log()
    entropy = log_total + entr(weights, out=weights).sum(dim=-1) / total
    return torch.stack([below_target - log_total, entropy, highest + log_total])


def _over_all_words(
    scores: torch.Tensor, targets: torch.Tensor, words: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Combine the ``[3, t]`` results of `_score` for each rank's ``words``, with targets counted
    from its first.
    """
    target_log_p, entropy, total = scores
    highest = total.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shift = total - highest
    weight = shift.exp()
    here = (targets >= 0) & (targets < words)
    part = torch.where(
        weight > 0, weight * (entropy - shift), 0.0
    )  # 0 * inf, if no word here is possible
    target = torch.where(weight > 0, target_log_p + shift, -torch.inf)
    sums = torch.stack([weight, part, torch.where(here, target, 0.0)])
    dist.all_reduce(sums, group=group)
    weights, entropies, target = sums
    log_weights = weights.log()
    return torch.stack(
        [target - log_weights, entropies / weights + log_weights, highest + log_weights]
    )


class _Factors(NamedTuple):
    """``[T]`` each. The gradient of a token's logits is ``of_p * p - of_p_log_p * p log p``, but at
    its target ``at_target``.
    """

    of_p: torch.Tensor
    of_p_log_p: torch.Tensor | None  # None: 0
    at_target: torch.Tensor | None  # None: as at other words

    @classmethod
    def of(
        cls,
        scores: torch.Tensor,
        grads: tuple[torch.Tensor | None, torch.Tensor | None],
        temperature: float,
    ) -> "_Factors":
        """From log p(target), entropy and logsumexp over all words, and the gradients of the first
        two.
        """
        target_log_p, entropy, _ = scores
        grad_logprobs, grad_entropy = (
            None if grad is None else grad / temperature for grad in grads
        )
        of_p = torch.zeros_like(entropy) if grad_logprobs is None else -grad_logprobs
        of_p = of_p if grad_entropy is None else of_p - grad_entropy * entropy
        if grad_logprobs is None:
            return cls(of_p, grad_entropy, None)
        p = target_log_p.exp()
        at_target = grad_logprobs + of_p * p
        return cls(
            of_p,
            grad_entropy,
            at_target if grad_entropy is None else at_target + grad_entropy * entr(p),
        )

    def at(self, rows: slice) -> "_Factors":
        return _Factors(*(None if factor is None else factor[rows] for factor in self))  # type: ignore[arg-type]


def _grad_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    total: torch.Tensor,
    factors: _Factors,
    out: torch.Tensor,
    compiled: bool,
) -> torch.Tensor:
    """Write the gradient of ``logits [t, v]``, for any words of any tokens, to ``out``, which may
    be ``logits``.

    ``total`` ``[t]`` is the logsumexp over all words. ``targets`` ``[t]`` lie outside ``[0, v)`` if
    the target is not among these words.
    """
    if compiled and min(logits.shape) > 1:
        compiled_(_write_grad)(logits, temperature, total, factors.of_p, factors.of_p_log_p, out)
    else:
        for rows in _chunks(len(logits), logits.shape[1], PASS_ELEMENTS):
            own = factors.at(rows)
            _write_grad(logits[rows], temperature, total[rows], own.of_p, own.of_p_log_p, out[rows])
    if factors.at_target is not None:
        inside, places = (
            (targets >= 0) & (targets < logits.shape[1]),
            targets.clamp(0, logits.shape[1] - 1)[:, None],
        )
        at_target = factors.at_target[:, None].to(out.dtype)
        out.scatter_(1, places, torch.where(inside[:, None], at_target, out.gather(1, places)))
    return out


def _write_grad(
    logits: torch.Tensor,
    temperature: float,
    total: torch.Tensor,
    of_p: torch.Tensor,
    of_p_log_p: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    z = _scaled(logits, temperature)
    own = out if out.dtype == torch.float32 else None
    p = torch.sub(z, total[:, None], out=own if z is logits else z).exp_()
    if of_p_log_p is None:
        torch.mul(p, of_p[:, None], out=out)
    else:
        minus_p_log_p = entr(p)
        out.copy_(p.mul_(of_p[:, None]).addcmul_(minus_p_log_p, of_p_log_p[:, None]))


class _OfLogits(torch.autograd.Function):
    """`score_logits`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int | None,
        uses: Uses,
        compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
        ctx.temperature, ctx.elements = temperature, chunk_elements(logits.shape[1], chunk_size)
        ctx.uses, ctx.compiled = uses, compiled
        for rows in _chunks(len(logits), logits.shape[1], ctx.elements):
            scores[:, rows] = _score(logits[rows], targets[rows], temperature, compiled)
        ctx.save_for_backward(logits, targets, scores)
        ctx.set_materialize_grads(False)
        return scores[0].clone(), scores[1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        logits, targets, scores = ctx.saved_tensors
        grads = grad_logprobs, grad_entropy if ctx.uses.entropy else None
        factors, grad_logits = _Factors.of(scores, grads, ctx.temperature), torch.empty_like(logits)
        for rows in _chunks(len(logits), logits.shape[1], ctx.elements):
            own, out = (
                (logits[rows], targets[rows], ctx.temperature, scores[2, rows]),
                grad_logits[rows],
            )
            _grad_logits(*own, factors.at(rows), out, ctx.compiled)
        return grad_logits, *[None] * 5


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, uses: Uses) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.uses = uses
        ctx.set_materialize_grads(False)
        return scores[:, 0].clone(), scores[:, 1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        ctx.uses.entropy = grads[1] is not None
        given = [grad for grad in grads if grad is not None]
        if not given:
            return None, None
        return torch.stack(
            [torch.zeros_like(given[0]) if grad is None else grad for grad in grads], dim=-1
        ), None


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
        uses: Uses,
        compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.empty(3, len(hidden), dtype=torch.float32, device=hidden.device)
        ctx.temperature, ctx.elements = temperature, chunk_elements(len(weight), chunk_size)
        ctx.group, ctx.uses, ctx.compiled = group, uses, compiled
        own_targets = targets.clamp(0, len(weight) - 1)
        for rows in _chunks(len(hidden), len(weight), ctx.elements):
            logits = linear(hidden[rows], weight, bias)
            scores[:, rows] = _score(logits, own_targets[rows], temperature, compiled)
            del logits  # before the next ones are made
        if group is not None:
            scores = _over_all_words(scores, targets, len(weight), group)
        ctx.save_for_backward(hidden, weight, bias, targets, scores)
        ctx.set_materialize_grads(False)
        return scores[0].clone(), scores[1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, scores = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        factors = _Factors.of(
            scores, (grad_logprobs, grad_entropy if ctx.uses.entropy else None), ctx.temperature
        )
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        for words in _chunks(len(weight), len(hidden), ctx.elements):
            part = None if bias is None else bias[words]
            logits, own = linear(hidden, weight[words], part), targets - words.start
            grad = _grad_logits(
                logits, own, ctx.temperature, scores[2], factors, logits, ctx.compiled
            )
            if grad_bias is not None:
                grad_bias[words] = grad.sum(0)
            if grad_weight is not None:
                grad_weight[words] = grad.T @ hidden
            if grad_hidden is not None:
                grad_hidden += grad @ weight[words]
            del logits, grad  # before the next ones are made
        if grad_hidden is not None:
            if ctx.group is not None:
                dist.all_reduce(grad_hidden, group=ctx.group)
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 6
