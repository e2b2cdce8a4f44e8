"""Padded batches: checks, selected rows, and lists of trajectories as AReaL's workflows return
them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...utils.errors import BatchError
from ..api import Batch, Trajectories

IMAGES = "multi_modal_input"
"""The one entry of a batch that is not a tensor: a list with a dict of tensors for each row, empty
without images.
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


def map_tensors(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Apply ``change`` to every tensor of a batch, also to its pixels."""
    result, images = (
        {key: change(tensor) for key, tensor in batch.items() if key != IMAGES},
        images_of(batch),
    )
    changed = (
        None
        if images is None
        else [{key: change(value) for key, value in own.items()} for own in images]
    )
    return with_images(result, changed)


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

    Raises:
        BatchError: the list is empty, an entry is not a dict of tensors, or keys, dtypes or numbers
            of dimensions differ. The message names the first difference.
    """
    if isinstance(batch, dict):
        return batch
    _check_alike(batch)
    joined = {
        key: _join([trajectory[key] for trajectory in batch]) for key in batch[0] if key != IMAGES
    }
    return with_images(joined, join_images(batch))


def join_images(batch: Sequence[Batch]) -> list[Batch] | None:
    """`IMAGES` of all trajectories, in order. None if they have none."""
    given = [images_of(trajectory) for trajectory in batch]
    return None if given[0] is None else [own for images in given for own in images or ()]


def split_like(result: torch.Tensor, batch: Sequence[Batch]) -> list[torch.Tensor]:
    """Split ``[B, S]`` results of a joined batch into ``[b, s]`` for each trajectory."""
    parts = result.split([len(trajectory["input_ids"]) for trajectory in batch])
    return [
        part[:, : trajectory["input_ids"].shape[1]]
        for part, trajectory in zip(parts, batch, strict=True)
    ]


def _check_alike(batch: Sequence[Batch]) -> None:
    if not batch:
        raise BatchError("the list of trajectories is empty")
    for i, trajectory in enumerate(batch):
        if not isinstance(trajectory, dict):
            raise BatchError(
                f"trajectory {i} is a {type(trajectory).__name__}; expected a dict of tensors"
            )
        if (found := trajectory.keys()) != batch[0].keys():
            raise BatchError(
                f"trajectory {i} has the keys {sorted(found)}, the first one {sorted(batch[0])}"
            )
        _validate_images(trajectory, f"trajectory {i}: {IMAGES!r}")
        for key, value in with_images(trajectory, None).items():
            if not isinstance(value, torch.Tensor):
                raise BatchError(
                    f"trajectory {i}: {key!r} is a {type(value).__name__}; expected a torch.Tensor"
                )
            first = batch[0][key]
            if value.dim() == 0 or (value.dim(), value.dtype) != (first.dim(), first.dtype):
                raise BatchError(
                    f"trajectory {i}: {key!r} is {value.dtype} of shape {list(value.shape)}, that "
                    f"of the first one {first.dtype} of {list(first.shape)}; expected [b], or [b, "
                    "s] and more, and one dtype"
                )
            if value.shape[2:] != first.shape[2:]:
                raise BatchError(
                    f"trajectory {i}: {key!r} is of shape {list(value.shape)}, not "
                    f"{list(first.shape)}"
                )


def _join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if tensors[0].dim() == 1:
        return torch.cat(list(tensors))
    longest = max(tensor.shape[1] for tensor in tensors)
    behind = (0, 0) * (tensors[0].dim() - 2)
    return torch.cat([F.pad(tensor, (*behind, 0, longest - tensor.shape[1])) for tensor in tensors])


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def validate_batch(batch: Batch) -> None:
    """Check that a batch can be packed.

    Raises:
        BatchError: the message names the key and the rows. Possible reasons:
            - ``input_ids`` or ``attention_mask`` is missing, not ``[B, S]``, empty, or has a wrong
              dtype.
            - A row of the mask has no token, or is not ones followed by zeros.
            - Another entry is not a tensor, or is neither ``[B, S, ...]`` nor ``[B]``.
            - `IMAGES` is not a list with a dict of tensors for each row.
    """
    for key in ("input_ids", "attention_mask"):
        if key not in batch:
            raise BatchError(f"the batch has no {key!r}; it has {sorted(batch)}")
    _validate_images(batch, f"batch[{IMAGES!r}]")
    batch = with_images(batch, None)
    for key, tensor in batch.items():
        if not isinstance(tensor, torch.Tensor):
            raise BatchError(
                f"batch[{key!r}] is a {type(tensor).__name__}; expected a torch.Tensor"
            )
    input_ids, mask = batch["input_ids"], batch["attention_mask"]
    if input_ids.dim() != 2:
        raise BatchError(
            f"batch['input_ids'] has shape {list(input_ids.shape)}; expected [batch, seqlen]"
        )
    if input_ids.dtype not in _INTEGERS:
        raise BatchError(
            f"batch['input_ids'] has dtype {input_ids.dtype}; expected token ids of an integer "
            "dtype"
        )
    if input_ids.numel() == 0:
        raise BatchError(
            f"the batch is empty: batch['input_ids'] has shape {list(input_ids.shape)}"
        )
    if mask.shape != input_ids.shape:
        raise BatchError(
            f"batch['attention_mask'] has shape {list(mask.shape)}, input_ids "
            f"{list(input_ids.shape)}"
        )
    for key, tensor in batch.items():
        if tensor.shape != input_ids.shape[:1] and tensor.shape[:2] != input_ids.shape:
            expected = (
                f"{list(input_ids.shape)} (per token) or {list(input_ids.shape[:1])} (per sequence)"
            )
            raise BatchError(f"batch[{key!r}] has shape {list(tensor.shape)}; expected {expected}")
    _validate_mask(mask)


def _validate_images(batch: Batch, what: str) -> None:
    images: Any = batch.get(IMAGES)
    if images is None or "input_ids" not in batch:  # which is an error of its own
        return
    if not isinstance(images, list) or len(images) != len(batch["input_ids"]):
        found = (
            f"{len(images)} entries" if isinstance(images, list) else f"a {type(images).__name__}"
        )
        raise BatchError(
            f"{what} is {found}; expected a list with one dict for each of "
            f"{len(batch['input_ids'])} rows"
        )
    for row, own in enumerate(images):
        if not isinstance(own, dict) or not all(
            isinstance(value, torch.Tensor) for value in own.values()
        ):
            raise BatchError(
                f"{what}[{row}] is no dict of tensors: {type(own).__name__}; expected {{}} "
                "without images"
            )


def _validate_mask(mask: torch.Tensor) -> None:
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise BatchError("batch['attention_mask'] holds values other than 0 and 1")
    mask = mask.bool()
    if bool((empty := ~mask.any(dim=1)).any()):
        raise BatchError(
            f"row(s) {_rows(empty)} have no token: batch['attention_mask'] is all zeros there"
        )
    if bool((ragged := (mask[:, 1:] & ~mask[:, :-1]).any(dim=1)).any()):
        raise BatchError(
            f"row(s) {_rows(ragged)} are not right-padded: each row of batch['attention_mask'] "
            "must be ones, then zeros"
        )


def refuse_unknown_tokens(batch: Batch, n_known: int, image_token: int | None = None) -> None:
    """Raise BatchError if a token of a valid batch is none of the first ``n_known`` and no
    ``image_token``.

    An embedding would raise an IndexError for it, on a GPU lose the process's devices, and in parts
    of several ranks take zeros without a word. Padding may have any id. Waits for the device of the
    batch, as `validate_batch` does.
    """
    ids, mask = batch["input_ids"].long(), batch["attention_mask"].bool()
    unknown = mask & ((ids < 0) | (ids >= n_known))
    if image_token is not None:  # some models replace it before the embedding
        unknown &= ids != image_token
    if bool(unknown.any()):
        places = unknown.nonzero().tolist()
        row, position = places[0]
        raise BatchError(
            f"token {position} of row {row} of the batch has id {int(ids[row, position])} "
            f"({len(places)} such); expected 0 to {n_known - 1}, because the model's embedding "
            f"has {n_known} rows; tokenize with the model's own tokenizer"
        )


def _rows(flags: torch.Tensor) -> str:
    rows = flags.nonzero().flatten().tolist()
    return ", ".join(map(str, rows[:8])) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")


def sequence_lengths(batch: Batch) -> list[int]:
    """Number of tokens in each row of a padded batch."""
    return batch["attention_mask"].bool().sum(dim=1).tolist()


def select_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Select rows of a padded batch, cut to the longest selected row."""
    index = torch.tensor(rows, dtype=torch.int64, device=batch["input_ids"].device)
    longest = max(int(batch["attention_mask"][index].bool().sum(dim=1).max()), 1)
    picked = {key: tensor[index] for key, tensor in with_images(batch, None).items()}
    picked = {
        key: tensor[:, :longest] if tensor.dim() >= 2 else tensor for key, tensor in picked.items()
    }
    images = images_of(batch)
    return with_images(picked, None if images is None else [images[row] for row in rows])
