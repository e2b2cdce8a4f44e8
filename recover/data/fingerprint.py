"""Tell a dataset from another, in any process and on any machine.

A fingerprint is the number of samples and a digest of up to 64 of them, spread evenly from the first to the last.
It notices another dataset, another tokenizer or template, other filtering or order. It may miss an edit of a few
samples among many. It reads 64 samples, once. Nothing of it depends on ``hash()``, pickle, paths or file times. A
Hugging Face dataset's ``_fingerprint`` does (it is random after a ``map`` that cannot be hashed), so it is not used.

`probe_dataset` does this for datasets of any kind, which may draw random numbers when a sample is read.
"""

import random
from collections.abc import Mapping, Sized
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch.utils.data import TensorDataset

from ...utils.errors import ConfigError
from ...utils.logging import get_logger
from ...utils.rng import capture_rng, restore_rng
from .epoch_order import draws_of, restore_draws

logger = get_logger(__name__)

_SAMPLES_READ = 64
_SAMPLES_PROBED = 8


class _Indexable(Sized, Protocol):
    def __getitem__(self, index: int, /) -> Any: ...


def dataset_fingerprint(dataset: _Indexable, samples_read: int = _SAMPLES_READ) -> str:
    """``"<n> samples, xxh3_128:<hex>"``; a dataset's own ``fingerprint`` string, if it has one, replaces the digest.

    Args:
        dataset: map-style.
        samples_read: samples that the digest is made from, at least 2.

    Raises:
        ConfigError: the dataset is empty, or a sample holds something without canonical bytes, such as an image
            object; such a dataset needs a ``fingerprint`` attribute.
    """
    count = len(dataset)
    if not count:
        raise ConfigError("the dataset is empty; expected at least one sample")
    own = getattr(dataset, "fingerprint", None)
    if isinstance(own, str):
        return f"{count} samples, {own}"
    digest = xxhash.xxh3_128()
    for index in sorted({(count - 1) * step // (samples_read - 1) for step in range(samples_read)}):
        _feed(digest, dataset[index])
    return f"{count} samples, xxh3_128:{digest.hexdigest()}"


def probe_dataset(dataset: Any, n_workers: int = 0) -> str:
    """The fingerprint of up to 8 samples, or "" with a warning if it would not be the same in another process.

    The samples are read twice, both times with the process's generators in one fixed state, so that an augmentation
    that draws from them counts as the same sample. If the two readings differ, the dataset draws from elsewhere. The
    generators of the process and of the dataset's attributes are put back.

    Args:
        dataset: map-style, of any kind.
        n_workers: worker processes that read the samples. With workers, only datasets that hold no open files are
            read here, since a forked worker shares a file that its parent has opened.
    """
    try:
        if isinstance(getattr(dataset, "fingerprint", None), str):
            return dataset_fingerprint(dataset)
        if n_workers and not _holds_no_files(dataset):
            reason = f"it is read in {n_workers} worker processes only"
        else:
            readings = _read_twice(dataset)
            if len(readings) == 1:
                return readings.pop()
            reason = "two readings of a sample differ"
    except Exception as error:  # whatever a user's dataset raises, which may take other indices than numbers
        reason = f"{type(error).__name__}: {error}"
    logger.warning(
        "a resumed run cannot see whether its %s has the samples of the run in the same order (%s): make sure that it "
        "does, or give it a `fingerprint` attribute, a string that changes with its contents",
        type(dataset).__name__, reason,
    )  # fmt: skip
    return ""


def _read_twice(dataset: Any) -> set[str]:
    before, draws, readings = capture_rng(), draws_of(dataset), set()
    try:
        for _ in range(2):
            random.seed(0)
            np.random.seed(0)
            torch.default_generator.manual_seed(0)  # torch.manual_seed would seed CUDA too, also where it is not used
            readings.add(dataset_fingerprint(dataset, _SAMPLES_PROBED))
    finally:
        restore_rng(before)
        restore_draws(dataset, draws)
    return readings


def _holds_no_files(dataset: Any) -> bool:
    return isinstance(dataset, list | tuple | range | TensorDataset) or type(dataset).__module__.startswith("datasets.")


def _feed(digest: xxhash.xxh3_128, value: Any) -> None:
    """Hash ``value`` as a tag with its type and size, then its contents, so that no two values read the same."""
    match value:
        case np.ndarray() | np.generic() if value.dtype != object:
            _feed_bytes(digest, f"numpy.{value.dtype}{list(value.shape)}", value.tobytes())
        case None | bool() | int() | float() | str():
            _feed_bytes(digest, type(value).__name__, repr(value).encode())
        case bytes():
            _feed_bytes(digest, "bytes", value)
        case torch.Tensor():
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            _feed_bytes(digest, f"{value.dtype}{list(value.shape)}", flat.numpy().tobytes())
        case Mapping():
            _feed_bytes(digest, "mapping", str(len(value)).encode())
            for key in sorted(value, key=repr):
                _feed(digest, key)
                _feed(digest, value[key])
        case list() | tuple():
            _feed_bytes(digest, "sequence", str(len(value)).encode())
            for item in value:
                _feed(digest, item)
        case _ if is_dataclass(value) and not isinstance(value, type):
            _feed(digest, {field.name: getattr(value, field.name) for field in fields(value)})
        case _:
            raise ConfigError(
                f"a sample of the dataset holds a {type(value).__module__}.{type(value).__qualname__}, which has no "
                f"canonical bytes; give the dataset a `fingerprint` attribute, a string that changes with its contents"
            )


def _feed_bytes(digest: xxhash.xxh3_128, tag: str, data: bytes) -> None:
    digest.update(f"{tag}:{len(data)}:".encode())
    digest.update(data)
