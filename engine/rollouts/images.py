"""Prompts with images: files or bytes of a sample -> token ids, pixels for the trainer, and images
for the server.

Pixels are large, so the ledger keeps a digest of a prompt's images instead. The sample of the
dataset is the reference to the images. After a resume the processor makes the same pixels again
(`restore_images`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import xxhash

from ...utils.errors import ConfigError, PromptError
from ..api import Batch
from ..servers.api import PromptImages
from ..training.batch import with_images
from .trajectory import IMAGE_DIGEST, Trajectory

_TEXT_ENTRIES = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_MODALITIES = ("image_token_id", "video_token_id", "audio_token_id")
# errors of Pillow for damaged files
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError)
# errors of processors for odd prompts
_REFUSED = (ValueError, TypeError, LookupError, RuntimeError, StopIteration)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt with its images, as the processor of the model encodes it.

    Attributes:
        input_ids: token ids, with all tokens of each image.
        image_token: id of the tokens that stand for images.
        pixels: entry of ``multi_modal_input`` for a row with this prompt. Empty without images.
        images: the images for a server. None without images.
        digest: digest of the image files, from 0 to 2**63 - 1.
    """

    input_ids: list[int]
    image_token: int
    pixels: Batch
    images: PromptImages | None
    digest: int


def encode_prompt(processor: Any, data: Mapping[str, Any]) -> EncodedPrompt:
    """Encode the ``messages`` and ``images`` of a sample by a processor of transformers.

    Each image is a path, the bytes of an image file, or a dict with ``bytes`` or ``path`` as in
    Hugging Face datasets. It belongs to the next ``{"type": "image"}`` in the messages. The server
    gets the decoded RGB pixels in a PNG file, so that it sees what the trainer sees, whatever the
    format.

    Raises:
        PromptError: an image cannot be read, or the processor refuses the prompt.
        ConfigError: the processor has no image token, or the sample no messages.
    """
    image_token = getattr(processor, "image_token_id", None)
    if image_token is None:
        raise ConfigError(
            f"{type(processor).__name__} has no image_token_id; give the processor of a model "
            "that sees"
        )
    if "messages" not in data:
        raise ConfigError(f"the sample has no 'messages'; it has {sorted(data)}")
    messages = data["messages"]
    sources = list(data.get("images") or ())

    # A text may have placeholders, too. Processors check those, but not all do.
    shown = _count_shown(messages)
    if shown and shown != len(sources):
        raise PromptError(
            f"the messages show {shown} image(s), the sample has {len(sources)}: {_names(sources)}"
        )
    files = [_read(number, source) for number, source in enumerate(sources)]
    pictures = [_decode(source, file) for source, file in zip(sources, files, strict=True)]

    # Many chat templates begin with the token that the tokenizer would add.
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    bos = processor.tokenizer.bos_token
    options = {"add_special_tokens": not (bos and text.startswith(bos))}
    token_ids = processor.tokenizer(text, **options)["input_ids"]
    try:
        encoded = processor(text=[text], images=pictures or None, return_tensors="pt", **options)
    except _REFUSED as error:
        raise PromptError(
            f"{type(processor).__name__} refuses {text!r:.200} with {len(pictures)} image(s) "
            f"{_names(sources)}: {type(error).__name__}: {error}"
        ) from error
    input_ids = encoded["input_ids"][0].tolist()

    # A digest of digests. A tensor of int64 has room for 63 bits.
    digests = b"".join(map(xxhash.xxh3_64_digest, files))
    digest = xxhash.xxh3_64_intdigest(digests) >> 1
    if not pictures:
        return EncodedPrompt(input_ids, image_token, {}, None, digest)

    pixels: Batch = {name: value for name, value in encoded.items() if name not in _TEXT_ENTRIES}
    tokens = (getattr(processor, name, None) for name in _MODALITIES)
    forbidden = [token for token in tokens if token is not None]
    images = PromptImages(token_ids, [_png(picture) for picture in pictures], forbidden)
    return EncodedPrompt(input_ids, image_token, pixels, images, digest)


def restore_images(processor: Any, trajectory: Trajectory, data: Mapping[str, Any]) -> Trajectory:
    """Add the images of a sample to its trajectory from a ledger.

    Raises:
        PromptError: the images or the prompt are not those that the trajectory was sampled with.
    """
    prompt = encode_prompt(processor, data)
    sources = list(data.get("images") or ())
    named = f"{len(sources)} image(s) {_names(sources)}"

    # All rows of a trajectory have the same prompt.
    sampled_with = int(trajectory[IMAGE_DIGEST][0])
    if prompt.digest != sampled_with:
        raise PromptError(
            f"its {named} have changed since it was sampled "
            f"(digest {prompt.digest:016x}, was {sampled_with:016x}); put the files back"
        )
    ids = trajectory["input_ids"][0, : len(prompt.input_ids)]
    if ids.tolist() != prompt.input_ids:
        raise PromptError(
            f"the processor makes another prompt of its {named} "
            "than when it was sampled; resume with the same processor and messages"
        )
    return _with_pixels(trajectory, prompt)


def add_images(trajectory: Trajectory, prompt: EncodedPrompt) -> Trajectory:
    """Add the images of a prompt to the trajectory of its samples, with the digest and the types of
    tokens.
    """
    ids = trajectory["input_ids"]
    trajectory = {
        **trajectory,
        "mm_token_type_ids": ids == prompt.image_token,
        IMAGE_DIGEST: torch.full((len(ids),), prompt.digest, dtype=torch.int64),
    }
    return _with_pixels(trajectory, prompt)


def _with_pixels(trajectory: Trajectory, prompt: EncodedPrompt) -> Trajectory:
    n_rows = len(trajectory["input_ids"])
    return with_images(trajectory, [prompt.pixels] * n_rows)


def _count_shown(messages: Sequence[Mapping[str, Any]]) -> int:
    """Number of images in messages. The content of a message is a text, or a list of parts."""
    shown = 0
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            shown += sum(part["type"] == "image" for part in content)
    return shown


def _read(number: int, source: Any) -> bytes:
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, bytes):
        return source
    if not isinstance(source, str | PathLike):
        raise PromptError(
            f"image {number} of the sample is a {type(source).__name__}; expected a path or the "
            "bytes of a file (cast the column of a dataset to datasets.Image(decode=False))"
        )
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise PromptError(f"image {source} cannot be read: {error}") from error


def _decode(source: Any, file: bytes) -> Any:
    from PIL import Image, ImageOps  # comes with the processor

    try:
        return ImageOps.exif_transpose(Image.open(BytesIO(file))).convert("RGB")
    except (*_UNREADABLE, Image.DecompressionBombError) as error:
        raise PromptError(f"image {_names([source])[0]} is damaged or no image: {error}") from error


def _png(picture: Any) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _names(sources: Sequence[Any]) -> list[str]:
    names = []
    for source in sources:
        if isinstance(source, Mapping):
            source = source.get("path") or source.get("bytes")
        if isinstance(source, bytes):
            names.append(f"of {len(source)} bytes")
        else:
            names.append(str(source))
    return names
