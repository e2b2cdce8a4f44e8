"""Protocol of a workflow, with AReaL's names (``areal/api/workflow_api.py``), and helpers of the included ones."""

from collections.abc import Mapping
from typing import Any, Protocol

from ...utils.errors import ConfigError
from ..servers.api import ModelRequest, ModelResponse
from .trajectory import Trajectory


class EpisodeEngine(Protocol):
    """Interface of a workflow to the servers, for one ticket."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Complete one prompt on some server.

        The request's seed is hashed with the seed of the ticket. If it is None, the number of calls so far replaces it.
        A workflow with concurrent calls should number its requests in ``seed``, so that a rerun of the ticket sends the
        same requests whatever answer comes first.

        Raises:
            RolloutError: no server answered in all attempts.
        """
        ...


class RolloutWorkflow(Protocol):
    """A user's episode: sample completions, compute rewards, return a trajectory."""

    async def arun_episode(self, engine: EpisodeEngine, data: Any) -> Trajectory | None:
        """Sample one ticket.

        It runs on a thread of the training process. Put work of more than a few milliseconds into a `CallPool`. Do not
        draw from the global generators (``random``, ``np.random``, ``torch``), which belong to the training.

        Args:
            engine: completes prompts.
            data: sample of the dataset.

        Returns:
            the trajectory to train on. None rejects the ticket, and another ticket replaces it.
        """
        ...


def encode_prompt(data: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """Token ids of a prompt: ``messages`` in the chat template, or ``input_ids`` if there is no tokenizer."""
    key = "input_ids" if tokenizer is None else "messages"
    if key not in data:
        raise ConfigError(f"the sample has no {key!r}; it has {sorted(data)}")
    if tokenizer is None:
        return [int(token) for token in data[key]]
    return tokenizer.apply_chat_template(data[key], add_generation_prompt=True, tokenize=True, return_dict=False)


def decode(ids: list[int], tokenizer: Any) -> str | None:
    """The text of ``ids``, or None if there is no tokenizer."""
    return None if tokenizer is None else tokenizer.decode(ids)
