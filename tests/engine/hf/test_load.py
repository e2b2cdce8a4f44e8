"""Folders that `load_hf` refuses, before any parameter changes, and deviations that it accepts."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForTokenClassification, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from holdfast.engine.hf import load, weight_files
from holdfast.engine.hf.load import load_hf
from holdfast.engine.hf.name_mapping import LoadPlan
from holdfast.engine.hf.save import save_hf
from tests.engine.hf.test_name_mapping import CONVERSIONS
from tests.engine.hf_models import sharded, tiny_config, tiny_model
from tests.helpers import run_ranks
from tests.tiers import slow_but

NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"

BROKEN: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "missing": lambda tensors: tensors.pop(NORM),
    "unexpected": lambda tensors: tensors.update(
        {"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}
    ),
    "shape": lambda tensors: tensors.update({UP: torch.zeros(24, 17)}),
    "dtype": lambda tensors: tensors.update({NORM: torch.zeros(16, dtype=torch.int32)}),
    "two_embeddings": lambda tensors: tensors.update({"lm_head.weight": torch.zeros(15, 16)}),
}
MESSAGES = {
    "missing": (
        f"CheckpointMismatchError: {{folder}}: tensor {NORM} of shape [16] is missing (1 in all; "
        "23 were found)"
    ),
    "unexpected": (
        "CheckpointMismatchError: {folder}: unexpected tensor model.layers.2.mlp.up_proj.weight "
        "(1 in all)"
    ),
    "shape": (
        f"CheckpointMismatchError: {{folder}}: {UP} has shape [24, 17], the model needs [24, 16]"
    ),
    "dtype": (
        f"CheckpointMismatchError: {{folder}}: {NORM} has dtype torch.int32, the model needs "
        "torch.float32"
    ),
    "two_embeddings": (
        "CheckpointMismatchError: {folder}: the model ties model.embed_tokens.weight, but"
    ),
    "truncated": "CheckpointCorruptError: {folder}/model.safetensors is truncated",
    "absent": "CheckpointNotFoundError: {folder} is not a folder",
    "other_model": "CheckpointMismatchError: {folder}: ",
    "with_adapter": (
        "CheckpointMismatchError: {folder} also holds an adapter (adapter_config.json), which "
        "from_pretrained adds to the weights; merge it"
    ),
    "named_weights": (
        "CheckpointMismatchError: {folder}/config.json names 'consolidated.safetensors' as its "
        "weights (transformers_weights); expected"
    ),
}


def _rewrite(
    source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    target.mkdir()
    save_file(
        {key: value.contiguous() for key, value in tensors.items()}, target / "model.safetensors"
    )


class Trimmed(ConversionOps):
    """Files with only the first rows, for a model that pads its vocabulary."""

    def convert(
        self,
        input_dict: dict,
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: object,
    ) -> dict:
        value = next(iter(input_dict.values()))
        return {target_patterns[0]: (value[0] if isinstance(value, list) else value)[:-1]}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


def _write_folders(root: Path) -> None:
    good = root / "good"
    for name, folder in (("qwen3_tied", "good"), ("qwen3_untied", "untied"), ("gpt2", "gpt2")):
        tiny_model(name).save_pretrained(root / folder)
    tiny_model("gpt2").save_pretrained(root / "other_model")
    for kind in ("joined", "transposed", "interleaved"):
        register_checkpoint_conversion_mapping("llama", [CONVERSIONS[kind]], overwrite=True)
        tiny_model("llama").save_pretrained(root / kind)
    register_checkpoint_conversion_mapping("llama", [], overwrite=True)
    for case, change in BROKEN.items():
        _rewrite(good, root / case, change)
    shutil.copytree(good, root / "truncated")
    os.truncate(root / "truncated" / "model.safetensors", 15000)

    # Folders of which transformers loads other weights.
    adapted = Path(shutil.copytree(good, root / "with_adapter"))
    LoraConfig(r=2, target_modules=["q_proj"]).save_pretrained(str(adapted))
    named = Path(shutil.copytree(good, root / "named_weights"))
    shutil.copy(named / "model.safetensors", named / "consolidated.safetensors")
    config = json.loads((named / "config.json").read_text())
    config["transformers_weights"] = "consolidated.safetensors"
    (named / "config.json").write_text(json.dumps(config))
    usual = Path(shutil.copytree(good, root / "usual_weights"))
    config["transformers_weights"] = "model.safetensors"
    (usual / "config.json").write_text(json.dumps(config))
    embedding = "model.embed_tokens.weight"
    _rewrite(good, root / "other_name", lambda t: t.update({"lm_head.weight": t.pop(embedding)}))
    _rewrite(
        good, root / "both_names", lambda t: t.update({"lm_head.weight": t[embedding].clone()})
    )
    differs = tiny_model("qwen3_tied").state_dict()["lm_head.weight"].clone()
    differs[-1, -1] += 1
    _rewrite(good, root / "last_differs", lambda t: t.update({"lm_head.weight": differs}))
    _rewrite(
        good,
        root / "no_prefix",
        lambda t: [t.update({k.removeprefix("model."): t.pop(k)}) for k in list(t)],
    )
    _rewrite(
        good, root / "half", lambda t: t.update({key: value.half() for key, value in t.items()})
    )
    _rewrite(
        good, root / "double", lambda t: t.update({key: value.double() for key, value in t.items()})
    )
    _rewrite(
        good,
        root / "old_buffers",
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    )


def _values(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {
        key: (value.to_local() if isinstance(value, DTensor) else value).clone()
        for key, value in model.state_dict().items()
    }


def _same(model: PreTrainedModel, expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, expected[key]) for key, value in _values(model).items())


def _refusals(rank: int, world_size: int, root: Path) -> dict[str, str]:
    model = sharded(tiny_model("qwen3_tied", seed=1))
    before, messages = _values(model), {}
    for case in MESSAGES:
        try:
            load_hf(model, root / case)
            messages[case] = "nothing was raised"
        except Exception as error:
            messages[case] = f"{type(error).__name__}: {error}"
        assert _same(model, before), case
    local = Path(f"{root}/only_on_rank_0_{rank}")
    if rank == 0:
        shutil.copytree(root / "good", local)
    dist.barrier()
    try:
        load_hf(model, local)
        messages["one_rank"] = "nothing was raised"
    except Exception as error:
        messages["one_rank"] = f"{type(error).__name__}: {error}"
    assert _same(model, before)
    return messages


def _forgiven(rank: int, world_size: int, root: Path) -> None:
    expected = _values(sharded(tiny_model("qwen3_tied")))
    names = ("other_name", "both_names", "no_prefix", "double", "old_buffers", "usual_weights")
    for folder in names:
        model = sharded(tiny_model("qwen3_tied", seed=1))
        assert load_hf(model, root / folder) == [], folder
        assert _same(model, expected), folder
    model = sharded(tiny_model("qwen3_tied", seed=1))
    load_hf(model, root / "half")
    assert _same(model, {key: value.half().float() for key, value in expected.items()})
    _critic(root)
    _converted(root / "converted")


def _critic(root: Path) -> None:
    """A value head replaces the language-model head. The backbone comes from a causal model."""
    for folder, name, head in (("untied", "qwen3_untied", "score"), ("gpt2", "gpt2", "classifier")):
        config = tiny_config(name)
        config.num_labels = 1
        torch.manual_seed(3)
        critic = sharded(AutoModelForTokenClassification.from_config(config))
        before, actor = _values(critic), _values(sharded(tiny_model(name)))
        missing = load_hf(
            critic, root / folder, allow_missing=[f"{head}.*"], allow_unexpected=["lm_head.*"]
        )
        assert missing == [f"{head}.bias", f"{head}.weight"]
        for key, value in _values(critic).items():
            assert torch.equal(value, before[key] if key in missing else actor[key]), key


def _converted(folder: Path) -> None:
    """Weights that are joined, transposed or interleaved in the file."""
    for kind in ("joined", "transposed", "interleaved"):
        register_checkpoint_conversion_mapping("llama", [CONVERSIONS[kind]], overwrite=True)
        model, fresh = sharded(tiny_model("llama")), sharded(tiny_model("llama", seed=1))
        reference, ours = folder.with_name(kind), folder.with_name(f"{kind}_ours")
        save_hf(model, ours)
        name = "model.safetensors"
        assert (ours / name).read_bytes() == (reference / name).read_bytes(), kind
        load_hf(fresh, ours)
        assert _same(fresh, _values(model)), kind
    register_checkpoint_conversion_mapping("llama", [CONVERSIONS["doubled"]], overwrite=True)
    model = sharded(tiny_model("llama"))
    try:
        save_hf(model, folder)
    except Exception as error:
        assert "more than rearranging" in str(error), error
        assert not folder.exists()
    else:
        raise AssertionError("arithmetic was exported")
    finally:
        register_checkpoint_conversion_mapping("llama", [], overwrite=True)


def _outcome(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _breaks_while_it_is_read(rank: int, world_size: int, root: Path) -> dict[str, str]:
    """After the check, rank 1's file becomes shorter or its disk fails. Afterwards the load works
    again.
    """
    outcomes, preadv, check = {}, os.preadv, load._compare_copies

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for folder in ("good", "half"):  # read directly into the parameters, and cast from a map
        expected = _values(sharded(tiny_model("qwen3_tied")))
        if folder == "half":
            expected = {key: value.half().float() for key, value in expected.items()}
        model, own = sharded(tiny_model("qwen3_tied", seed=1)), root / f"{folder}_of_{rank}"
        shutil.copytree(root / folder, own)

        def cut(*args: Any, own: Path = own) -> None:
            check(*args)
            if rank == 1:
                os.truncate(own / "model.safetensors", 6000)

        load._compare_copies = cut
        outcomes[f"{folder} shorter"] = _outcome(lambda: load_hf(model, own))  # noqa: B023
        load._compare_copies = check
        if rank == 1:
            os.preadv, weight_files.map_window = broken, lambda *_: None
        outcomes[f"{folder} EIO"] = _outcome(lambda: load_hf(model, root / folder))  # noqa: B023
        os.preadv = preadv
        load_hf(model, root / folder)
        assert _same(model, expected)
    return outcomes


def _columns(model: PreTrainedModel) -> PreTrainedModel:
    ranks = dist.get_world_size()
    fully_shard(
        model,
        shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 and p.shape[1] % ranks == 0 else None,
    )
    return model


def _gaps(rank: int, world_size: int, root: Path) -> list[str]:
    """Weights with missing elements in the files, in shards of rows and of columns."""
    trimmed = WeightConverter(
        "self_attn.o.weight", "self_attn.o_proj.weight", operations=[Trimmed()]
    )
    register_checkpoint_conversion_mapping("llama", [trimmed], overwrite=True)
    outcomes = []
    for shard in (sharded, _columns):
        folder = root / shard.__name__
        save_hf(shard(tiny_model("llama")), folder)
        model = shard(tiny_model("llama", seed=1))
        before = _values(model)
        outcomes.append(_outcome(lambda: load_hf(model, folder)))  # noqa: B023
        assert _same(model, before)
    return outcomes


def _copies_of_a_tied_weight(rank: int, world_size: int, root: Path) -> str:
    """Only the last rank finds that the copies differ, in the last element."""
    model = sharded(tiny_model("qwen3_tied", seed=1))
    before = _values(model)
    outcome = _outcome(lambda: load_hf(model, root / "last_differs"))
    assert _same(model, before)
    return outcome


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf_import")
    _write_folders(folder)
    return folder


@pytest.fixture(scope="module")
def refusals(root: Path) -> list[dict[str, str]]:
    return run_ranks(_refusals, 2, root)


@pytest.mark.parametrize("case", MESSAGES)
def test_bad_folder_is_refused_on_every_rank_before_a_parameter_changes(
    refusals: list[dict[str, str]], root: Path, case: str
) -> None:
    for report in refusals:
        assert report[case].startswith(MESSAGES[case].format(folder=root / case))


def test_folder_that_only_one_rank_lacks_is_refused_on_every_rank(
    refusals: list[dict[str, str]],
) -> None:
    assert refusals[0]["one_rank"].startswith("PeerError: checking")
    assert refusals[1]["one_rank"].startswith("CheckpointNotFoundError")


@pytest.mark.parametrize("world_size", slow_but([2], [1, 2, 3]))
def test_other_names_dtypes_heads_and_conversions_load_as_meant(
    root: Path, tmp_path: Path, world_size: int
) -> None:
    shutil.copytree(root, tmp_path / "root")
    run_ranks(_forgiven, world_size, tmp_path / "root")


def test_a_file_that_breaks_while_read_is_an_error_on_every_rank(
    root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root, tmp_path / "root")
    first, second = run_ranks(_breaks_while_it_is_read, 2, tmp_path / "root")
    for case, kind in (("shorter", "CheckpointCorruptError"), ("EIO", "OSError")):
        for folder in ("good", "half"):
            theirs, own = first[f"{folder} {case}"], second[f"{folder} {case}"]
            assert own.startswith(kind)
            assert theirs.startswith("PeerError") and f"rank 1: {kind}" in theirs
            for message in (own, theirs):
                assert "the model is now half loaded and must be loaded again" in message
                assert ("became shorter" if case == "shorter" else "Input/output error") in message


@pytest.mark.parametrize("world_size", slow_but([2], [1, 2, 3]))
def test_differing_copies_of_a_tied_weight_are_refused_on_every_rank(
    root: Path, world_size: int
) -> None:
    *others, last = run_ranks(_copies_of_a_tied_weight, world_size, root)
    assert (
        last.startswith("CheckpointMismatchError")
        and "the model ties model.embed_tokens.weight, but" in last
    )
    for other in others:
        assert other.startswith("PeerError: checking") and "the model ties" in other


def test_weights_of_which_the_files_do_not_hold_every_element_are_refused(tmp_path: Path) -> None:
    for outcomes in run_ranks(_gaps, 2, tmp_path):
        for outcome in outcomes:
            assert outcome.startswith("CheckpointMismatchError")
            assert (
                "model.layers.0.self_attn.o_proj.weight has shape [14, 16], the model needs "
                "[16, 16]"
            ) in outcome


def test_no_values_are_read_from_a_file_replaced_after_its_header(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, folder = load.plan_loading, tmp_path / "folder"
    shutil.copytree(root / "good", folder)

    def replaced(*args: Any) -> LoadPlan:
        shutil.copy(root / "half" / "model.safetensors", folder / "new")
        os.replace(folder / "new", folder / "model.safetensors")
        return plan(*args)

    monkeypatch.setattr(load, "plan_loading", replaced)
    model = tiny_model("qwen3_tied", seed=1)
    load_hf(model, folder)
    assert _same(model, _values(tiny_model("qwen3_tied")))
