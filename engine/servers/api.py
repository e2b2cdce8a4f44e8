"""Requests, responses and states of inference servers of any kind, and the protocols of what a
server can do.

The names are AReaL's (``areal/api/io_struct.py``, ``areal/api/cli_args.py``), so a workflow for
AReaL reads the same.
"""

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

import numpy as np

from ...utils.config import require_at_least, require_numbers, require_range
from ...utils.files import StrPath
from ...utils.manifest import manifest_digest

S_co = TypeVar("S_co", bound="InferenceServer", covariant=True)
StopReason = Literal["stop", "length"]
"""Reason for the end of a response: a stop token, or ``max_new_tokens``."""
STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)
WEIGHTS = "weights"
KV_CACHE = "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
"""Parts of a server's memory, in the order in which they wake up. The names are those of vLLM and
SGLang.
"""


@dataclass(frozen=True)
class GenerationHyperparameters:
    """Sampling parameters.

    Attributes:
        n_samples: number of completions per prompt.
        max_new_tokens: most tokens of a completion. A server's context may leave room for fewer.
        min_new_tokens: fewest tokens before a stop token.
        temperature: divisor of the logits. 0 takes the most likely token.
        top_p: sample from the smallest set of tokens with this probability. 1: all tokens.
        top_k: sample from this number of most likely tokens. 0: all tokens.
        stop_token_ids: the first of these tokens ends a completion and is part of the completion.

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
        require_numbers(self)
        require_at_least(self, n_samples=1, max_new_tokens=1, temperature=0.0, top_k=0)
        require_range("min_new_tokens", self.min_new_tokens, low=0, high=self.max_new_tokens)
        require_range("top_p", self.top_p, low=0.0, high=1.0)

    def within(self, room: int) -> "GenerationHyperparameters":
        """The same for a completion that has room for this many tokens."""
        if self.max_new_tokens <= room:
            return self
        return replace(self, max_new_tokens=room, min_new_tokens=min(self.min_new_tokens, room))


@dataclass(frozen=True)
class PromptImages:
    """The images of a prompt, for a server that makes their pixels itself.

    Attributes:
        token_ids: the prompt as the chat template made it, with one placeholder for each image. A
            server expands the placeholders, so it never gets ids that the processor has expanded.
        files: the encoded images (PNG), in order.
        forbidden: ids that must not be sampled, such as the image token.
    """

    token_ids: Sequence[int]
    files: Sequence[bytes]
    forbidden: Sequence[int] = ()

    def followed_by(self, token_ids: Sequence[int]) -> "PromptImages":
        """The images of a prompt that goes on with ``token_ids``."""
        return replace(self, token_ids=[*self.token_ids, *token_ids])

    @property
    def urls(self) -> list[str]:
        """The images as data URLs."""
        return [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in self.files]

    @property
    def logit_bias(self) -> dict[str, float]:
        """The bias that excludes `forbidden` from sampling, in the format of vLLM and SGLang."""
        return {str(token): -100.0 for token in self.forbidden}


@dataclass(frozen=True)
class ModelRequest:
    """One prompt to complete.

    Attributes:
        input_ids: token ids of the prompt, with all tokens of its images.
        gconfig: sampling parameters. A request asks for one completion, ``n_samples`` is ignored.
        seed: the same seed gives about the same answer. A server that batches does not repeat it
            bit for bit. None: the server draws a seed.
        rid: name of the request, for logs.
        metadata: data of the caller, which is not sent.
        images: the images of the prompt, with the ids that are sent. None: a text, whose
            ``input_ids`` are sent.
        routes_from: the first input token whose experts the server returns. None: of no token.
            `RolloutConfig.return_routed_experts` decides for the requests of episodes.
    """

    input_ids: Sequence[int]
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    seed: int | None = None
    rid: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    images: PromptImages | None = None
    routes_from: int | None = None


@dataclass(frozen=True)
class ModelResponse:
    """One completion.

    Attributes:
        input_tokens: the prompt. With images, as the server expanded it.
        output_tokens: token ids of the completion, including a stop token.
        output_logprobs: log-probability of each token in the distribution that it was sampled from.
        output_versions: version of the weights that sampled each token, from the record of the
            server.
        stop_reason: reason for the end.
        routed_experts: ``[prompt + completion - 1 - routes_from, layers, k]`` uint8 or int16,
            experts of the input tokens from ``routes_from`` on. None: not asked for. Responses
            are compared without them.
    """

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: StopReason
    routed_experts: np.ndarray | None = field(default=None, compare=False)


def logprob_problem(logprobs: Sequence[object]) -> str | None:
    """Describe the first log-probability that is no finite number in 32 bits, or return None. JSON
    may also have ``null`` there.
    """
    # One pass for all tokens, because each answer comes here.
    if _are_finite(logprobs):
        return None
    place, logprob = next(
        (place, logprob) for place, logprob in enumerate(logprobs) if not _are_finite([logprob])
    )
    return (
        f"the log-probability of completion token {place} is {logprob!r:.80}; expected a "
        "finite number. The model may compute NaN: look at the server's log and its --dtype, "
        "and publish to it again or restart it"
    )


def _are_finite(logprobs: Sequence[object]) -> bool:
    values = np.asarray(logprobs)
    if values.dtype.kind not in "biuf":
        return False
    with np.errstate(over="ignore"):
        return bool(np.isfinite(values.astype(np.float32)).all())


@dataclass(frozen=True)
class ServerStatus:
    """A server's report on itself."""

    # `weights_label` of the served weights. None: no published weights, as after a start
    label: str | None

    paused: bool  # whether the server holds requests back
    asleep: tuple[str, ...] = ()  # the parts of its memory that sleep, of `TAGS`


# What a server can do. A client has the methods of each protocol that its server supports.


class InferenceServer(Protocol):
    """A rollout worker, or a client of an inference server, that can load new weights."""

    def update_weights_from_disk(self, path: str, version: int) -> int:
        """Load the Hugging Face folder ``path`` and return the version served from now on."""
        ...


@runtime_checkable
class DistributedServer(InferenceServer, Protocol):
    """An inference server that receives weights over a process group."""

    def update_weights_from_distributed(self, path: str, version: int, buckets: Any) -> int:
        """Receive the weights that the folder ``path`` describes. Return the version served from
        now on.

        ``buckets`` is a `holdfast.engine.servers.stream.BucketReader`.
        """
        ...


@runtime_checkable
class AdapterServer(InferenceServer, Protocol):
    """An inference server that loads adapters for the base model with which it was started."""

    def update_adapters_from_disk(self, path: str, version: int) -> int:
        """Load the PEFT folder ``path``. Return the version that answers new requests."""
        ...

    def folders_in_use(self) -> set[str]:
        """Folders of adapters that the server may read again. They must not be deleted yet."""
        ...


@runtime_checkable
class SleepingServer(InferenceServer, Protocol):
    """An inference server that frees the memory of its GPUs for a while."""

    def sleep(self, level: int = 1) -> None:
        """Free the memory of weights and KV cache. Level 2 does not keep the weights."""
        ...

    def wake_up(self, tags: Collection[str] = TAGS) -> None:
        """Take back memory. An update of the weights takes back the rest."""
        ...


@runtime_checkable
class GenerationServer(Protocol):
    """A server that completes prompts of token ids."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Complete one prompt, or raise ServerError if this server cannot. Another server is asked
        then.
        """
        ...


class ScoringServer(Protocol):
    """A server that tells log-probabilities of given tokens."""

    @property
    def name(self) -> str:
        """Name in logs and errors, such as a URL without secrets."""
        ...

    def served_model(self) -> str:
        """Name of the model that the server was started with."""
        ...

    def prompt_logprobs(self, input_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, given those before it."""
        ...


@runtime_checkable
class ObservableServer(InferenceServer, Protocol):
    """A client that can ask its server which weights it serves. A fleet checks such servers
    regularly.
    """

    @property
    def name(self) -> str:
        """Name in logs and errors, such as a URL without secrets."""
        ...

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each phase of the last update (``pause``, ``load``, ``check`` ...)."""
        ...

    def status(self) -> ServerStatus:
        """Ask the server, or raise ServerError if it does not answer as expected."""
        ...


@runtime_checkable
class TimeoutCounter(Protocol):
    """A server that counts requests without an answer, for whoever started it."""

    def note_timeout(self) -> None:
        """Note that a request was not answered in time. The server may hang."""
        ...


@runtime_checkable
class ServerSource(Protocol[S_co]):
    """Servers that come and go, such as `holdfast.engine.launch.ServerProcesses`. A `ServerFleet`
    looks at them regularly.
    """

    def servers(self) -> Sequence[S_co]:
        """The servers that answer now, as the same objects each time. Each new one gets a new
        object.

        Raises ConfigError or RolloutError if the run cannot go on without those that are missing.
        """
        ...

    def absent(self) -> "list[ServerReport]":
        """Reports on the servers that do not answer now."""
        ...

    def stats(self) -> dict[str, float]:
        """Statistics, in addition to those of `server_stats`."""
        ...

    def hold(self, on: bool) -> None:
        """Start no server while something else has the memory of its GPUs. One that is starting
        ends, and is started again afterwards.
        """
        ...


class ServerState(StrEnum):
    """Whether a server may generate, and the reason if not."""

    SERVING = "serving"
    """The server confirmed the weights published last. During a publication, it confirmed the
    weights before.
    """
    BEHIND = "behind"
    """The server answers, but serves other weights or failed to load the published ones."""
    PAUSED = "paused"
    """The server answers and completes nothing: an update failed, or its publisher was killed."""
    ASLEEP = "asleep"
    """The server was put to sleep, or only its weights are awake. Its memory is free for other
    programs.
    """
    GONE = "gone"
    """The server does not answer."""
    STARTING = "starting"
    """The job has started the server, which does not answer yet."""


@dataclass(frozen=True)
class ServerReport:
    """Report on one server of a fleet."""

    name: str  # name in logs
    state: ServerState = ServerState.BEHIND  # last known state
    label: str | None = None  # `weights_label` of the served weights. None: unknown

    # last error. None once the server serves
    error: str | None = "it has not been told of any weights yet"

    # of each phase of the last update, and in ``total``
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        detail = ""
        if self.state is ServerState.SERVING:
            detail = f" {self.label}"
        elif self.error:
            detail = f" ({self.error})"
        return f"{self.name} is {self.state}{detail}"


def server_stats(reports: Iterable[ServerReport]) -> dict[str, float]:
    """Statistics: ``servers_<state>`` (number of servers) and ``update_<phase>_s`` (seconds of the
    slowest server).
    """
    reports = list(reports)
    stats: dict[str, float] = {}
    for state in ServerState:
        stats[f"servers_{state}"] = float(sum(report.state is state for report in reports))

    # A server that did not come to a phase counts with 0 seconds.
    phases = sorted({phase for report in reports for phase in report.seconds})
    for phase in phases:
        stats[f"update_{phase}_s"] = max(report.seconds.get(phase, 0.0) for report in reports)
    return stats


def weights_label(folder: StrPath, version: int) -> str:
    """Label of a server that serves the published ``folder``: ``<version>-<digest of the
    manifest>``.
    """
    return f"{version}-{manifest_digest(folder)}"


def labelled_version(label: str | None) -> int | None:
    """The version in a `weights_label`, or None for any other text."""
    number = (label or "").partition("-")[0]
    return int(number) if number.isdecimal() else None
