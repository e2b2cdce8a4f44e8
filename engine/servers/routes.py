"""Experts that a server of a mixture-of-experts model chose, as its answers have them.

Both kinds of servers return ``[prompt + answer - 1 - start, decoder layers, k]``: row t is of the
input token ``start + t``, so the last sampled token has none. Dense layers are zeros. vLLM sends a
file of numpy, SGLang flat int32 (source of vLLM 0.32 and SGLang 0.5.23).
"""

import asyncio
import base64
import io
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as numpy_files

from ...utils.errors import ServerError
from ..model_folder import read_raw_config
from .api import ModelRequest, ModelResponse
from .http import Json, readable

FLAG = "--enable-return-routed-experts"
START = f"start the server with {FLAG}"
_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
_HEADERS = {
    (1, 0): numpy_files.read_array_header_1_0,
    (2, 0): numpy_files.read_array_header_2_0,
}
_SMALL = 256
"""Most experts whose numbers fit into uint8."""
_LOOK = 64
"""Tokens that are looked at together."""
_PIECE = 1 << 16
"""Characters of base64 that are decoded at a time, a multiple of 4."""


class RoutedLayers(NamedTuple):
    """Decoder layers of a model, and the experts of a token and of a layer."""

    n_layers: int
    top_k: int
    n_experts: int

    @staticmethod
    def of(folder: Path) -> "RoutedLayers | None":
        """Read the ``config.json`` of a folder. None: it does not say all of them."""
        try:
            config = read_raw_config(folder)
        except OSError:
            return None
        text = config.get("text_config")
        if isinstance(text, Mapping):
            config = text
        counts = [config[key] for key in _COUNTS if isinstance(config.get(key), int)]
        n_layers = config.get("num_hidden_layers")
        top_k = config.get("num_experts_per_tok")
        if not counts or not isinstance(n_layers, int) or not isinstance(top_k, int):
            return None
        return RoutedLayers(n_layers, top_k, counts[0])


async def decode_file(text: str | None) -> np.ndarray:
    """Decode base64 of a ``.npy`` with unsigned integers.

    ValueError if it is something else. No memory is taken for numbers that are not there.
    """
    content = await _bytes_of(text)
    file = io.BytesIO(content)
    try:
        version = numpy_files.read_magic(file)
        shape, by_columns, dtype = _HEADERS[version](file)
    # Python's own parser reads the header, and has errors of many kinds.
    except Exception as error:
        raise ValueError(
            f"its routed experts are no file of numpy: {type(error).__name__}: {error!s:.200}"
        ) from error
    start = file.tell()
    n_expected = prod(shape) * dtype.itemsize
    if len(content) - start != n_expected:
        raise ValueError(
            f"its routed experts are {len(content) - start} bytes; expected {n_expected} for "
            f"{dtype} of shape {list(shape)}"
        )
    flat = np.frombuffer(content, dtype, offset=start)
    return flat.reshape(shape, order="F" if by_columns else "C")


async def decode_flat(text: str | None, layers: RoutedLayers | None) -> np.ndarray:
    """Decode base64 of int32 for a model with these layers."""
    if layers is None:
        raise ValueError(
            "its routed experts have no shape: no weights were published through this client "
            "whose config.json says num_hidden_layers, num_experts_per_tok and one of "
            f"{list(_COUNTS)}"
        )
    flat = np.frombuffer(await _bytes_of(text), "<i4")
    if not ((flat >= 0) & (flat < layers.n_experts)).all():
        raise ValueError(
            f"its routed experts are {flat.min()} to {flat.max()}; expected 0 to "
            f"{layers.n_experts - 1}"
        )
    routes = flat.reshape(-1, layers.n_layers, layers.top_k)
    return routes.astype(np.uint8 if layers.n_experts <= _SMALL else np.uint16)


async def with_routes(
    request: ModelRequest,
    response: ModelResponse,
    server: str,
    read: Callable[[Json], Awaitable[np.ndarray]],
    answer: Json,
) -> ModelResponse:
    """The completion of ``server`` with the routed experts of its ``answer``, if they were asked
    for.

    ServerError if ``read`` or `checked_routes` refuses them.
    """
    if request.routes_from is None:
        return response
    with readable(f"{server}: a completion", ServerError):
        routes = checked_routes(request, response, await read(answer))
    return replace(response, routed_experts=routes)


def checked_routes(
    request: ModelRequest,
    response: ModelResponse,
    routes: np.ndarray,
) -> np.ndarray:
    """The routes of a completion as uint8, or int16 for more than 256 experts.

    ValueError if they are not of its tokens, or no token has a choice, as kernels without support
    for it return them.
    """
    assert request.routes_from is not None
    n_rows = len(request.input_ids) + len(response.output_tokens) - 1 - request.routes_from
    if routes.ndim != 3 or len(routes) != n_rows or routes.dtype not in (np.uint8, np.uint16):
        raise ValueError(
            f"its routed experts are {routes.dtype} of shape {list(routes.shape)}; expected "
            f"uint8 or uint16 of [{n_rows}, layers, experts of a token]"
        )
    if not _has_choice(routes):
        raise ValueError(f"no token has routed experts, all are like {routes[:1].tolist()!s:.80}")
    if routes.dtype == np.uint16:
        return routes.astype(np.int16)
    return routes


def _has_choice(routes: np.ndarray) -> bool:
    """Whether a token has k different experts in any layer. The first tokens of an answer nearly
    always have, and to look at all of a long one would hold up other answers.
    """
    for start in range(0, len(routes), _LOOK):
        ordered = np.sort(routes[start : start + _LOOK], axis=-1)
        all_differ = (ordered[..., 1:] != ordered[..., :-1]).all(axis=-1)
        if all_differ.any():
            return True
    return False


async def _bytes_of(text: Any) -> bytes:
    """Decode base64, and let other requests go on meanwhile. A thread would hold them up, because
    binascii keeps the lock of the interpreter.
    """
    if not isinstance(text, str):
        raise ValueError(f"it has no routed experts, but {text!r:.40}; {START}")
    pieces = []
    for start in range(0, len(text), _PIECE):
        pieces.append(base64.b64decode(text[start : start + _PIECE], validate=True))
        await asyncio.sleep(0)
    return b"".join(pieces)
