"""Tell a dataset from another, in any process and on any machine.

A fingerprint is the number of samples and a digest of up to 64 of them, spread evenly from the first to the last.
It notices another dataset, another tokenizer or template, other filtering or order; an edit of a few samples among
many it may miss. It reads 64 samples, once. Nothing of it depends on ``hash()``, pickle, paths or file times; a
Hugging Face dataset's ``_fingerprint`` does (it is random after a ``map`` that cannot be hashed), so it is not used.
"""

from collections.abc import Mapping, Sized
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from ...utils.errors import ConfigError

_SAMPLES_READ = 64


class _Indexable(Sized, Protocol):
    def __getitem__(self, index: int, /) -> Any: ...


def dataset_fingerprint(dataset: _Indexable) -> str:
    """``"<n> samples, xxh3_128:<hex>"``; a dataset's own ``fingerprint`` string, if it has one, replaces the digest.

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
    for index in sorted({(count - 1) * step // (_SAMPLES_READ - 1) for step in range(_SAMPLES_READ)}):
        _feed(digest, dataset[index])
    return f"{count} samples, xxh3_128:{digest.hexdigest()}"


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
