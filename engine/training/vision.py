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
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig, PreTrainedModel

from ...utils.errors import BatchError, ConfigError
from ..api import Batch
from ..parallel_strategy import ParallelStrategy
from .batch import IMAGES, images_of
from .value_model import body_name

if TYPE_CHECKING:
    from .microbatch import MicroBatch

TOKEN_TYPES = "mm_token_type_ids"
"""Per-token entry of a batch: 1 for tokens of an image, else 0."""
ROPE_POSITIONS = "rope_position_ids"
"""Per-token entry ``[..., 3]``: temporal, vertical and horizontal position of a token. Only in grid
models.
"""

_PIXELS, _GRID = "pixel_values", "image_grid_thw"
_TYPE_ARGUMENTS = (TOKEN_TYPES, "token_type_ids")
_IN_IMAGE = (RuntimeError, ValueError, TypeError, LookupError, StopIteration)
"""Errors of ``get_rope_index`` for a row whose images it does not understand."""


def require_whole_rows(strategy: ParallelStrategy) -> None:
    """Raise ConfigError if ranks share rows or matrices, which no model with a vision tower
    supports.
    """
    for letter, key, size in (
        ("c", "context", strategy.cp_size),
        ("t", "tensor", strategy.tp_size),
    ):
        if size > 1:
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
        config, body = model.config, model.get_submodule(body_name(model))
        self._body: Any = body
        self._text = config.get_text_config(decoder=True)
        self._has_grid = hasattr(body, "get_rope_index")
        vision, token = (
            getattr(config, "vision_config", None),
            getattr(config, "image_token_id", None),
        )
        n_tokens = 1 if self._has_grid else _tokens_of_fixed(config)
        if vision is None or token is None or n_tokens is None:
            raise ConfigError(
                f"config key 'train_vision' is true, but how {type(model).__name__} takes images "
                "is not known: its config needs vision_config and image_token_id, and its body "
                "get_rope_index or a fixed number of tokens for each image; set it to false to "
                "train on text, if the model has a text-only form"
            )
        self.image_token, self.image_tokens = int(token), int(n_tokens)
        patch, channels = (
            _sides(vision.patch_size),
            getattr(vision, "in_channels", None) or vision.num_channels,
        )
        if self._has_grid:
            self._merge = int(vision.spatial_merge_size)
            self._shape = (channels * vision.temporal_patch_size * patch[0] * patch[1],)
        else:
            self._merge, self._shape = 1, (channels, *_sides(vision.image_size))
        known = inspect.signature(body.forward).parameters
        self._type_argument = next((name for name in _TYPE_ARGUMENTS if name in known), None)

    # Batches

    def prepare(
        self, batch: Batch, lengths: Sequence[int], most: int | None = None
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
        pixels = images_of(batch) or [{} for _ in lengths]
        types = (ids == self.image_token).long() * batch["attention_mask"].cpu().long()
        if (given := batch.get(TOKEN_TYPES)) is not None and not torch.equal(
            given.cpu().long(), types
        ):
            rows = (given.cpu().long() != types).flatten(1).any(1).nonzero().flatten().tolist()
            raise BatchError(
                f"batch[{TOKEN_TYPES!r}] of row(s) {rows[:8]} is not 1 at image tokens (id "
                f"{self.image_token}) and 0 elsewhere; leave it out, or take the processor's. "
                "Videos are not supported"
            )
        positions = []
        for row, (own, length) in enumerate(zip(pixels, lengths, strict=True)):
            self._check_row(row, own, types[row, :length], most)
            if self._has_grid:
                positions.append(self._positions(row, ids[row, :length], types[row, :length], own))
        device = batch["input_ids"].device
        prepared = {key: tensor for key, tensor in batch.items() if key != IMAGES} | {
            TOKEN_TYPES: types.to(device)
        }
        if self._has_grid:
            padded = [F.pad(each, (0, 0, 0, ids.shape[1] - len(each))) for each in positions]
            prepared[ROPE_POSITIONS] = torch.stack(padded).to(device)
        costs = [length + n for length, n in zip(lengths, types.sum(1).tolist(), strict=True)]
        return prepared, pixels, costs

    def _check_row(self, row: int, pixels: Batch, types: torch.Tensor, most: int | None) -> None:
        sizes = self._tokens_of_images(row, pixels)
        n_tokens = int(types.sum())
        if sum(sizes) != n_tokens:
            missing = f"; batch[{IMAGES!r}][{row}] has no pixels" if not pixels else ""
            raise BatchError(
                f"row {row} of the batch has {n_tokens} image tokens (id {self.image_token}), but "
                f"its {len(sizes)} images take {sum(sizes)}{missing}. The images must be those "
                "that the processor expanded the prompt with, and image tokens must not be sampled"
            )
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
        names = {_PIXELS, _GRID} if self._has_grid else {_PIXELS}
        where = f"batch[{IMAGES!r}][{row}]"
        if pixels and pixels.keys() != names:
            videos = (
                ". Videos are not supported"
                if any("video" in name or "second" in name for name in pixels)
                else ""
            )
            expected = f"expected {sorted(names)}, or none without images{videos}"
            raise BatchError(f"{where} has the keys {sorted(pixels)}; {expected}")
        if not pixels:
            return []
        values = pixels[_PIXELS]
        if not values.is_floating_point() or values.shape[1:] != self._shape or not len(values):
            raise BatchError(
                f"{where}[{_PIXELS!r}] is {values.dtype} of shape {list(values.shape)}; the model "
                "takes floating-point numbers of shape "
                f"[{'patches' if self._has_grid else 'images'}, "
                f"{', '.join(map(str, self._shape))}]"
            )
        if not self._has_grid:
            return [self.image_tokens] * len(values)
        grid = pixels[_GRID]
        if grid.is_floating_point() or grid.dim() != 2 or grid.shape[1] != 3:
            raise BatchError(
                f"{where}[{_GRID!r}] is {grid.dtype} of shape {list(grid.shape)}; expected "
                "integers [images, 3]"
            )
        grids = grid.tolist()
        if any(t != 1 or h < 1 or w < 1 or h % self._merge or w % self._merge for t, h, w in grids):
            raise BatchError(
                f"{where}[{_GRID!r}] is {grids}; expected [1, height, width] in patches for each "
                f"image, both multiples of {self._merge}"
            )
        if (n_patches := sum(h * w for _, h, w in grids)) != len(values):
            raise BatchError(
                f"{where} has {len(values)} patches in {_PIXELS!r}; {_GRID!r} {grids} has "
                f"{n_patches}"
            )
        return [h * w // self._merge**2 for _, h, w in grids]

    def _positions(
        self, row: int, ids: torch.Tensor, types: torch.Tensor, pixels: Batch
    ) -> torch.Tensor:
        """``[T, 3]`` positions of one sequence."""
        grid = pixels[_GRID].cpu() if pixels else None
        try:
            positions, _ = self._body.get_rope_index(
                ids[None].long(), mm_token_type_ids=types[None], image_grid_thw=grid
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
        ones, pixels = torch.ones_like(tokens), self._blank(1, 1, device)
        data = {
            "input_ids": ones * self.image_token,
            "attention_mask": ones,
            "position_ids": tokens,
            TOKEN_TYPES: ones,
        }
        if self._has_grid:
            data[ROPE_POSITIONS] = torch.zeros(
                self.image_tokens, 3, dtype=torch.int64, device=device
            )
        return data, pixels

    def _blank(self, height: int, width: int, device: torch.device | str = "cpu") -> Batch:
        """Pixels of a black image. A grid model's has ``height * width`` tokens."""
        if not self._has_grid:
            return {_PIXELS: torch.zeros(1, *self._shape, device=device)}
        grid = [1, height * self._merge, width * self._merge]
        pixels = torch.zeros(grid[1] * grid[2], *self._shape, device=device)
        return {_PIXELS: pixels, _GRID: torch.tensor([grid], device=device)}

    def images(self, row: "MicroBatch") -> dict[str, Any]:
        """Arguments of the model's forward with the images of a row: pixels, and which tokens they
        are.
        """
        types = (
            {}
            if self._type_argument is None
            else {self._type_argument: row.data[TOKEN_TYPES][None]}
        )
        return row.pixels | types

    def inputs(self, row: "MicroBatch") -> dict[str, Any]:
        """`images` of a row of `MicroBatch.row`, with positions and masks that keep its sequences
        apart.
        """
        inputs = self.images(row)
        if self._type_argument == "token_type_ids":
            inputs["attention_mask"] = self._masks(row)
        if (
            self._has_grid
        ):  # the first of four is the position in the sequence, in which the model sees boundaries
            positions = torch.cat([row.position_ids[None], row.data[ROPE_POSITIONS].T])
            inputs["position_ids"] = positions[:, None]
        return inputs

    def _masks(self, row: "MicroBatch") -> dict[str, torch.Tensor]:
        """``[1, 1, T, T]`` bool for each kind of layer, in which the tokens of an image see each
        other (Gemma 3).

        transformers (5.23) looks the images of every sequence up in the first sequence of a packed
        row.
        """
        types, tokens = (
            row.data[TOKEN_TYPES].bool(),
            torch.arange(row.n_tokens, device=row.position_ids.device),
        )
        rows = row.rows
        starts = types & (~types.roll(1) | (rows != rows.roll(1)) | (tokens == 0))
        images = torch.where(types, starts.cumsum(0), -1)
        seen = (tokens[:, None] >= tokens) | ((images[:, None] == images) & types)
        seen &= rows[:, None] == rows
        window = getattr(self._text, "sliding_window", None) or row.n_tokens
        sliding = seen & (tokens[:, None] - tokens < window)
        return {"full_attention": seen[None, None], "sliding_attention": sliding[None, None]}

    # Test rows

    def probe(self, text: Sequence[torch.Tensor]) -> tuple[Batch, list[int]]:
        """A batch of sequences with 1, 0, 2, 1, 0, 2 ... random images, for tests of the
        architecture, and the lengths.

        ``text`` are token ids. An image comes after the first token of a sequence, another before
        the last.
        """
        generator, sizes = torch.Generator().manual_seed(0), ((1, 2), (2, 1), (2, 2))
        rows, pixels = [], []
        for number, ids in enumerate(text):
            ids = torch.where(ids == self.image_token, 0 if self.image_token else 1, ids)
            images = [self._blank(*sizes[(number + i) % 3]) for i in range((1, 0, 2)[number % 3])]
            for image in images:
                image[_PIXELS].normal_(generator=generator)
            parts = [ids[:1], ids[1:-1], ids[-1:]]
            for i, image in enumerate(images):
                n_tokens = sum(self._tokens_of_images(number, image))
                parts[i] = torch.cat([parts[i], torch.full((n_tokens,), self.image_token)])
            rows.append(torch.cat(parts))
            pixels.append(join_pixels(images))
        lengths = [len(row) for row in rows]
        batch: Any = {
            "input_ids": torch.stack([F.pad(row, (0, max(lengths) - len(row))) for row in rows]),
            "attention_mask": (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long(),
            IMAGES: pixels,
        }
        return batch, lengths


def join_pixels(pixels: Sequence[Batch]) -> Batch:
    """Concatenate the pixels of rows. Empty if no row has an image."""
    with_images = [own for own in pixels if own]
    names = with_images[0] if with_images else ()
    return {name: torch.cat([own[name] for own in with_images]) for name in names}


def vision_tower(model: PreTrainedModel) -> str:
    """Name of the outermost module that is a model of ``vision_config``."""
    kind = type(model.config.vision_config)
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and type(module.config) is kind
    ]
    return min(names, key=len)


def _tokens_of_fixed(config: PretrainedConfig) -> int | None:
    """Tokens of an image, in a model whose images all have the same number."""
    return getattr(config, "mm_tokens_per_image", None) or getattr(config, "image_seq_length", None)


def _sides(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
