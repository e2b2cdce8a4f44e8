"""What the clients of servers that tell log-probabilities share: contents are compared, generation and prompts are
checked."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from ...utils.errors import BusyServerError, PromptError, PublishError, ServerError, WrongContentError
from ...utils.logging import get_logger
from .api import GenerationHyperparameters, ModelRequest, ServerStatus
from .completions import samples_plainly, untempered
from .http import Calls, HTTPServer
from .probe import ContentCheck, WeightsProbe, read_probe
from .prompts import PromptLimits, folder_vocab_size, stated_limits

logger = get_logger(__name__)

_WITHDRAW_LIMIT_S = 10.0
"""Its own limit: that of the update may have been used up."""
_PAUSED = "It was paused again: tell it again, or restart it"
_UNLOADED = (
    "They were unloaded again, and it goes on with those before: tell it again, or restart it with the base model that "
    "is trained"
)


@dataclass(eq=False, repr=False)
class CheckedServer(HTTPServer, ABC):
    """A client that looks at what a server answers, and not at what it says of itself.

    Attributes:
        dtype: what the server computes in (``float32``, ``float16`` or ``bfloat16``), where that is coarser than the
            dtype that folders are stored in; None: the same.
    """

    checks_content: ClassVar[bool] = True
    """It wants a `WeightsProbe` in the folders that it is told of."""
    _how_to_temper: ClassVar[str]
    """How to start the server so that its log-probabilities are those at the temperature that was asked for."""

    _: KW_ONLY
    dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._content = ContentCheck(self.dtype)
        self._told_unchecked = False
        self._vocab_size: int | None = None
        self._limits: PromptLimits | None = None

    def check_generation(self, gconfig: GenerationHyperparameters) -> None:
        """See that the server completes prompts of token ids, and tells log-probabilities of what it samples from.

        To be called once, before the first completion. It samples one token, and two unless temperature, top-p and
        top-k of ``gconfig`` leave the model's own distribution as it is.

        Raises:
            ServerError: it does not; the message says how to start it.
        """
        with self._calls(", asked for log-probabilities", self._update_limit_s, ServerError) as calls:
            plain = self._top_logprobs(calls, 1.0)
            if not samples_plainly(gconfig) and (problem := untempered(plain, self._top_logprobs(calls, 0.5))):
                raise calls.refuse(f"{problem}; {self._how_to_temper}")

    async def _require_fit(self, request: ModelRequest) -> None:
        """See that the server can complete a prompt, as far as its limits are known; before it is sent.

        Raises:
            PromptError: it cannot.
            ServerError: it cannot be reached, to be asked for its limits.
        """
        try:
            (self._limits or await self._ask_limits()).require(request, self.name)
        except PromptError:  # by the limits of a server that was there before, perhaps
            (await self._ask_limits()).require(request, self.name)

    async def _ask_limits(self) -> PromptLimits:
        try:
            models = await self._ask("/v1/models", limit_s=self.status_timeout_s)
        except (PublishError, BusyServerError):  # unreachable, or too slow; it has not answered yet
            raise
        except ServerError as error:
            logger.warning("%s does not say how long a prompt may be: %s", self.name, error)
            models = {}
        self._limits = stated_limits(models, self._vocab_size)
        return self._limits

    def _read_probe(self, path: str) -> WeightsProbe | None:
        """The probe of a published folder, whose vocabulary is noted; the first folder without one is warned of."""
        if (vocab_size := folder_vocab_size(path)) is not None and vocab_size != self._vocab_size:
            self._vocab_size, self._limits = vocab_size, None
        if (probe := read_probe(path)) is None and not self._told_unchecked:
            self._told_unchecked = True
            logger.warning("%s: %s has no probe; what the server says is believed", self.name, path)
        return probe

    def _check_content(self, calls: Calls, path: str, probe: WeightsProbe | None, adapter: str | None = None) -> None:
        """Compare the server's answer to the probe; `_withdraw` when it is that of other weights.

        Args:
            calls: of the update.
            path: the published folder.
            probe: of it.
            adapter: that is to answer; None: the base.

        Raises:
            WrongContentError: it is.
        """
        if probe is None:
            return
        if problem := self._content.problem(path, probe, self._prompt_logprobs(calls, probe.prompt_ids, adapter)):
            raise self._withdrawn(calls, problem, WrongContentError, adapter)

    def _withdrawn(
        self, calls: Calls, problem: str, error: type[ServerError] | None = None, adapter: str | None = None
    ) -> ServerError:
        """The error that it serves something else than it should, which is to be raised; `_withdraw` was tried."""
        try:
            with self._calls(", to be withdrawn after wrong content", _WITHDRAW_LIMIT_S) as last_calls:
                self._withdraw(last_calls, adapter)
        except ServerError as failure:
            logger.warning("%s", failure)
        return calls.refuse(f"{problem}. {_PAUSED if adapter is None else _UNLOADED}", error)

    @abstractmethod
    def _prompt_logprobs(self, calls: Calls, ids: Sequence[int], adapter: str | None = None) -> list[float]:
        """The log-probabilities of all tokens but the first, of an adapter or of the base."""

    @abstractmethod
    def _top_logprobs(self, calls: Calls, temperature: float) -> dict[int, float]:
        """Log-probabilities of the five most likely tokens behind some prompt, by token id."""

    @abstractmethod
    def _withdraw(self, calls: Calls, adapter: str | None) -> None:
        """Have the server forget the adapter; or, with None, answer nothing, and abort what it has begun."""


def unexpected(status: ServerStatus, label: str) -> str:
    """What is wrong with a server that says this of itself, after an update to weights with this label."""
    return (
        f"after it, the server says {status}; expected the label {label}, not paused. If another job publishes to it, "
        "nobody knows whose weights it has"
    )
