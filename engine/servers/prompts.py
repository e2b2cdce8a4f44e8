"""Limits of a server on prompts: its vocabulary and its context length.

A token id outside the vocabulary reads outside the embedding. vLLM checks ids only if it has a tokenizer. With
``--skip-tokenizer-init`` one bad prompt kills the server, and every server that the prompt is sent to afterwards.
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
    """Size of the vocabulary, and most tokens of prompt and completion together. None: unknown."""

    vocab_size: int | None = None
    max_tokens: int | None = None

    def require(self, request: ModelRequest, server: str) -> None:
        """Raise PromptError if ``server`` cannot complete the prompt or sample its stop tokens."""
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
        for place, found in enumerate(ids):
            if not isinstance(found, int) or found < 0 or (self.vocab_size is not None and found >= self.vocab_size):
                return place, found
        return None

    def _expected_ids(self) -> str:
        return "integers from 0 on" if self.vocab_size is None else f"integers from 0 to {self.vocab_size - 1}"


def folder_vocab_size(folder: str | Path) -> int | None:
    """Vocabulary size in the ``config.json`` of a model folder, or None."""
    try:
        config = read_raw_config(Path(folder))
    except OSError:
        return None
    text: Any = config.get("text_config")  # the text part of a multimodal model
    for some in (config, text if isinstance(text, Mapping) else {}):
        if isinstance(size := some.get("vocab_size"), int):
            return size
    return None


def stated_limits(models: Mapping[str, Any], vocab_size: int | None) -> PromptLimits:
    """The limits in the answer ``models`` of vLLM or SGLang to ``GET /v1/models``.

    The answer names the model folder, whose config is read if ``vocab_size`` is None.
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
