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
from torch import Tensor
from torch.nn.functional import linear
from torch.special import entr

from .compilation import compiled as compiled_
from .rank_parts import Group

CHUNK_ELEMENTS = 1 << 26
"""Number of logits in a product of matrices: 128 MiB in bfloat16."""
PASS_ELEMENTS = 1 << 23
"""Number of logits in a pass over them: 32 MiB for each copy in float32."""

Scores = tuple[Tensor, Tensor]
"""Log-probabilities and entropies, ``[T]`` float32."""


def token_logprobs(
    output: Any,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    temperature: float = 1.0,
) -> Scores:
    """Log-probability of each token given the earlier ones, and the entropy of that choice.

    Args:
        output: ``[T, V]`` logits, where row t predicts token t + 1. Or the `ModelOutput` of these
            tokens, which may not need logits.
        input_ids: ``[T]`` packed tokens.
        cu_seqlens: ``[n + 1]`` boundaries of the sequences.
        temperature: divisor of the sampler's logits.

    Returns:
        logprobs and entropy, both ``[T]`` float32, aligned with the token they describe, 0 at the
        first token of every sequence, and differentiable.
    """
    if not isinstance(output, Tensor):
        return output.at(temperature)
    logprobs, entropy = score_logits(output, next_tokens(input_ids), temperature)
    return align_with_tokens(logprobs, cu_seqlens), align_with_tokens(entropy, cu_seqlens)


def score_logits(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_size: int | None = None,
    uses: "Uses | None" = None,
    compiled: bool = False,
) -> Scores:
    """``log p(target)`` and the entropy for each row of ``logits [T, V]``, ``[T]`` float32.
    ``targets`` and ``uses`` are as in `score_tokens`.
    """
    rules = _Rules(temperature, chunk_size, compiled, uses or Uses())
    return _OfLogits.apply(logits, targets, rules)


def score_tokens(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    first_word: int = 0,
    group: Group = None,
    uses: "Uses | None" = None,
    compiled: bool = False,
) -> Scores:
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
    rules = _Rules(temperature, chunk_size, compiled, uses or Uses())
    return _OfHead.apply(hidden, weight, bias, targets - first_word, group, rules)


class Uses:
    """Whether the loss of a backward depends on entropies. `columns` finds out, before
    `score_tokens` needs to know.
    """

    entropy = True


class _Rules(NamedTuple):
    temperature: float
    chunk_size: int | None
    compiled: bool
    uses: Uses


def columns(scores: Tensor, uses: Uses) -> Scores:
    """Split ``scores [T, 2]`` into log-probabilities and entropies. An unused column gets a
    gradient of zeros, so that only ``uses`` shows that it costs nothing.
    """
    return _Columns.apply(scores, uses)


def next_tokens(input_ids: Tensor) -> Tensor:
    """``[T]`` int64: the next token at each position. The value at the last token of a sequence has
    no meaning.
    """
    return torch.roll(input_ids.long(), -1)


def align_with_tokens(per_prediction: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Move ``[T]`` values from the position that predicts a token to the token itself. The result
    is 0 at sequence starts.
    """
    starts = cu_seqlens[:-1].long()
    return torch.roll(per_prediction, 1).index_fill(0, starts, 0.0)


def _chunks(
    length: int,
    width: int,
    elements: int,
) -> Iterator[slice]:
    """Cut ``length`` into chunks of at most ``elements`` elements (chunk x width), and at least one
    row.
    """
    size = max(1, elements // max(1, width))
    for start in range(0, length, size):
        end = min(start + size, length)
        yield slice(start, end)


def chunk_elements(words: int, chunk_size: int | None) -> int:
    """Most logits at a time, for ``chunk_size`` tokens (None: the default) with ``words`` logits
    each.
    """
    return CHUNK_ELEMENTS if chunk_size is None else chunk_size * words


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    if logits.dtype == torch.float64:
        logits = logits.float()
    # A graph has no other way for 1.
    if temperature == 1 and not torch.compiler.is_compiling():
        return logits
    return logits.to(torch.float32, copy=True).div_(temperature)


def _score(logits: Tensor, targets: Tensor, rules: _Rules) -> Tensor:
    """`_score_rows`, a few rows at a time."""
    # A single token (a dummy) or word would take a graph of its own.
    if rules.compiled and min(logits.shape) > 1:
        return compiled_(_score_rows)(logits, targets, rules.temperature)
    scores = []
    for rows in _chunks(len(logits), logits.shape[1], PASS_ELEMENTS):
        scores.append(_score_rows(logits[rows], targets[rows], rules.temperature))
    return torch.cat(scores, dim=1)


def _score_rows(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
) -> Tensor:
    """``[3, t]`` float32: log p(target), entropy and logsumexp of ``logits [t, V] / temperature``,
    each ``[t]``.
    """
    z = _scaled(logits, temperature)
    # The largest logit is subtracted, so that no exponential overflows. It may be -inf.
    highest = z.amax(dim=-1).float()
    highest = torch.where(highest > -torch.inf, highest, 0.0)
    own = None if z is logits else z
    below = torch.sub(z, highest[:, None], out=own)
    below_target = below.gather(1, targets[:, None]).squeeze(1)

    # H = log(total) + sum(-w log w) / total with w = exp(z - highest), in the memory of ``below``.
    weights = below.exp_()
    total = weights.sum(dim=-1)
    log_total = total.log()
    of_weights = entr(weights, out=weights).sum(dim=-1)
    return torch.stack(
        [
            below_target - log_total,
            log_total + of_weights / total,
            highest + log_total,
        ]
    )


def _over_all_words(
    scores: Tensor,
    targets: Tensor,
    words: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """Combine the ``[3, t]`` results of `_score` for each rank's ``words``, with targets counted
    from its first.
    """
    target_log_p, entropy, total = scores

    # The weight of these words among all: exp(total - highest), relative to the largest total.
    highest = total.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shift = total - highest
    weight = shift.exp()

    # 0 * inf, if no word here is possible.
    is_possible = weight > 0
    part = torch.where(is_possible, weight * (entropy - shift), 0.0)
    target = torch.where(is_possible, target_log_p + shift, -torch.inf)
    is_here = (targets >= 0) & (targets < words)
    target = torch.where(is_here, target, 0.0)

    sums = torch.stack([weight, part, target])
    dist.all_reduce(sums, group=group)
    weight, part, target = sums
    log_weight = weight.log()
    return torch.stack(
        [
            target - log_weight,
            part / weight + log_weight,
            highest + log_weight,
        ]
    )


class _Factors(NamedTuple):
    """``[T]`` each. The gradient of a token's logits is ``of_p * p - of_p_log_p * p log p``, but at
    its target ``at_target``.
    """

    of_p: Tensor
    of_p_log_p: Tensor | None  # None: 0
    at_target: Tensor | None  # None: as at other words

    @classmethod
    def of(
        cls,
        scores: Tensor,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        rules: _Rules,
    ) -> "_Factors":
        """From log p(target), entropy and logsumexp over all words, and the gradients of the first
        two.
        """
        target_log_p, entropy, _ = scores
        if not rules.uses.entropy:
            grad_entropy = None
        of_p = torch.zeros_like(entropy)
        if grad_logprobs is not None:
            grad_logprobs = grad_logprobs / rules.temperature
            of_p = -grad_logprobs
        if grad_entropy is not None:
            grad_entropy = grad_entropy / rules.temperature
            of_p = of_p - grad_entropy * entropy
        if grad_logprobs is None:
            return cls(of_p, grad_entropy, None)

        p = target_log_p.exp()
        # d log p / dz is 1 - p at the target.
        at_target = grad_logprobs + of_p * p
        if grad_entropy is not None:
            at_target = at_target + grad_entropy * entr(p)
        return cls(of_p, grad_entropy, at_target)

    def at(self, rows: slice) -> "_Factors":
        """Scores of some tokens."""
        return _Factors(*(None if factor is None else factor[rows] for factor in self))  # type: ignore[arg-type]


def _grad_logits(
    logits: Tensor,
    targets: Tensor,
    rules: _Rules,
    total: Tensor,
    factors: _Factors,
    out: Tensor,
) -> Tensor:
    """Write the gradient of ``logits [t, v]``, for any words of any tokens, to ``out``, which may
    be ``logits``.

    ``total`` ``[t]`` is the logsumexp over all words. ``targets`` ``[t]`` lie outside ``[0, v)`` if
    the target is not among these words.
    """
    n_words = logits.shape[1]
    temperature = rules.temperature
    if rules.compiled and min(logits.shape) > 1:
        compiled_(_write_grad)(logits, temperature, total, factors.of_p, factors.of_p_log_p, out)
    else:
        for rows in _chunks(len(logits), n_words, PASS_ELEMENTS):
            own = factors.at(rows)
            _write_grad(
                logits[rows],
                temperature,
                total[rows],
                own.of_p,
                own.of_p_log_p,
                out[rows],
            )
    if factors.at_target is None:
        return out

    # At a target among these words another value. Elsewhere the written one stays. On CPUs
    # ``scatter_`` would copy all of ``out`` to float32.
    is_here = (targets >= 0) & (targets < n_words)
    rows = torch.arange(len(out), device=out.device)
    places = (rows, targets.clamp(0, n_words - 1))
    at_target = factors.at_target.to(out.dtype)
    out[places] = torch.where(is_here, at_target, out[places])
    return out


def _write_grad(
    logits: Tensor,
    temperature: float,
    total: Tensor,
    of_p: Tensor,
    of_p_log_p: Tensor | None,
    out: Tensor,
) -> None:
    # p, in ``out`` or in the scaled copy if one of them is float32.
    z = _scaled(logits, temperature)
    own = z
    if z is logits:
        own = out if out.dtype == torch.float32 else None
    p = torch.sub(z, total[:, None], out=own).exp_()

    if of_p_log_p is None:
        torch.mul(p, of_p[:, None], out=out)
    else:
        minus_p_log_p = entr(p)
        grad = p.mul_(of_p[:, None])
        out.copy_(grad.addcmul_(minus_p_log_p, of_p_log_p[:, None]))


class _OfLogits(torch.autograd.Function):
    """`score_logits`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        rules: _Rules,
    ) -> Scores:
        n_tokens, n_words = logits.shape
        scores = torch.empty(3, n_tokens, dtype=torch.float32, device=logits.device)
        ctx.rules = rules
        ctx.elements = chunk_elements(n_words, rules.chunk_size)
        for rows in _chunks(n_tokens, n_words, ctx.elements):
            scores[:, rows] = _score(logits[rows], targets[rows], rules)
        # Logits are saved as they are given, without a copy.
        ctx.save_for_backward(logits, targets, scores)
        ctx.set_materialize_grads(False)
        return scores[0].clone(), scores[1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        logits, targets, scores = ctx.saved_tensors
        factors = _Factors.of(scores, grad_logprobs, grad_entropy, ctx.rules)
        grad_logits = torch.empty_like(logits)
        for rows in _chunks(len(logits), logits.shape[1], ctx.elements):
            _grad_logits(
                logits[rows],
                targets[rows],
                ctx.rules,
                scores[2, rows],
                factors.at(rows),
                grad_logits[rows],
            )
        return grad_logits, None, None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        uses: Uses,
    ) -> Scores:
        ctx.uses = uses
        ctx.set_materialize_grads(False)
        return scores[:, 0].clone(), scores[:, 1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        ctx.uses.entropy = grads[1] is not None
        given = [grad for grad in grads if grad is not None]
        if not given:
            return None, None
        both = [torch.zeros_like(given[0]) if grad is None else grad for grad in grads]
        return torch.stack(both, dim=-1), None


class _OfHead(torch.autograd.Function):
    """`score_tokens`. The tensors saved for the backward have the size of ``hidden``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        group: Group,
        rules: _Rules,
    ) -> Scores:
        n_tokens = len(hidden)
        n_words = len(weight)
        scores = torch.empty(3, n_tokens, dtype=torch.float32, device=hidden.device)
        ctx.rules = rules
        ctx.elements = chunk_elements(n_words, rules.chunk_size)
        ctx.group = group

        # Scores over the words of this rank, for some tokens at a time.
        # Targets that another rank has are any word here, and left out of the sum.
        own_targets = targets.clamp(0, n_words - 1)
        for rows in _chunks(n_tokens, n_words, ctx.elements):
            logits = linear(hidden[rows], weight, bias)
            scores[:, rows] = _score(logits, own_targets[rows], rules)
            del logits  # before the next ones are made
        if group is not None:
            scores = _over_all_words(scores, targets, n_words, group)
        ctx.save_for_backward(hidden, weight, bias, targets, scores)
        ctx.set_materialize_grads(False)
        return scores[0].clone(), scores[1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, scores = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        factors = _Factors.of(scores, grad_logprobs, grad_entropy, ctx.rules)
        # A sum over all chunks, so it is in float32.
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None

        # Gradients for some words at a time, in the memory of their logits.
        for words in _chunks(len(weight), len(hidden), ctx.elements):
            part = None if bias is None else bias[words]
            logits = linear(hidden, weight[words], part)
            grad = _grad_logits(
                logits,
                targets - words.start,
                ctx.rules,
                scores[2],
                factors,
                logits,
            )
            if grad_bias is not None:
                grad_bias[words] = grad.sum(0)
            if grad_weight is not None:
                if torch.is_autocast_enabled(grad.device.type):
                    grad_weight[words] = grad.T @ hidden
                else:
                    # In place: a product of its own can be as large as the whole gradient.
                    torch.mm(grad.T, hidden, out=grad_weight[words])
            if grad_hidden is not None:
                grad_hidden += grad @ weight[words]
            del logits, grad  # before the next ones are made
        if grad_hidden is not None:
            # Each rank has the part of its words.
            if ctx.group is not None:
                dist.all_reduce(grad_hidden, group=ctx.group)
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None
