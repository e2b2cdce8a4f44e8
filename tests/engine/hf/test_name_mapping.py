"""Which model elements make up a file tensor, compared with transformers' own conversion of real
values.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed._composable import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    ConversionOps,
    Interleave,
    Transpose,
    WeightConverter,
    revert_weight_conversion,
)

from holdfast.engine.api import HFExportOptions
from holdfast.engine.hf.buckets import WeightGatherer
from holdfast.engine.hf.load import load_hf
from holdfast.engine.hf.name_mapping import (
    element_map,
    file_tensors,
    stored_tensors,
    unsharded_class,
)
from holdfast.engine.hf.save import full_state_dict, save_hf
from holdfast.engine.hf.shard_ranges import MergedWeights
from holdfast.engine.hf.tensor_origins import FileTensor
from holdfast.utils.errors import CheckpointMismatchError
from tests.engine.hf_models import ARCHITECTURES, sharded, tiny_config, tiny_model
from tests.helpers import run_ranks


class Doubled(ConversionOps):
    """Arithmetic, which no sharded export or import can follow."""

    def convert(
        self,
        input_dict: dict,
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: object,
    ) -> dict:
        value = next(iter(input_dict.values()))
        return {target_patterns[0]: (value[0] if isinstance(value, list) else value) * 2}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


CONVERSIONS = {
    "joined": WeightConverter(
        "mlp.gate_up.weight",
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        operations=[Chunk(dim=0)],
    ),
    "transposed": WeightConverter(
        "mlp.down.weight", "mlp.down_proj.weight", operations=[Transpose(0, 1)]
    ),
    "interleaved": WeightConverter(
        "mlp.gate_up.weight",
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        operations=[Interleave(dim=0), Chunk(dim=0)],
    ),
    "doubled": WeightConverter(
        "self_attn.o.weight", "self_attn.o_proj.weight", operations=[Doubled()]
    ),
}


@pytest.fixture(params=CONVERSIONS)
def converted_model(request: pytest.FixtureRequest) -> Iterator[tuple[str, PreTrainedModel]]:
    """A Llama whose files keep its MLP or attention in another layout."""
    register_checkpoint_conversion_mapping("llama", [CONVERSIONS[request.param]], overwrite=True)
    yield request.param, tiny_model("llama")
    register_checkpoint_conversion_mapping("llama", [], overwrite=True)


def _rebuilt(tensor: FileTensor, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    blocks = [
        stored[span.source].flatten().as_strided(span.shape, span.stride, span.offset).flatten()
        for span in tensor.spans or ()
    ]
    return torch.cat(blocks).view(tensor.shape)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_spans_give_the_tensors_of_save_pretrained_in_its_order_and_blocks(name: str) -> None:
    model = tiny_model(name)
    stored, tied = stored_tensors(model)
    assert list(tied) == (["lm_head.weight"] if model.config.tie_word_embeddings else [])
    expected = revert_weight_conversion(model, dict(stored))
    found = {tensor.key: tensor for tensor in file_tensors(model, stored)}
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert found[key].block_bytes == value.untyped_storage().nbytes()
        assert torch.equal(_rebuilt(found[key], stored), value)
    blocks: dict[object, set[int]] = {}
    for key, tensor in found.items():
        blocks.setdefault(tensor.block, set()).add(expected[key].untyped_storage().data_ptr())
    assert all(len(storages) == 1 for storages in blocks.values())


def test_conversions_are_followed_exactly_or_refused(
    converted_model: tuple[str, PreTrainedModel],
) -> None:
    kind, model = converted_model
    stored, _ = stored_tensors(model)
    expected = revert_weight_conversion(model, dict(stored))
    tensors = file_tensors(model, stored)
    assert [tensor.key for tensor in tensors] == list(expected)
    unmapped = [tensor for tensor in tensors if tensor.spans is None]
    assert len(unmapped) == {"joined": 0, "transposed": 0, "interleaved": 2, "doubled": 2}[kind]
    for tensor in tensors:
        if tensor.spans is not None:
            assert torch.equal(_rebuilt(tensor, stored), expected[tensor.key])
    for tensor in unmapped:
        shapes = {source: stored[source].shape for source in tensor.sources}
        if kind == "doubled":
            with pytest.raises(CheckpointMismatchError, match="more than rearranging"):
                element_map(model, shapes, [tensor])
            continue
        flat = torch.cat([stored[source].flatten() for source in shapes])
        elements = element_map(model, shapes, [tensor])[tensor.key]
        assert torch.equal(flat[elements].view(tensor.shape), expected[tensor.key])


def _out_of_memory(*_: Any) -> None:
    raise MemoryError("no room to merge")


def _merge_with_a_failing_rank(rank: int, world_size: int, root: Path) -> dict[str, str]:
    register_checkpoint_conversion_mapping("llama", [CONVERSIONS["interleaved"]], overwrite=True)
    config = LoraConfig(r=2, target_modules=["gate_proj"], init_lora_weights=False)
    model: Any = get_peft_model(tiny_model("llama"), config).get_base_model()
    sharded(model)
    if rank == 1:
        MergedWeights._added = _out_of_memory  # type: ignore[assignment]

    def send() -> None:
        gatherer = WeightGatherer(model, HFExportOptions(), 1 << 20, None)
        for bucket in gatherer.buckets:
            room = torch.empty(bucket.nbytes, dtype=torch.uint8)
            gatherer.gather(bucket, room if rank == 0 else None)

    errors = {}
    for name, way in (("export", lambda: save_hf(model, root / "never")), ("send", send)):
        with pytest.raises(Exception, match="no room to merge") as caught:
            way()
        errors[name] = type(caught.value).__name__
    return errors


def test_a_merge_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    other, own = run_ranks(_merge_with_a_failing_rank, 2, tmp_path)
    assert other == {"export": "PeerError", "send": "PeerError"}
    assert own == {"export": "MemoryError", "send": "MemoryError"}
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0,), ()])
def test_a_tensor_without_elements_or_dims_is_written_as_any_other(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    model = tiny_model("llama")
    model.register_buffer("extra", torch.ones(shape))
    save_hf(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (tmp_path / folder / "model.safetensors" for folder in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_module_that_is_no_model_of_transformers_is_refused_in_words() -> None:
    for wrapped in (torch.nn.DataParallel(tiny_model("llama")), torch.nn.Linear(2, 2)):
        name = type(wrapped).__name__
        with pytest.raises(CheckpointMismatchError, match=f"a {name} is no model of transformers"):
            stored_tensors(wrapped)  # type: ignore[arg-type]


def test_stored_tensors_refuses_weights_that_are_shared_without_being_declared_as_tied() -> None:
    model = LlamaForCausalLM(tiny_config("llama"))  # type: ignore[arg-type]
    first, second = (model.get_submodule(f"model.layers.{index}.mlp.up_proj") for index in (0, 1))
    first.weight = second.weight
    with pytest.raises(
        CheckpointMismatchError, match=r"layers\.0\.mlp\.up_proj\.weight.*share memory"
    ):
        stored_tensors(model)


def test_a_tied_embedding_and_head_in_wrappers_are_saved_and_loaded_as_without_them(
    tmp_path: Path,
) -> None:
    model = tiny_model("qwen3_tied")
    save_hf(model, tmp_path / "plain")
    model.model.embed_tokens = checkpoint_wrapper(model.model.embed_tokens)
    model.lm_head = checkpoint_wrapper(model.lm_head)
    save_hf(model, tmp_path / "wrapped")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "wrapped" / name).read_bytes() == (
            tmp_path / "plain" / name
        ).read_bytes(), name

    # A tied tensor is gathered once, and a load fills it.
    weights = full_state_dict(model)
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert load_hf(model, tmp_path / "plain") == []
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in weights.items())


def _shard_and_replicate(model: PreTrainedModel) -> Any:
    """Blocks of one class sharded, the rest replicated."""
    for module in model.modules():
        if type(module).__name__ == "LlamaMLP":
            fully_shard(module)
    return replicate(model)


WRAPPED: dict[str, Callable[[PreTrainedModel], Any]] = {
    "sharded": sharded,
    "replicated": replicate,
    "replicated by FSDP": replicate_with_fsdp,
    "both": _shard_and_replicate,
}


def _classes_and_exports(rank: int, world_size: int, root: Path) -> None:
    for name, wrap in WRAPPED.items():
        plain, wrapped = tiny_model("llama"), wrap(tiny_model("llama"))
        assert type(wrapped) is not type(plain), name
        classes = [unsharded_class(module) for module in wrapped.modules()]
        assert classes == [type(module) for module in plain.modules()], name
        save_hf(wrapped, root / name)
        assert (root / name / "model.safetensors").read_bytes() == (
            root / "model.safetensors"
        ).read_bytes(), name


def test_a_module_sharded_or_replicated_or_both_keeps_its_own_class(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    run_ranks(_classes_and_exports, 2, tmp_path)
