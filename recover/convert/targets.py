"""What is written: DCP folders of Holdfast and of AReaL, Hugging Face folders. Generations are in `run_target`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ...engine.api import HFExportOptions
from ...engine.dcp.param_groups import hyperparameters
from ...engine.dcp.state import ROOT, rank_key
from ...engine.dcp.stream import Entry, write_entries
from ...engine.hf.sidecars import adopt_base
from ...engine.hf.stream import write_lazily
from ...engine.lazy_tensor import LazyTensor
from ...utils.errors import CheckpointMismatchError, ConfigError
from ...utils.manifest import FileEntry
from ...utils.safe_json import pack_json
from .checkpoint import Checkpoint

Seen = Callable[[str, int, torch.Tensor], None]
"""Called with ``model.<name>`` or ``optim.state.<parameter>.<entry>``, the first element and the values of a block."""

_TORCH_DEFAULTS = {
    **{"foreach": None, "fused": None, "maximize": False, "capturable": False, "differentiable": False},
    "decoupled_weight_decay": True,
}
"""What torch's AdamW has in its groups besides what Holdfast keeps; a loader that has them wants them."""


def write_dcp(checkpoint: Checkpoint, folder: Path, seen: Seen) -> list[FileEntry]:
    """A folder as `save_dcp` writes it: what `load_dcp` and a `RecoverHandler` read, at any world size.

    Raises:
        ConfigError: the hyperparameters are not known, without which nothing of an optimizer is stored.
    """
    if checkpoint.optimizer and checkpoint.groups is None:
        raise ConfigError(
            "the source has optimizer state without hyperparameters (param_groups: rate, betas), which a DCP folder of "
            "Holdfast holds together: load the source with load_dcp, which keeps the rates that the script sets, or "
            "convert the weights alone with --to hf"
        )
    return write_entries(folder, _dcp_entries(checkpoint), _below(ROOT, seen))


def write_areal(checkpoint: Checkpoint, folder: Path, seen: Seen) -> list[FileEntry]:
    """A folder as AReaL's engine writes it with ``dcp.save({"dcp": DCPState(model, optimizer)})``.

    Its loader asks for each hyperparameter by name, and for tied tensors under every name.

    Raises:
        ConfigError: the hyperparameters are not known.
    """
    if checkpoint.optimizer and checkpoint.groups is None:
        raise ConfigError("the source says nothing of the optimizer's hyperparameters, which AReaL's loader asks for")
    return write_entries(folder, _areal_entries(checkpoint), _below(ROOT, seen))


def write_hf(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype | None, seen: Seen) -> None:
    """A folder that ``from_pretrained`` loads, with the config, tokenizer and other small files of the model's.

    Raises:
        ConfigError: no config is known.
        CheckpointMismatchError: the tensors are not those of its model.
    """
    if checkpoint.architecture is None:
        raise ConfigError(
            f"a source of format {checkpoint.format} has no config.json; name a folder that has the model's, with its "
            "tokenizer if it is to go along: config=, --config"
        )
    model, base = checkpoint.architecture.model, checkpoint.architecture.folder
    adopt_base(model, base)
    options = HFExportOptions(dtype=dtype, base_model_path=base)
    try:
        write_lazily(model, checkpoint.model, folder, options, lambda name, *block: seen(f"model.{name}", *block))
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"the source is not of the model of {base}/config.json: {error}") from error


def plain_groups(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The groups as Holdfast stores them."""
    return [hyperparameters(group) | {"params": list(group["params"])} for group in checkpoint.groups or ()]


def optimizer_steps(checkpoint: Checkpoint) -> int:
    """How many updates the optimizer counts; 0 where it does not."""
    counts = (entries["step"] for entries in checkpoint.optimizer.values() if "step" in entries)
    return max((int(step.rows(0, 1)) if isinstance(step, LazyTensor) else int(step) for step in counts), default=0)


def _below(root: str, seen: Seen) -> Seen:
    return lambda name, *block: seen(name.removeprefix(f"{root}."), *block)


def _dcp_entries(checkpoint: Checkpoint) -> Iterator[Entry]:
    yield from (Entry((ROOT, "model", name), tensor) for name, tensor in checkpoint.model.items())
    if checkpoint.groups is None:
        return
    plain: dict[str, dict[str, Any]] = {}
    for name, entries in checkpoint.optimizer.items():
        for key, value in entries.items():
            if isinstance(value, LazyTensor):
                yield Entry((ROOT, "optim", "state", name, key), value)
            else:
                plain.setdefault(name, {})[key] = value
    steps = optimizer_steps(checkpoint)
    counters = {"version": 0, "optimizer_steps": steps, "skipped_steps": 0, "steps_since_schedule": 0}
    packed = {
        "param_groups": plain_groups(checkpoint),
        "optim_plain": plain,
        "scheduler": checkpoint.scheduler,
        "counters": counters,
    }
    for key, value in packed.items():
        if value:
            yield Entry((ROOT, key), LazyTensor.of(pack_json(value, key)))
    for rank, state in enumerate(checkpoint.rng):
        for generator, tensor in state.items():
            yield Entry((ROOT, "rng", rank_key(rank), generator), LazyTensor.of(tensor))


def _areal_entries(checkpoint: Checkpoint) -> Iterator[Entry]:
    yield from (Entry((ROOT, "model", name), tensor) for name, tensor in checkpoint.model.items())
    for alias, name in checkpoint.aliases.items():
        yield Entry((ROOT, "model", alias), checkpoint.model[name])
    for name, entries in checkpoint.optimizer.items():
        yield from (Entry((ROOT, "optim", "state", name, key), value) for key, value in entries.items())
    for number, group in enumerate(checkpoint.groups or ()):
        for key, value in ({"initial_lr": group.get("lr")} | _TORCH_DEFAULTS | group).items():
            yield Entry((ROOT, "optim", "param_groups", number, key), value)
