"""From a model's packed output to per-token log-probabilities, entropies and values.

A vocabulary of 150k makes ``[T, V]`` logits the largest tensor of a step, and autograd through ``log_softmax`` would
keep a second one in float32. Here both directions go through chunks of rows, and only ``[T]`` tensors are kept beside
the logits. The backward computes the softmax again: one more exp, in exchange for 4 bytes x T x V.
"""

from collections.abc import Iterator

import torch

_CHUNK_ELEMENTS = 1 << 25
"""Logits upcast at a time: 128 MiB in float32."""


def token_logprobs(
    logits: torch.Tensor, input_ids: torch.Tensor, cu_seqlens: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each token given what stands before it, and the entropy of that choice.

    ``log p = z[token] - logsumexp(z)`` and ``H = -sum(p log p)`` with ``z = logits / temperature``, in float32.

    Args:
        logits: ``[T, V]``; row t predicts token t + 1.
        input_ids: ``[T]`` packed tokens.
        cu_seqlens: ``[n + 1]`` boundaries of the sequences.
        temperature: what the sampler divided its logits by.

    Returns:
        logprobs and entropy, both ``[T]`` float32, aligned with the token they are about, and 0 at the first token
        of every sequence. Both are differentiable with respect to ``logits``.
    """
    targets = torch.roll(input_ids.long(), -1)
    logprobs, entropy = _NextToken.apply(logits, targets, temperature)
    return align_with_tokens(logprobs, cu_seqlens), align_with_tokens(entropy, cu_seqlens)


def align_with_tokens(per_prediction: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Move what stands at the token before (where it was predicted) to the token itself; 0 at sequence starts.

    Args:
        per_prediction: ``[T]``; entry t is about token t + 1.
        cu_seqlens: ``[n + 1]`` boundaries of the sequences.
    """
    return torch.roll(per_prediction, 1).index_fill(0, cu_seqlens[:-1].long(), 0.0)


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    for start in range(0, logits.shape[0], rows):
        yield slice(start, start + rows)


class _NextToken(torch.autograd.Function):
    """``(logits [T, V], targets [T], temperature)`` -> ``(log p(target) [T], entropy [T])`` in float32.

    With respect to ``z = logits / temperature``: ``d log p / dz = onehot - p`` and ``dH / dz = -p (log p + H)``,
    written with ``entr(p) = -p log p`` so that a logit of -inf gives 0 and not NaN.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
        for chunk in _chunks(logits):
            log_p = torch.log_softmax(logits[chunk].float() / temperature, dim=-1)
            logprobs[chunk] = log_p.gather(1, targets[chunk, None]).squeeze(1)
            entropy[chunk] = torch.special.entr(log_p.exp_()).sum(dim=-1)
        ctx.save_for_backward(logits, targets, entropy)
        ctx.temperature = temperature  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None]:
        logits, targets, entropy = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature: float = ctx.temperature  # type: ignore[attr-defined]
        grad_logits = torch.empty_like(logits)
        for chunk in _chunks(logits):
            p = torch.softmax(logits[chunk].float() / temperature, dim=-1)
            grad = torch.zeros_like(p)
            if grad_entropy is not None:
                grad += (torch.special.entr(p) - p * entropy[chunk, None]) * grad_entropy[chunk, None]
            if grad_logprobs is not None:
                weight = grad_logprobs[chunk, None]
                grad -= p * weight
                grad.scatter_add_(1, targets[chunk, None], weight)
            grad_logits[chunk] = grad / temperature
        return grad_logits, None, None
