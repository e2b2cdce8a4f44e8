"""Tiny models that see, with the released values of their family in everything but sizes, and
batches with images.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from holdfast.engine.api import Batch
from holdfast.engine.training.batch import IMAGES

VOCAB_SIZE, IMAGE, VIDEO, START, END = 96, 91, 92, 93, 94
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MROPE = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [1, 1, 2]}
_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_VALUES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        **_IDS,
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    "qwen2_5_vl": {  # Qwen2.5-VL-7B: a windowed tower with some blocks of full attention
        **_IDS,
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {
            "depth": 3,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {  # Qwen3-VL-4B: features of inner blocks of the tower go to the first layers
        **_IDS,
        "text_config": {
            **_TEXT,
            "rope_parameters": {**_MROPE, "rope_theta": 5000000.0, "mrope_interleaved": True},
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        "tie_word_embeddings": True,
    },
    "glm4v": {  # GLM-4.1V-9B
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "image_start_token_id": START,
        "image_end_token_id": END,
        "text_config": {
            **_TEXT,
            "rope_parameters": {**_MROPE, "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "image_size": 32,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    "gemma3": {  # Gemma-3-4B: the tokens of an image see each other
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
        "mm_tokens_per_image": 4,
        "text_config": {
            **_TEXT,
            "sliding_window": 16,
            "query_pre_attn_scalar": 8,
            "layer_types": None,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 4,
            "image_size": 16,
            "vision_use_head": False,
        },
    },
    "internvl": {  # InternVL3-2B
        "image_token_id": IMAGE,
        "image_seq_length": 4,
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": [4, 4],
            "image_size": [16, 16],
        },
    },
    "llava": {  # LLaVA-1.5-7B: features of the last but one block of the tower
        "image_token_index": IMAGE,
        "image_seq_length": 16,
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "patch_size": 4,
            "image_size": 16,
            "projection_dim": 16,
        },
    },
}
MODELS = tuple(_VALUES)


def config_of(model_type: str) -> PreTrainedConfig:
    """The config of a tiny model."""
    values = {**_VALUES[model_type]}
    if values["text_config"].get("layer_types", "") is None:
        values["text_config"] = {
            **values["text_config"],
            "layer_types": ["sliding_attention", "full_attention"],
        }
    return CONFIG_MAPPING[model_type].from_dict(values)


def write_seeing_folder(folder: Path, model_type: str) -> PreTrainedModel:
    """Write a model with random float32 weights to ``folder``, and return it."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_of(model_type), dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    model.save_pretrained(folder)
    return model.eval()


def load_reference(folder: Path) -> PreTrainedModel:
    """The unsharded model, of transformers alone."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def seeing_batch(folder: Path, images: Sequence[int], seed: int = 1) -> Batch:
    """A padded batch with ``images[i]`` images in row i, and text before, between and after
    them.
    """
    config: Any = AutoConfig.from_pretrained(folder)
    vision, generator = config.vision_config, torch.Generator().manual_seed(seed)
    rows, pixels = [], []
    for number, n_images in enumerate(images):
        ids, own = _text(3 + number % 3, generator), []
        for image in range(n_images):
            if hasattr(vision, "spatial_merge_size"):
                merge, grid = (
                    vision.spatial_merge_size,
                    torch.tensor([[1, 2 + image % 2, 3 - image % 2]]),
                )
                grid[:, 1:] *= merge
                shape = [int(grid.prod()), 3 * vision.temporal_patch_size * vision.patch_size**2]
                n_tokens = int(grid.prod()) // merge**2
                own.append(
                    {
                        "pixel_values": torch.randn(shape, generator=generator),
                        "image_grid_thw": grid,
                    }
                )
            else:
                n_tokens = getattr(config, "mm_tokens_per_image", None) or config.image_seq_length
                sides = (
                    [vision.image_size] * 2
                    if isinstance(vision.image_size, int)
                    else vision.image_size
                )
                own.append({"pixel_values": torch.randn(1, 3, *sides, generator=generator)})
            ids += [config.image_token_id] * n_tokens + _text(2 + image, generator)
        rows.append(ids + _text(4, generator))
        pixels.append(
            {key: torch.cat([each[key] for each in own]) for key in (own[0] if own else ())}
        )
    most = max(map(len, rows))
    batch: Any = {
        "input_ids": torch.tensor([row + [0] * (most - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (most - len(row)) for row in rows]),
        IMAGES: pixels,
    }
    batch["mm_token_type_ids"] = (batch["input_ids"] == config.image_token_id).long()
    batch["loss_mask"] = batch["attention_mask"] * (1 - batch["mm_token_type_ids"])
    return batch


def _text(count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(4, 80, (count,), generator=generator).tolist()


def alone_logprobs(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """``[B, S]`` log-probabilities of transformers for each row alone, 0 at the first token and at
    padding.
    """
    images: Any = batch[IMAGES]
    rows = []
    for row, own in enumerate(images):
        length = int(batch["attention_mask"][row].sum())
        ids = batch["input_ids"][row : row + 1, :length]
        logits = model(
            input_ids=ids, **image_inputs(model, ids, own), use_cache=False
        ).logits.float()
        logprobs = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        rows.append(torch.nn.functional.pad(logprobs, (1, batch["input_ids"].shape[1] - length)))
    return torch.stack(rows)


def image_inputs(
    model: PreTrainedModel, ids: torch.Tensor, pixels: Batch
) -> dict[str, torch.Tensor]:
    """Arguments of the forward of transformers for the images of a sequence ``[1, T]``."""
    config: Any = model.config
    named = {"gemma3": "token_type_ids", "internvl": None, "llava": None}
    name = named.get(config.model_type, "mm_token_type_ids")
    return {**pixels, **({} if name is None else {name: (ids == config.image_token_id).long()})}
