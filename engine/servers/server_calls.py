"""`ServerCalls`: the HTTP calls of one kind of server. `SleepingCalls` and `ServerClient` make
operations of them.

Sleep: a server frees the memory of its GPUs for other programs, such as the trainer, and takes
it back later. The server's own label says which parts sleep, and which weights it had. So another
process knows it too, after the one that put the server to sleep was killed. Each step is safe to
repeat on vLLM, from any point at which it was cut off. SGLang dies if a step is repeated, so its
label also says that a step is under way. After a kill there, the server has to be restarted.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from .adapters import AdapterFacts
from .api import KV_CACHE, TAGS, WEIGHTS, ModelRequest, ModelResponse
from .groups import SenderGroup
from .http import Calls, Json
from .stream import BucketReader

DROPPED = "no weights"
"""Label of weights that were not kept, or may be in pieces."""
NO_MEMORY = "it goes on sleeping: is the memory that it needs free, and what does its log say?"
_LABEL = re.compile(r"(.*) \(asleep: (.*?)(\??)\)")


@dataclass(frozen=True)
class Sleep:
    """The sleeping parts of a server and the label of its weights, as its own label says."""

    tags: tuple[str, ...]
    weights: str

    # whether memory is being freed or taken back: some of these parts may be awake
    changing: bool = False

    @classmethod
    def read(cls, label: str) -> "Sleep":
        """Read a label. Without a note of sleep, nothing sleeps."""
        found = _LABEL.fullmatch(label)
        if found is None:
            return cls((), label)
        weights, tags, changing = found.groups()
        return cls(tuple(tags.split(", ")), weights, bool(changing))

    @property
    def label(self) -> str:
        """The label with this note. Its version is the version of the weights."""
        mark = "?" if self.changing else ""
        return f"{self.weights} (asleep: {', '.join(self.tags)}{mark})"


class ServerCalls(ABC):
    """Calls that `VLLMServer` and `SGLangServer` make in their own ways."""

    @abstractmethod
    def _load_weights(self, calls: Calls, path: str, label: str) -> None: ...

    @abstractmethod
    def _form_group(self, calls: Calls, buckets: BucketReader) -> SenderGroup: ...

    @abstractmethod
    def _send_weights(
        self,
        group: SenderGroup,
        buckets: BucketReader,
        calls: Calls,
        label: str,
    ) -> None: ...

    def _require_room(self, calls: Calls, facts: AdapterFacts) -> None:  # noqa: B027
        """Raise PublishError if the server was started without room for adapters that it would not
        refuse itself.
        """

    @abstractmethod
    def _load_adapter(self, calls: Calls, name: str, path: str) -> None: ...

    @abstractmethod
    def _unload_adapter(self, calls: Calls, name: str) -> None: ...

    @abstractmethod
    def _completion(self, request: ModelRequest, adapter: str | None) -> tuple[str, Json]: ...

    @abstractmethod
    def _read_completion(
        self,
        request: ModelRequest,
        answer: Json,
        adapter: str | None,
    ) -> ModelResponse: ...

    @abstractmethod
    async def _read_routes(self, answer: Json) -> np.ndarray:
        """The experts in the answer to a completion. ValueError if there are none."""

    @abstractmethod
    def _returns_routes(self, calls: Calls) -> object:
        """Whether the server says that it was started to return experts."""

    @abstractmethod
    def _prompt_logprobs(
        self,
        calls: Calls,
        ids: Sequence[int],
        adapter: str | None = None,
    ) -> list[float]:
        """Log-probabilities of all tokens but the first, by an adapter or by the base."""

    @abstractmethod
    def _ask_checksums(self, calls: Calls) -> Json:
        """An answer that is the same if and only if the weights are."""

    @abstractmethod
    def _top_logprobs(self, calls: Calls, temperature: float) -> dict[int, float]:
        """Log-probabilities of the five most likely tokens after some prompt, by token id."""

    def _label(self, calls: Calls) -> str:
        """Label that the server has now."""
        label = self._ask_label(calls).get("weight_version")
        if not isinstance(label, str):
            raise calls.refuse(f"the server says that its label is {label!r}")
        return label

    @abstractmethod
    def _ask_label(self, calls: Calls) -> Json:
        """An answer with the label as ``weight_version``."""

    @abstractmethod
    def _set_label(self, calls: Calls, label: str) -> None: ...

    @abstractmethod
    def _is_paused(self, calls: Calls) -> bool: ...

    @abstractmethod
    def _go_on(self, calls: Calls) -> None:
        """End a pause."""

    def _read_sleep(self, calls: Calls) -> Sleep:
        """What sleeps now. ServerError if the server's label leaves it open."""
        return Sleep.read(self._label(calls))

    @abstractmethod
    def _keeps_weights(self, calls: Calls) -> bool:
        """Whether level 1 keeps the weights. ServerError if the server cannot free memory."""

    @abstractmethod
    def _put_to_sleep(self, calls: Calls, before: Sleep, asleep: Sleep, level: int) -> None:
        """Pause a server that may sleep already, free its memory, and set `Sleep.label`."""

    @abstractmethod
    def _wake(self, calls: Calls, tag: str, asleep: Sleep) -> None:
        """Take back the memory of one tag. The caller sets the label of ``asleep`` without it."""

    @abstractmethod
    def _withdraw(self, calls: Calls) -> None:
        """Pause the server and abort its requests."""


class SleepingCalls(ServerCalls):
    """Puts a server to sleep and wakes it up: the order of the calls, and the label after each."""

    _sleeps = False
    """Whether a part of the server slept when the client last asked."""

    def _fall_asleep(self, calls: Calls, level: int) -> None:
        """Free the memory of the whole server. See `ServerClient.sleep`."""
        kept = self._keeps_weights(calls) and level == 1
        before = self._read_sleep(calls)
        if not before.tags and self._is_paused(calls):
            kept = False  # an update was cut off

        # No requests from now on, also if one of the calls fails.
        self._sleeps = True
        asleep = Sleep(TAGS, before.weights if kept else DROPPED)
        self._put_to_sleep(calls, before, asleep, level)

    def _wake_up(self, calls: Calls, tags: Collection[str] = TAGS) -> None:
        """Wake parts that sleep, without a load."""
        asleep = self._read_sleep(calls)
        if WEIGHTS in asleep.tags and WEIGHTS in tags:
            self._wake(calls, WEIGHTS, asleep)
            asleep = Sleep((KV_CACHE,), asleep.weights)
            self._set_label(calls, asleep.label)

        if asleep.tags and KV_CACHE in tags:
            if WEIGHTS in asleep.tags:
                raise calls.refuse("its weights sleep; wake them up first, or all together")
            if asleep.weights == DROPPED:
                raise calls.refuse(
                    "it has no weights, because they were not kept while it slept (level 2, "
                    "SGLang without --enable-weights-cpu-backup), or an update was cut off: "
                    "publish all weights to it, or restart it"
                )
            self._wake(calls, KV_CACHE, asleep)
            self._set_label(calls, asleep.weights)
            self._go_on(calls)
            asleep = Sleep((), asleep.weights)

        self._sleeps = bool(asleep.tags)

    def _wake_weights(self, calls: Calls) -> bool:
        """Make a paused server ready to load weights. If it sleeps, return True: its KV cache goes
        on sleeping.
        """
        asleep = self._read_sleep(calls)
        if WEIGHTS in asleep.tags:
            self._wake(calls, WEIGHTS, asleep)

        # The weights are unknown until the load has ended, also after a kill.
        if asleep.tags:
            self._set_label(calls, Sleep((KV_CACHE,), DROPPED).label)
        return bool(asleep.tags)
