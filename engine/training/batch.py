"""Padded batches: checks, selected rows, and lists of trajectories as AReaL's workflows return
them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...utils.errors import BatchError
from ..api import Batch, Trajectories

IMAGES = "multi_modal_input"
"""The one entry of a batch that is not a tensor: a list with a dict of tensors for each row, empty
without images.
"""
TOKEN_TYPES = "mm_token_type_ids"
"""Per-token entry of a batch: 1 for tokens of an image, else 0."""
ROPE_POSITIONS = "rope_position_ids"
"""Per-token entry ``[..., 3]``: temporal, vertical and horizontal position of a token. Only in grid
models.
"""
ROUTES = "routed_experts"
"""Per-token entry ``[..., layers, k]`` of uint8 or int16: the experts that a server took for a
token as an *input*, in each decoder layer. All other entries describe the token as an output. k
entries that are not all different, such as zeros, are no choice. Dense layers have zeros. ``[...,
0, 0]``: no token has a choice.
"""


def images_of(batch: Batch) -> list[Batch] | None:
    """Pixels of each row, or None if the batch has no `IMAGES`."""
    found: Any = batch.get(IMAGES)
    return found


def refuse_images(batch: Batch) -> None:
    """Raise BatchError if a batch for a model of text has images."""
    if images_of(batch) is not None:
        raise BatchError(
            f"the batch has {IMAGES!r}, but config key 'train_vision' is false, so that the model "
            "has no use for images; set it to true, or give a batch of text"
        )


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Apply ``change`` to every tensor of a batch, also to its pixels."""

    def changed(tensors: Batch) -> Batch:
        return {key: change(tensor) for key, tensor in tensors.items()}

    result = changed(with_images(batch, None))
    images = images_of(batch)
    if images is None:
        return result
    return with_images(result, [changed(own) for own in images])


def with_images(batch: Batch, images: Sequence[Batch] | None) -> Batch:
    """The batch with other `IMAGES`. None: without any."""
    found: dict[str, Any] = {key: tensor for key, tensor in batch.items() if key != IMAGES}
    if images is not None:
        found[IMAGES] = list(images)
    return found


def join_trajectories(batch: Trajectories) -> Batch:
    """Join a list of trajectories into one padded batch, in order. A batch is returned unchanged.

    Every trajectory has tensors ``[b, s]`` or ``[b, s, ...]`` (per token) and ``[b]`` (per
    sequence), with its own b and s. Per-token tensors are padded with zeros to the longest s.
    Trajectories whose `ROUTES` are ``[b, s, 0, 0]`` may stand beside others, see `fill_routes`.

    Raises:
        BatchError: the list is empty, an entry is not a dict of tensors, or keys, dtypes or numbers
            of dimensions differ. The message names the first difference.
    """
    if isinstance(batch, dict):
        return batch
    # All have the keys of the first one.
    _check_keys(batch)
    batch = fill_routes(batch)
    _check_alike(batch)
    joined = {}
    for key in with_images(batch[0], None):
        joined[key] = _join([trajectory[key] for trajectory in batch])
    return with_images(joined, join_images(batch))


def fill_routes(batch: Sequence[Batch]) -> Sequence[Batch]:
    """Give trajectories without `ROUTES`, or with empty ones, zeros of the layers, k and dtype of
    the others, so that the model routes their tokens. BatchError if the others differ.
    """
    routes = [trajectory[ROUTES] for trajectory in batch if ROUTES in trajectory]
    if not routes:
        return batch
    largest = max(routes, key=Tensor.numel)
    return [_with_routes_like(largest, trajectory) for trajectory in batch]


def _with_routes_like(others: Tensor, trajectory: Batch) -> Batch:
    of_token = others.shape[2:]
    own = trajectory.get(ROUTES)

    # No token has a choice.
    if own is None or own.numel() == 0:
        shape = trajectory["input_ids"].shape if own is None else own.shape[:2]
        zeros = others.new_zeros((*shape, *of_token))
        return {**trajectory, ROUTES: zeros}

    if own.shape[2:] != of_token:
        raise BatchError(
            f"the trajectories of a batch have {ROUTES!r} of shapes {list(own.shape)} and "
            f"{list(others.shape)}; expected the same decoder layers and experts of a token "
            "([..., layers, k]). Do all servers have the same model?"
        )
    return trajectory


def join_images(batch: Sequence[Batch]) -> list[Batch] | None:
    """`IMAGES` of all trajectories, in order. None if they have none."""
    given = [images_of(trajectory) for trajectory in batch]
    if given[0] is None:
        return None
    return [own for images in given for own in images or ()]


def join_pixels(pixels: Sequence[Batch]) -> Batch:
    """Concatenate the pixels of rows. Empty if no row has an image."""
    filled = [own for own in pixels if own]
    if not filled:
        return {}
    return {name: torch.cat([own[name] for own in filled]) for name in filled[0]}


def split_like(result: Tensor, batch: Sequence[Batch]) -> list[Tensor]:
    """Split ``[B, S]`` results of a joined batch into ``[b, s]`` for each trajectory."""
    parts = result.split([len(trajectory["input_ids"]) for trajectory in batch])
    split = []
    for part, trajectory in zip(parts, batch, strict=True):
        seqlen = trajectory["input_ids"].shape[1]
        split.append(part[:, :seqlen])
    return split


def _check_keys(batch: Sequence[Batch]) -> None:
    if not batch:
        raise BatchError("the list of trajectories is empty")
    first = batch[0]
    for i, trajectory in enumerate(batch):
        if not isinstance(trajectory, dict):
            raise BatchError(
                f"trajectory {i} is a {type(trajectory).__name__}; expected a dict of tensors"
            )
        if trajectory.keys() != first.keys():
            raise BatchError(
                f"trajectory {i} has the keys {sorted(trajectory)}, the first one {sorted(first)}"
            )
        _validate_images(trajectory, f"trajectory {i}: {IMAGES!r}")
        for key, value in with_images(trajectory, None).items():
            if not isinstance(value, Tensor):
                raise BatchError(
                    f"trajectory {i}: {key!r} is a {type(value).__name__}; expected a torch.Tensor"
                )


def _check_alike(batch: Sequence[Batch]) -> None:
    first = batch[0]
    for i, trajectory in enumerate(batch):
        for key, value in with_images(trajectory, None).items():
            _check_entry(f"trajectory {i}: {key!r}", value, first[key])


def _check_entry(
    what: str,
    value: Tensor,
    first: Tensor,
) -> None:
    # b and s differ between trajectories, nothing else.
    same_kind = value.dim() == first.dim() and value.dtype == first.dtype
    if value.dim() == 0 or not same_kind:
        raise BatchError(
            f"{what} is {value.dtype} of shape {list(value.shape)}, that "
            f"of the first one {first.dtype} of {list(first.shape)}; expected [b], or [b, "
            "s] and more, and one dtype"
        )
    if value.shape[2:] != first.shape[2:]:
        raise BatchError(f"{what} is of shape {list(value.shape)}, not {list(first.shape)}")


def _join(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    if first.dim() == 1:
        return torch.cat(list(tensors))

    # `F.pad` takes a pair for each dimension, the last one first.
    longest = max(tensor.shape[1] for tensor in tensors)
    behind = (0, 0) * (first.dim() - 2)
    padded = []
    for tensor in tensors:
        n_more = longest - tensor.shape[1]
        padded.append(F.pad(tensor, (*behind, 0, n_more)))
    return torch.cat(padded)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def validate_batch(batch: Batch) -> None:
    """Check that a batch can be packed.

    Raises:
        BatchError: the message names the key and the rows. Possible reasons:
            - ``input_ids`` or ``attention_mask`` is missing, not ``[B, S]``, empty, or has a wrong
              dtype.
            - ``loss_mask`` or `TOKEN_TYPES` is not ``[B, S]``.
            - A row of the mask has no token, or is not ones followed by zeros.
            - Another entry is not a tensor, or is neither ``[B, S, ...]`` nor ``[B]``.
            - `IMAGES` is not a list with a dict of tensors for each row.
            - It is a list of trajectories.
    """
    if not isinstance(batch, dict):
        raise BatchError(
            f"the batch is a {type(batch).__name__}; expected a dict of tensors. Make one of a "
            "list of trajectories with holdfast.engine.rollouts.concat_trajectories"
        )
    for key in ("input_ids", "attention_mask"):
        if key not in batch:
            raise BatchError(f"the batch has no {key!r}; it has {sorted(batch)}")
    _validate_images(batch, f"batch[{IMAGES!r}]")
    tensors = with_images(batch, None)
    for key, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise BatchError(
                f"batch[{key!r}] is a {type(tensor).__name__}; expected a torch.Tensor"
            )

    # Tokens come first, because all other shapes are compared with theirs.
    input_ids = batch["input_ids"]
    shape = input_ids.shape
    if input_ids.dim() != 2:
        raise BatchError(f"batch['input_ids'] has shape {list(shape)}; expected [batch, seqlen]")
    if input_ids.dtype not in _INTEGERS:
        raise BatchError(
            f"batch['input_ids'] has dtype {input_ids.dtype}; expected token ids of an integer "
            "dtype"
        )
    if input_ids.numel() == 0:
        raise BatchError(f"the batch is empty: batch['input_ids'] has shape {list(shape)}")

    require_shape_per_token(batch, ("attention_mask", "loss_mask", TOKEN_TYPES))
    for key, tensor in tensors.items():
        # More dimensions may follow those of a token.
        is_per_sequence = tensor.shape == shape[:1]
        is_per_token = tensor.shape[:2] == shape
        if not is_per_sequence and not is_per_token:
            expected = f"{list(shape)} (per token) or {list(shape[:1])} (per sequence)"
            raise BatchError(f"batch[{key!r}] has shape {list(tensor.shape)}; expected {expected}")
    _validate_mask(batch["attention_mask"])


def require_shape_per_token(batch: Batch, keys: Iterable[str]) -> None:
    """Raise BatchError if one of these entries is there, but not ``[B, S]``."""
    expected = batch["input_ids"].shape
    for key in keys:
        if key in batch and batch[key].shape != expected:
            raise BatchError(
                f"batch[{key!r}] has shape {list(batch[key].shape)}; expected {list(expected)}, "
                "per token"
            )


def _validate_images(batch: Batch, what: str) -> None:
    images: Any = batch.get(IMAGES)
    # A batch without tokens is an error of its own.
    if images is None or "input_ids" not in batch:
        return
    n_rows = len(batch["input_ids"])
    is_list = isinstance(images, list)
    if not is_list or len(images) != n_rows:
        found = f"{len(images)} entries" if is_list else f"a {type(images).__name__}"
        raise BatchError(
            f"{what} is {found}; expected a list with one dict for each of {n_rows} rows"
        )
    for row, own in enumerate(images):
        is_dict = isinstance(own, dict)
        if not is_dict or not all(isinstance(value, Tensor) for value in own.values()):
            raise BatchError(
                f"{what}[{row}] is no dict of tensors: {type(own).__name__}; expected {{}} "
                "without images"
            )


def _validate_mask(mask: Tensor) -> None:
    is_known = (mask == 0) | (mask == 1)
    if not bool(is_known.all()):
        raise BatchError("batch['attention_mask'] holds values other than 0 and 1")
    mask = mask.bool()
    is_empty = ~mask.any(dim=1)
    if bool(is_empty.any()):
        raise BatchError(
            f"row(s) {_rows(is_empty)} have no token: batch['attention_mask'] is all zeros there"
        )
    # A token right after padding.
    returns = mask[:, 1:] & ~mask[:, :-1]
    is_ragged = returns.any(dim=1)
    if bool(is_ragged.any()):
        raise BatchError(
            f"row(s) {_rows(is_ragged)} are not right-padded: each row of batch['attention_mask'] "
            "must be ones, then zeros"
        )


def refuse_unknown_tokens(
    batch: Batch,
    n_known: int,
    image_token: int | None = None,
) -> None:
    """Raise BatchError if a token of a valid batch is none of the first ``n_known`` and no
    ``image_token``.

    An embedding would raise an IndexError for it, on a GPU lose the process's devices, and in parts
    of several ranks take zeros without a word. Padding may have any id. Waits for the device of the
    batch, as `validate_batch` does.
    """
    ids = batch["input_ids"].long()
    mask = batch["attention_mask"].bool()
    is_outside = (ids < 0) | (ids >= n_known)
    is_unknown = mask & is_outside
    # Some models replace the image token before the embedding.
    if image_token is not None:
        is_unknown &= ids != image_token
    if not bool(is_unknown.any()):
        return
    places = is_unknown.nonzero().tolist()
    # The first one is named.
    row, position = places[0]
    raise BatchError(
        f"token {position} of row {row} of the batch has id {int(ids[row, position])} "
        f"({len(places)} such); expected 0 to {n_known - 1}, because the model's embedding "
        f"has {n_known} rows; tokenize with the model's own tokenizer"
    )


def _rows(flags: Tensor) -> str:
    rows = flags.nonzero().flatten().tolist()
    named = ", ".join(map(str, rows[:8]))
    if len(rows) <= 8:
        return named
    return f"{named} and {len(rows) - 8} more"


def sequence_lengths(batch: Batch) -> list[int]:
    """Number of tokens in each row of a padded batch."""
    return batch["attention_mask"].bool().sum(dim=1).tolist()


def select_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Select rows of a padded batch, cut to the longest selected row."""
    # Padding beyond the longest selected row is left out.
    index = torch.tensor(rows, dtype=torch.int64, device=batch["input_ids"].device)
    lengths = batch["attention_mask"][index].bool().sum(dim=1)
    longest = max(int(lengths.max()), 1)
    picked = {}
    for key, tensor in with_images(batch, None).items():
        own = tensor[index]
        picked[key] = own[:, :longest] if own.dim() >= 2 else own

    images = images_of(batch)
    if images is None:
        return picked
    return with_images(picked, [images[row] for row in rows])
