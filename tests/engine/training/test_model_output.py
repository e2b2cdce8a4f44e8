"""Inputs of loss functions: log-probabilities without logits, equal to those from logits, and
logits on request.
"""

import logging
import operator
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from holdfast.engine import FSDPEngine, MicroBatchSpec, OptimizerConfig
from holdfast.engine.api import Batch
from holdfast.engine.training import logprobs as logprobs_module
from holdfast.engine.training.head import find_scoring_head
from holdfast.engine.training.logprobs import token_logprobs
from holdfast.engine.training.model_output import ModelOutput
from holdfast.engine.training.probe_model import Twins
from holdfast.utils.compat.torch_private import TorchDispatchMode
from holdfast.utils.errors import BatchError
from tests.engine.architectures.tiny import tiny_config
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.engine.test_fsdp_engine import (
    capture_gradients,
    loss_tokens,
    make_batch,
    make_engine,
    rows,
)
from tests.helpers import run_ranks
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(90)

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "qwen3"
    write_model_folder(path, tiny_qwen3(tied=False))
    return path


@pytest.fixture
def engine(folder: Path) -> Iterator[FSDPEngine]:
    engine = make_engine(folder, temperature=TEMPERATURE)
    yield engine
    engine.destroy()


def from_output(output: Any, mb: Batch) -> torch.Tensor:
    return _of(output.logprobs, output.entropy, mb)


def from_logits(output: Any, mb: Batch) -> torch.Tensor:
    """Compute the values from logits, like a loss that knows only logits."""
    log_p = torch.log_softmax(output.float() / TEMPERATURE, dim=-1)
    picked = log_p[:-1].gather(1, mb["input_ids"][1:, None].long()).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(-1)[:-1]
    first = picked.new_zeros(1)
    return _of(torch.cat([first, picked]), torch.cat([first, entropy]), mb)


def _of(logprobs: torch.Tensor, entropy: torch.Tensor, mb: Batch) -> torch.Tensor:
    return ((0.1 * entropy - logprobs) * mb["loss_mask"]).sum() / mb["loss_mask"].sum()


def _gradients_both_ways(rank: int, world_size: int, folder: str) -> dict[str, float]:
    logprobs_module.CHUNK_ELEMENTS = 40  # several chunks of tokens and of words
    differences = {}
    for packed in (True, False):
        engine = make_engine(
            folder,
            pack_sequences=packed,
            temperature=TEMPERATURE,
            gradient_checkpointing=packed,
            mb_spec=MicroBatchSpec(n_mbs=2),
            optimizer=OptimizerConfig(type="sgd", lr=0.0, gradient_clipping=1e9),
        )
        assert engine._scoring_head is not None
        captured = capture_gradients(engine)
        share = rows(
            make_batch(masked_rows=(0, 1, 2, 3)), slice(rank * 4, rank * 4 + 4)
        )  # rank 0 has no loss tokens
        both = []
        for loss_fn in (from_output, from_logits):
            stats = engine.train_batch(share, loss_fn, loss_tokens)
            both.append((stats["loss"], dict(captured)))
            assert abs(float(engine.eval_batch(share, loss_fn, loss_tokens)) - stats["loss"]) < 1e-6
        (loss, gradients), (expected_loss, expected) = both
        assert abs(loss - expected_loss) < 1e-6
        differences |= {
            f"{name}, packed {packed}": float((gradients[name] - expected[name]).abs().max())
            for name in expected
        }
        engine.destroy()
    return differences


@pytest.mark.parametrize(
    "tied", slow_but([True], [True, False]), ids=lambda tied: "tied" if tied else "untied"
)
def test_gradients_without_logits_equal_those_with_them(tmp_path: Path, tied: bool) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3(tied=tied))
    for differences in run_ranks(_gradients_both_ways, 2, str(tmp_path / "model")):
        assert any("embed" in name for name in differences)
        assert max(differences.values()) < 1e-6, differences


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_a_loss_without_entropies_computes_no_gradient_of_them(engine: FSDPEngine) -> None:
    def of_logprobs(output: Any, mb: Batch) -> torch.Tensor:
        assert torch.isfinite(output.entropy).all(), "a loss may look at entropies"
        return -(output.logprobs * mb["loss_mask"]).sum() / mb["loss_mask"].sum()

    counts = []
    for loss_fn in (of_logprobs, from_output):
        with Operators() as operators:
            engine.train_batch(make_batch(), loss_fn, loss_tokens)
        counts.append(operators.count["aten::special_entr"])
    assert counts == [1, 3], (
        "in the forward, and with the second loss in the backward, of all words and of targets"
    )


@pytest.mark.slow
def test_no_tensor_of_tokens_times_words_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, tokens = 5000, 300
    write_model_folder(tmp_path / "model", tiny_qwen3(vocab_size=words))
    engine = make_engine(tmp_path / "model")
    monkeypatch.setattr(logprobs_module, "CHUNK_ELEMENTS", 1 << 16)
    batch = make_batch((100, 100, 100))
    largest = {}
    for name, loss_fn in (("logits", from_logits), ("output", from_output)):
        with LargestTensor() as seen:
            engine.train_batch(batch, loss_fn, loss_tokens)
            engine.eval_batch(batch, loss_fn, loss_tokens)
        largest[name] = seen.elements
    engine.destroy()
    assert largest["logits"] >= tokens * words, "the control: this loss takes the logits"
    assert largest["output"] < 1.1 * words * 32, (
        "the weight of the head and what is gathered with it"
    )


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "qwen2", "olmo2", "phi3", "gpt2", "qwen3_moe", "glm4"]
)
def test_models_that_leave_their_logits_alone_score_in_their_head(model_type: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32)
    assert find_scoring_head(Twins(model, torch.device("cpu"))) is not None


@pytest.mark.parametrize("model_type", ["gemma2", "granite", "cohere"])
def test_models_that_cap_or_scale_their_logits_keep_them(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config: Any = tiny_config(model_type)
    if model_type == "granite":
        config.logits_scaling = 8.0
    model = write_model_folder(tmp_path / "model", config)
    with caplog.at_level(logging.INFO):
        engine = make_engine(tmp_path / "model")
    assert (
        "computed from whole [tokens, vocabulary] logits: the model changes what its head returns"
        in caplog.text
    )
    batch = make_batch((5, 3))
    batch["input_ids"] = (batch["input_ids"] + 8) * batch["attention_mask"]
    found = engine.forward_batch(batch)
    with torch.no_grad():
        log_p = model(input_ids=batch["input_ids"][:1], use_cache=False).logits[0].log_softmax(-1)
    expected = log_p[:-1].gather(1, batch["input_ids"][0, 1:, None]).squeeze(1)
    assert torch.allclose(found[0, 1:], expected, atol=1e-5)
    engine.destroy()


@pytest.mark.slow
def test_an_output_can_be_used_as_the_logits_it_stands_for(engine: FSDPEngine) -> None:
    seen: list[Any] = []

    def loss_fn(output: Any, mb: Batch) -> torch.Tensor:
        seen.append(type(output))
        seen.append((output.shape, output.dtype, len(output), (output / 2).shape, output[0].shape))
        doubled = [
            2 * output - output,
            output + output * 0,
            output @ torch.eye(15),
            torch.clone(output),
        ]
        assert all(torch.equal(tensor, output.logits) for tensor in doubled)
        logprobs, entropy = token_logprobs(output, mb["input_ids"], mb["cu_seqlens"], TEMPERATURE)
        assert torch.equal(logprobs, output.logprobs) and torch.equal(entropy, output.entropy)
        assert torch.equal(
            output.at(1.0)[0], token_logprobs(output.logits, mb["input_ids"], mb["cu_seqlens"])[0]
        )
        return output.logits.square().mean()

    assert engine.train_batch(make_batch((3, 2)), loss_fn, loss_tokens)["update_skipped"] == 0
    assert seen == [ModelOutput, ((5, 15), torch.float32, 5, (5, 15), (15,))]


def test_every_operator_gives_what_the_logits_give(engine: FSDPEngine) -> None:
    two_operands = [
        operator.add,
        operator.sub,
        operator.mul,
        operator.truediv,
        operator.floordiv,
        operator.mod,
        operator.pow,
        operator.lt,
        operator.le,
        operator.eq,
        operator.ne,
        operator.gt,
        operator.ge,
    ]
    differing = []

    def loss_fn(output: Any, mb: Batch) -> torch.Tensor:
        logits = output.logits
        for apply in two_operands:
            for other in (0.5, logits.flip(0), logits):
                expected = [apply(logits, other), apply(other, logits)]
                for found, wanted in zip(
                    [apply(output, other), apply(other, output)], expected, strict=True
                ):
                    if not torch.equal(found.nan_to_num(9), wanted.nan_to_num(9)):
                        differing.append((apply, other))
        for apply in (operator.neg, operator.pos, operator.abs):
            assert torch.equal(apply(output), apply(logits))
        square = torch.eye(logits.shape[1])
        assert torch.equal(output @ square, logits @ square)
        assert torch.equal(square[:, :5] @ output, square[:, :5] @ logits)
        with pytest.raises(RuntimeError, match="Boolean value of Tensor"):
            bool(output)

        # A word that is never sampled.
        output[:, 3] = -torch.inf
        assert (output == -torch.inf).sum() == len(output)
        return torch.where(output != -torch.inf, output, 0.0).square().mean()

    assert engine.train_batch(make_batch((3, 2)), loss_fn, loss_tokens)["update_skipped"] == 0
    assert differing == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_token_ids_of_any_integer_dtype_train_alike(engine: FSDPEngine, dtype: torch.dtype) -> None:
    dtypes = []

    def loss_fn(output: Any, mb: Batch) -> torch.Tensor:
        dtypes.append(mb["input_ids"].dtype)
        return from_output(output, mb)

    batch = make_batch((3, 2))
    small = {**batch, "input_ids": batch["input_ids"].to(dtype)}
    losses = [engine.eval_batch(given, loss_fn, loss_tokens) for given in (batch, small)]
    assert torch.equal(*losses)
    assert set(dtypes) == {torch.int64}, "a loss function may use them as indices"


def test_a_second_question_that_needs_another_forward_is_refused(engine: FSDPEngine) -> None:
    def logits_last(output: Any, mb: Batch) -> torch.Tensor:
        return output.logprobs.sum() + output.logits.sum()

    def two_temperatures(output: Any, mb: Batch) -> torch.Tensor:
        return output.logprobs.sum() + output.at(1.0)[0].sum()

    for loss_fn in (logits_last, two_temperatures):
        with pytest.raises(
            BatchError,
            match=r"after log-probabilities at temperature 0\.7; take output\.logits first",
        ):
            engine.eval_batch(make_batch((3, 2)), loss_fn, loss_tokens)


@pytest.mark.slow
def test_hooks_on_the_head_or_the_model_are_given_the_logits(engine: FSDPEngine) -> None:
    seen: list[Any] = []
    model: Any = engine.model
    batch = make_batch((3, 2))
    for module in (model.lm_head, model):
        handle = module.register_forward_hook(
            lambda *given: seen.append(getattr(given[-1], "logits", given[-1]).shape)
        )
        engine.forward_batch(batch)
        handle.remove()
        engine.forward_batch(batch)
    assert seen == [(1, 5, 15)] * 2


def test_an_attribute_error_in_the_forward_is_raised_once(engine: FSDPEngine) -> None:
    calls = []

    def broken(*_: Any) -> None:
        calls.append(1)
        raise AttributeError("no such layer")

    hook = engine.model.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="the forward of the model failed: no such layer"):
        engine.eval_batch(make_batch(), lambda output, mb: output.logprobs.sum(), loss_tokens)
    hook.remove()
    assert len(calls) == 1
