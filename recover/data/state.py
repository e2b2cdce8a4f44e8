"""The dataloader's state in a generation, one for each process that calls the handler or one for all of them."""

from pathlib import Path
from typing import Any

from ...engine.api import Stateful, StepInfo
from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from ...utils.plain_values import pack_plain, read_plain, unpack_plain
from ..ranks.coordinator import Ranks
from .epoch_order import EpochOrder, epoch_order
from .position import RestoredEpoch, restore_dataloader

DATA_STATE = "data.pt"


def capture_data(ranks: Ranks, dataloader: Stateful | None) -> bytes | None:
    """Capture the contents of `DATA_STATE`: the state and epoch order of the loader of every calling process.

    Only the first process is captured if any number of processes can resume its state. Collective over the callers.

    Raises:
        ConfigError: a state could not be read back, only some processes have a dataloader, or the order of a loader
            could not be made again (see `epoch_order`).
    """
    found = ranks.here(lambda: None if dataloader is None else _capture_loader(dataloader))
    captured = [each for each in found if each is not None]
    if not captured:
        return None
    if len(captured) < len(found):
        raise ConfigError(f"rank(s) {[i for i, each in enumerate(found) if each is None]} passed no dataloader")
    rank_independent = getattr(dataloader, "rank_independent", False)
    saved = captured[:1] if rank_independent else captured
    data = {
        "rank_independent": rank_independent,
        "states": [state for state, _ in saved],
        "sampler_epochs": [order.epoch for _, order in saved],
        "sampler_generators": [order.generator for _, order in saved],
        "sampler_draws": [order.draws for _, order in saved],
    }
    return pack_plain("dataloader state", data)


def _capture_loader(dataloader: Stateful) -> tuple[bytes, EpochOrder]:
    state_dict = dataloader.state_dict()
    return pack_plain("dataloader state", state_dict), epoch_order(dataloader, state_dict)


def restore_data(
    generation: Path, dataloader: Stateful | None, caller: int, n_callers: int, last_step: StepInfo
) -> RestoredEpoch | None:
    """Restore the dataloader of the ``caller``-th of ``n_callers`` processes. Returns the rest of its epoch.

    Raises:
        CheckpointMismatchError: there is a state and no dataloader or the reverse, another number of processes saved
            the state and it cannot be shared, or the loader did not take it (see `restore_dataloader`).
        CheckpointCorruptError: the file cannot be read.
    """
    path = generation / DATA_STATE
    if dataloader is None and path.exists():
        raise CheckpointMismatchError(
            f"{generation} holds a dataloader's state; pass that dataloader, or data starts over"
        )
    if dataloader is None:
        return None
    if not path.exists():
        raise CheckpointMismatchError(f"{generation} holds no dataloader state; was it saved without a dataloader?")
    states, orders, rank_independent = _read(path)
    if len(states) != n_callers and not rank_independent:
        raise CheckpointMismatchError(
            f"{generation} holds dataloader states of {len(states)} processes, now there are {n_callers}; only a "
            "dataloader that is rank_independent, as ResumableDataLoader, can change their number"
        )
    own = 0 if rank_independent else caller
    return restore_dataloader(dataloader, unpack_plain(states[own], path), orders[own], last_step)


def _read(path: Path) -> tuple[list[Any], list[EpochOrder], bool]:
    """States, orders (unknown in files of older versions), and whether any number of processes may use them."""
    match read_plain(path):
        case {"states": [_, *_] as states, "rank_independent": rank_independent, **more}:
            unknown = [None] * len(states)
            epochs, generators = (more.get(key, unknown) for key in ("sampler_epochs", "sampler_generators"))
            draws = more.get("sampler_draws", [{}] * len(states))
            return list(states), list(map(EpochOrder, epochs, generators, draws)), rank_independent
    raise CheckpointCorruptError(f"{path} is no dataloader's state; expected 'states' and 'rank_independent'")
