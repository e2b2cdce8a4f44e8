"""Whether a server answers by the weights it was told to load: log-probabilities of one prompt, compared.

The trainer computes the log-probabilities of a fixed pseudo-random prompt and seals them in the published folder
(`PROBE_NAME`). After an update the client asks the server for the same. Two comparisons follow.

- With the trainer's. In float32 kernels differ by 5e-7 and one step at learning rate 1e-6 makes 9e-5, so that this
  tells a version from the one before. In bfloat16 they differ by 7e-3, more than a step makes: it finds only garbage.
- With the server's own answer of the version before. A server without other work repeats bit for bit. So an answer that
  did not change, although the trainer's did and a weight file has another digest, is that of the old weights. A server
  with other requests in the same batch does not repeat, and then this finds nothing.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...utils.config import require_choice
from ...utils.errors import PublishError
from ...utils.manifest import read_manifest
from ..api import Batch
from ..hf.versions import holds_adapters
from ..training.logprobs import token_logprobs

PROBE_NAME = "weights_probe.json"
"""The file of a published folder that holds its `WeightsProbe`."""

_LIMITS = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest mean difference of log-probabilities that is put down to other kernels, by dtype; finer dtypes first."""
_TOKENS = 32
"""Their mean difference is as steady as that of more, and on a CPU a forward of more takes longer than the writing."""


@dataclass(frozen=True)
class WeightsProbe:
    """A prompt, and what the trainer makes of it.

    Attributes:
        prompt_ids: token ids.
        logprobs: log-probability of each but the first, given those before it, at temperature 1.
        dtype: what the trainer computes in.
    """

    prompt_ids: Sequence[int]
    logprobs: Sequence[float]
    dtype: str

    def encode(self) -> bytes:
        """The bytes of the file `PROBE_NAME`."""
        return json.dumps(asdict(self)).encode()


def read_probe(folder: str | os.PathLike[str]) -> WeightsProbe | None:
    """The probe of a published folder; None when it has none.

    Raises:
        PublishError: the file is not one of `WeightsProbe.encode`.
    """
    path = Path(folder) / PROBE_NAME
    try:
        probe = WeightsProbe(**json.loads(path.read_bytes()))
        require_choice("dtype", probe.dtype, tuple(_LIMITS))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise PublishError(f"{path} is not a probe of weights ({error}); publish the version again") from error
    return probe


def probe_weights(engine: Any) -> WeightsProbe | None:
    """The probe of an engine's weights as they are, on every rank; None for a critic, whose answers no server has.

    Collective over the ranks of the engine. It is one forward of 32 tokens, which are the same at every call for
    one model; no generator advances, and the model is in the mode afterwards that it was in.

    Args:
        engine: an `FSDPEngine`.
    """
    if engine.config.is_critic:
        return None
    config = engine.model.config.get_text_config(decoder=True)
    # The server samples one more token. Special tokens are the first or the last ones.
    tokens = min(_TOKENS, (getattr(config, "max_position_embeddings", None) or _TOKENS + 1) - 1)
    low = config.vocab_size // 4
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(low, max(3 * low, low + 1), (1, tokens), generator=generator)
    training = engine.model.training
    try:
        logprobs = engine.forward_batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, _at_temperature_one)
    finally:
        engine.train(training)
    return WeightsProbe(ids[0].tolist(), logprobs[0, 1:].tolist(), engine.config.dtype)


def _at_temperature_one(output: Any, data: Batch) -> torch.Tensor:
    return token_logprobs(output, data["input_ids"], data["cu_seqlens"], 1.0)[0]


@dataclass(frozen=True)
class _Served:
    """What a server served when it was last found right."""

    digests: Mapping[str, str]
    probe: WeightsProbe
    answer: Sequence[float]


class ContentCheck:
    """Compares a server's answers with the trainer's, and with its own of the version before.

    Args:
        dtype: what the server computes in; None: what its folder is stored in.
    """

    def __init__(self, dtype: str | None = None) -> None:
        require_choice("dtype", dtype, (None, *_LIMITS))
        self._dtype = dtype
        self._served: _Served | None = None

    def problem(self, folder: str | os.PathLike[str], probe: WeightsProbe, answer: Sequence[float]) -> str | None:
        """What is wrong with a server that was told to load ``folder``; None when nothing is, which is remembered.

        Args:
            folder: the published folder.
            probe: of it.
            answer: the server's log-probabilities of ``probe.prompt_ids`` but the first.
        """
        dtype = max((probe.dtype, self._dtype or _stored_dtype(folder)), key=list(_LIMITS).index)
        difference = _mean_difference(answer, probe.logprobs)
        if not difference <= _LIMITS[dtype]:
            return (
                f"its log-probabilities of the probe differ from the trainer's by {difference:.2g} on average, in "
                f"{dtype} by at most {_LIMITS[dtype]:g}: it answers by other weights, or computes in another dtype "
                "(start it with the dtype of the folder, or give the client its dtype)"
            )
        digests = _weight_digests(folder)
        before, self._served = self._served, _Served(digests, probe, answer)
        if before and _stale(before, self._served):
            self._served = before
            return (
                "its answer to the probe is bit for bit that of the version before, although the weights are others: "
                "it has kept the old ones"
            )
        return None


def _stale(before: _Served, now: _Served) -> bool:
    return (
        list(now.answer) == list(before.answer)
        and now.digests != before.digests
        and list(now.probe.prompt_ids) == list(before.probe.prompt_ids)
        and list(now.probe.logprobs) != list(before.probe.logprobs)
    )


def _mean_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """NaN, which is within no limit, when there are not as many."""
    if len(ours) != len(theirs):
        return float("nan")
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)


def _stored_dtype(folder: str | os.PathLike[str]) -> str:
    """The dtype in the folder's config; of adapters, the coarser one of theirs and their base's. The finest one when
    none of those that matter is named."""
    manifest = read_manifest(folder)
    if not holds_adapters(manifest):
        manifest = json.loads((Path(folder) / "config.json").read_bytes())
    named = (manifest.get(key) for key in ("dtype", "base_dtype"))
    return max((dtype for dtype in named if dtype in _LIMITS), key=list(_LIMITS).index, default=next(iter(_LIMITS)))


def _weight_digests(folder: str | os.PathLike[str]) -> dict[str, str]:
    files = read_manifest(folder)["files"]
    return {name: entry["digest"] for name, entry in files.items() if name.endswith(".safetensors")}
