"""The dataloader's state in a generation: that of every process that calls the handler, or one for all of them."""

from pathlib import Path

from ..engine.api import Stateful
from ..utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from ..utils.plain_torch import pack_plain, read_plain, unpack_plain
from .dataloader import restore_dataloader
from .ranks import Ranks

DATA_STATE = "data.pt"


def capture_data(ranks: Ranks, dataloader: Stateful | None) -> bytes | None:
    """What `DATA_STATE` holds: the state of every process that calls the handler, packed one by one, or of the first
    only when any number of them can resume it. All that call the handler call this.

    Raises:
        ConfigError: a state could not be read back, or only some of the processes have a dataloader.
    """
    states = ranks.here(lambda: None if dataloader is None else pack_plain("dataloader state", dataloader.state_dict()))
    if None in states:
        if set(states) != {None}:
            raise ConfigError(f"rank(s) {[i for i, state in enumerate(states) if state is None]} passed no dataloader")
        return None
    rank_independent = getattr(dataloader, "rank_independent", False)
    kept = states[:1] if rank_independent else states
    return pack_plain("dataloader state", {"rank_independent": rank_independent, "states": kept})


def restore_data(generation: Path, dataloader: Stateful | None, caller: int, n_callers: int) -> None:
    """Put the dataloader of the ``caller``-th of ``n_callers`` processes back.

    Raises:
        CheckpointMismatchError: there is a state and no dataloader or the reverse, or the state is of another number of
            processes and cannot be shared.
        CheckpointCorruptError: the file cannot be read.
    """
    path = generation / DATA_STATE
    if dataloader is None and path.exists():
        raise CheckpointMismatchError(
            f"{generation} holds a dataloader's state; pass that dataloader, or data starts over"
        )
    if dataloader is None:
        return
    if not path.exists():
        raise CheckpointMismatchError(f"{generation} holds no dataloader state; was it saved without a dataloader?")
    saved = read_plain(path)
    if not isinstance(saved, dict) or not saved.keys() >= {"states", "rank_independent"}:
        raise CheckpointCorruptError(f"{path} is no dataloader's state; expected 'states' and 'rank_independent'")
    states, rank_independent = saved["states"], saved["rank_independent"]
    if len(states) != n_callers and not rank_independent:
        raise CheckpointMismatchError(
            f"{generation} holds dataloader states of {len(states)} processes, now there are {n_callers}; only a "
            "dataloader that is rank_independent, as ResumableDataLoader, can change their number"
        )
    restore_dataloader(dataloader, unpack_plain(states[0] if rank_independent else states[caller], path))
