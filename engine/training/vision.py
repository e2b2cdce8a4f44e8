"""Images in batches: checks, per-token entries, inputs of the model, and the dummy image of a row
without images.

Two families of models are understood:

- Grid: images have any size. ``pixel_values`` is ``[patches, channels * t * p * p]`` and
  ``image_grid_thw`` ``[images, 3]``. Positions come from the model's ``get_rope_index`` (Qwen2-VL,
  Qwen2.5-VL, Qwen3-VL, GLM-4V).
- Fixed: all images have one size and one number of tokens. ``pixel_values`` is ``[images, channels,
  height, width]`` (Gemma 3, InternVL, LLaVA).

Every row of a micro-batch reaches the vision tower, if need be with a dummy image. The blocks of
the tower are FSDP groups, so a rank without an image would not meet the collectives of its peers.
And a tower that some batches do not reach would be decayed or not depending on the batch.
"""

import inspect
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ...utils.errors import BatchError, ConfigError
from ..api import Batch
from ..parallel_strategy import ParallelStrategy
from .batch import IMAGES, ROPE_POSITIONS, TOKEN_TYPES, images_of, join_pixels, with_images
from .packed_batch import MicroBatch
from .value_model import body_name

_PIXELS = "pixel_values"
_GRID = "image_grid_thw"
_TYPE_ARGUMENTS = (TOKEN_TYPES, "token_type_ids")
_IN_IMAGE = (RuntimeError, ValueError, TypeError, LookupError, StopIteration)
"""Errors of ``get_rope_index`` for a row whose images it does not understand."""


def require_whole_rows(strategy: ParallelStrategy) -> None:
    """Raise ConfigError if ranks share rows or matrices, which no model with a vision tower
    supports.
    """
    sizes = {"context": strategy.cp_size, "tensor": strategy.tp_size}
    for key, size in sizes.items():
        if size > 1:
            letter = key[0]
            raise ConfigError(
                f"config key 'train_vision' is true, but {key}_parallel_size is {size}: how ranks "
                "share the rows or matrices of a model with a vision tower is not supported; "
                f"leave {letter!r} out of config key 'backend'"
            )


class Vision:
    """The images that a model takes. It reads the model's class and config, and no weights.

    Attributes:
        image_token: id of the tokens in whose place the model puts the features of an image.
        image_tokens: number of tokens of the dummy image.

    Raises:
        ConfigError: the model is of neither family.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        body = model.get_submodule(body_name(model))
        self._body: Any = body
        self._text = config.get_text_config(decoder=True)
        self._has_grid = hasattr(body, "get_rope_index")

        # The model must be of one of the two families.
        vision = getattr(config, "vision_config", None)
        token = getattr(config, "image_token_id", None)
        n_tokens = 1 if self._has_grid else _tokens_of_fixed(config)
        if vision is None or token is None or n_tokens is None:
            raise ConfigError(
                f"config key 'train_vision' is true, but how {type(model).__name__} takes images "
                "is not known: its config needs vision_config and image_token_id, and its body "
                "get_rope_index or a fixed number of tokens for each image; set it to false to "
                "train on text, if the model has a text-only form"
            )
        self.image_token = int(token)
        self.image_tokens = int(n_tokens)

        # The shape of a patch or image, and the patches in a row or column that give one token.
        channels = getattr(vision, "in_channels", None) or vision.num_channels
        height, width = _sides(vision.patch_size)
        self._merge = 1
        if self._has_grid:
            self._merge = int(vision.spatial_merge_size)
            self._shape = (channels * vision.temporal_patch_size * height * width,)
        else:
            self._shape = (channels, *_sides(vision.image_size))

        # The argument that tells the model which tokens are an image's.
        known = inspect.signature(body.forward).parameters
        self._type_argument = next((name for name in _TYPE_ARGUMENTS if name in known), None)

    # Batches

    def prepare(
        self,
        batch: Batch,
        lengths: Sequence[int],
        most: int | None = None,
    ) -> tuple[Batch, list[Batch], list[int]]:
        """Check the images of a batch. Return it with `TOKEN_TYPES` and `ROPE_POSITIONS`, pixels
        and cost of each row.

        The cost is a number of tokens. Tokens of images count twice, for the tower and for the
        language model.

        Args:
            batch: padded, as `validate_batch` accepts it. It may lack `TOKEN_TYPES`.
            lengths: tokens of each row.
            most: most tokens of one image. None: no limit.

        Raises:
            BatchError: the images of a row do not fit its tokens or the model.
        """
        ids = batch["input_ids"].cpu()
        attended = batch["attention_mask"].cpu().long()
        types = (ids == self.image_token).long() * attended
        self._check_types(batch, types)

        # Rows are checked one by one, and grid models give each its positions.
        pixels = images_of(batch) or [{} for _ in lengths]
        positions = []
        for row, length in enumerate(lengths):
            own_types = types[row, :length]
            self._check_row(row, pixels[row], own_types, most)
            if self._has_grid:
                own_ids = ids[row, :length]
                own = self._positions(row, own_ids, own_types, pixels[row])
                n_padding = ids.shape[1] - len(own)
                positions.append(F.pad(own, (0, 0, 0, n_padding)))

        device = batch["input_ids"].device
        prepared = with_images(batch, None)
        prepared[TOKEN_TYPES] = types.to(device)
        if self._has_grid:
            prepared[ROPE_POSITIONS] = torch.stack(positions).to(device)
        n_image_tokens = types.sum(1).tolist()
        costs = [length + n for length, n in zip(lengths, n_image_tokens, strict=True)]
        return prepared, pixels, costs

    def _check_types(self, batch: Batch, types: Tensor) -> None:
        given = batch.get(TOKEN_TYPES)
        if given is None:
            return
        given = given.cpu().long()
        if torch.equal(given, types):
            return
        is_bad = (given != types).flatten(1).any(1)
        rows = is_bad.nonzero().flatten().tolist()
        raise BatchError(
            f"batch[{TOKEN_TYPES!r}] of row(s) {rows[:8]} is not 1 at image tokens (id "
            f"{self.image_token}) and 0 elsewhere; leave it out, or take the processor's. "
            "Videos are not supported"
        )

    def _check_row(
        self,
        row: int,
        pixels: Batch,
        types: Tensor,
        most: int | None,
    ) -> None:
        sizes = self._tokens_of_images(row, pixels)
        # The processor has put the tokens of images into the prompt.
        n_tokens = int(types.sum())
        if sum(sizes) != n_tokens:
            missing = f"; batch[{IMAGES!r}][{row}] has no pixels" if not pixels else ""
            raise BatchError(
                f"row {row} of the batch has {n_tokens} image tokens (id {self.image_token}), but "
                f"its {len(sizes)} images take {sum(sizes)}{missing}. The images must be those "
                "that the processor expanded the prompt with, and image tokens must not be sampled"
            )
        # Tokens of images without any other token between them.
        runs = [len(list(group)) for kind, group in groupby(types.tolist()) if kind]
        if self._has_grid and runs != sizes:
            raise BatchError(
                f"row {row} of the batch has runs of {runs} image tokens; its images take "
                f"{sizes}, each"
            )
        if most is not None and max(sizes, default=0) > most:
            raise BatchError(
                f"row {row} of the batch has an image of {max(sizes)} tokens, more than config "
                f"key 'mb_spec.max_tokens_per_mb' ({most}); raise that, or give the processor a "
                "smaller limit of pixels"
            )

    def _tokens_of_images(self, row: int, pixels: Batch) -> list[int]:
        """Number of tokens of each image in a row."""
        where = f"batch[{IMAGES!r}][{row}]"
        if not pixels:
            return []
        names = {_PIXELS, _GRID} if self._has_grid else {_PIXELS}
        if pixels.keys() != names:
            is_video = any("video" in name or "second" in name for name in pixels)
            videos = ". Videos are not supported" if is_video else ""
            expected = f"expected {sorted(names)}, or none without images{videos}"
            raise BatchError(f"{where} has the keys {sorted(pixels)}; {expected}")

        values = pixels[_PIXELS]
        fits = values.is_floating_point() and values.shape[1:] == self._shape and len(values) > 0
        if not fits:
            kind = "patches" if self._has_grid else "images"
            raise BatchError(
                f"{where}[{_PIXELS!r}] is {values.dtype} of shape {list(values.shape)}; the model "
                "takes floating-point numbers of shape "
                f"[{kind}, {', '.join(map(str, self._shape))}]"
            )
        if not self._has_grid:
            return [self.image_tokens] * len(values)
        return self._tokens_of_grids(where, pixels[_GRID], len(values))

    def _tokens_of_grids(
        self,
        where: str,
        grid: Tensor,
        n_patches: int,
    ) -> list[int]:
        if grid.is_floating_point() or grid.dim() != 2 or grid.shape[1] != 3:
            raise BatchError(
                f"{where}[{_GRID!r}] is {grid.dtype} of shape {list(grid.shape)}; expected "
                "integers [images, 3]"
            )
        grids = grid.tolist()
        sizes = []
        for t, height, width in grids:
            is_whole = height % self._merge == 0 and width % self._merge == 0
            if t != 1 or height < 1 or width < 1 or not is_whole:
                raise BatchError(
                    f"{where}[{_GRID!r}] is {grids}; expected [1, height, width] in patches for "
                    f"each image, both multiples of {self._merge}"
                )
            sizes.append(height * width)
        if sum(sizes) != n_patches:
            raise BatchError(
                f"{where} has {n_patches} patches in {_PIXELS!r}; {_GRID!r} {grids} has "
                f"{sum(sizes)}"
            )
        return [size // self._merge**2 for size in sizes]

    def _positions(
        self,
        row: int,
        ids: Tensor,
        types: Tensor,
        pixels: Batch,
    ) -> Tensor:
        """``[T, 3]`` positions of one sequence."""
        grid = pixels[_GRID].cpu() if pixels else None
        try:
            positions, _ = self._body.get_rope_index(
                ids[None].long(),
                mm_token_type_ids=types[None],
                image_grid_thw=grid,
            )
        except _IN_IMAGE as error:
            raise BatchError(
                f"the model finds no positions for row {row} of the batch: "
                f"{type(error).__name__}: {error}"
            ) from error
        return positions[:, 0].T

    # Micro-batches

    def dummy(self, device: torch.device) -> tuple[Batch, Batch]:
        """Per-token entries of a sequence with nothing but an image, and its pixels (zeros)."""
        tokens = torch.arange(self.image_tokens, device=device)
        ones = torch.ones_like(tokens)
        data = {
            "input_ids": ones * self.image_token,
            "attention_mask": ones,
            "position_ids": tokens,
            TOKEN_TYPES: ones,
        }
        if self._has_grid:
            data[ROPE_POSITIONS] = tokens.new_zeros(self.image_tokens, 3)
        return data, self._blank(1, 1, device)

    def _blank(
        self,
        height: int,
        width: int,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """Pixels of a black image. A grid model's has ``height * width`` tokens."""
        # A grid counts patches, of which a token has merge x merge.
        if not self._has_grid:
            return {_PIXELS: torch.zeros(1, *self._shape, device=device)}
        n_rows = height * self._merge
        n_columns = width * self._merge
        return {
            _PIXELS: torch.zeros(n_rows * n_columns, *self._shape, device=device),
            _GRID: torch.tensor([[1, n_rows, n_columns]], device=device),
        }

    def images(self, row: MicroBatch) -> dict[str, Any]:
        """Arguments of the model's forward with the images of a row: pixels, and which tokens they
        are.
        """
        arguments: dict[str, Any] = {**row.pixels}
        if self._type_argument is not None:
            arguments[self._type_argument] = row.data[TOKEN_TYPES][None]
        return arguments

    def inputs(self, row: MicroBatch) -> dict[str, Any]:
        """`images` of a row of `MicroBatch.row`, with positions and masks that keep its sequences
        apart.
        """
        inputs = self.images(row)
        if self._type_argument == "token_type_ids":
            inputs["attention_mask"] = self._masks(row)
        # The first of four is the position in the sequence, in which the model sees boundaries.
        if self._has_grid:
            positions = torch.cat([row.position_ids[None], row.data[ROPE_POSITIONS].T])
            inputs["position_ids"] = positions[:, None]
        return inputs

    def _masks(self, row: MicroBatch) -> dict[str, Tensor]:
        """``[1, 1, T, T]`` bool for each kind of layer, in which the tokens of an image see each
        other (Gemma 3).

        transformers (5.23) looks the images of every sequence up in the first sequence of a packed
        row.
        """
        types = row.data[TOKEN_TYPES].bool()
        tokens = torch.arange(row.n_tokens, device=row.position_ids.device)
        rows = row.rows

        # Number of the image of each token, [T], and -1 for text. Sequences share no image.
        follows_text = ~types.roll(1)
        follows_other = rows != rows.roll(1)
        starts = types & (follows_text | follows_other | (tokens == 0))
        images = torch.where(types, starts.cumsum(0), -1)

        # A token (first dimension) sees earlier ones and those of its image, all in its sequence.
        same_image = (images[:, None] == images) & types
        seen = (tokens[:, None] >= tokens) | same_image
        seen &= rows[:, None] == rows
        window = getattr(self._text, "sliding_window", None) or row.n_tokens
        sliding = seen & (tokens[:, None] - tokens < window)
        return {
            "full_attention": seen[None, None],
            "sliding_attention": sliding[None, None],
        }

    # Test rows

    def probe(self, text: Sequence[Tensor]) -> tuple[Batch, list[int]]:
        """A batch of sequences with 1, 0, 2, 1, 0, 2 ... random images, for tests of the
        architecture, and the lengths.

        ``text`` are token ids. An image comes after the first token of a sequence, another before
        the last.
        """
        generator = torch.Generator().manual_seed(0)
        sizes = ((1, 2), (2, 1), (2, 2))
        n_images = (1, 0, 2)
        rows = []
        pixels = []
        for number, ids in enumerate(text):
            # Random tokens may be an image's.
            ids = torch.where(ids == self.image_token, 0 if self.image_token else 1, ids)
            images = []
            for i in range(n_images[number % 3]):
                image = self._blank(*sizes[(number + i) % 3])
                image[_PIXELS].normal_(generator=generator)
                images.append(image)

            # The images come after the first and before the last token.
            parts = [ids[:1], ids[1:-1], ids[-1:]]
            for i, image in enumerate(images):
                n_tokens = sum(self._tokens_of_images(number, image))
                tokens = torch.full((n_tokens,), self.image_token)
                parts[i] = torch.cat([parts[i], tokens])
            rows.append(torch.cat(parts))
            pixels.append(join_pixels(images))

        lengths = [len(row) for row in rows]
        longest = max(lengths)
        attended = torch.arange(longest) < torch.tensor(lengths)[:, None]
        batch: Any = {
            "input_ids": torch.stack([F.pad(row, (0, longest - len(row))) for row in rows]),
            "attention_mask": attended.long(),
            IMAGES: pixels,
        }
        return batch, lengths


def vision_tower(model: PreTrainedModel) -> str:
    """Name of the outermost module that is a model of ``vision_config``."""
    kind = type(model.config.vision_config)
    names = []
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and type(module.config) is kind:
            names.append(name)
    return min(names, key=len)


def _tokens_of_fixed(config: PretrainedConfig) -> int | None:
    """Tokens of an image, in a model whose images all have the same number."""
    own = getattr(config, "mm_tokens_per_image", None)
    return own or getattr(config, "image_seq_length", None)


def _sides(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    return size[0], size[1]
