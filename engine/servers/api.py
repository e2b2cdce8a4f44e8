"""What is said to an inference server and what it answers, whatever server it is.

Requests and responses have AReaL's names (``areal/api/io_struct.py``, ``areal/api/cli_args.py``), so that a workflow
written for AReaL reads the same.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from ...utils.config import require_range
from ...utils.files import bytes_digest
from ...utils.manifest import MANIFEST_NAME
from ..api import InferenceServer

StopReason = Literal["stop", "length"]
"""Why a response ended: a stop token, or ``max_new_tokens``."""


@dataclass(frozen=True)
class GenerationHyperparameters:
    """How to sample.

    Attributes:
        n_samples: completions of one prompt.
        max_new_tokens: length of a completion at most.
        min_new_tokens: no stop token is sampled before so many tokens.
        temperature: logits are divided by it; 0 takes the most likely token.
        top_p: smallest set of tokens with this probability is sampled from; 1: all.
        top_k: so many of the most likely tokens are sampled from; 0: all.
        stop_token_ids: a completion ends with the first of these; it is part of it.

    Raises:
        ConfigError: a value is out of range.
    """

    n_samples: int = 1
    max_new_tokens: int = 16384
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        require_range("n_samples", self.n_samples, low=1)
        require_range("max_new_tokens", self.max_new_tokens, low=1)
        require_range("min_new_tokens", self.min_new_tokens, low=0, high=self.max_new_tokens)
        require_range("temperature", self.temperature, low=0.0)
        require_range("top_p", self.top_p, low=0.0, high=1.0)
        require_range("top_k", self.top_k, low=0)


@dataclass(frozen=True)
class ModelRequest:
    """One prompt to complete.

    Attributes:
        input_ids: token ids of the prompt.
        gconfig: how to sample; a server is asked for one completion, whatever ``n_samples`` says.
        seed: the same request with the same seed has about the same answer: a server that batches does not repeat bit
            for bit. None: the server draws one.
        rid: name of the request, for logs and to abort it.
        metadata: of the caller; no server sees it.
    """

    input_ids: Sequence[int]
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    seed: int | None = None
    rid: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelResponse:
    """One completion.

    Attributes:
        input_tokens: the prompt.
        output_tokens: token ids of the completion, a stop token included.
        output_logprobs: log-probability of each, in the distribution that it was sampled from.
        output_versions: version of the weights that sampled each, from the server's own record.
        stop_reason: why it ended.
    """

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: StopReason


@runtime_checkable
class GenerationServer(Protocol):
    """A server that completes prompts of token ids."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Complete one prompt.

        Raises:
            ServerError: the server could not be reached, or failed; another one may be asked.
        """
        ...


@dataclass(frozen=True)
class ServerStatus:
    """What a server says of itself.

    Attributes:
        label: of the weights it serves, as `weights_label` makes it; None when it has none (just started).
        paused: it takes requests and answers none.
    """

    label: str | None
    paused: bool


@runtime_checkable
class ObservableServer(InferenceServer, Protocol):
    """An inference server that can be asked what it serves."""

    @property
    def name(self) -> str:
        """What logs and errors call it; a URL without secrets, say."""
        ...

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each phase of the last update, by its name (``pause``, ``load``, ``check`` ...)."""
        ...

    def status(self) -> ServerStatus:
        """Ask the server.

        Raises:
            ServerError: it could not be reached, or did not answer as expected.
        """
        ...


def weights_label(folder: str | os.PathLike[str], version: int) -> str:
    """What a server that serves the published ``folder`` says of itself: ``<version>-<digest of the manifest>``."""
    return f"{version}-{bytes_digest((Path(folder) / MANIFEST_NAME).read_bytes())}"


def labelled_version(label: str | None) -> int | None:
    """The version in a `weights_label`; None for any other text."""
    number = (label or "").partition("-")[0]
    return int(number) if number.isdecimal() else None
