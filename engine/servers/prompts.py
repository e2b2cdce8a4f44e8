"""Prompts in errors: their names, and token ids that no server may be sent."""

from collections.abc import Sequence
from typing import Any

from ...utils.errors import PromptError
from .api import ModelRequest

_SHOWN_IDS = 8


def require_known(ids: Sequence[Any], what: str, name: str, vocab_size: int | None) -> None:
    """Raise PromptError unless all ids are integers from 0 on, and below ``vocab_size`` if that is
    known. The message begins with ``what``, and calls the ids ``name``.
    """
    for place, found in enumerate(ids):
        is_id = isinstance(found, int) and found >= 0
        if is_id and (vocab_size is None or found < vocab_size):
            continue
        last = "on" if vocab_size is None else f"to {vocab_size - 1}"
        raise PromptError(
            f"{what} has {found!r} at place {place} of its {name}; expected integers from "
            f"0 {last}. Is the tokenizer that of the model, and are ids of padding (-1, "
            "-100) left out?"
        )


def shown_prompt(request: ModelRequest) -> str:
    """The name of a prompt, its length and its first ids, for errors."""
    ids = request.input_ids
    shown = [repr(token) for token in ids[:_SHOWN_IDS]]
    if len(ids) > _SHOWN_IDS:
        shown.append("...")
    return f"prompt {request.rid or '(without rid)'} of {len(ids)} token(s) [{', '.join(shown)}]"
