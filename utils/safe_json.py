"""Plain Python values as JSON in a uint8 tensor, so that tensor files can hold them without pickle.

JSON keeps every bit of a float. Tuples, and dicts with other keys than strings, are tagged. Values that would change
are refused when they are packed. The text is padded with spaces, so that its size is stable when a digit is added.
"""

import json
from collections import Counter, OrderedDict
from typing import Any

import torch

from .errors import CheckpointCorruptError, ConfigError

_JSON_BLOCK_BYTES = 4096
_TAG = "__type__"
_TAGGED = {kind.__name__: kind for kind in (dict, tuple, Counter, OrderedDict)}


def encode_plain(value: Any, name: str) -> Any:
    """Convert ``value`` to JSON types, so that `decode_plain` returns an equal value of the same container types.

    Raises:
        ConfigError: ``value`` holds something other than numbers, strings, lists, tuples and dicts. The message calls
            it ``name``.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value)
    if kind is list:
        return [encode_plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if kind is dict and _TAG not in value and all(isinstance(key, str) for key in value):
        return {key: encode_plain(item, f"{name}.{key}") for key, item in value.items()}
    if kind in _TAGGED.values():
        items = list(value) if kind is tuple else [[key, item] for key, item in value.items()]
        return {_TAG: kind.__name__, "items": encode_plain(items, name)}
    raise ConfigError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; expected numbers, "
        "strings, lists, tuples and dicts of them"
    )


def decode_plain(value: Any) -> Any:
    """Reverse `encode_plain`."""
    if isinstance(value, list):
        return [decode_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode_plain(item) for key, item in value.items()}
    kind, items = _TAGGED[value[_TAG]], decode_plain(value["items"])
    return tuple(items) if kind is tuple else kind(dict(items))


def pack_json(value: Any, name: str) -> torch.Tensor:
    """Encode ``value`` as JSON text in a ``[n]`` uint8 tensor, padded with spaces to a multiple of 4096.

    Raises:
        ConfigError: as `encode_plain`.
    """
    data = json.dumps(encode_plain(value, name)).encode()
    return torch.frombuffer(
        bytearray(data.ljust(-(-len(data) // _JSON_BLOCK_BYTES) * _JSON_BLOCK_BYTES)), dtype=torch.uint8
    )


def unpack_json(tensor: torch.Tensor, name: str) -> Any:
    """Reverse `pack_json`.

    Raises:
        CheckpointCorruptError: ``tensor`` does not hold such a value.
    """
    try:
        return decode_plain(json.loads(tensor.cpu().numpy().tobytes()))
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointCorruptError(f"{name} is not JSON as a checkpoint has it: {error}") from error
