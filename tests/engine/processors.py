"""A processor of Qwen2.5-VL made offline, its images, and a tiny model that vLLM can serve."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

WORDS = ["<pad>", "<eos>", "user", "model", *(f"w{i}" for i in range(86))]
SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
START, END, IMAGE, VIDEO = range(len(WORDS), len(WORDS) + 4)
VOCAB_SIZE = 96
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' }}"
    "{% if message['content'] is string %}{{ message['content'] + ' ' }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'model ' }}{% endif %}"
)


class ImageProcessor(Qwen2_5_VLProcessor):
    """The processor without its part for videos, which needs torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def make_processor(max_pixels: int = 64 * 64) -> Any:
    """A processor with patches of 14, as the released ones, and small images."""
    words = Tokenizer(
        WordLevel({word: i for i, word in enumerate([*WORDS, *SPECIAL])}, unk_token="<pad>")
    )
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=SPECIAL,
    )
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": max_pixels})
    return ImageProcessor(images, tokenizer, chat_template=TEMPLATE)


def picture(seed: int = 0, width: int = 56, height: int = 28, kind: str = "PNG") -> bytes:
    """An image file with random pixels."""
    pixels = torch.randint(
        0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed)
    )
    buffer = BytesIO()
    Image.fromarray(pixels.to(torch.uint8).numpy()).save(buffer, kind)
    return buffer.getvalue()


def served_config() -> Qwen2_5_VLConfig:
    """The config of a tiny model whose heads have the 32 dimensions that vLLM needs on CPUs."""
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )


def write_served_folder(folder: Path) -> None:
    """Write a random float32 model and the files of its processor, as a released model has them."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(served_config(), dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    model.save_pretrained(folder)
    make_processor().save_pretrained(folder)
    file = folder / "processor_config.json"
    videos = {"video_processor_type": "Qwen2VLVideoProcessor", "patch_size": 14, "merge_size": 2}
    released = {"processor_class": "Qwen2_5_VLProcessor", "video_processor": videos}
    file.write_text(json.dumps(json.loads(file.read_text()) | released))
