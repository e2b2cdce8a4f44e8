"""Model folders for the examples: config and tokenizer of tiny models to train from scratch."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
)

from holdfast.utils.files import commit_folder, fsync_file, remove_folder, staging_path, walk_files

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""The first tokens of every vocabulary."""
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
IMAGE_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
"""Further tokens of a model that sees, with Qwen-VL's names."""
_SPECIAL: dict[str, Any] = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}


def make_tokenizer(
    vocabulary: Sequence[str], chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character, plus one for each longer entry of
    ``vocabulary``.

    Args:
        vocabulary: `SPECIAL_TOKENS`, then the others. The index is the token id.
        chat_template: chat template of the tokenizer.
    """
    ids = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))

    # Split into the longer entries, else into characters.
    words = [re.escape(token) for token in vocabulary[len(SPECIAL_TOKENS) :] if len(token) > 1]
    pieces = Regex("|".join([*words, "."]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )
    fast.chat_template = chat_template
    return fast


def write_tiny_qwen3(
    folder: str | Path,
    tokenizer: PreTrainedTokenizerFast,
    layers: int = 2,
    hidden: int = 64,
    for_vllm: bool = False,
    max_length: int = 64,
) -> Path:
    """Make a folder with config and tokenizer of a tiny Qwen3, to be trained with
    ``init_from_scratch``.

    The folder appears complete. An existing folder stays as it is, so any process may call this at
    any start.

    Args:
        folder: path of the folder. Its parents are created.
        tokenizer: a tokenizer from `make_tokenizer`.
        layers: number of layers.
        hidden: width of the model, a multiple of 8.
        for_vllm: write random weights, and a head that is not tied to the embeddings. vLLM 0.32
            does not reload a model that it has started without weights, and on a CPU gives a tied
            head the wrong ones.
        max_length: longest sequence in tokens.

    Returns:
        ``folder``.
    """
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden // 4,
        max_position_embeddings=max_length,
        tie_word_embeddings=not for_vllm,
        dtype="float32",
        **_SPECIAL,
    )
    return _write_folder(Path(folder), config, tokenizer, with_weights=for_vllm)


def write_tiny_qwen2_5_vl(
    folder: str | Path, tokenizer: PreTrainedTokenizerFast, layers: int, hidden: int, patch: int
) -> Path:
    """Make a folder like `write_tiny_qwen3` with a tiny Qwen2.5-VL, and an image processor that
    does not resize.

    Args:
        folder: path of the folder. Its parents are created.
        tokenizer: a tokenizer from `make_tokenizer` whose vocabulary has `IMAGE_TOKENS`.
        layers: number of layers of the language model, and of the vision tower.
        hidden: width of both, a multiple of 32.
        patch: side of a patch in pixels. Two by two patches are a token, so sides of images are
            multiples of twice it.
    """
    image, video, start, end = (tokenizer.get_vocab()[token] for token in IMAGE_TOKENS)
    # With the default initializer_range of 0.02, a narrow tower learns slowly.
    shape: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "initializer_range": 0.08,
    }
    # Rotary sections for time, height and width.
    sections = [hidden // 16, hidden // 32, hidden // 32]
    text = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": sections,
        },
        "tie_word_embeddings": True,
    }
    tower = {"depth": layers, "num_heads": 2, "out_hidden_size": hidden, "patch_size": patch}
    windows = {"window_size": 4 * patch, "fullatt_block_indexes": list(range(layers))}
    config = Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config={**shape, **text, **_SPECIAL},
        vision_config={**shape, **tower, **windows},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        dtype="float32",
    )
    processor = Qwen2VLImageProcessorPil(patch_size=patch, do_resize=False)
    return _write_folder(Path(folder), config, tokenizer, processor)


def _write_folder(
    folder: Path, config: PreTrainedConfig, *parts: Any, with_weights: bool = False
) -> Path:
    """Write config, generation config and ``parts`` into a folder that appears complete, unless it
    exists.
    """
    if folder.exists():
        return folder
    # Other ranks may do the same at the same time, and the first one wins.
    staging = staging_path(folder)
    staging.mkdir(parents=True)
    if with_weights:
        AutoModelForCausalLM.from_config(config).save_pretrained(staging)
    for part in (*parts, config, GenerationConfig(**_SPECIAL, do_sample=False)):
        part.save_pretrained(staging)
    for name in walk_files(staging):
        fsync_file(staging / name)
    try:
        commit_folder(staging, folder)
    except OSError:
        remove_folder(staging)
        if not folder.is_dir():  # otherwise another process was faster, with the same contents
            raise
    return folder
