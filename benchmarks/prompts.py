"""A training step on groups of answers, with each prompt computed once or for each answer.

The groups have as many tokens each, in other ratios of prompt to answer.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from holdfast.engine import FSDPEngine
from holdfast.engine.api import Batch

from .harness import OURS, Figure, Options, Times, Way, interleave
from .model import build_engine, ragged_batch, train, training_size
from .ranks import Session, on_ranks

SHARED = f"{OURS}, enable_tree_training"
PLAIN = OURS
_PARAMETERS = 3_000_000
_ANSWERS = 8
_TOKENS = 320
_PROMPTS = {"4:1": 256, "1:1": 160, "1:4": 64}
"""Prompt tokens of `_TOKENS`, by the ratio of prompt to answer."""


def prompt_figures(options: Options) -> list[Figure]:
    """Measure seconds and activations of a step on one rank."""
    times = on_ranks(_measure, options, ranks=1)
    size = training_size(options, _PARAMETERS)
    note = (
        f"{_ANSWERS} answers to one prompt, {size.longer * _TOKENS} tokens of both, by prompt : "
        f"answer; {size.parameters / 1e6:g}M parameters at most"
    )
    seconds = times["seconds"]
    n_bytes = times["bytes"]
    absolute = [f"{name} {values[0] / 1e6:.4g}" for name, values in n_bytes.items()]
    return [
        Figure(
            "train.shared_prompts",
            "steps a second with each prompt once / with each prompt for each answer",
            "higher",
            _gains(seconds),
            {f"{SHARED}, 4:1": 1.5},
            seconds,
            note,
        ),
        Figure(
            "train.shared_prompts_bytes",
            "activations with each prompt for each answer / with each prompt once",
            "higher",
            _gains(n_bytes),
            note=f"MB that autograd keeps: {', '.join(absolute)}",
        ),
    ]


def _gains(values: Mapping[str, list[float]]) -> dict[str, list[float]]:
    # Both ways of a ratio have the same batch.
    gains = {}
    for ratio in _PROMPTS:
        way = f"{SHARED}, {ratio}"
        pairs = zip(values[f"{PLAIN}, {ratio}"], values[way], strict=True)
        gains[way] = [plain / shared for plain, shared in pairs]
    return gains


def _measure(session: Session) -> Times:
    size = training_size(session.options, _PARAMETERS)
    build = partial(build_engine, session, parameters=size.parameters, dtype=size.dtype)
    engines = {
        PLAIN: build(),
        SHARED: build(shares_prompts=True),
    }

    # All answers of a batch begin with one prompt, which has no loss.
    ways: dict[str, Way] = {}
    for ratio, n_prompt in _PROMPTS.items():
        n_prompt *= size.longer
        batch = ragged_batch(engines[PLAIN], [size.longer * _TOKENS] * _ANSWERS)
        batch["input_ids"][:, :n_prompt] = batch["input_ids"][:1, :n_prompt]
        batch["loss_mask"][:, :n_prompt] = 0
        for name, engine in engines.items():
            # Counted once: every later step keeps as much.
            kept = float(_kept_bytes(engine, batch))
            step = partial(train, engine, batch)
            ways[f"{name}, {ratio}"] = partial(session.timed, step, bytes=kept)
    times = interleave(ways, session.options.rounds)
    for engine in engines.values():
        engine.destroy()
    return times


def _kept_bytes(engine: FSDPEngine, batch: Batch) -> int:
    """Bytes that autograd keeps in a step, without parameters."""
    # They stay alive, so that no storage is counted in the place of another.
    alive: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        train(engine, batch)

    storages = {}
    for tensor in alive:
        base = tensor if tensor._base is None else tensor._base
        if not isinstance(base, nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
