"""Log-probabilities and entropies against loops in float64, and their gradients against finite
differences.
"""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from holdfast.engine.rl import count_loss_tokens, sft_loss_fn
from holdfast.engine.training import logprobs as module
from holdfast.engine.training.logprobs import (
    align_with_tokens,
    next_tokens,
    score_logits,
    score_tokens,
    token_logprobs,
)
from tests.engine.peak_memory import peak_allocated_bytes
from tests.tiers import slow_but

CU_SEQLENS = torch.tensor([0, 3, 4, 9], dtype=torch.int32)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)])
def compiled(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether passes over logits are compiled. Then all of them are: torch stops, without an error,
    at eight graphs.
    """
    if not request.param:
        yield False
        return
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield True


def by_loops(
    logits: np.ndarray, tokens: list[int], temperature: float
) -> tuple[list[float], list[float]]:
    logprobs, entropies = [], []
    for t in range(len(tokens)):
        if t in (0, 3, 4):
            logprobs.append(0.0)
            entropies.append(0.0)
            continue
        weights = [math.exp(z / temperature) for z in logits[t - 1]]
        total = sum(weights)
        logprobs.append(math.log(weights[tokens[t]] / total))
        entropies.append(-sum(w / total * math.log(w / total) for w in weights))
    return logprobs, entropies


@pytest.mark.parametrize("chunk_elements", [1, 21, 1 << 25])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_equal_loops_whatever_the_chunk(
    chunk_elements: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 7, generator=generator, dtype=torch.float64) * 3
    tokens = torch.randint(0, 7, (9,), generator=generator)
    logprobs, entropy = token_logprobs(logits.float(), tokens, CU_SEQLENS, temperature)
    expected = by_loops(logits.numpy(), tokens.tolist(), temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32
    np.testing.assert_allclose(logprobs.numpy(), expected[0], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(entropy.numpy(), expected[1], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("chunk_elements", [1, 1 << 25])
def test_token_logprobs_gradient_equals_that_of_log_softmax(
    chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    generator = torch.Generator().manual_seed(1)
    raw = torch.randn(9, 7, generator=generator) * 2
    tokens = torch.randint(0, 7, (9,), generator=generator)
    weight_p, weight_h = torch.randn(2, 9, generator=generator)
    weight_p[[0, 3, 4]] = weight_h[[0, 3, 4]] = 0

    ours = raw.clone().requires_grad_()
    logprobs, entropy = token_logprobs(ours, tokens, CU_SEQLENS, 0.8)
    (logprobs @ weight_p + entropy @ weight_h).backward()
    theirs = raw.double().requires_grad_()
    log_p = torch.log_softmax(theirs / 0.8, -1)
    picked = log_p[:-1].gather(1, tokens[1:, None]).squeeze(1)
    entropies = -(log_p.exp() * log_p).sum(-1)[:-1]
    (picked @ weight_p[1:].double() + entropies @ weight_h[1:].double()).backward()
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)
    assert ours.grad[[2, 3, 8]].abs().max() == 0  # the last token of a sequence predicts nothing


@pytest.mark.parametrize("chunk_elements", [1, 30, 1 << 25])
@pytest.mark.parametrize("asked", ["logprobs", "entropy", "both"])
def test_scores_of_a_head_and_their_gradients_equal_those_of_its_logits(
    chunk_elements: int, asked: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(9, 4, generator=generator), torch.randn(7, 4, generator=generator)
    bias = torch.randn(7, generator=generator)
    bias[5] = -math.inf  # a token that is never chosen
    tokens = torch.tensor([0, 1, 2, 3, 4, 6, 0, 1, 2])
    weights = torch.randn(2, 9, generator=generator) * torch.tensor(
        [[asked != "entropy"], [asked != "logprobs"]]
    )
    inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    reference = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias)]
    scores = score_tokens(
        inputs[0], inputs[1], inputs[2], next_tokens(tokens), 0.8, compiled=compiled
    )
    torch.stack(
        [w @ score for w, score in zip(weights, scores, strict=True) if w.any()]
    ).sum().backward()
    log_p = torch.log_softmax((reference[0] @ reference[1].T + reference[2]) / 0.8, -1)
    possible = log_p[:, [0, 1, 2, 3, 4, 6]]
    expected = (
        log_p.gather(1, next_tokens(tokens)[:, None]).squeeze(1),
        -(possible.exp() * possible).sum(-1),
    )
    (weights[0].double() @ expected[0] + weights[1].double() @ expected[1]).backward()
    for found, true in zip(scores, expected, strict=True):
        torch.testing.assert_close(found.double(), true, rtol=1e-5, atol=1e-6)
    for found, true in zip(inputs, reference, strict=True):
        assert found.grad is not None and true.grad is not None
        # Logits of about 8 are computed twice, in products of two shapes. Some of their last bits,
        # 1e-6, differ.
        torch.testing.assert_close(found.grad.double(), true.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logits_of_every_dtype_have_gradients_and_stay_as_they_are(
    dtype: torch.dtype, temperature: float, compiled: bool
) -> None:
    logits = (
        torch.randn(9, 7, generator=torch.Generator().manual_seed(4)).to(dtype).requires_grad_()
    )
    before, tokens, starts = logits.detach().clone(), torch.arange(9) % 7, torch.tensor([0, 9])
    scores = score_logits(logits, next_tokens(tokens), temperature, compiled=compiled)
    logprobs, entropy = (align_with_tokens(score, starts) for score in scores)
    (logprobs.sum() + entropy.sum()).backward()
    exact = before.double().requires_grad_()
    log_p = torch.log_softmax(exact[:-1] / temperature, -1)
    (log_p.gather(1, tokens[1:, None]).sum() - (log_p.exp() * log_p).sum()).backward()
    assert logits.grad is not None and exact.grad is not None and logits.grad.dtype == dtype
    assert torch.equal(logits, before)
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=limit, atol=limit)


def test_chunks_of_a_head_in_bfloat16_cost_no_precision(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(*shape, generator=generator).bfloat16() for shape in ((300, 16), (50, 16))]
    targets = torch.randint(0, 50, (300,), generator=generator)
    exact = [tensor.double().requires_grad_() for tensor in made]
    torch.log_softmax(exact[0] @ exact[1].T, -1).gather(1, targets[:, None]).sum().backward()
    errors = {}
    for chunk_elements in (1 << 25, 600):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
        inputs = [tensor.clone().requires_grad_() for tensor in made]
        logprobs, _ = score_tokens(inputs[0], inputs[1], None, targets, compiled=compiled)
        logprobs.sum().backward()
        assert logprobs.dtype == torch.float32
        for found, true in zip(inputs, exact, strict=True):
            assert (
                found.grad is not None
                and true.grad is not None
                and found.grad.dtype == torch.bfloat16
            )
            error = (found.grad.double() - true.grad).norm() / true.grad.norm()
            errors.setdefault(chunk_elements, []).append(float(error))
    assert max(errors[600]) < 0.01
    assert all(
        cut < 1.5 * whole for whole, cut in zip(errors[1 << 25], errors[600], strict=True)
    ), errors


def test_bfloat16_logits_get_float32_results_and_a_bfloat16_gradient() -> None:
    logits = torch.randn(4, 11, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = token_logprobs(logits, torch.tensor([1, 2, 3, 4]), torch.tensor([0, 4]))
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16


def test_a_logit_of_minus_infinity_makes_no_nan() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([0, 1]), torch.tensor([0, 2]))
    (logprobs + entropy).sum().backward()
    np.testing.assert_allclose(entropy.detach().numpy(), [0, math.log(2)], rtol=1e-6)
    assert logits.grad is not None and bool(torch.isfinite(logits.grad).all())


def test_one_token_sequences_have_no_logprob() -> None:
    logprobs, entropy = token_logprobs(
        torch.randn(2, 5), torch.tensor([1, 2]), torch.tensor([0, 1, 2])
    )
    assert logprobs.tolist() == entropy.tolist() == [0, 0]


def test_sft_loss_is_the_mean_cross_entropy_of_the_loss_tokens() -> None:
    logits, tokens = torch.randn(9, 7), torch.randint(0, 7, (9,))
    mask = torch.tensor([0, 1, 0, 0, 0, 1, 1, 0, 1])
    micro_batch = {"input_ids": tokens, "cu_seqlens": CU_SEQLENS, "loss_mask": mask}
    expected = -np.mean(
        [by_loops(logits.double().numpy(), tokens.tolist(), 1.0)[0][t] for t in (1, 5, 6, 8)]
    )
    np.testing.assert_allclose(float(sft_loss_fn(logits, micro_batch)), expected, rtol=1e-6)
    assert float(count_loss_tokens(micro_batch)) == 4


@pytest.mark.parametrize("temperature", slow_but([0.7], [1.0, 0.7]))
@pytest.mark.parametrize("trains_head", [True, False])
@pytest.mark.parametrize(("tokens", "width"), [(512, 32), (16, 256)])
def test_a_head_takes_its_gradients_one_chunk_and_small_copies(
    tokens: int,
    width: int,
    trains_head: bool,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = 20_000
    chunk_elements = min(1 << 22, tokens * words)
    pass_elements = 1 << 18
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(module, "PASS_ELEMENTS", pass_elements)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(words, width, generator=generator).bfloat16().requires_grad_(trains_head)
    targets = torch.randint(0, words, (tokens,), generator=generator)
    trained = [tensor for tensor in (hidden, weight) if tensor.requires_grad]

    def step() -> None:
        logprobs, entropy = score_tokens(hidden, weight, None, targets, temperature)
        torch.autograd.grad(entropy.sum() - logprobs.sum(), trained)

    # The gradient of the hidden states is summed in float32. On CPUs the pass has two copies.
    gradients = 4 * hidden.numel() + 2 * weight.numel() * trains_head
    limit = gradients + 2 * chunk_elements + 2 * 4 * pass_elements
    # Room for numbers per token, and for oneDNN's own.
    assert peak_allocated_bytes(step) < 1.25 * limit


def test_passes_of_a_few_rows_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(37, 101, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, 101, (37,), generator=generator)
    found = []
    for elements in (1, 500, 1 << 23):
        monkeypatch.setattr(module, "PASS_ELEMENTS", elements)
        scores = score_logits(logits, targets, 0.7)
        found.append([*scores, *torch.autograd.grad(scores[1].sum() - scores[0].sum(), [logits])])
    for others in found[:-1]:
        assert all(map(torch.equal, others, found[-1]))
