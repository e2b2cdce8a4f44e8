"""Sleep: a server frees the memory of its GPUs for other programs, such as the trainer, and takes
it back later.

The server's own label says which parts sleep, and which weights it had. So another process knows it
too, after the one that put the server to sleep was killed. Each step is safe to repeat on vLLM,
from any point at which it was cut off. SGLang dies if a step is repeated, so its label also says
that a step is under way. After a kill there, the server has to be restarted.
"""

import re
from dataclasses import dataclass

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
