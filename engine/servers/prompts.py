"""Which prompts a server can be asked to complete: token ids of its vocabulary, and fewer of them than it has room for.

A token id beyond the vocabulary reads outside the embedding. vLLM looks at ids only where it has a tokenizer: with
``--skip-tokenizer-init`` one bad prompt kills the server, and the next one that it is sent to. So a client looks first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...utils.errors import PromptError
from ..model.model_folder import read_raw_config
from .api import ModelRequest

_SHOWN_IDS = 8


@dataclass(frozen=True)
class PromptLimits:
    """What is known of the limits of a server.

    Attributes:
        vocab_size: token ids are smaller; None: not known.
        max_tokens: tokens of a prompt and its completion together; None: not known.
    """

    vocab_size: int | None = None
    max_tokens: int | None = None

    def require(self, request: ModelRequest, server: str) -> None:
        """See that ``server`` can complete a prompt, and sample its stop tokens.

        Raises:
            PromptError: it cannot; names the prompt, what is wrong with it, and the limit.
        """
        ids = list(request.input_ids)
        what = f"prompt {request.rid or '(without rid)'} of {len(ids)} token(s) {_shown(ids)}, for {server},"
        if not ids:
            raise PromptError(f"{what} is empty; give it one token at least, the one that begins a text, say")
        for name, some in (("token ids", ids), ("stop_token_ids", list(request.gconfig.stop_token_ids))):
            if (wrong := self._first_outside(some)) is not None:
                place, found = wrong
                raise PromptError(
                    f"{what} has {found!r} at place {place} of its {name}; expected {self._expected_ids()}. Is the "
                    "tokenizer that of the model, and are ids of padding (-1, -100) left out?"
                )
        if self.max_tokens is not None and len(ids) >= self.max_tokens:
            raise PromptError(
                f"{what} leaves no room for a completion: the server takes {self.max_tokens} tokens in all. Shorten or "
                "leave out the sample, limit a conversation (MultiTurnWorkflow max_tokens), or start the server with "
                "a larger --max-model-len"
            )

    def _first_outside(self, ids: Sequence[Any]) -> tuple[int, Any] | None:
        """Place and value of the first that is no token id."""
        for place, found in enumerate(ids):
            if not isinstance(found, int) or found < 0 or (self.vocab_size is not None and found >= self.vocab_size):
                return place, found
        return None

    def _expected_ids(self) -> str:
        return "integers from 0 on" if self.vocab_size is None else f"integers from 0 to {self.vocab_size - 1}"


def folder_vocab_size(folder: str | Path) -> int | None:
    """The size of the vocabulary of a model's folder, by its ``config.json``; None where that does not say."""
    try:
        config = read_raw_config(Path(folder))
    except OSError:
        return None
    text: Any = config.get("text_config")  # of a model that sees, too
    for some in (config, text if isinstance(text, Mapping) else {}):
        if isinstance(size := some.get("vocab_size"), int):
            return size
    return None


def stated_limits(models: Mapping[str, Any], vocab_size: int | None) -> PromptLimits:
    """The limits in the answer to ``GET /v1/models``, of vLLM and SGLang.

    Args:
        models: the answer. Without ``vocab_size`` the folder that it names is looked at, where this host sees it.
        vocab_size: of the model, if that is known.
    """
    entries = models.get("data")
    entry: Any = entries[0] if isinstance(entries, list) and entries else None
    if not isinstance(entry, Mapping):
        return PromptLimits(vocab_size)
    root, room = entry.get("root"), entry.get("max_model_len")
    if vocab_size is None and isinstance(root, str):
        vocab_size = folder_vocab_size(root)
    return PromptLimits(vocab_size, room if isinstance(room, int) else None)


def _shown(ids: Sequence[Any]) -> str:
    more = ", ..." if len(ids) > _SHOWN_IDS else ""
    return f"[{', '.join(map(repr, ids[:_SHOWN_IDS]))}{more}]"
