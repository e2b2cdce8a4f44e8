"""Images in requests to the fakes: decoding and expansion of placeholders, after the sources of
vLLM and SGLang.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

_SIDE = 28  # pixels of the side of the square that one token covers, for Qwen2.5-VL


@dataclass(frozen=True)
class Eyes:
    """What a fake does with images.

    Attributes:
        token: id of the image token. None: the model takes text only.
        limit: ``--limit-mm-per-prompt``, most images of a prompt.
        most_tokens: most tokens of an image, from the processor's limit of pixels.
    """

    token: int | None = None
    limit: int = 8
    most_tokens: int = 1000

    def sizes(self, urls: Sequence[str]) -> list[int]:
        """Number of tokens of each image. ValueError if one cannot be decoded, or there are too
        many.
        """
        from PIL import Image

        if len(urls) > (limit := self.limit if self.token is not None else 0):
            raise ValueError(f"At most {limit} image(s) may be provided in one prompt.")
        sizes = []
        for url in urls:
            kind, _, data = url.partition(",")
            if not kind.startswith("data:") or not kind.endswith(";base64"):
                raise ValueError("Only base64 data URLs are supported for now.")
            try:
                image = Image.open(BytesIO(base64.b64decode(data, validate=True)))
                image.load()
            except OSError as error:
                raise ValueError(f"Failed to load image: {error}") from error
            sizes.append(min(self.most_tokens, image.width // _SIDE * (image.height // _SIDE)))
        return sizes

    def expand(self, ids: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Replace the first placeholders, one for each image, whether they were expanded before or
        not.

        Raises:
            RuntimeError: there are fewer placeholders than images.
        """
        left, expanded = list(sizes), []
        for token in ids:
            expanded += [token] * (left.pop(0) if token == self.token and left else 1)
        if left:
            missing = len(sizes) - len(left)
            raise RuntimeError(
                f"Failed to apply prompt replacement for mm_items['image'][{missing}]"
            )
        return expanded
