"""Experts that a fake server says it chose: they depend on token, place, layer and weights."""

import base64
import hashlib
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class FakeRoutes(NamedTuple):
    """A server with ``--enable-return-routed-experts``, whose first layer is dense.

    ``broken``: it returns zeros alone, like a kernel without support.
    """

    n_layers: int = 3
    top_k: int = 2
    n_experts: int = 8
    broken: bool = False

    def of_token(self, token: int, place: int, version: int | None) -> np.ndarray:
        """``[layers, k]`` of an input token."""
        rows = np.zeros((self.n_layers, self.top_k), np.int64)
        if self.broken:
            return rows
        for layer in range(1, self.n_layers):
            text = repr((token, place, layer, version)).encode()
            first = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
            rows[layer] = [(first + nth) % self.n_experts for nth in range(self.top_k)]
        return rows

    def of(self, ids: Sequence[int], versions: Sequence[int | None], start: int = 0) -> np.ndarray:
        """``[tokens - start, layers, k]`` of input tokens, each by weights of its version."""
        pairs = list(enumerate(zip(ids, versions, strict=True)))[start:]
        found = [self.of_token(token, place, version) for place, (token, version) in pairs]
        return np.stack(found)

    def of_generation(self, generation: Any, start: int) -> np.ndarray:
        """Those of a finished request: all tokens but the last sampled one. The weights that sample
        the first token compute the prompt.
        """
        ids = [*generation.prompt, *generation.tokens[:-1]]
        sampled_by = generation.versions
        versions = [sampled_by[0]] * (len(generation.prompt) - 1) + sampled_by
        return self.of(ids, versions, start)

    def as_file(self, routes: np.ndarray) -> str:
        """As vLLM returns them."""
        content = io.BytesIO()
        np.save(content, routes.astype(np.uint8 if self.n_experts <= 256 else np.uint16))
        return base64.b64encode(content.getvalue()).decode()

    def as_flat(self, routes: np.ndarray) -> str:
        """As SGLang returns them."""
        return base64.b64encode(routes.astype("<i4").tobytes()).decode()

    @property
    def config(self) -> dict[str, int]:
        """Keys of the ``config.json`` of the model."""
        return {
            "num_hidden_layers": self.n_layers,
            "num_experts_per_tok": self.top_k,
            "num_experts": self.n_experts,
        }
