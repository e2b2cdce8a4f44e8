"""Sleep: a server frees the memory of its GPUs for other programs, such as the trainer, and takes
it back later.

The server's own label says which parts sleep, and which weights it had. So another process knows it
too, after the one that put the server to sleep was killed. Each step is safe to repeat on vLLM,
from any point at which it was cut off. SGLang dies if a step is repeated, so its label also says
that a step is under way. After a kill there, the server has to be restarted.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ...utils.config import require_choice
from ...utils.errors import ServerError
from .http import Calls

WEIGHTS, KV_CACHE = TAGS = ("weights", "kv_cache")
"""Parts of a server's memory, in the order in which they wake up. The names are those of vLLM and
SGLang.
"""
DROPPED = "no weights"
"""Label of weights that were not kept, or may be in pieces."""
NO_MEMORY = "it goes on sleeping: is the memory that it needs free, and what does its log say?"
_LABEL = re.compile(r"(.*) \(asleep: (.*?)(\??)\)")


@dataclass(frozen=True)
class Sleep:
    """The sleeping parts of a server, and the label of its weights, as its own label states them."""

    tags: tuple[str, ...]
    weights: str
    changing: bool = (
        False  # whether memory is being freed or taken back: some of these parts may be awake
    )

    @classmethod
    def read(cls, label: str) -> "Sleep":
        """Read a label. Without a note of sleep, nothing sleeps."""
        if (found := _LABEL.fullmatch(label)) is None:
            return cls((), label)
        return cls(tuple(found[2].split(", ")), found[1], bool(found[3]))

    @property
    def label(self) -> str:
        """The label with this note. Its version is the version of the weights."""
        return f"{self.weights} (asleep: {', '.join(self.tags)}{'?' if self.changing else ''})"


class SleepingClient(ABC):
    """The part of a client that puts its server to sleep and wakes it up."""

    _asleep = False  # whether a part of the server slept when this client last asked

    def sleep(self, level: int = 1) -> None:
        """Have the server free the memory of its weights and its KV cache.

        Requests in flight wait. They go on when the server wakes up, and the weights of then
        compute their caches. A server that sleeps stays asleep.

        Args:
            level: 1 keeps the weights in host memory. 2 drops them, so that the server needs an
                update to wake up. SGLang decides this at its start
                (``--enable-weights-cpu-backup``).

        Raises:
            ServerError: the server could not be reached, or does not sleep. The message says how to
                start it.
            SlowServerError: it did not sleep in time.
        """
        require_choice("level", level, (1, 2))
        with self._exclusive(", told to sleep", ServerError) as calls:
            kept = self._keeps_weights(calls) and level == 1
            before = self._sleep_now(calls)
            if not before.tags and self._is_paused(calls):
                kept = False  # an update was cut off
            self._asleep = True
            self._put_to_sleep(
                calls, before, Sleep(TAGS, before.weights if kept else DROPPED), level
            )

    def wake_up(self, tags: Collection[str] = TAGS) -> None:
        """Have the server take memory back. With its KV cache it goes on with requests, by the
        weights it had.

        An update of the weights wakes the whole server, the weights first and the KV cache after
        the load. So wake only the weights before one.

        Raises:
            ConfigError: there is no such tag.
            ServerError: the server could not be reached, or cannot wake up: memory is missing, or
                it has no weights.
            SlowServerError: it did not wake up in time.
        """
        for tag in tags:
            require_choice("tags", tag, TAGS)
        with self._exclusive(", told to wake up", ServerError) as calls:
            self._wake_up(calls, tags)

    def _wake_up(self, calls: Calls, tags: Collection[str] = TAGS) -> None:
        """Wake parts that sleep, without a load."""
        asleep = self._sleep_now(calls)
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
        self._asleep = bool(asleep.tags)

    def _wake_weights(self, calls: Calls) -> bool:
        """Make a paused server ready to load weights. If it sleeps, return True: its KV cache goes
        on sleeping.
        """
        asleep = self._sleep_now(calls)
        if WEIGHTS in asleep.tags:
            self._wake(calls, WEIGHTS, asleep)
        if asleep.tags:
            self._set_label(calls, Sleep((KV_CACHE,), DROPPED).label)
        return bool(asleep.tags)

    def _sleep_now(self, calls: Calls) -> Sleep:
        return Sleep.read(self._label(calls))

    # HTTP calls of one kind of server

    @abstractmethod
    def _exclusive(self, what: str, error: type[ServerError]) -> AbstractContextManager[Calls]:
        """Open the calls of one operation. Operations exclude each other."""

    @abstractmethod
    def _label(self, calls: Calls) -> str:
        """Label that the server has now."""

    @abstractmethod
    def _set_label(self, calls: Calls, label: str) -> None: ...

    @abstractmethod
    def _is_paused(self, calls: Calls) -> bool: ...

    @abstractmethod
    def _keeps_weights(self, calls: Calls) -> bool:
        """Whether level 1 keeps the weights. ServerError if the server cannot free memory."""

    @abstractmethod
    def _put_to_sleep(self, calls: Calls, before: Sleep, asleep: Sleep, level: int) -> None:
        """Pause a server that may sleep already, free its memory, and set the label of ``asleep``."""

    @abstractmethod
    def _wake(self, calls: Calls, tag: str, asleep: Sleep) -> None:
        """Take back the memory of one tag. The caller sets the label of ``asleep`` without it."""

    @abstractmethod
    def _go_on(self, calls: Calls) -> None:
        """End a pause."""
