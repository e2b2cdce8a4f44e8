"""Turn the answer of a server into a `ModelResponse`, or refuse it."""

from collections.abc import Mapping, Sequence
from typing import Any

from .adapters import adapter_label
from .api import GenerationHyperparameters, ModelRequest, ModelResponse, StopReason, labelled_version

_STOP_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length"}


def response_of(
    request: ModelRequest,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    spans: Sequence[Mapping[str, Any]],
    reason: str,
) -> ModelResponse:
    """Check a completion and convert its labels to versions.

    ``spans`` are runs of tokens that the same weights sampled, in order: ``version`` (a label), ``start`` and ``end``.

    Raises:
        ValueError: the completion is unfinished, the lengths differ, or a label belongs to no published weights.
        KeyError, TypeError: a span has another format.
    """
    if reason not in _STOP_REASONS:
        raise ValueError(f"it ended with {reason!r}; expected 'stop' or 'length'")
    if len(logprobs) != len(tokens):
        raise ValueError(f"{len(logprobs)} log-probabilities of {len(tokens)} tokens")
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions):
            raise ValueError(f"the weight versions {list(spans)} leave tokens out")
        if (version := labelled_version(span["version"])) is None:
            raise ValueError(
                f"it was sampled by weights labelled {span['version']!r}, which nobody published: the server has been "
                "restarted, or was told of adapters by another client; publish to it first"
            )
        versions += [version] * (span["end"] - span["start"])
    if len(versions) != len(tokens):
        raise ValueError(f"the weight versions {list(spans)} are of {len(versions)} tokens; there are {len(tokens)}")
    return ModelResponse(list(request.input_ids), list(tokens), list(logprobs), versions, _STOP_REASONS[reason])


def adapter_spans(adapter: str, answered_by: str, spans: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put the label of an adapter into the spans of its completion, because a server labels them with the base.

    Raises:
        ValueError: another adapter answered, or published weights replaced the base.
    """
    if answered_by != adapter:
        raise ValueError(f"it was completed by {answered_by!r}; expected {adapter!r}")
    if replaced := [span["version"] for span in spans if labelled_version(span["version"]) is not None]:
        raise ValueError(f"the base under {adapter} was replaced by the published weights {replaced[0]}")
    return [{**span, "version": adapter_label(adapter)} for span in spans]


def samples_plainly(gconfig: GenerationHyperparameters) -> bool:
    """Whether tokens are sampled from the unchanged distribution of the model."""
    return gconfig.temperature in (0.0, 1.0) and gconfig.top_p == 1.0 and gconfig.top_k == 0


def untempered(plain: Mapping[int, float], tempered: Mapping[int, float]) -> str | None:
    """Describe the error if log-probabilities, by token id, at temperature 0.5 do not fit those at temperature 1.

    Differences between tokens must be twice as large, because ``log p = z / T - logsumexp(z / T)``.
    """
    common = sorted(plain.keys() & tempered.keys(), key=plain.__getitem__)
    spread = plain[common[-1]] - plain[common[0]] if common else 0.0
    if not spread > 0:
        return f"log-probabilities of different tokens cannot be compared: {dict(plain)} and {dict(tempered)}"
    factor = (tempered[common[-1]] - tempered[common[0]]) / spread
    if abs(factor - 2) < abs(factor - 1):
        return None
    return "its log-probabilities are not those of the distribution that it samples from: temperature is left out"
