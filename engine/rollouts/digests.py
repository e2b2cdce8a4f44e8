"""Digests of requests and calls. Two requests are the same if their digests are, also in another
process.
"""

import io
import json
import pickle
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import xxhash
from torch import Tensor

from ...utils.errors import ConfigError
from ..servers.api import ModelRequest
from ..servers.prompts import require_known, shown_prompt

_END_OF_IDS = 2**32  # each id is stored in four bytes


def request_digest(request: ModelRequest) -> str:
    """Digest of everything that a server samples from: token ids, parameters, an explicit seed, and
    images. And of the routed experts that are asked for.

    It leaves out ``rid``, ``metadata``, and ``gconfig.n_samples``, which no server gets. Raises
    PromptError if an id is no integer from 0 on.
    """
    parameters = asdict(request.gconfig)
    del parameters["n_samples"]
    try:
        ids = array("I", request.input_ids)
    except (OverflowError, TypeError):
        require_known(request.input_ids, shown_prompt(request), "token ids", _END_OF_IDS)
        raise
    head: dict[str, Any] = {
        "parameters": parameters,
        "seed": request.seed,
        "length": len(ids),
    }
    if request.routes_from is not None:
        head["routes_from"] = request.routes_from
    images = request.images
    if images is not None:
        head["images"] = [xxhash.xxh3_128_hexdigest(file) for file in images.files]
        head["forbidden"] = list(images.forbidden)
        head["shown"] = len(images.token_ids)
        ids.extend(images.token_ids)

    # The head has the number of ids of each kind, so that no two requests give the same bytes.
    digest = xxhash.xxh3_128()
    digest.update(json.dumps(head).encode())
    digest.update(ids.tobytes())
    return digest.hexdigest()


def call_digest(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> str:
    """Digest of the function's name and its arguments. Raises errors of pickle, and ConfigError if
    the function has no name.
    """
    name = getattr(fn, "__qualname__", None)
    if name is not None and name.endswith("<lambda>"):
        raise ConfigError(
            "it is a lambda, and a call is known by the name of its function and its arguments. "
            "Give call a function with a name, and pass what it needs as arguments"
        )
    if name is None:
        # such as a partial, which is known by its parts
        function = fn
    else:
        function = f"{fn.__module__}.{name}"
    return _digest([function, tuple(args), dict(kwargs)])


def _digest(value: Any) -> str:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return xxhash.xxh3_128_hexdigest(buffer.getbuffer())


class _Pickler(pickle.Pickler):
    """Writes equal values alike in every process.

    Without its memo (``fast``), pickle does not show which objects are shared. The order of a set
    depends on the process, so its items are sorted. Pickled tensors name an address, so their bytes
    are taken. Lists of token ids are packed, because they are long.
    """

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=5)
        self.fast = True

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is list:
            return _packed_ids(obj)
        if kind is set or kind is frozenset:
            return kind.__name__, sorted(map(_digest, obj))
        if isinstance(obj, Tensor):
            return _packed_tensor(obj)
        return None


def _packed_ids(values: list[Any]) -> tuple[str, bytes] | None:
    if not values or type(values[0]) is not int:
        return None
    try:
        return "ids", array("q", values).tobytes()
    except (TypeError, OverflowError):
        # a list of other things too
        return None


def _packed_tensor(tensor: Tensor) -> tuple[str, str, tuple[int, ...], bytes]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes()
    return "tensor", str(tensor.dtype), tuple(tensor.shape), data
