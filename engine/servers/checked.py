"""What the clients of servers that tell log-probabilities share: contents are compared, and generation is checked."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from ...utils.errors import ServerError, WrongContentError
from ...utils.logging import get_logger
from .api import GenerationHyperparameters
from .completions import samples_plainly, untempered
from .http import Calls, HTTPServer
from .probe import ContentCheck, WeightsProbe, read_probe

logger = get_logger(__name__)

_WITHDRAW_LIMIT_S = 10.0
"""Its own limit: that of the update may have been used up."""


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

    def check_generation(self, gconfig: GenerationHyperparameters) -> None:
        """See that the server completes prompts of token ids, and tells log-probabilities of what it samples from.

        To be called once, before the first completion. It samples one token, and two unless temperature, top-p and
        top-k of ``gconfig`` leave the model's own distribution as it is.

        Raises:
            ServerError: it does not; the message says how to start it.
        """
        with self._calls(", asked for log-probabilities", self.timeout_s, ServerError) as calls:
            plain = self._top_logprobs(calls, 1.0)
            if not samples_plainly(gconfig) and (problem := untempered(plain, self._top_logprobs(calls, 0.5))):
                raise calls.refuse(f"{problem}; {self._how_to_temper}")

    def _read_probe(self, path: str) -> WeightsProbe | None:
        """The probe of a published folder; the first folder without one is warned of."""
        if (probe := read_probe(path)) is None and not self._told_unchecked:
            self._told_unchecked = True
            logger.warning("%s: %s has no probe; what the server says is believed", self.name, path)
        return probe

    def _check_content(self, calls: Calls, path: str, probe: WeightsProbe | None) -> None:
        """Compare the server's answer to the probe; pause the server when it is that of other weights.

        Raises:
            WrongContentError: it is.
        """
        if probe is None:
            return
        if problem := self._content.problem(path, probe, self._prompt_logprobs(calls, probe.prompt_ids)):
            try:
                with self._calls(", to be paused after wrong content", _WITHDRAW_LIMIT_S) as last_calls:
                    self._withdraw(last_calls)
            except ServerError as error:
                logger.warning("%s", error)
            raise calls.refuse(f"{problem}. It was paused again: tell it again, or restart it", WrongContentError)

    @abstractmethod
    def _prompt_logprobs(self, calls: Calls, ids: Sequence[int]) -> list[float]:
        """The server's log-probabilities of all tokens but the first."""

    @abstractmethod
    def _top_logprobs(self, calls: Calls, temperature: float) -> dict[int, float]:
        """Log-probabilities of the five most likely tokens behind some prompt, by token id."""

    @abstractmethod
    def _withdraw(self, calls: Calls) -> None:
        """Have the server answer nothing, and abort what it has begun."""
