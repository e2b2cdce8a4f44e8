"""Buffers stored in float32 and cast to bfloat16 for compute: writes to them are kept."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from holdfast.engine import FSDPEngine, SaveLoadMeta
from holdfast.engine.training.model import casting_class
from tests.engine.architectures.tiny import tiny_config
from tests.engine.model.test_initial_model import IDS, start
from tests.tiers import slow_but

CAST = {
    "apertus": "act_fn.beta",
    "gemma4_text": "layer_scalar",
    "kimi_linear": "e_score_correction_bias",
    "minimax_m2": "e_score_correction_bias",
}
"""Model type -> last part of the names of buffers that transformers keeps in the model's dtype."""


def write_folder(folder: Path, model_type: str) -> None:
    """A model whose cast buffers have values that bfloat16 rounds."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith(CAST[model_type]):
            buffer.add_(torch.rand(buffer.shape) * 0.1)
    model.save_pretrained(folder)


def names_of(engine: FSDPEngine, model_type: str) -> list[str]:
    return [name for name, _ in engine.model.named_buffers() if name.endswith(CAST[model_type])]


def _add(owner: nn.Module, key: str, by: torch.Tensor) -> None:
    getattr(owner, key).add_(by)


def _copy(owner: nn.Module, key: str, by: torch.Tensor) -> None:
    getattr(owner, key).copy_(getattr(owner, key) + by)


def _assign(owner: nn.Module, key: str, by: torch.Tensor) -> None:
    setattr(owner, key, getattr(owner, key) + by)


def _get_buffer(owner: nn.Module, key: str, by: torch.Tensor) -> None:
    owner.get_buffer(key).sub_(-by)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("write", [_add, _copy, _assign, _get_buffer])
def test_writes_to_a_cast_buffer_are_computed_with_saved_and_loaded(
    write: Callable[[nn.Module, str, torch.Tensor], None], tmp_path: Path
) -> None:
    write_folder(tmp_path / "base", "minimax_m2")
    engine = start(tmp_path / "base", dtype="bfloat16")
    before = engine.model(input_ids=IDS, use_cache=False).logits
    written = {}
    for name in names_of(engine, "minimax_m2"):
        prefix, _, key = name.rpartition(".")
        owner, old = engine.model.get_submodule(prefix), engine.model.state_dict()[name].clone()
        by = torch.linspace(0.001, 9, len(old))
        write(owner, key, by)
        written[name] = old + by
        assert torch.equal(engine.model.get_buffer(name), written[name]), "float32, and all of it"
    after = engine.model(input_ids=IDS, use_cache=False).logits
    assert not torch.equal(before, after), "the router takes other experts"
    for kind in ("dcp", "hf"):
        engine.save(SaveLoadMeta(str(tmp_path / kind), kind, with_optim=False))
    engine.destroy()
    for kind in ("dcp", "hf"):
        engine = start(tmp_path / "base", dtype="bfloat16")
        engine.load(SaveLoadMeta(str(tmp_path / kind), kind, with_optim=False))
        assert all(
            torch.equal(engine.model.get_buffer(name), value) for name, value in written.items()
        )
        assert torch.equal(engine.model(input_ids=IDS, use_cache=False).logits, after)
        engine.destroy()


@pytest.mark.parametrize("model_type", slow_but([next(iter(CAST))], CAST))
def test_forward_and_recomputed_blocks_use_the_cast_that_transformers_has(
    model_type: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, model_type)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    ids = IDS + 8
    expected(input_ids=ids, use_cache=False).logits.float().square().mean().backward()
    for checkpointing in (False, True):
        engine = start(
            tmp_path, dtype="bfloat16", gradient_checkpointing=checkpointing, disable_dropout=False
        )
        engine.train()
        stored = {
            name: engine.model.get_buffer(name).clone() for name in names_of(engine, model_type)
        }
        assert stored
        assert not any(torch.equal(value.bfloat16().float(), value) for value in stored.values())
        logits = engine.model(input_ids=ids, use_cache=False).logits
        assert torch.equal(logits, expected(input_ids=ids, use_cache=False).logits)
        logits.float().square().mean().backward()
        for name, parameter in engine.model.named_parameters():
            grad, wanted = parameter.grad, expected.get_parameter(name).grad
            assert (grad is None) == (wanted is None), name
            if grad is not None and wanted is not None:
                assert torch.equal(grad.full_tensor(), wanted.float()), name
        assert all(
            torch.equal(engine.model.get_buffer(name), value) for name, value in stored.items()
        )
        engine.destroy()


class Router(nn.Module):
    """A module with a buffer that is a tensor and one that is None. ``forward`` calls a given
    function.
    """

    bias: torch.Tensor
    absent: None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tensor([1 / 3, 2.0]))
        self.register_buffer("absent", None)

    def forward(self, work: Callable[[nn.Module], None]) -> torch.Tensor:
        work(self)
        return self.bias


def router() -> Router:
    module: Any = Router()
    module.__class__ = casting_class(Router, {"bias": torch.bfloat16, "absent": torch.bfloat16})
    return module


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_fails_leaves_the_stored_buffer(error: type[BaseException]) -> None:
    def fail(module: nn.Module) -> None:
        raise error

    module, stored = router(), torch.tensor([1 / 3, 2.0])
    with pytest.raises(error):
        module(fail)
    assert module.bias.dtype == torch.float32 and torch.equal(module.bias, stored)
    assert module(lambda module: None).dtype == torch.bfloat16
    assert torch.equal(module.bias, stored) and module.absent is None


def test_a_write_of_a_forward_to_its_buffer_keeps_the_stored_dtype() -> None:
    module = router()
    stored = module.bias
    module(lambda module: module.bias.mul_(2))
    assert module.bias is stored and torch.equal(
        stored, (torch.tensor([1 / 3, 2.0]).bfloat16() * 2).float()
    )
    module(lambda module: setattr(module, "bias", torch.ones(3, dtype=torch.bfloat16)))
    assert torch.equal(module.bias, torch.ones(3)) and module.bias.dtype == torch.float32


def test_a_module_that_is_cast_is_named_and_copied_as_before() -> None:
    module = router()
    assert type(module).__name__ == "Router" and list(module.state_dict()) == ["bias"]
    twin = copy.deepcopy(module)
    twin.bias.zero_()
    assert torch.equal(twin(lambda module: None), torch.zeros(2, dtype=torch.bfloat16))
    assert torch.equal(module.bias, torch.tensor([1 / 3, 2.0]))
