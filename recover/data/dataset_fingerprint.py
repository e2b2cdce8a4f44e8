"""Recognise a dataset in any process and on any machine.

A fingerprint is the number of samples and a digest of up to 64 samples, spread evenly from the
first to the last. It detects another dataset, tokenizer, template, filter or order. It may miss an
edit of a few samples among many. It does not depend on ``hash()``, pickle, paths or file times.
Hugging Face's ``_fingerprint`` does (it is random after a ``map`` that cannot be hashed), so it is
not used.
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
from .samplers import draws_of, restore_draws

logger = get_logger(__name__)

_SAMPLES_READ = 64
_SAMPLES_PROBED = 8


class MapDataset(Sized, Protocol):
    """A dataset with a length and samples by index: a list, a torch dataset or a Hugging Face
    dataset.
    """

    def __getitem__(self, index: int, /) -> Any:
        """Sample at ``index``."""
        ...


def dataset_fingerprint(dataset: MapDataset, samples_read: int = _SAMPLES_READ) -> str:
    """Fingerprint of a dataset: ``"<n> samples, xxh3_128:<hex>"``.

    If the dataset has a string attribute ``fingerprint``, that replaces the digest.

    Raises:
        ConfigError: the dataset is empty, or a sample has no canonical bytes, for example an image
            object. Such a dataset needs a ``fingerprint`` attribute.
    """
    count = len(dataset)
    if not count:
        raise ConfigError("the dataset is empty; expected at least one sample")
    own = getattr(dataset, "fingerprint", None)
    if isinstance(own, str):
        return f"{count} samples, {own}"
    # Evenly from the first to the last. A small dataset has fewer.
    spread = {(count - 1) * step // (samples_read - 1) for step in range(samples_read)}
    digest = xxhash.xxh3_128()
    for index in sorted(spread):
        _feed(digest, dataset[index])
    return f"{count} samples, xxh3_128:{digest.hexdigest()}"


def sample_digest(sample: Any) -> str:
    """Digest of one sample or batch. Raises ConfigError if it holds an object without canonical
    bytes.
    """
    digest = xxhash.xxh3_128()
    _feed(digest, sample)
    return digest.hexdigest()


def probe_dataset(dataset: Any, n_workers: int) -> str:
    """Fingerprint of up to 8 samples. Returns "" with a warning if it would differ in another
    process.

    The samples are read twice, both times with the same state of the process's generators, so that
    an augmentation that draws from them gives the same sample. If the two readings differ, the
    dataset draws from elsewhere. All generators of the process and of the dataset's attributes are
    restored afterwards. With workers, only datasets without open files are read here, because a
    forked worker shares the open files of its parent.
    """
    # The user's dataset may raise anything, and may not even be indexed by numbers.
    try:
        if isinstance(getattr(dataset, "fingerprint", None), str):
            return dataset_fingerprint(dataset)
        # A worker that is forked later would share an open file, and its position.
        holds_no_files = isinstance(dataset, list | tuple | range | TensorDataset)
        if n_workers and not (holds_no_files or type(dataset).__module__.startswith("datasets.")):
            reason = f"it is read in {n_workers} worker processes only"
        else:
            readings = _read_twice(dataset)
            if len(readings) == 1:
                return readings.pop()
            reason = "two readings of a sample differ"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    logger.warning(
        "a resumed run cannot see whether its %s has the samples of the run in the same order "
        "(%s): make sure that it does, or give it a `fingerprint` attribute, a string that "
        "changes with its contents",
        type(dataset).__name__,
        reason,
    )
    return ""


def _read_twice(dataset: Any) -> set[str]:
    generators = capture_rng()
    draws = draws_of(dataset)
    readings = set()
    try:
        for _ in range(2):
            random.seed(0)
            np.random.seed(0)
            # torch.manual_seed would seed CUDA too, even if it is unused.
            torch.default_generator.manual_seed(0)
            readings.add(dataset_fingerprint(dataset, _SAMPLES_PROBED))
    finally:
        restore_rng(generators)
        restore_draws(dataset, draws)
    return readings


def _feed(digest: xxhash.xxh3_128, value: Any) -> None:
    """Hash a tag with the type and size of ``value``, then its contents, so that different values
    differ in bytes.
    """
    match value:
        case np.ndarray() | np.generic() if value.dtype != object:
            _feed_bytes(digest, f"numpy.{value.dtype}{list(value.shape)}", value.tobytes())
        case None | bool() | int() | float() | str():
            _feed_bytes(digest, type(value).__name__, repr(value).encode())
        case bytes():
            _feed_bytes(digest, "bytes", value)
        case torch.Tensor():
            flat = value.detach().cpu().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().tobytes()
            _feed_bytes(digest, f"{value.dtype}{list(value.shape)}", data)
        # Sorted by the text of the keys, because they may not be comparable.
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
            contents = {field.name: getattr(value, field.name) for field in fields(value)}
            _feed(digest, contents)
        case _:
            raise ConfigError(
                "a sample of the dataset holds a "
                f"{type(value).__module__}.{type(value).__qualname__}, which has no canonical "
                "bytes; give the dataset a `fingerprint` attribute, a string that changes with "
                "its contents"
            )


def _feed_bytes(digest: xxhash.xxh3_128, tag: str, data: bytes) -> None:
    digest.update(f"{tag}:{len(data)}:".encode())
    digest.update(data)
