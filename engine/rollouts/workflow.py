"""What a workflow is, and the prompts of the ready ones. The names are AReaL's (``areal/api/workflow_api.py``)."""

from collections.abc import Mapping
from typing import Any, Protocol

from ...utils.errors import ConfigError
from ..servers.api import ModelRequest, ModelResponse
from .trajectory import Trajectory


class EpisodeEngine(Protocol):
    """What a workflow samples with; made for one ticket."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Complete one prompt, on whatever server that takes.

        The seed of the request is replaced by one derived from the ticket's and from it, or from how many calls came
        before where it is None. A workflow that makes several calls at once, and others after them, numbers them in
        ``seed`` itself: then a rerun of the ticket asks for the same, whatever comes first.

        Raises:
            RolloutError: no server answered, as often as it was tried.
        """
        ...


class RolloutWorkflow(Protocol):
    """How an episode goes."""

    async def arun_episode(self, engine: EpisodeEngine, data: Any) -> Trajectory | None:
        """Sample one ticket.

        It runs on a thread beside the training: work that takes longer than a few milliseconds belongs into a
        `CallPool`. The global generators (``random``, ``np.random``, ``torch``) are the training's: draw from none.

        Args:
            engine: to sample with.
            data: the sample of the dataset.

        Returns:
            what is trained on; None rejects the ticket, and another one is handed out in its place.
        """
        ...


def encode_prompt(data: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """Token ids of a sample's prompt: its ``messages`` in the chat template, or ``input_ids`` without a tokenizer.

    Raises:
        ConfigError: the sample has none.
    """
    key = "input_ids" if tokenizer is None else "messages"
    if key not in data:
        raise ConfigError(f"the sample has no {key!r}; it has {sorted(data)}")
    if tokenizer is None:
        return [int(token) for token in data[key]]
    return tokenizer.apply_chat_template(data[key], add_generation_prompt=True, tokenize=True, return_dict=False)


def decode(ids: list[int], tokenizer: Any) -> str | None:
    """The text of ``ids``; None without a tokenizer."""
    return None if tokenizer is None else tokenizer.decode(ids)
