"""The content check: does a server answer with the weights that it was told to load?

The trainer computes log-probabilities of a fixed pseudo-random prompt, the weights probe, and
writes them into the published folder (`PROBE_NAME`). After an update the client asks the server for
the same log-probabilities and compares them twice (`content_problem`).

- With the trainer's values. In float32, kernels differ by 5e-7 and a step at learning rate 1e-6
  changes 9e-5, so the comparison detects the previous version. In bfloat16, kernels differ by 7e-3,
  more than a step changes, so it only detects garbage.
- With the server's answer for the previous version. An idle server repeats its answers bit for bit.
  So an unchanged answer, although the trainer's values and the digest of a weight file changed,
  comes from the old weights. A busy server does not repeat its answers, and this comparison then
  detects nothing.

So in 16 bits each server has to show two facts once, also while it is busy:

- Its weights change: its own checksums are others after a load of other weights.
- Its adapters have an effect: with a larger factor they change the answer (`effect_problem`).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...utils.config import require_choice
from ...utils.errors import PublishError
from ...utils.files import StrPath
from ...utils.manifest import Manifest, read_manifest
from ..hf.sidecars import PROBE_NAME
from ..hf.versions import holds_adapters, published_file
from ..training.logprobs import token_logprobs

_LIMITS = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest mean difference of log-probabilities that other kernels explain, by dtype. Finer dtypes
come first.
"""
DTYPES = tuple(_LIMITS)
# More tokens give no steadier mean, and on a CPU their forward takes longer than writing the
# weights.
_TOKENS = 32


@dataclass(frozen=True)
class WeightsProbe:
    """A prompt and its log-probabilities by the trainer."""

    prompt_ids: Sequence[int]

    # of each token but the first, given the tokens before it, at temperature 1
    logprobs: Sequence[float]

    dtype: str  # dtype that the trainer computes in

    def encode(self) -> bytes:
        """Contents of the file `PROBE_NAME`."""
        return json.dumps(asdict(self)).encode()


def read_weights_probe(folder: StrPath) -> WeightsProbe | None:
    """Read the probe of a published folder. None if there is none, and PublishError if it is
    damaged.
    """
    path = published_file(folder, PROBE_NAME)
    try:
        probe = WeightsProbe(**json.loads(path.read_bytes()))
        require_choice("dtype", probe.dtype, DTYPES)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise PublishError(
            f"{path} is not a probe of weights ({error}); publish the version again"
        ) from error
    return probe


def compute_weights_probe(engine: Any) -> WeightsProbe | None:
    """Compute the probe of the weights of an `FSDPEngine`. All its ranks call this, and each gets
    the result.

    It costs one forward of 32 tokens, which are the same at every call. No random generator
    advances, and the model keeps its mode. None for a critic, because no server computes values.
    """
    if engine.config.is_critic:
        return None
    ids = _prompt_ids(engine.model.config.get_text_config(decoder=True))
    rows = ids.expand(engine.config.mb_spec.granularity, -1)  # the least that a batch may have
    batch = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}

    training = engine.model.training
    try:
        logprobs = engine.forward_batch(batch, _logprobs_of_the_model)
    finally:
        engine.train(training)

    return WeightsProbe(ids[0].tolist(), logprobs[0, 1:].tolist(), engine.config.dtype)


def _prompt_ids(config: Any) -> Tensor:
    """Pseudo-random token ids, ``[1, tokens]``, the same for every model with this config."""
    # The server samples one more token, for which the context must have room.
    context = getattr(config, "max_position_embeddings", None) or _TOKENS + 1
    tokens = min(_TOKENS, context - 1)

    # Special tokens have the first or the last ids.
    low = config.vocab_size // 4
    high = max(3 * low, low + 1)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high, (1, tokens), generator=generator)


def _logprobs_of_the_model(output: Any, data: Mapping[str, Tensor]) -> Tensor:
    return token_logprobs(output, data["input_ids"], data["cu_seqlens"], temperature=1.0)[0]


@dataclass(frozen=True)
class ExpectedAnswer:
    """The weights probe of a published folder, and what else a comparison with it needs."""

    probe: WeightsProbe
    dtype: str  # coarser dtype of trainer and server
    digests: Mapping[str, str]  # digest of each weight file

    @property
    def shows_steps(self) -> bool:
        """Whether a training step changes more than kernels of this dtype differ by."""
        return self.dtype == DTYPES[0]


@dataclass(frozen=True)
class CheckedAnswer:
    """Log-probabilities of the probe's prompt by a server."""

    expected: ExpectedAnswer
    logprobs: Sequence[float]


def expected_answer(folder: StrPath, probe: WeightsProbe, dtype: str | None) -> ExpectedAnswer:
    """What a server must answer with the weights of a published folder and its ``probe``.

    The server computes in ``dtype``, or in the stored dtype of the folder.
    """
    manifest = read_manifest(folder)
    of_server = dtype or _stored_dtype(folder, manifest)
    coarser = max((probe.dtype, of_server), key=DTYPES.index)
    digests = {
        name: entry["digest"]
        for name, entry in manifest["files"].items()
        if name.endswith(".safetensors")
    }
    return ExpectedAnswer(probe, coarser, digests)


def weights_differ(now: CheckedAnswer, before: CheckedAnswer) -> bool:
    """Whether the published weights are others, by their files and by the trainer's own
    log-probabilities.
    """
    if now.expected.digests == before.expected.digests:
        return False
    ours = now.expected.probe
    theirs = before.expected.probe
    same_prompt = list(ours.prompt_ids) == list(theirs.prompt_ids)
    return same_prompt and list(ours.logprobs) != list(theirs.logprobs)


def effect_problem(base: Sequence[float], amplified: Sequence[float], dtype: str) -> str | None:
    """Describe the problem if a server answers by amplified adapters as by its base, or return
    None.
    """
    apart = _mean_difference(base, amplified)
    if not apart <= _LIMITS[dtype]:  # also if it is NaN
        return None
    return (
        f"its log-probabilities of the probe are those of its base (they differ by {apart:.2g} on "
        f"average, which other work explains in {dtype}), although the adapters were amplified: "
        "it ignores adapters"
    )


def content_problem(now: CheckedAnswer, before: CheckedAnswer | None) -> str | None:
    """Describe the problem of an answer, or return None. ``before`` is the server's last answer
    without a problem.
    """
    # The answer must be that of the trainer. An incomplete one counts as no answer at all.
    trainers = now.expected.probe.logprobs
    limit = _LIMITS[now.expected.dtype]
    difference = math.nan
    if len(now.logprobs) == len(trainers):
        difference = _mean_difference(now.logprobs, trainers)
    if not difference <= limit:  # also if it is NaN
        return (
            f"its log-probabilities of the probe differ from the trainer's by {difference:.2g} on "
            f"average, in {now.expected.dtype} by at most {limit:g}: it answers by other "
            "weights, or computes in another dtype (start it with the dtype of the folder, or "
            "give the client its dtype)"
        )

    # And it must not be that of the weights before.
    if before and list(now.logprobs) == list(before.logprobs) and weights_differ(now, before):
        return (
            "its answer to the probe is bit for bit that of the version before, although the "
            "weights are others: it has kept the old ones"
        )
    return None


def _mean_difference(some: Sequence[float], others: Sequence[float]) -> float:
    differences = [abs(one - other) for one, other in zip(some, others, strict=True)]
    return sum(differences) / len(differences)


def _stored_dtype(folder: StrPath, manifest: Manifest) -> str:
    """Coarsest stored dtype, by the config of a model or the manifest of adapters and their base.
    Else float32.
    """
    described = manifest
    if not holds_adapters(manifest):
        described = json.loads(published_file(folder, "config.json").read_bytes())
    named = (described.get("dtype"), described.get("base_dtype"))
    known = [dtype for dtype in named if dtype in _LIMITS]
    return max(known, key=DTYPES.index, default=DTYPES[0])
