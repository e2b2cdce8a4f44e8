"""Sleep: a server frees the memory of its GPUs for other programs, such as the trainer, and takes
it back later.

The server's own label says which parts sleep, and which weights it had. So another process knows it
too, after the one that put the server to sleep was killed. Each step is safe to repeat on vLLM,
from any point at which it was cut off. SGLang dies if a step is repeated, so its label also says
that a step is under way. After a kill there, the server has to be restarted.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from .http import Calls

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
"""Parts of a server's memory, in the order in which they wake up. The names are those of vLLM and
SGLang.
"""
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


@dataclass(frozen=True)
class SleepCalls:
    """HTTP calls of a client that differ between kinds of servers."""

    keeps_weights: Callable[[Calls], bool]
    read_sleep: Callable[[Calls], Sleep]
    is_paused: Callable[[Calls], bool]
    put_to_sleep: Callable[[Calls, Sleep, Sleep, int], None]
    wake: Callable[[Calls, str, Sleep], None]
    set_label: Callable[[Calls, str], None]
    go_on: Callable[[Calls], None]


class Sleeping:
    """Puts the server of a client to sleep and wakes it up: the order of the steps, and the label
    after each.
    """

    def __init__(self, server: SleepCalls) -> None:
        self._server = server
        self.seen = False  # whether a part of the server slept when the client last asked

    def fall_asleep(self, calls: Calls, level: int) -> None:
        """Free the memory of the whole server. See `ServerClient.sleep`."""
        server = self._server
        kept = server.keeps_weights(calls) and level == 1
        before = server.read_sleep(calls)
        if not before.tags and server.is_paused(calls):
            kept = False  # an update was cut off

        # No requests from now on, also if one of the calls fails.
        self.seen = True
        asleep = Sleep(TAGS, before.weights if kept else DROPPED)
        server.put_to_sleep(calls, before, asleep, level)

    def wake_up(self, calls: Calls, tags: Collection[str] = TAGS) -> None:
        """Wake parts that sleep, without a load."""
        server = self._server
        asleep = server.read_sleep(calls)
        if WEIGHTS in asleep.tags and WEIGHTS in tags:
            server.wake(calls, WEIGHTS, asleep)
            asleep = Sleep((KV_CACHE,), asleep.weights)
            server.set_label(calls, asleep.label)

        if asleep.tags and KV_CACHE in tags:
            if WEIGHTS in asleep.tags:
                raise calls.refuse("its weights sleep; wake them up first, or all together")
            if asleep.weights == DROPPED:
                raise calls.refuse(
                    "it has no weights, because they were not kept while it slept (level 2, "
                    "SGLang without --enable-weights-cpu-backup), or an update was cut off: "
                    "publish all weights to it, or restart it"
                )
            server.wake(calls, KV_CACHE, asleep)
            server.set_label(calls, asleep.weights)
            server.go_on(calls)
            asleep = Sleep((), asleep.weights)

        self.seen = bool(asleep.tags)

    def wake_weights(self, calls: Calls) -> bool:
        """Make a paused server ready to load weights. If it sleeps, return True: its KV cache goes
        on sleeping.
        """
        server = self._server
        asleep = server.read_sleep(calls)
        if WEIGHTS in asleep.tags:
            server.wake(calls, WEIGHTS, asleep)

        # The weights are unknown until the load has ended, also after a kill.
        if asleep.tags:
            server.set_label(calls, Sleep((KV_CACHE,), DROPPED).label)
        return bool(asleep.tags)
