"""Whether all ranks see the run's folder: the leader makes a file there, and every rank looks for it.

Without it a rank of a node that has another file system under this path is found when the first snapshot is to be
committed, after hours perhaps.
"""

import socket
import uuid
from functools import partial
from pathlib import Path
from typing import Any

from ...utils.distributed import get_rank
from ...utils.errors import ConfigError
from ...utils.logging import get_logger
from ..ranks.coordinator import Ranks

logger = get_logger(__name__)


def check_shared(ranks: Ranks, folder: Path) -> None:
    """See that ``folder``, which the leader has locked, is the same one for all ranks; collective over the callers.

    Raises:
        ConfigError: a rank does not see what the leader sees; it names ranks, nodes and the folder.
    """
    probe = ranks.decide(partial(_make_probe, folder))
    if probe is None:
        return
    try:
        blind = [found for found in ranks.run_all(_look, str(probe)) if found is not None]
    finally:
        if ranks.is_leader:
            probe.unlink(missing_ok=True)
    if blind:
        raise ConfigError(
            f"{'; '.join(blind)} does not see {probe}, which the leader sees on {ranks.decide(socket.gethostname)}; "
            "all ranks need the same folder under the same path (an absolute recover.fileroot, mounted everywhere)"
        )


def _make_probe(folder: Path) -> Path | None:
    """An empty file of a name that no node can have cached; None where there is no room for it."""
    for leftover in folder.glob(".shared-*"):  # of a start that was killed
        leftover.unlink(missing_ok=True)
    probe = folder.absolute() / f".shared-{uuid.uuid4().hex}"
    try:
        probe.touch(exist_ok=False)
    except OSError as error:  # a full disk: what becomes of that is for the first snapshot to say
        logger.warning("cannot make %s, so that it is not known whether all ranks see this folder: %s", probe, error)
        return None
    return probe


def _look(holder: Any, probe: str) -> str | None:
    return None if Path(probe).exists() else f"rank {get_rank()} on {socket.gethostname()}"
