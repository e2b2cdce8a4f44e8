"""Packed attention on a GPU: one kernel for all sequences gives the values of single sequences, in
little memory.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig

from benchmarks.ranks import Session, on_ranks
from holdfast.engine import FinetuneSpec, FSDPEngine, OptimizerConfig, TrainEngineConfig
from holdfast.engine.config import PACKED_ATTENTION
from holdfast.engine.rl import count_loss_tokens, sft_loss_fn
from holdfast.engine.training import attention
from holdfast.engine.training.attention import PackedRow, _attention
from holdfast.engine.training.shared_prompts import Beginning, Prompts
from tests.engine.models import write_model_folder
from tests.gpu.conftest import Machine
from tests.gpu.figures import Figures

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

LENGTHS = (1, 700, 5, 1, 300, 130, 64)
HEADS, KEY_HEADS, DIM = 8, 2, 64


def _row(lengths: tuple[int, ...], device: str, window: int | None = None) -> PackedRow:
    return PackedRow(lengths, torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32), window)


def _shared_row(device: str, window: int | None = None) -> PackedRow:
    """Three of the sequences begin with the same 100 tokens, which are once in the row."""
    beginnings = [Beginning(1, 100) if n > 100 else Beginning(i, 0) for i, n in enumerate(LENGTHS)]
    shared = Prompts(beginnings, LENGTHS).row(range(len(LENGTHS)))
    assert shared is not None and shared.n_tokens == sum(LENGTHS) - 200
    shared = shared.map(lambda each: each.to(device))
    return PackedRow(shared.lengths, shared.cu_seqlens, window, seen=shared.seen)


def _inputs(n_tokens: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    heads = (HEADS, KEY_HEADS, KEY_HEADS)
    drawn = [torch.randn(1, n, n_tokens, DIM, device=device).to(torch.bfloat16) for n in heads]
    return [each.to(dtype).requires_grad_() for each in drawn]


def _values_and_gradients(row: PackedRow, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    out, _ = _attention(torch.nn.Module(), inputs[0], inputs[1], inputs[2], row, scaling=0.1)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape, device=out.device).to(out.dtype))
    return [out.detach(), *(each.grad for each in inputs if each.grad is not None)]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("window", [None, 2, 8, 300])
def test_one_kernel_gives_the_values_and_gradients_of_one_sequence_after_the_other(
    machine: Machine, window: int | None, shares: bool
) -> None:
    """In bfloat16, compared with float32, which the kernel does not accept."""
    row = _row(LENGTHS, machine.device, window)
    if shares:
        row = _shared_row(machine.device, window)
    half, full = (
        _inputs(row.n_tokens, machine.device, dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    assert attention._kernel_takes(half[0], half[2]) == (machine.device == "cuda")
    assert not attention._kernel_takes(full[0], full[2])
    pairs = zip(_values_and_gradients(row, half), _values_and_gradients(row, full), strict=True)
    for ours, reference in pairs:
        difference = (
            ours.float() - reference
        ).square().mean().sqrt() / reference.square().mean().sqrt()
        assert float(difference) < 1e-2, "a window that is off by one differs by a tenth"


def test_attention_takes_no_memory_for_pairs_of_tokens_and_waits_for_nothing(
    machine: Machine, figures: Figures
) -> None:
    if machine.device == "cpu":
        pytest.skip("torch counts memory and waiting on GPUs only")
    lengths = (512,) * 64
    row, inputs = (
        _row(lengths, machine.device),
        _inputs(sum(lengths), machine.device, torch.bfloat16),
    )
    _values_and_gradients(row, inputs)
    for each in inputs:
        each.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _values_and_gradients(row, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    grown = torch.cuda.max_memory_allocated() - before
    figures.add(
        "packed attention: peak bytes / bytes of the queries",
        grown / inputs[0].nbytes,
        "",
        "32,768 tokens",
    )
    assert grown < sum(lengths) ** 2 / 2, "a mask alone has a byte for each pair"


def test_a_row_with_a_shared_prompt_waits_for_nothing(machine: Machine) -> None:
    if machine.device == "cpu":
        pytest.skip("torch notices waiting on GPUs only")
    row = _shared_row(machine.device)
    inputs = _inputs(row.n_tokens, machine.device, torch.bfloat16)
    _values_and_gradients(row, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _values_and_gradients(row, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _trained(session: Session, folder: Path, attn_impl: str | None) -> Any:
    engine = FSDPEngine(
        TrainEngineConfig(
            path=str(folder),
            device=session.options.device,
            attn_impl=attn_impl,
            optimizer=OptimizerConfig(lr=1e-3),
        )
    )
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=8))
    mask = torch.arange(90) < torch.tensor([90, 1, 33, 7])[:, None]
    ids = torch.randint(3, 60, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    batch = {"input_ids": ids, "attention_mask": mask.long(), "loss_mask": mask.long()}
    losses = [engine.train_batch(batch, sft_loss_fn, count_loss_tokens)["loss"] for _ in range(5)]
    taken = engine.model.config._attn_implementation
    engine.destroy()
    return taken, losses


def test_an_engine_takes_it_by_itself_and_learns_as_with_sdpa(
    machine: Machine, tmp_path: Path
) -> None:
    """In bfloat16, with a window in every second layer."""
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )
    write_model_folder(tmp_path / "model", config)
    options = machine.options(tmp_path)
    ways = [on_ranks(_trained, options, tmp_path / "model", way, ranks=1) for way in (None, "sdpa")]
    assert [taken for taken, _ in ways] == [PACKED_ATTENTION, "sdpa"]
    assert ways[0][1] == pytest.approx(ways[1][1], rel=2e-2)
