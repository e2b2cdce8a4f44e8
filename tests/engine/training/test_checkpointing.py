"""``gradient_checkpointing: selective`` gives the gradients of a model that keeps everything, also
where a model writes to a result that would be kept.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, OlmoConfig, PretrainedConfig

from holdfast.engine.training.checkpointing import _contexts, checkpoint_activations
from holdfast.utils.errors import ConfigError
from tests.engine.architectures.released import model_names, tiny_config
from tests.tiers import slow_but


@pytest.mark.parametrize("name", slow_but(["openai/gpt-oss-20b"], model_names()))
def test_selective_checkpointing_changes_no_gradient(name: str) -> None:
    check_gradients(tiny_config(name))


def test_products_that_are_clamped_in_place_are_computed_again() -> None:
    config = OlmoConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.05,
        clip_qkv=0.05,
    )
    check_gradients(config)


def check_gradients(config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.train()
    ids = torch.arange(24).reshape(2, 12) + 10

    def gradients() -> dict[str, Tensor]:
        torch.manual_seed(1)  # for dropout in functions, and the noise of routers
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found = {key: param.grad for key, param in model.named_parameters()}
        model.zero_grad()
        return {key: gradient for key, gradient in found.items() if gradient is not None}

    expected = gradients()
    checkpoint_activations(model, "selective")
    found = gradients()
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert torch.equal(found[key], gradient), key


class CountedProducts(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))

    def take(self) -> int:
        """The number since the last call."""
        count, self._count = self._count, 0
        return count


def _block(hidden: Tensor, weight: Tensor, calls: list[str], writes: bool) -> tuple[Tensor, Tensor]:
    """A product, which may be written to, and what the backward needs it for."""
    calls.append("block")
    product = hidden @ weight
    if writes:
        product.add_(1.0)
    return product, (3 * product).sin()


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("writes_later", [False, True])
@pytest.mark.parametrize("shape", [(4, 4), (1, 4, 4)])
def test_a_result_that_was_written_to_is_computed_again(
    writes: bool, writes_later: bool, shape: tuple[int, ...]
) -> None:
    calls: list[str] = []
    products = CountedProducts()
    leaf = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    gradients, n_products = [], []
    for wrapped in (False, True):
        hidden = leaf.clone().requires_grad_()
        block: Any = partial(_block, weight=weight, calls=calls, writes=writes)
        if wrapped:
            block = partial(checkpoint, block, use_reentrant=False, context_fn=_contexts)
        product, other = block(hidden)
        if writes_later:
            product.add_(1.0)
        loss = product.square().sum() + other.square().sum()
        with products:
            (once,) = torch.autograd.grad(loss, [hidden], retain_graph=True)
        n_products.append(products.take())
        # A second backward finds no kept results.
        (twice,) = torch.autograd.grad(loss, [hidden])
        gradients.append((once, twice))
    assert len(calls) == 4, "two forwards, and a recomputation for each backward"
    recomputed = n_products[1] - n_products[0]
    assert recomputed == (writes or writes_later), "a product that nothing has written to is kept"
    for expected, found in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


def test_a_block_that_computes_more_in_its_recomputation_is_refused() -> None:
    hidden = torch.ones(2, 2, requires_grad=True)
    calls: list[int] = []

    def block(hidden: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            torch.mm(hidden.detach(), hidden.detach())
        return ((hidden @ hidden).sin() @ hidden).sin()

    out = checkpoint(block, hidden, use_reentrant=False, context_fn=_contexts)
    assert isinstance(out, Tensor)
    with pytest.raises(ConfigError, match="gradient_checkpointing"):
        out.sum().backward()
