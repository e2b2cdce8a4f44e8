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

    Args:
        request: the completed request.
        tokens: sampled token ids.
        logprobs: log-probability of each token.
        spans: runs of tokens that the same weights sampled, in order: ``version`` (a label), ``start`` and ``end``.
        reason: finish reason of the server.

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
    """Spans of a completion by an adapter. The spans of the server only name the base under the adapter.

    Args:
        adapter: adapter in the request.
        answered_by: adapter in the answer.
        spans: spans with labels of the base, as for `response_of`.

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
    """Describe the error if log-probabilities ignore the temperature, else return None.

    At temperature 0.5, differences between tokens are twice as large: ``log p = z / T - logsumexp(z / T)``.

    Args:
        plain: log-probabilities of the most likely tokens at temperature 1, by token id.
        tempered: log-probabilities at temperature 0.5.
    """
    common = sorted(plain.keys() & tempered.keys(), key=plain.__getitem__)
    spread = plain[common[-1]] - plain[common[0]] if common else 0.0
    if not spread > 0:
        return f"log-probabilities of different tokens cannot be compared: {dict(plain)} and {dict(tempered)}"
    factor = (tempered[common[-1]] - tempered[common[0]]) / spread
    if abs(factor - 2) < abs(factor - 1):
        return None
    return "its log-probabilities are not those of the distribution that it samples from: temperature is left out"
