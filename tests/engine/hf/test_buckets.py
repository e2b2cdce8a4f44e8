"""Buckets gathered on rank 0 hold the bytes that an export writes, for shards of every kind, and
need little memory.
"""

import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping

from holdfast.engine.api import HFExportOptions
from holdfast.engine.hf.buckets import Bucket, WeightGatherer, cut_buckets
from holdfast.engine.hf.save import save_hf
from holdfast.engine.hf.tensor_origins import FileTensor
from tests.engine.hf.test_name_mapping import CONVERSIONS
from tests.engine.hf.test_shard_ranges import SHARDINGS, WEIGHTS, _columns, _large_model, _peak
from tests.engine.hf_models import sharded, tiny_model
from tests.helpers import run_ranks
from tests.tiers import slow_but

LIMIT = 4096
MIXED = "two dtypes"
ADAPTED = "adapters"


def _mixed(model: PreTrainedModel) -> PreTrainedModel:
    model.model.norm.to(torch.bfloat16)
    return sharded(model)


def _adapted(model: PreTrainedModel) -> PreTrainedModel:
    model.add_adapter(
        LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "down_proj"])
    )
    return sharded(model)


CASES = SHARDINGS | {
    MIXED: ("qwen3_untied", _mixed),
    ADAPTED: ("llama", _adapted),
    "gpt2": ("gpt2", sharded),
}


def _gathered(gatherer: WeightGatherer, rank: int) -> dict[str, torch.Tensor]:
    """All tensors, from memory that is used for every bucket."""
    memory = torch.empty(max(bucket.nbytes for bucket in gatherer.buckets), dtype=torch.uint8)
    found = {}
    for bucket in gatherer.buckets:
        memory.fill_(255)
        gatherer.gather(bucket, memory[: bucket.nbytes] if rank == 0 else None)
        for tensor in bucket.tensors if rank == 0 else ():
            data = memory[bucket.offsets[tensor.key] :][: tensor.nbytes]
            found[tensor.key] = data.view(tensor.dtype).view(tensor.shape).clone()
    return found


def _gathers(rank: int, world_size: int, root: Path) -> None:
    for case, (name, shard) in CASES.items():
        if case in CONVERSIONS:
            register_checkpoint_conversion_mapping("llama", [CONVERSIONS[case]], overwrite=True)
        model = shard(tiny_model(name))
        for dtype in (None, torch.bfloat16):
            out = root / f"{case}{dtype}"
            save_hf(model, out, dtype=dtype)
            gatherer = WeightGatherer(model, HFExportOptions(dtype), LIMIT, None)
            assert len(gatherer.buckets) > 1
            found = _gathered(gatherer, rank)
            if rank == 0:
                written = load_file(out / WEIGHTS)
                assert found.keys() == written.keys(), case
                for key, tensor in written.items():
                    assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), (
                        case,
                        dtype,
                        key,
                    )
        register_checkpoint_conversion_mapping("llama", [], overwrite=True)


@pytest.mark.parametrize("world_size", slow_but([2], [1, 2, 3]))
def test_buckets_hold_the_bytes_that_an_export_writes(tmp_path: Path, world_size: int) -> None:
    run_ranks(_gathers, world_size, tmp_path)


def _tensor(key: str, numel: int, dtype: torch.dtype = torch.float32) -> FileTensor:
    return FileTensor(key, (numel,), dtype, key, numel * dtype.itemsize, (key,), None)


def test_buckets_are_filled_in_order_and_a_large_tensor_has_its_own() -> None:
    tensors = [
        _tensor(str(number), numel) for number, numel in enumerate((10, 10, 5, 60, 0, 24, 1))
    ]
    buckets = cut_buckets(tensors, 100)
    keys = [[tensor.key for tensor in bucket.tensors] for bucket in buckets]
    assert keys == [["0", "1", "2"], ["3"], ["4", "5", "6"]]
    assert [bucket.number for bucket in buckets] == [0, 1, 2]
    assert max(bucket.nbytes for bucket in buckets) == 240
    assert cut_buckets([], 100) == []


def test_tensors_of_a_bucket_are_aligned() -> None:
    dtypes = (torch.uint8, torch.bfloat16, torch.float64, torch.uint8, torch.float32)
    bucket = Bucket(
        0,
        cut_buckets([_tensor(str(n), 3, dtype) for n, dtype in enumerate(dtypes)], 1000)[0].tensors,
    )
    for tensor in bucket.tensors:
        assert bucket.offsets[tensor.key] % tensor.dtype.itemsize == 0
    assert sorted(bucket.offsets.values())[-1] + 3 == bucket.nbytes


def _memory(rank: int, world_size: int) -> None:
    for shard in (sharded, _columns):
        model = _large_model(shard)
        for dtype in (torch.float32, torch.bfloat16):
            limit = 8 << 20
            gatherer = WeightGatherer(model, HFExportOptions(dtype), limit, None)
            largest = max(bucket.nbytes for bucket in gatherer.buckets)
            memory = torch.zeros(largest, dtype=torch.uint8) if rank == 0 else None
            with _peak() as peak:
                for bucket in gatherer.buckets:
                    gatherer.gather(bucket, None if memory is None else memory[: bucket.nbytes])
            # Rank 0 casts into the bucket. Columns arrive apart. The other ranks hold their share
            # of the bucket.
            share = math.ceil(largest / world_size)
            allowed = (0 if shard is sharded else share) if rank == 0 else share
            assert peak[0] < allowed + 6e6, (rank, shard, dtype, peak, largest)


@pytest.mark.slow
def test_memory_beside_the_model_and_the_bucket_is_a_share_of_one() -> None:
    run_ranks(_memory, 2)
