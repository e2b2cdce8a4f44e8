"""Checks of one completion: may a server be sent this prompt, and can its answer be trained on?

A token id outside the vocabulary reads outside the embedding. One such prompt kills an SGLang, and
a vLLM with ``--skip-tokenizer-init``, which checks ids only if it has a tokenizer. Then it kills
every server that it is sent to afterwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ...utils.errors import PromptError
from ..model_folder import read_raw_config
from .adapters import adapter_label
from .api import (
    STOP_REASONS,
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    labelled_version,
    logprob_problem,
)
from .prompts import require_known, shown_prompt


@dataclass(frozen=True)
class PromptLimits:
    """Size of the vocabulary, and most tokens of prompt and completion together. None: unknown.

    A prompt must leave room for one token, and for ``kept_free`` more.
    """

    vocab_size: int | None = None
    max_tokens: int | None = None
    kept_free: int = 0

    def fit(self, request: ModelRequest, server: str) -> ModelRequest:
        """Limit the completion to the room that the prompt leaves.

        Raises PromptError if ``server`` cannot complete the prompt or sample its stop tokens.
        """
        ids = list(request.input_ids)
        what = f"{shown_prompt(request)}, for {server},"
        if not ids:
            raise PromptError(
                f"{what} is empty; give it one token at least, the one that begins a text, say"
            )

        # Token ids that the model does not have.
        stops = request.gconfig.stop_token_ids
        require_known(ids, what, "token ids", self.vocab_size)
        require_known(stops, what, "stop_token_ids", self.vocab_size)

        # A prompt that fills the context.
        if self.max_tokens is None:
            return request
        room = self.max_tokens - len(ids)
        if room <= self.kept_free:
            kept = f", and keeps {self.kept_free} of them free" if self.kept_free else ""
            raise PromptError(
                f"{what} leaves no room for a completion: the server takes {self.max_tokens} "
                f"tokens in all{kept}. Shorten or leave out the sample, limit a conversation "
                "(MultiTurnWorkflow max_tokens), or start the server with a larger "
                "--max-model-len (--context-length of SGLang)"
            )
        return replace(request, gconfig=request.gconfig.within(room))


def folder_vocab_size(folder: str | Path) -> int | None:
    """Vocabulary size in the ``config.json`` of a model folder, or None."""
    try:
        config = read_raw_config(Path(folder))
    except OSError:
        return None
    # A multimodal model has the vocabulary in the config of its text part.
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            size = part.get("vocab_size")
            if isinstance(size, int):
                return size
    return None


def stated_limits(
    models: Mapping[str, Any], vocab_size: int | None, kept_free: int = 0
) -> PromptLimits:
    """The limits in an answer to ``GET /v1/models``. It names the folder with the config if
    ``vocab_size`` is None.
    """
    entries = models.get("data")
    if not isinstance(entries, list) or not entries or not isinstance(entries[0], Mapping):
        return PromptLimits(vocab_size)
    entry: Mapping[str, Any] = entries[0]

    root = entry.get("root")
    if vocab_size is None and isinstance(root, str):
        vocab_size = folder_vocab_size(root)

    max_tokens = entry.get("max_model_len")
    if not isinstance(max_tokens, int):
        max_tokens = None
    return PromptLimits(vocab_size, max_tokens, kept_free)


def response_of(
    request: ModelRequest,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    spans: Sequence[Mapping[str, Any]],
    reason: Any,
) -> ModelResponse:
    """Check a completion and convert its labels to versions.

    ``spans`` are runs of tokens that the same weights sampled, in order: ``version`` (a label),
    ``start`` and ``end``. ValueError if the completion is unfinished, lengths differ, a
    log-probability is no finite number, or a label belongs to no published weights. KeyError or
    TypeError if a span has another format.
    """
    if reason not in STOP_REASONS:
        raise ValueError(f"it ended with {reason!r}; expected 'stop' or 'length'")
    if len(logprobs) != len(tokens):
        raise ValueError(f"{len(logprobs)} log-probabilities of {len(tokens)} tokens")
    problem = logprob_problem(logprobs)
    if problem is not None:
        raise ValueError(problem)

    # The spans must follow each other without gaps, each of a published version.
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions):
            raise ValueError(f"the weight versions {list(spans)} leave tokens out")
        version = labelled_version(span["version"])
        if version is None:
            raise ValueError(
                f"it was sampled by weights labelled {span['version']!r}, which nobody published: "
                "the server has been restarted, or was told of adapters by another client; "
                "publish to it first"
            )
        versions += [version] * (span["end"] - span["start"])
    if len(versions) != len(tokens):
        raise ValueError(
            f"the weight versions {list(spans)} are of {len(versions)} tokens; there are "
            f"{len(tokens)}"
        )
    return ModelResponse(list(request.input_ids), list(tokens), list(logprobs), versions, reason)


def check_images(request: ModelRequest, response: ModelResponse, server: str) -> ModelResponse:
    """Return the response, or raise PromptError if ``server`` expanded images in another way than
    the trainer does.
    """
    if request.images is None:
        return response

    # The trainer scores the tokens as the processor here has expanded them.
    own = list(request.input_ids)
    theirs = list(response.input_tokens)
    if own != theirs:
        places = enumerate(zip_longest(own, theirs))
        place = next(place for place, (ours, other) in places if ours != other)
        raise PromptError(
            f"prompt {request.rid or '(without rid)'} with {len(request.images.files)} image(s) "
            f"has {len(theirs)} tokens on {server} and {len(own)} by the processor here, and "
            f"differs from place {place} on ({theirs[place : place + 3]}, here "
            f"{own[place : place + 3]}). Start the server with the files of this processor: "
            "limits of pixels, chat template and tokenizer must be the same"
        )

    # A sampled image token would stand for an image that does not exist.
    sampled = set(request.images.forbidden).intersection(response.output_tokens)
    if sampled:
        raise PromptError(
            f"{server} sampled {sorted(sampled)}, tokens that stand for images, although "
            "logit_bias excluded them: it ignores the bias, and such an answer cannot be trained "
            "on"
        )
    return response


def adapter_spans(
    adapter: str, answered_by: str, spans: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Put the label of an adapter into the spans of its completion, or raise ValueError if
    something else answered.
    """
    if answered_by != adapter:
        raise ValueError(f"it was completed by {answered_by!r}; expected {adapter!r}")
    for span in spans:
        if labelled_version(span["version"]) is not None:
            replaced = span["version"]
            raise ValueError(
                f"the base under {adapter} was replaced by the published weights {replaced}"
            )
    return [{**span, "version": adapter_label(adapter)} for span in spans]


def samples_plainly(gconfig: GenerationHyperparameters) -> bool:
    """Whether tokens are sampled from the unchanged distribution of the model."""
    return gconfig.temperature in (0.0, 1.0) and gconfig.top_p == 1.0 and gconfig.top_k == 0


def temperature_error(plain: Mapping[int, float], tempered: Mapping[int, float]) -> str | None:
    """Describe the error if log-probabilities, by token id, at temperature 0.5 do not fit those at
    temperature 1.

    Differences between tokens must be twice as large, because ``log p = z / T - logsumexp(z / T)``.
    """
    # The most and the least likely of the common tokens differ most.
    common = sorted(plain.keys() & tempered.keys(), key=plain.__getitem__)
    spread = 0.0
    if common:
        spread = plain[common[-1]] - plain[common[0]]
    if not spread > 0:
        return (
            "log-probabilities of different tokens cannot be compared: "
            f"{dict(plain)} and {dict(tempered)}"
        )

    # The factor is 2 with the temperature, and 1 without it.
    factor = (tempered[common[-1]] - tempered[common[0]]) / spread
    if abs(factor - 2) < abs(factor - 1):
        return None
    return (
        "its log-probabilities are not those of the distribution that it samples from: temperature "
        "is left out"
    )
