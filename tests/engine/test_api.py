"""Value types refuse meaningless values and name the key."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from holdfast.engine import SaveLoadMeta, save_hf
from holdfast.engine.api import HFExportOptions
from holdfast.utils.errors import ConfigError


def test_impossible_export_options_are_refused_with_the_key() -> None:
    with pytest.raises(
        ConfigError,
        match="'dtype' is 'int8'; expected one of None, 'float32', 'bfloat16', 'float16'",
    ):
        SaveLoadMeta("out", "hf", with_optim=False, dtype="int8")
    with pytest.raises(ConfigError, match="'max_shard_size_bytes' is 0"):
        SaveLoadMeta("out", "hf", with_optim=False, max_shard_size_bytes=0)
    with pytest.raises(ConfigError, match="are for weight_format 'hf'"):
        SaveLoadMeta("out", "dcp", with_optim=True, dtype="bfloat16")
    with pytest.raises(ConfigError, match="are for weight_format 'hf'"):
        SaveLoadMeta("out", "dcp", with_optim=True, staging_folder="scratch")
    with pytest.raises(
        ConfigError,
        match=r"staging_folder is s3://bucket/scratch; staging an export needs a folder",
    ):
        SaveLoadMeta("out", "hf", with_optim=False, staging_folder="s3://bucket/scratch")
    with pytest.raises(ConfigError, match=r"dtype is torch\.int8; expected a floating-point dtype"):
        save_hf(torch.nn.Module(), "out", dtype=torch.int8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dtype is 'bfloat16'; expected a float"):
        save_hf(torch.nn.Module(), "out", dtype="bfloat16")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"tokenizer is 'Qwen/Qwen3-0\.6B'; expected the object"):
        SaveLoadMeta("out", "hf", with_optim=False, tokenizer="Qwen/Qwen3-0.6B")


def test_options_of_an_export_are_those_of_its_meta() -> None:
    tokenizer, processor = (
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({word: 0})))
        for word in ("one", "two")
    )
    meta = SaveLoadMeta(
        "s3://bucket/out", "hf", False, tokenizer, processor, "base", "float16", 7, "scratch"
    )
    options = meta.hf_options(torch.bfloat16)
    assert options == HFExportOptions(torch.float16, tokenizer, processor, "base", 7, "scratch")
    assert SaveLoadMeta("out", "hf", False).hf_options(torch.bfloat16) == HFExportOptions(
        torch.bfloat16
    )
