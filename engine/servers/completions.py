"""What servers answer to a prompt of token ids, made into a `ModelResponse`, or refused."""

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
    """A server's completion.

    Args:
        request: what it is a completion of.
        tokens: token ids.
        logprobs: of each.
        spans: ``version`` (a label), ``start`` and ``end`` of tokens that the same weights sampled, in order.
        reason: why it ended.

    Raises:
        ValueError: it was not finished, the three do not fit each other, or a label is not one of published weights.
        KeyError, TypeError: a span is not as above.
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
    """The spans of a completion by an adapter. The server's own are of the base beside it, whatever the adapter was.

    Args:
        adapter: that the request named.
        answered_by: that the server says it was completed by.
        spans: of the base, as for `response_of`.

    Raises:
        ValueError: another one completed it, or its base was replaced by published weights.
    """
    if answered_by != adapter:
        raise ValueError(f"it was completed by {answered_by!r}; expected {adapter!r}")
    if replaced := [span["version"] for span in spans if labelled_version(span["version"]) is not None]:
        raise ValueError(f"the base under {adapter} was replaced by the published weights {replaced[0]}")
    return [{**span, "version": adapter_label(adapter)} for span in spans]


def samples_plainly(gconfig: GenerationHyperparameters) -> bool:
    """Whether tokens are sampled from the model's own distribution, which needs no check."""
    return gconfig.temperature in (0.0, 1.0) and gconfig.top_p == 1.0 and gconfig.top_k == 0


def untempered(plain: Mapping[int, float], tempered: Mapping[int, float]) -> str | None:
    """What is wrong with log-probabilities at temperature 0.5, when those at temperature 1 are ``plain``.

    Differences between tokens must be twice as large: ``log p = z / T - logsumexp(z / T)``.

    Args:
        plain: of the most likely tokens, by token id.
        tempered: likewise.
    """
    common = sorted(plain.keys() & tempered.keys(), key=plain.__getitem__)
    spread = plain[common[-1]] - plain[common[0]] if common else 0.0
    if not spread > 0:
        return f"log-probabilities of different tokens cannot be compared: {dict(plain)} and {dict(tempered)}"
    factor = (tempered[common[-1]] - tempered[common[0]]) / spread
    if abs(factor - 2) < abs(factor - 1):
        return None
    return "its log-probabilities are not those of the distribution that it samples from: temperature is left out"
