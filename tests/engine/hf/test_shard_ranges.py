"""Which rank writes which part, and how much memory it needs: at 1, 2 and 3 ranks, for shards of
every kind.
"""

import math
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from transformers.conversion_mapping import register_checkpoint_conversion_mapping

from holdfast.engine.hf.load import load_hf
from holdfast.engine.hf.save import save_hf
from holdfast.engine.hf.shard_ranges import LocalPart, MergedWeights, own_share
from holdfast.engine.hf.tensor_origins import Span
from holdfast.engine.lora.adapters import plain_view
from holdfast.engine.memory.tensors import Box
from tests.engine.hf.test_name_mapping import CONVERSIONS
from tests.engine.hf_models import sharded, tiny_model
from tests.helpers import run_ranks
from tests.tiers import slow_but

WEIGHTS = "model.safetensors"


def _spans(shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """Views of a tensor, as conversions of transformers make them."""
    whole = torch.empty(shape, device="meta")
    yield from (
        whole,
        whole.view(-1),
        whole.t() if whole.ndim == 2 else whole.transpose(-1, 0),
        whole[1:],
        whole[..., ::2],
    )
    yield from (
        whole.view(-1)[2 : whole.numel() - 1],
        whole.view(-1)[1::3],
        whole[:, :1].expand(shape),
    )
    if shape[0] % 2 == 0:
        yield whole.view(2, shape[0] // 2, *shape[1:]).transpose(0, 1)  # rotary halves, interleaved
    if shape[0] % 3 == 0:
        yield whole.view(3, -1)[1:].T


def _box_in(shape: tuple[int, ...], draw: random.Random) -> Box:
    begins = [draw.randrange(size) for size in shape]
    return Box(
        tuple(begins),
        tuple(
            draw.randint(0 if draw.random() < 0.1 else 1, n - at)
            for n, at in zip(shape, begins, strict=True)
        ),
    )


@pytest.mark.parametrize("shape", [(6, 5), (4, 1), (3, 4, 5), (1, 6, 2), (2, 3, 2, 4), (12, 7)])
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_element_of_a_span_that_is_in_a_block_is_found_once(
    shape: tuple[int, ...], replicas: int
) -> None:
    draw, values = random.Random(0), torch.arange(math.prod(shape)).view(shape)
    for view in _spans(shape):
        span = Span("w", int(view.storage_offset()), tuple(view.shape), tuple(view.stride()), 5)
        shown = values.as_strided(span.shape, span.stride, span.offset).reshape(-1)
        for _ in range(30):
            box = _box_in(shape, draw)
            held = torch.zeros(shape, dtype=torch.bool)
            box.of(held).fill_(True)
            data = box.of(values)
            if draw.random() < 0.5:
                data = data.contiguous()
            found = torch.full((span.numel + 9,), -1)
            for replica in range(replicas):
                for at, run, pitch in own_share(
                    span, LocalPart(data, box, shape, replica, replicas)
                ):
                    for row in range(len(run)):
                        place = found[at + row * pitch :][: run[row].numel()]
                        assert (place == -1).all(), "an element is written twice"
                        place.copy_(run[row].reshape(-1))
            expected = torch.where(held.reshape(-1)[shown], shown, -1)
            assert torch.equal(found[5 : 5 + span.numel], expected), (
                view.shape,
                view.stride(),
                box,
            )
            assert (found[:5] == -1).all() and (found[5 + span.numel :] == -1).all()


def test_the_product_of_an_adapter_is_added_to_columns_too() -> None:
    model: Any = get_peft_model(
        tiny_model("llama"), LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"])
    )
    key = "model.layers.0.self_attn.q_proj.weight"
    weight = plain_view(model).state_dict()[key]
    merged, shape = MergedWeights(model), tuple(weight.shape)
    whole = merged.part(key, LocalPart(weight, Box((0, 0), shape), shape)).data
    assert not torch.equal(whole, weight)
    for box in (Box((4, 0), (8, 16)), Box((0, 8), (16, 8)), Box((3, 5), (1, 2))):
        torch.testing.assert_close(
            merged.part(key, LocalPart(box.of(weight), box, shape)).data, box.of(whole)
        )


def _columns(model: PreTrainedModel) -> PreTrainedModel:
    ranks = dist.get_world_size()
    fully_shard(
        model,
        shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 and p.shape[1] % ranks == 0 else None,
    )
    return model


def _replicated(model: PreTrainedModel) -> PreTrainedModel:
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard")
    )
    fully_shard(model, mesh=mesh)
    return model


def _by_hand(model: PreTrainedModel) -> PreTrainedModel:
    """A model under tensor parallelism: columns of some weights, rows of others, the rest on every
    rank.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = {3: Shard(2), 2: Shard(1)}.get(parameter.dim(), Replicate())
            data = distribute_tensor(parameter.detach(), mesh, [placement])
            module.register_parameter(name, nn.Parameter(data))
    model.tie_weights()
    return model


SHARDINGS: dict[str, tuple[str, Callable[[PreTrainedModel], PreTrainedModel]]] = {
    "rows": ("qwen3_moe", sharded),
    "plain": ("qwen3_moe", lambda model: model),
    "replicated": ("qwen3_tied", _replicated),
    "columns": ("qwen3_moe", _columns),
    "by_hand": ("qwen3_tied", _by_hand),
    "transposed": ("llama", sharded),
    "interleaved": ("llama", sharded),
}


@contextmanager
def _counted() -> Iterator[dict[str, list[int]]]:
    """Record the sizes of all writes into weight files, and a 1 for every sync."""
    pwrite, fsync, counts = os.pwrite, os.fsync, {"written": [], "synced": []}

    def is_weights(fd: int) -> bool:
        return os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors")

    def writing(fd: int, data: memoryview, offset: int) -> int:
        count = pwrite(fd, data, offset)
        counts["written"].append(count if is_weights(fd) else 0)
        return count

    def syncing(fd: int) -> None:
        fsync(fd)
        counts["synced"].append(int(is_weights(fd)))

    os.pwrite, os.fsync = writing, syncing
    try:
        yield counts
    finally:
        os.pwrite, os.fsync = pwrite, fsync


def _values(model: PreTrainedModel) -> list[torch.Tensor]:
    return [v.to_local() if isinstance(v, DTensor) else v for v in model.state_dict().values()]


def _saves_and_loads(rank: int, world_size: int, root: Path) -> dict[str, tuple[int, int]]:
    """For every case: bytes that this rank wrote, and bytes of the model that it holds."""
    written = {}
    for case, (name, shard) in SHARDINGS.items():
        if case in CONVERSIONS:
            register_checkpoint_conversion_mapping("llama", [CONVERSIONS[case]], overwrite=True)
        model, fresh = shard(tiny_model(name)), shard(tiny_model(name, seed=1))
        with _counted() as counts:
            save_hf(model, root / f"{case}{world_size}")
        # Rank 0 syncs the small files while others write weights. It must not wait for the weights
        # then.
        assert sum(counts["synced"]) == 1, case
        written[case] = sum(counts["written"]), sum(value.nbytes for value in _values(model))
        load_hf(fresh, root / f"{case}{world_size}")
        for ours, theirs in zip(_values(fresh), _values(model), strict=True):
            assert torch.equal(ours, theirs), case
        register_checkpoint_conversion_mapping("llama", [], overwrite=True)
    return written


@pytest.mark.parametrize("world_size", slow_but([1, 2], [1, 2, 3]))
def test_every_byte_is_written_once_and_all_ranks_write_about_alike(
    tmp_path: Path, world_size: int
) -> None:
    for case, (name, _) in SHARDINGS.items():
        if case in CONVERSIONS:
            register_checkpoint_conversion_mapping("llama", [CONVERSIONS[case]], overwrite=True)
        tiny_model(name).save_pretrained(tmp_path / case)
        register_checkpoint_conversion_mapping("llama", [], overwrite=True)
    reports = run_ranks(_saves_and_loads, world_size, tmp_path)
    for case in SHARDINGS:
        expected = (tmp_path / case / WEIGHTS).read_bytes()
        assert (tmp_path / f"{case}{world_size}" / WEIGHTS).read_bytes() == expected, case
        written = [report[case][0] for report in reports]
        assert sum(written) == len(expected), case
        header_bytes = 8 + int.from_bytes(expected[:8], "little")
        share_bytes = (len(expected) - header_bytes) / world_size
        written[0] -= header_bytes
        for rank, report in enumerate(reports):
            # FSDP2 cuts like torch.chunk: 4 experts over 3 ranks are 2, 2 and 0, and each rank
            # writes its own part.
            given_bytes = 0 if case in ("plain", "replicated", "by_hand") else report[case][1]
            assert written[rank] <= max(share_bytes, given_bytes) + 600, (case, written)


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux says how much memory a process has")


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Yield ``[bytes]``, the peak growth of this process's anonymous memory."""
    before, peak, stop = _anonymous_bytes(), [0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.001):
            peak[0] = max(peak[0], _anonymous_bytes() - before)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield peak
    finally:
        stop.set()
        sampler.join()


def _large_model(shard: Callable[[PreTrainedModel], PreTrainedModel]) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 4096,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    config = Qwen3Config(
        **sizes, vocab_size=32000, num_hidden_layers=2, head_dim=64, tie_word_embeddings=False
    )
    return shard(AutoModelForCausalLM.from_config(config))


def _memory(rank: int, world_size: int, root: Path) -> None:
    for name, shard in (("rows", sharded), ("columns", _columns)):
        model = _large_model(shard)
        shard_bytes = sum(value.nbytes for value in _values(model))
        assert shard_bytes > 80e6
        for dtype in (torch.float32, torch.bfloat16):
            path = root / f"{name}_{dtype}"
            with _peak() as saving:
                save_hf(model, path, dtype=dtype)
            with _peak() as loading:
                load_hf(model, path)
            for peak in (saving, loading):
                # A chunk, and for gathered tensors the parts of all ranks, their sum, and its
                # transpose.
                assert peak[0] < (10e6 if name == "rows" else 30e6), (
                    name,
                    dtype,
                    peak,
                    shard_bytes,
                )


@pytest.mark.slow
def test_memory_beside_the_model_is_a_chunk(tmp_path: Path) -> None:
    run_ranks(_memory, 2, tmp_path)
