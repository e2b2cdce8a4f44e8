"""Weights of a fake server: a tiny model of transformers, or tokens hashed from all their
inputs.
"""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from holdfast.utils.files import file_digest
from holdfast.utils.manifest import MANIFEST_NAME, read_manifest, verify_folder

VOCABULARY = 1000
"""Hashed tokens are 0 ... 999."""
MIXED = 4.0
"""Error of a log-probability that was computed with a cache of other weights."""


class Weights(Protocol):
    """Loaded weights.

    Attributes:
        version: the real version, whatever label the server reports. None if partially loaded.
        vocabulary: number of token ids that a prompt may have.
    """

    version: int | None
    vocabulary: float

    def next_token(
        self, ids: Sequence[int], seed: int, position: int, temperature: float
    ) -> tuple[int, float]:
        """The token after ``ids``, and its log-probability at temperature 1."""
        ...

    def top_logprobs(self, ids: Sequence[int], temperature: float, count: int) -> dict[int, float]:
        """The most likely tokens after ``ids``, most likely first."""
        ...

    def prompt_logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probabilities of all tokens but the first."""
        ...


def hashed_token(
    prompt: Sequence[int], seed: int, version: int | None, position: int
) -> tuple[int, float]:
    """The token of hashed weights of ``version`` at a place of a completion, and its
    log-probability.
    """
    text = repr((list(prompt), seed, version, position)).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return number % VOCABULARY, -(1 + number // VOCABULARY % 4000) / 1000


class HashedWeights:
    """Weights without a model, which sample `hashed_token`. With ``of_version``, tokens depend on
    the version.
    """

    vocabulary = math.inf  # a prompt may have any id

    def __init__(self, version: int | None, of_version: bool = True) -> None:
        self.version = version
        self._hashed_version = version if of_version else None

    def next_token(
        self, ids: Sequence[int], seed: int, position: int, temperature: float
    ) -> tuple[int, float]:
        return hashed_token(ids[: len(ids) - position], seed, self._hashed_version, position)

    def top_logprobs(self, ids: Sequence[int], temperature: float, count: int) -> dict[int, float]:
        return {token: -(1 + token) / temperature for token in range(count)}

    def prompt_logprobs(self, ids: Sequence[int]) -> list[float]:
        return [
            hashed_token(ids[:place], 0, self.version, place)[1] for place in range(1, len(ids))
        ]


class ModelWeights:
    """A model of transformers on the CPU."""

    def __init__(self, folder: str, dtype: str, version: int | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.version = version
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        ).eval()
        embeddings: Any = self._model.get_input_embeddings()
        self.vocabulary: float = embeddings.num_embeddings

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._model.state_dict())

    def checksums(self) -> dict[str, str]:
        """Digest of each tensor."""
        return {
            name: hashlib.sha256(tensor.float().numpy().tobytes()).hexdigest()
            for name, tensor in self._model.state_dict().items()
        }

    def load(self, tensors: dict[str, Any]) -> None:
        """Replace some tensors. The version is then unknown."""
        unknown = self._model.load_state_dict(tensors, strict=False).unexpected_keys
        assert not unknown, unknown
        self.version = None

    def _logprobs(self, ids: Sequence[int], temperature: float = 1.0) -> Any:
        import torch

        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        return torch.log_softmax(logits.float() / temperature, -1)

    def next_token(
        self, ids: Sequence[int], seed: int, position: int, temperature: float
    ) -> tuple[int, float]:
        import torch

        generator = torch.Generator().manual_seed(seed * 100_003 + position)
        plain = self._logprobs(ids)[-1]
        token = int(
            torch.multinomial((plain / max(temperature, 1e-3)).softmax(-1), 1, generator=generator)
        )
        return token, float(plain[token])

    def top_logprobs(self, ids: Sequence[int], temperature: float, count: int) -> dict[int, float]:
        top = self._logprobs(ids, temperature)[-1].topk(count)
        return dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))

    def prompt_logprobs(self, ids: Sequence[int]) -> list[float]:
        return [float(row[token]) for row, token in zip(self._logprobs(ids), ids[1:], strict=False)]


class AdaptedWeights(ModelWeights):
    """A model of transformers with adapters of PEFT."""

    def __init__(self, base: str, folder: str, dtype: str, version: int | None) -> None:
        from peft import PeftModel

        super().__init__(base, dtype, version)
        self._model = PeftModel.from_pretrained(self._model, folder).eval()


def load_adapters(
    folder: str, base: str | None, dtype: str | None, of_version: bool = True
) -> tuple[str, Weights]:
    """`load_weights` for a folder of adapters. Like vLLM, it needs no manifest, and has no version
    without one.

    Raises:
        FileNotFoundError: the folder is missing.
        Exception: the folder is damaged.
    """
    described = Path(folder) / "adapter_config.json"
    version = None
    with open(described):
        if (Path(folder) / MANIFEST_NAME).exists():
            described = Path(folder) / MANIFEST_NAME
            version = int(read_manifest(folder)["weight_version"])
    if dtype:
        assert base is not None
        weights: Weights = AdaptedWeights(base, folder, dtype, version)
    else:
        weights = HashedWeights(version, of_version)
    return file_digest(described), weights


def load_weights(folder: str, dtype: str | None, of_version: bool = True) -> tuple[str, Weights]:
    """The weights of a published folder and its digest. Without a ``dtype``, as `HashedWeights`.

    Raises:
        Exception: the folder is missing or damaged.
    """
    version = int(
        verify_folder(folder)["weight_version"]
        if dtype
        else read_manifest(folder)["weight_version"]
    )
    weights = ModelWeights(folder, dtype, version) if dtype else HashedWeights(version, of_version)
    return file_digest(Path(folder) / MANIFEST_NAME), weights
