"""Sharded export and import against ``save_pretrained`` of the same model unsharded, at 1, 2 and 3
ranks.
"""

import importlib
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from holdfast.engine.api import HFExportOptions
from holdfast.engine.hf.load import load_hf
from holdfast.engine.hf.save import full_state_dict, save_hf, write_hf
from holdfast.engine.hf.sidecars import small_files
from holdfast.utils.errors import CheckpointMismatchError, CheckpointWriteError, PeerError
from holdfast.utils.manifest import verify_file
from tests.engine.hf_models import ARCHITECTURES, sharded, tiny_model
from tests.helpers import run_ranks
from tests.tiers import slow_but

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "split": {"max_shard_size_bytes": 8000},
    "bf16": {"dtype": torch.bfloat16},
}
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def _tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(
        WordLevel(
            {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "one", "two"])}, "<pad>"
        )
    )
    words.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _write_references(root: Path) -> None:
    for name in ARCHITECTURES:
        tiny_model(name).save_pretrained(root / "reference" / "plain" / name)
        tiny_model(name).save_pretrained(root / "reference" / "split" / name, max_shard_size=8000)
        tiny_model(name).bfloat16().save_pretrained(root / "reference" / "bf16" / name)
    base = root / "base"
    shutil.copytree(root / "reference" / "plain" / "llama", base)
    for extra in (
        "modeling_custom.py",
        "LICENSE",
        "manifest.json",
        ".gitattributes",
        "pytorch_model.bin",
    ):
        (base / extra).write_text(f"the base model's {extra}")
    (base / "config.json").write_text("the base model's config, which ours replaces")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _assert_same(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    theirs = expected.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(_local(value), _local(theirs[key])), key


def _round_trips(rank: int, world_size: int, root: Path) -> None:
    """Export every architecture in every variant, and load every reference."""
    for name in ARCHITECTURES:
        model, fresh = sharded(tiny_model(name)), sharded(tiny_model(name, seed=1))
        rounded = sharded(tiny_model(name).bfloat16().float())
        for variant, options in VARIANTS.items():
            model.config.use_cache = False  # set by training
            save_hf(model, root / f"ours{world_size}" / variant / name, **options)
            assert model.config.use_cache is False
            assert load_hf(fresh, root / "reference" / variant / name) == []
            _assert_same(fresh, rounded if variant == "bf16" else model)
            with torch.no_grad():
                for parameter in fresh.parameters():
                    parameter.fill_(7)
        gathered = full_state_dict(model)
        assert (gathered == {}) is (rank != 0)
        if rank == 0:
            expected = tiny_model(name).state_dict()
            assert list(gathered) == list(expected)
            assert all(torch.equal(gathered[key], value) for key, value in expected.items())
            storages = {tensor.untyped_storage().data_ptr() for tensor in gathered.values()}
            assert len(storages) == len(
                {tensor.untyped_storage().data_ptr() for tensor in expected.values()}
            )
            assert storages.isdisjoint(
                _local(v).untyped_storage().data_ptr() for v in model.state_dict().values()
            )


def _raised(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _file_size_limited(action: Callable[[], object], limit_bytes: int) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        return _raised(action)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _options_and_failures(rank: int, world_size: int, root: Path) -> dict[str, str]:
    """Things that need only one architecture: sidecar files, failed writes, other placements."""
    model = sharded(tiny_model("llama"))
    save_hf(model, root / "complete", tokenizer=_tokenizer(), base_model_path=root / "base")
    messages = {
        "exists": _raised(lambda: save_hf(model, root / "complete")),
        "no_base": _raised(
            lambda: save_hf(model, root / "no_base", base_model_path=root / "nowhere")
        ),
        "unwritable": _raised(lambda: save_hf(model, "/proc/holdfast/export")),
    }
    limit = 3000 if rank == 1 else resource.RLIM_INFINITY
    messages["full_disk"] = _file_size_limited(lambda: save_hf(model, root / "full_disk"), limit)
    limit = 3000 if rank == 0 else resource.RLIM_INFINITY
    messages["full_disk_0"] = _file_size_limited(
        lambda: save_hf(model, root / "full_disk_0"), limit
    )
    if rank == 0:
        (root / "staged").mkdir()
    dist.barrier()
    options = HFExportOptions(tokenizer=_tokenizer(), max_shard_size_bytes=8000)
    entries = write_hf(model, root / "staged", options)
    for entry in entries:
        verify_file(root / "staged", entry.name, entry.described())
    messages["named"] = " ".join(entry.name for entry in entries)
    _between_forwards(root)
    _other_placements(root)
    return messages


def _between_forwards(root: Path) -> None:
    """After a forward, FSDP2 still holds the root's gathered parameters. Neither call may see or
    keep that copy.
    """
    ids = torch.arange(14).view(2, 7)
    model, other = sharded(tiny_model("llama")), sharded(tiny_model("llama", seed=1))
    with torch.no_grad():
        expected = model(ids).logits
        save_hf(model, root / "after_forward")
        assert not torch.equal(other(ids).logits, expected)
        load_hf(other, root / "after_forward")
        assert torch.equal(other(ids).logits, expected)


def _other_placements(root: Path) -> None:
    """Columns instead of rows, and a mesh that also replicates."""
    columns, fresh = tiny_model("qwen3_moe"), tiny_model("qwen3_moe", seed=1)
    for model in (columns, fresh):
        fully_shard(
            model,
            shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 and p.shape[1] % 2 == 0 else None,
        )
    assert any(p.placements == (Shard(1),) for p in columns.parameters() if isinstance(p, DTensor))
    save_hf(columns, root / "columns")
    load_hf(fresh, root / "reference" / "plain" / "qwen3_moe")
    _assert_same(fresh, columns)
    hybrid, fresh = tiny_model("qwen3_tied"), tiny_model("qwen3_tied", seed=1)
    for model in (hybrid, fresh):
        fully_shard(
            model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        )
    save_hf(hybrid, root / "hybrid")
    load_hf(fresh, root / "reference" / "plain" / "qwen3_tied")
    _assert_same(fresh, hybrid)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    _write_references(folder)
    return folder


@pytest.fixture(scope="module", params=slow_but([2], [1, 2, 3]))
def exported(request: pytest.FixtureRequest, root: Path) -> Path:
    run_ranks(_round_trips, request.param, root)
    return root / f"ours{request.param}"


@pytest.fixture(scope="module")
def reports(root: Path) -> list[dict[str, str]]:
    return run_ranks(_options_and_failures, 2, root)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_file_equals_save_pretrained_to_the_byte_and_loads(exported: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    for variant in VARIANTS:
        for name in ARCHITECTURES:
            ours = _contents(exported / variant / name)
            theirs = _contents(exported.parent / "reference" / variant / name)
            assert sorted(ours) == sorted(theirs)
            assert [file for file in ours if ours[file] != theirs[file]] == []
            assert ("model.safetensors.index.json" in ours) is (variant == "split")
            for path in (exported / variant / name).iterdir():
                assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert not list(exported.rglob(".staging*"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_from_pretrained_of_an_export_gives_the_same_logits(exported: Path, name: str) -> None:
    loaded, original = (
        AutoModelForCausalLM.from_pretrained(exported / "split" / name),
        tiny_model(name),
    )
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, original(ids).logits)
    assert loaded.config.use_cache is True


def test_unsharded_model_without_torch_distributed_exports_and_imports_the_same(
    root: Path, tmp_path: Path
) -> None:
    model, fresh = tiny_model("qwen3_moe"), tiny_model("qwen3_moe", seed=1)
    save_hf(model, tmp_path / "out")
    assert _contents(tmp_path / "out") == _contents(root / "reference" / "plain" / "qwen3_moe")
    load_hf(fresh, tmp_path / "out")
    _assert_same(fresh, model)


def test_tokenizer_chat_template_and_files_of_the_base_model_come_along(
    reports: object, root: Path
) -> None:
    complete = root / "complete"
    tokenizer = AutoTokenizer.from_pretrained(complete)
    assert tokenizer("one two")["input_ids"] == [3, 4]
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (complete / "modeling_custom.py").read_text() == "the base model's modeling_custom.py"
    assert (complete / "LICENSE").is_file()
    assert "LlamaForCausalLM" in (complete / "config.json").read_text()
    for left in ("manifest.json", ".gitattributes", "pytorch_model.bin"):
        assert not (complete / left).exists()


def test_files_of_the_base_do_not_replace_what_the_given_tokenizer_says(tmp_path: Path) -> None:
    base = tmp_path / "base"
    _tokenizer().save_pretrained(base)
    special = {"eos_token": "</s>", "pad_token": "<pad>"}
    (base / "special_tokens_map.json").write_text(json.dumps(special))
    (base / "added_tokens.json").write_text(json.dumps({"<old>": 5}))
    (base / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("old")
    given = _tokenizer()
    given.eos_token, given.pad_token = "two", "</s>"
    save_hf(tiny_model("llama"), tmp_path / "out", tokenizer=given, base_model_path=base)
    read = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (read.eos_token, read.pad_token, len(read)) == ("two", "</s>", len(given))
    assert read.chat_template == CHAT_TEMPLATE
    assert not (tmp_path / "out" / "chat_template.json").exists(), "processors read it first"

    # Without a tokenizer, all of them come along.
    save_hf(tiny_model("llama"), tmp_path / "all", base_model_path=base)
    assert set(small_files(base)) <= set(small_files(tmp_path / "all"))


def test_the_adapter_of_a_base_stays_out_of_exports_of_all_weights(tmp_path: Path) -> None:
    base = tmp_path / "base"
    LoraConfig(r=2, target_modules=["q_proj"]).save_pretrained(str(base))
    save_hf(tiny_model("llama"), tmp_path / "out", base_model_path=base)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    _assert_same(read, tiny_model("llama"))


def test_existing_target_missing_base_and_unwritable_folder_are_errors_on_every_rank(
    reports: list[dict[str, str]], root: Path
) -> None:
    for report in reports:
        assert report["exists"].startswith(
            f"CheckpointExistsError: {root / 'complete'} exists already"
        )
        assert report["unwritable"].startswith(
            "CheckpointWriteError: cannot write /proc/holdfast/export"
        )
    assert reports[0]["no_base"].startswith(
        f"CheckpointNotFoundError: base_model_path {root / 'nowhere'} is not"
    )
    assert "rank 0: CheckpointNotFoundError" in reports[1]["no_base"]
    assert not (root / "no_base").exists()


@pytest.mark.parametrize(("case", "failing"), [("full_disk", 1), ("full_disk_0", 0)])
def test_rank_that_cannot_write_fails_the_export_everywhere_and_leaves_nothing(
    reports: list[dict[str, str]], root: Path, case: str, failing: int
) -> None:
    assert reports[failing][case].startswith(CheckpointWriteError.__name__)
    assert "File too large" in reports[failing][case]
    assert reports[1 - failing][case].startswith(PeerError.__name__)
    assert f"rank {failing}: CheckpointWriteError" in reports[1 - failing][case]
    assert not (root / case).exists()
    assert not list(root.glob(".staging*"))


def test_write_hf_describes_every_file_on_exactly_one_rank(
    reports: list[dict[str, str]], root: Path
) -> None:
    names = [name for report in reports for name in report["named"].split()]
    assert sorted(names) == sorted(path.name for path in (root / "staged").iterdir())
    assert all("safetensors" in report["named"] for report in reports)


def test_column_shards_and_replicated_meshes_export_and_import_the_same(
    reports: object, root: Path
) -> None:
    assert _contents(root / "columns") == _contents(root / "reference" / "plain" / "qwen3_moe")
    assert _contents(root / "hybrid") == _contents(root / "reference" / "plain" / "qwen3_tied")


def test_gathered_parameters_of_a_forward_are_neither_saved_nor_kept(
    reports: object, root: Path
) -> None:
    assert _contents(root / "after_forward") == _contents(root / "reference" / "plain" / "llama")


def test_custom_code_of_the_model_is_exported_as_save_pretrained_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny_custom_llama.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\nclass "
        "TinyCustomLlama(LlamaForCausalLM):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    custom = importlib.import_module("tiny_custom_llama").TinyCustomLlama
    custom.register_for_auto_class("AutoModelForCausalLM")
    model = custom(tiny_model("llama").config)
    save_hf(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert _contents(tmp_path / "ours") == _contents(tmp_path / "theirs")
    assert (tmp_path / "ours" / "tiny_custom_llama.py").is_file()


def test_model_without_memory_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_model("llama").config)
    with pytest.raises(
        CheckpointMismatchError, match=r"embed_tokens\.weight is on the meta device"
    ):
        save_hf(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
